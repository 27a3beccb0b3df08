"""How the rank-1 paper's entries run, from the modules that know what each needs."""

from __future__ import annotations

from slimbayes.lab.experiments import (
    rank1_imagenet_tables,
    rank1_images,
    rank1_priors,
    rank1_record_tables,
    rank1_theorem,
    rank1_values,
)
from slimbayes.lab.experiments.runner import UNTRAINED, Runner

RUNNERS: dict[str, Runner] = {
    "rank1/figure1": Runner(UNTRAINED, rank1_priors.figure1),
    "rank1/table5": Runner(UNTRAINED, rank1_values.table5),
    "rank1/table6": Runner(UNTRAINED, rank1_values.table6),
    "rank1/table7": Runner(UNTRAINED, rank1_values.table7),
    "rank1/theorem1": Runner(UNTRAINED, rank1_theorem.theorem1),
    **rank1_images.RUNNERS,
    **rank1_imagenet_tables.RUNNERS,
    **rank1_record_tables.RUNNERS,
}
