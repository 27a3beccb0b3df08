"""Shifts for tables: noise, missing values, drifting units, and rows resampled towards one tail."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.containers.datasets import Scaling, Split
from slimbayes.lab.data.shifts_images import keyed

NOISE = (0.1, 0.2, 0.4, 0.7, 1.0)  # standard deviations of each training column
MISSING = (0.1, 0.2, 0.3, 0.4, 0.5)
SCALE = (1.05, 1.1, 1.2, 1.35, 1.5)
TILT = (0.25, 0.5, 1.0, 1.5, 2.0)  # of the log importance, per standard deviation of the component


class TableShifts:
    """What the shifts of a table need to know of its training rows: mean, spread, first principal component.

    >>> table = TableShifts(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> table.mean.tolist(), table.std.tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """

    def __init__(self, train: Tensor) -> None:
        scaling = Scaling.of(train)
        self.mean, self.std = torch.tensor(scaling.mean), torch.tensor(scaling.std)
        self.varies = (train != train[:1]).any(0)  # constant columns get no noise
        z = scaling(train).double()
        _, vectors = torch.linalg.eigh(z.T @ z / len(z))
        direction = vectors[:, -1]  # [D], unit length
        direction = direction * direction[direction.abs().argmax()].sign()  # eigenvectors have no sign
        self.scaling, self.direction = scaling, direction
        self.score_std = (z @ direction).std(correction=0).item() or 1.0

    def noise(self, inputs: Tensor, severity: int, seed: int, first: int) -> Tensor:
        """Gaussian noise of 0.1 to 1.0 standard deviations of each training column."""
        normal = keyed("normal", "table.noise", seed, first, len(inputs), (inputs.shape[1],), inputs)
        return inputs + NOISE[severity - 1] * (self.std * self.varies).to(inputs) * normal

    def missing(self, inputs: Tensor, severity: int, seed: int, first: int) -> Tensor:
        """10 to 50 % of the entries replaced by their training column's mean."""
        uniform = keyed("uniform", "table.missing", seed, first, len(inputs), (inputs.shape[1],), inputs)
        return torch.where(uniform < MISSING[severity - 1], self.mean.to(inputs), inputs)

    def scale(self, inputs: Tensor, severity: int, seed: int, first: int) -> Tensor:
        """Units drift: every column multiplied or divided, at random, by 1.05 to 1.5."""
        sign = keyed("sign", "table.scale", seed, 0, 1, (inputs.shape[1],), inputs)[0]  # [D]
        return inputs * SCALE[severity - 1] ** sign

    def covariate(self, split: Split, severity: int, seed: int) -> Split:
        """Rows drawn with replacement, importance exp(t · u), u the standardised first principal component.

        t is 0.25 to 2; the rows' targets come with them, so p(y | x) is unchanged.
        """
        u = self.scaling(split.inputs).double() @ self.direction.to(split.inputs.device) / self.score_std
        weights = torch.softmax(TILT[severity - 1] * u, 0)
        points = keyed("uniform", "table.covariate", seed, 0, len(split), (1,), split.inputs)[:, 0]
        rows = torch.searchsorted(weights.cumsum(0), points.double()).clamp(max=len(split) - 1)
        return split[rows]
