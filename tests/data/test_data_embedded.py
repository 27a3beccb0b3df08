"""Embedded sets: shapes, splits, units and formulas."""

import math

import numpy as np
import pytest
import torch
from sklearn import datasets

from slimbayes.containers.files import need, permutation, random_split, stratified_split
from slimbayes.lab.data import DataError, Scaling, Split, load, names
from slimbayes.lab.data.embedded import EMBEDDED


def rows(split):
    return {
        (*map(float, x.flatten()), float(y.flatten()[0]))
        for x, y in zip(split.inputs, split.targets, strict=True)
    }


def test_digits_are_scikit_learns_images():
    data, bunch = load("digits"), datasets.load_digits()
    assert (len(data.train), len(data.test)) == (1297, 500)
    assert data.train.inputs.dtype == torch.uint8 and data.shape == (1, 8, 8)
    assert data.train.inputs.max() == 255 and data.task == "classification" and data.num_outputs == 10
    whole = torch.cat([data.train.inputs, data.test.inputs])[:, 0].double()
    assert (whole / 255 * 16).round().sum() == bunch.images.sum()
    counts = np.bincount(bunch.target)
    shares = data.test.targets.bincount().numpy() - counts * 500 / 1797
    assert abs(shares).max() < 1  # stratified
    originals = {
        image.tobytes(): label
        for image, label in zip(bunch.images.astype(np.uint8), bunch.target, strict=True)
    }
    for image, label in zip(data.test.inputs[:50], data.test.targets[:50], strict=True):
        assert originals[(image[0].double() / 255 * 16).round().to(torch.uint8).numpy().tobytes()] == label


@pytest.mark.parametrize(
    ("name", "loader", "train"),
    [
        ("breast_cancer", "load_breast_cancer", 398),
        ("wine", "load_wine", 125),
        ("diabetes", "load_diabetes", 309),
    ],
)
def test_tables_are_scikit_learns(name, loader, train):
    data = load(name)
    bunch = getattr(datasets, loader)(**({"scaled": False} if name == "diabetes" else {}))
    assert len(data.train) == train and len(data.train) + len(data.test) == len(bunch.data)
    whole = Split(torch.from_numpy(bunch.data).float(), torch.from_numpy(bunch.target).float())
    assert rows(data.train) | rows(data.test) == rows(whole)
    assert data.features == tuple(bunch.feature_names)
    scaled = data.scaling(data.train.inputs)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(data.shape), atol=1e-3, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(data.shape), atol=1e-3, rtol=0)
    if name == "diabetes":
        assert data.task == "regression" and data.target_scaling is not None and data.num_outputs == 1
    else:
        assert data.classes == tuple(bunch.target_names) and data.train.targets.dtype == torch.long


def test_splits_are_fixed_and_others_differ():
    assert load("wine").fingerprint() == load("wine", split=0).fingerprint()
    assert load("wine").fingerprint() != load("wine", split=1).fingerprint()
    # The figures below were printed once: a change in them changes everybody's splits.
    assert load("digits").test.targets[:10].tolist() == DIGITS_TEST
    assert permutation(8, 0, "split").tolist() == PERMUTATION


DIGITS_TEST = [0, 4, 5, 1, 7, 9, 7, 8, 9, 5]
PERMUTATION = [0, 5, 4, 2, 7, 3, 1, 6]


def test_moons_lie_on_their_circles():
    data = load("moons", n=100, noise=0.0, test=50)
    x, y = data.train.inputs.T
    upper = data.train.targets == 0
    assert upper.sum() == 50 and len(data.test) == 50
    torch.testing.assert_close(x[upper] ** 2 + y[upper] ** 2, torch.ones(50))
    torch.testing.assert_close((x[~upper] - 1) ** 2 + (y[~upper] - 0.5) ** 2, torch.ones(50))
    assert y[upper].min() >= 0 and y[~upper].max() <= 0.5
    noisy = (
        load("moons", n=4000, noise=0.3, test=2).train.inputs
        - load("moons", n=4000, noise=0.0, test=2).train.inputs
    )
    assert abs(noisy.std() / 0.3 - 1) < 0.03 and abs(noisy.mean()) < 0.02


def test_cubic_has_the_papers_noise_and_range():
    data = load("cubic", n=4000, seed=3)
    residual = data.train.targets - data.train.inputs**3
    assert abs(residual.std() / 3 - 1) < 0.04 and abs(residual.mean()) < 0.2
    assert data.train.inputs.abs().max() <= 4 and abs(data.train.inputs.std() - 8 / math.sqrt(12)) < 0.06
    assert len(load("cubic").train) == 20
    assert data.test.inputs[0] == -6 and data.test.inputs[-1] == 6
    torch.testing.assert_close(torch.tensor(data.notes["truth"]), data.test.inputs[:, 0] ** 3)
    assert load("cubic", seed=1).fingerprint() != load("cubic", seed=2).fingerprint()


@pytest.mark.parametrize("call", [{"n": 1}, {"noise": -1.0}, {"test": 0}])
@pytest.mark.parametrize("name", ["moons", "cubic"])
def test_generators_refuse_nonsense(name, call):
    with pytest.raises(DataError, match=name):
        load(name, **call)


def test_unknown_names_and_options():
    with pytest.raises(DataError, match=r"did you mean 'digits'"):
        load("digitz")
    with pytest.raises(DataError, match=r"no option 'splt'; it has split"):
        load("wine", splt=1)
    with pytest.raises(DataError, match="the name is empty"):
        load("")
    assert set(EMBEDDED) < set(names())


def test_stratified_split_keeps_every_class_in_training():
    labels = torch.tensor([0] * 7 + [1] * 2 + [2])
    for seed in range(5):
        train, test = stratified_split(labels, 4, seed)
        assert set(labels[train].tolist()) == {0, 1, 2}
        assert sorted(train.tolist() + test.tolist()) == list(range(10))
    with pytest.raises(DataError, match="stratified"):
        stratified_split(torch.tensor([0, 1, 2]), 1, 0)
    for bad in (0, 10):
        with pytest.raises(DataError, match="empty"):
            stratified_split(labels, bad, 0)
        with pytest.raises(DataError, match="empty"):
            random_split(10, bad, 0)


def test_permutations_are_uniform():
    """Each of the 3! orders of three things comes up about as often."""
    counts = {}
    for stream in range(600):
        order = tuple(permutation(3, 0, "test", stream).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6 and sum((c - 100) ** 2 / 100 for c in counts.values()) < 20.5  # χ²₅ at 0.1 %


def test_splits_and_scalings_check_their_shapes():
    with pytest.raises(DataError, match="3 inputs but 2 targets"):
        Split(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(DataError, match=r"2 columns or channels, the data are \[4, 3\]: give \[N, 2"):
        Scaling((0.0, 0.0), (1.0, 1.0))(torch.zeros(4, 3))


def test_an_absent_package_names_the_extra():
    with pytest.raises(ImportError, match=r"pip install 'slimbayes\[data\]'"):
        need("no_such_module_here", "this test")


@pytest.mark.parametrize("value", [0.1, 288.15, 1e6, 0.0])
def test_scaling_of_a_constant_column(value):
    """The rounding of a mean must not become a unit."""
    scaling = Scaling.of(torch.full((1001, 1), value))
    assert scaling.std == (1.0,)
    assert Scaling.of(torch.tensor([[1e-10], [3e-10]])).std[0] == pytest.approx(1e-10, rel=1e-3)
