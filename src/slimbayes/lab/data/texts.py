"""IMDB reviews as tokens, from imdb.npz."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from slimbayes.containers.datasets import DataError, Dataset, Scaling, Split
from slimbayes.containers.files import read_npz, require

IMDB_FILES = ("imdb.npz",)
IMDB_HOME = "https://ai.stanford.edu/~amaas/data/sentiment (packed as imdb.npz, see docs/data.md)"
UNKNOWN = 2  # 0 pads, 1 starts a review


def imdb(root: str | os.PathLike[str] | None = None, length: int = 80, words: int = 20_000) -> Dataset:
    """25,000 + 25,000 film reviews, negative or positive: the last ``length`` tokens, padded with 0 at the front.

    As Keras's example has them. Tokens are numbered by frequency in the training reviews; those past ``words``
    become 2, "unknown".

    Args:
        root: the data root, with imdb.npz in it.
        length: of every review.
        words: size of the vocabulary, with 0 (padding), 1 (start) and 2 (unknown).
    """
    if length < 1 or words <= UNKNOWN:
        raise DataError(f"length={length}, words={words}: give a length of 1 or more and 3 words or more")
    path = require(root, IMDB_FILES, "IMDB", IMDB_HOME)
    keys = tuple(f"{part}_{name}" for part in ("train", "test") for name in ("tokens", "offsets", "labels"))
    arrays = read_npz(path, keys)
    splits = []
    for part in ("train", "test"):
        tokens, offsets, labels = (arrays[f"{part}_{name}"] for name in ("tokens", "offsets", "labels"))
        if len(offsets) != len(labels) + 1 or offsets[-1] != len(tokens):
            raise DataError(
                f"{path}: {part}_offsets do not fit {len(labels)} labels and {len(tokens)} tokens"
            )
        rows = padded(tokens.astype(np.int64), offsets, length)
        rows[rows >= words] = UNKNOWN
        splits.append(Split(torch.from_numpy(rows), torch.from_numpy(labels.astype(np.int64))))
    return Dataset(
        name="imdb",
        task="classification",
        kind="text",
        train=splits[0],
        test=splits[1],
        scaling=Scaling((), ()),
        classes=("negative", "positive"),
        source=f"IMDB film reviews (Maas et al., 2011): the last {length} tokens of each, {words:,} words.",
        notes={"words": words},
    )


def padded(tokens: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    """The last ``length`` tokens of every piece, zeros before them: [pieces, length].

    >>> padded(np.array([5, 6, 7, 8]), np.array([0, 3, 4, 4]), length=2).tolist()
    [[6, 7], [0, 8], [0, 0]]
    """
    place = offsets[1:, None] - length + np.arange(length)  # [pieces, length]
    inside = place >= offsets[:-1, None]
    return np.where(inside, tokens[np.maximum(place, 0)] if len(tokens) else 0, 0)
