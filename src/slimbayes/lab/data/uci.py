"""The UCI regression sets with the literature's splits, from uci.npz."""

from __future__ import annotations

import os

import numpy as np
import torch

from slimbayes.containers.datasets import DataError, Dataset, Split
from slimbayes.containers.files import read_npz, require
from slimbayes.lab.data.embedded import table

UCI_HOME = "https://archive.ics.uci.edu (packed as uci.npz, see docs/data.md)"

# Our name: the archive's name, and what the targets are, the first being the literature's.
UCI: dict[str, tuple[str, tuple[str, ...]]] = {
    "boston": ("bostonHousing", ("median value",)),
    "concrete": ("concrete", ("strength",)),
    "energy": ("energy", ("heating load", "cooling load")),
    "kin8nm": ("kin8nm", ("distance",)),
    "naval": ("naval-propulsion-plant", ("compressor decay", "turbine decay")),
    "power": ("power-plant", ("output",)),
    "protein": ("protein-tertiary-structure", ("rmsd",)),
    "wine": ("wine-quality-red", ("quality",)),
    "yacht": ("yacht", ("resistance",)),
}


def uci(
    name: str,
    root: str | os.PathLike[str] | None = None,
    split: int = 0,
    all_targets: bool = False,
) -> Dataset:
    """One of the UCI regression sets, e.g. ``load("uci/boston", split=3)``.

    Args:
        name: "boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine" or "yacht".
        root: the data root, with uci.npz in it.
        split: which of the literature's 20 train/test splits (5 for protein).
        all_targets: both targets of energy and naval, not only the first.
    """
    if name not in UCI:
        raise DataError(f"no UCI set {name!r}; choose one of {', '.join(f'uci/{n}' for n in UCI)}")
    path = require(root, ("uci.npz",), f"UCI {name}", UCI_HOME)
    key, outputs = UCI[name]
    wanted = "targets_all" if all_targets else "targets"
    arrays = read_npz(path, tuple(f"{key}/{part}" for part in ("data", "features", wanted, "train", "test")))
    data, features, targets, train, test = arrays.values()
    if not 0 <= split < len(train):
        raise DataError(f"uci/{name}, split={split}: it has the splits 0 to {len(train) - 1}")
    whole = Split(
        torch.from_numpy(data[:, features].astype(np.float32)),
        torch.from_numpy(data[:, targets].astype(np.float32)),
    )
    rows = tuple(torch.from_numpy(part[split].astype(np.int64)) for part in (train, test))
    return table(
        f"uci/{name}",
        whole,
        (rows[0], rows[1]),
        features=tuple(f"x{column + 1}" for column in range(len(features))),
        outputs=outputs[: len(targets)],
        source=f"UCI {key}, split {split} of {len(train)} (Hernández-Lobato and Adams, 2015).",
    )
