"""RelativeNormal: noise in proportion to the weights, against its definition, and its KL as a by-product of samples."""

import copy
import math

import pytest
import torch
from helpers_statistics import F64, scatter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import cpu
from slimbayes.core import distributions as d
from slimbayes.core.conversion import find_record, ruled_layers
from slimbayes.core.facts import facts_of
from slimbayes.core.kl import fitted, total_kl
from slimbayes.core.objective import _by_layer, _by_temperature

LEAST = 1e-3


def by_definition(q, prior, rms=None):
    """Σ KL(q‖N(μ, σ_p²)) + precision · μ²/2 with σ_p = scale · rms(μ), by torch's own distributions."""
    mean, scale = q.loc.double().flatten(), q.scale.double().flatten()
    if rms is None:
        rms = max(LEAST, math.sqrt(float(mean.detach().square().mean())))
    own = torch.distributions.Normal(mean.detach(), torch.full_like(mean, prior.scale * rms))
    around = torch.distributions.Normal(mean.detach(), scale)
    return torch.distributions.kl_divergence(around, own).sum() + 0.5 * prior.precision * mean.square().sum()


def tensors_of(model):
    """The distribution of every random tensor, each once."""
    found = {}
    for rule, layer in ruled_layers(model):
        for one in rule.random(layer):
            found.setdefault(one.name, one.pair[0])
    return found.values()


METHODS = {
    "meanfield": sb.MeanField(prior=sb.RelativeNormal(), biases=True, temperature=1.0),
    "capped": sb.MeanField(prior=sb.RelativeNormal(0.3, 0.2), stddev_max=0.11, temperature=1.0),
    "ktied-1": sb.KTied(rank=1, prior=sb.RelativeNormal(0.3), temperature=1.0),
    "ktied-2": sb.KTied(rank=2, prior=sb.RelativeNormal(), biases=True, temperature=1.0),
}


def network():
    """Layers of one shape and of others, so that some tensors are scored side by side, and sizes of weights apart."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
    )
    with torch.no_grad():
        net[2].weight.mul_(30.0)
        net[3].weight.zero_()
    return net


def loss_of(model, seed=1):
    """A draw without a seed of its own, so that the kernels may make it, and its loss."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return sb.elbo(sb.draw(model, torch.randn(6, 4, dtype=dtype)), torch.zeros(6).long(), model, 100)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fast", [True, False])
def test_is_its_definition_tensor_by_tensor(name, fast):
    model = scatter(sb.bayesianize(network(), METHODS[name]).double())
    expected = sum(by_definition(q, METHODS[name].prior) for q in tensors_of(model))
    with sb.fast_paths(fast):
        torch.testing.assert_close(sb.kl(model), expected, rtol=1e-10, atol=0.0)
        torch.testing.assert_close(loss_of(model).kl, expected, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("name", METHODS)
def test_no_gradient_passes_through_the_size(name):
    model = scatter(sb.bayesianize(network(), METHODS[name]).double())
    parameters = [p for p in model.parameters() if p.requires_grad]
    got = torch.autograd.grad(sb.kl(model), parameters, allow_unused=True)
    held = sum(by_definition(q, METHODS[name].prior) for q in tensors_of(model))
    for own, other in zip(got, torch.autograd.grad(held, parameters, allow_unused=True), strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    if name != "ktied-1":
        return
    weight = model[0].weight  # of the precision alone
    (slope,) = torch.autograd.grad(sb.kl(model), [weight])
    torch.testing.assert_close(slope, METHODS[name].prior.precision * weight.detach())


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 7)), size=st.floats(0, 1e3), sigma=st.floats(1e-4, 1e2),
    scale=st.floats(1e-2, 10), precision=st.floats(0, 10), rank=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shapes_and_sizes(shape, size, sigma, scale, precision, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    mean = size * torch.randn(shape, dtype=F64, generator=generator)
    u, v = (torch.rand(n, rank, dtype=F64, generator=generator) + 0.1 for n in shape)
    prior = sb.RelativeNormal(scale, precision)
    for q in (d.KTiedNormal(mean, sigma * u, v), d.Normal(mean, sigma * u @ v.t())):
        expected = by_definition(d.Normal(mean, sigma * u @ v.t()), prior)
        torch.testing.assert_close(
            total_kl(q, prior.distribution(mean)), expected, rtol=1e-9, atol=1e-8 * mean.numel()
        )


def test_by_monte_carlo():
    """The log-ratio of densities with σ_p held, around the means, and theirs."""
    torch.manual_seed(2)
    q, prior = d.Normal(torch.randn(30, dtype=F64), torch.rand(30, dtype=F64) + 0.1), sb.RelativeNormal(0.7)
    p = fitted(q, prior.distribution(q.loc))
    assert float(p.scale[0]) == pytest.approx(0.7 * float(q.loc.square().mean().sqrt()))
    x = q.sample((20_000,))
    terms = (q.log_prob(x) - p.log_prob(x)).sum(1) + 0.5 * prior.precision * q.loc.square().sum()
    found, error = total_kl(q, prior.distribution(q.loc)), float(terms.std()) / math.sqrt(len(terms))
    assert abs(float(terms.mean() - found)) < 5 * error and error < 0.01 * float(found)


def test_together_is_one_by_one():
    prior, sizes = sb.RelativeNormal(0.4, 0.3), (3, 8, 1)
    torch.manual_seed(3)
    means = [100.0**i * torch.randn(n, dtype=F64) for i, n in enumerate(sizes)]
    scales = [torch.rand(n, dtype=F64) + 0.1 for n in sizes]
    alone = sum(total_kl(d.Normal(m, s), prior.distribution(m)) for m, s in zip(means, scales, strict=True))
    mean, scale = torch.cat(means), torch.cat(scales)
    torch.testing.assert_close(total_kl(d.Normal(mean, scale), prior.beside(mean, sizes)), alone)
    assert abs(float(total_kl(d.Normal(mean, scale), prior.distribution(mean)) - alone)) > 1.0


@pytest.mark.parametrize("size", [0.1, 1.0, 1e3])
@pytest.mark.parametrize("method", [sb.MeanField, sb.KTied])
def test_first_spreads_are_of_the_weights_size(size, method):
    torch.manual_seed(4)
    net = nn.Linear(60, 50)
    with torch.no_grad():
        net.weight.mul_(size)
    rms = float(net.weight.detach().square().mean().sqrt())
    model = sb.bayesianize(net, method(stddev_init=0.07))
    ratio = model.bayes.weight(model.weight).scale.detach() / rms
    assert float(ratio.mean()) == pytest.approx(0.07, rel=0.05) and float(ratio.min()) > 0.5 * 0.07
    assert float(ratio.max()) < 1.6 * 0.07


@pytest.mark.parametrize("method", [sb.MeanField(), sb.KTied()], ids=str)
def test_zero_and_empty_matrices_have_a_size_all_the_same(method):
    """LoRA's B starts at 0."""
    net = nn.Linear(30, 40, bias=False)
    nn.init.zeros_(net.weight)
    model = sb.bayesianize(net, method)
    q = model.bayes.weight(model.weight)
    assert float(q.scale.mean()) == pytest.approx(0.02 * LEAST, rel=0.05)
    with sb.fast_paths(False):
        torch.testing.assert_close(sb.kl(model), by_definition(q, method.prior).float(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        float(by_definition(q, method.prior)), float(by_definition(q, method.prior, LEAST))
    )
    with pytest.warns(UserWarning, match="zero-element"):
        none = sb.bayesianize(nn.Linear(0, 3), method)
    result = sb.elbo(sb.draw(none, torch.zeros(2, 0)), torch.zeros(2).long(), none, 9)
    assert float(sb.kl(none)) == 0.0 == float(result.kl) and math.isfinite(float(result.loss))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sb.Rank1(prior=sb.RelativeNormal()),
            r"factors lie around 1, .*use prior=sb.Neutral\(0.5\) .* or sb.KTied\(\)",
        ),
        (lambda: sb.KTied(prior=sb.Neutral()), "KTied needs a prior of Normal, .*got Neutral"),
        (
            lambda: sb.Rank1(prior=sb.RelativeNormal(), perturbation="additive"),
            r"factors lie around 0, ",
        ),
        (lambda: sb.Rank1(prior=sb.RelativeNormal(), posterior="delta"), "factors lie around 1"),
        (lambda: sb.Rank1(prior=sb.RelativeNormal(), posterior="cauchy"), "factors lie around 1"),
        (lambda: sb.RelativeNormal(0.0), "RelativeNormal prior: scale must be positive"),
        (lambda: sb.RelativeNormal(math.inf), "RelativeNormal prior: scale must be positive and finite"),
        (lambda: sb.RelativeNormal(0.5, -1.0), "RelativeNormal prior: precision must be finite and at least 0"),
    ],
)  # fmt: skip
def test_refused_where_it_means_nothing(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_family_without_its_kl_is_named():
    from slimbayes.core.kl import check_pair

    with pytest.raises(
        ValueError, match=r"sb.RelativeNormal is the prior of Normal .*sb.Cauchy\(loc, scale\)"
    ):
        check_pair(d.Cauchy, d.RelativeNormal)


@pytest.mark.parametrize("name", METHODS)
def test_saved_and_read_as_text(name, tmp_path):
    from slimbayes.verbs.method_text import parse_method

    assert parse_method(repr(METHODS[name])) == METHODS[name]
    model = sb.bayesianize(network(), METHODS[name])
    sb.save(model, tmp_path / "net.safetensors")
    again = sb.load(network(), tmp_path / "net.safetensors")
    assert torch.equal(sb.kl(again), sb.kl(model))
    assert find_record(again).methods == find_record(model).methods


def test_a_text_names_it():
    from slimbayes.verbs.method_text import parse_method

    assert parse_method("KTied(prior=RelativeNormal(scale=0.3))") == sb.KTied(prior=sb.RelativeNormal(0.3))


@pytest.mark.parametrize("name", METHODS)
def test_layer_by_layer(name):
    """As where processes share out the parameters."""
    model = scatter(sb.bayesianize(network(), METHODS[name]).double())
    pairs, zero = ruled_layers(model), torch.zeros((), dtype=F64)
    layers = [layer for _, layer in pairs]
    found = _by_layer(model, layers, find_record(model), zero, _by_temperature(pairs))
    torch.testing.assert_close(found, sb.kl(model), rtol=1e-10, atol=0.0)


def test_bfloat16_is_summed_in_float32():
    model = sb.bayesianize(network(), METHODS["meanfield"]).to(torch.bfloat16)
    expected = sum(by_definition(q, METHODS["meanfield"].prior) for q in tensors_of(model))
    torch.testing.assert_close(sb.kl(model), expected.float(), rtol=1e-5, atol=0.0)
    half = sb.bayesianize(network().to(torch.bfloat16), METHODS["ktied-2"])
    assert torch.isfinite(sb.kl(half)) and half[0].bayes.weight.log_u.dtype == torch.bfloat16


def test_compiled():
    model = sb.bayesianize(network(), METHODS["ktied-2"])
    compiled = torch.compile(sb.kl, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model), sb.kl(model))
    with torch.no_grad():
        model[0].weight.mul_(7.0)  # the size is no constant of the code
    torch.testing.assert_close(compiled(model), sb.kl(model))


@pytest.mark.parametrize("method", [sb.MeanField(), sb.KTied()], ids=str)
def test_many_networks_each_have_sizes_of_their_own(method):
    """Without noise a network that trains beside others ends as the one that trains alone."""
    models = []
    for seed in range(2):
        net = network()
        with torch.no_grad():
            net[0].weight.mul_(1.0 + 9.0 * seed)
        models.append(sb.bayesianize(net, method))
    x, y = torch.randn(40, 4), torch.randint(7, (40,))
    options = {"steps": 6, "batch_size": 20, "lr": 1e-2, "noise": "mean", "precision": "64-true"}
    together, alone = copy.deepcopy(models), copy.deepcopy(models)
    sb.fit_many(together, (x, y), seeds=[1, 2], **options)
    for i, model in enumerate(alone):
        sb.fit_many([model], (x, y), seeds=[1 + i], **options)
        for (key, own), other in zip(model.named_parameters(), together[i].parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7, msg=key)
            if key == "0.bayes.weight.rho":
                assert not torch.equal(own, dict(models[i].named_parameters())[key])


class Tied(nn.Module):
    """A table and a head of one weight, a table with a padding row, and more layers."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9, bias=False)
        self.padded, self.last = nn.Embedding(5, 4, padding_idx=2), nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.second(self.first(self.last(self.table(x) + self.padded(x % 5)))))


def mixed(second=0.5):
    """Priors that follow and priors that do not, at one temperature or two, with a tie and a padding row."""
    torch.manual_seed(3)
    methods = [
        ("last", sb.MeanField.paper(prior=sb.Normal(0.1, 0.7), temperature=0.5)),
        ("first", sb.KTied(prior=sb.EmpiricalNormal(0.2), biases=True, temperature=0.5)),
        ("second", sb.MeanField(stddev_max=0.3, temperature=0.5)),
        (r"table|head|padded", sb.MeanField(prior=sb.RelativeNormal(0.3, 0.2), temperature=second)),
    ]
    return sb.bayesianize(Tied(), methods)


NETWORKS = {
    "meanfield": lambda: sb.bayesianize(network(), METHODS["meanfield"]),
    "ktied-1": lambda: sb.bayesianize(network(), METHODS["ktied-1"]),
    "ktied-3": lambda: sb.bayesianize(network(), sb.KTied(rank=3)),
    "empirical": lambda: sb.bayesianize(network(), sb.KTied(prior=sb.EmpiricalNormal(0.3), biases=True)),
    "cold": lambda: sb.bayesianize(network(), sb.KTied(temperature=0.3)),
    "mixed": mixed,
    "mixed, two temperatures": lambda: mixed(1.0),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_kl_beside_the_samples(name, samples):
    """Value and gradients are those of the plain formula in float64, scaled by the temperature."""
    model = scatter(NETWORKS[name]())
    words = isinstance(model, Tied)
    x = torch.randint(9, (6,)) if words else torch.randn(6, 4)
    draws = sb.draw(model, x, samples=samples)
    (facts,) = facts_of(draws, find_record(model))
    made = [known for known in facts.byproducts.values() if known.names and known.total is not None]
    assert bool(made) == (cpu.library() is not None)
    found = sb.elbo(draws, torch.zeros(6).long(), model, 100).kl
    (1.7 * found).backward()
    twin = copy.deepcopy(model).double()
    twin.zero_grad(set_to_none=True)
    with sb.fast_paths(False):
        exact = sb.elbo(
            sb.draw(twin, x if words else x.double(), seed=1), torch.zeros(6).long(), twin, 100
        ).kl
        (1.7 * exact).backward()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    for (key, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.grad is None or not other.grad.any():
            assert own.grad is None or not own.grad.any(), key
            continue
        size = float(other.grad.abs().max())
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-5, atol=2e-6 * size, msg=key)


def test_a_second_derivative_has_the_plain_ones():
    """The operation's own gradient cannot be differentiated: what passes on is autograd's, of the same formula."""
    for name in ("ktied-3", "empirical", "meanfield"):
        model, found = scatter(NETWORKS[name]()), []
        parameters = list(model.parameters())
        for fast in (True, False):
            with sb.fast_paths(fast):
                kl = loss_of(model).kl
            first = torch.autograd.grad(kl, parameters, create_graph=True, allow_unused=True)
            second = torch.autograd.grad(
                sum(g.square().sum() for g in first if g is not None), parameters, allow_unused=True
            )
            found.append(second)
        for own, other in zip(*found, strict=True):
            if other is not None and other.any():
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_the_size_is_that_of_the_step():
    """What was gathered for a network is kept, and none of its numbers."""
    model = sb.bayesianize(network(), sb.KTied(temperature=1.0))
    before = loss_of(model).kl.detach()
    with torch.no_grad():
        model[0].weight.mul_(100.0)
    found = loss_of(model).kl.detach()
    with sb.fast_paths(False):
        torch.testing.assert_close(found, sb.kl(model).detach(), rtol=1e-6, atol=0.0)
    assert float(found) > float(before) + 50
