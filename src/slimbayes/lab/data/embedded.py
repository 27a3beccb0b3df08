"""Sets that need no download: scikit-learn's small ones, and two that are generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimbayes.containers.datasets import DataError, Dataset, Scaling, Split
from slimbayes.containers.files import need, random_split, stratified_split
from slimbayes.core.keyed_noise import keyed_noise, layer_key


def digits(split: int = 0) -> Dataset:
    """1,797 handwritten digits of 8×8 pixels: 1,297 to train, 500 to test, stratified.

    >>> data = digits()
    >>> tuple(data.train.inputs.shape), tuple(data.test.inputs.shape), data.train.inputs.dtype
    ((1297, 1, 8, 8), (500, 1, 8, 8), torch.uint8)
    """
    bunch = _bunch("load_digits")
    # Grey values are counts 0..16 of set pixels in 4×4 blocks; uint8 images use 0..255.
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8)[:, None]  # [N, 1, 8, 8]
    labels = torch.from_numpy(bunch.target).long()
    train, test = stratified_split(labels, 500, split)
    whole = Split(images, labels)
    return Dataset(
        name="digits",
        task="classification",
        kind="image",
        train=whole[train],
        test=whole[test],
        scaling=Scaling.of(images[train]),
        classes=tuple(str(c) for c in range(10)),
        source="scikit-learn's copy of the UCI optical digits test set: 1,797 images of 8×8 pixels.",
    )


def breast_cancer(split: int = 0) -> Dataset:
    """569 tumours, 30 measurements of cell nuclei, malignant or benign; 70/30, stratified.

    >>> len(breast_cancer().train), len(breast_cancer().test)
    (398, 171)
    """
    return _classes("breast_cancer", "load_breast_cancer", split, "Wisconsin diagnostic breast cancer (UCI)")


def wine(split: int = 0) -> Dataset:
    """178 wines of three cultivars, 13 chemical measurements; 70/30, stratified.

    >>> wine().num_outputs, wine().shape
    (3, (13,))
    """
    return _classes("wine", "load_wine", split, "Wine recognition (UCI)")


def diabetes(split: int = 0) -> Dataset:
    """442 patients, 10 measurements in their own units, disease progression a year later; 70/30.

    >>> diabetes().outputs, len(diabetes().train)
    (('progression',), 309)
    """
    bunch = _bunch("load_diabetes", scaled=False)
    inputs = torch.from_numpy(bunch.data).float()
    targets = torch.from_numpy(bunch.target).float()[:, None]  # [N, 1]
    train, test = random_split(len(inputs), round(0.3 * len(inputs)), split)
    return table(
        "diabetes",
        Split(inputs, targets),
        (train, test),
        features=tuple(map(str, bunch.feature_names)),
        outputs=("progression",),
        source="Diabetes progression (Efron et al., Least angle regression, 2004), scikit-learn's copy.",
    )


def moons(n: int = 400, noise: float = 0.2, seed: int = 0, test: int = 400) -> Dataset:
    """Two interleaved half circles: (cos t, sin t) and (1 − cos t, ½ − sin t), t ~ U(0, π), plus noise.

    >>> moons(n=10).train.targets.bincount().tolist()
    [5, 5]
    """
    if n < 2 or test < 2 or noise < 0:
        raise DataError(f"moons: n={n}, test={test}, noise={noise}; give n and test of 2 or more, noise ≥ 0")
    total = n + test
    t = _noise("uniform", seed, "moons.t", total, 1)[:, 0] * math.pi
    labels = torch.arange(total) % 2
    upper, lower = torch.stack([t.cos(), t.sin()], 1), torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)  # [N, 2]
    points = torch.where(labels[:, None] == 0, upper, lower) + noise * _noise(
        "normal", seed, "moons.noise", total, 2
    )
    return table(
        "moons",
        Split(points, labels),
        (torch.arange(n), torch.arange(n, total)),
        features=("x", "y"),
        classes=("upper", "lower"),
        source=f"Two moons, generated: {n} + {test} points, noise {noise:g}, seed {seed}.",
    )


def cubic(n: int = 20, noise: float = 3.0, seed: int = 0, test: int = 201) -> Dataset:
    """The one-dimensional cubic: y = x³ + ε, ε ~ N(0, 3²), x ~ U(−4, 4); test on a grid over [−6, 6].

    Hernández-Lobato and Adams, "Probabilistic backpropagation", 2015. ``notes["truth"]`` is x³ at the test
    inputs.

    >>> data = cubic()
    >>> len(data.train), data.test.inputs[0].item(), data.notes["truth"][0]
    (20, -6.0, -216.0)
    """
    if n < 2 or test < 2 or noise < 0:
        raise DataError(f"cubic: n={n}, test={test}, noise={noise}; give n and test of 2 or more, noise ≥ 0")
    train_x = _noise("uniform", seed, "cubic.x", n, 1) * 8 - 4  # [n, 1]
    test_x = torch.linspace(-6, 6, test)[:, None]  # [test, 1]
    x = torch.cat([train_x, test_x])
    y = x**3 + noise * _noise("normal", seed, "cubic.noise", n + test, 1)
    return table(
        "cubic",
        Split(x, y),
        (torch.arange(n), torch.arange(n, n + test)),
        features=("x",),
        outputs=("y",),
        source=f"y = x³ + N(0, {noise:g}²), generated: {n} training points in [−4, 4], seed {seed}.",
        notes={"truth": (test_x**3)[:, 0].tolist(), "noise": noise},
    )


def table(
    name: str,
    whole: Split,
    rows: tuple[Tensor, Tensor],
    features: tuple[str, ...],
    source: str,
    classes: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    notes: dict[str, Any] | None = None,
) -> Dataset:
    """A table as a Dataset: scaled by its training rows; real targets too."""
    train, test = whole[rows[0]], whole[rows[1]]
    return Dataset(
        name=name,
        task="classification" if classes else "regression",
        kind="table",
        train=train,
        test=test,
        scaling=Scaling.of(train.inputs),
        classes=classes,
        features=features,
        outputs=outputs,
        target_scaling=None if classes else Scaling.of(train.targets),
        source=source,
        notes=notes or {},
    )


def _classes(name: str, loader: str, split: int, source: str) -> Dataset:
    bunch = _bunch(loader)
    labels = torch.from_numpy(bunch.target).long()
    return table(
        name,
        Split(torch.from_numpy(bunch.data).float(), labels),
        stratified_split(labels, round(0.3 * len(labels)), split),
        features=tuple(str(f) for f in bunch.feature_names),
        classes=tuple(str(c) for c in bunch.target_names),
        source=f"{source}, scikit-learn's copy.",
    )


def _bunch(loader: str, **options: Any) -> Any:
    return getattr(need("sklearn.datasets", "this embedded data set"), loader)(**options)


def _noise(kind: str, seed: int, name: str, rows: int, columns: int) -> Tensor:
    """[rows, columns] of keyed noise: the same on every machine, and a longer one starts with a shorter."""
    key, cpu = layer_key(seed, name), torch.device("cpu")
    return keyed_noise(kind, key, 0, None, None, torch.arange(rows), (columns,), torch.float32, cpu)[0, 0]


EMBEDDED: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "breast_cancer": breast_cancer,
    "wine": wine,
    "diabetes": diabetes,
    "moons": moons,
    "cubic": cubic,
}
