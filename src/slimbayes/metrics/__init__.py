"""Metrics: pure functions of probabilities (or draws) and targets, each returning a float.

Probabilities are [N, C], or [N] for the probability of class 1 of 2; draws have one axis more in front.
Anything that ``torch.as_tensor`` takes will do, of any floating-point type, on any device.

>>> from slimbayes import metrics
>>> p = [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]
>>> round(metrics.nll(p, [0, 1, 1]), 4), round(metrics.ece(p, [0, 1, 1], bins=5), 4)
(0.4149, 0.3)
"""

from slimbayes.metrics.calibration import Reliability, adaptive_ece, ece, mce, reliability
from slimbayes.metrics.classification import (
    OODScores,
    accuracy,
    auc_pr,
    auroc,
    brier,
    gibbs_nll,
    nll,
    ood_scores,
    top_k_accuracy,
)
from slimbayes.metrics.corruption import (
    ALEXNET,
    corruption_errors,
    mean_corruption_error,
    relative_corruption_errors,
    relative_mean_corruption_error,
)
from slimbayes.metrics.diversity import disagreement, pairwise_cosine, pairwise_kl
from slimbayes.metrics.evaluation import Evaluation
from slimbayes.metrics.regression import (
    CoverageCurve,
    coverage,
    coverage_curve,
    crps,
    gradient_snr,
    interval_width,
    log_predictive_density,
    mae,
    rmse,
)
from slimbayes.metrics.selective import (
    RiskCoverage,
    accuracy_at_coverage,
    aurc,
    risk_coverage,
    selective_risk,
)

__all__ = [
    "ALEXNET",
    "CoverageCurve",
    "Evaluation",
    "OODScores",
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "accuracy_at_coverage",
    "adaptive_ece",
    "auc_pr",
    "aurc",
    "auroc",
    "brier",
    "corruption_errors",
    "coverage",
    "coverage_curve",
    "crps",
    "disagreement",
    "ece",
    "gibbs_nll",
    "gradient_snr",
    "interval_width",
    "log_predictive_density",
    "mae",
    "mce",
    "mean_corruption_error",
    "nll",
    "ood_scores",
    "pairwise_cosine",
    "pairwise_kl",
    "relative_corruption_errors",
    "relative_mean_corruption_error",
    "reliability",
    "risk_coverage",
    "rmse",
    "selective_risk",
    "top_k_accuracy",
]
