"""Factors on rows: the fast paths against plain broadcasting, outputs and gradients."""

import itertools

import pytest
import torch
from helpers_matrix import CASES
from torch import nn

import slimbayes as sb
from slimbayes.core.context import Draw, Frame, activate


@pytest.fixture(autouse=True)
def plain_kernels():
    """These are the torch operations; tests/native has the kernels in C that are their twins."""
    with sb.fast_paths(native=False):
        yield


F64 = torch.float64
NEAR = {"rtol": 1e-10, "atol": 1e-12}
KINDS = [kind for kind in CASES if kind.startswith(("Linear", "Conv", "Bilinear"))]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def frame_of(extra=1, noise="example"):
    return Frame(3, 2, 4, extra, noise, None)


def tensors(shape, axis, extra, examples, last=False):
    """Rows, factor [K, S, examples, C] and bias [K, C]."""
    torch.manual_seed(0)
    x = torch.randn(24 * extra, *shape, dtype=F64)
    if last:
        x = x.contiguous(memory_format=FORMATS[x.dim()])
    channels = x.shape[axis]
    factor = torch.randn(3, 2, examples, channels, dtype=F64)
    return x, factor, torch.randn(3, channels, dtype=F64)


SHAPES = [
    ((5,), -1),
    ((7, 5), -1),
    ((2, 3, 5), -1),
    ((5, 8), 1),
    ((5, 4, 6), 1),
    ((5, 2, 3, 4), 1),
    ((1, 4, 4), 1),
]


def run(case, method, fast, noise, samples, dtype=F64, last=False, autocast=False, component_ids=None):
    """Output and all gradients of one layer, factors far from one."""
    torch.manual_seed(0)
    layer = sb.bayesianize(case.make(dtype), method)
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in case.inputs(dtype=dtype)]
    if last and inputs[0].dim() in FORMATS:
        form = FORMATS[inputs[0].dim()]
        layer = layer.to(memory_format=form)
        inputs[0] = inputs[0].detach().contiguous(memory_format=form).requires_grad_()
    with sb.fast_paths(**fast), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # With a seed, so that the noise is the same whatever path makes it.
        y = sb.draw(layer, *inputs, noise=noise, samples=samples, seed=1, **case.call)
    torch.manual_seed(2)
    y.backward(torch.randn_like(y))
    return [y, *(t.grad for t in inputs if t.is_floating_point()), *(p.grad for p in layer.parameters())]


def compare_runs(case, method, fast, near=None, **options):
    ours = run(case, method, fast, **options)
    plain = run(case, method, dict.fromkeys(("rows", "folded", "factors"), False), **options)
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **(near or NEAR))


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_step", [None, 2])
def test_layers_agree_with_the_plain_path(kind, per_step):
    for case, samples in itertools.product(CASES[kind], (1, 2)):
        method = sb.Rank1(components=3, components_per_step=per_step)
        options = {"noise": "example", "samples": samples}
        for last in (False, True):
            compare_runs(case, method, {"rows": True, "folded": False}, last=last, **options)


@pytest.mark.parametrize("factors", ["both", "input", "output"])
@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
def test_variants_agree_with_the_plain_path(factors, perturbation):
    method = sb.Rank1(components=2, factors=factors, perturbation=perturbation)
    for kind in ("Linear", "Conv2d", "ConvTranspose2d", "Bilinear"):
        for noise in ("example", "shared", "mean"):
            compare_runs(CASES[kind][0], method, {}, noise=noise, samples=2)


@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_autocast(kind):
    for method in (sb.Rank1(components=2), sb.BatchEnsemble(components=2)):
        options = {"noise": "example", "samples": 1, "dtype": torch.float32, "autocast": True}
        compare_runs(CASES[kind][0], method, {}, near={"rtol": 5e-2, "atol": 5e-2}, **options)


@pytest.mark.parametrize("noise", ["example", "shared"])
def test_factors_found_in_the_cache(noise):
    """A factor that a sampler put there beforehand is used as it is, bfloat16 too."""
    layer = sb.bayesianize(nn.Conv2d(3, 5, 3), sb.Rank1(components=2))
    layer.bayes.name = "layer"
    x = torch.randn(2 * 4, 3, 6, 6)
    examples = 4 if noise == "example" else 1
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        draw = Draw(2, 1, 4, noise)
        torch.manual_seed(0)
        for which, size in (("r", 5), ("s", 3)):
            draw.cache[f"layer.{which}"] = torch.randn(2, 1, examples, size).to(dtype)
        with activate(draw):
            results.append(layer(x))
    torch.testing.assert_close(results[0], results[1], rtol=5e-2, atol=5e-2)
    assert results[1].dtype == torch.float32


def test_an_activation_in_place_after_the_layer():
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4), nn.ReLU(inplace=True)
    )
    net = sb.bayesianize(net, sb.Rank1(components=2))
    for noise in ("example", "shared"):
        sb.draw(net, torch.randn(3, 2, 6, 6), noise=noise).sum().backward()


@pytest.mark.uncounted
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("kind", ["Linear", "Conv2d", "ConvTranspose1d"])
def test_compiled(kind, noise):
    case = CASES[kind][0]
    method = sb.Rank1(components=2)
    torch.manual_seed(0)
    layer = sb.bayesianize(case.make(F64), method)
    (x,) = case.inputs(dtype=F64)
    results = []
    for compiled in (False, True):
        layer.zero_grad()
        torch._dynamo.reset()
        work = lambda x: sb.draw(layer, x, noise=noise, samples=2, seed=5).sin().sum()  # noqa: E731
        run_it = torch.compile(work, fullgraph=True, backend="aot_eager") if compiled else work
        loss = run_it(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **NEAR)


def test_a_vectorised_jacobian_takes_the_plain_gradients():
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=2)).double()
    x = torch.randn(2, 3, dtype=torch.float64)

    def outputs(z):
        return sb.draw(model, z, seed=1)

    fast = torch.autograd.functional.jacobian(outputs, x, vectorize=True)
    torch.testing.assert_close(fast, torch.autograd.functional.jacobian(outputs, x))
