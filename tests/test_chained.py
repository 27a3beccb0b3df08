"""Noise, ReLU and the next product's variance joined in a compiled graph: the same values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import slimbayes as sb
from slimbayes.accelerate.compile.local_chain import chain_noise
from slimbayes.accelerate.gpu import weight_samples
from slimbayes.core.rules.local import thin_factors, thin_factors_of_logs


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations run by their plain twins on the CPU, for weights of any size."""
    monkeypatch.setattr(weight_samples, "available", lambda device: True)
    monkeypatch.setattr(weight_samples, "_SMALLEST", 1)


class Residual(nn.Module):
    """A ReLU that is read again after the layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.third(h + torch.relu(self.second(h)))


class Early(nn.Module):
    """Rows that are read before the layer behind them, and no ReLU between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        scale = h.tanh()
        return self.third(self.second(h) * scale)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 5), nn.Linear(5, 3)
    )


NETWORKS = {"plain": (plain, 3), "residual": (Residual, 2), "early": (Early, 0)}


def run(model: nn.Module, chained: bool) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients of one step from a fixed seed, and how many noises were joined."""
    counts: list[int] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        if chained:
            counts.append(chain_noise(module.graph))
            module.recompile()
        return aot_eager(module, inputs)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sb.elbo(sb.draw(model, x), y, model, num_data=50).loss

    torch._dynamo.reset()
    torch.manual_seed(3)
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    value = torch.compile(loss, fullgraph=True, backend=backend)(x, y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, parameters)], sum(counts)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_of_logs(rank: int) -> None:
    """The same variance as from U and V themselves, and its gradient."""
    torch.manual_seed(0)
    logs = [torch.randn(n, rank, dtype=torch.float64, requires_grad=True) for n in (5, 4)]
    x = torch.randn(3, 5, dtype=torch.float64)
    found = []
    for a, b in (thin_factors_of_logs(*logs), thin_factors(logs[0].exp(), logs[1].exp())):
        variance = x.square() @ a @ b.t()
        found.append([variance, *torch.autograd.grad(variance.sum(), logs)])
    exact = x.square() @ (logs[0].exp() @ logs[1].exp().t()).square()
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other)
    torch.testing.assert_close(found[0][0], exact)


@pytest.mark.uncounted
@pytest.mark.parametrize("name", NETWORKS)
def test_joined_is_the_same(name: str) -> None:
    torch.manual_seed(0)
    build, expected = NETWORKS[name]
    model = sb.bayesianize(build(), sb.KTied.paper(estimator="local", stddev_init=0.3))
    ours, count = run(model, True)
    apart, none = run(model, False)
    assert count == expected and none == 0
    for value, target in zip(ours, apart, strict=True):
        torch.testing.assert_close(value, target, rtol=1e-5, atol=1e-6)


def test_the_library_s_compile_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step under autocast: the KL uses the sums of the cast weights, and equals the plain one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sb.bayesianize(plain(), sb.KTied.paper(estimator="local", stddev_init=0.3))
    made: list[int] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result = sb.elbo(sb.draw(model, x), y, model, num_data=50)
        made.append(len(weight_samples.SCOPE.made))
        return result.kl

    value = sb.compile(step, fullgraph=True)(torch.randn(7, 6), torch.randint(3, (7,)))
    assert made and made[0] == 4
    with sb.fast_paths(False):
        expected = sb.kl(model)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
    parameters = [p for name, p in model.named_parameters() if "log_" in name or name.endswith("0.weight")]
    found, wanted = (torch.autograd.grad(v, parameters) for v in (value, expected))
    for gradient, target in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, target, rtol=1e-4, atol=1e-4)
