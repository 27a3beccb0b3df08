"""The test examples that the page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from slimbayes.core.predict import predict
from slimbayes.lab.runs import Run
from slimbayes.metrics import Evaluation

if TYPE_CHECKING:
    from slimbayes.lab.compare.bench import Bench

EVALUATION_SEED = 7  # of every draw in a comparison
_EXAMPLES = 6  # a row of the page


def examples(bench: Bench, run: Run, clean: Evaluation) -> dict[str, list[dict[str, Any]]]:
    """The least sure, the most sure and the wrong ones, a few of each, with what the model says of them."""
    columns = clean.examples
    if bench.data.task == "regression":
        order = columns["variance"][:, 0].argsort(descending=True)
        away = (columns["target"] - columns["prediction"])[:, 0].square() / columns["variance"][:, 0]
        chosen = {"least": order, "most": order.flip(0), "wrong": away.argsort(descending=True)}
        return {name: _real(bench, columns, rows) for name, rows in chosen.items()}
    order = columns["entropy"].argsort(descending=True)
    wrong = (columns["prediction"] != columns["target"]).nonzero()[:, 0]
    wrong = wrong[columns["confidence"][wrong].argsort(descending=True)]
    chosen = {"least": order[:_EXAMPLES], "most": order.flip(0)[:_EXAMPLES], "wrong": wrong[:_EXAMPLES]}
    return {name: _classes(bench, run, columns, rows) for name, rows in chosen.items() if len(rows)}


def _classes(bench: Bench, run: Run, columns: dict[str, Tensor], rows: Tensor) -> list[dict[str, Any]]:
    raw = bench.test.inputs[rows]
    # The functions of the evaluation: shared noise is keyed by the draw alone, whatever the examples.
    found = predict(run.model, run.prepared(raw), samples=run.samples, noise="shared", seed=EVALUATION_SEED)
    names = bench.data.classes
    return [
        {
            "index": int(bench.rows[row]),
            "target": names[int(columns["target"][row])],
            "prediction": names[int(columns["prediction"][row])],
            **{k: float(columns[k][row]) for k in ("confidence", "entropy", "mutual_information")},
            "probabilities": found.mean[i].tolist(),
            **_picture(bench, raw[i]),
        }
        for i, row in enumerate(rows)
    ]


def _real(bench: Bench, columns: dict[str, Tensor], order: Tensor) -> list[dict[str, Any]]:
    keys = ("target", "prediction", "lower", "upper")
    return [
        {"index": int(bench.rows[row]), **{key: float(columns[key][row, 0]) for key in keys},
         **_picture(bench, bench.test.inputs[row])}
        for row in order[:_EXAMPLES]
    ]  # fmt: skip


def _picture(bench: Bench, raw: Tensor) -> dict[str, Any]:
    if bench.data.kind == "image":
        return {"pixels": raw.tolist(), "features": None}
    if bench.data.kind == "text":
        return {"pixels": None, "features": None}
    values = [float(value) for value in raw]
    return {"pixels": None, "features": dict(zip(bench.data.features, values, strict=True))}
