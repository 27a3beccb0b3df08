"""What an experiment is: an item of a paper as data, with what was run there and what was printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimbayes.lab.data.corruptions import CORRUPTIONS

Cells = Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True)
class Paper:
    """A paper whose items are reproduced."""

    key: str
    title: str
    authors: str
    year: int
    url: str


PAPERS = {
    paper.key: paper
    for paper in (
        Paper(
            "ktied",
            "The k-tied Normal Distribution: A Compact Parameterization of Gaussian Mean Field Posteriors in "
            "Bayesian Neural Networks",
            "Swiatkowski et al.",
            2020,
            "https://arxiv.org/abs/2002.02655",
        ),
        Paper(
            "rank1",
            "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors",
            "Dusenberry et al.",
            2020,
            "https://arxiv.org/abs/2005.07186",
        ),
        Paper(
            "emp",
            "Ensemble Model Patching: A Parameter-Efficient Variational Bayesian Neural Network",
            "Chang et al.",
            2019,
            "https://arxiv.org/abs/1905.09453",
        ),
    )
}


@dataclass(frozen=True)
class Column:
    """How a quantity is titled and printed, and which way is better ("lower", "higher", or neither)."""

    title: str
    better: str = ""
    digits: int = 3


# Quantities by the key under which entries and results hold them, in the unit in which the papers print them.
COLUMNS = {
    "neg_elbo": Column("−ELBO", "lower", 3),
    "nll": Column("NLL", "lower", 3),
    "accuracy": Column("Accuracy %", "higher", 1),
    "top5": Column("Top-5 accuracy %", "higher", 1),
    "error": Column("Error %", "lower", 1),
    "ece": Column("ECE", "lower", 4),
    "ece_percent": Column("ECE %", "lower", 2),
    "mce_percent": Column("MCE %", "lower", 2),
    "brier": Column("Brier (TFP's, −1 to 1)", "lower", 3),
    "auc_pr": Column("AUC-PR", "higher", 3),
    "auroc": Column("AUROC", "higher", 3),
    "auroc_low": Column("AUROC, 2.5 %", "", 3),
    "auroc_high": Column("AUROC, 97.5 %", "", 3),
    "best_epoch": Column("Best epoch", "", 1),
    "kl_weight": Column("KL's weight then", "", 3),
    "c_nll": Column("NLL, corrupted", "lower", 2),
    "c_accuracy": Column("Accuracy %, corrupted", "higher", 1),
    "c_ece": Column("ECE, corrupted", "lower", 3),
    "mce": Column("mCE", "lower", 2),
    "rmce": Column("Relative mCE", "lower", 1),
    "rmse": Column("RMSE", "lower", 2),
    "lpd": Column("LPD", "higher", 2),
    "parameters": Column("Parameters", "lower", 0),
    "parameters_k": Column("Parameters, thousands", "lower", 0),
    "parameters_m": Column("Parameters, millions", "lower", 2),
    "parameters_percent": Column("Parameters, % of mean-field", "lower", 1),
    "overhead_percent": Column("Overhead %", "lower", 4),
    "step_ms": Column("Step, ms", "lower", 2),
    "step_ratio": Column("Step, ratio to point estimate", "lower", 2),
    "seconds": Column("Time, s", "lower", 1),
    "hours": Column("Time, h", "lower", 1),
    "snr": Column("Gradient SNR", "higher", 2),
    "stddev": Column("Mean standard deviation", "", 4),
    "explained_1": Column("Variance explained by the first singular value", "", 4),
    "explained_2": Column("Variance explained by the first two singular values", "", 4),
    "disagreement": Column("Disagreement / (1 − accuracy)", "higher", 3),
    "spread": Column("Spread of components", "", 4),
    "predicted": Column("Spread by the KL alone", "", 4),
    "scale": Column("Scale of the factors", "", 4),
    "auroc_entropy": Column("AUROC of entropy", "higher", 3),
    "auroc_mutual_information": Column("AUROC of mutual information", "higher", 3),
    **{kind: Column(kind.replace("_", " "), "lower", 1) for kind in CORRUPTIONS},
}


@dataclass(frozen=True)
class Setting:
    """One network on one data set, as the paper trained and tested it.

    ``network`` is a text as ``slimbayes train --network`` takes it, ``methods`` maps row labels to method texts
    (``slimbayes.verbs.method_text.parse_stored``). ``training`` holds the paper's hyper-parameters under the names of
    ``slimbayes.Training`` where it has them; a tuple is a grid from which the paper chose on validation data, a list
    is one value. The paper's errata are applied here, while printed numbers stay as they were printed.
    """

    name: str
    network: str
    data: str
    methods: Mapping[str, str]
    training: Mapping[str, Any]
    samples: int = 1  # of weights, in evaluation
    inputs: str = ""  # preprocessing and splits, in words


@dataclass(frozen=True)
class Printed:
    """Numbers as a paper prints them: one tuple per row, in the order of ``columns`` (keys of COLUMNS or free text).

    ``errors`` has the ± of the same cells, and ``error_of`` says what they are.

    >>> table = Printed("mnist", "MNIST, MLP", ("nll", "accuracy"), {"Mean-field": (0.100, 97.6)})
    >>> table.value("Mean-field", "nll"), table.value("1-tied", "nll")
    (0.1, None)
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Cells
    errors: Cells = field(default_factory=dict)
    error_of: str = ""

    def __post_init__(self) -> None:
        for label, cells in {**self.rows, **self.errors}.items():
            if len(cells) != len(self.columns):
                raise ValueError(
                    f"{self.title}: row {label!r} has {len(cells)} cells for {len(self.columns)} columns"
                )

    def value(self, row: str, column: str) -> float | None:
        """The printed number of a cell, None where the paper has none."""
        return self._cell(self.rows, row, column)

    def error(self, row: str, column: str) -> float | None:
        """The printed ± of a cell, None where the paper has none."""
        return self._cell(self.errors, row, column)

    def _cell(self, cells: Cells, row: str, column: str) -> float | None:
        if row not in cells or column not in self.columns:
            return None
        return cells[row][self.columns.index(column)]


@dataclass(frozen=True)
class Experiment:
    """One item of a paper (a table, a figure, a theorem), or one of ours beside it (``beyond``)."""

    name: str  # "ktied/table2"
    item: str  # "Table 2"
    title: str
    shows: str  # what the paper shows with it, in a sentence
    settings: tuple[Setting, ...] = ()
    metrics: tuple[str, ...] = ()  # keys of COLUMNS
    seeds: int = 1  # runs in the paper
    printed: tuple[Printed, ...] = ()
    errata: tuple[str, ...] = ()  # what in the paper's text is wrong or missing, and what is taken instead
    beyond: bool = False
    needs: str = ""  # what slimbayes must have before it can be run; empty where it has

    @property
    def paper(self) -> Paper:
        """The paper it belongs to."""
        return PAPERS[self.name.split("/")[0]]

    def table(self, name: str) -> Printed | None:
        """The printed table of this name."""
        return next((table for table in self.printed if table.name == name), None)
