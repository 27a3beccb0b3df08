"""The fast paths that are attached: each has a plain twin in core, and is hidden by taking its line away.

The order is that in which they are asked.
"""

from __future__ import annotations

from slimbayes.accelerate.bulk_noise import BulkNoise
from slimbayes.accelerate.compile import factor_operations  # noqa: F401 - registers its operators
from slimbayes.accelerate.cpu.lstm_layer import LSTMLayers
from slimbayes.accelerate.factor_groups import FactorGroups
from slimbayes.accelerate.late_tiling import LATE_TILING
from slimbayes.accelerate.log_sigma import Interpolation
from slimbayes.accelerate.members import Members
from slimbayes.accelerate.patch_indices import PatchIndices
from slimbayes.accelerate.patch_lookahead import PatchLookahead
from slimbayes.accelerate.point_factors import PointFactors
from slimbayes.accelerate.random_weights import RandomWeights
from slimbayes.accelerate.rank1_layers import Rank1Layers
from slimbayes.accelerate.row_factors import RowFactors
from slimbayes.accelerate.weight_groups import WeightGroups
from slimbayes.core.paths import attach

attach(
    BulkNoise(),
    RowFactors(),
    FactorGroups(),
    PointFactors(),
    PatchIndices(),
    WeightGroups(),
    PatchLookahead(),
    Rank1Layers(),
    RandomWeights(),
    LSTMLayers(),
    LATE_TILING,
    Members(),
    Interpolation(),
)
