"""Shared samples, flipout, local reparameterisation and rank-1 noise: output distributions and gradients."""

import copy

import pytest
import torch
from helpers_statistics import (
    F64,
    assert_covariance,
    assert_law,
    assert_mean,
    force_noise,
    output_covariance,
    scatter,
    set_sigma,
)
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import slimbayes as sb
from slimbayes.core import distributions as d
from slimbayes.core.rules.local import local_variance


def transposed_linear(inputs, outputs):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


LAYERS = {
    "Linear": (lambda: nn.Linear(3, 2), [(3,)]),
    "Linear sequence": (lambda: nn.Linear(3, 2), [(2, 3)]),
    "Linear without bias": (lambda: nn.Linear(3, 2, bias=False), [(3,)]),
    "Conv1D": (lambda: transposed_linear(3, 2), [(3,)]),
    "Conv2d": (
        lambda: nn.Conv2d(2, 2, 2, padding=1, stride=2, padding_mode="circular", groups=2),
        [(2, 3, 3)],
    ),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 2, dilation=2), [(2, 5)]),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 2, 3, stride=2, padding=1), [(2, 3)]),
    "Bilinear": (lambda: nn.Bilinear(2, 3, 2), [(2,), (3,)]),
}
METHODS = {"MeanField": sb.MeanField.paper, "KTied": sb.KTied.paper}  # of rank 2; biases have noise too


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("estimator", ["shared", "flipout", "local"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_joint_output_distribution(method, layer, estimator):
    """Means and all covariances of all outputs of two examples, against the Jacobian of torch's own layer."""
    torch.manual_seed(0)
    make, shapes = LAYERS[layer]
    plain = make().double()
    model = copy.deepcopy(plain)
    model = scatter(sb.bayesianize(model, METHODS[method](estimator=estimator)))
    inputs = tuple(torch.randn(2, *shape, dtype=F64) for shape in shapes)
    with torch.no_grad():
        y = sb.draw(model, *inputs, samples=6000).flatten(1)  # [n, outputs of both examples]
        exact_mean = plain(*inputs).flatten()
        weight = model.bayes.weight(model.weight).scale
        bias = None if model.bias is None else model.bayes.bias(model.bias).scale
    assert_mean(y, exact_mean)
    assert_covariance(y, output_covariance(plain, inputs, weight, bias, estimator).detach())


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("estimator", ["flipout", "local"])
def test_marginals_are_normal(method, estimator, seed):
    """Signs that were not ±1 would leave a scale mixture of Normals."""
    torch.manual_seed(2)
    model = scatter(sb.bayesianize(nn.Linear(4, 2).double(), METHODS[method](estimator=estimator)))
    x = torch.randn(1, 4, dtype=F64)
    with torch.no_grad():
        y = sb.draw(model, x, samples=40_000, seed=seed)[:, 0]
        mean = F.linear(x, model.weight, model.bias)[0]
        q, b = model.bayes.weight(model.weight), model.bayes.bias(model.bias)
        variance = F.linear(x.square(), q.scale.square())[0] + b.scale.square()
    for j in range(2):
        assert_law(y[:, j], stats.norm(mean[j].item(), variance[j].sqrt().item()))


@pytest.mark.parametrize("seed", [None, 6])
@pytest.mark.parametrize("method", METHODS)
def test_flipout_signs(method, seed):
    """Every example's perturbation is the draw's own ΔW with ±1 on its rows and columns."""
    torch.manual_seed(3)
    model = METHODS[method](estimator="flipout")
    model = scatter(sb.bayesianize(nn.Linear(3, 4, bias=False).double(), model))
    x = torch.eye(3, dtype=F64).repeat(50, 1)  # rows of unit vectors show one column of the perturbation each
    with torch.no_grad():
        y = sb.draw(model, x, samples=2, seed=seed) - model.weight.T.repeat(50, 1)  # [2, 150, 4]
    y = y.unflatten(1, (50, 3))  # [draw, repeat, column, row]
    size = y[:, :1].abs()
    torch.testing.assert_close(y.abs(), size.expand_as(y), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(size[0], size[1], rtol=0.1)  # another draw, another ΔW
    signs = (y / size).round()
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert (signs.mean(1).abs() < 0.6).all()  # each sign varies from example to example


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("estimator", ["flipout", "local", "shared"])
@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "Bilinear"])
def test_no_spread_no_perturbation(layer, estimator, seed):
    torch.manual_seed(4)
    make, shapes = LAYERS[layer]
    plain = make().double()
    model = sb.bayesianize(copy.deepcopy(plain), sb.MeanField.paper(estimator=estimator))
    set_sigma(model.bayes.weight, 1e-7 + 1e-12)
    set_sigma(model.bayes.bias, 1e-7 + 1e-12)
    inputs = tuple(torch.randn(3, *shape, dtype=F64) for shape in shapes)
    with torch.no_grad():
        y = sb.draw(model, *inputs, samples=4, seed=seed)
        expected = plain(*inputs).expand_as(y)
    torch.testing.assert_close(y, expected, rtol=0.0, atol=1e-5)
    assert not torch.equal(y, expected)


# ---------------------------------------------------------------------------------------------------------
# The thin variance of k-tied matrices


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (F64, 1e-12)])
def test_thin_variance_is_the_dense_one(rank, kind, dtype, tolerance):
    torch.manual_seed(5)
    layer = nn.Linear(37, 23) if kind == "Linear" else transposed_linear(37, 23)
    model = scatter(sb.bayesianize(layer.to(dtype), sb.KTied(rank=rank, estimator="local")), 0.01, 1.0)
    x = torch.randn(4, 5, 37, dtype=dtype)
    q = model.bayes.weight(model.weight)
    thin = local_variance(model, (x,), q)
    wide = (q.u.double() @ q.v.double().T).square()
    dense = x.double().square() @ (wide.T if kind == "Linear" else wide)
    torch.testing.assert_close(thin.double(), dense, rtol=tolerance, atol=0.0)
    if dtype is F64:
        probe = torch.randn_like(dense)
        parameters = (model.bayes.weight.log_u, model.bayes.weight.log_v)
        ours = torch.autograd.grad((thin * probe).sum(), parameters, retain_graph=True)
        theirs = torch.autograd.grad((dense * probe).sum(), parameters)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


class Sizes(TorchDispatchMode):
    """The numbers of elements of all tensors that operations return while it is active."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, torch.Tensor):
                self.seen.append(value.numel())
        return output


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_thin_variance_forms_no_matrix(rank, kind):
    layer = nn.Linear(211, 199) if kind == "Linear" else transposed_linear(211, 199)
    model = sb.bayesianize(layer, sb.KTied(rank=rank, estimator="local"))
    x, thin = torch.randn(7, 211), rank * (rank + 1) // 2
    q = model.bayes.weight(model.weight)
    with Sizes() as sizes, FlopCounterMode(display=False) as flops, torch.no_grad():
        local_variance(model, (x,), q)
    assert sizes.seen
    assert max(sizes.seen) <= max(7, thin) * 211
    assert flops.get_total_flops() == 2 * 7 * thin * (211 + 199)
    sb.draw(model, x)  # the first draw also checks the rows
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        sb.draw(model, x, samples=2)
    assert flops.get_total_flops() == 2 * 14 * (211 * 199 + thin * (211 + 199))  # one dense product: the mean


# ---------------------------------------------------------------------------------------------------------
# Rank-1 outputs


@pytest.mark.parametrize("seed", [None, 8])
@pytest.mark.parametrize(
    "sides",
    [*({"factors": side} for side in ("both", "input", "output")), {"random": "input"}, {"random": "output"}],
    ids=lambda sides: "-".join(*sides.items()),
)
@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
def test_rank1_output_moments(perturbation, sides, seed):
    """Means and covariances of r ∘ (W (s ∘ x)) + b and W (s + x) + r + b, r and s independent Normals."""
    torch.manual_seed(6)
    model = sb.bayesianize(
        nn.Linear(3, 2).double(), sb.Rank1(2, perturbation=perturbation, clip=None, **sides)
    )
    scatter(model)
    nn.init.normal_(model.bias)  # one bias per component
    x = torch.randn(2, 3, dtype=F64)
    with torch.no_grad():
        y = sb.draw(model, x, samples=20_000, seed=seed).unflatten(0, (2, 20_000))  # [K, n, B, 2]
        neutral = 1.0 if perturbation == "multiplicative" else 0.0
        for k in range(2):
            moments = []
            for factor, width in ((model.bayes.r, 2), (model.bayes.s, 3)):
                if factor is None:
                    moments.append((torch.full((width,), neutral, dtype=F64), torch.zeros(width, dtype=F64)))
                elif isinstance(factor(), d.Delta):
                    moments.append((factor.loc[k], torch.zeros(width, dtype=F64)))
                else:
                    moments.append((factor().loc[k], factor().scale[k].square()))
            (r, r_var), (s, s_var) = moments
            blocks = []
            for b in range(2):
                if perturbation == "multiplicative":
                    inner = model.weight * x[b]  # g = inner s
                    g, g_cov = inner @ s, (inner * s_var) @ inner.T
                    mean = r * g
                    covariance = torch.outer(r, r) * g_cov
                    covariance += torch.diag(r_var * (g_cov.diagonal() + g.square()))
                else:
                    mean = model.weight @ (x[b] + s) + r
                    covariance = (model.weight * s_var) @ model.weight.T + torch.diag(r_var)
                assert_mean(y[k, :, b], mean + model.bias[k])
                blocks.append(covariance)
            assert_covariance(y[k].flatten(1), torch.block_diag(*blocks))  # examples are independent
        shared = sb.draw(model, x[:1].repeat(2, 1), samples=3, noise="shared", seed=seed)
        assert torch.equal(shared[:, 0], shared[:, 1])


@pytest.mark.parametrize("seed", [None, 9])
def test_rank1_layers_components_and_factors_are_independent(seed):
    """r·s of two layers and three components: no covariance between any two of the six."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    model = scatter(sb.bayesianize(net, sb.Rank1(3, clip=None)))
    seen = {}

    def keep(name):
        return lambda layer, args, output: seen.update({name: (args[0], output)})

    x = torch.ones(1, 1, dtype=F64)
    sb.draw(model, x)  # the first draw also checks the rows
    for name in (0, 1):
        nn.init.ones_(model[name].weight)
        nn.init.ones_(model[name].bayes.r.loc)
        nn.init.ones_(model[name].bayes.s.loc)
        model[name].register_forward_hook(keep(name))
    with torch.no_grad():
        sb.draw(model, x, samples=20_000, seed=seed)
    factors = [(seen[i][1] / seen[i][0]).reshape(3, 20_000) for i in (0, 1)]  # r·s of each layer
    joint = torch.cat(factors).T  # [n, 6]
    variances = []
    for i in (0, 1):
        r, s = (f().scale[:, 0].detach().square() for f in (model[i].bayes.r, model[i].bayes.s))
        variances.append((1 + r) * (1 + s) - 1)
    assert_covariance(joint, torch.diag(torch.cat(variances)))


# ---------------------------------------------------------------------------------------------------------
# Whose noise is whose

PER_EXAMPLE = {
    "Rank1": sb.Rank1(2),
    "Rank1 cauchy": sb.Rank1(2, "cauchy"),
    "Rank1 random input": sb.Rank1(2, random="input"),
    "Rank1 random output": sb.Rank1(2, random="output"),
    "flipout": sb.MeanField(estimator="flipout", stddev_init=0.2),
    "local": sb.MeanField(estimator="local", stddev_init=0.2),
    "KTied flipout": sb.KTied(estimator="flipout", stddev_init=0.2),
    "KTied local": sb.KTied(estimator="local", stddev_init=0.2),
    "MCDropout": sb.MCDropout(0.5),
    "MCDropout channel": sb.MCDropout(0.5, "channel"),
}
PER_DRAW = {
    "MeanField": sb.MeanField(stddev_init=0.2),
    "KTied": sb.KTied(stddev_init=0.2),
    "DropConnect": sb.DropConnect(0.5),
    "EMP": sb.EMP(3, patch=(nn.Linear,), init_noise=0.5),
    "ECMP": sb.ECMP(3, patch=(nn.Linear,), init_noise=0.5),
}


def repeated_rows(method, noise, seed):
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = sb.bayesianize(net, method)
    with torch.no_grad():
        row = torch.randn(1, 6, dtype=F64)
        return sb.draw(model, row.repeat(16, 1), samples=16, noise=noise, seed=seed)  # [draws, 16, 4]


def distinct(rows):
    return len({tuple(round(v, 9) for v in row) for row in rows.tolist()})


@pytest.mark.parametrize("seed", [None, 10])
@pytest.mark.parametrize("name", [*PER_EXAMPLE, *PER_DRAW])
def test_example_and_shared_noise(name, seed):
    per_example = name in PER_EXAMPLE
    method = PER_EXAMPLE[name] if per_example else PER_DRAW[name]
    for noise in ("example", "shared"):
        y = repeated_rows(method, noise, seed)
        fresh = per_example and noise == "example"
        for draw in y:
            assert distinct(draw) > 8 if fresh else distinct(draw) == 1
        assert distinct(y[:, 0]) > (
            5 if name == "EMP" else 8
        )  # draws differ in any case; EMP has 9 functions
    y = repeated_rows(method, "mean", seed)
    components = method.traits.components
    for group in y.unflatten(0, (components, -1)):
        assert distinct(group.flatten(0, 1)) == 1


# ---------------------------------------------------------------------------------------------------------
# Gradients: several samples before one backward pass, against finite differences

DIFFERENTIABLE = {
    "shared": sb.MeanField.paper(stddev_init=0.2),
    "flipout": sb.MeanField.paper(stddev_init=0.2, estimator="flipout"),
    "local": sb.MeanField.paper(stddev_init=0.2, estimator="local"),
    "KTied shared": sb.KTied.paper(stddev_init=0.2),
    "KTied flipout": sb.KTied.paper(stddev_init=0.2, estimator="flipout"),
    "KTied local": sb.KTied.paper(stddev_init=0.2, estimator="local"),
    "Rank1": sb.Rank1(2),
    "Rank1 additive": sb.Rank1(2, perturbation="additive"),
    "Rank1 cauchy": sb.Rank1(2, "cauchy"),
    "Rank1 lognormal": sb.Rank1(2, "lognormal"),
    "Rank1 halfcauchy": sb.Rank1(2, "halfcauchy"),
    "Rank1 random input": sb.Rank1(2, random="input"),
    "Rank1 random output": sb.Rank1(2, random="output", kl_reduction="mean"),
    "BatchEnsemble": sb.BatchEnsemble(2),
    "MCDropout": sb.MCDropout(0.3),
    "DropConnect": sb.DropConnect(0.3),
    "EMP": sb.EMP(2, patch=(nn.Linear, nn.Conv1d), init_noise=0.3, prior_precision=1.0),
    "ECMP": sb.ECMP(2, patch=(nn.Linear, nn.Conv1d), init_noise=0.3, prior_precision=1.0),
    "DeepEnsemble": sb.DeepEnsemble(2),
}


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_finite_differences(name, noise):
    torch.manual_seed(9)
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)).double()
    model = sb.bayesianize(net, DIFFERENTIABLE[name])
    x, y = torch.randn(3, 1, 3, dtype=F64), torch.tensor([0, 1, 1])

    def loss():
        draws = sb.draw(model, x, samples=3, noise=noise, seed=3)
        return sb.elbo(draws, y, model, num_data=10).loss

    model.zero_grad()
    loss().backward()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in parameters.items():
            direction = torch.randn_like(parameter)
            slope = (parameter.grad * direction).sum().item()
            ends = []
            for step in (1e-5, -2e-5):
                parameter.add_(step * direction)
                ends.append(loss().item())
            parameter.add_(1e-5 * direction)
            assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=2e-5, abs=1e-8), key


@pytest.mark.parametrize("estimator", ["shared", "flipout", "local"])
def test_gradients_are_unbiased(estimator):
    """∇ E[(w·x − 1)²] = 2(μ·x − 1)x with respect to μ, and 2σx² with respect to σ."""
    torch.manual_seed(10)
    model = sb.bayesianize(nn.Linear(2, 1, bias=False).double(), sb.MeanField(estimator=estimator))
    set_sigma(model.bayes.weight, torch.tensor([[0.3, 0.6]]))
    x = torch.tensor([[1.5, -0.9]], dtype=F64)
    parameters = (model.weight, model.bayes.weight.rho)
    found = []
    for _ in range(40):
        loss = (sb.draw(model, x, samples=4000) - 1.0).square().mean()
        found.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)]))
    found = torch.stack(found)
    sigma, slope = model.bayes.weight(model.weight).scale.detach(), torch.sigmoid(parameters[1].detach())
    mean = 2 * (x @ model.weight.detach().T - 1.0) * x
    exact = torch.cat([mean, 2 * sigma * x.square() * slope]).flatten()
    assert_mean(found, exact)
    assert (found.std(0) / 40**0.5 < 0.02 * exact.abs()).all()


def test_forced_noise_reaches_every_estimator(monkeypatch):
    """The tests of exact answers stand on this: with ε = 1 and signs +1, y = op(x, M + σ) + b + σ_b."""
    force_noise(monkeypatch, lambda kind, source, size: torch.ones(size))
    torch.manual_seed(11)
    x = torch.randn(2, 3, dtype=F64)
    for estimator in ("shared", "flipout", "local"):
        model = scatter(sb.bayesianize(nn.Linear(3, 2).double(), sb.MeanField.paper(estimator=estimator)))
        weight, bias = model.bayes.weight(model.weight), model.bayes.bias(model.bias)
        expected = F.linear(x, weight.loc + weight.scale, bias.loc + bias.scale)
        if estimator == "local":  # the bias joins the variance
            variance = F.linear(x.square(), weight.scale.square()) + bias.scale.square()
            expected = F.linear(x, weight.loc, bias.loc) + variance.sqrt()
        for fast in (True, False):
            with sb.fast_paths(fast):
                torch.testing.assert_close(sb.draw(model, x)[0], expected, rtol=1e-12, atol=1e-12)
