"""ImageNet-C in the EMP paper: corruption errors by type, Tables 5, 7 and 8 (Chang et al., 2019)."""

from __future__ import annotations

from slimbayes.lab.data.corruptions import CORRUPTIONS
from slimbayes.lab.experiments.entry import Printed

_ABSOLUTE: dict[str, tuple[float, ...]] = {
    "EMP (BN+out)": (
        97.8, 98.4, 98.2, 98.5, 97.9, 98.8, 96.9, 98.3, 99.6, 101.1, 99.8, 97.9, 100, 95.4, 91.3, 94.2,
    ),
    "EMP (BN)": (98.8, 99.7, 99.6, 99.4, 97.9, 100, 98.9, 98.4, 101, 100.9, 100, 101, 100, 99.0, 90.8, 94.7),
    "ECMP (BN+out)": (99.5, 101, 101, 102, 99.5, 99.3, 97.7, 97.8, 98.0, 99.1, 103, 99.1, 102, 97.2, 97.3, 98.6),
    "ECMP (BN)": (99.8, 100, 99.3, 99.9, 98.7, 99.5, 98.3, 98.8, 101, 99.6, 103, 103, 102, 99.1, 96.0, 98.4),
    "Dropout": (100, 99.8, 99.4, 98.7, 101, 98.5, 100, 101, 101, 101, 104, 105, 102, 99.5, 97.6, 98.5),
    "Vanilla": (100,) * 16,
}  # fmt: skip
_RELATIVE: dict[str, tuple[float, ...]] = {
    "EMP (BN+out)": (97.4, 98.8, 98.4, 98.8, 97.9, 99.4, 96.1, 98.6, 101, 104, 102, 97.7, 102, 92.2, 84.8, 89.5),
    "EMP (BN)": (99.0, 100, 100, 99.9, 97.3, 101, 99.2, 98.3, 102, 103, 102, 109, 102, 99.6, 83.1, 89.9),
    "ECMP (BN+out)": (102, 104, 103, 104, 101, 101, 98.0, 98.3, 98.5, 101, 110, 105, 106, 97.1, 97.4, 101),
    "ECMP (BN)": (101, 101, 99.2, 100, 98.3, 99.5, 97.4, 98.2, 101, 99.7, 108, 113, 104, 98.7, 92.7, 97.2),
    "Dropout": (100, 98.7, 98.1, 97.0, 100, 96.4, 98.9, 101, 101, 99.9, 106, 114, 102, 97.1, 93.8, 94.8),
    "Vanilla": (100,) * 16,
}  # fmt: skip

_SHORT = ("EMP (BN+out)", "ECMP (BN+out)", "Dropout", "Vanilla")
_TITLE = "ImageNet-C, ResNet-18: error by type, % of the vanilla network's"
TABLE5 = Printed("imagenet-c", _TITLE, ("mce", *CORRUPTIONS), {label: _ABSOLUTE[label] for label in _SHORT})
TABLE7 = Printed("imagenet-c", _TITLE, ("mce", *CORRUPTIONS), _ABSOLUTE)
TABLE8 = Printed(
    "imagenet-c",
    "ImageNet-C, ResNet-18: error above the clean error by type, % of the vanilla network's",
    ("rmce", *CORRUPTIONS),
    _RELATIVE,
)
