"""The mean of the last part of a run: its definition, what sees it, and that it is resumed."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.training import StopTraining

pytestmark = pytest.mark.usefixtures("on_cpu")


def data():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def network(method=None):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return sb.bayesianize(layers, method or sb.Rank1(components=2))


def fit(model, **options):
    settings = {"epochs": 5, "lr": 0.05, "batch_size": 16, "progress": False, "log_every": 1, **options}
    return sb.fit(model, data(), **settings)


def floats(model):
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


@pytest.mark.parametrize("method", [sb.Rank1(components=2), sb.KTied(), sb.EMP()])
@pytest.mark.parametrize("part", [0.25, 1.0])
def test_is_the_mean_that_it_says(method, part):
    seen = []
    plain = network(method)
    fit(plain, callback=lambda step, row: seen.append(floats(plain)))
    averaged = network(method)
    fit(averaged, averaging=part)
    assert len(seen) == 20
    means = {name: value.clone() for name, value in seen[0].items()}
    for step, state in enumerate(seen[1:], 2):
        for name, value in state.items():
            means[name] += (value - means[name]) / min(step, part * 20)
    for name, value in floats(averaged).items():
        torch.testing.assert_close(value, means[name], atol=1e-6, rtol=1e-5)
        assert name.startswith("1.") or not torch.equal(value, seen[-1][name])
    assert averaged[1].num_batches_tracked == plain[1].num_batches_tracked


def test_validation_sees_the_means_and_training_goes_on_from_its_own():
    weights = []
    model = network(sb.BatchEnsemble(components=2))  # without noise
    result = fit(
        model, averaging=0.5, validation=data(), callback=lambda step, row: weights.append(floats(model))
    )
    found = sb.evaluate(model, [data()], samples=1, seed=0)
    assert result.history[-1]["validation_nll"] == pytest.approx(found["nll"], rel=1e-5)
    other = network(sb.BatchEnsemble(components=2))
    fit(other, callback=lambda step, row: None)
    undisturbed = weights[-1]  # of the last step, before the means took its place
    torch.testing.assert_close(floats(other), undisturbed)


def test_early_stopping_keeps_means():
    model = network(sb.BatchEnsemble(components=2))
    result = fit(model, epochs=30, averaging=0.2, validation=data(), early_stopping=2)
    kept = sb.evaluate(model, [data()], samples=1, seed=0)["nll"]
    assert kept == pytest.approx(result.best["validation_nll"], rel=1e-5)


@pytest.mark.parametrize("at", [3, 10])
def test_resumes_bit_for_bit(tmp_path, at):
    whole = network()
    fit(whole, averaging=0.3)

    def stop(step, row):
        if step == at:
            raise StopTraining

    stopped = network()
    with pytest.raises(StopTraining):
        fit(stopped, averaging=0.3, folder=tmp_path, callback=stop)
    again = network()
    fit(again, averaging=0.3, folder=tmp_path, resume=True)
    for name, value in floats(whole).items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.1", True, float("nan")])
def test_a_part_of_the_run(value):
    with pytest.raises(ValueError, match="averaging"):
        fit(network(), averaging=value)


def test_many_networks_say_that_they_keep_the_last_step():
    with pytest.raises(ValueError, match=r"averaging=0.1.*sb\.fit"):
        sb.fit_many([network(), network()], data(), epochs=1, averaging=0.1)
