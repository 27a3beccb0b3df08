"""What every method costs: time, memory and parameters, as ratios to the deterministic network on the same rows."""

from slimbayes.lab.bench.results import BenchError, Results, read_results
from slimbayes.lab.bench.running import run_bench
from slimbayes.lab.bench.settings import CONTENDERS, NETWORKS, PEERS, BenchConfig

__all__ = [
    "CONTENDERS",
    "NETWORKS",
    "PEERS",
    "BenchConfig",
    "BenchError",
    "Results",
    "read_results",
    "run_bench",
]
