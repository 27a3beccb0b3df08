"""Predictions of a trained run on new data, as a table: probabilities, entropies, intervals, row by row."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.datasets import fingerprint
from slimbayes.core.predictive import Predictive
from slimbayes.files import formula_safe, write_whole
from slimbayes.lab.data import DataError
from slimbayes.lab.exported_runs import ServedRun
from slimbayes.lab.runs import MODEL, Facts, Run
from slimbayes.verbs.provenance import beside, manifest

SUFFIXES = (".csv", ".json", ".npz")
Table = dict[str, list[object]]


def predict_table(
    run: Run | ServedRun,
    inputs: Tensor,
    level: float = 0.9,
    seed: int = 0,
    chunk: int | None = None,
    names: list[str] | None = None,
) -> Table:
    """One row per input: what the model says and how sure it is.

    Classes: prediction, confidence and its central interval over the draws, entropy, expected_entropy,
    mutual_information, and p(class) for each. Real targets, in original units: mean, std, aleatoric_std,
    epistemic_std, and the central interval, for each output.
    """
    expected = tuple(run.facts.shape)
    if tuple(inputs.shape[1:]) != expected:
        raise DataError(
            f"the inputs have shape {list(inputs.shape[1:])} each, the model was trained on {list(expected)}: "
            f"give data of that shape"
        )
    if len(inputs) == 0:
        raise DataError("there is nothing to predict: the input holds no rows")
    if inputs.is_floating_point() and not torch.isfinite(inputs).all():
        row = int((~torch.isfinite(inputs.flatten(1))).any(1).nonzero()[0])
        raise DataError(f"row {row} of the inputs holds NaN or infinity: drop or fill it first")
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} must lie between 0 and 1, as in 0.9")
    found, facts = run.predictive(inputs, seed, chunk), run.facts
    table: Table = {"row": list(names) if names is not None else list(range(len(inputs)))}
    return table | (_classes(facts, found, level) if facts.classes else _real(facts, found, level))


def _classes(facts: Facts, found: Predictive, level: float) -> Table:
    confidence, best = found.mean.max(1)
    lower, upper = (end.gather(1, best[:, None])[:, 0] for end in found.interval(level))
    columns: Table = {"prediction": [facts.classes[int(i)] for i in best]}
    for name, values in (
        ("confidence", confidence), ("lower", lower), ("upper", upper), ("entropy", found.entropy),
        ("expected_entropy", found.expected_entropy), ("mutual_information", found.mutual_information),
    ):  # fmt: skip
        columns[name] = values.tolist()
    for i, name in enumerate(facts.classes):
        columns[f"p({name})"] = found.mean[:, i].tolist()
    return columns


def _real(facts: Facts, found: Predictive, level: float) -> Table:
    scaling = facts.target_scaling
    assert scaling is not None
    scale = torch.tensor(scaling.std) / scaling.unit
    lower, upper = found.interval(level)
    columns: Table = {}
    for i, name in enumerate(facts.outputs):
        tail = "" if len(facts.outputs) == 1 else f"({name})"
        for column, values in (("mean", found.mean), ("lower", lower), ("upper", upper)):
            columns[column + tail] = scaling.undo(values.cpu())[:, i].tolist()
        for column, values in (
            ("std", found.variance), ("aleatoric_std", found.aleatoric), ("epistemic_std", found.epistemic)
        ):  # fmt: skip
            columns[column + tail] = (values.cpu().sqrt() * scale)[:, i].tolist()
    return columns


def write_predictions(
    table: Table, path: Path, run: Run | ServedRun, inputs: Tensor, source: Path, level: float, seed: int
) -> None:
    """Write a table, and beside it the manifest: which weights, which inputs, which draws.

    ``source`` is the folder of the run, or the exported file, that predicted.
    """
    config: dict[str, object] = {"level": level, "source": source.name}
    if isinstance(run, Run):
        config["run"] = run.config.to_dict()
    weights = source / MODEL if source.is_dir() else source
    about = manifest(
        "predict", config, {"fingerprint": fingerprint(inputs), "rows": len(inputs)}, seed,
        weights={"file": weights.name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()},
        trained_on={"name": run.facts.name, "fingerprint": run.facts.fingerprint},
    )  # fmt: skip
    write_whole(beside(path), json.dumps(about, indent=1) + "\n")
    write_table(table, path)


def write_table(table: Table, path: Path) -> None:
    """Write a table as .csv, .json (a list of rows) or .npz (one array per column), whole or not at all.

    In .csv a name of a class or a file that a spreadsheet would run as a formula gets an apostrophe before it.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"cannot write {str(path)!r}: give a name that ends in one of {', '.join(SUFFIXES)}")
    rows = zip(*table.values(), strict=True)
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{name: np.asarray(values) for name, values in table.items()})  # type: ignore[arg-type]
        write_whole(path, buffer.getvalue())
    elif path.suffix == ".json":
        write_whole(path, json.dumps([dict(zip(table, row, strict=True)) for row in rows], indent=1))
    else:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([formula_safe(name) for name in table])
        writer.writerows(
            [f"{v:.6g}" if isinstance(v, float) else formula_safe(v) for v in row] for row in rows
        )
        write_whole(path, text.getvalue())
