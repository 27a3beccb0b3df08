"""Where something begins to look wrong, and why there."""

from slimbayes.analysis.factors import COLLAPSED

__all__ = ["COLLAPSED"]

OVERLAP = 0.1  # spread of components over their own σ: at a tenth a component's noise hides which one it is
EQUAL = 1e-3  # spread of patches or members over their size: copies that training has not set apart
AT_CAP = 0.999  # of stddev_max: a σ above it is held by the cap
CAPPED_SHARE = 0.25  # of a layer's σ: a quarter at the cap, and the cap decides the posterior
CLIPPED_SHARE = 0.05  # of the samples of a factor: more, and the clipped samples are another distribution
NEGLIGIBLE = (
    1e-3  # rms σ over rms μ: the noise is lost in the rounding of half precision, draws are one network
)
DOMINANT = 10.0  # rms σ over rms μ: the layer's output is noise
FACTOR_LARGE = 5.0  # mean |factor|, which begins near 1: two layers of it multiply activations by 600
FACTOR_SMALL = 0.05  # mean |factor|: the layer passes next to nothing on
DEFAULT_CLIP = 10.0  # of factors whose method clips nothing
OUTSIDE_SHARE = 0.01  # of a factor's locations beyond the clip: their samples are the clip itself
DEAD = 0.01  # nats of KL per element: a shift of 0.14 prior deviations, or a σ off by 10 %
START_MEAN = (
    0.1  # relative distance of the mean σ from its start: what U and V of small k-tied layers have by chance
)
START_SPREAD = (
    0.05,
    0.17,
)  # relative deviation of σ at the start, where it is random: 0.1 or so for every method
START_COUNT = 64  # elements, below which mean and deviation say little
KL_RATIO = 1.0  # KL per datum over nll per datum: more, and most of the loss is the prior's
KL_FITTED = 0.1  # nats per datum: classes with a smaller nll are fitted, and no KL keeps much from them
KL_DENSITY = (
    1.0  # nats per datum that count as the nll of a density at least: it goes through 0 by a choice of units
)
DROWNED = (
    0.3  # nats per datum that noise may cost: at more, targets lose a quarter of their probability to it
)
COVERAGE = (0.87, 0.93)  # of 90 % intervals, beside two standard errors of the estimate
CALIBRATION = (
    0.03  # of confidence beside accuracy, as of intervals, beyond what a calibrated model shows by chance
)
DRAWS = 16  # at which calibration is judged at least: fewer make any posterior look too sure
SAME_DRAWS = 1e-6  # deviation over draws relative to the outputs: float32 rounding
MIXING_TOP = 0.95  # probability of one patch: of 20 draws one has another
LEFT_SHARE = 0.5  # of the parameters in layers that multiply by a weight: most of the network is no posterior
