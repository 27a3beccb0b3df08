"""EMP with own_statistics: every component of a BatchNorm against a BatchNorm of torch's that sees its rows alone."""

import copy

import pytest
import torch
from helpers_statistics import F64, force_noise
from torch import nn
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.core.context import Draw, activate
from slimbayes.core.conversion import converted_layers
from slimbayes.lab.models import WideResNet

K, BATCH, CHANNELS = 3, 4, 2
SHAPES = {
    "1d": (nn.BatchNorm1d, ()),
    "1d, positions": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
}


def patched(kind="1d", **options):
    """A norm with components and statistics set apart, and one of torch's for each of them."""
    torch.manual_seed(0)
    norm = SHAPES[kind][0](CHANNELS, **options).double()
    torchs = [copy.deepcopy(norm) for _ in range(K)]
    net = sb.bayesianize(nn.Sequential(norm), sb.EMP(K, patch="norm", own_statistics=True))
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean"):
            getattr(norm, name).normal_()
        norm.running_var.uniform_(0.5, 2)
        for k, theirs in enumerate(torchs):
            for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
                tensor.copy_(getattr(norm, name)[k])
    return net, torchs


def force(monkeypatch, index):
    """Draw d takes component index[d]."""

    def make(kind, source, size):
        assert kind == "uniform"
        return ((torch.tensor(index, dtype=F64) + 0.5) / K).reshape(size)

    force_noise(monkeypatch, make)


def data(kind, draws):
    """Rows of every draw [D, B, C, ...]: the same in all would hide whose they are."""
    torch.manual_seed(1)
    return 3 + 2 * torch.randn(draws, BATCH, CHANNELS, *SHAPES[kind][1], dtype=F64)


def run(net, x, noise="example"):
    """The outputs of all draws of rows [D, B, C, ...]."""
    with activate(Draw(1, len(x), x.shape[1], noise)):
        return net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("index", [[1], [0, 2, 0, 0], [2, 2], [0, 1, 2]])
@pytest.mark.parametrize("kind", SHAPES)
def test_training_is_that_of_a_norm_per_component(monkeypatch, kind, index, momentum):
    net, torchs = patched(kind, momentum=momentum)
    norm, x = net[0], data(kind, len(index)).requires_grad_()
    force(monkeypatch, index)
    net.train()
    for _ in range(2):  # the second batch finds what the first one left
        ours, parts = run(net, x), x.detach().clone().requires_grad_()
        theirs = torch.zeros_like(ours)
        for k in set(index):
            places = torch.tensor([d for d, z in enumerate(index) if z == k])
            joined = torchs[k].train()(parts[places].flatten(0, 1))  # all rows of the component
            theirs = theirs.index_copy(0, places, joined.unflatten(0, (-1, BATCH)))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    gradient = torch.randn_like(ours)
    ours.backward(gradient)
    theirs.backward(gradient)
    torch.testing.assert_close(x.grad, parts.grad, rtol=1e-8, atol=1e-10)
    for k, one in enumerate(torchs):
        for name, parameter in one.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(getattr(norm, name).grad[k], wanted, rtol=1e-8, atol=1e-10)
        for name, buffer in one.named_buffers():
            torch.testing.assert_close(getattr(norm, name)[k], buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("index", [[1], [0, 2, 0, 1]])
@pytest.mark.parametrize("kind", SHAPES)
def test_prediction_takes_the_statistics_of_the_component(monkeypatch, kind, index):
    net, torchs = patched(kind)
    x = data(kind, len(index))
    force(monkeypatch, index)
    net.eval()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    wanted = torch.stack([torchs[z].eval()(rows) for z, rows in zip(index, x, strict=True)])
    torch.testing.assert_close(run(net, x), wanted, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def test_without_noise_the_statistics_are_averaged_and_stay():
    net, _ = patched("2d")
    norm, x = net[0], data("2d", 1)
    mean, variance, weight, bias = (
        getattr(norm, name).detach().mean(0) for name in ("running_mean", "running_var", "weight", "bias")
    )
    wanted = F.batch_norm(x[0], mean, variance, weight, bias)
    torch.testing.assert_close(run(net.eval(), x, "mean")[0], wanted)
    before = norm.running_mean.clone()
    trained = run(net.train(), x, "mean")[0]
    torch.testing.assert_close(trained, F.batch_norm(x[0], None, None, weight, bias, True))
    assert torch.equal(norm.running_mean, before)


def network(**options):
    torch.manual_seed(0)
    return sb.bayesianize(WideResNet(10, 1, 4, channels=1), sb.EMP(K, init_noise=0.3, **options))


def test_only_norms_with_statistics_have_them():
    net = network(own_statistics=True)
    for name, layer in converted_layers(net):
        assert layer.bayes.own_statistics == (name != "output")
    assert not any(layer.bayes.own_statistics for _, layer in converted_layers(network()))
    for norm in (nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3, track_running_stats=False)):
        net = sb.bayesianize(nn.Sequential(norm), sb.EMP(K, patch="norm", own_statistics=True))
        assert not net[0].bayes.own_statistics
        assert sb.draw(net, torch.randn(4, 3)).shape == (1, 4, 3)
    with pytest.raises(TypeError, match="own_statistics"):
        sb.ECMP(own_statistics=True)


def test_a_trained_network_keeps_its_statistics(tmp_path):
    net, x, y = network(own_statistics=True), torch.randn(96, 1, 8, 8), torch.randint(4, (96,))
    plain = WideResNet(10, 1, 4, channels=1)
    result = sb.fit(net, (x, y), epochs=5, batch_size=16, lr=1e-2, progress=False)
    assert result.step == 30 and result.history[-1]["nll"] < result.history[0]["nll"]
    assert net.norm.num_batches_tracked.sum() == 30, "one component a step"
    assert float(net.norm.running_mean.std(0).min()) > 0, "each has its own"
    sb.save(net, tmp_path / "model.safetensors")
    again = sb.load(plain, tmp_path / "model.safetensors")
    wanted = sb.predict(net, x[:9], samples=6, seed=2).mean
    torch.testing.assert_close(sb.predict(again, x[:9], samples=6, seed=2).mean, wanted)
    torch.testing.assert_close(sb.predict(net, x[:9], samples=6, seed=2, chunk=4).mean, wanted)
    torch.testing.assert_close(sb.predict(copy.deepcopy(net), x[:9], samples=6, seed=2).mean, wanted)


def test_statistics_from_before_the_conversion_are_everybodys():
    plain = WideResNet(10, 1, 4, channels=1)
    plain.norm.running_mean.normal_()
    net = network(own_statistics=True)
    net.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(net.norm.running_mean, plain.norm.running_mean.expand(K, -1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
def test_compiled_code_does_the_same(training, samples):
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
    eager = sb.bayesianize(nn.Sequential(*layers), sb.EMP(K, patch="norm", own_statistics=True))
    other, x = copy.deepcopy(eager.train(training)), torch.randn(8, 5)

    def logits(model):
        return sb.draw(model, x, samples=samples, seed=3)

    run_compiled = torch.compile(lambda: logits(other), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run_compiled(), logits(eager), rtol=1e-4, atol=1e-5)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(dict(other.named_buffers())[name], buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [1, 4])
def test_low_precision_keeps_the_statistics_precise(samples):
    net, _ = patched("2d")
    net = net.float()
    with torch.no_grad():
        net[0].running_mean.add_(100)  # far from 0, as 16 bits cannot be
    x = (100 + torch.randn(BATCH, CHANNELS, 3, 2)).bfloat16()
    wanted = sb.draw(net.eval(), x.float(), samples=samples, seed=0)
    low = sb.draw(net, x, samples=samples, seed=0)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), wanted, rtol=2e-2, atol=2e-2)
    trained = sb.draw(net.train(), x, samples=samples, seed=0)
    assert trained.dtype == torch.bfloat16 and net[0].running_mean.dtype == torch.float32
