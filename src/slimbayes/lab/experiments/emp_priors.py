"""The EMP paper's Figure 3: functions drawn from the priors of a network of sign units, whole, dropped and patched.

    y = B + Σ_h W_h sign(b_h + w_h x),   b, B ~ N(0, 20),   w, W ~ N(0, 5),   H = 100 units

Such a function is constant but for its jumps, at x = −b_h / w_h. Dropout takes away those of every unit whose w_h or
W_h is 0; EMP chooses among K whole layers and has them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.convert import bayesianize
from slimbayes.core.draws import draw
from slimbayes.core.methods import EMP, DropConnect, MCDropout
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.outcome import Outcome, Table, check, curve
from slimbayes.lab.experiments.session import Session
from slimbayes.training import mixed_seed

_FUNCTIONS = {"smoke": 50, "desk": 1000, "gpu": 1000, "paper": 1000}
_DRAWN = 3  # functions in each panel, as in the paper's
_POINTS = 2001
_JUMP = 1e-9  # less is rounding


@dataclass(frozen=True)
class Prior:
    """The network and its prior: standard deviations of biases and weights, and x from −span to span."""

    units: int = 100
    bias: float = 20.0
    weight: float = 5.0
    rate: float = 0.5
    components: int = 5
    span: float = 10.0

    def grid(self) -> Tensor:
        """Where functions are evaluated, from −span to span."""
        return torch.linspace(-self.span, self.span, _POINTS, dtype=torch.float64)

    def kept(self, label: str) -> float:
        """The probability that a unit's jump is there: w_h and W_h both kept."""
        return (1 - self.rate) ** 2 if label == "Dropout" else 1.0

    def crossed(self, low: float, high: float) -> float:
        """P(low < −b/w < high): the ratio of two centred normals is Cauchy, of scale bias / weight."""
        scale = self.bias / self.weight
        return (math.atan(high / scale) - math.atan(low / scale)) / math.pi

    def jumps(self, label: str) -> float:
        """Expected number of steps of the grid in which a function changes: Σ_cells 1 − (1 − kept · P(cell))^H.

        >>> round(Prior().jumps("EMP"), 1), round(Prior().jumps("Dropout"), 1)
        (73.9, 18.8)
        """
        cells = zip(self.grid()[:-1].tolist(), self.grid()[1:].tolist(), strict=True)
        return sum(1 - (1 - self.kept(label) * self.crossed(*cell)) ** self.units for cell in cells)

    def spread(self, label: str) -> float:
        """Standard deviation of f(span) − f(−span): a sum of independent jumps ± 2 W_h.

        >>> round(Prior().spread("EMP") / Prior().spread("Dropout"), 6)
        2.0
        """
        number = self.units * self.kept(label) * self.crossed(-self.span, self.span)
        return 2 * self.weight * math.sqrt(number)


class Sign(nn.Module):
    """sign(x): a unit that is 1 or −1."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return x.sign()


def _network(prior: Prior) -> nn.Sequential:
    """The plain network, with weights and biases from the prior."""
    network = nn.Sequential(nn.Linear(1, prior.units), Sign(), nn.Linear(prior.units, 1)).double()
    for layer in (network[0], network[2]):
        _fill(layer, prior)
    return network


def _fill(layer: nn.Module, prior: Prior) -> None:
    """New values from the prior, in every component."""
    assert isinstance(layer.weight, Tensor) and isinstance(layer.bias, Tensor)
    nn.init.normal_(layer.weight, 0.0, prior.weight)
    nn.init.normal_(layer.bias, 0.0, prior.bias)


def whole(prior: Prior) -> nn.Module:
    """The network itself, whose functions tend to a Gaussian process: one deterministic draw."""
    return bayesianize(_network(prior), EMP.paper(components=1, patch=("input", "output")))


def dropped(prior: Prior) -> nn.Module:
    """Weights w and W that are 0 with probability ``rate``; W by its unit, which for one output is the same.

    Both methods divide what they keep by 1 − rate, so that the mean stays: here the paper's weights do not grow.
    """
    network = _network(prior)
    with torch.no_grad():
        for layer in (network[0], network[2]):
            layer.weight.mul_(1 - prior.rate)  # type: ignore[operator]
    return bayesianize(network, [("^0$", DropConnect(prior.rate)), ("^2$", MCDropout(prior.rate))])


def patched(prior: Prior) -> nn.Module:
    """Both layers in K components, each from the prior."""
    network = bayesianize(_network(prior), EMP.paper(components=prior.components, patch=("input", "output")))
    for layer in (network[0], network[2]):
        _fill(layer, prior)
    return network


METHODS: dict[str, Callable[[Prior], nn.Module]] = {
    "Whole network": whole, "Dropout": dropped, "EMP": patched,
}  # fmt: skip


def functions(prior: Prior, label: str, number: int, seed: int = 0) -> Tensor:
    """So many functions on the grid, [number, points]: each of a network of its own, and one draw of it."""
    x, found = prior.grid().unsqueeze(-1), []  # [points, 1]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for index in range(number):
            torch.manual_seed(mixed_seed(seed, index))
            network = METHODS[label](prior)
            found.append(draw(network, x, noise="shared", seed=mixed_seed(seed, index, 1))[0, :, 0])
    return torch.stack(found)


def measured(values: Tensor) -> dict[str, Tensor]:
    """Of every function [number, points]: its jumps, and the largest of them in % of its range."""
    steps = values.diff(dim=1).abs()  # [number, points − 1]
    span = values.amax(1) - values.amin(1)
    return {
        "jumps": (steps > _JUMP).sum(1).double(),
        "largest jump, % of the range": 100 * steps.amax(1) / span.clamp_min(_JUMP),
    }


def figure3(session: Session, setting: str) -> Outcome:
    """Figure 3: a few functions of each prior, and how fine they are."""
    prior, number = Prior(), _FUNCTIONS[session.scale]
    outcome = Outcome(tables=[_printed(prior)])
    ends = f"[−{prior.span:g}, {prior.span:g}]"
    columns = ("jumps", "jumps, expected", "largest jump, % of the range")
    table = Table("functions", f"Functions on {ends}: means over {number:,}", columns)
    for label in METHODS:
        values = functions(prior, label, number)
        found = measured(values)
        means = {name: float(each.mean()) for name, each in found.items()}
        errors = {name: float(each.std() / number**0.5) for name, each in found.items()}
        table.add(label, means | {"jumps, expected": prior.jumps(label)}, errors)
        distance = abs(means["jumps"] - prior.jumps(label)) / errors["jumps"]
        words = f"{label}: jumps as expected, in standard errors"
        outcome.checks.append(check(words, distance < 4, distance, "< 4"))
        if label != "Whole network":  # the paper's two panels
            x, shown = prior.grid()[::8].tolist(), values[:_DRAWN, ::8].tolist()
            drawn = [(f"function {number}", x, [one]) for number, one in enumerate(shown, 1)]
            outcome.curves.append(curve(label.lower(), f"{label}: {_DRAWN} functions", "x", "f(x)", drawn))
    outcome.tables.append(table)
    outcome.checks += _finer(table)
    variance = Prior(bias=prior.bias**0.5, weight=prior.weight**0.5)
    other = ", ".join(f"{variance.jumps(label):.1f} ({label})" for label in ("Dropout", "EMP"))
    outcome.deviations += [
        f"20 and 5 are taken as standard deviations; as variances there would be {other} jumps.",
        f"The paper does not say where x lies: {ends} here, at {_POINTS:,} points. Jumps between two of them count as "
        "one, in the expected number too.",
        "Each function is one draw from a network of its own, with components of its own.",
        "w is dropped by DropConnect, W by MCDropout, without their division by 1 − p, as the paper describes it.",
    ]
    return outcome


def _finer(table: Table) -> list[dict[str, Any]]:
    """What the paper shows with the figure, in numbers."""
    ratio = table.mean("EMP", "jumps") / table.mean("Dropout", "jumps")
    rough, fine = (table.mean(label, "largest jump, % of the range") for label in ("Dropout", "EMP"))
    words = "The largest jump takes more of the range under dropout than under EMP: ratio"
    return [
        check("EMP's functions jump more than twice as often as dropout's: ratio", ratio > 2, ratio, "> 2"),
        check(words, rough > fine, rough / fine, "> 1"),
    ]


def _printed(prior: Prior) -> Table:
    """What was run, in the words of the entry's table."""
    entry = find("emp/figure3").table("prior")
    assert entry is not None
    table = Table(entry.name, entry.title, entry.columns)
    values = (prior.units, prior.bias, prior.weight, prior.rate, prior.components)
    for label, value in zip(entry.rows, values, strict=True):
        table.add(label, {"value": float(value)}, {})
    return table
