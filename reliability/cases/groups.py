"""The groups of generated cases, and how many of 20,000 each has."""

from __future__ import annotations

import math

from reliability.cases import draws, inputs, objective, options, predictions, scores, verbs
from reliability.cases.running import Case

GROUPS: dict[str, tuple[Case, int]] = {
    "draws.replayed": (draws.replayed, 4600),
    "draws.plain": (draws.plain, 3000),
    "draws.split": (draws.split, 2000),
    "inputs.changed": (inputs.changed, 1600),
    "inputs.arguments": (inputs.arguments, 500),
    "options.values": (options.values, 300),
    "options.foreign": (options.foreign, 200),
    "options.selections": (options.selections, 700),
    "objective.kl": (objective.kl, 1400),
    "objective.elbo": (objective.elbo, 1100),
    "objective.groups": (objective.groups, 500),
    "predictions.moments": (predictions.moments, 700),
    "predictions.predict": (predictions.predict, 1000),
    "predictions.deciding": (predictions.deciding, 600),
    "scores.classes": (scores.classes, 600),
    "scores.numbers": (scores.numbers, 400),
    "verbs.saved": (verbs.saved, 600),
    "verbs.frozen": (verbs.frozen, 600),
    "verbs.merged": (verbs.merged, 500),
    "verbs.compressed": (verbs.compressed, 200),
    "verbs.summary": (verbs.summary, 300),
    "verbs.unconverted": (verbs.unconverted, 100),
}


def case_of(name: str) -> Case:
    """What runs one case of a group."""
    return GROUPS[name][0]


def counts(cases: int) -> dict[str, int]:
    """How many cases every group has of so many; a few more together, as some groups run out of different ones.

    >>> sum(counts(20_000).values()) > 20_000
    True
    """
    return {name: math.ceil(share * cases / 20_000) for name, (_, share) in GROUPS.items()}
