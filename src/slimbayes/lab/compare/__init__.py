"""Several methods on one data set, measured alike."""

from slimbayes.lab.compare.bench import Bench
from slimbayes.lab.compare.running import compare, evaluate_run

__all__ = ["Bench", "compare", "evaluate_run"]
