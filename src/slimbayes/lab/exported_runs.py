"""A trained run as one ONNX file, and such a file as something that predicts."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.core.conversion import find_record
from slimbayes.core.likelihoods import Categorical, Gaussian, Likelihood
from slimbayes.core.predictive import Predictive
from slimbayes.lab.runs import Facts, Run, precision_of, samples_for
from slimbayes.verbs.checkpoint import CheckpointError
from slimbayes.verbs.exporting import ExportError, OnnxModel, to_onnx
from slimbayes.verbs.freezing import freeze

ENDING = ".onnx"
_ROWS = 4096  # draws × examples of one pass


@dataclass
class ServedRun:
    """An exported run: what it knows of its data, and its fixed draws."""

    model: OnnxModel
    facts: Facts
    likelihood: Likelihood

    def predictive(self, raw: Tensor, seed: int = 0, chunk: int | None = None) -> Predictive:
        """What the model says of raw inputs; its draws are those that it was exported with, whatever the seed."""
        given = self.facts.scaling(raw)
        given = given.float() if given.is_floating_point() else given.long()
        draws = max(1, int(self.model.metadata["draws"]))
        step = max(1, (chunk or _ROWS) // draws)
        parts = [self.model(given[i : i + step]) for i in range(0, len(given), step)]
        return self.likelihood.predictive(torch.cat(parts, 1))


def export_run(run: Run, path: str | os.PathLike[str], draws: int | None = None, seed: int = 0) -> int:
    """Write a run as ONNX in float32, with its facts and likelihood, and return the number of draws in it.

    ``draws=None`` is the configuration's. As in predictions it is rounded down to a multiple of the components, and
    methods without noise have one draw for each.
    """
    model = copy.deepcopy(run.model).cpu().float().eval()
    count = samples_for(model, run.config.draws if draws is None else draws) * find_record(model).components
    generator = torch.Generator().manual_seed(0)
    size = (3, *run.facts.shape)
    tokens = run.facts.kind == "text"
    example = (
        torch.randint(2, size, generator=generator) if tokens else torch.randn(size, generator=generator)
    )
    frozen = freeze(model, count, seed, example=example)
    about = {"run": {"facts": run.facts.to_dict(), "precision": precision_of(run.likelihood)}}
    to_onnx(frozen, example, path, metadata=about)
    return count


def load_served(path: str | os.PathLike[str], threads: int | None = None) -> ServedRun:
    """An exported run from its file; no code runs but onnxruntime's own operations."""
    if not Path(path).is_file():
        raise CheckpointError(f"there is no exported model {str(path)!r}; make one: slimbayes export RUN")
    model = OnnxModel(path, threads)
    try:
        about: dict[str, Any] = model.metadata["run"]
        facts = Facts.from_dict(about["facts"])
        precision = about["precision"]
        int(model.metadata["draws"])
        likelihood: Likelihood = Categorical()
        if facts.task != "classification":
            likelihood = Gaussian(precision=precision, learn="fixed")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExportError(
            f"{str(path)!r} does not say what its inputs and outputs mean ({error!r}); export the folder of a run: "
            f"slimbayes export RUN"
        ) from error
    return ServedRun(model, facts, likelihood)
