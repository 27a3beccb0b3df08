"""What posteriors look like: matrices and spectra, components apart, weights without need, priors beside them."""

from slimbayes.analysis.comparison import Compared, Comparison, compare_with_prior
from slimbayes.analysis.factors import component_spread, factor_scale, rank1_factors
from slimbayes.analysis.pictures import plot_spectra, plot_stddevs
from slimbayes.analysis.pruning import PruningCurve, prune, pruning_curve, signal_to_noise
from slimbayes.analysis.spectra import (
    Moments,
    explained_variance,
    low_rank,
    matrices,
    spectrum,
    stddevs,
    truncate,
)

__all__ = [
    "Compared",
    "Comparison",
    "Moments",
    "PruningCurve",
    "compare_with_prior",
    "component_spread",
    "explained_variance",
    "factor_scale",
    "low_rank",
    "matrices",
    "plot_spectra",
    "plot_stddevs",
    "prune",
    "pruning_curve",
    "rank1_factors",
    "signal_to_noise",
    "spectrum",
    "stddevs",
    "truncate",
]
