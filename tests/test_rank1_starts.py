"""Where the components of Rank1 begin apart: in the first layer alone, unless it is said otherwise."""

import copy

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.verbs.method_text import parse_method


def starts(model):
    """How far components begin apart, by layer and factor."""
    return {
        f"{name}.{which}": value
        for name, layer in sb.analysis.component_spread(model).items()
        for which, value in layer.items()
    }


def two_layers():
    return nn.Sequential(nn.Linear(300, 20), nn.ReLU(), nn.Linear(20, 3))


def test_components_begin_apart_in_the_inputs_of_the_first_layer_alone():
    torch.manual_seed(0)
    model = sb.bayesianize(two_layers(), sb.Rank1(components=8))
    assert starts(model) == {"0.r": 0, "0.s": pytest.approx(0.5, abs=0.05), "2.r": 0, "2.s": 0}
    assert (model[2].bayes.s.loc == 1).all() and (model[0].bayes.r.loc == 1).all()
    assert model[0].bayes.s.loc.detach().mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("method", "apart"),
    [
        (sb.Rank1(factors="output"), {"0.r"}),
        (sb.Rank1(factors="input"), {"0.s"}),
        (sb.Rank1(perturbation="additive", prior=sb.Normal(0.0, 0.5)), {"0.s"}),
        (sb.Rank1(posterior="delta"), {"0.s"}),
        (sb.Rank1(random="output"), {"0.s"}),
        (sb.Rank1(random_sign_init=-0.5), {"0.r", "0.s", "2.r", "2.s"}),
        (sb.Rank1(random_sign_init=0.5), {"0.r", "0.s", "2.r", "2.s"}),
        (sb.Rank1(random_sign_init=1.0), set()),
        (sb.Rank1.paper(), {"0.r", "0.s", "2.r", "2.s"}),
        (sb.BatchEnsemble(), {"0.r", "0.s", "2.r", "2.s"}),
        ([("0", sb.Rank1()), ("2", sb.Rank1(posterior="cauchy"))], {"0.s"}),
        ([("2", sb.Rank1()), ("0", sb.KTied())], {"2.s"}),
    ],
)
def test_where_components_begin_apart(method, apart):
    torch.manual_seed(0)
    model = sb.bayesianize(two_layers(), method)
    assert {where for where, spread in starts(model).items() if spread} == apart


def test_components_begin_apart_in_one_kernel_of_a_recurrent_layer():
    model = sb.bayesianize(nn.LSTM(5, 6, num_layers=2), sb.Rank1())
    assert [where for where, spread in starts(model).items() if spread] == ["ih_l0.s"]


def test_a_trained_network_is_near_what_it_was():
    """The mean of the new start beside that of all factors at N(1, 0.5²), from which nothing of it is left."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *[part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 4)
    )
    x = torch.randn(200, 64)
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight.mul_(3)
        plain = net(x)

        def error(method):
            return (
                (sb.draw(sb.bayesianize(copy.deepcopy(net), method), x, noise="mean") - plain).square().mean()
            )

        assert error(sb.Rank1()) < 0.6 * error(sb.Rank1(random_sign_init=-0.5))


def test_a_start_is_written_and_read(tmp_path):
    model = sb.bayesianize(two_layers(), sb.Rank1(components=2))
    sb.save(model, tmp_path / "model.safetensors")
    loaded = sb.load(two_layers(), tmp_path / "model.safetensors")
    assert starts(loaded) == starts(model)
    assert parse_method("Rank1(components=2, random_sign_init=None)") == sb.Rank1(components=2)
