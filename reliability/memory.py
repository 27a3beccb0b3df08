"""Predictions that run out of memory at random sizes: smaller passes must give what one pass gives.

python -m reliability.memory
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import slimbayes as sb
from reliability.figures import RESULTS, Figure, write_figures

BOUND = 1e-5  # of outputs of size about 1: float32 sums in another order
METHODS = {
    "Rank1": lambda: sb.Rank1(components=3),
    "BatchEnsemble": lambda: sb.BatchEnsemble(components=4),
    "MeanField": lambda: sb.MeanField(),
    "KTied": lambda: sb.KTied(rank=2),
    "EMP": lambda: sb.EMP(components=3),
    "MCDropout": lambda: sb.MCDropout(rate=0.2),
}


class Limit(nn.Module):
    """Memory for so many rows: more is what torch raises when a device has none left."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.refused = 10**9, 0

    def forward(self, x: Tensor) -> Tensor:
        """The same, or an error."""
        if len(x) > self.rows:
            self.refused += 1
            raise torch.OutOfMemoryError(f"{len(x)} rows, and there is room for {self.rows}")
        return x


@dataclass
class Case:
    """One prediction: what it was, how often memory ended, how far it is from that of one pass."""

    what: str
    refused: int
    difference: float


def predict_once(number: int, seed: int) -> Case:
    """A random network, method and size, with room for a random number of rows."""
    source = random.Random(f"memory {seed} {number}")
    torch.manual_seed(number)
    name = source.choice(list(METHODS))
    limit = Limit()
    layers: list[nn.Module] = [nn.Linear(5, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.ReLU()]
    if source.random() < 0.4:
        layers = [
            nn.Unflatten(1, (1, 5)),
            nn.Conv1d(1, 4, 2),
            nn.BatchNorm1d(4),
            nn.Dropout(0.1),
            nn.Flatten(),
        ]
    model = sb.bayesianize(
        nn.Sequential(*layers, nn.Linear(16, 16), nn.ReLU(), limit, nn.Linear(16, 3)), METHODS[name]()
    )
    batch, samples = source.randint(1, 40), source.randint(1, 9)
    components = sb.draw(model, torch.zeros(2, 5)).shape[0]
    options = {
        "samples": samples, "seed": source.randrange(2**31), "noise": source.choice(("example", "shared")),
        "keep_draws": source.random() < 0.5, "chunk": source.choice((None, None, source.randint(1, 300))),
    }  # fmt: skip
    x = torch.randn(batch, 5)
    whole = sb.predict(model, x, **{**options, "chunk": None})
    limit.rows = source.randint(components, max(components, components * samples * batch - 1))
    limit.refused = 0
    found = sb.predict(model, x, **options)
    pairs = [(found.mean, whole.mean), (found.entropy, whole.entropy)]
    if options["keep_draws"]:
        pairs.append((found.draws, whole.draws))
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    what = (
        f"{name}, {batch} examples x {components} components x {samples} samples, room for {limit.rows} rows"
    )
    return Case(what, limit.refused, difference)


def main() -> int:
    """Measure, write the figures, and say whether they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    begun = time.monotonic()
    cases = [predict_once(number, given.seed) for number in range(given.cases)]
    ended = [case for case in cases if case.refused]
    near = sum(case.difference <= BOUND for case in ended)
    exact = sum(case.difference == 0 for case in ended)
    figure = Figure(
        "predictions that ran out of memory and recovered by smaller passes, results equal to 1e-5",
        f"{near} of {len(ended)}, {exact} bit for bit", "all", bool(ended) and near == len(ended),
    )  # fmt: skip
    worst = max(cases, key=lambda case: case.difference)
    command = f"python -m reliability.memory --cases {given.cases} --seed {given.seed}"
    write_figures(
        "memory", command, [figure], time.monotonic() - begun, folder=given.out,
        notes=[f"Of {len(cases)} predictions, the others had room. Most refused passes of one: "
               f"{max(case.refused for case in cases)}; largest difference {worst.difference:.1e} ({worst.what})."],
    )  # fmt: skip
    print(f"{figure.what}: {figure.value}")
    return 0 if figure.holds else 1


if __name__ == "__main__":
    sys.exit(main())
