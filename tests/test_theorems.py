"""Identities of every network: the rank-1 theorem, Jensen, total variance, and the objective's terms."""

import copy
import math

import pytest
import torch
from helpers_statistics import F64
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import slimbayes as sb

# ---------------------------------------------------------------------------------------------------------
# Theorem 1 of the rank-1 paper


def second_derivatives(value, parameter):
    """The Hessian of a scalar in one parameter, [n, n], by double backward."""
    (first,) = torch.autograd.grad(value, parameter, create_graph=True)
    rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in first.flatten()]
    return torch.stack(rows)


LOSSES = {
    "cross entropy": lambda y: F.cross_entropy(y, torch.tensor([0, 2, 1, 1, 0])),
    "squares": lambda y: y.square().sum(1).mean() + y.sum(1).tanh().sum(),
}


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("factors", ["input", "output"])
def test_rank1_perturbs_like_the_full_matrix(layer, loss, factors):
    """Σ_ijkl W_ij Σ_jl W_kl ∂²f/∂W_ij∂W_kl = tr(Σ ∇²_s f), and with Σ_ik for r, at factors of one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    plain, x = copy.deepcopy(net), torch.randn(5, 4, dtype=F64)
    model = sb.bayesianize(net, sb.Rank1.paper(components=1))
    for i in (0, 2, 4):
        nn.init.ones_(model[i].bayes.r.loc)
        nn.init.ones_(model[i].bayes.s.loc)
    root = torch.randn(4, 4, dtype=F64)
    sigma = root @ root.T  # any covariance

    weight = plain[layer].weight
    hessian = second_derivatives(LOSSES[loss](plain(x)), weight).reshape(4, 4, 4, 4)
    sides = {
        "input": torch.einsum("ij,jl,kl,ijkl->", weight, sigma, weight, hessian),
        "output": torch.einsum("ij,ik,kl,ijkl->", weight, sigma, weight, hessian),
    }
    factor = model[layer].bayes.s if factors == "input" else model[layer].bayes.r
    thin = second_derivatives(LOSSES[loss](sb.draw(model, x, noise="mean")[0]), factor.loc)
    trace = torch.trace(sigma @ thin)
    assert abs(trace - sides[factors]) < 1e-10 * max(1.0, abs(trace))
    other = sides["output" if factors == "input" else "input"]
    assert abs(trace - other) > 1e-3  # s belongs to the inputs and r to the outputs, not the other way round


def test_rank1_layer_is_the_elementwise_product():
    """r ∘ (W (s ∘ x)) + b = (W ∘ r sᵀ) x + b for every component and example, by its own r, s and b."""
    torch.manual_seed(1)
    model = sb.bayesianize(nn.Linear(3, 2).double(), sb.Rank1.paper(components=2))
    nn.init.normal_(model.bias)
    x = torch.randn(4, 3, dtype=F64)
    y = sb.draw(model, x, noise="mean")
    for k in range(2):
        r, s = model.bayes.r.loc[k], model.bayes.s.loc[k]
        torch.testing.assert_close(y[k], F.linear(x, model.weight * torch.outer(r, s), model.bias[k]))


# ---------------------------------------------------------------------------------------------------------
# Jensen, and the reductions by hand

LIKELIHOODS = {
    "categorical": lambda: sb.Categorical(),
    "bernoulli": lambda: sb.Bernoulli(),
    "fixed": lambda: sb.Gaussian(precision=2.5),
    "global": lambda: sb.Gaussian(precision=0.4, learn="global"),
    "per_example": lambda: sb.Gaussian(learn="per_example"),
}


def targets_for(kind, generator, batch, width):
    if kind == "categorical":
        return torch.randint(width, (batch,), generator=generator)
    if kind == "bernoulli":
        return torch.randint(2, (batch, width), generator=generator)
    size = width // 2 if kind == "per_example" else width
    return torch.randn(batch, size, generator=generator, dtype=F64)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    draws=st.integers(1, 6),
    batch=st.integers(1, 4),
    half=st.integers(1, 3),
    scale=st.sampled_from([1e-3, 0.3, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 10**6),
)
def test_mixture_loss_is_never_above_the_average_loss(kind, draws, batch, half, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(draws, batch, 2 * half, generator=generator, dtype=F64)
    targets = targets_for(kind, generator, batch, 2 * half)
    model, likelihood = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic()), LIKELIHOODS[kind]()

    def nll(reduction):
        return sb.elbo(outputs, targets, model, 10, likelihood, reduction).nll.item()

    average, mixture = nll("average"), nll("mixture")
    slack = 1e-10 * max(1.0, abs(average))
    assert mixture <= average + slack
    best = -likelihood.log_prob(outputs, targets).amax(0).mean().item()  # every row's most likely draw
    assert best - slack <= mixture <= best + math.log(draws) + slack
    if draws == 1:
        assert mixture == pytest.approx(average, rel=1e-12, abs=1e-12)
    if kind != "per_example":  # −log p is convex in the output
        assert nll("logits") <= average + slack


def test_reductions_by_hand():
    """Two draws, two examples; the target's probabilities are ½, ¼ and ⅕, ⅘."""
    p = torch.tensor([[[0.5, 0.5], [0.2, 0.8]], [[0.75, 0.25], [0.2, 0.8]]], dtype=F64)
    targets = torch.tensor([1, 1])
    model = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic())

    def nll(reduction):
        return sb.elbo(p.log() + 3.0, targets, model, 2, reduction=reduction).nll.item()

    assert nll("average") == pytest.approx(-(math.log(0.5) + math.log(0.25) + 2 * math.log(0.8)) / 4)
    assert nll("mixture") == pytest.approx(-(math.log(0.375) + math.log(0.8)) / 2)
    odds = math.sqrt(0.75 * 0.5) / math.sqrt(0.25 * 0.5)  # mean logits are geometric means of probabilities
    assert nll("logits") == pytest.approx(-(math.log(1 / (1 + odds)) + math.log(0.8)) / 2)


def test_average_reduction_is_torchs_loss_on_the_rows():
    torch.manual_seed(2)
    model = sb.bayesianize(nn.Linear(3, 4).double(), sb.Rank1.paper(components=2))
    x, y = torch.randn(5, 3, dtype=F64), torch.randint(4, (5,))
    draws = sb.draw(model, x, samples=3)
    expected = F.cross_entropy(draws.flatten(0, 1), y.repeat(6))
    torch.testing.assert_close(sb.elbo(draws, y, model, 50).nll, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_data", [5, 60_000])
@pytest.mark.parametrize("reduction", ["average", "mixture", "logits"])
def test_loss_is_nll_plus_weighted_kl_per_datum(weight, num_data, reduction):
    torch.manual_seed(3)
    model = sb.bayesianize(nn.Linear(3, 4).double(), sb.MeanField.paper())
    x, y = torch.randn(5, 3, dtype=F64), torch.randint(4, (5,))
    draws = sb.draw(model, x, samples=2)
    result = sb.elbo(draws, y, model, num_data, reduction=reduction, kl_weight=weight)
    torch.testing.assert_close(result.kl, sb.kl(model), rtol=1e-14, atol=0.0)
    assert result.loss.item() == pytest.approx(
        result.nll.item() + weight * result.kl.item() / num_data, rel=1e-14
    )
    # Neither the batch nor the number of draws enters the KL's weight.
    half = sb.elbo(draws[:1, :2], y[:2], model, num_data, reduction=reduction, kl_weight=weight)
    assert (half.loss - half.nll).item() == pytest.approx((result.loss - result.nll).item(), abs=1e-12)
    grads = torch.autograd.grad(result.loss - result.nll, model.bayes.weight.rho)[0]
    expected = torch.autograd.grad(sb.kl(model), model.bayes.weight.rho)[0] * weight / num_data
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-18)


# ---------------------------------------------------------------------------------------------------------
# The law of total variance


def mixture_moments(kind, draws, likelihood):
    """E[y] and Var[y] = E[y²] − E[y]² of the mixture, from the draws alone."""
    if kind == "categorical":
        p = draws.softmax(-1).mean(0)
        return p, p - p.square()
    if kind == "bernoulli":
        p = draws.sigmoid().mean(0)
        return p, p - p.square()
    loc, variance = draws, torch.full_like(draws, 1 / likelihood.precision)
    if kind == "per_example":
        loc, log_precision = draws.chunk(2, -1)
        variance = (-log_precision).exp()
    mean = loc.mean(0)
    return mean, (variance + loc.square()).mean(0) - mean.square()


@pytest.mark.parametrize(
    "options", [{}, {"chunk": 6}, {"chunk": 6, "keep_draws": False}, {"keep_draws": False}]
)
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_law_of_total_variance(kind, options):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    model, likelihood = (
        sb.bayesianize(net, sb.Rank1.paper(components=2, dropout_rate=0.1)),
        LIKELIHOODS[kind](),
    )
    x = torch.randn(5, 3, dtype=F64)
    prediction = sb.predict(model, x, samples=4, seed=9, likelihood=likelihood, **options)
    draws = sb.draw(model, x, samples=4, seed=9).detach()
    mean, variance = mixture_moments(kind, draws, likelihood)
    close = {"rtol": 1e-6 if kind == "global" else 1e-10, "atol": 1e-12}  # a learned precision is in float32
    torch.testing.assert_close(prediction.mean, mean, **close)
    torch.testing.assert_close(prediction.variance, variance, **close)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, variance, **close)
    first = {
        "categorical": lambda: draws.softmax(-1),
        "bernoulli": lambda: draws.sigmoid(),
        "per_example": lambda: draws.chunk(2, -1)[0],
    }.get(kind, lambda: draws)()
    torch.testing.assert_close(prediction.epistemic, first.var(0, correction=0), **close)
    assert (prediction.epistemic > 0).all()


def test_identical_draws_have_no_epistemic_part():
    model = sb.bayesianize(nn.Linear(3, 4).double(), sb.Deterministic())
    prediction = sb.predict(model, torch.randn(2, 3, dtype=F64), samples=5, likelihood=sb.Gaussian(4.0))
    torch.testing.assert_close(prediction.epistemic, torch.zeros(2, 4, dtype=F64), rtol=0.0, atol=1e-25)
    torch.testing.assert_close(prediction.variance, torch.full((2, 4), 0.25, dtype=F64))


# ---------------------------------------------------------------------------------------------------------
# Schedules


def test_linear_annealing():
    schedule = sb.LinearAnnealing(steps=78_000)  # 390 steps × 200 epochs
    for step, weight in ((0, 1 / 78_000), (389, 390 / 78_000), (38_999, 0.5), (77_999, 1.0), (10**7, 1.0)):
        assert schedule(step) == pytest.approx(weight, rel=1e-12)


def test_step_annealing():
    schedule = sb.StepAnnealing(5e-5, 100)
    for step, weight in ((0, 0.0), (99, 0.0), (100, 0.005), (199, 0.005), (19_999, 0.995), (20_000, 1.0)):
        assert schedule(step) == pytest.approx(weight, rel=1e-12)
    assert schedule(10**7) == 1.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    first=st.integers(0, 10**6),
    later=st.integers(0, 10**6),
    steps=st.integers(1, 10**6),
    coefficient=st.floats(1e-7, 2.0),
)
def test_annealing_rises_to_one(first, later, steps, coefficient):
    for schedule in (sb.LinearAnnealing(steps), sb.StepAnnealing(coefficient, 100)):
        assert 0.0 <= schedule(first) <= schedule(first + later) <= 1.0


# ---------------------------------------------------------------------------------------------------------
# Who is decayed

BASE = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
NORM = {"1.weight", "1.bias"}


def inside(*names):
    return {f"{i}.bayes.{name}" for i in (0, 3) for name in names}


RANK1 = inside("r.loc", "r.spread.rho", "s.loc", "s.spread.rho")
SPREADS = inside("weight.rho", "bias.rho")
TIED = inside("weight.log_u", "weight.log_v", "bias.rho")
WEIGHTS = {"0.weight", "3.weight"}
GROUPS = {
    "Rank1": (sb.Rank1.paper(components=2), {"decayed": BASE, "factors": RANK1}),
    "Rank1 halfcauchy": (
        sb.Rank1.paper(components=2, posterior="halfcauchy"),
        {"decayed": BASE, "factors": inside("r.spread.rho", "s.spread.rho")},
    ),
    "Rank1 random input": (
        sb.Rank1.paper(components=2, random="input"),
        {"decayed": BASE, "factors": RANK1 - inside("r.spread.rho")},
    ),
    "Rank1 frozen": (sb.Rank1.paper(components=2, train_base=False), {"factors": RANK1}),
    "BatchEnsemble": (sb.BatchEnsemble(2), {"decayed": BASE, "factors": inside("r.loc", "s.loc")}),
    "MeanField": (sb.MeanField.paper(), {"decayed": NORM, "undecayed": (BASE - NORM) | SPREADS}),
    "MeanField weights": (
        sb.MeanField.paper(biases=False),
        {"decayed": BASE - WEIGHTS, "undecayed": WEIGHTS | inside("weight.rho")},
    ),
    "KTied": (sb.KTied.paper(), {"decayed": NORM, "undecayed": (BASE - NORM) | TIED}),
    "EMP": (sb.EMP.paper(components=2), {"decayed": BASE}),
    "ECMP": (sb.ECMP.paper(components=2), {"decayed": BASE}),
    "EMP mixing": (
        sb.EMP.paper(components=2, learn_mixing=True),
        {"decayed": BASE, "undecayed": {"1.bayes.mixing.logits", "3.bayes.mixing.logits"}},
    ),
    "MCDropout": (sb.MCDropout(), {"decayed": BASE}),
    "DropConnect": (sb.DropConnect(), {"decayed": BASE}),
    "DeepEnsemble": (sb.DeepEnsemble(2), {"decayed": BASE}),
    "Deterministic": (sb.Deterministic(), {"decayed": BASE}),
}


def small_network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", GROUPS)
def test_parameter_groups(name):
    method, expected = GROUPS[name]
    model = sb.bayesianize(small_network(), method)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = sb.parameter_groups(model, lr=0.1, weight_decay=1e-4, factor_lr_multiplier=0.5)
    assert {g["name"]: {names[id(p)] for p in g["params"]} for g in groups} == expected
    for group in groups:
        assert group["weight_decay"] == (1e-4 if group["name"] == "decayed" else 0.0)
        assert group["lr"] == (0.05 if group["name"] == "factors" else 0.1)
    assert sum(len(g["params"]) for g in groups) == sum(p.requires_grad for p in model.parameters())
    torch.optim.SGD(groups)


@pytest.mark.parametrize("name", GROUPS)
def test_norms_are_decayed_only_where_asked(name):
    method, expected = GROUPS[name]
    model = sb.bayesianize(small_network(), method)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = sb.parameter_groups(model, lr=0.1, weight_decay=1e-4, decay_norms=False)
    found = {g["name"]: {names[id(p)] for p in g["params"]} for g in groups}
    assert found.get("decayed", set()) == expected.get("decayed", set()) - NORM
    moved = expected.get("decayed", set()) & NORM
    assert found.get("undecayed", set()) == expected.get("undecayed", set()) | moved
    assert found.get("factors") == expected.get("factors")


def test_norms_of_other_libraries_are_known_by_their_names():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    class LlamaRMSNorm(Scale):
        pass

    class Normal(Scale):
        pass

    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), LlamaRMSNorm(), Normal()), sb.Deterministic())
    decayed, undecayed = sb.parameter_groups(model, 0.1, 0.1, decay_norms=False)
    assert [id(p) for p in undecayed["params"]] == [id(model[1].weight)]
    assert len(decayed["params"]) == 3
    with pytest.raises(ValueError, match="decay_norms must be True or False, got 'no'"):
        sb.parameter_groups(model, 0.1, 0.1, decay_norms="no")


def test_rules_of_several_methods_are_grouped_by_layer():
    model = sb.bayesianize(
        small_network(),
        [
            ("^0$", sb.Rank1.paper(components=2)),
            ("^1$", sb.EMP.paper(components=2, learn_mixing=True)),
            ("^3$", sb.KTied.paper()),
        ],
    )
    names = {id(p): n for n, p in model.named_parameters()}
    groups = sb.parameter_groups(model, lr=0.1, weight_decay=1e-4)
    assert {g["name"]: {names[id(p)] for p in g["params"]} for g in groups} == {
        "decayed": {"0.weight", "0.bias", *NORM},
        "undecayed": {"1.bayes.mixing.logits", "3.weight", "3.bias"} | {n for n in TIED if n[0] == "3"},
        "factors": {n for n in RANK1 if n[0] == "0"},
    }


def test_frozen_base_stays_where_it_was():
    torch.manual_seed(5)
    model = sb.bayesianize(small_network(), sb.Rank1.paper(components=2, train_base=False))
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(sb.parameter_groups(model, lr=0.5, weight_decay=0.1))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    sb.elbo(sb.draw(model, x), y, model, num_data=8).loss.backward()
    optimizer.step()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == ("bayes" not in name), name
