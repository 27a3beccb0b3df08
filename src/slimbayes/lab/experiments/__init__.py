"""The papers' tables and figures as data: what to run, what was printed, and what came out."""

from slimbayes.lab.experiments.catalogue import ENTRIES, find
from slimbayes.lab.experiments.entry import COLUMNS, PAPERS, Column, Experiment, Paper, Printed, Setting
from slimbayes.lab.experiments.results import (
    FORMAT,
    SCALES,
    ResultError,
    read_result,
    result_path,
    write_result,
)

__all__ = [
    "COLUMNS",
    "ENTRIES",
    "FORMAT",
    "PAPERS",
    "SCALES",
    "Column",
    "Experiment",
    "Paper",
    "Printed",
    "ResultError",
    "Setting",
    "find",
    "read_result",
    "result_path",
    "write_result",
]
