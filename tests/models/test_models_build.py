"""Networks by name: sizes counted by hand, the network for a shape, and errors that say what is wrong."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.models import default_network
from slimbayes.models.build import NETWORKS, DenseNet, build
from slimbayes.specs import network_builder

SMALL = {
    "dense": {"hidden": (6,)},
    "lenet": {"kernel_size": 3},
    "wrn": {"depth": 10, "width": 1},
    "pyramidnet": {"depth": 8, "alpha": 6},
    "regression": {"hidden": 4},
}


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


def test_dense_counts_and_layers():
    with_norm, without = build("dense", (1, 8, 8), 10), build("dense", (1, 8, 8), 10, norm=False)
    weights = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
    assert count(without) == weights and count(with_norm) == weights + 2 * 2 * 128
    assert [type(layer) for layer in build("dense", (3,), 2, hidden=[5], activation="tanh").hidden] == [
        nn.Linear,
        nn.LayerNorm,
        nn.Tanh,
    ]
    linear = build("dense", (3,), 2, hidden=[])
    x = torch.randn(4, 3)
    torch.testing.assert_close(linear(x), x @ linear.output.weight.T + linear.output.bias)


def test_dense_by_hand():
    network = build("dense", (2, 3), 2, hidden=(4,), activation="relu")
    x = torch.randn(5, 2, 3)
    first, norm = network.hidden[0], network.hidden[1]
    z = x.reshape(5, 6) @ first.weight.T + first.bias
    z = (z - z.mean(1, keepdim=True)) / (z.var(1, correction=0, keepdim=True) + norm.eps).sqrt()
    expected = z.clamp(min=0) @ network.output.weight.T + network.output.bias
    torch.testing.assert_close(network(x), expected)


def test_dense_reset_draws_every_layer_anew():
    network = DenseNet((3,), 2, hidden=(4,))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(7.0)
    network.reset_parameters()
    assert not any((parameter == 7.0).any() for parameter in network.parameters())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_every_network_fits_its_shape(name, shape):
    network = build(name, shape, 7, **SMALL[name]).eval()
    x = torch.randn(2, *shape)
    assert network(x.flatten(1) if name == "regression" else x).shape == (2, 7)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_large_networks_on_meta():
    with torch.device("meta"):
        assert count(build("resnet50", (3, 224, 224), 1000)) == 25_557_032
        assert count(build("resnet18", (3, 224, 224), 1000)) == 11_689_512
        assert build("tfp_resnet", (3, 32, 32), 10) is not None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), "dense"),
        ((1, 28, 28), "dense"),
        ((3, 8, 8), "dense"),
        ((3, 32, 32), "wrn"),
        ((3, 224, 224), "resnet18"),
        ((1, 64, 64), "wrn"),  # resnet18 takes three channels
        ((30,), "dense"),
        ((2,), "dense(hidden=(100, 100), norm=False)"),
        ((1,), "dense(hidden=(100, 100), norm=False)"),
    ],
)
def test_the_network_for_a_shape(shape, expected):
    assert default_network(shape) == expected


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("alexnet", (3, 32, 32), 10), {}, "unknown network 'alexnet'; use one of dense, lenet"),
        (("wrn", (30,), 2), {}, r"'wrn' takes images, these inputs have shape \[30\]: use 'dense'"),
        (("dense", (30,), 2), {"depth": 3}, "'dense' cannot be built with .*depth"),
        (("dense", (30,), 2), {"hidden": 3}, "'dense' cannot be built with"),
        (("dense", (30,), 2), {"activation": "step"}, "activation='step' is unknown; use one of relu"),
        (("resnet18", (1, 32, 32), 2), {}, "resnet18 takes images of 3 channels, these have 1"),
        (("wrn", (3, 32, 32), 2), {"depth": 11}, "depth"),
    ],
)
def test_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments, **options)


@pytest.mark.parametrize("name", ["dense", "wrn"])
def test_converted_networks_can_be_saved_and_loaded(tmp_path, name):
    """Deep ensembles draw their members through reset_parameters, so every network by name must have it."""
    shape = (3, 16, 16)
    model = sb.bayesianize(build(name, shape, 3, **SMALL[name]), sb.DeepEnsemble(members=2)).eval()
    sb.save(model, tmp_path / "model.safetensors")
    again = sb.load(build(name, shape, 3, **SMALL[name]), tmp_path / "model.safetensors").eval()
    x = torch.randn(2, *shape)
    assert torch.equal(sb.predict(model, x, seed=0).draws, sb.predict(again, x, seed=0).draws)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 70, 70), (3, 16, 16), (5,), (2,)])
def test_auto_gives_a_network_that_runs(shape):
    network = network_builder("auto")(shape, 3).eval()
    assert network(torch.randn(1, *shape)).shape == (1, 3)


def test_the_table_of_networks_is_whole():
    assert set(SMALL) | {"resnet18", "resnet50", "tfp_resnet"} == set(NETWORKS)
