"""How the EMP paper's entries run, from the modules that know their networks."""

from __future__ import annotations

from slimbayes.experiments import emp_uci_tables
from slimbayes.experiments.runner import Runner

RUNNERS: dict[str, Runner] = {**emp_uci_tables.RUNNERS}
