"""Kernels compiled ahead of their first start are those that a step starts, and no others."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_groups
from slimbayes.accelerate.compile import norm_fusion
from slimbayes.accelerate.compile.first_fusion import fuse_first
from slimbayes.accelerate.gpu import launch, warm_up
from slimbayes.accelerate.row_factors import row_product
from slimbayes.lab.models import WideResNet
from slimbayes.lab.models.resnet import resnet18

KIND = DEVICE.type


def traced(method, monkeypatch: pytest.MonkeyPatch, build, size: int):
    """Run one step whose graph is executed node by node; the calls foreseen, and those made."""
    monkeypatch.setattr(factor_groups, "DEVICES", (KIND,))
    monkeypatch.setattr("slimbayes.accelerate.factor_groups.DEVICES", (KIND,))
    torch._dynamo.reset()
    torch.compiler.allow_in_graph(row_product)
    torch.manual_seed(0)
    model = sb.bayesianize(build().to(DEVICE, memory_format=torch.channels_last), method)
    x = torch.randn(2, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.tensor([1, 2], device=DEVICE)
    foreseen: list = []
    made: dict = {}

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        assert norm_fusion.fuse_norms(module.graph, (KIND,)) and fuse_first(module.graph, (KIND,))
        module.recompile()
        foreseen.extend(warm_up.kernel_calls(module.graph))
        return module.forward

    start = launch._start

    def noted(kernel, programs, device, args, meta) -> None:
        kinds = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
        made[(id(kernel), *map(warm_up._kind, kinds), *meta.items())] = kernel
        start(kernel, programs, device, args, meta)

    def objective(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sb.elbo(sb.draw(model, x), y, model, num_data=100).loss

    monkeypatch.setattr(launch, "_start", noted)
    torch.compile(objective, backend=backend, fullgraph=True)(x, y).backward()
    keys = {(id(kernel), *map(warm_up._kind, args), *meta.items()) for kernel, args, meta in foreseen}
    return keys, made


@needs_kernels
@pytest.mark.parametrize(
    "method, build, size",
    [
        (sb.Rank1.paper(components=2), lambda: WideResNet(10, 1, 3), 8),
        (sb.BatchEnsemble(components=2), lambda: resnet18(3), 32),
    ],
    ids=["rank1", "batchensemble"],
)
def test_the_calls_foreseen_are_those_made(method, build, size, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, made = traced(method, monkeypatch, build, size)
    assert len(keys) > 6
    missing = [kernel for key, kernel in made.items() if key not in keys]
    assert not missing and len(keys) == len(made)


def test_nothing_is_compiled_without_a_gpu() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2)
    graph.output(x)
    assert warm_up.kernel_calls(graph) == []
    with warm_up.warmed(graph):
        pass


def test_what_fails_while_warming_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def warmup(self, *args, **meta) -> None:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(warm_up, "_device", lambda graph: torch.device("cuda", 0))
    monkeypatch.setattr(warm_up, "available", lambda device: True)
    monkeypatch.setattr(warm_up, "INTERPRETED", False)
    monkeypatch.setattr(warm_up, "_enter", lambda index: None)
    monkeypatch.setattr(warm_up, "kernel_calls", lambda graph: [(Broken(), (), {})])
    with warm_up.warmed(torch.fx.Graph()):
        ran = nn.Identity()(3)
    assert ran == 3 and launch.RECORDER.calls is None
