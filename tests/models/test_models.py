"""The reference networks: parameter counts to the last digit, names, shapes, gradients."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimbayes.lab.models import (
    MLP,
    DeepMLP,
    LeNet,
    PyramidNet,
    RegressionNet,
    ResNet,
    TFPResNet,
    WideResNet,
    resnet18,
    resnet50,
    wrn28_10,
)
from slimbayes.lab.models.pyramidnet import pyramid_widths
from slimbayes.networks.initialization import he_normal_

Build = Callable[[], Any]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Layers this small lose more to waiting threads than they gain, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_meta(build: Build) -> Any:
    """Build without memory: enough to count."""
    with torch.device("meta"):
        return build()


def count(network: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module) -> int:
    modules = (m for m in network.modules() if isinstance(m, kind))
    return sum(p.numel() for m in modules for p in m.parameters(recurse=False))


def moving_statistics(network: nn.Module) -> int:
    return sum(b.numel() for name, b in network.named_buffers() if "running" in name)


def kernels(network: nn.Module) -> list[Tensor]:
    return [m.weight for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


COUNTS: dict[str, tuple[Build, int]] = {
    "wrn-28-10, 10 classes": (wrn28_10, 36_479_194),
    "wrn-28-10, activated": (lambda: WideResNet(28, 10, 10, "activated"), 36_479_194),
    "wrn-28-10, 100 classes": (lambda: wrn28_10(100), 36_536_884),
    "wrn-28-5": (lambda: WideResNet(28, 5, 10), 9_132_634),
    "resnet-18": (resnet18, 11_689_512),
    "resnet-18, group": (lambda: resnet18(norm="group"), 11_689_512),
    "resnet-50": (resnet50, 25_557_032),
    "resnet-50, group": (lambda: resnet50(norm="group"), 25_557_032),
    "pyramidnet": (PyramidNet, 28_511_307),
    "mlp": (MLP, 956_820 // 2),
    "deep mlp": (DeepMLP, 1_009_900),
    "deep mlp, norms": (lambda: DeepMLP(normalization=True), 1_009_900 + 99 * 200),
    "lenet": (LeNet, 4_405_320 // 2),
    "tfp resnet": (TFPResNet, 4_901_568 + 2_954 + 7_936 // 2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name: str) -> None:
    build, expected = COUNTS[name]
    network = on_meta(build)
    assert count(network) == expected
    assert all(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize(
    ("build", "moving", "factors"),
    [
        (wrn28_10, 17_952, 19_581),
        (lambda: wrn28_10(100), 17_952, 19_671),
        (resnet50, 53_120, 52_139),
    ],
)
def test_moving_statistics_and_rank1_factor_sizes(build: Build, moving: int, factors: int) -> None:
    network = on_meta(build)
    assert moving_statistics(network) == moving
    assert sum(w.shape[0] + w.shape[1] for w in kernels(network)) == factors


def test_wrn_layers() -> None:
    network = on_meta(wrn28_10)
    assert sum(isinstance(m, nn.Conv2d) for m in network.modules()) == 28
    assert not any(m.bias is not None for m in network.modules() if isinstance(m, nn.Conv2d))
    projections = [name for name, _ in network.named_modules() if name.endswith("projection")]
    assert projections == ["group1.0.projection", "group2.0.projection", "group3.0.projection"]
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-5, 0.1)}


def test_pyramidnet_split() -> None:
    network = on_meta(PyramidNet)
    assert count(network, nn.Conv2d) == 28_432_809
    assert count(network, nn.BatchNorm2d) == 49_798
    assert count(network, nn.Linear) == 28_700
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == 164
    assert pyramid_widths(54, 270) == [16 + 5 * i for i in range(55)]


def test_resnet18_split() -> None:
    network = on_meta(resnet18)
    assert count(network, nn.BatchNorm2d) == 9_600
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == 20
    assert count(network, nn.Linear) == 513_000


def test_lenet_split() -> None:
    network = on_meta(LeNet)
    assert [tuple(w.shape) for w in kernels(network)] == [
        (32, 3, 5, 5),
        (64, 32, 5, 5),
        (512, 4096),
        (100, 512),
    ]


def test_tfp_resnet_split() -> None:
    network = on_meta(TFPResNet)
    weights = kernels(network)
    assert len(weights) == 14
    assert sum(w.numel() for w in weights) == 4_901_568
    assert count(network, (nn.Conv2d, nn.Linear)) - 4_901_568 == 2_954
    assert count(network, nn.BatchNorm2d) + moving_statistics(network) == 7_936
    assert sum(w[0].numel() + w.shape[0] for w in weights) == 17_253


def torchvision_entries(depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of torchvision's ResNet state_dict, in order."""
    bottleneck = depth == 50
    expansion = 4 if bottleneck else 1
    counts = (3, 4, 6, 3) if bottleneck else (2, 2, 2, 2)

    def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for entry in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{entry}", (width,)
        yield f"{name}.num_batches_tracked", ()

    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    inputs = 64
    for stage, blocks in enumerate(counts, start=1):
        width = 32 * 2**stage
        outputs = width * expansion
        for block in range(blocks):
            prefix = f"layer{stage}.{block}"
            plain = [(width, inputs, 3), (width, width, 3)]
            squeezed = [(width, inputs, 1), (width, width, 3), (outputs, width, 1)]
            for i, (m, n, size) in enumerate(squeezed if bottleneck else plain, start=1):
                yield f"{prefix}.conv{i}.weight", (m, n, size, size)
                yield from norm(f"{prefix}.bn{i}", m)
            if block == 0 and inputs != outputs:
                yield f"{prefix}.downsample.0.weight", (outputs, inputs, 1, 1)
                yield from norm(f"{prefix}.downsample.1", outputs)
            inputs = outputs
    yield "fc.weight", (1000, inputs)
    yield "fc.bias", (1000,)


@pytest.mark.parametrize("depth", [18, 50])
def test_resnet_names_are_torchvisions(depth: int) -> None:
    network = on_meta(lambda: ResNet(depth))
    entries = [(name, tuple(value.shape)) for name, value in network.state_dict().items()]
    assert entries == list(torchvision_entries(depth))


def test_resnet50_has_its_stride_in_the_3x3() -> None:
    network = on_meta(resnet50)
    strided = {n for n, m in network.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)}
    stages = {f"layer{i}.0.{conv}" for i in (2, 3, 4) for conv in ("conv2", "downsample.0")}
    assert strided == stages | {"conv1"}


IMAGE = (3, 32, 32)
SMALL: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "wrn, raw": (lambda: WideResNet(10, 2, 7), (3, 16, 16), 7),
    "wrn, activated": (lambda: WideResNet(10, 2, 7, "activated"), (3, 16, 16), 7),
    "wrn, two blocks": (lambda: WideResNet(16, 1, 7, channels=1), (1, 13, 9), 7),
    "resnet-18": (lambda: resnet18(7), IMAGE, 7),
    "resnet-18, group": (lambda: resnet18(7, norm="group"), IMAGE, 7),
    "resnet-50": (lambda: resnet50(7), IMAGE, 7),
    "pyramidnet": (lambda: PyramidNet(14, 20, 7), (3, 16, 16), 7),
    "pyramidnet, odd size": (lambda: PyramidNet(8, 7, 7), (3, 13, 9), 7),
    "mlp": (MLP, (784,), 10),
    "mlp, image": (lambda: MLP((27, 8, 4), nn.Tanh, normalization=True), (3, 3, 3), 4),
    "mlp, linear": (lambda: MLP((5, 3)), (5,), 3),
    "deep mlp": (lambda: DeepMLP(4, 10, normalization=True), (10,), 10),
    "regression": (lambda: RegressionNet(13), (13,), 1),
    "regression, plain": (lambda: RegressionNet(8, 2, 100, "none"), (8,), 2),
    "lenet": (lambda: LeNet(7), IMAGE, 7),
    "lenet, mnist": (lambda: LeNet(7, channels=1, image_size=28, kernel_size=3), (1, 28, 28), 7),
    "tfp resnet": (lambda: TFPResNet(7), (3, 8, 8), 7),
    "tfp resnet, he": (lambda: TFPResNet(7, init="he"), (3, 8, 8), 7),
}


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_gradients(name: str) -> None:
    build, shape, outputs = SMALL[name]
    torch.manual_seed(0)
    network = build()
    x = torch.randn(2, *shape)

    y = network(x)
    assert y.shape == (2, outputs)
    names, parameters = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(torch.logsumexp(y, dim=1).sum(), parameters)
    assert [n for n, g in zip(names, gradients, strict=True) if not g.isfinite().all()] == []

    network.eval()
    with torch.no_grad():
        # Rows do not see each other: what folding draws into the batch relies on.
        torch.testing.assert_close(network(x[1:]), network(x)[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in SMALL if "resnet" not in name])
def test_copies_and_resets(name: str) -> None:
    build, shape, _ = SMALL[name]
    network = build().eval()
    x = torch.randn(2, *shape)
    with torch.no_grad():
        y = network(x)
        other = copy.deepcopy(network)
        assert torch.equal(other(x), y)
        other.reset_parameters()
        assert not torch.equal(other(x), y)
        other.load_state_dict(network.state_dict())
        assert torch.equal(other(x), y)


@pytest.mark.parametrize("shape", [(500, 200), (64, 32, 5, 5)])
def test_he_normal_has_variance_two_over_fan_in_and_is_cut(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = he_normal_(torch.empty(shape))
    stddev = (2 / weight[0].numel()) ** 0.5
    assert weight.std().item() == pytest.approx(stddev, rel=0.02)
    assert weight.abs().max().item() == pytest.approx(2 * stddev / 0.8796, rel=0.01)


def test_initial_values() -> None:
    torch.manual_seed(0)
    wide: Any = WideResNet(10, 4)
    assert wide.output.weight.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert not wide.output.bias.any()

    assert resnet18(100).fc.weight.std().item() == pytest.approx(0.01, rel=0.05)

    tfp: Any = TFPResNet()
    assert tfp.block4.conv2.weight.std().item() == pytest.approx(0.1, rel=0.02)
    assert tfp.block4.conv2.bias.std().item() == pytest.approx(0.1, rel=0.15)
    assert (tfp.norm.eps, tfp.norm.momentum) == (1e-3, 0.01)
    tfp = TFPResNet(init="he")
    he = tfp.block4.conv2
    assert he.weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.02)
    assert not he.bias.any()

    regression: Any = RegressionNet(3)
    for norm in (regression.input_norm, regression.hidden_norm):
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.2))

    pyramid: Any = PyramidNet(8, 300)
    kernel = pyramid.group3[0].conv2.weight
    assert kernel.std().item() == pytest.approx((2 / (9 * kernel.shape[0])) ** 0.5, rel=0.02)


def test_wrn_shortcut_projects_what_it_says() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    raw: Any = WideResNet(10, 1)
    activated: Any = WideResNet(10, 1, shortcut="activated")
    activated.load_state_dict(raw.state_dict())
    seen: list[Tensor] = []
    for network in (raw, activated):
        network.eval()
        network.group2[0].projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        network(x)
    assert (seen[0] < 0).any()
    assert (seen[1] >= 0).all()


def test_mlp_flattens_and_normalizes() -> None:
    network = MLP((12, 6, 2), normalization=True)
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(network(x), network(x.flatten(1)))
    assert list(dict(network.named_parameters())) == [
        "hidden.0.weight",
        "hidden.0.bias",
        "norms.0.weight",
        "norms.0.bias",
        "output.weight",
        "output.bias",
    ]


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (WideResNet, {"depth": 27}, "depth=27"),
        (WideResNet, {"depth": 10, "shortcut": "none"}, "shortcut='none'"),
        (ResNet, {"depth": 20}, "depth=20"),
        (resnet18, {"norm": "layer"}, "norm='layer'"),
        (PyramidNet, {"depth": 100}, "depth=100"),
        (PyramidNet, {"depth": 8, "alpha": -1}, "alpha=-1"),
        (MLP, {"sizes": (784,)}, r"sizes=\(784,\)"),
        (RegressionNet, {"inputs": 3, "normalization": "layer"}, "normalization='layer'"),
        (LeNet, {"image_size": 2}, "image_size=2"),
        (TFPResNet, {"init": "zeros"}, "init='zeros'"),
    ],
)
def test_errors_restate_the_input(build: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)
