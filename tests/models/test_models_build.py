"""Networks by name: sizes counted by hand, the network for a shape, and errors that say what is wrong."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.models import default_network
from slimbayes.lab.models.build import NETWORKS, DenseNet, build
from slimbayes.lab.models.text import network_builder

SMALL = {
    "dense": {"hidden": (6,)},
    "mlp": {"hidden": (6,)},
    "lenet": {"kernel_size": 3},
    "wrn": {"depth": 10, "width": 1},
    "pyramidnet": {"depth": 8, "alpha": 6},
    "tfp_resnet": {"widths": (4, 6, 8, 10), "init": "he"},
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


def test_mlp_is_the_network_of_the_ktied_paper():
    """784-400-400-10 with ReLU, he_normal kernels, zero biases and no norms."""
    network = build("mlp", (1, 28, 28), 10)
    assert [tuple(p.shape) for p in network.parameters() if p.dim() > 1] == [
        (400, 784),
        (400, 400),
        (10, 400),
    ]
    assert count(network) == 478_410
    for layer, fan_in in ((network.hidden[0], 784), (network.hidden[1], 400), (network.output, 400)):
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
        assert not layer.bias.any()
    x = torch.randn(3, 1, 28, 28)
    z = x.flatten(1)
    for layer in network.hidden:
        z = (z @ layer.weight.T).clamp(min=0)
    torch.testing.assert_close(network(x), z @ network.output.weight.T)
    assert count(build("mlp", (5,), 2, hidden=[])) == 12


def test_tfp_resnet_of_other_widths():
    network = build("tfp_resnet", (3, 32, 32), 7, widths=(4, 6, 8, 10))
    blocks = (network.block1, network.block2, network.block3, network.block4)
    assert [tuple(block.conv1.weight.shape[:2]) for block in blocks] == [(4, 4), (6, 4), (8, 6), (10, 8)]
    assert network.stem.out_channels == 4 and network.output.in_features == 10
    assert network.block4.conv2.bias.abs().max() > 0  # N(0, 0.1), where "he" has zeros
    assert not build("tfp_resnet", (3, 32, 32), 7, widths=(4, 6, 8, 10), init="he").block4.conv2.bias.any()


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
        assert count(build("tfp_resnet", (3, 32, 32), 10)) == 4_901_568 + 2_954 + 7_936 // 2


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
        (("alexnet", (3, 32, 32), 10), {}, "unknown network 'alexnet'; use one of dense, mlp, lenet"),
        (("wrn", (30,), 2), {}, r"'wrn' takes images, these inputs have shape \[30\]: use 'dense'"),
        (("dense", (30,), 2), {"depth": 3}, "'dense' cannot be built with .*depth"),
        (("dense", (30,), 2), {"hidden": 3}, "'dense' cannot be built with"),
        (("dense", (30,), 2), {"activation": "step"}, "activation='step' is unknown; use one of relu"),
        (("resnet18", (1, 32, 32), 2), {}, "resnet18 takes images of 3 channels, these have 1"),
        (("wrn", (3, 32, 32), 2), {"depth": 11}, "depth"),
        (("mlp", (3,), 2), {"hidden": 3}, "'mlp' cannot be built with"),
        (("tfp_resnet", (3, 32, 32), 2), {"widths": (4, 8)}, r"widths=\(4, 8\) needs the channels of four"),
        (("tfp_resnet", (3, 32, 32), 2), {"init": "zeros"}, "init='zeros' is unknown"),
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
    recurrent = {"lstm", "records"}  # their inputs are tokens and events: test_models_recurrent.py
    assert set(SMALL) | {"resnet18", "resnet50"} | recurrent == set(NETWORKS)
