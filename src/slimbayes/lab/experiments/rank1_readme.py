"""Results beside the rank-1 paper's: those of Uncertainty Baselines' README, from later runs of the authors' code."""

from __future__ import annotations

from slimbayes.lab.experiments.entry import Cells, Printed

_SOURCE = "Uncertainty Baselines' README, not the paper's numbers"
_COLUMNS = ("nll", "accuracy", "ece", "c_nll", "c_accuracy", "c_ece")

_CIFAR10: Cells = {
    "Deterministic": (0.159, 96.0, 0.0231, 1.05, 76.1, 0.153),
    "BatchEnsemble": (0.136, 96.3, 0.0177, 0.97, 77.8, 0.124),
    "Rank-1 Gaussian": (0.128, 96.3, 0.008, 0.84, 76.7, 0.080),
    "Rank-1 Cauchy": (0.120, 96.5, 0.009, 0.74, 80.5, 0.090),
    "MC dropout": (0.160, 95.9, 0.0241, 1.27, 68.8, 0.166),
    "MC dropout, 30 samples": (0.145, 96.1, 0.019, 1.27, 70.0, 0.167),
    "MC dropout, improved, 30 samples": (0.116, 96.2, 0.005, 0.69, 79.6, 0.068),
    "MFVI BNN": (0.211, 94.7, 0.029, 1.46, 71.3, 0.181),
    "Ensemble 4×WRN-28-10": (0.114, 96.6, 0.010, 0.81, 77.9, 0.087),
    "SNGP": (0.134, 96.0, 0.007, 0.74, 78.5, 0.078),
    "SNGP, AugMix": (0.103, 96.9, 0.0045, 0.33, 89.1, 0.015),
    "SNGP, MC dropout, 10 samples": (0.131, 95.9, 0.008, 0.76, 77.7, 0.082),
    "SNGP, BatchEnsemble": (0.127, 96.2, 0.006, 0.75, 78.1, 0.080),
    "SNGP ensemble, 4 members": (0.109, 96.7, 0.005, 0.72, 79.2, 0.074),
    "MIMO": (0.123, 96.4, 0.010, 0.927, 76.6, 0.112),
    "Hyper-BatchEnsemble": (0.126, 96.3, 0.009, None, None, None),
    "Hyper-deep ensemble, 4 members": (0.118, 96.4, 0.008, 0.83, 76.8, 0.079),
    "Posterior Network": (0.360, 93.1, 0.112, 1.06, 75.2, 0.139),
}
_CIFAR100: Cells = {
    "Deterministic": (0.875, 79.8, 0.0857, 2.70, 51.4, 0.239),
    "BatchEnsemble": (0.690, 81.9, 0.0265, 2.56, 53.1, 0.149),
    "Rank-1 Gaussian": (0.692, 81.3, 0.018, 2.24, 53.8, 0.117),
    "Rank-1 Cauchy": (0.689, 82.4, 0.012, 2.04, 57.8, 0.142),
    "MC dropout": (0.830, 79.6, 0.0501, 2.90, 42.6, 0.202),
    "MC dropout, 30 samples": (0.785, 80.7, 0.0487, 2.73, 46.2, 0.207),
    "MC dropout, improved, 30 samples": (0.637, 82.1, 0.028, 1.93, 57.2, 0.098),
    "MFVI BNN": (0.944, 77.8, 0.097, 3.18, 48.2, 0.271),
    "Ensemble 4×WRN-28-10": (0.666, 82.7, 0.021, 2.27, 54.1, 0.138),
    "SNGP": (0.805, 80.2, 0.020, 2.02, 54.6, 0.092),
    "SNGP, AugMix": (0.755, 80.6, 0.024, 1.44, 65.9, 0.054),
    "SNGP, MC dropout, 10 samples": (0.750, 79.6, 0.017, 2.06, 53.8, 0.087),
    "SNGP, BatchEnsemble": (0.755, 81.4, 0.032, 2.03, 55.2, 0.112),
    "SNGP ensemble, 4 members": (0.665, 81.9, 0.011, 1.95, 56.8, 0.091),
    "MIMO": (0.690, 82.0, 0.022, 2.28, 53.7, 0.129),
    "Hyper-BatchEnsemble": (0.678, 81.9, 0.020, None, None, None),
    "Hyper-deep ensemble, 4 members": (0.654, 83.0, 0.022, 2.26, 53.2, 0.128),
    "Heteroscedastic": (0.833, 80.2, 0.059, 2.40, 52.1, 0.177),
    "Heteroscedastic ensemble, 4 members": (0.671, 82.7, 0.026, 2.07, 55.2, 0.105),
}
_IMAGENET: Cells = {
    "Deterministic": (0.939, 76.2, 0.032, 3.21, 40.5, 0.103, 75.4),
    "BatchEnsemble": (0.922, 76.8, 0.037, 3.09, 41.9, 0.089, 73.5),
    "Rank-1 Gaussian": (0.886, 77.3, 0.0166, 2.95, 42.9, 0.054, 72.12),
    "Rank-1 Cauchy": (0.897, 77.2, 0.0192, 2.98, 42.5, 0.059, 72.66),
    "MC dropout, 10 samples": (0.919, 76.6, 0.026, 2.96, 42.4, 0.046, 72.9),
    "Ensemble 4×ResNet-50": (0.857, 77.9, 0.017, 2.82, 44.9, 0.047, 69.5),
    "SNGP": (0.931, 76.1, 0.013, 3.03, 41.1, 0.045, 74.6),
    "SNGP, MC dropout": (0.913, 76.6, 0.020, 3.05, 41.2, 0.058, 74.5),
    "SNGP, BatchEnsemble": (0.913, 76.55, 0.014, 3.08, 40.6, 0.047, 75.2),
    "SNGP ensemble": (0.851, 78.1, 0.039, 2.77, 44.9, 0.050, 69.73),
    "MIMO": (0.887, 77.5, 0.037, 3.03, 43.3, 0.106, 71.7),
    "Mixup": (0.888, 77.7, 0.028, 2.78, 47.1, 0.109, 67.3),
    "Heteroscedastic": (0.898, 77.5, 0.033, 3.20, 42.4, 0.111, 72.7),
    "Heteroscedastic, rank-1": (0.862, 78.1, 0.0197, None, None, None, None),
}
CIFAR10 = Printed("readme", f"CIFAR-10, WRN-28-10 ({_SOURCE})", _COLUMNS, _CIFAR10)
CIFAR100 = Printed("readme", f"CIFAR-100, WRN-28-10 ({_SOURCE})", _COLUMNS, _CIFAR100)
IMAGENET = Printed("readme", f"ImageNet, ResNet-50 ({_SOURCE})", (*_COLUMNS, "mce"), _IMAGENET)
HOURS = Printed(
    "hours",
    f"Training WRN-28-10 on 8 TPUv2 cores ({_SOURCE})",
    ("hours",),
    {"Deterministic": (1.2,), "BatchEnsemble": (5.4,), "Rank-1 Gaussian": (7.3,), "MFVI BNN": (5.5,)},
)
