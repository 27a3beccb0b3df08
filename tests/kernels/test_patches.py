"""Patches of many small tensors by one operation: versions, shared indices, gradients, and the layers' own path."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_groups
from slimbayes.accelerate.gpu.patches import choose_patches


def points(components: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors whose every element says which version it is of."""
    number = torch.arange(float(components), device=DEVICE)
    return [number.view(-1, *[1] * len(shape)).expand(components, *shape).clone() for shape in shapes]


def seed(value: int) -> torch.Tensor:
    return torch.tensor([value], device=DEVICE)


def test_a_group_shares_its_index_and_groups_do_not() -> None:
    given = points(5, (3,), (2, 2), (4,))
    first, second, third = choose_patches(given, [0, 0, 1], seed(3), 2000)
    assert first.shape == (2000, 3) and second.shape == (2000, 2, 2)
    assert (first == first[:, :1]).all() and (second.flatten(1) == first[:, :1]).all()
    assert 0.1 < float((third[:, 0] == first[:, 0]).float().mean()) < 0.3


def test_every_element_has_an_index_of_its_own_and_all_versions_are_as_likely() -> None:
    (chosen,) = choose_patches(points(5, (50,)), [-1], seed(4), 2000)
    counts = torch.bincount(chosen.flatten().long(), minlength=5).double() / chosen.numel()
    torch.testing.assert_close(counts.cpu(), torch.full((5,), 0.2).double(), rtol=0, atol=0.006)
    correlation = torch.corrcoef(chosen[:, :8].T.double()).cpu() - torch.eye(8)
    assert float(correlation.abs().max()) < 0.12


def test_the_gradient_goes_to_the_chosen_version() -> None:
    given = [each.double().requires_grad_() for each in points(3, (4,), (2,))]
    chosen = choose_patches(given, [-1, 0], seed(5), 6)
    weights = [torch.randn_like(each) for each in chosen]
    found = torch.autograd.grad(chosen, given, weights)
    for grad, values, weight in zip(found, chosen, weights, strict=True):
        expected = torch.stack([(weight * (values == version)).sum(0) for version in range(3)])
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_what_nobody_reads_has_gradient_zero() -> None:
    given = [each.requires_grad_() for each in points(3, (4,), (2,))]
    first, _ = choose_patches(given, [-1, -1], seed(6), 1)
    first.sum().backward()
    assert given[1].grad is None or float(given[1].grad.abs().sum()) == 0.0
    assert float(given[0].grad.sum()) == 4.0


@pytest.mark.parametrize(
    "method", [sb.EMP.paper(components=3), sb.ECMP.paper(components=3)], ids=["emp", "ecmp"]
)
def test_a_network_takes_the_patches_chosen_before_it_ran(method, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DEVICE.type
    monkeypatch.setattr(factor_groups, "DEVICES", (kind,))
    monkeypatch.setattr("slimbayes.accelerate.factor_groups.DEVICES", (kind,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(DEVICE)
    model = sb.bayesianize(net, method)
    with torch.no_grad():
        for layer in (model[1], model[3]):
            layer.weight.copy_(torch.arange(1.0, 4.0, device=DEVICE).view(3, *[1] * (layer.weight.dim() - 1)))
            layer.bias.copy_(torch.arange(1.0, 4.0, device=DEVICE)[:, None])
    x = torch.randn(8, 4, device=DEVICE)
    model.eval()
    means = {}
    for fast in (True, False):
        with sb.fast_paths(factors=fast, late=False), torch.no_grad():
            means[fast] = torch.stack([sb.draw(model, x, samples=64).mean((0, 1)) for _ in range(60)]).mean(0)
            seeded = sb.draw(model, x, samples=2, seed=3)
        means[f"seeded {fast}"] = seeded
    torch.testing.assert_close(means[True], means[False], rtol=0.06, atol=0.06)
    torch.testing.assert_close(means["seeded True"], means["seeded False"])
    model.train()
    step = torch.compile(lambda x: sb.draw(model, x).square().mean(), fullgraph=True, backend="aot_eager")
    step(x).backward()
    for layer in (model[1], model[3]):
        rows = layer.weight.grad.flatten(1).ne(0)
        assert rows.any() and (method == sb.ECMP.paper(components=3) or int(rows.any(1).sum()) == 1)
