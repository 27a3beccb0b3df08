"""How the EMP paper's entries run, from the modules that know what each needs."""

from __future__ import annotations

from slimbayes.lab.experiments import (
    emp_cards,
    emp_counts,
    emp_imagenet_tables,
    emp_images,
    emp_priors,
    emp_uci_tables,
)
from slimbayes.lab.experiments.runner import UNTRAINED, Runner, together

RUNNERS: dict[str, Runner] = {
    "emp/figure1": Runner(UNTRAINED, emp_cards.figure1),
    "emp/table1": Runner(UNTRAINED, emp_counts.table1),
    "emp/figure3": Runner(UNTRAINED, emp_priors.figure3),
    "emp/table3": Runner(UNTRAINED, emp_counts.table3),
    **together(emp_images.RUNNERS, emp_imagenet_tables.RUNNERS),
    **emp_uci_tables.RUNNERS,
}
