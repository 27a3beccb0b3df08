"""The EMP paper's Figure 1: the memory of graphics cards by year, and in how many years it doubles.

memory(year) = 2^(α · year + β) + γ,   doubling time 1 / α
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.outcome import Outcome, Table, curve
from slimbayes.lab.experiments.session import Session

# (card, year and month of its launch, memory in MiB): well-known desktop cards, as their makers announced them.
CARDS: tuple[tuple[str, int, int, int], ...] = (
    ("GeForce 6800 Ultra", 2004, 4, 256), ("Radeon X800 XT", 2004, 5, 256), ("GeForce 7800 GTX", 2005, 6, 256),
    ("Radeon X1800 XT", 2005, 10, 512), ("GeForce 7900 GTX", 2006, 3, 512), ("Radeon X1950 XTX", 2006, 8, 512),
    ("GeForce 8800 GTX", 2006, 11, 768), ("Radeon HD 2900 XT", 2007, 5, 512), ("Radeon HD 3870", 2007, 11, 512),
    ("GeForce GTX 280", 2008, 6, 1024), ("Radeon HD 4870", 2008, 6, 512), ("Radeon HD 5870", 2009, 9, 1024),
    ("GeForce GTX 480", 2010, 3, 1536), ("GeForce GTX 580", 2010, 11, 1536), ("Radeon HD 6970", 2010, 12, 2048),
    ("Radeon HD 7970", 2012, 1, 3072), ("GeForce GTX 680", 2012, 3, 2048), ("GeForce GTX Titan", 2013, 2, 6144),
    ("Radeon R9 290X", 2013, 10, 4096), ("GeForce GTX 780 Ti", 2013, 11, 3072), ("GeForce GTX 980", 2014, 9, 4096),
    ("GeForce GTX Titan X", 2015, 3, 12288), ("GeForce GTX 980 Ti", 2015, 6, 6144), ("Radeon R9 Fury X", 2015, 6, 4096),
    ("GeForce GTX 1080", 2016, 5, 8192), ("Radeon RX 480", 2016, 6, 8192), ("Titan X (Pascal)", 2016, 8, 12288),
    ("GeForce GTX 1080 Ti", 2017, 3, 11264), ("Radeon RX Vega 64", 2017, 8, 8192), ("Titan V", 2017, 12, 12288),
    ("GeForce RTX 2080 Ti", 2018, 9, 11264), ("Titan RTX", 2018, 12, 24576), ("Radeon VII", 2019, 2, 16384),
)  # fmt: skip
TEXT = ((2015, 12.0), (2018, 24.0))  # the only cards in the paper's text: the largest of two years, in GB
MODELS = {"2^(α year + β) + γ": True, "2^(α year + β)": False}  # whether there is a γ
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Trend:
    """A fitted trend: 2^(alpha · (year − origin)) · factor + gamma."""

    alpha: float
    factor: float
    gamma: float
    origin: float

    @property
    def years(self) -> float:
        """In which memory doubles, less γ."""
        return 1 / self.alpha

    @property
    def beta(self) -> float:
        """As the paper writes it: 2^(α · year + β)."""
        return math.log2(self.factor) - self.alpha * self.origin

    def __call__(self, year: Values) -> Values:
        """Memory in a year."""
        return self.factor * np.exp2(self.alpha * (year - self.origin)) + self.gamma


def fit_trend(years: Sequence[float], memory: Sequence[float], intercept: bool = True) -> Trend:
    """The trend of least squares.

    For a given α factor and γ are those of a linear regression, so that only α is searched for: on a grid of doubling
    times from a quarter of a year to a hundred, then by golden section around the best.

    >>> years = list(range(2000, 2010))
    >>> trend = fit_trend(years, [2 ** ((year - 2000) / 3) + 5 for year in years])
    >>> round(trend.years, 6), round(trend.gamma, 6)
    (3.0, 5.0)
    """
    x, y = np.asarray(years, dtype=np.float64), np.asarray(memory, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2 + intercept:
        raise ValueError(f"{len(x)} years and {len(y)} values: give at least {2 + intercept} of each")
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or len(set(x.tolist())) < 2 + intercept:
        raise ValueError(f"years and values must be finite, with at least {2 + intercept} different years")
    origin = float(x.mean())

    def solved(doubling: float) -> tuple[float, Trend]:
        grown = np.exp2((x - origin) / doubling)
        columns = np.stack([grown, np.ones_like(grown)], 1) if intercept else grown[:, None]
        found = np.linalg.lstsq(columns, y, rcond=None)[0]
        trend = Trend(1 / doubling, float(found[0]), float(found[1]) if intercept else 0.0, origin)
        return float(np.square(trend(x) - y).sum()), trend

    grid = np.geomspace(0.25, 100.0, 241).tolist()
    losses = [solved(doubling)[0] for doubling in grid]
    best = int(np.argmin(losses))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    trend = solved(_golden(lambda doubling: solved(doubling)[0], low, high))[1]
    if best in (0, len(grid) - 1) or trend.factor <= 0:
        raise ValueError(
            "these values do not grow exponentially: no doubling time from 0.25 to 100 years fits them best"
        )
    return trend


def _golden(loss: Callable[[float], float], low: float, high: float) -> float:
    """The minimum between two bounds by golden section.

    >>> round(_golden(lambda x: (x - 2) ** 2, 1.0, 4.0), 6)
    2.0
    """
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-10 * high:
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, second) if loss(first) < loss(second) else (first, high)
    return (low + high) / 2


def jackknife(years: Sequence[float], memory: Sequence[float], intercept: bool) -> float:
    """Standard error of the doubling time, from fits that leave out one card each: √((n − 1)/n · Σ (d_i − d̄)²)."""
    count = len(years)
    left_out = [
        fit_trend([*years[:i], *years[i + 1 :]], [*memory[:i], *memory[i + 1 :]], intercept).years
        for i in range(count)
    ]
    return float(np.std(left_out) * math.sqrt(count - 1))


def cards() -> tuple[list[float], list[float]]:
    """Years of launch, to the month, and memory in GiB."""
    return [year + (month - 0.5) / 12 for _, year, month, _ in CARDS], [memory / 1024 for *_, memory in CARDS]


def figure1(session: Session, setting: str) -> Outcome:
    """Figure 1: the doubling time of a small table of cards, beside that of the paper's data base."""
    years, memory = cards()
    entry = find("emp/figure1").table("fit")
    assert entry is not None
    outcome = Outcome()
    table = Table(entry.name, entry.title, (*entry.columns, "standard error", "γ, GiB"))
    grid = np.linspace(min(years), max(years), 61)
    lines: list[tuple[str, list[float], list[list[float]]]] = [("cards", years, [memory])]
    for label, intercept in MODELS.items():
        trend = fit_trend(years, memory, intercept)
        error = jackknife(years, memory, intercept)
        table.add(label, {"years": trend.years, "standard error": error, "γ, GiB": trend.gamma}, {})
        lines.append((label, grid.tolist(), [trend(grid).tolist()]))
    outcome.tables.append(table)
    (first, less), (last, more) = TEXT
    text = Table("text", "Years in which memory doubles, from the two cards in the text", ("years",))
    text.add(
        f"{less:g} GB in {first}, {more:g} GB in {last}",
        {"years": (last - first) / math.log2(more / less)},
        {},
    )
    outcome.tables.append(text)
    title = f"Memory of {len(CARDS)} graphics cards, and the trends fitted to it"
    outcome.curves.append(curve("memory", title, "year of launch", "memory, GiB", lines))
    outcome.deviations += [
        "The paper's 1,599 cards (desktop, mobile and workstation) are not published, and the two in its text are "
        f"too few for a fit. The years here are those of our own table of {len(CARDS)} well-known desktop cards from "
        "2004 to 2019 (slimbayes/experiments/emp_cards.py), written down without a data base: another population, with "
        "a doubling time of its own. So the two are set side by side, and not checked against each other.",
        "Least squares of the memory itself; the standard error is the jackknife's over cards. The paper does not say "
        "how it fitted, and prints no errors.",
    ]
    return outcome
