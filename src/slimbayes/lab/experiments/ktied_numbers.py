"""What the k-tied paper prints (Swiatkowski et al., 2020)."""

from __future__ import annotations

from slimbayes.lab.experiments.entry import Printed

_OVER_EXAMPLES = "standard error over test examples (the paper says: over 100 weight samples)"
_OVER_SEEDS = "standard error over 3 training runs"
_THREE = ("neg_elbo", "nll", "accuracy")
_STEPS = ("1000", "5000", "9000")
_LABELS = ("Mean-field", "1-tied", "2-tied", "3-tied")

Row = tuple[float, ...]


def _table(
    name: str, title: str, columns: tuple[str, ...], values: tuple[Row, ...], errors: tuple[Row, ...],
    error_of: str = _OVER_EXAMPLES,
) -> Printed:  # fmt: skip
    """The four rows of every table; columns without a ± (counts, ECE) come last."""
    padded: tuple[tuple[float | None, ...], ...] = tuple(
        (*row, *[None] * (len(columns) - len(row))) for row in errors
    )
    rows, spread = (dict(zip(_LABELS, cells, strict=True)) for cells in (values, padded))
    return Printed(name, title, columns, rows, spread, error_of)


def family_counts(m: int, n: int) -> dict[str, tuple[float, ...]]:
    """Table 1's formulas for an m × n weight matrix.

    >>> family_counts(2, 3)["2-tied"]
    (16,)
    """
    weights = m * n
    return {
        "Multivariate Normal": (weights + weights * (weights + 1) // 2,),
        "Mean-field": (2 * weights,),
        "Matrix Normal": (weights + m * (m + 1) // 2 + n * (n + 1) // 2,),
        "Matrix Normal, diagonal": (weights + m + n,),
        **{f"{k}-tied": (weights + k * (m + n),) for k in (1, 2, 3)},
    }


COUNTS = Printed("counts", "One layer of 784 × 400 weights", ("parameters",), family_counts(784, 400))

TABLE2 = (
    _table(
        "mnist", "MNIST, MLP", _THREE,
        ((0.431, 0.100, 97.6), (3.41, 0.677, 93.6), (0.456, 0.107, 97.6), (0.450, 0.106, 97.6)),
        ((0.0057, 0.0034, 0.15), (0.019, 0.0040, 0.25), (0.0059, 0.0033, 0.15), (0.0059, 0.0033, 0.15)),
    ),
    _table(
        "cifar100", "CIFAR-100, LeNet", _THREE,
        ((3.83, 2.23, 42.1), (4.33, 2.30, 41.7), (3.88, 2.24, 42.2), (3.86, 2.24, 42.1)),
        ((0.020, 0.017, 0.49), (0.021, 0.016, 0.49), (0.020, 0.017, 0.49), (0.020, 0.017, 0.49)),
    ),
    _table(
        "imdb", "IMDB, LSTM", _THREE,
        ((0.536, 0.493, 80.1), (0.687, 0.491, 80.0), (0.621, 0.494, 80.1), (0.595, 0.493, 80.1)),
        ((0.0058, 0.0057, 0.25), (0.0058, 0.0056, 0.25), (0.0058, 0.0057, 0.25), (0.0058, 0.0056, 0.25)),
    ),
)  # fmt: skip

_RESNET = ((122.61, 0.495, 83.5), (122.57, 0.658, 81.7), (122.77, 0.503, 83.2), (122.67, 0.501, 83.2))
_RESNET_ERRORS = ((0.012, 0.0080, 0.37), (0.012, 0.0069, 0.39), (0.012, 0.0080, 0.37), (0.012, 0.0079, 0.37))
FIGURE5 = _table("resnet", "CIFAR-10, ResNet", _THREE, _RESNET, _RESNET_ERRORS)

TABLE3 = _table(
    "resnet", "CIFAR-10, ResNet", ("brier", "nll", "ece"),
    ((-0.761, 0.495, 0.0477), (-0.695, 0.658, 0.1642), (-0.758, 0.503, 0.0540), (-0.758, 0.501, 0.0541)),
    ((0.0039, 0.0080), (0.0034, 0.0069), (0.0038, 0.0080), (0.0038, 0.0079)),
)  # fmt: skip

TABLE5 = _table(
    "resnet", "CIFAR-10, ResNet", (*_THREE, "parameters", "parameters_percent"),
    tuple(
        (*cells, *size)
        for cells, size in zip(
            _RESNET,
            ((9_814_026, 100.0), (4_929_711, 50.2), (4_946_964, 50.4), (4_964_217, 50.6)),
            strict=True,
        )
    ),
    _RESNET_ERRORS,
)  # fmt: skip

FIGURE9 = _table(
    "resnet-he", "CIFAR-10, ResNet, He-scaled prior", _THREE,
    ((1.379, 0.6384, 79.0), (5.428, 1.485, 57.0), (1.448, 0.648, 78.8), (1.411, 0.646, 78.9)),
    ((0.0096, 0.0096, 0.41), (0.018, 0.0056, 0.50), (0.0097, 0.0079, 0.41), (0.0097, 0.0079, 0.41)),
    "standard error over test examples",
)  # fmt: skip

_FIGURE6_MNIST = (
    ((0.501, 0.133, 96.8, 957), (0.539, 0.155, 96.1, 482), (0.520, 0.129, 96.8, 484), (0.497, 0.120, 96.9, 486)),
    ((0.0061, 0.0040, 0.18), (0.0063, 0.0043, 0.19), (0.0063, 0.0039, 0.18), (0.0060, 0.0038, 0.18)),
)  # fmt: skip
SHARED = _table(
    "mnist", "MNIST, MLP (the paper's Figure 6: shared)", (*_THREE, "parameters_k"), *_FIGURE6_MNIST
)
FIGURE6 = (
    _table("mnist", "MNIST, MLP", (*_THREE, "parameters_k"), *_FIGURE6_MNIST),
    _table(
        "cifar100", "CIFAR-100, LeNet", (*_THREE, "parameters_k"),
        ((3.72, 2.16, 43.9, 4405), (3.65, 2.12, 45.5, 2262), (3.76, 2.15, 44.3, 2268), (3.73, 2.13, 44.3, 2273)),
        ((0.018, 0.016, 0.50), (0.017, 0.015, 0.50), (0.019, 0.016, 0.50), (0.018, 0.016, 0.50)),
    ),
    _table(
        "imdb", "IMDB, LSTM", (*_THREE, "parameters_k"),
        (
            (0.538, 0.478, 79.5, 2823), (0.592, 0.512, 77.6, 2693),
            (0.560, 0.484, 78.2, 2694), (0.550, 0.491, 78.8, 2695),
        ),
        ((0.0054, 0.0052, 0.26), (0.0041, 0.0040, 0.26), (0.0042, 0.0041, 0.26), (0.0051, 0.0050, 0.26)),
    ),
    _table(
        "snr", "MNIST, MLP, second dense layer: gradient SNR at step", _STEPS,
        ((4.13, 4.45, 3.21), (5840, 158, 5.3), (7500, 140, 4.3), (7000, 117, 4.1)),
        ((0.027, 0.091, 0.035), (190, 3.8, 0.20), (240, 11, 0.26), (270, 1.7, 0.20)),
        _OVER_SEEDS,
    ),
    _table(
        "convergence", "MNIST, MLP: validation −ELBO at step", _STEPS,
        ((42.16, 26.52, 15.39), (43.11, 14.85, 2.06), (42.74, 13.97, 1.82), (42.63, 13.61, 1.80)),
        ((0.070, 0.016, 0.016), (0.039, 0.017, 0.027), (0.090, 0.023, 0.017), (0.068, 0.020, 0.031)),
        _OVER_SEEDS,
    ),
)  # fmt: skip

TABLE4 = Printed(
    "step", "Two dense layers", ("step_ms", "step_ratio"),
    {"Point estimate": (2.00, 1.0), "Mean-field": (7.17, 7.17 / 2.00), "2-tied": (6.14, 6.14 / 2.00)},
    {"Point estimate": (0.0064, None), "Mean-field": (0.014, None), "2-tied": (0.018, None)},
    "standard error over the steps of one run",
)  # fmt: skip
