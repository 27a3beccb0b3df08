"""IMDB from a made-up file, and from the real one where there is a data root; tokens to predict on."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from slimbayes.lab.data import DataError, load, read_inputs, shifts_for
from slimbayes.lab.data import out_of_distribution as foreign
from slimbayes.lab.models import DenseNet

ROOT = Path(os.environ.get("SLIMBAYES_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data")


def needs(name):
    return pytest.mark.skipif(
        not (ROOT / name).exists(), reason=f"{name} not under the data root: set SLIMBAYES_DATA"
    )


def test_imdb_from_a_small_file(tmp_path):
    tokens = np.array([1, 5, 6, 7, 1, 9, 1, 3, 4, 30], dtype=np.uint16)
    arrays = {
        "tokens": tokens,
        "offsets": np.array([0, 4, 6, 10]),
        "labels": np.array([1, 0, 1], dtype=np.uint8),
    }
    np.savez(tmp_path / "imdb.npz", **{f"{p}_{k}": v for p in ("train", "test") for k, v in arrays.items()})
    data = load("imdb", tmp_path, length=3, words=20)
    assert data.train.inputs.tolist() == [[5, 6, 7], [0, 1, 9], [3, 4, 2]]
    assert data.train.inputs.dtype == torch.int64 and data.shape == (3,) and data.classes[1] == "positive"
    assert data.scaling(data.train.inputs) is data.scaling.undo(data.train.inputs) is data.train.inputs
    assert shifts_for(data) == () and foreign(data) is None
    for options in ({"length": 0}, {"words": 2}):
        with pytest.raises(DataError, match="3 words or more"):
            load("imdb", tmp_path, **options)
    np.savez(
        tmp_path / "imdb.npz", **{f"{p}_{k}": v[:-1] for p in ("train", "test") for k, v in arrays.items()}
    )
    with pytest.raises(DataError, match="train_offsets do not fit"):
        load("imdb", tmp_path)


def test_tokens_to_predict_on(tmp_path):
    facts = {"kind": "text", "shape": [3], "features": []}
    np.savez(tmp_path / "a.npz", inputs=np.array([[5, 6, 7], [0, 1, 9]], dtype=np.uint16))
    tokens, names = read_inputs(tmp_path / "a.npz", facts)
    assert tokens.tolist() == [[5, 6, 7], [0, 1, 9]] and tokens.dtype == torch.int64 and names == ("1", "2")
    for wrong in (np.array([[5, 6, -7]]), np.array([[0.5, 1, 2]])):
        np.savez(tmp_path / "a.npz", inputs=wrong)
        with pytest.raises(DataError, match="whole numbers from 0 on"):
            read_inputs(tmp_path / "a.npz", facts)
    with pytest.raises(DataError, match="this model wants tokens"):
        read_inputs(tmp_path, facts)
    with pytest.raises(TypeError, match="use 'lstm' for tokens"):
        DenseNet((3,), 2)(tokens)


@needs("imdb.npz")
def test_imdb_itself():
    data = load("imdb", ROOT)
    assert data.train.inputs.shape == data.test.inputs.shape == (25_000, 80)
    assert int(data.train.inputs.max()) < 20_000 and data.train.targets.bincount().tolist() == [
        12_500,
        12_500,
    ]
