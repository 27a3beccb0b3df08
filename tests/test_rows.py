"""Factors on rows: the fast paths against plain broadcasting, outputs and gradients."""

import itertools

import pytest
import torch
from helpers_matrix import CASES
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import row_factors
from slimbayes.accelerate.factor_noise import inside, sample_factor
from slimbayes.core.context import Draw, Frame, activate
from slimbayes.core.distributions import Cauchy, Normal
from slimbayes.core.rules.base import combined, rowwise


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


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize("examples", [4, 1])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_scaled_rows(shape, axis, examples, extra, needs):
    frame = frame_of(extra)
    for last, private in itertools.product((False, True), repeat=2):
        if last and (axis != 1 or len(shape) < 3):
            continue
        results = []
        for fast in (True, False):
            x, factor, _ = tensors(shape, axis, extra, examples, last)
            x.requires_grad_(needs[0])
            factor.requires_grad_(needs[1])
            if fast:
                y = row_factors.scaled(x, factor, axis, frame, private)
                assert y.stride() == x.stride()
            else:
                y = combined(x, factor, axis, frame, torch.mul)
            (y.sin()).sum().backward()
            results.append([y, x.grad, factor.grad])
        for ours, plain in zip(*results, strict=True):
            assert (ours is None) == (plain is None)
            if ours is not None:
                torch.testing.assert_close(ours, plain, **NEAR)


@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize("examples", [4, 1])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_affine_rows(shape, axis, examples, extra):
    frame = frame_of(extra)
    for last in (False, True):
        if last and (axis != 1 or len(shape) < 3):
            continue
        x, factor, bias = tensors(shape, axis, extra, examples, last)
        leaves = [t.requires_grad_() for t in (x, factor, bias)]
        ours = row_factors.affine(x, factor, bias, axis, frame)
        plain = combined(x, factor, axis, frame, torch.mul)
        plain = combined(plain, bias[:, None, None], axis, frame, torch.add)
        torch.testing.assert_close(ours, plain, **NEAR)
        assert ours.stride() == x.stride()
        gradients = [torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, plain)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, **NEAR)
        with torch.no_grad():  # in place: the rows are ours
            for shift in (bias, None):
                wanted = plain if shift is not None else combined(x, factor, axis, frame, torch.mul)
                copy = x.clone()
                y = row_factors.affine(copy, factor, shift, axis, frame)
                assert y.data_ptr() == copy.data_ptr()
                torch.testing.assert_close(y, wanted, **NEAR)


def test_gradients_in_another_layout():
    """The gradient may come in any order of the axes, expanded, or with gaps; a shared one is not changed."""
    frame = frame_of()
    x, factor, _ = tensors((5, 4, 6), 1, 1, 4)
    last = torch.randn_like(x).contiguous(memory_format=torch.channels_last)
    gaps = torch.randn(24, 5, 4, 12, dtype=F64)[..., ::2]
    for gradient in (last, gaps, torch.ones((), dtype=F64).expand_as(x), torch.randn_like(x)):
        before = gradient.clone()
        wanted = None
        for make in (combined, rowwise):
            leaves = [x.clone().requires_grad_(), factor.clone().requires_grad_()]
            got = torch.autograd.grad(make(*leaves, 1, frame, torch.mul), leaves, gradient)
            wanted = got if wanted is None else wanted
        assert torch.equal(gradient, before)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, **NEAR)


def test_other_layouts_and_empty_rows():
    frame = frame_of()
    x = torch.randn(24, 4, 5, 6, dtype=F64).transpose(1, 2)  # neither order of the channels
    factor = torch.randn(3, 2, 4, 5, dtype=F64)
    y = rowwise(x, factor, 1, frame, torch.mul)
    torch.testing.assert_close(y, combined(x, factor, 1, frame, torch.mul), **NEAR)
    assert row_factors.scaled(torch.zeros(24, 5, 0), torch.ones(3, 2, 4, 5), 1, frame).shape == (24, 5, 0)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((5,), -1), ((2, 3), 1)])
def test_second_derivatives(shape, axis, private):
    frame = Frame(1, 2, 2, 1, "example", None)
    x = torch.randn(4, *shape, dtype=F64, requires_grad=True)
    factor = torch.randn(1, 2, 2, x.shape[axis], dtype=F64, requires_grad=True)
    bias = torch.randn(1, x.shape[axis], dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, f: row_factors.scaled(x, f, axis, frame, private), (x, factor)
    )
    affine = lambda x, f, b: row_factors.affine(x, f, b, axis, frame)  # noqa: E731
    assert torch.autograd.gradcheck(affine, (x, factor, bias))
    assert torch.autograd.gradgradcheck(affine, (x, factor, bias))


def test_transforms_and_dual_numbers_take_the_plain_path():
    frame = Frame(1, 1, 3, 1, "example", None)
    x, factor = torch.randn(3, 4), torch.randn(1, 1, 3, 4)
    out = torch.func.vmap(lambda f: row_factors.scaled(x, f, -1, frame))(factor.expand(5, 1, 1, 3, 4).clone())
    torch.testing.assert_close(out[0], x * factor[0, 0])
    _, tangent = torch.func.jvp(
        lambda x: row_factors.scaled(x, factor, -1, frame), (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent, factor[0, 0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y = row_factors.scaled(dual, factor, -1, frame)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, factor[0, 0])


def test_what_is_kept_for_backward():
    """A factor without gradient (a dropout mask) keeps no rows, rows without gradient no factor."""
    frame, x, factor = Frame(1, 1, 3, 1, "example", None), torch.randn(3, 4), torch.randn(1, 1, 3, 4)
    for needs in ((True, False), (False, True)):
        y = row_factors.scaled(
            x.clone().requires_grad_(needs[0]), factor.clone().requires_grad_(needs[1]), -1, frame
        )
        assert [saved is not None for saved in y.grad_fn.saved_tensors] == [needs[1], needs[0]]


@pytest.mark.parametrize("posterior", [Normal, Cauchy])
@pytest.mark.parametrize("clip", [None, 10.0, 1.0])
@pytest.mark.parametrize("noise", ["example", "shared"])
def test_samples_of_a_factor(posterior, clip, noise):
    """One sweep gives what shift, scale and clamp give one after the other, gradients included."""
    results = []
    for fast in (True, False):
        torch.manual_seed(0)
        loc = torch.randn(3, 5, dtype=F64, requires_grad=True)
        scale = torch.rand(3, 5, dtype=F64, requires_grad=True)
        draw = Draw(3, 2, 4, noise, seed=1)
        frame = Frame(3, 2, 4, 1, noise, draw)
        if fast:
            value = sample_factor(posterior(loc, scale / 10), frame, "layer.r", clip)
        else:
            kind = posterior.noise
            e = frame.noise_like(kind, "layer.r", (5,), F64, loc.device, noise == "example")
            value = loc[:, None, None] + scale[:, None, None] / 10 * e
            value = value if clip is None else value.clamp(-clip, clip)
        assert value.shape == (3, 2, 4 if noise == "example" else 1, 5)
        results.append([value, *torch.autograd.grad(value.sin().sum(), [loc, scale])])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, **NEAR)


def test_nothing_is_clipped_only_when_nothing_can_be():
    assert inside(torch.full((3,), -2.0), torch.full((3,), 0.1), 10.0)
    assert not inside(torch.full((3,), -7.0), torch.full((3,), 0.1), 10.0)


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
