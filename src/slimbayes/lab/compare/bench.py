"""The measurement of one trained model on clean and shifted test data: the numbers behind the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.core.conversion import find_record
from slimbayes.core.predict import predict
from slimbayes.lab.compare.examples import EVALUATION_SEED, examples
from slimbayes.lab.config import CompareConfig, Contender, RunConfig
from slimbayes.lab.data import Batches, Dataset, Shift, Split, out_of_distribution, shifts_for
from slimbayes.lab.models import default_network
from slimbayes.lab.runs import Facts, Run, held_out_for_noise, make_likelihood, make_model
from slimbayes.metrics import Evaluation, ood_scores
from slimbayes.training import Training, fit
from slimbayes.training.judging import unsaid
from slimbayes.training.sources import hold_out
from slimbayes.verbs.evaluation import assess
from slimbayes.verbs.provenance import provenance
from slimbayes.verbs.summary import summary

_BINS = 20
_MOST_KEPT = 512 * 2**20  # bytes of shifted test data


class Bench:
    """The test data of a comparison, clean and shifted, and the measurement of one contender on them."""

    def __init__(self, config: CompareConfig, data: Dataset, data_root: str | None) -> None:
        self.config, self.data = config, data
        self.rows = spread(len(data.test), config.max_test or len(data.test))
        self.test = data.test[self.rows]
        self.shifts: tuple[Shift, ...] = shifts_for(data, config.shifts, root=data_root)
        ood = out_of_distribution(data, data_root)
        # As many as there are test examples: AUROC and AUPR compare the two, and SVHN has 26,032.
        if ood is not None:
            ood = dataclasses.replace(ood, inputs=ood.inputs[spread(len(ood.inputs), len(self.test))])
        self.ood = ood
        self.network = default_network(data.shape) if config.network == "auto" else config.network
        self.facts = Facts.of(data)  # once: it hashes all the data
        places = [(shift.name, severity) for shift in self.shifts for severity in config.severities]
        self.places: tuple[tuple[str, int], ...] = tuple(places)
        self._kept: dict[tuple[str, int], Split] = {}
        size = self.test.inputs.numel() * self.test.inputs.element_size() * len(places)
        self._keep = size <= _MOST_KEPT

    def shifted(self, place: tuple[str, int], device: torch.device) -> Split:
        """The test data under a shift; kept for the next contender if there is room for all of them."""
        if place in self._kept:
            return self._kept[place]
        # Corruptions are made on the model's device: on a GPU that takes a small part of the evaluation's time.
        split = self._shift(place[0]).apply(self.test.to(device), place[1], seed=EVALUATION_SEED)
        if self._keep:
            self._kept[place] = split
        return split

    def _shift(self, name: str) -> Shift:
        return next(shift for shift in self.shifts if shift.name == name)

    def describe(self) -> dict[str, Any]:
        """The data set, for the results."""
        data = self.data
        return {
            "name": data.name, "kind": data.kind, "classes": list(data.classes), "features": list(data.features),
            "outputs": list(data.outputs), "num_train": len(data.train), "num_test": len(self.test),
            "shape": list(data.shape), "source": data.source, "fingerprint": self.facts.fingerprint,
        }  # fmt: skip

    def results(self, title: str, methods: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """The whole, as ``slimbayes.report`` reads it."""
        config, ood = self.config, self.ood
        found = provenance(seeds=list(config.seeds), wall_seconds=round(seconds, 1), config=config.to_dict())
        severities = list(config.severities)
        return {
            "format": "slimbayes-results",
            "version": 1,
            "title": title,
            "task": self.data.task,
            "created": found.pop("created"),
            "provenance": found,
            "dataset": self.describe(),
            "network": self.network,
            "shifts": [
                {"name": s.name, "description": s.description, "severities": severities} for s in self.shifts
            ],
            "ood": ood and {"name": ood.name, "description": ood.description, "num": len(ood.inputs)},
            "methods": methods,
        }

    def key(self, contender: Contender, seed: int) -> str:
        """What a kept measurement depends on, as a short hash."""
        config = self.config.to_dict()
        for name in ("contenders", "seeds"):
            config.pop(name)
        content = [
            config,
            contender.to_dict(),
            seed,
            self.facts.fingerprint,
            self.ood and self.ood.name,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def measure(self, contender: Contender, seed: int, progress: bool, label: str) -> dict[str, Any]:
        """Train one contender with one seed and measure it."""
        config = self.config
        training = Training.from_dict({**config.training.to_dict(), **contender.training, "seed": seed})
        one = RunConfig(
            config.data, config.data_options, config.network, contender.method, config.validation, config.draws,
            training,
        )  # fmt: skip
        model = make_model(one, self.data.shape, self.data.num_outputs, seed)
        likelihood = make_likelihood(self.data.task)
        validation = held_out_for_noise(self.data) if config.validation is None else config.validation
        with unsaid():  # the report says it, of all seeds at once
            fitted = fit(
                model, self.data, training, validation=validation, likelihood=likelihood, progress=progress,
                label=label,
            )  # fmt: skip
        run = Run(model, one, self.facts, likelihood)
        return {
            "method": self.entry(contender, run),
            "run": self.figures(run, fitted.history, fitted.seconds, seed)
            | {"findings": [finding.kind for finding in fitted.findings]}
            | self._held_out(run, training.seed),
        }

    def _held_out(self, run: Run, seed: int) -> dict[str, Any]:
        """The figures of the training examples that ``fit`` held out: the method is chosen by them."""
        if self.config.validation is None:
            return {}
        held = hold_out(self.data, self.config.validation, seed)[1].test
        held = held[spread(len(held), self.config.max_test or len(held))]
        shifted: dict[str, dict[str, Any]] = {}
        for name, severity in self.places:
            split = self._shift(name).apply(held.to(run.device), severity, seed=EVALUATION_SEED)
            shifted.setdefault(name, {})[str(severity)] = self._assess(run, split).compute()
        return {"validation": {"clean": self._assess(run, held).compute(), "shifted": shifted}}

    def entry(self, contender: Contender, run: Run) -> dict[str, Any]:
        """What all runs of a contender have in common."""
        counted = summary(run.model)
        kind = type(contender.parsed).__name__
        alike = sum(type(other.parsed).__name__ == kind for other in self.config.contenders)
        return {
            "name": kind if alike == 1 else contender.label,
            "label": contender.label,
            "settings": {"method": contender.method, **contender.training},
            "parameters": counted.parameters,
            "base_parameters": counted.base_parameters,
            "overhead": counted.overhead,
            "draws": find_record(run.model).components * run.samples,
        }

    def figures(
        self, run: Run, history: list[dict[str, float]], train_seconds: float | None, seed: int
    ) -> dict[str, Any]:
        """Everything measured of one trained model."""
        start = time.monotonic()
        clean = self._assess(run, self.test)
        seconds = time.monotonic() - start
        shifted = {place: self._assess(run, self.shifted(place, run.device)) for place in self.places}
        by_shift: dict[str, dict[str, Any]] = {}
        for (name, severity), evaluation in shifted.items():
            by_shift.setdefault(name, {})[str(severity)] = evaluation.compute()
        whole: Evaluation | None = None
        for evaluation in shifted.values():
            whole = evaluation if whole is None else whole.merge(evaluation)
        metrics = clean.compute()
        figures: dict[str, Any] = {
            "seed": seed,
            "train_seconds": train_seconds,
            "predict_seconds": seconds * 1000 / len(self.test),
            "clean": metrics,
            "shifted": by_shift,
            "reliability": {
                "clean": clean.reliability(), "shifted": None if whole is None else whole.reliability()
            },
            "history": history,
        }  # fmt: skip
        if self.data.task == "classification":
            figures |= self._class_figures(run, clean, whole, {"clean": {"0": metrics}, **by_shift})
        else:
            figures |= self._regression_figures(run, clean)
        if seed == self.config.seeds[0]:
            figures["examples"] = examples(self, run, clean)
        return figures

    def _assess(self, run: Run, split: Split) -> Evaluation:
        batches = Batches(
            split, 512, scaling=self.data.scaling, target_scaling=self.data.target_scaling, shuffle=False
        )
        return assess(
            run.model, batches, run.samples, EVALUATION_SEED, run.likelihood,
            target_scaling=self.data.target_scaling, chunk=16384, noise="shared",
            prepare=run.cast,
        )  # fmt: skip

    def _class_figures(
        self, run: Run, clean: Evaluation, whole: Evaluation | None, by_place: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        ood: Evaluation | None = None
        if self.ood is not None:  # of these only the entropies count, so any target will do
            targets = torch.zeros(len(self.ood.inputs), dtype=torch.long)
            ood = self._assess(run, Split(self.ood.inputs, targets))
        top = math.log(len(self.data.classes))
        edges = torch.linspace(0.0, top, _BINS + 1)
        histograms: dict[str, Any] = {"edges": edges.tolist()}
        for name, evaluation in (("clean", clean), ("shifted", whole), ("ood", ood)):
            histograms[name] = None if evaluation is None else _histogram(evaluation.examples["entropy"], top)
        figures: dict[str, Any] = {"entropy": histograms, "ood": None}
        if ood is not None:
            figures["ood"] = {}
            for kind in ("entropy", "mutual_information"):
                scores = ood_scores(clean.examples[kind], ood.examples[kind])
                figures["ood"] |= {f"auroc_{kind}": scores.auroc, f"aupr_{kind}": scores.aupr}
        figures["disagreement"] = [
            {"shift": name, "severity": int(s), "accuracy": m["accuracy"], "disagreement": m["disagreement"]}
            for name, rows in by_place.items()
            for s, m in rows.items()
            if "disagreement" in m
        ]
        return figures

    def _regression_figures(self, run: Run, clean: Evaluation) -> dict[str, Any]:
        columns = clean.examples
        if self.data.shape != (1,):
            keys = {"target": "target", "mean": "prediction", "lower": "lower", "upper": "upper"}
            return {"scatter": {key: columns[name][:300, 0].tolist() for key, name in keys.items()}}
        inputs = torch.cat([self.data.train.inputs, self.test.inputs])
        x = torch.linspace(float(inputs.min()), float(inputs.max()), 121).unsqueeze(1)  # [121, 1]
        scaling = self.data.target_scaling
        assert scaling is not None
        found = predict(
            run.model, run.prepared(x), samples=run.samples, noise="shared",
            seed=EVALUATION_SEED, likelihood=run.likelihood,
        )  # fmt: skip
        lower, upper = found.interval(0.9)
        half = 1.645 * found.epistemic.sqrt()  # of 90 % of a Normal
        curves = {"mean": found.mean, "lower": lower, "upper": upper}
        curves |= {"epistemic_lower": found.mean - half, "epistemic_upper": found.mean + half}
        return {
            "fit": {
                "x": x[:, 0].tolist(),
                **{name: scaling.undo(values.cpu())[:, 0].tolist() for name, values in curves.items()},
                "level": 0.9,
                "train_x": self.data.train.inputs[:, 0].tolist(),
                "train_y": self.data.train.targets[:, 0].tolist(),
                "truth": self._truth(x[:, 0]),
            }
        }

    def _truth(self, x: Tensor) -> list[float] | None:
        """What a generated data set knows of its function at its test inputs, between them by straight lines."""
        truth = self.data.notes.get("truth")
        if truth is None:
            return None
        inputs = self.data.test.inputs[:, 0]
        order = inputs.argsort()
        values: list[float] = np.asarray(np.interp(x, inputs[order], torch.tensor(truth)[order])).tolist()
        return values


def spread(count: int, most: int) -> Tensor:
    """At most so many rows of a data set, evenly spaced: files are often sorted by class.

    >>> spread(10, 4), spread(3, 4)
    (tensor([0, 3, 6, 9]), tensor([0, 1, 2]))
    """
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()


def _histogram(values: Tensor, top: float) -> list[int]:
    counts = torch.histc(values.float().clamp(0.0, top), bins=_BINS, min=0.0, max=top)
    return [int(count) for count in counts]
