"""Names and severities of the corruptions: Hendrycks and Dietterich (2019), arXiv:1903.12261, and its code.

A row holds the numbers of one severity. ``TABLES["cifar"]`` is for 32×32 images and reads as CIFAR-10-C does;
``TABLES["imagenet"]`` is for 224×224 images and reads as ImageNet-C does.
"""

from __future__ import annotations

import operator

from slimbayes.containers.datasets import DataError

Row = tuple[float, ...]
Rows = tuple[Row, Row, Row, Row, Row]

CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 2, 3, 4, 5)


def _column(a: float, b: float, c: float, d: float, e: float) -> Rows:
    return (a,), (b,), (c,), (d,), (e,)


_CIFAR: dict[str, Rows] = {
    "gaussian_noise": _column(0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": _column(500, 250, 100, 75, 50),  # photons at full brightness
    "impulse_noise": _column(0.01, 0.02, 0.03, 0.05, 0.07),  # fraction of values replaced
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, anti-alias sd
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sd, shift, rounds
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sd
    "zoom_blur": ((1.05, 0.01), (1.10, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)),  # largest, step
    "snow": (  # mean, sd, zoom, threshold, blur radius, blur sd, share of the image
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # weights of image and frost
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # amount, decay of the roughness
    "brightness": _column(0.05, 0.1, 0.15, 0.2, 0.3),  # added to the value of HSV
    "contrast": _column(0.75, 0.5, 0.4, 0.3, 0.15),  # factor
    "elastic_transform": (  # strength, smoothing sd, jitter: fractions of the size
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    ),
    "pixelate": _column(0.95, 0.9, 0.85, 0.75, 0.65),  # size of the small image
    "jpeg_compression": _column(80, 65, 58, 50, 40),  # quality
    "speckle_noise": _column(0.06, 0.1, 0.12, 0.16, 0.2),  # standard deviation of the factor
    "gaussian_blur": _column(0.4, 0.6, 0.7, 0.8, 1),  # standard deviation in pixels
    "spatter": (  # mean, sd, blur sd, threshold, strength, mud instead of water
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),  # factor and offset of the saturation
}

_IMAGENET: dict[str, Rows] = {
    "gaussian_noise": _column(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _column(60, 25, 12, 5, 3),
    "impulse_noise": _column(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.10, 0.01), (1.15, 0.01), (1.20, 0.02), (1.25, 0.02), (1.30, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": _column(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _column(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (2, 0.7, 0.1),
        (2, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    ),
    "pixelate": _column(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _column(25, 18, 15, 10, 7),
    "speckle_noise": _column(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _column(1, 2, 3, 4, 6),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
}

TABLES: dict[str, dict[str, Rows]] = {"cifar": _CIFAR, "imagenet": _IMAGENET}


def place(name: str, severity: int) -> int:
    """Position of a severity in its rows, 0 to 4, after a check of both.

    >>> place("fog", 3)
    2
    """
    if name not in CORRUPTIONS + EXTRA:
        raise DataError(f"no corruption is called {name!r}: choose one of {', '.join(CORRUPTIONS + EXTRA)}")
    whole = hasattr(severity, "__index__") and not isinstance(severity, bool)
    if not whole or severity not in SEVERITIES:
        raise DataError(f"severity={severity!r}: give a whole number from 1 to 5")
    return operator.index(severity) - 1
