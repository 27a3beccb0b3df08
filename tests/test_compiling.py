"""sb.compile: BatchNorm, ReLU and the factors beside them as one operation, with the same results."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.accelerate import factor_groups
from slimbayes.accelerate.compile import entry, norm_fusion
from slimbayes.lab.models import WideResNet
from slimbayes.lab.models.resnet import BasicBlock, Bottleneck


def short_resnet(block: type[BasicBlock] | type[Bottleneck]) -> nn.Module:
    """The stem and blocks of ResNet-18 or -50 in two stages of two: each with a shortcut of either kind."""
    wide = 16 * block.expansion
    stem = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    stages = [block(16, 16), block(wide, 16), block(wide, 32, stride=2), block(2 * wide, 32)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * wide, 10))


NETWORKS = {
    "wrn": (lambda: WideResNet(10, 1, 10), 16),
    "deep wrn": (lambda: WideResNet(16, 1, 10, "activated"), 16),
    "resnet": (lambda: short_resnet(BasicBlock), 64),
    "bottleneck": (lambda: short_resnet(Bottleneck), 32),
}
FUSED = (norm_fusion.NORM_ROWS, norm_fusion.SUM_NORM_ROWS, norm_fusion.NORM_SUM_ROWS)
METHODS = {
    "batchensemble": sb.BatchEnsemble(components=2),
    "rank1": sb.Rank1.paper(components=2),
    "random output": sb.Rank1.paper(components=2, random="output"),
}


def run(network: str, method: str, fuse: bool):
    """Loss, gradients and buffers after one step whose graph ran node by node, and what was fused in it."""
    torch._dynamo.reset()
    torch.compiler.allow_in_graph(entry.row_product)
    torch.manual_seed(0)
    build, size = NETWORKS[network]
    model = sb.bayesianize(build().double().to(memory_format=torch.channels_last), METHODS[method])
    x = torch.randn(4, 3, size, size, dtype=torch.float64).to(memory_format=torch.channels_last)
    y = torch.tensor([1, 2, 3, 4])
    found = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        if fuse:
            found.append(norm_fusion.fuse_norms(module.graph, ("cpu",)))
            module.recompile()
        found.append([node.target for node in module.graph.nodes])
        return module.forward

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sb.elbo(sb.draw(model, x), y, model, num_data=100).loss

    torch.manual_seed(1)
    value = torch.compile(loss, backend=backend, fullgraph=True)(x, y)
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return value.detach(), gradients, dict(model.named_buffers()), found


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize(
    "network, method, counts",
    [
        ("wrn", "rank1", (4, 3, 0)),  # the sums in front of the blocks' first norms and of the last
        ("wrn", "random output", (4, 3, 0)),
        ("deep wrn", "batchensemble", (7, 6, 0)),
        ("resnet", "batchensemble", (6, 0, 4)),  # the sums behind the blocks' last norms
        ("bottleneck", "rank1", (11, 0, 4)),
    ],
)
def test_one_operation_gives_the_same_step(network: str, method: str, counts: tuple[int, ...]) -> None:
    value, gradients, buffers, found = run(network, method, True)
    expected, wanted, kept, plain = run(network, method, False)
    norms = plain[0].count(F.batch_norm)
    assert found[0] == sum(counts) and found[1].count(F.batch_norm) == norms - found[0]
    assert tuple(found[1].count(function) for function in FUSED) == counts
    assert found[1].count(norm_fusion.follow_all) == 1 and found[1].count(norm_fusion.follow) == 0
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    for name, buffer in kept.items():  # running statistics and the count of batches
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-9, atol=1e-9, msg=name)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-7, msg=name)


def test_networks_without_factors_are_left_alone() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(
        memory_format=torch.channels_last
    )
    counts = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        counts.append(norm_fusion.fuse_norms(module.graph, ("cpu",)))
        return module.forward

    torch.compile(net, backend=backend)(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    assert counts == [0]


def test_evaluation_mode_is_left_alone() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2, 4, 3, 3).to(memory_format=torch.channels_last)
    f = graph.placeholder("f")
    product = graph.call_function(entry.row_product, (x, f))
    product.meta["example_value"] = x.meta["example_value"]
    norm = graph.call_function(F.batch_norm, (product, None, None, f, f, False, 0.1, 1e-5))
    graph.output(norm)
    assert norm_fusion.fuse_norms(graph, ("cpu",)) == 0
    norm.args = (product, None, None, f, f, True, 0.1, 1e-5)
    assert norm_fusion.fuse_norms(graph, ("cpu",)) == 1


def test_a_compiled_loss_takes_the_weights_of_a_schedule() -> None:
    """The first is a constant of the code, every other an input of it: two graphs, whatever the schedule's length."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(4, 3).double(), sb.Rank1.paper(components=2))
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    graphs = torch._dynamo.testing.CompileCounter()

    @torch.compile(fullgraph=True, backend=graphs)
    def parts(x: torch.Tensor, y: torch.Tensor, weight: float) -> tuple[torch.Tensor, ...]:
        found = sb.elbo(sb.draw(model, x), y, model, num_data=100, kl_weight=weight)
        return found.loss, found.nll, found.kl

    for step in range(6):
        weight = sb.LinearAnnealing(8)(step)
        loss, nll, divergence = parts(x, y, weight)
        torch.testing.assert_close(loss, nll + weight * divergence / 100)
    assert graphs.frame_count == 2
    for wrong in (float("nan"), float("inf"), -0.1):
        with pytest.raises(ValueError, match="kl_weight must be finite and at least 0"):
            sb.elbo(sb.draw(model, x), y, model, num_data=100, kl_weight=wrong)


@pytest.mark.uncounted(but=3)
@pytest.mark.parametrize(
    "method",
    [sb.Rank1.paper(), sb.KTied.paper(), sb.EMP.paper(patch=("output",))],
    ids=lambda m: type(m).__name__,
)
def test_compiled_step_trains(method: sb.methods.Method) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), method)
    x = torch.randn(64, 4)
    y = x[:, :3].argmax(1)
    optimizer = torch.optim.Adam(sb.parameter_groups(model, 1e-2, 0.0))
    step = sb.compile(
        lambda x, y: sb.elbo(sb.draw(model, x), y, model, num_data=640, kl_weight=0.01).loss, fullgraph=True
    )
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"unknown mode 'fast'.*reduce-overhead"):
        sb.compile(lambda x: x, mode="fast")


@pytest.mark.parametrize("random", ["both", "output"])
@pytest.mark.parametrize("posterior", ["normal", "cauchy", "lognormal", "halfcauchy"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_grouped_kl_equals_the_sum_over_layers(posterior: str, reduction: str, random: str) -> None:
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 6), nn.Conv1d(1, 2, 1)),
        sb.Rank1.paper(posterior=posterior, kl_reduction=reduction, random=random),
    ).double()
    results = []
    for fast in (True, False):
        model.zero_grad()
        with sb.fast_paths(fast):
            value = sb.kl(model)
        value.backward()
        results.append((value.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


def test_all_factors_at_once_have_the_layers_own_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor_groups, "DEVICES", ("cpu",))
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), sb.Rank1.paper(components=2, dropout_rate=0.1)
    )
    groups = factor_groups.find_groups([model[0].bayes, model[1].bayes])
    assert len(groups) == 1 and len(groups[0].sources) == 4
    from slimbayes.core.context import Draw

    draw = Draw(2, 1, 20_000)
    factor_groups.prefill(groups, draw)
    for source, factor in zip(groups[0].sources, groups[0].factors, strict=True):
        value = draw.prefilled[source]
        assert value.shape == (2, 1, 20_000, factor.loc.shape[1])
        z = (value[:, 0] - factor.loc[:, None]) / factor().scale[:, None]
        assert float(z.mean(1).abs().max()) < 0.04 and float((z.var(1) - 1).abs().max()) < 0.06
    out = sb.draw(model, torch.randn(5, 3))
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_factors_sampled_before_the_network_survive_activation_checkpointing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setattr(factor_groups, "DEVICES", ("cpu",))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.again = nn.Linear(4, 6), nn.Linear(6, 2), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = checkpoint(self.a, x, use_reentrant=False) if self.again else self.a(x)
            return self.b(h.relu())

    torch.manual_seed(0)
    model = sb.bayesianize(Checkpointed(), sb.Rank1.paper(components=2))
    x = torch.randn(3, 4)
    sb.draw(model, x)  # the first draw also checks the rows
    results = []
    for again in (True, False):
        model.again = again
        model.zero_grad()
        torch.manual_seed(1)
        sb.draw(model, x).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.uncounted
def test_grouped_kl_has_forward_mode_and_second_derivatives() -> None:
    from torch.func import functional_call, jvp

    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(6, 5), sb.Rank1.paper(components=2)).double()
    loc = model.bayes.r.loc
    tangent = torch.randn_like(loc)

    def kl(value: torch.Tensor) -> torch.Tensor:
        return functional_call(Holder(model), {"model.bayes.r.loc": value}, ())

    fast = jvp(kl, (loc.detach(),), (tangent,))[1]
    (gradient,) = torch.autograd.grad(sb.kl(model), loc, create_graph=True)
    torch.testing.assert_close(fast, (gradient * tangent).sum().detach())
    (second,) = torch.autograd.grad(gradient.square().sum(), loc)
    torch.testing.assert_close(second, 2 * gradient.detach() * 100.0)  # the prior's precision is 1/0.1²


class Holder(nn.Module):
    """The KL as a forward pass, for torch.func."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        return sb.kl(self.model)


def test_converted_layers_come_in_the_order_of_their_names() -> None:
    from slimbayes.core.conversion import converted_layers
    from slimbayes.core.layers.base import Converted

    net = WideResNet(10, 1, 3)
    net.again = net.output
    model = sb.bayesianize(net, sb.Rank1.paper())
    expected = [(name, module) for name, module in model.named_modules() if isinstance(module, Converted)]
    assert converted_layers(model) == expected and len(expected) > 5


@pytest.mark.uncounted
def test_draw_and_kl_of_one_compiled_call_share_the_joined_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(factor_groups, "DEVICES", ("cpu",))
    monkeypatch.setattr("slimbayes.accelerate.factor_groups.DEVICES", ("cpu",))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), sb.Rank1.paper(components=2))
    seen: list[list[object]] = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        seen.append([node.target for node in module.graph.nodes])
        return module.forward

    def objective(x: torch.Tensor) -> torch.Tensor:
        return sb.draw(model, x).square().mean() + sb.kl(model)

    for function, joins in ((entry._scoped(objective), 2), (objective, 4)):
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(function, backend=backend, fullgraph=True)(torch.zeros(2, 3)).backward()
        assert seen[-1].count(torch.ops.slimbayes.join) == joins
        assert all(p.grad is not None for name, p in model.named_parameters() if ".bayes." in name)
    assert factor_groups.JOINS.made == [] and not factor_groups.JOINS.rules


@pytest.mark.uncounted(but=2)
@pytest.mark.parametrize("clip", [None, 1.2])
def test_point_factors_of_all_convolutions_are_repeated_at_once(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factor_groups, "DEVICES", ("cpu",))
    monkeypatch.setattr("slimbayes.accelerate.factor_groups.DEVICES", ("cpu",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    model = sb.bayesianize(
        net, sb.Rank1.paper(components=2, posterior="delta", random_sign_init=-0.5, clip=clip)
    )
    x = torch.randn(5, 3, 8, 8)
    seen: list[object] = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        seen.append([node.target for node in module.graph.nodes].count(torch.ops.slimbayes.factors))
        assert all(node.users for node in module.graph.nodes if node.target == "view")  # all parts are read
        return module.forward

    results = []
    for fast in (True, False):
        torch._dynamo.reset()
        model.zero_grad()
        with sb.fast_paths(factors=fast):
            run = torch.compile(lambda x: sb.draw(model, x).sin().mean(), backend=backend, fullgraph=True)
            value = run(x)
            value.backward()
        results.append((value.detach(), [p.grad.clone() for p in model.parameters()]))
    assert seen == [1, 0]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_unknown_operations_are_named_in_short(monkeypatch) -> None:
    """Old versions write out all inputs of an operation, and theirs: for deep residual networks without end."""
    from torch._inductor import exc

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", exc.OperatorIssue.operator_str)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    entry._shorten_messages()
    error = exc.MissingOperatorWithoutDecomp(torch.ops.aten.relu.default, [torch.zeros(3)], {})
    assert "aten.relu.default" in str(error) and "tensor" not in str(error)
