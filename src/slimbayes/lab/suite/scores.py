"""How good answers are: NLL, accuracy or RMSE, calibration error or coverage, on test rows and on shifted ones."""

from __future__ import annotations

from statistics import fmean

import torch

import slimbayes as sb
from slimbayes.containers.datasets import Split
from slimbayes.lab.suite.data import Task
from slimbayes.lab.suite.training import Answer

_ROWS = 250
LEVEL = 0.9


@torch.no_grad()
def score(answer: Answer, rows: Split, regression: bool) -> dict[str, float]:
    """The figures of one set of rows."""
    nll, means, covered = [], [], []
    for first in range(0, len(rows), _ROWS):
        part = rows[first : first + _ROWS]
        predictive = answer(part.inputs, first)
        nll.append(-predictive.log_prob(part.targets))
        means.append(predictive.mean)
        if regression:
            low, high = predictive.interval(LEVEL)
            covered.append((part.targets >= low) & (part.targets <= high))
    mean = torch.cat(means)
    figures = {"nll": float(torch.cat(nll).mean())}
    if regression:
        error = (mean - rows.targets).square().mean().sqrt()
        return {**figures, "rmse": float(error), "coverage": float(torch.cat(covered).float().mean())}
    accuracy = (mean.argmax(-1) == rows.targets).float().mean()
    return {**figures, "accuracy": float(accuracy), "ece": float(sb.metrics.ece(mean, rows.targets))}


def measure(answer: Answer, task: Task) -> dict[str, dict[str, float]]:
    """The figures of the test rows, and their means over the shifts."""
    shifted = [score(answer, rows, task.regression) for rows in task.shifted]
    means = {name: fmean(one[name] for one in shifted) for name in shifted[0]}
    return {"clean": score(answer, task.test, task.regression), "shifted": means}
