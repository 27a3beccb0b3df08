"""EmpiricalNormal: a prior whose scale follows each tensor, against its definition, tensor by tensor."""

import math

import pytest
import torch
from helpers_statistics import F64, scatter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import slimbayes as sb
from slimbayes.core import distributions as d
from slimbayes.core.kl import fitted, total_kl

ALPHA, BETA = 2.01, 0.101


def by_definition(q, loc, variance=None):
    """Σ KL(q‖N(loc, σ_p²)) − log InverseGamma(σ_p²; α, β), by torch's own distributions."""
    mean, scale = q.loc.double().flatten(), q.scale.double().flatten()
    squares = (scale.square() + (mean - loc).square()).sum()
    if variance is None:
        variance = (squares + 2 * BETA) / (mean.numel() + 2 * ALPHA + 2)
    prior = torch.distributions.Normal(torch.full_like(mean, loc), variance.sqrt().expand_as(mean))
    law = torch.distributions.InverseGamma(*torch.tensor([ALPHA, BETA], dtype=F64))
    own = torch.distributions.kl_divergence(torch.distributions.Normal(mean, scale), prior).sum()
    return own - law.log_prob(variance)


def tensors_of(model):
    """The distribution of every random tensor, each once."""
    found = {}
    for module in model.modules():
        rule = getattr(module, "bayes", None)
        for one in () if rule is None or isinstance(rule, nn.ModuleDict) else rule.random(module):
            found.setdefault(one.name, one.pair[0])
    return found.values()


METHODS = {
    "meanfield": sb.MeanField.paper(prior=sb.EmpiricalNormal(), stddev_init=0.1),
    "capped": sb.MeanField.paper(prior=sb.EmpiricalNormal(), stddev_init=0.1, stddev_max=0.11),
    "ktied-1": sb.KTied.paper(rank=1, prior=sb.EmpiricalNormal(), stddev_init=0.1),
    "ktied-2": sb.KTied.paper(rank=2, prior=sb.EmpiricalNormal(0.3), stddev_init=0.1),
    "rank1": sb.Rank1.paper(components=3, prior=sb.EmpiricalNormal(1.0)),
}


def network():
    """Layers of one shape and of others, so that some tensors are scored side by side."""
    return nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fast", [True, False])
def test_is_its_definition_tensor_by_tensor(name, fast):
    torch.manual_seed(0)
    method = METHODS[name]
    model = scatter(sb.bayesianize(network(), method).double())
    expected = sum(by_definition(q, method.prior.loc) for q in tensors_of(model))
    with sb.fast_paths(fast):
        torch.testing.assert_close(sb.kl(model), expected, rtol=1e-10, atol=0.0)
        loss = sb.elbo(sb.draw(model, torch.randn(6, 4, dtype=F64)), torch.zeros(6).long(), model, 100)
    torch.testing.assert_close(loss.kl, expected, rtol=1e-10, atol=0.0)


def test_each_tensor_has_a_scale_of_its_own():
    """Joined as one tensor, a narrow and a wide layer would cost more."""
    model = sb.bayesianize(network(), METHODS["meanfield"]).double()
    with torch.no_grad():
        model[0].weight.mul_(100.0)
    together = (
        torch.cat([q.loc.flatten() for q in tensors_of(model)]),
        torch.cat([q.scale.flatten() for q in tensors_of(model)]),
    )
    with torch.no_grad():
        assert sb.kl(model).item() < float(by_definition(d.Normal(*together), 0.0)) - 10


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_over_components(reduction):
    model = scatter(
        sb.bayesianize(
            network(), sb.Rank1.paper(components=3, prior=sb.EmpiricalNormal(1.0), kl_reduction=reduction)
        ).double()
    )
    expected = sum(by_definition(q, 1.0) for q in tensors_of(model)) / (3 if reduction == "mean" else 1)
    torch.testing.assert_close(sb.kl(model), expected, rtol=1e-10, atol=0.0)


@given(
    n=st.integers(1, 40), loc=st.floats(-3, 3), size=st.floats(1e-3, 1e3), sigma=st.floats(1e-4, 1e2),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_scale_is_the_least_of_its_objective(n, loc, size, sigma, seed):
    generator = torch.Generator().manual_seed(seed)
    mean, jitter = (torch.randn(n, dtype=F64, generator=generator) for _ in range(2))
    q, p = (
        d.Normal(loc + size * mean, sigma * (0.1 * jitter).exp()),
        d.EmpiricalNormal(torch.tensor(loc, dtype=F64)),
    )
    least = total_kl(q, p)
    torch.testing.assert_close(least, by_definition(q, loc), rtol=1e-9, atol=1e-9)
    best = fitted(q, p).scale.square()
    for factor in (0.5, 0.97, 1.03, 2.0):
        assert float(by_definition(q, loc, factor * best)) > float(least) - 1e-9 * abs(float(least))


@pytest.mark.parametrize("name", ["meanfield", "ktied-2", "rank1"])
def test_gradients_need_not_pass_through_the_scale(name):
    """By the envelope theorem those with σ_p held are the same, and no others are."""
    torch.manual_seed(1)
    method = METHODS[name]
    model = scatter(sb.bayesianize(network(), method).double())
    parameters = [p for p in model.parameters() if p.requires_grad]
    got = torch.autograd.grad(sb.kl(model), parameters, allow_unused=True)
    pairs = [
        (q, fitted(q, d.EmpiricalNormal(torch.tensor(method.prior.loc, dtype=F64))))
        for q in tensors_of(model)
    ]
    held = sum(by_definition(q, method.prior.loc, p.scale.detach().square()) for q, p in pairs)
    for own, other in zip(got, torch.autograd.grad(held, parameters, allow_unused=True), strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def test_by_monte_carlo():
    torch.manual_seed(2)
    q = d.Normal(torch.randn(30, dtype=F64), torch.rand(30, dtype=F64) + 0.1)
    p = fitted(q, d.EmpiricalNormal(torch.zeros((), dtype=F64)))
    x = q.sample((20_000,))
    terms = (q.log_prob(x) - p.log_prob(x)).sum(1)
    law = torch.distributions.InverseGamma(*torch.tensor([ALPHA, BETA], dtype=F64))
    estimate = terms.mean() - law.log_prob(p.scale.square())
    found = total_kl(q, d.EmpiricalNormal(torch.zeros((), dtype=F64)))
    assert abs(float(estimate - found)) < 5 * float(terms.std()) / math.sqrt(len(terms))
    assert float(terms.std()) / math.sqrt(len(terms)) < 0.01 * float(found)


def test_shrinking_everything_is_not_free():
    prior = d.EmpiricalNormal(torch.zeros((), dtype=F64))
    mean = torch.linspace(-1, 1, 50, dtype=F64)
    costs = [
        float(total_kl(d.Normal(s * mean, s * torch.ones(50, dtype=F64)), prior))
        for s in (1e-1, 1e-2, 1e-3, 1e-4)
    ]
    assert costs == sorted(costs) and costs[-1] > costs[0] + 100


def test_padding_rows_ties_and_several_methods():
    torch.manual_seed(3)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9, bias=False)
            self.padded, self.last = nn.Embedding(5, 4, padding_idx=2), nn.Linear(4, 4)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.last(self.table(x) + self.padded(x % 5)))

    empirical, plain = (
        sb.MeanField.paper(prior=sb.EmpiricalNormal(), stddev_init=0.2),
        sb.MeanField.paper(prior=sb.Normal(0.0, 0.7)),
    )
    model = sb.bayesianize(Tied().double(), [("last", plain), (r"table|head|padded", empirical)])
    scatter(model)
    q = model.padded.bayes.weight(model.padded.weight)
    keep = torch.tensor([0, 1, 3, 4])
    table = model.table.bayes.weight(model.table.weight)  # once, whole: the head has no padding
    expected = by_definition(table, 0.0) + by_definition(d.Normal(q.loc[keep], q.scale[keep]), 0.0)
    last = model.last.bayes
    for posterior, mean in ((last.weight, model.last.weight), (last.bias, model.last.bias)):
        expected = expected + total_kl(posterior(mean), d.Normal(*torch.tensor([0.0, 0.7], dtype=F64)))
    torch.testing.assert_close(sb.kl(model), expected, rtol=1e-10, atol=0.0)


def test_bfloat16_is_summed_in_float32():
    torch.manual_seed(4)
    model = sb.bayesianize(network(), METHODS["meanfield"]).to(torch.bfloat16)
    expected = sum(by_definition(q, 0.0) for q in tensors_of(model))
    torch.testing.assert_close(sb.kl(model), expected.float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", ["meanfield", "ktied-2", "rank1"])
def test_saved_and_read_as_text(name, tmp_path):
    from slimbayes.verbs.method_text import parse_method

    method = METHODS[name]
    assert parse_method(repr(method)) == method
    model = sb.bayesianize(network(), method)
    sb.save(model, tmp_path / "net.safetensors")
    again = sb.load(network(), tmp_path / "net.safetensors")
    assert torch.equal(sb.kl(again), sb.kl(model))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sb.MeanField.paper(prior=sb.EmpiricalNormal(), tied_mean=True), "tied_mean needs"),
        (lambda: sb.Rank1.paper(posterior="cauchy", prior=sb.EmpiricalNormal(1.0)), "sb.Cauchy"),
        (lambda: sb.Rank1.paper(posterior="lognormal", prior=sb.EmpiricalNormal()), "LogNormal"),
        (
            lambda: sb.Rank1.paper(kl_reduction="monte_carlo", prior=sb.EmpiricalNormal(1.0)),
            "kl_reduction='sum'",
        ),
        (lambda: sb.EmpiricalNormal(math.nan), "loc must be finite"),
    ],
)
def test_refused_where_it_means_nothing(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_compared_with_its_own_scale():
    model = sb.bayesianize(
        nn.Linear(3, 2).double(), sb.MeanField.paper(prior=sb.EmpiricalNormal(), stddev_init=0.1)
    )
    found = sb.analysis.compare_with_prior(model)
    assert found.kl == pytest.approx(sb.kl(model).item())
    assert all(0 < row.ratio < 1 for row in found.rows)


def test_compiled():
    torch.manual_seed(5)
    model = sb.bayesianize(network(), METHODS["meanfield"])
    compiled = torch.compile(sb.kl, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model), sb.kl(model))
