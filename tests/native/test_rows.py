"""Factors on rows by the CPU kernels, against the plain formulas given the same noise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.accelerate import cpu, factor_samples, switches
from slimbayes.accelerate.cpu import factor_sweep
from slimbayes.accelerate.cpu import rows as kernels
from slimbayes.core.context import Draw, activate

pytestmark = pytest.mark.skipif(cpu._load() is None, reason="the kernels are not compiled")

F64 = torch.float64
# Sums of n float32 products: √n roundings of half a unit each, and the factor's own few.
NEAR = {"rtol": 2e-5, "atol": 2e-5}
KINDS = ("point", "normal", "cauchy")


def parameters(components: int, channels: int, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    loc = 1 + 0.3 * torch.randn(components, channels)
    return loc, None if kind == "point" else torch.randn(components, channels) - 2


def plain(source, loc, rho):
    """f [K, lines, C] in float64 with the kernels' noise, before the clip."""
    if rho is None:
        return loc.unsqueeze(1).expand(-1, source.lines, -1)
    noise = kernels.noise(source, loc.detach().float()).double()
    return loc.unsqueeze(1) + (F.softplus(rho) + 1e-7).unsqueeze(1) * noise


def clipped(value, clip):
    return value if clip is None else value.clamp(-clip, clip)


CASES = [
    # components, lines, rows to a line, positions, channels
    (1, 1, 1, 1, 1),
    (2, 5, 1, 1, 7),
    (4, 37, 1, 1, 784),
    (3, 2, 9, 1, 33),
    (2, 1, 100, 1, 400),
    (2, 3, 2, 17, 16),
    (1, 70, 1, 64, 3),
    (2, 20, 1, 1, 1500),
    (2, 1, 3, 5, 2100),
    (1, 2000, 1, 1, 10),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clip", [None, 1.2])
def test_values_and_gradients(case, last, kind, clip):
    components, lines, rows, inner, channels = case
    torch.manual_seed(0)
    loc, rho = parameters(components, channels, kind)
    bias = torch.randn(components, channels)
    source = kernels.Source(kind, lines, clip, seed=12345, stream=1)
    count = components * lines * rows
    size = (count, inner, channels) if last else (count, channels, inner)
    x, grad = torch.randn(size), torch.randn(size)
    shape = kernels.Shape(rows, inner, last, count)
    y = kernels.product(x, loc, rho, bias, source, shape, torch.empty_like(x))
    out = torch.empty_like(x)
    made = kernels.gradients(grad, x, loc, rho, source, shape, out, (True, rho is not None, True))

    wide = [None if t is None else t.double().requires_grad_() for t in (x, loc, rho, bias)]
    factor = clipped(plain(source, wide[1], wide[2]), clip).flatten(0, 1).repeat_interleave(rows, 0)
    shift = wide[3].repeat_interleave(lines * rows, 0)
    at = 1 if last else 2
    expected = wide[0] * factor.unsqueeze(at) + shift.unsqueeze(at)
    torch.testing.assert_close(
        y.double(), expected.detach(), rtol=1e-6, atol=2e-5 if kind == "cauchy" else 3e-6
    )
    expected.backward(grad.double())
    top = 1.0
    for ours, theirs in zip((out, *made), wide, strict=True):
        if theirs is None:
            assert ours is None
            continue
        # A sum of Cauchy numbers is as exact as its largest term lets it be.
        top = float(theirs.grad.abs().max()) if kind == "cauchy" else math.sqrt(lines * rows * inner)
        torch.testing.assert_close(ours.double(), theirs.grad, rtol=1e-5, atol=1e-6 * max(1.0, top))


def test_the_clip_is_reached_and_has_no_gradient():
    loc, rho = torch.full((1, 8), 3.0), torch.full((1, 8), 1.0)
    source = kernels.Source("normal", 400, 3.0, seed=3)
    shape = kernels.Shape(1, 1, True, 400)
    x = torch.ones(400, 8)
    y = kernels.product(x, loc, rho, None, source, shape, torch.empty_like(x))
    assert float(y.max()) == 3.0 and float((y == 3.0).float().mean()) > 0.4
    made = kernels.gradients(x, x, loc, rho, source, shape, None, (True, True, False))
    assert torch.equal(made[0][0], (plain(source, loc.double(), rho.double()).abs() <= 3.0).sum(1)[0].float())


@pytest.mark.parametrize("last", [True, False])
def test_threads_do_not_change_a_bit(last):
    loc, rho = parameters(3, 50, "normal")
    source, results = kernels.Source("normal", 90, 10.0, 7), []
    x, grad = torch.randn(2, 3 * 90, *((300, 50) if last else (50, 300))).unbind(0)
    shape = kernels.Shape(1, 300, last, 270)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, own = torch.empty_like(x), torch.empty_like(x)
            kernels.product(x, loc, rho, loc, source, shape, out)
            made = kernels.gradients(grad, x, loc, rho, source, shape, own, (True, True, True))
            folded = [torch.zeros(50, 300), torch.zeros(3, 50), torch.zeros(3, 300)]
            kernels.fold(x[:3].reshape(3, 50, 300), x[0].reshape(50, 300), None, None, *folded, True)
            results.append([out, own, *made, kernels.noise(source, loc), *folded])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_noise_is_standard_and_does_not_depend_on_the_rows():
    loc, rho = torch.zeros(2, 300), torch.zeros(2, 300)
    source = kernels.Source("normal", 500, seed=5)
    noise = kernels.noise(source, loc)
    assert abs(float(noise.mean())) < 4 / math.sqrt(noise.numel())
    assert abs(float(noise.var()) - 1) < 4 * math.sqrt(2 / noise.numel())
    assert abs(float((noise[0] * noise[1]).mean())) < 4 / math.sqrt(noise[0].numel())
    flat = noise.flatten(0, 1)
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 4 / math.sqrt(flat.numel())
    assert len(noise.unique()) > 0.98 * noise.numel()
    one, many = torch.ones(1000, 300), torch.ones(4000, 300)
    first = kernels.product(one, loc, rho, None, source, kernels.Shape(1, 1, True, 1000), one)
    other = kernels.product(many, loc, rho, None, source, kernels.Shape(4, 1, True, 4000), many)
    assert torch.equal(first.repeat_interleave(4, 0), other)


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 40), (4, 70, 784), (3, 33, 31)])
def test_gradients_of_folded_weights(sides, size):
    draws, m, n = size
    own, weight, before = torch.randn(draws, m, n), torch.randn(m, n), torch.randn(m, n)
    left, right = (torch.randn(draws, k) if side else None for k, side in zip((m, n), sides, strict=True))
    grad_w, grad_l, grad_r = before.clone(), torch.empty(draws, m), torch.empty(draws, n)
    kernels.fold(own, weight, left, right, grad_w, grad_l, grad_r, True)
    wide = [torch.ones(draws, k, dtype=F64) if f is None else f.double() for k, f in ((m, left), (n, right))]
    w, a, b = (t.double().requires_grad_() for t in (weight, *wide))
    (w * a.unsqueeze(2) * b.unsqueeze(1)).backward(own.double())
    torch.testing.assert_close(grad_w.double(), before.double() + w.grad, **NEAR)
    torch.testing.assert_close(grad_l.double(), a.grad, **NEAR)
    torch.testing.assert_close(grad_r.double(), b.grad, **NEAR)


def test_scales_far_out():
    """softplus and its slope where e^ρ vanishes and where it overflows, through a factor without a location."""
    rho = torch.tensor([[-80.0, -30.0, -10.0, -1.0, 0.0, 1.0, 10.0, 30.0, 80.0, 1000.0]])
    loc = torch.zeros_like(rho)
    source, shape = kernels.Source("normal", 1, seed=1), kernels.Shape(1, 1, True, 1)
    noise, one = kernels.noise(source, loc).double()[0], torch.ones_like(rho)
    y = kernels.product(one, loc, rho, None, source, shape, torch.empty_like(one))
    torch.testing.assert_close(y.double(), noise * (F.softplus(rho.double()) + 1e-7), rtol=1e-6, atol=0)
    made = kernels.gradients(one, one, loc, rho, source, shape, None, (True, True, False))
    torch.testing.assert_close(made[1].double(), noise * torch.sigmoid(rho.double()), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_kl_and_its_gradients(scale):
    locs = [torch.randn(2, 300).requires_grad_(), torch.randn(2, 1).requires_grad_()]
    rhos = [(3 * torch.randn(2, 300)).requires_grad_(), torch.randn(2, 1).requires_grad_()]
    ours = factor_samples.normal_kl(locs, rhos, 0.5, scale)
    wide = [p.detach().double().requires_grad_() for p in (*locs, *rhos)]
    theirs = factor_samples.normal_kl(wide[:2], wide[2:], 0.5, scale)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)
    (3 * ours).backward()
    (3 * theirs).backward()
    for p, q in zip((*locs, *rhos), wide, strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=2e-6, atol=2e-6 / scale**2)


SEED = 77


@pytest.fixture
def fixed(monkeypatch):
    """All layers have the same seed, which the references know."""
    monkeypatch.setattr(factor_sweep, "_new_seed", lambda: torch.tensor(SEED))


def reference(layer, x, samples, noise, clip, weight_of=lambda w: w):
    """(y, leaves) of one rank-1 layer in float64, with the kernels' noise; x is [R, ...] for all draws."""
    rule, leaves, factors = layer.bayes, {}, {}
    for stream, (name, factor) in enumerate((("r", rule.r), ("s", rule.s))):
        rho = getattr(factor.spread, "rho", None)
        kind = {"NormalPosterior": "normal", "CauchyPosterior": "cauchy"}.get(
            type(factor.spread).__name__, "point"
        )
        components = factor.loc.shape[0]
        batch = len(x) // (components * samples)
        lines = samples * (batch if noise == "example" and kind != "point" else 1)
        source = kernels.Source(kind, lines, clip, SEED, stream)
        for key, tensor in ((f"{name}.loc", factor.loc), (f"{name}.rho", rho)):
            leaves[key] = None if tensor is None else tensor.detach().double().requires_grad_()
        value = clipped(plain(source, leaves[f"{name}.loc"], leaves[f"{name}.rho"]), clip)
        factors[name] = value.flatten(0, 1).repeat_interleave(len(x) // (components * lines), 0)  # [R, C]
    for key in ("weight", "bias"):
        leaves[key] = getattr(layer, key).detach().double().requires_grad_()
    leaves["x"] = x.detach().double().requires_grad_()
    ones = (1,) * (x.dim() - 2)
    if isinstance(layer, nn.Conv2d):
        place = lambda f: f.reshape(*f.shape, *ones)  # noqa: E731
        run = lambda v: F.conv2d(v, leaves["weight"], None, layer.stride, layer.padding)  # noqa: E731
    else:
        place = lambda f: f.reshape(f.shape[0], *ones, f.shape[1])  # noqa: E731
        run = lambda v: F.linear(v, leaves["weight"])  # noqa: E731
    shift = leaves["bias"].repeat_interleave(len(x) // leaves["bias"].shape[0], 0)
    return run(leaves["x"] * place(factors["s"])) * place(factors["r"]) + place(shift), leaves


METHODS = {
    "normal": sb.Rank1.paper(components=3),
    "cauchy": sb.Rank1.paper(components=3, posterior="cauchy"),
    "random input": sb.Rank1.paper(components=3, random="input"),
    "random output": sb.Rank1.paper(components=3, random="output"),
    "point": sb.BatchEnsemble(components=3),
}
LAYERS = {
    "linear": (lambda: nn.Linear(13, 9), (13,), {}),
    "wide": (lambda: nn.Linear(1100, 40), (1100,), {}),
    "tokens": (lambda: nn.Linear(13, 9), (5, 13), {}),
    "conv": (lambda: nn.Conv2d(3, 8, 3, padding=1), (3, 6, 5), {}),
    "conv last": (lambda: nn.Conv2d(3, 8, 3, padding=1), (3, 6, 5), {"memory_format": torch.channels_last}),
}


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_layer_against_float64(kind, method, noise, leaf, fixed, monkeypatch):
    make, size, options = LAYERS[kind]
    torch.manual_seed(0)
    layer = sb.bayesianize(make(), METHODS[method])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if options:
        layer = layer.to(**options)
    x = torch.randn(3 * 2 * 4, *size)
    x = (x.to(**options) if options else x).requires_grad_(leaf)
    used = []
    original = factor_sweep.kernels.product
    monkeypatch.setattr(factor_sweep.kernels, "product", lambda *a: used.append(1) or original(*a))
    with switches.fast_paths(folded=kind in ("linear", "wide", "tokens")), activate(Draw(3, 2, 4, noise)):
        y = layer(x)
    assert used
    grad = torch.randn_like(y)
    y.backward(grad)
    expected, leaves = reference(layer, x, 2, noise, layer.bayes.clip)
    expected.backward(grad.double())
    bound = {"rtol": 1e-5, "atol": 2e-5 * float(expected.detach().abs().max() if method == "cauchy" else 1)}
    torch.testing.assert_close(y.detach().double(), expected.detach(), **bound)
    found = {"weight": layer.weight, "bias": layer.bias, **({"x": x} if leaf else {})}
    for name, factor in (("r", layer.bayes.r), ("s", layer.bayes.s)):
        found[f"{name}.loc"] = factor.loc
        if hasattr(factor.spread, "rho"):
            found[f"{name}.rho"] = factor.spread.rho
    for name, tensor in found.items():
        theirs = leaves[name].grad
        torch.testing.assert_close(
            tensor.grad.double(), theirs, rtol=2e-5, atol=1e-5 * max(1.0, float(theirs.abs().max()))
        )


def network(method=None, seed: int = 0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    return sb.bayesianize(net, METHODS["normal"] if method is None else method)


@pytest.mark.parametrize("noise", ["example", "shared"])
def test_unseeded_noise_follows_the_generator_and_seeded_draws_stay(noise):
    model, x = network(), torch.randn(5, 6)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(sb.draw(model, x, samples=2, noise=noise))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    keyed = sb.draw(model, x, noise=noise, seed=4)
    with sb.fast_paths(native=False):
        torch.testing.assert_close(keyed, sb.draw(model, x, noise=noise, seed=4))


@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", list(METHODS))
def test_second_derivatives_are_those_of_the_formulas(method, noise, fixed):
    layer = sb.bayesianize(nn.Linear(4, 3), METHODS[method])
    x = torch.randn(3 * 5, 4, requires_grad=True)
    inputs = [x, *layer.parameters()]
    with activate(Draw(3, 1, 5, noise)):
        y = layer(x).square().sum()
    first = torch.autograd.grad(y, inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    expected, leaves = reference(layer, x, 1, noise, layer.bayes.clip)
    names = {id(layer.weight): "weight", id(layer.bias): "bias", id(x): "x"}
    for name, factor in (("r", layer.bayes.r), ("s", layer.bayes.s)):
        names[id(factor.loc)] = f"{name}.loc"
        if hasattr(factor.spread, "rho"):
            names[id(factor.spread.rho)] = f"{name}.rho"
    wide = [leaves[names[id(tensor)]] for tensor in inputs]
    theirs = torch.autograd.grad(expected.square().sum(), wide, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in theirs), wide)
    for ours, other in zip((*first, *second), (*theirs, *again), strict=True):
        torch.testing.assert_close(
            ours.double(), other, rtol=1e-4, atol=1e-4 * max(1.0, float(other.abs().max()))
        )


def test_several_draws_before_one_backward_and_a_graph_kept():
    model, x = network(), torch.randn(5, 6)
    grads = []
    for together in (True, False):
        torch.manual_seed(3)
        model.zero_grad()
        losses = [sb.draw(model, x).square().mean() for _ in range(2)]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward(retain_graph=True)
            model.zero_grad()
            for loss in losses:
                loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_module_used_twice_has_one_sample(fixed):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x), self.layer(x)

    model = sb.bayesianize(Twice(), METHODS["normal"])
    first, second = sb.draw(model, torch.randn(4, 6))
    assert torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("noise", ["example", "shared"])
def test_checkpointing_sees_the_same_noise(noise, reentrant):
    class Kept(nn.Module):
        def __init__(self, keeps: bool) -> None:
            super().__init__()
            self.a, self.b, self.keeps = nn.Linear(6, 12), nn.Linear(12, 3), keeps

        def forward(self, x):
            if not self.keeps:
                return self.b(self.a(x).relu())
            return checkpoint(lambda v: self.b(self.a(v).relu()), x, use_reentrant=reentrant)

    results = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = sb.bayesianize(Kept(keeps), METHODS["normal"])
        x = torch.randn(5, 6, requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(9)
            sb.draw(model, x, noise=noise).square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_components_of_a_step_copies_and_float64():
    model = network(sb.Rank1.paper(components=4, components_per_step=2))
    out = sb.draw(model, torch.randn(5, 6))
    out.mean().backward()
    assert out.shape[0] == 2
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    a = sb.draw(model, torch.ones(5, 6))
    torch.manual_seed(5)
    assert torch.equal(a, sb.draw(twin, torch.ones(5, 6)))
    assert sb.draw(model.double(), torch.randn(5, 6, dtype=F64)).dtype == F64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sb.draw(model.float(), torch.randn(5, 6)).dtype == torch.bfloat16


def test_predictions_repeat_their_rows_late(fixed):
    model, x = network().eval(), torch.randn(7, 6)
    with torch.no_grad():
        late = sb.draw(model, x, samples=3)
        with sb.fast_paths(late=False):
            early = sb.draw(model, x, samples=3)
    torch.testing.assert_close(late, early)


@pytest.mark.parametrize("method", list(METHODS))
def test_rows_with_gaps_and_single_rows(method, fixed):
    layer = sb.bayesianize(nn.Linear(6, 4), METHODS[method])
    x = torch.randn(6, 2 * 3).t()
    assert not x.is_contiguous()
    torch.testing.assert_close(sb.draw(layer, x), sb.draw(layer, x.contiguous()))
    assert sb.draw(layer, x[:1]).shape == (3, 1, 4)
    conv = sb.bayesianize(nn.Conv2d(2, 4, 3), METHODS[method])
    image = torch.randn(2, 5, 6, 8).transpose(0, 1)[:, :, :, ::2].transpose(0, 1)[:2].expand(2, 5, 6, 4)
    image = image.transpose(0, 1)
    torch.testing.assert_close(sb.draw(conv, image), sb.draw(conv, image.contiguous()), rtol=1e-5, atol=1e-5)


def test_no_channels():
    loc = torch.zeros(2, 0)
    out = torch.empty(4, 0)
    shape, source = kernels.Shape(1, 1, True, 4), kernels.Source("normal", 2, seed=1)
    assert kernels.product(out, loc, loc, None, source, shape, out).shape == (4, 0)
    made = kernels.gradients(out, out, loc, loc, source, shape, None, (True, True, True))
    assert all(tensor.shape == (2, 0) for tensor in made)


def test_switched_off_it_is_the_old_path(monkeypatch):
    model, x = network(), torch.randn(5, 6)
    monkeypatch.setattr(factor_sweep, "seeded", None)
    with sb.fast_paths(native=False):
        assert sb.draw(model, x).shape == (3, 5, 3)
    monkeypatch.setattr(cpu, "_load", lambda: None)  # as without a compiler
    assert sb.draw(model, x).shape == (3, 5, 3)


def test_moments_of_a_draw_are_those_of_the_twin():
    torch.manual_seed(0)
    layer = sb.bayesianize(nn.Linear(3, 2), sb.Rank1.paper(components=1, dropout_rate=0.1))
    x = torch.randn(1, 3).expand(40_000, 3).contiguous()
    with torch.no_grad():
        ours = sb.draw(layer, x)[0]
        with sb.fast_paths(native=False):
            theirs = sb.draw(layer, x)[0]
    spread = theirs.std(0) / math.sqrt(len(x))
    assert bool(((ours.mean(0) - theirs.mean(0)).abs() < 6 * spread).all())
    assert bool(((ours.std(0) / theirs.std(0) - 1).abs() < 0.03).all())


def test_transforms_and_compiled_code_keep_their_own_ways():
    model, x = network(), torch.randn(4, 6)
    state = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, (x.repeat(3, 1),)).square().mean()

    grads = torch.func.grad(loss)({k: v.detach() for k, v in state.items()})
    assert all(bool(g.isfinite().all()) for g in grads.values())
    out = torch.vmap(lambda v: sb.draw(model, v, noise="mean"))(x.expand(2, 4, 6))
    assert out.shape == (2, 3, 4, 3)
