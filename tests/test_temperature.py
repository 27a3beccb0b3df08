"""The field ``temperature``: in the objective of every loop, in no ``sb.kl``; and the papers' values by name."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn

import slimbayes as sb

HOT = {
    "meanfield": sb.MeanField.paper(temperature=0.1),
    "ktied": sb.KTied.paper(temperature=0.1),
    "flipout": sb.KTied.paper(temperature=0.1, estimator="flipout"),
    "rank1": sb.Rank1.paper(temperature=0.1),
    "mean": sb.Rank1.paper(temperature=0.1, kl_reduction="mean"),
    "cauchy": sb.Rank1.paper(temperature=0.1, posterior="cauchy"),
    "empirical": sb.KTied.paper(temperature=0.1, prior=sb.EmpiricalNormal()),
}
X, Y = torch.linspace(-1, 1, 15).view(5, 3), torch.tensor([0, 1, 0, 1, 1])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def objective(model, **options):
    return sb.elbo(sb.draw(model, X, noise="shared"), Y, model, num_data=50, **options)


@pytest.mark.oldest
@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize("fast", [True, False])
def test_elbo_is_tempered_and_kl_is_not(name, fast):
    hot, cold = (sb.bayesianize(network(), dataclasses.replace(HOT[name], temperature=t)) for t in (0.1, 1.0))
    with sb.fast_paths(fast):
        torch.testing.assert_close(sb.kl(hot), sb.kl(cold), rtol=1e-5, atol=0)
        found = objective(hot, kl_weight=0.5)
        torch.testing.assert_close(found.kl, 0.1 * sb.kl(hot), rtol=1e-5, atol=0)
        torch.testing.assert_close(found.loss, found.nll + 0.5 * found.kl / 50)
        torch.testing.assert_close(objective(cold).kl, sb.kl(cold), rtol=1e-5, atol=0)


@pytest.mark.oldest
@pytest.mark.parametrize("fast", [True, False])
def test_each_layer_has_its_methods(fast):
    """Layers of one family and prior too, which are scored together where their temperatures are one."""
    methods = [sb.KTied.paper(temperature=t) for t in (0.1, 0.0, 3.0)]
    model = sb.bayesianize(network(), [("0", methods[0]), ("2", methods[1]), (None, methods[2])])
    by_layer = sb.analysis.compare_with_prior(model).by_layer()
    with sb.fast_paths(fast):
        found = objective(model)
    assert found.kl.item() == pytest.approx(0.1 * by_layer["0"] + 3.0 * by_layer["3"], rel=1e-5)
    assert sb.kl(model).item() == pytest.approx(sum(by_layer.values()), rel=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_rank1_layers_of_two_temperatures(fast):
    model = sb.bayesianize(network(), [("0", sb.Rank1.paper(temperature=0.1)), (None, sb.Rank1.paper())])
    by_layer = sb.analysis.compare_with_prior(model).by_layer()
    with sb.fast_paths(fast):
        found = objective(model).kl.item()
    assert found == pytest.approx(0.1 * by_layer["0"] + by_layer["2"] + by_layer["3"], rel=1e-5)


def test_tied_tensors_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    sb.bayesianize(
        model, [("2", sb.MeanField.paper(temperature=3.0)), (None, sb.MeanField.paper(temperature=0.1))]
    )
    found = sb.elbo(sb.draw(model, torch.ones(2, 4)), torch.zeros(2).long(), model, 10)
    by_layer = sb.analysis.compare_with_prior(model).by_layer()
    assert found.kl.item() == pytest.approx(0.1 * by_layer["0"] + 3.0 * by_layer["2"], rel=1e-5)
    assert "1" not in by_layer


def test_none_at_temperature_0():
    model = sb.bayesianize(network(), sb.MeanField.paper(temperature=0.0))
    found = objective(model)
    assert float(found.kl) == 0.0 and torch.equal(found.loss, found.nll) and sb.kl(model).item() > 1.0
    found.loss.backward()
    assert model[0].bayes.weight.rho.grad.abs().sum() > 0  # of the data


def test_a_prior_on_all_other_parameters_is_at_1():
    methods = [
        ("0", sb.MeanField.paper(temperature=0.1)),
        ("3", sb.EMP.paper(patch="output", prior_precision=2.0)),
    ]
    model = sb.bayesianize(network(), methods)
    first = sb.analysis.compare_with_prior(model).by_layer()["0"]
    assert objective(model).kl.item() == pytest.approx(sb.kl(model).item() - 0.9 * first, rel=1e-5)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "cold", True, None])
@pytest.mark.parametrize("kind", [sb.MeanField, sb.KTied, sb.Rank1])
def test_what_is_no_temperature(kind, value):
    with pytest.raises(ValueError, match="temperature must be finite and at least 0"):
        kind(temperature=value)


def test_layers_with_several_kernels():
    model = sb.bayesianize(
        nn.Sequential(nn.LSTM(3, 4, batch_first=True)), sb.MeanField.paper(temperature=0.1)
    )
    outputs = sb.draw(model, torch.randn(5, 2, 3))[0][:, :, -1]
    found = sb.elbo(outputs, torch.zeros(5).long(), model, 50)
    torch.testing.assert_close(found.kl, 0.1 * sb.kl(model), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["meanfield", "ktied", "rank1"])
def test_travels_with_files_and_copies(name, tmp_path):
    import copy

    model = sb.bayesianize(network(), HOT[name])
    sb.save(model, tmp_path / "net.safetensors")
    for again in (sb.load(network(), tmp_path / "net.safetensors"), copy.deepcopy(model)):
        torch.testing.assert_close(objective(again).kl, 0.1 * sb.kl(model), rtol=1e-5, atol=0)


def test_compressed_as_it_was():
    model = sb.bayesianize(network(), HOT["meanfield"])
    tied = sb.compress(model, rank=2)
    torch.testing.assert_close(objective(tied).kl, 0.1 * sb.kl(tied), rtol=1e-5, atol=0)
    assert tied._slimbayes.methods == (sb.KTied.paper(rank=2, prior=sb.Normal(0.0, 1.0), temperature=0.1),)


@pytest.mark.parametrize("methods", [HOT["ktied"], [("0", HOT["meanfield"]), (None, sb.MeanField.paper())]])
def test_compiled(methods):
    model = sb.bayesianize(network(), methods)

    @sb.compile
    def step(x, y):
        found = sb.elbo(sb.draw(model, x, noise="shared"), y, model, num_data=50)
        return found.loss, found.nll, found.kl

    loss, nll, kl = step(X, Y)
    torch.testing.assert_close(kl, objective(model).kl, rtol=1e-4, atol=0)
    torch.testing.assert_close(loss, nll + kl / 50)


@pytest.mark.parametrize("name", ["ktied", "empirical"])
def test_many_networks_at_once(name):
    """The KL of their histories is each network's own, times its temperature."""
    settings = sb.Training(epochs=1, batch_size=5, optimizer="sgd", lr=1e-3)
    models = [
        sb.bayesianize(network(), dataclasses.replace(HOT[name], temperature=t)) for t in (0.1, 0.1, 1.0)
    ]
    kls = [sb.kl(model).item() for model in models]
    found = sb.fit_many(models, (X, Y), settings)
    for rows, kl, temperature in zip(found.histories, kls, (0.1, 0.1, 1.0), strict=True):
        assert rows[0]["kl"] == pytest.approx(temperature * kl, rel=1e-3)


VALUES = {
    sb.Rank1: {
        "components": 4, "posterior": "normal", "prior": None, "factors": "both", "perturbation": "multiplicative",
        "random_sign_init": -0.5, "dropout_rate": 1e-3, "kl_reduction": "sum", "clip": 10.0,
        "components_per_step": None, "train_base": True, "random": "both", "temperature": 1.0,
        "spread_rate": 1.0,
    },
    sb.MeanField: {
        "prior": sb.Normal(0.0, 1.0), "stddev_init": 0.01, "estimator": "shared", "biases": True, "tied_mean": False,
        "stddev_max": None, "temperature": 1.0, "spread_rate": 1.0,
    },
    sb.KTied: {
        "rank": 2, "prior": sb.Normal(0.0, 0.3), "stddev_init": 0.01, "estimator": "shared", "biases": True,
        "temperature": 1.0, "spread_rate": 1.0,
    },
    sb.EMP: {
        "components": 5, "patch": ("norm", "output"), "learn_mixing": False, "prior_precision": None,
        "init_noise": 0.0, "own_statistics": False, "component_rate": 1.0,
    },
    sb.ECMP: {
        "components": 5, "patch": ("norm", "output"), "learn_mixing": False, "prior_precision": None,
        "init_noise": 0.0, "component_rate": 1.0,
    },
}  # fmt: skip


@pytest.mark.oldest
@pytest.mark.parametrize("kind", VALUES)
def test_the_papers_values(kind, monkeypatch):
    assert {f.name: getattr(kind.paper(), f.name) for f in dataclasses.fields(kind)} == VALUES[kind]
    for name in VALUES[kind]:  # none leans on a default
        monkeypatch.setitem(kind.__init__.__kwdefaults__ or {}, name, object())
    assert kind.__init__.__defaults__ is not None
    monkeypatch.setattr(kind.__init__, "__defaults__", (object(),) * len(kind.__init__.__defaults__))
    assert {f.name: getattr(kind.paper(), f.name) for f in dataclasses.fields(kind)} == VALUES[kind]
    assert list(inspect.signature(kind.paper).parameters) == ["overrides"]


def test_overrides_of_the_papers_values():
    assert sb.KTied.paper(rank=3, temperature=0.2) == sb.KTied(
        3, sb.Normal(0.0, 0.3), 0.01, "shared", True, 0.2, 1.0
    )
    with pytest.raises(TypeError, match="tepmerature"):
        sb.KTied.paper(tepmerature=0.1)
