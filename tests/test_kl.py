"""KL divergences: closed forms against quadrature and Monte Carlo, and what ``sb.kl`` adds up."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers_statistics import F64, Z, scatter, set_sigma
from scipy import integrate, stats
from torch import distributions as td
from torch import nn

import slimbayes as sb
from slimbayes.core import distributions as d
from slimbayes.core.kl import monte_carlo, total_kl

pytestmark = pytest.mark.oldest


def tensor(*values):
    return torch.tensor(values, dtype=F64)


SCIPY = {
    d.Normal: lambda loc, scale: stats.norm(loc, scale),
    d.Cauchy: lambda loc, scale: stats.cauchy(loc, scale),
    d.LogNormal: lambda loc, scale: stats.lognorm(s=scale, scale=math.exp(loc)),
    d.HalfCauchy: lambda loc, scale: stats.halfcauchy(loc, scale),
}
PAIRS = [
    (family, family, q, p)
    for family, q, p in [
        (d.Normal, (1.3, 0.5), (1.0, 0.1)),
        (d.Normal, (-0.2, 0.03), (0.4, 2.0)),
        (d.Cauchy, (1.3, 0.5), (1.0, 0.1)),
        (d.Cauchy, (0.7, 0.02), (1.0, 0.3)),
        (d.LogNormal, (1.0, 0.2), (0.0, 0.7)),
        (d.LogNormal, (-0.3, 0.9), (0.2, 0.4)),
        (d.HalfCauchy, (1.0, 0.03), (1.0, 0.1)),
        (d.HalfCauchy, (0.5, 2.0), (0.5, 0.3)),
    ]
] + [(d.Normal, d.Cauchy, (0.8, 0.2), (0.0, 0.5))]


def quadrature(q_law, p_law):
    """∫ (log q − log p) dQ = ∫₀¹ (log q − log p)(Q⁻¹(t)) dt."""

    def gap(t):
        x = q_law.ppf(t)
        return q_law.logpdf(x) - p_law.logpdf(x)

    return integrate.quad(gap, 0, 1, epsabs=1e-11, epsrel=1e-11, limit=500)[0]


@pytest.mark.parametrize(("family", "loc", "scale"), [(k, 0.7, 0.3) for k in SCIPY] + [(d.Normal, -2.0, 5.0)])
def test_log_density_is_scipys(family, loc, scale):
    x = np.linspace(0.71, 4.0, 9)
    ours = family(tensor(loc), tensor(scale)).log_prob(torch.as_tensor(x))
    np.testing.assert_allclose(ours, SCIPY[family](loc, scale).logpdf(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("q_type", "p_type", "q", "p"), PAIRS)
def test_pair_against_quadrature(q_type, p_type, q, p):
    exact = quadrature(SCIPY[q_type](*q), SCIPY[p_type](*p))
    prior = p_type(*map(tensor, p))
    if q_type is p_type:
        found = total_kl(q_type(*map(tensor, q)), prior)
        assert found.item() == pytest.approx(exact, rel=1e-7)
        return
    torch.manual_seed(0)
    many = q_type(*(tensor(v).expand(200_000) for v in q))
    terms = monte_carlo(many, prior)  # no closed form: one sample per element, unbiased
    assert terms.mean().item() == pytest.approx(exact, abs=Z * terms.std().item() / math.sqrt(terms.numel()))
    assert terms.std().item() / math.sqrt(terms.numel()) < 0.01 * exact


@pytest.mark.parametrize(("q_type", "p_type", "q", "p"), PAIRS[:-1])
def test_closed_form_against_own_samples(q_type, p_type, q, p):
    torch.manual_seed(1)
    posterior, prior = q_type(*map(tensor, q)), p_type(*map(tensor, p))
    noise = {"normal": td.Normal, "cauchy": td.Cauchy}[posterior.noise](tensor(0.0), tensor(1.0))
    x = posterior.from_noise(noise.sample((200_000,)))
    terms = posterior.log_prob(x) - prior.log_prob(x)
    error = terms.std().item() / math.sqrt(terms.numel())
    assert error < 0.02 * total_kl(posterior, prior).item()
    assert terms.mean().item() == pytest.approx(total_kl(posterior, prior).item(), abs=Z * error)


def test_cauchy_by_hand_and_symmetric():
    q, p = d.Cauchy(tensor(1.0), tensor(0.5)), d.Cauchy(tensor(3.0), tensor(1.5))
    # ((0.5 + 1.5)² + (1 − 3)²)/(4 · 0.5 · 1.5) = 8/3
    assert total_kl(q, p).item() == pytest.approx(math.log(8 / 3), rel=1e-14)
    assert total_kl(p, q).item() == pytest.approx(math.log(8 / 3), rel=1e-14)


@pytest.mark.parametrize("family", [td.Cauchy, d.Cauchy, d.LogNormal, d.HalfCauchy, d.Normal])
def test_registered_with_torch(family):
    q, p = family(tensor(0.5, 0.5), tensor(0.2, 3.0)), family(tensor(0.5), tensor(1.0))
    ours = {td.Cauchy: d.Cauchy}.get(family, family)
    elementwise = td.kl_divergence(q, p)
    assert elementwise.shape == (2,)
    total = total_kl(ours(q.loc, q.scale), ours(p.loc, p.scale))
    torch.testing.assert_close(elementwise.sum(), total, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("q_type", "p_type", "q", "p"), PAIRS[:-1])
def test_gradients(q_type, p_type, q, p):
    loc, scale = (tensor(v, v + 0.1).requires_grad_() for v in q)
    fixed = q_type is d.HalfCauchy  # its location is the prior's, and not trained
    prior = p_type(tensor(p[0]) if not fixed else loc.detach(), tensor(p[1]))
    if fixed:
        assert torch.autograd.gradcheck(lambda s: total_kl(q_type(loc.detach(), s), prior), (scale,))
    else:
        assert torch.autograd.gradcheck(lambda m, s: total_kl(q_type(m, s), prior), (loc, scale))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(5, 4), (4, 3, 2, 2)])
def test_ktied_is_the_dense_normal(rank, shape):
    torch.manual_seed(rank)
    loc = torch.randn(shape, dtype=F64, requires_grad=True)
    u = torch.rand(shape[0], rank, dtype=F64).add_(0.05).requires_grad_()
    v = torch.rand(loc[0].numel(), rank, dtype=F64).add_(0.05).requires_grad_()
    prior = d.Normal(tensor(0.2), tensor(0.3))
    tied = total_kl(d.KTiedNormal(loc, u, v), prior)
    dense = td.kl_divergence(
        td.Normal(loc, (u @ v.T).reshape(shape)), td.Normal(tensor(0.2), tensor(0.3))
    ).sum()
    torch.testing.assert_close(tied, dense, rtol=1e-10, atol=0.0)
    for mine, plain in zip(
        torch.autograd.grad(tied, (loc, u, v)), torch.autograd.grad(dense, (loc, u, v)), strict=True
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


def test_ktied_against_monte_carlo():
    torch.manual_seed(2)
    q = d.KTiedNormal(torch.randn(3, 2, dtype=F64), torch.rand(3, 2, dtype=F64), torch.rand(2, 2, dtype=F64))
    p = d.Normal(tensor(0.0), tensor(0.3))
    x = q.from_noise(torch.randn(100_000, 3, 2, dtype=F64))
    terms = (q.log_prob(x) - p.log_prob(x)).flatten(1).sum(1)
    total = total_kl(q, p).item()
    error = terms.std().item() / math.sqrt(len(terms))
    assert error < 0.01 * total
    assert terms.mean().item() == pytest.approx(total, abs=Z * error)


def test_patch_by_hand():
    points, probs = tensor([1.0, 2.0], [3.0, 0.0], [0.0, 0.0]), tensor(0.5, 0.25, 0.25)
    prior = d.Normal(tensor(0.0), tensor(0.5))  # τ = 4: τ/2 Σ p ‖M‖² = 2 (5/2 + 9/4)
    energy = 2 * (0.5 * 5 + 0.25 * 9)
    mixing = 0.5 * math.log(0.5) + 0.5 * math.log(0.25) + math.log(3)
    assert total_kl(d.Patch(points, probs, 0), prior).item() == pytest.approx(energy)
    assert total_kl(d.Patch(points, probs, 1), prior).item() == pytest.approx(energy + mixing)
    assert total_kl(d.Patch(points, probs, 2), prior).item() == pytest.approx(energy + 2 * mixing)
    uniform = d.Patch(points, torch.full((3,), 1 / 3, dtype=F64), 2)
    assert total_kl(uniform, prior).item() == pytest.approx(2 * (5 + 9) / 3)


def test_patch_is_a_mixture_of_vanishing_normals():
    """KL(Σ p_k N(M_k, ε²)‖N(0, σ²)) is the patch's formula up to a constant that knows only ε, σ and K."""
    points, prior_scale, width = np.array([-1.0, 0.4, 2.0]), 0.7, 1e-3
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    x = points[:, None] + width * nodes  # [K, 60], for expectations under each component

    def by_quadrature(probs):
        densities = stats.norm.pdf(x[..., None], points, width)  # [K, 60, K]
        gap = np.log(densities @ np.array(probs)) - stats.norm.logpdf(x, 0.0, prior_scale)
        return probs @ (gap @ weights) / math.sqrt(2 * math.pi)

    constant = math.log(prior_scale / width) - 0.5 + width**2 / (2 * prior_scale**2) - math.log(3)
    for probs in ([1 / 3] * 3, [0.6, 0.3, 0.1]):
        patch = d.Patch(tensor(*points).unsqueeze(1), tensor(*probs), 1)
        closed = total_kl(patch, d.Normal(tensor(0.0), tensor(prior_scale))).item()
        assert closed + constant == pytest.approx(by_quadrature(probs), abs=1e-6)


def test_impossible_pairs_are_refused():
    with pytest.raises(ValueError, match="no finite KL"):
        sb.Rank1.paper(posterior="cauchy", prior=sb.Normal(1.0, 0.1))
    with pytest.raises(ValueError, match="own family"):
        sb.Rank1.paper(posterior="lognormal", prior=sb.Normal(0.0, 0.1))


# ---------------------------------------------------------------------------------------------------------
# sb.kl: what is added up


def normal_element(mean, sigma, prior_mean, prior_sigma):
    ratio = sigma / prior_sigma
    return -math.log(ratio) + 0.5 * (ratio**2 + ((mean - prior_mean) / prior_sigma) ** 2 - 1)


@torch.no_grad()
def constant_meanfield(sigma=0.05, mean=0.3, **options):
    """62 weights and 9 biases, all with one mean and one σ."""
    net = nn.Sequential(
        nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2, bias=False), nn.Linear(2, 2)
    )
    model = sb.bayesianize(net.double(), sb.MeanField.paper(**options))
    for layer in (model[0], model[2], model[3], model[4]):
        layer.weight.fill_(mean)
        set_sigma(layer.bayes.weight, sigma)
        if layer.bias is not None:
            layer.bias.fill_(mean)
            set_sigma(layer.bayes.bias, sigma)
    return model


def test_sum_over_elements_and_layers():
    """A mean over elements would give 2.5, a mean over layers 45, a mean over tensors 25."""
    model = constant_meanfield()
    one = normal_element(0.3, 0.05, 0.0, 1.0)
    assert sb.kl(model).item() == pytest.approx(71 * one, rel=1e-12)
    assert 71 * one == pytest.approx(180.481, abs=1e-3)
    assert sb.kl(model).dtype == F64


def test_biases_left_out():
    model = sb.bayesianize(
        nn.Linear(4, 3).double(), sb.MeanField.paper(biases=False, prior=sb.Normal(0.1, 0.5))
    )
    set_sigma(model.bayes.weight, 0.2)
    nn.init.constant_(model.weight, -0.3)
    assert sb.kl(model).item() == pytest.approx(12 * normal_element(-0.3, 0.2, 0.1, 0.5), rel=1e-12)


def test_tied_mean_penalises_spread_alone():
    model = constant_meanfield(tied_mean=True, prior=sb.Normal(0.0, 0.1))
    total = sb.kl(model)
    assert total.item() == pytest.approx(71 * normal_element(0.0, 0.05, 0.0, 0.1), rel=1e-12)
    total.backward()
    for layer in (model[0], model[2], model[3], model[4]):
        assert torch.count_nonzero(layer.weight.grad) == 0
        assert torch.count_nonzero(layer.bayes.weight.rho.grad) == layer.weight.numel()


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (lambda: nn.Linear(8, 3), 8),
        (lambda: nn.Conv2d(4, 6, (3, 2), groups=2), 12),
        (lambda: nn.ConvTranspose1d(4, 2, 5), 20),
        (lambda: nn.Bilinear(3, 5, 2), 15),
    ],
)
@pytest.mark.parametrize("method", [sb.MeanField.paper, sb.KTied.paper])
def test_he_prior_scale(layer, fan_in, method):
    model = scatter(sb.bayesianize(layer().double(), method(prior=sb.HeNormal())))
    weight, bias = model.bayes.weight(model.weight), model.bayes.bias(model.bias)
    expected = (
        td.kl_divergence(
            td.Normal(weight.loc, weight.scale), td.Normal(tensor(0.0), tensor(math.sqrt(2 / fan_in)))
        ).sum()
        + td.kl_divergence(td.Normal(bias.loc, bias.scale), td.Normal(tensor(0.0), tensor(1.0))).sum()
    )
    torch.testing.assert_close(sb.kl(model), expected, rtol=1e-10, atol=0.0)


ELEMENT = {
    "normal": lambda m, s: normal_element(m, s, 1.0, 0.1),
    "cauchy": lambda m, s: math.log(((s + 0.1) ** 2 + (m - 1.0) ** 2) / (4 * s * 0.1)),
    "lognormal": lambda m, s: normal_element(m, s, 0.0, 0.1),
    "halfcauchy": lambda m, s: math.log((s + 0.1) ** 2 / (4 * s * 0.1)),
}


@pytest.mark.parametrize("posterior", ELEMENT)
@pytest.mark.parametrize("components", [1, 3])
def test_rank1_sum_and_mean_over_components(posterior, components):
    def total(reduction):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(2, 5, 3)).double()
        return sb.bayesianize(
            net, sb.Rank1.paper(components=components, posterior=posterior, kl_reduction=reduction)
        )

    model = scatter(total("sum"), 0.05, 0.2)
    expected = 0.0
    for layer in model:
        for factor in (layer.bayes.r, layer.bayes.s):
            scale = factor.spread(factor.loc).scale
            expected += sum(
                ELEMENT[posterior](m, s)
                for m, s in zip(factor.loc.flatten().tolist(), scale.flatten().tolist(), strict=True)
            )
    assert sb.kl(model).item() == pytest.approx(expected, rel=1e-10)
    mean = total("mean")
    mean.load_state_dict(model.state_dict())
    assert sb.kl(mean).item() == pytest.approx(expected / components, rel=1e-10)


def test_additive_factors_have_their_prior_at_zero():
    model = sb.bayesianize(
        nn.Linear(2, 2).double(), sb.Rank1.paper(components=1, perturbation="additive", factors="output")
    )
    set_sigma(model.bayes.r.spread, 0.2)
    nn.init.constant_(model.bayes.r.loc, 0.3)
    assert sb.kl(model).item() == pytest.approx(2 * normal_element(0.3, 0.2, 0.0, 0.1), rel=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        sb.BatchEnsemble(3),
        sb.Rank1.paper(components=3, posterior="delta"),
        sb.Rank1.paper(components=3, posterior="delta", kl_reduction="monte_carlo"),
        sb.MCDropout(0.3),
        sb.DropConnect(0.3),
        sb.DeepEnsemble(2),
        sb.Deterministic(),
        sb.EMP.paper(components=2, patch=("output",)),
        sb.ECMP.paper(components=2, patch=("output",), learn_mixing=True),
    ],
    ids=lambda method: type(method).__name__,
)
def test_points_and_bernoullis_have_no_kl(method):
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), method)
    assert sb.kl(model).item() == 0.0


@pytest.mark.parametrize("method", [sb.EMP, sb.ECMP])
def test_equation_6_counts_patched_and_shared_parameters(method):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    model = sb.bayesianize(net, method(3, prior_precision=0.8, init_noise=0.5))
    squares = {name: value.square().sum().item() for name, value in model.named_parameters()}
    patched = sum(squares[f"{i}.{t}"] for i in (1, 3) for t in ("weight", "bias"))
    shared = squares["0.weight"] + squares["0.bias"]
    expected = 0.4 * (patched / 3 + shared)
    assert sb.kl(model).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("method", "indices"), [(sb.EMP, 1), (sb.ECMP, 4 * 2 + 2)])
def test_equation_6_with_learned_mixing(method, indices):
    """One index for a whole EMP layer, one for every element of an ECMP layer."""
    torch.manual_seed(5)
    model = sb.bayesianize(
        nn.Linear(4, 2).double(),
        method(2, patch=("output",), prior_precision=2.0, learn_mixing=True, init_noise=1.0),
    )
    with torch.no_grad():
        model.bayes.mixing.logits.copy_(tensor(math.log(3.0), 0.0))
    energy = sum(
        p * (model.weight[k].square().sum() + model.bias[k].square().sum()).item()
        for k, p in enumerate((0.75, 0.25))
    )
    mixing = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert sb.kl(model).item() == pytest.approx(energy + indices * mixing, rel=1e-12)


class Tied(nn.Module):
    """One weight in two layers, each with a bias of its own; the first is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(self.first(x).relu()).relu())


@pytest.mark.parametrize("method", [sb.MeanField.paper(), sb.KTied.paper()], ids=["MeanField", "KTied"])
def test_tied_tensors_count_once(method):
    torch.manual_seed(6)
    model = scatter(sb.bayesianize(Tied().double(), method))
    q = [
        model.first.bayes.weight(model.first.weight),
        model.first.bayes.bias(model.first.bias),
        model.second.bayes.bias(model.second.bias),
    ]
    prior = method.prior.distribution(model.first.weight)
    expected = sum(td.kl_divergence(td.Normal(each.loc, each.scale), prior).sum() for each in q)
    torch.testing.assert_close(sb.kl(model), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("method", [sb.EMP, sb.ECMP])
def test_tied_patches_count_once_and_their_own_biases_each(method):
    torch.manual_seed(7)
    model = sb.bayesianize(
        Tied().double(), method(2, patch=(nn.Linear,), prior_precision=1.0, init_noise=0.5)
    )
    with torch.no_grad():
        model.second.bias.add_(1.0)
    tensors = (model.first.weight, model.first.bias, model.second.bias)
    expected = sum(0.25 * value.square().sum().item() for value in tensors)
    assert sb.kl(model).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        sb.MeanField.paper(),
        sb.KTied.paper(),
        sb.Rank1.paper(components=2),
        sb.Rank1.paper(components=2, posterior="cauchy"),
        sb.EMP.paper(components=2, prior_precision=1.0),
    ],
    ids=["MeanField", "KTied", "Rank1", "Cauchy", "EMP"],
)
def test_float32_under_autocast(method):
    torch.manual_seed(8)
    model = sb.bayesianize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), method)
    outside = sb.kl(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = sb.kl(model)
    assert inside.dtype == outside.dtype == torch.float32
    assert torch.equal(inside, outside)
    wide = sb.kl(copy.deepcopy(model).double())
    assert wide.dtype == F64
    torch.testing.assert_close(outside.double(), wide, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("method", [sb.MeanField.paper(), sb.KTied.paper(), sb.Rank1.paper(components=2)])
def test_bfloat16_parameters_are_summed_in_float32(method):
    torch.manual_seed(9)
    model = sb.bayesianize(nn.Linear(128, 64), method).bfloat16()
    found = sb.kl(model)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, sb.kl(copy.deepcopy(model).float()), rtol=5e-3, atol=0.0)


# ---------------------------------------------------------------------------------------------------------
# The KL of the joint mixture


def two_factor_model(components, locs, scales):
    """Two layers with one scalar factor each: the mixture lives in the plane."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    model = sb.bayesianize(
        net, sb.Rank1.paper(components=components, factors="input", kl_reduction="monte_carlo")
    )
    for layer, loc, scale in zip(model, locs, scales, strict=True):
        with torch.no_grad():
            layer.bayes.s.loc.copy_(torch.tensor(loc, dtype=F64).unsqueeze(1))
        set_sigma(layer.bayes.s.spread, torch.tensor(scale, dtype=F64).unsqueeze(1))
    return model


def estimates(model, times):
    """Independent estimates [times], differentiable."""
    return torch.func.vmap(lambda _: sb.kl(model), randomness="different")(torch.zeros(times))


def repeated(model, times):
    values = estimates(model, times).detach()
    return values.mean().item(), values.std().item() / math.sqrt(times)


def plane_kl(locs, scales):
    """KL of the equal mixture against N(1, 0.1²)² on a grid, whose error falls faster than any power."""
    axis = np.linspace(-0.5, 2.5, 501)
    cell = (axis[1] - axis[0]) ** 2

    def bell(loc, scale):
        return np.exp(-0.5 * ((axis - loc) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))

    density = sum(
        np.outer(bell(m, s), bell(n, t))
        for m, n, s, t in zip(locs[0], locs[1], scales[0], scales[1], strict=True)
    ) / len(locs[0])
    assert density.sum() * cell == pytest.approx(1.0, abs=1e-9)
    log_prior = -0.5 * ((axis - 1.0) / 0.1) ** 2 - math.log(0.1 * math.sqrt(2 * math.pi))
    gap = np.log(np.maximum(density, 1e-300)) - log_prior[:, None] - log_prior[None, :]
    return (density * gap).sum() * cell


def test_joint_mixture_against_quadrature_in_the_plane():
    """A mixture per layer would be a product of mixtures: here 20 standard errors away."""
    torch.manual_seed(10)
    locs, scales = [[0.8, 1.2, 1.1], [1.25, 0.85, 1.0]], [[0.1, 0.12, 0.05], [0.08, 0.1, 0.2]]
    mean, error = repeated(two_factor_model(3, locs, scales), 100_000)
    exact = plane_kl(locs, scales)
    assert error < 0.01 * exact
    assert mean == pytest.approx(exact, abs=Z * error)
    per_layer = sum(plane_kl([locs[i], [1.0] * 3], [scales[i], [0.1] * 3]) for i in range(2))
    assert abs(per_layer - exact) > 20 * error


def test_identical_components_are_one_component():
    torch.manual_seed(11)
    locs, scales = [[0.9] * 4, [1.3] * 4], [[0.05] * 4, [0.2] * 4]
    model = two_factor_model(4, locs, scales)
    single = normal_element(0.9, 0.05, 1.0, 0.1) + normal_element(1.3, 0.2, 1.0, 0.1)
    mean, error = repeated(model, 100_000)
    assert error < 0.02 * single
    assert mean == pytest.approx(single, abs=Z * error)


def test_separated_components_save_log_k():
    """KL = (1/K) Σ KL_k − log K where components do not overlap; mean − log K ≤ KL ≤ mean always."""
    torch.manual_seed(12)
    locs, scales = [[0.5, 0.9, 1.3, 1.7], [1.0] * 4], [[0.01] * 4, [0.1] * 4]
    model = two_factor_model(4, locs, scales)
    bound = sum(normal_element(m, 0.01, 1.0, 0.1) for m in locs[0]) / 4
    mean, error = repeated(model, 100_000)
    assert error < 0.05
    assert mean == pytest.approx(bound - math.log(4), abs=Z * error)


@pytest.mark.parametrize("posterior", ELEMENT)
def test_mixture_lies_between_its_bounds(posterior):
    torch.manual_seed(13)

    def build(reduction):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
        return sb.bayesianize(net, sb.Rank1.paper(components=3, posterior=posterior, kl_reduction=reduction))

    model, bound = build("monte_carlo"), build("mean")
    scatter(model, 0.05, 0.2)
    if posterior != "halfcauchy":
        with torch.no_grad():
            for layer in model:
                for factor in (layer.bayes.r, layer.bayes.s):
                    factor.loc.normal_(0.0 if posterior == "lognormal" else 1.0, 0.1)
    bound.load_state_dict(model.state_dict())
    upper = sb.kl(bound).item()
    mean, error = repeated(model, 50_000)
    assert upper - math.log(3) - Z * error <= mean <= upper + Z * error
    assert error < 0.1
    assert mean < upper - 3 * error  # the components differ, so the bound is not reached


def test_mixture_gradient_is_that_of_the_quadrature():
    """E[∇ estimate] = ∇ KL: central differences of the grid's KL in one location and one scale."""
    torch.manual_seed(14)
    locs, scales = [[0.9, 1.2], [1.1, 0.95]], [[0.1, 0.15], [0.12, 0.1]]
    model = two_factor_model(2, locs, scales)
    factor = model[0].bayes.s
    parameters = (factor.loc, factor.spread.rho)
    grads = []
    for _ in range(40):
        total = estimates(model, 5000).mean()
        grads.append(torch.stack([g[0, 0] for g in torch.autograd.grad(total, parameters)]))
    grads = torch.stack(grads)
    step = 1e-4

    def moved(which, by):
        new = [[list(row) for row in each] for each in (locs, scales)]
        new[which][0][0] += by
        return plane_kl(*new)

    exact = tensor(*((moved(i, step) - moved(i, -step)) / (2 * step) for i in range(2)))
    exact[1] *= torch.sigmoid(factor.spread.rho[0, 0]).item()  # dσ/dρ
    error = grads.std(0) / math.sqrt(len(grads))
    assert (error < 0.05 * exact.abs()).all(), (error, exact)
    assert ((grads.mean(0) - exact).abs() < Z * error).all()
