"""Random weights by the kernels in C: the plain formulas in float64 on the same noise, and the plain path's twin."""

import collections
import copy
import itertools
import math

import pytest
import test_weights as works
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.accelerate import cpu, weight_groups
from slimbayes.accelerate import weight_samples as apply_weights
from slimbayes.accelerate.cpu import weight_operation
from slimbayes.accelerate.cpu import weights as kernel
from slimbayes.core import context
from slimbayes.core.conversion import find_record
from slimbayes.core.facts import facts_of
from slimbayes.core.posteriors import positive

pytestmark = pytest.mark.skipif(cpu._load() is None, reason="no compiled kernels: no C compiler was at hand")
F64 = torch.float64
CHUNK = 16384
SHAPES = [
    (1,),
    (7,),
    (1, 1),
    (3, 1),
    (1, 5),
    (37, 29),
    (5, 3, 2, 3),
    (130, 257),
    (3, 20011),
    (20011, 2),
    (0, 4),
    (4, 0),
]


def group(shape, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    mean = normal(*shape)
    if rank == 0 or len(shape) == 1:
        return mean, 2.0 * normal(*shape) - 2.0
    columns = math.prod(shape[1:])
    return mean, 0.5 * normal(shape[0], rank) - 1.0, 0.5 * normal(columns, rank) - 1.0


def scale(parameters):
    mean, *spread = parameters
    if len(spread) == 1:
        return positive(spread[0])
    return (spread[0].exp() @ spread[1].exp().t()).view(mean.shape)


def reference(groups, centred, noises, grads, factor, priors):
    """Samples, KLs and gradients in float64, by autograd."""
    exact = [[p.to(F64).requires_grad_() for p in parameters] for parameters in groups]
    samples, kls, total = [], [], 0.0
    for parameters, alone, noise, grad, (loc, deviation) in zip(
        exact, centred, noises, grads, priors, strict=True
    ):
        sigma = scale(parameters)
        value = sigma * noise.to(F64) + (0.0 if alone else parameters[0])
        distance = parameters[0] - loc
        kl = 0.5 * (sigma.square() + distance.square()).sum() / deviation**2 - sigma.log().sum()
        samples.append(value.detach())
        logs = sigma.log()
        kls.append(
            (
                distance.square().sum().item(),
                sigma.square().sum().item(),
                logs.sum().item(),
                logs.abs().sum().item(),
            )
        )
        total = total + (value * grad.to(F64)).sum() + factor * kl
    flat = [p for parameters in exact for p in parameters]
    return samples, kls, torch.autograd.grad(total, flat, allow_unused=True)


def pulls(factor, priors):
    return [(loc, factor / s**2, factor / s**2, factor) for loc, s in priors]


def close(found, expected, tolerance=3e-6):
    """Equal up to rounding at the size of the largest element, which sums of float32 allow for."""
    assert found.shape == expected.shape
    if expected.numel():
        error = (found.to(F64) - expected).abs().max().item()
        assert error <= tolerance * max(expected.abs().max().item(), 1e-30), error


@pytest.mark.parametrize("draws", [1, 3, 11])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rank", range(6))
def test_against_float64(rank, centred, draws):
    groups = [group(shape, rank, i) for i, shape in enumerate(SHAPES)]
    alone = [centred] * len(groups)
    priors = [(0.1 * i, 0.5 + i) for i in range(len(groups))]
    made, sums = kernel.sample(groups, alone, draws, 91, [loc for loc, _ in priors])
    noises = [kernel.noise_of(g[0], draws, 91, i * draws) for i, g in enumerate(groups)]
    grads = [torch.randn(m.shape, generator=torch.Generator().manual_seed(i)) for i, m in enumerate(made)]
    samples, kls, expected = reference(groups, alone, noises, grads, 0.7, priors)
    for value, exact in zip(made, samples, strict=True):
        torch.testing.assert_close(value.to(F64), exact, rtol=2e-6, atol=1e-6)
    for (distance, squares, logs), exact in zip(sums, kls, strict=True):
        assert (distance, squares) == pytest.approx(exact[:2], rel=2e-7, abs=1e-6)
        assert abs(logs - exact[2]) <= 2e-7 * exact[3] + 1e-6  # logarithms of both signs
    needs = [[True] * len(g) for g in groups]
    found = kernel.gradients(groups, alone, draws, 91, grads, needs, pulls(0.7, priors))
    for value, exact in zip(found, expected, strict=True):
        close(value, torch.zeros_like(value, dtype=F64) if exact is None else exact)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 5])
def test_elementwise_gradients(rank):
    """Without sums there is nothing to round but single numbers."""
    groups = [group((41, 53), 0, 4), group((53,), 0, 5)]
    noises = [kernel.noise_of(g[0], 1, 5, i) for i, g in enumerate(groups)]
    grads = [torch.randn(n.shape) for n in noises]
    priors = [(0.0, 1.0), (0.3, 2.0)]
    _, _, expected = reference(groups, [False] * 2, noises, grads, 0.0, priors)
    found = kernel.gradients(groups, [False] * 2, 1, 5, grads, [[True] * 2] * 2, [kernel.NO_PULL] * 2)
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value.to(F64), exact, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads):
    groups = [group((300, 401), rank, rank) for rank in (0, 1, 2, 4)]
    grads = [torch.randn(2, 300, 401) for _ in groups]
    before = torch.get_num_threads()

    def run(count):
        torch.set_num_threads(count)
        made, sums = kernel.sample(groups, [False] * 4, 2, 17, [0.0] * 4)
        needs = [[True] * len(g) for g in groups]
        return (
            made,
            sums,
            kernel.gradients(groups, [False] * 4, 2, 17, grads, needs, pulls(0.1, [(0.0, 1.0)] * 4)),
        )

    try:
        (made, sums, found), (made2, sums2, found2) = run(1), run(threads)
    finally:
        torch.set_num_threads(before)
    assert sums == sums2
    assert all(torch.equal(a, b) for a, b in zip(made + found, made2 + found2, strict=True))


@pytest.mark.parametrize(
    "rho", [-200.0, -104.0, -90.0, -50.0, -20.0, -6.9, -1e-3, 0.0, 1e-3, 3.0, 20.0, 90.0, 800.0]
)
def test_extreme_rho(rho):
    parameters = (torch.zeros(100), torch.full((100,), rho))
    noise = kernel.noise_of(parameters[0], 1, 3, 0)
    grad = torch.randn(1, 100, generator=torch.Generator().manual_seed(4))
    priors = [(0.0, 1.0)]
    (made,), (sums,) = kernel.sample([parameters], [False], 1, 3, [0.0])
    samples, kls, expected = reference([parameters], [False], [noise], [grad], 1e-3, priors)
    torch.testing.assert_close(made.to(F64), samples[0], rtol=5e-7, atol=0)
    assert sums == pytest.approx(kls[0][:3], rel=3e-7, abs=1e-12)
    found = kernel.gradients([parameters], [False], 1, 3, [grad], [[True, True]], pulls(1e-3, priors))
    torch.testing.assert_close(found[0].to(F64), expected[0], rtol=1e-5, atol=1e-30)
    # The gradient of ρ is a sum of three, g∘ε, κσ and −κ/σ, which may cancel: its error is that of the largest.
    scale = torch.nn.functional.softplus(parameters[1].to(F64)) + 1e-7
    terms = (grad[0] * noise[0]).to(F64).abs() + 1e-3 * (scale + 1 / scale)
    allowed = 1e-6 * terms * torch.sigmoid(parameters[1].to(F64)) + 1e-30
    assert ((found[1].to(F64) - expected[1]).abs() <= allowed).all()


@pytest.mark.parametrize("level", [-60.0, -48.0, -43.5, -20.0, 0.0, 20.0, 43.0])
def test_extreme_factors(level):
    """σ from below the smallest normal float, and to none at all, up to 1e37."""
    parameters = (torch.zeros(9, 130), torch.full((9, 1), level), torch.full((130, 1), level))
    (made,), ((_, _, logs),) = kernel.sample([parameters], [True], 1, 3, [0.0])
    sigma = (parameters[1].exp() @ parameters[2].exp().t()).to(F64)
    expected = sigma.log().sum().item()
    assert logs == pytest.approx(expected, rel=1e-3 if 0 < sigma[0, 0] < 1e-38 else 3e-7, abs=1e-3)
    noise = kernel.noise_of(parameters[0], 1, 3, 0).to(F64)
    torch.testing.assert_close(made.to(F64), sigma * noise, rtol=1e-6, atol=1e-44)


def test_not_a_number_stays_one():
    rho = torch.zeros(2000)
    rho[1234] = float("nan")
    (made,), ((_, squares, logs),) = kernel.sample([(torch.zeros(2000), rho)], [False], 1, 3, [0.0])
    assert made.isnan().sum() == 1 and made[0, 1234].isnan() and math.isnan(squares) and math.isnan(logs)
    (_, found) = kernel.gradients(
        [(torch.zeros(2000), rho)], [False], 1, 3, [torch.ones(1, 2000)], [[True] * 2], [kernel.NO_PULL]
    )
    assert found.isnan().sum() == 1


def test_closed_form_of_a_kl():
    model = sb.bayesianize(nn.Linear(30, 20), sb.MeanField.paper(prior=sb.Normal(0.2, 0.5)))
    draws = sb.draw(model, torch.randn(4, 30))
    (facts,) = facts_of(draws, find_record(model))
    assert facts.byproducts
    found = sb.elbo(draws, torch.zeros(4, dtype=torch.long), model, num_data=9).kl
    assert not facts.byproducts
    torch.testing.assert_close(found, sb.kl(model), rtol=1e-6, atol=0)


def test_what_is_not_needed_is_not_made():
    groups = [group((8, 9), 2), group((8, 9), 0)]
    grads = [None, torch.randn(1, 8, 9)]
    needs = [[True, False, False], [False, True]]
    found = kernel.gradients(groups, [False] * 2, 1, 3, grads, needs, [kernel.NO_PULL] * 2)
    assert [f is None for f in found] == [False, True, True, True, False]
    assert (found[0] == 0).all()


def test_strided_gradients():
    parameters = group((8, 9), 2)
    grad = torch.randn(9, 8).t().unsqueeze(0)
    run = [
        kernel.gradients([parameters], [False], 1, 3, [g], [[True] * 3], [kernel.NO_PULL])
        for g in (grad, grad.contiguous())
    ]
    assert all(torch.equal(a, b) for a, b in zip(*run, strict=True))
    expanded = kernel.gradients(
        [parameters], [False], 1, 3, [torch.ones(()).expand(1, 8, 9)], [[True] * 3], [kernel.NO_PULL]
    )
    assert torch.equal(expanded[0], torch.ones(8, 9))


def test_who_is_refused():
    mean, rho = torch.zeros(4, 6), torch.zeros(4, 6)
    assert kernel.usable([(mean, rho)])
    refused = [
        (mean.double(), rho.double()), (mean.t(), rho.t()), (mean, torch.zeros(6)), (mean, rho.to("meta")),
        (mean, torch.zeros(4, 2), torch.zeros(5, 2)), (mean, torch.zeros(4, 2), torch.zeros(6, 3)),
    ]  # fmt: skip
    assert not any(kernel.usable([one]) for one in refused)
    for switch in ("native", "noise"):
        with sb.fast_paths(**{switch: False}):
            assert not kernel.usable([(mean, rho)])


SHAPES = [(7, 5), (7,), (3, 7), (3,)]  # of the network's tensors, in their order


@pytest.fixture
def same_noise(monkeypatch):
    """Every draw has the seed 100, 101, ... by the kernels, and their noise where they are turned off."""
    state = {}

    def restart(together):
        state.update(seeds=itertools.count(100), together=together, seen=collections.Counter())

    fresh = context.fresh_noise

    def fresh_noise(kind, size, dtype, device):
        if kind != "normal" or dtype != torch.float32:
            return fresh(kind, size, dtype, device)
        like, draws = torch.empty(size[3:]), size[0] * size[1]
        if not state["together"]:
            return kernel.noise_of(like, draws, next(state["seeds"]), 0).view(size)
        seed = 100 + state["seen"][like.shape]  # one for all tensors of a draw, which differ in shape
        state["seen"][like.shape] += 1
        return kernel.noise_of(like, draws, seed, SHAPES.index(tuple(like.shape)) * draws).view(size)

    monkeypatch.setattr(kernel, "new_seed", lambda: next(state["seeds"]))
    monkeypatch.setattr(context, "fresh_noise", fresh_noise)
    return restart


@pytest.fixture
def unseeded(monkeypatch):
    """The works of the other test in float32 and without a seed, for seeded draws have noise of their own."""
    plain = sb.draw
    monkeypatch.setattr(sb, "draw", lambda model, x, **named: plain(model, x, **{**named, "seed": None}))
    monkeypatch.setattr(works, "X", works.X.float())


def run(work, model, kernels, restart, together=True):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    restart(together)
    with sb.fast_paths(native=kernels, log_sigma=False):
        value = work(model)
    return value, works.gradients(model)


NAMES = [name for name in works.METHODS if "local" not in name and "capped" not in name]


@pytest.mark.parametrize("most", [0, weight_groups.MOST], ids=["each", "together"])
@pytest.mark.parametrize(
    "work", [work for work in works.WORKS if work is not works.checkpointed], ids=lambda work: work.__name__
)
@pytest.mark.parametrize("name", NAMES)
def test_the_twins_numbers(name, work, most, same_noise, unseeded, monkeypatch):
    monkeypatch.setattr(weight_groups, "MOST", most)
    model = works.network(works.METHODS[name], torch.float32)
    fast, fast_gradients = run(work, model, True, same_noise, most > 0)
    plain, plain_gradients = run(work, model, False, same_noise, most > 0)
    torch.testing.assert_close(fast, plain, rtol=2e-5, atol=2e-5)
    for key, expected in plain_gradients.items():
        size = expected.abs().max().item()
        torch.testing.assert_close(
            fast_gradients[key], expected, rtol=2e-5, atol=1e-5 * max(size, 1), msg=key
        )


@pytest.mark.parametrize("name", ["meanfield", "ktied", "meanfield flipout"])
def test_the_kernels_are_used(name, monkeypatch):
    calls = []
    inner = kernel._call
    monkeypatch.setattr(kernel, "_call", lambda which, *rest: calls.append(which) or inner(which, *rest))
    model = works.network(works.METHODS[name], torch.float32)
    sb.elbo(sb.draw(model, works.X.float()), works.Y, model, num_data=20).loss.backward()
    assert calls.count("slimbayes_sample_weights") == 1
    assert calls.count("slimbayes_weight_gradients") == 1
    del calls[:]
    with torch.no_grad():
        sb.draw(model, works.X.float(), samples=4)
    assert calls == ["slimbayes_sample_weights"]


def test_the_same_draws_with_and_without_gradients():
    for name in NAMES:
        model = works.network(works.METHODS[name], torch.float32)
        for samples in (1, 3):
            torch.manual_seed(5)
            expected = sb.draw(model, works.X.float(), samples=samples)
            torch.manual_seed(5)
            with torch.no_grad():
                assert torch.equal(sb.draw(model, works.X.float(), samples=samples), expected)


def test_moments_of_a_draw():
    model = sb.bayesianize(nn.Linear(40, 30, bias=False), sb.KTied.paper(stddev_init=0.3))
    posterior = model.bayes.weight(model.weight.detach())
    made = []
    with torch.no_grad():
        for _ in range(400):
            (value,) = sb.draw(model, torch.eye(40))
            made.append(value.t())
    made = (torch.stack(made) - posterior.loc) / posterior.scale
    assert (
        made.mean().abs() < 5 / (400 * 1200) ** 0.5 and abs(made.var().item() - 1) < 5 * (2 / 480_000) ** 0.5
    )
    assert made.mean(0).abs().max() < 5 / 20


def test_a_weight_in_both_forms_has_one_noise():
    """Tied layers of which one wants the weight and the other its deviation."""
    model = sb.bayesianize(nn.Linear(6, 6, bias=False), sb.MeanField.paper(stddev_init=0.2))
    rule, draw = model.bayes, context.Draw(1, 2, 3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), context.activate(draw):
            frame = context.frame("", 6)
            whole = rule.sample_tensor(model, "weight", frame)
            alone = rule.sample_tensor(model, "weight", frame, centred=True)
        torch.testing.assert_close(whole - model.weight, alone, rtol=1e-4, atol=1e-6)
        draw = context.Draw(1, 2, 3)


def test_vectorised_jacobian():
    model = works.network(sb.MeanField.paper(), torch.float32)
    out = sb.draw(model, works.X.float()) + sb.kl(model)
    parameters = list(model.parameters())
    rows = torch.eye(out.numel()).view(-1, *out.shape)
    together = torch.autograd.grad(out, parameters, rows, is_grads_batched=True, retain_graph=True)
    for i in (0, out.numel() - 1):
        for all_rows, one in zip(
            together, torch.autograd.grad(out, parameters, rows[i], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(all_rows[i], one, rtol=1e-5, atol=1e-6)


def test_checkpointing_makes_the_same_noise_again():
    torch.manual_seed(0)
    model = works.network(sb.KTied.paper(), torch.float32)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    wrapped, x = Inside(), works.X.float()

    def loss():
        torch.manual_seed(9)
        return sb.draw(wrapped, x).square().sum()

    loss()
    loss().backward()
    weight, step = model[0].weight, 1e-2
    keep, values = weight[0, 0].item(), []
    for sign in (1, -1):
        weight.data[0, 0] = keep + sign * step
        values.append(loss().item())
    assert weight.grad[0, 0].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2, abs=1e-2)


def test_finite_differences():
    model = works.network(sb.KTied.paper(rank=3), torch.float32)
    x, y = works.X.float(), works.Y

    def loss():
        torch.manual_seed(9)
        return sb.elbo(sb.draw(model, x, samples=3), y, model, num_data=20).loss

    loss().backward()
    for parameter in model.parameters():
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        keep, values = flat[0].item(), []
        for sign in (1, -1):
            flat[0] = keep + sign * 1e-2
            values.append(loss().item())
        flat[0] = keep
        assert grad[0].item() == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2, abs=2e-3)


def test_a_copy_and_a_changed_network():
    """What was gathered for a network is not used for another, nor after a change."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), sb.MeanField.paper())
    x = torch.randn(6, 5)
    sb.draw(model, x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    torch.manual_seed(1)
    expected = sb.draw(other, x)
    sb.draw(model, x)
    torch.manual_seed(1)
    assert torch.equal(sb.draw(other, x), expected)
    model[0].weight = nn.Parameter(torch.full((4, 5), 50.0))
    assert sb.draw(model, torch.ones(6, 5)).abs().max() > 10
    model[0].bayes.weight.rho.data = torch.full((4, 5), 30.0)
    assert sb.draw(model, x).std() > 5
    model.double()
    assert sb.draw(model, x.double()).dtype == F64
    model.float()
    model[0].bayes.weight.rho = nn.Parameter(torch.full((4, 5), -50.0))
    assert sb.draw(model, torch.ones(6, 5)).shape == (1, 6, 3)
    sb.kl(model)


def test_no_memory_of_a_network_is_kept():
    import gc
    import weakref

    model = sb.bayesianize(nn.Linear(5, 4), sb.MeanField.paper())
    sb.elbo(
        sb.draw(model, torch.randn(6, 5)), torch.zeros(6, dtype=torch.long), model, num_data=9
    ).loss.backward()
    gone = weakref.ref(model), weakref.ref(model.weight)
    del model
    gc.collect()
    assert all(one() is None for one in gone)


def test_a_spread_of_another_shape_is_left_to_torch():
    model = sb.bayesianize(nn.Linear(5, 4, bias=False), sb.MeanField.paper())
    model.bayes.weight.rho = nn.Parameter(torch.full((1, 5), -3.0))
    assert sb.draw(model, torch.randn(6, 5)).shape == (1, 6, 4)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(cpu, "_load", lambda: None)
    model = works.network(sb.KTied.paper(), torch.float32)
    sb.elbo(sb.draw(model, works.X.float()), works.Y, model, num_data=20).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_turned_off_between_a_draw_and_its_gradients():
    model = works.network(sb.MeanField.paper(), torch.float32)
    result = sb.elbo(sb.draw(model, works.X.float()), works.Y, model, num_data=20)
    with sb.fast_paths(native=False):
        result.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


class TestOperation:
    def arguments(self, requires_grad=True):
        groups = [group((5, 7), 0), group((5, 7), 2), group((4,), 0)]
        tensors = [t.clone().requires_grad_(requires_grad) for g in groups for t in g]
        return tensors, [2, 3, 2], [0.0, 0.3, 0.0], [1.0, 4.0, 0.0], [1.0, 0.0, 0.0], torch.tensor([77]), 2

    def test_contract(self):
        torch.library.opcheck(weight_operation.sampled_weights.overload, self.arguments())

    def test_values_and_gradients(self):
        tensors, sizes, centres, precisions, pulled, seed, draws = self.arguments()
        values, total = weight_operation.sampled_weights(
            tensors, sizes, centres, precisions, pulled, seed, draws
        )
        (sum(v.sin().sum() for v in values) + 0.3 * total).backward()
        exact = [t.detach().to(F64).requires_grad_() for t in tensors]
        groups, loss = weight_operation._groups(exact, sizes), 0.0
        for i, g in enumerate(groups):
            noise = kernel.noise_of(g[0].float(), draws, 77, i * draws).to(F64)
            sigma = scale(g)
            loss = loss + (g[0] + sigma * noise).sin().sum()
            if precisions[i]:
                squares = precisions[i] * sigma.square() + pulled[i] * (g[0] - centres[i]).square()
                loss = loss + 0.3 * (0.5 * squares - sigma.log()).sum()
        loss.backward()
        for found, expected in zip(tensors, exact, strict=True):
            close(found.grad, expected.grad, 1e-5)

    @pytest.mark.parametrize("name", ["meanfield", "ktied", "meanfield shifted prior", "meanfield tied mean"])
    @pytest.mark.parametrize("compile", [torch.compile, sb.compile])
    def test_compiled_step(self, name, compile, monkeypatch):
        torch._dynamo.reset()
        monkeypatch.setattr(torch, "randint", lambda *a, **k: torch.full((1,), 100))
        monkeypatch.setattr(kernel, "new_seed", lambda: 100)
        model = works.network(works.METHODS[name], torch.float32)
        x, y = works.X.float(), works.Y

        def step(x, y):
            result = sb.elbo(sb.draw(model, x, samples=2), y, model, num_data=20)
            return result.loss, result.kl

        loss, kl = compile(step, fullgraph=True)(x, y)
        loss.backward()
        found = works.gradients(model)
        model.zero_grad(set_to_none=True)
        expected, expected_kl = step(x, y)
        expected.backward()
        torch.testing.assert_close((loss, kl), (expected, expected_kl), rtol=1e-5, atol=1e-5)
        for key, value in works.gradients(model).items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
        torch._dynamo.reset()


def test_the_plan_holds_no_parameters():
    known = apply_weights.Byproduct([], [], [])
    assert not any(isinstance(v, torch.Tensor) for v in vars(apply_weights._Plan(known, [])).values())


@pytest.mark.parametrize("first", ["nll", "kl"])
def test_each_part_of_the_loss_has_its_backward_pass(first):
    """The KL is made with the samples, and yet neither needs the other's graph."""
    model = works.network(sb.KTied.paper(), torch.float32)
    x = torch.randn(6, 5)
    torch.manual_seed(3)
    whole = sb.elbo(sb.draw(model, x), works.Y, model, num_data=20)
    (whole.nll + whole.kl).backward()
    expected = works.gradients(model)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    parts = sb.elbo(sb.draw(model, x), works.Y, model, num_data=20)
    for part in (first, "kl" if first == "nll" else "nll"):
        getattr(parts, part).backward()
    for key, value in works.gradients(model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


def test_a_parameter_changed_before_its_backward_pass_is_noticed():
    model = works.network(sb.MeanField.paper(), torch.float32)
    loss = sb.draw(model, torch.randn(6, 5)).square().sum()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("all_frozen", [True, False])
def test_what_is_unfrozen_after_a_draw_has_the_gradient_of_its_kl(all_frozen):
    model = works.network(sb.MeanField.paper(), torch.float32)
    for parameter in list(model.parameters()) if all_frozen else [model[0].weight]:
        parameter.requires_grad_(False)
    sb.draw(model, torch.randn(6, 5))
    model.requires_grad_(True)
    sb.kl(model).backward()
    found = works.gradients(model)
    model.zero_grad(set_to_none=True)
    sb.kl(model).backward()  # no draw before it
    for key, value in works.gradients(model).items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_kl_without_gradients_has_none(off):
    model = works.network(sb.MeanField.paper(), torch.float32)
    draws = sb.draw(model, torch.randn(6, 5))
    with off():
        assert not sb.elbo(draws, works.Y, model, num_data=20).kl.requires_grad
        assert not sb.kl(model).requires_grad
