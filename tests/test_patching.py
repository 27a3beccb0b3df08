"""EMP and ECMP: gradients against the enumeration of all assignments, fixed and learned mixing."""

import copy
import functools
import itertools
import math

import pytest
import torch
from helpers_statistics import F64, assert_mean, force_noise
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.core.conversion import find_record

X = torch.tensor([[0.3, -1.0], [1.2, 0.4], [-0.7, 0.9], [0.1, 2.0]], dtype=F64)
TARGETS = torch.tensor([0, 1, 1, 0])


def network(norm):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), norm(2), nn.Tanh(), nn.Linear(2, 2)).double()
    if isinstance(net[1], nn.BatchNorm1d):
        net[1].running_mean.uniform_(-0.5, 0.5)
        net[1].running_var.uniform_(0.5, 2.0)
    return net.eval()


def converted(method, norm=nn.LayerNorm):
    """The network with its components set apart, and the plain network beside it."""
    net = network(norm)
    plain = copy.deepcopy(net)
    torch.manual_seed(1)
    return sb.bayesianize(net, method), plain


def force_indices(monkeypatch, assignments, probs):
    """Draw d takes the indices assignments[d], handed out in the order in which layers ask for them."""
    places = {}
    edges = probs.cumsum(0)
    middle = edges - 0.5 * probs  # a uniform number in the middle of the index's interval

    def make(kind, source, size):
        assert kind == "uniform"
        count = math.prod(size[2:])
        if source not in places:
            places[source] = sum(length for _, length in places.values()), count
        start, count = places[source]
        return middle[assignments[:, start : start + count]].reshape(size)

    force_noise(monkeypatch, make)
    return places


def choices(model, per_element):
    """For every patched tensor the index of each element's choice; and how many choices there are."""
    table, count = [], 0
    for i in (1, 3):
        for name in ("weight", "bias"):
            shape = getattr(model[i], name).shape[1:]
            size = math.prod(shape)
            index = torch.arange(size) + count if per_element else torch.full((size,), count)
            table.append((f"{i}.{name}", index.reshape(shape)))
            count += size if per_element else 0
        count += 0 if per_element else 1
    return table, count


@functools.cache
def enumerated(method, components, norm):
    """Losses [A] and gradients {name: [A, ...]} of all A assignments, one at a time in the plain network."""
    model, plain = converted(method(components, init_noise=0.5), norm)
    table, count = choices(model, method is sb.ECMP)
    parameters = {
        k: v.detach().clone().requires_grad_() for k, v in model.named_parameters() if "bayes" not in k
    }
    losses, grads = [], {name: [] for name in parameters}
    for z in itertools.product(range(components), repeat=count):
        z = torch.tensor(z)
        chosen = dict(parameters)
        for name, index in table:
            chosen[name] = parameters[name].gather(0, z[index].unsqueeze(0))[0]
        value = F.cross_entropy(functional_call(plain, chosen, (X,)), TARGETS)
        losses.append(value.detach())
        for name, grad in zip(parameters, torch.autograd.grad(value, list(parameters.values())), strict=True):
            grads[name].append(grad)
    return torch.stack(losses), {name: torch.stack(values) for name, values in grads.items()}


CASES = [
    (sb.EMP, 3, nn.LayerNorm, 3**2),
    (sb.EMP, 5, nn.BatchNorm1d, 5**2),
    (sb.ECMP, 2, nn.LayerNorm, 2**10),
    (sb.ECMP, 2, nn.BatchNorm1d, 2**10),
]


@pytest.mark.parametrize(("method", "components", "norm", "functions"), CASES)
def test_gradient_by_enumeration(monkeypatch, method, components, norm, functions):
    """One pass through all assignments has the enumerated loss and gradient, in every parameter."""
    model, _ = converted(method(components, init_noise=0.5), norm)
    losses, grads = enumerated(method, components, norm)
    assert len(losses) == functions
    _, count = choices(model, method is sb.ECMP)
    all_z = torch.tensor(list(itertools.product(range(components), repeat=count)))
    force_indices(monkeypatch, all_z, torch.full((components,), 1 / components, dtype=F64))
    result = sb.elbo(sb.draw(model, X, samples=functions), TARGETS, model, num_data=4)
    result.loss.backward()
    torch.testing.assert_close(result.nll, losses.mean(), rtol=1e-12, atol=0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name].mean(0), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize(("method", "components", "norm", "functions"), CASES)
def test_monte_carlo_gradient_is_unbiased(method, components, norm, functions, seed):
    """Theorem 2: the average of many draws' gradients tends to the enumerated one."""
    model, _ = converted(method(components, init_noise=0.5), norm)
    losses, grads = enumerated(method, components, norm)
    draws = 40_000
    result = sb.elbo(sb.draw(model, X, samples=draws, seed=seed), TARGETS, model, num_data=4)
    result.loss.backward()
    error = losses.std(correction=0) / math.sqrt(draws)
    assert (result.nll.detach() - losses.mean()).abs() < 5.5 * error
    assert error < 0.02 * losses.mean()
    largest = max(grads[name].mean(0).abs().max() for name in grads)
    for name, parameter in model.named_parameters():
        exact, spread = grads[name].mean(0), grads[name].std(0, correction=0) / math.sqrt(draws)
        assert ((parameter.grad - exact).abs() <= 5.5 * spread + 1e-12).all(), name
        assert spread.max() < 0.02 * largest, name


def test_one_draw_trains_the_chosen_components_alone(monkeypatch):
    model, _ = converted(sb.EMP(3, init_noise=0.5))
    force_indices(monkeypatch, torch.tensor([[2, 0]]), torch.full((3,), 1 / 3, dtype=F64))
    sb.elbo(sb.draw(model, X), TARGETS, model, num_data=4).loss.backward()
    for layer, chosen in ((model[1], 2), (model[3], 0)):
        for tensor in (layer.weight, layer.bias):  # one index for weight and bias together
            used = tensor.grad.flatten(1).abs().sum(1) > 0
            assert used.tolist() == [k == chosen for k in range(3)]


@pytest.mark.parametrize("seed", [None, 5])
def test_emp_draws_whole_layers_jointly(seed):
    """K^L functions and no more; indices of layers are independent of each other."""
    model, _ = converted(sb.EMP(3, init_noise=0.5))
    with torch.no_grad():
        y = sb.draw(model, X, samples=9000, seed=seed).flatten(1)
    functions, counts = torch.unique(y.mul(1e9).round(), dim=0, return_counts=True)
    assert len(functions) == 9
    expected = 9000 / 9
    assert ((counts - expected).square() / expected).sum() < 45  # χ² with 8 degrees of freedom, 4e-7


@pytest.mark.parametrize("method", [sb.EMP, sb.ECMP])
@pytest.mark.parametrize("learn", [False, True])
def test_mean_noise_is_the_mixing_weighted_mean(method, learn):
    model, plain = converted(method(3, init_noise=0.5, learn_mixing=learn))
    probs = torch.full((3,), 1 / 3, dtype=F64)
    if learn:
        probs = torch.tensor([0.6, 0.3, 0.1], dtype=F64)
        with torch.no_grad():
            for i in (1, 3):
                model[i].bayes.mixing.logits.copy_(probs.log())
    chosen = {
        name: torch.tensordot(probs, value, 1) if name[0] in "13" else value
        for name, value in model.named_parameters()
        if "bayes" not in name
    }
    expected = functional_call(plain, chosen, (X,))
    torch.testing.assert_close(sb.draw(model, X, noise="mean")[0], expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------
# Learned mixing probabilities

PROBS = {2: torch.tensor([0.7, 0.3], dtype=F64), 3: torch.tensor([0.5, 0.2, 0.3], dtype=F64)}


def learner(method, components, prior_precision):
    """A single patched layer, so that a draw has few assignments: K for EMP, K³ for ECMP."""
    torch.manual_seed(2)
    net = nn.Linear(2, 2 if method is sb.EMP else 1).double()
    model = sb.bayesianize(
        net,
        method(
            components, patch=("output",), learn_mixing=True, init_noise=1.0, prior_precision=prior_precision
        ),
    )
    with torch.no_grad():
        model.bayes.mixing.logits.copy_(PROBS[components].log() + 0.3)
    return model


def assignment_outputs(model, z):
    """Output of the plain layer for the indices z of one draw: one for EMP, one per element for ECMP."""
    if len(z) == 1:
        return F.linear(X, model.weight[z[0]], model.bias[z[0]])
    weight = torch.stack([model.weight[z[0], 0, 0], model.weight[z[1], 0, 1]])
    return F.linear(X, weight.unsqueeze(0), model.bias[z[2]])


LEARNED = [
    (sb.EMP, 3, 1, "average"),
    (sb.EMP, 3, 4, "average"),
    (sb.EMP, 3, 1, "mixture"),
    (sb.EMP, 3, 4, "mixture"),
    (sb.EMP, 3, 2, "logits"),
    (sb.ECMP, 2, 1, "average"),
    (sb.ECMP, 2, 2, "average"),
    (sb.ECMP, 2, 2, "mixture"),
]


@pytest.mark.parametrize("prior_precision", [None, 2.0])
@pytest.mark.parametrize(("method", "components", "samples", "reduction"), LEARNED)
def test_score_function_gradient_is_exact_in_expectation(
    monkeypatch, method, components, samples, reduction, prior_precision
):
    """Σ_z p(z) · (gradient that elbo gives at z) = ∇ Σ_z p(z) loss(z), over all assignments of all draws."""
    model = learner(method, components, prior_precision)
    likelihood = sb.Categorical() if method is sb.EMP else sb.Gaussian(precision=1.5)
    targets = TARGETS if method is sb.EMP else X[:, 1:]
    elements = 1 if method is sb.EMP else 3
    singles = list(itertools.product(range(components), repeat=elements))
    parameters = dict(model.named_parameters())
    record = find_record(model)
    probs = PROBS[components]
    expected_grads = {name: torch.zeros_like(value) for name, value in parameters.items()}
    exact_loss = 0.0
    log_law = model.bayes.mixing.logits.log_softmax(0)
    for case in itertools.product(singles, repeat=samples):
        z = torch.tensor(case)  # [draws, elements]
        force_indices(monkeypatch, z, probs)
        record.baseline = torch.tensor(0.7, dtype=F64)
        draws = sb.draw(model, X, samples=samples)
        result = sb.elbo(draws, targets, model, 8, likelihood, reduction)
        plain = torch.stack([assignment_outputs(model, row) for row in case])
        with torch.no_grad():  # where nothing is scored, whatever the outputs come from
            nll = sb.elbo(plain, targets, model, 8, likelihood, reduction).nll
        torch.testing.assert_close(draws, plain, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(result.nll, nll, rtol=1e-13, atol=0.0)
        torch.testing.assert_close(result.loss, result.nll + result.kl / 8, rtol=1e-14, atol=0.0)
        weight = probs[z].prod()
        found = torch.autograd.grad(result.loss, list(parameters.values()), allow_unused=True)
        for total, grad in zip(expected_grads.values(), found, strict=True):
            total += weight * (0 if grad is None else grad)
        joint = log_law[z].sum().exp()
        exact_loss = exact_loss + joint * _nll(likelihood, plain, targets, reduction)
    exact_loss = exact_loss + _equation_6(model, prior_precision, elements > 1) / 8
    exact = torch.autograd.grad(exact_loss, list(parameters.values()))
    for (name, found), grad in zip(expected_grads.items(), exact, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert expected_grads["bayes.mixing.logits"].abs().max() > 1e-3


def _nll(likelihood, draws, targets, reduction):
    if reduction == "logits":
        return -likelihood.log_prob(draws.mean(0, keepdim=True), targets).mean()
    log_prob = likelihood.log_prob(draws, targets)
    if reduction == "mixture":
        return -log_prob.exp().mean(0).log().mean()
    return -log_prob.mean()


def _equation_6(model, precision, per_element):
    if precision is None:
        return 0.0
    probs = model.bayes.mixing.logits.softmax(0)
    total = 0.0
    for tensor in (model.weight, model.bias):
        total = total + 0.5 * precision * (probs * tensor.square().flatten(1).sum(1)).sum()
    indices = model.weight[0].numel() + model.bias[0].numel() if per_element else 1
    return total + indices * (probs * (probs * len(probs)).log()).sum()


@pytest.mark.parametrize(("method", "samples"), [(sb.EMP, 1), (sb.EMP, 2000), (sb.ECMP, 2000)])
def test_sampled_score_function_gradient(method, samples):
    """The same, with indices that are really drawn, and with baselines that really run."""
    torch.manual_seed(3)
    model = learner(method, 2, None)
    likelihood = sb.Categorical() if method is sb.EMP else sb.Gaussian()
    targets = TARGETS if method is sb.EMP else X[:, 1:]
    logits = model.bayes.mixing.logits
    singles = list(itertools.product(range(2), repeat=1 if method is sb.EMP else 3))
    log_law = logits.log_softmax(0)
    exact = sum(
        log_law[torch.tensor(z)].sum().exp()
        * -likelihood.log_prob(assignment_outputs(model, z)[None], targets).mean()
        for z in singles
    )
    (exact_grad,) = torch.autograd.grad(exact, logits)
    found = []
    for _ in range(600 if samples == 1 else 30):
        loss = sb.elbo(sb.draw(model, X, samples=samples), targets, model, 8, likelihood).loss
        found.append(torch.autograd.grad(loss, logits)[0])
    found = torch.stack(found)
    assert_mean(found, exact_grad)
    error = found.std(0).max() / math.sqrt(len(found))
    assert error < (0.2 if samples == 1 else 0.02) * exact_grad.abs().max()


def test_running_baseline():
    """b ← b + (loss − b)/10, used before it is updated, for a single draw and for joint losses."""
    model = learner(sb.EMP, 2, None)
    record, baseline = find_record(model), 0.0
    for samples, reduction in ((1, "average"), (3, "mixture"), (2, "logits"), (1, "mixture")):
        result = sb.elbo(sb.draw(model, X, samples=samples), TARGETS, model, num_data=8, reduction=reduction)
        baseline += 0.1 * (result.nll.item() - baseline)
        assert record.baseline.item() == pytest.approx(baseline, rel=1e-6)
    sb.elbo(sb.draw(model, X, samples=4), TARGETS, model, num_data=8)
    assert record.baseline.item() == pytest.approx(baseline, rel=1e-6)  # draws are each other's baselines


def test_elbo_wants_all_draws():
    model = learner(sb.EMP, 2, None)
    draws = sb.draw(model, X, samples=3)
    sb.draw(model, X, samples=2)
    sb.elbo(draws, TARGETS, model, num_data=8)
    with pytest.raises(ValueError, match="scores the 3 draws that were made together, but elbo got 2"):
        sb.elbo(draws[:2], TARGETS, model, num_data=8)


def test_learned_mixing_finds_the_better_component():
    """Ten times as probable as the other after training on data that one component explains."""
    torch.manual_seed(4)
    model = learner(sb.EMP, 2, None)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[[-2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [-2.0, 0.0]]]))
        model.bias.zero_()
        model.bayes.mixing.logits.zero_()
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(False)
    x = torch.linspace(-2, 2, 20, dtype=F64).unsqueeze(1).expand(20, 2)
    adam = torch.optim.Adam([model.bayes.mixing.logits], 0.05)
    for _ in range(100):
        adam.zero_grad()
        sb.elbo(sb.draw(model, x, samples=2), (x[:, 0] > 0).long(), model, num_data=20).loss.backward()
        adam.step()
    probs = model.bayes.mixing.logits.softmax(0)
    assert probs[0] > 10 * probs[1]


def test_a_prediction_between_draw_and_loss_leaves_the_score_alone():
    model, _ = converted(sb.EMP(3, learn_mixing=True, init_noise=0.5))
    draws = sb.draw(model, X, samples=4)
    sb.predict(model, X, samples=4)
    sb.elbo(draws, TARGETS, model, num_data=4).loss.backward()
    logits = [p for name, p in model.named_parameters() if name.endswith("logits")]
    assert logits and all(p.grad.abs().max() > 0 for p in logits)
