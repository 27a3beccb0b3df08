"""One call of ``slimbayes reproduce``: scale, folders, time, and networks trained once for all that need them."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.objective import kl
from slimbayes.files import write_whole
from slimbayes.lab.data import RecordDataset, Scaling
from slimbayes.lab.data import load as load_data
from slimbayes.lab.experiments.finished import FACTS, Unfinished
from slimbayes.lab.experiments.networks import (
    MODEL,
    Prepared,
    PreparedRecords,
    Recipe,
    Trained,
    as_tokens,
    without_mean,
)
from slimbayes.lab.experiments.results import SCALES
from slimbayes.lab.experiments.runner import Job
from slimbayes.lab.experiments.several import Processes
from slimbayes.lab.models.text import network_builder
from slimbayes.training import StopTraining, Training, fit
from slimbayes.training.judging import unsaid
from slimbayes.training.keeping import STATE
from slimbayes.training.state import States
from slimbayes.verbs.checkpoint import CheckpointError, load, save
from slimbayes.verbs.evaluation import assess
from slimbayes.verbs.provenance import commit, hardware, now

PROBES, MEASURED = "probes.json", "measured.json"
MEASURE = 1  # raise it when measure, sb.compress or analysis.truncate change what they give
Figures = dict[str, float]


class OutOfTime(StopTraining):
    """The time of this call is spent; the same command goes on where it stopped."""


AnyPrepared = Prepared | PreparedRecords
Probe = Callable[[nn.Module, Any, int], dict[str, Any]]


class Session:
    """Where an experiment runs: it trains each network once, keeps it in ``work``, and remembers what it did."""

    def __init__(
        self,
        scale: str,
        work: str | Path,
        data_root: str | None = None,
        seeds: int | None = None,
        budget: float | None = None,
        progress: bool = True,
        say: Callable[[str], None] = lambda text: None,
        only: Sequence[str] = (),
        devices: int = 1,
        num_nodes: int = 1,
        finished: torch.device | None = None,
    ) -> None:
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown; use one of {', '.join(SCALES)}")
        if seeds is not None and seeds < 1:
            raise ValueError(f"seeds={seeds}: give at least 1, or None for the scale's own")
        if budget is not None and not budget >= 0:
            raise ValueError(f"budget={budget}: give seconds, at least 0")
        self.scale, self.data_root, self.seeds = scale, data_root, seeds
        self.work, self.only = Path(work), tuple(only)
        self.progress, self.say = progress, say
        self.finished = finished  # the device whose networks are reported, and none is trained or measured
        self.missing: list[Job] = []  # that were asked for and are not there
        self.device = finished or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.begun = time.monotonic()
        self.deadline = None if budget is None else self.begun + budget
        self.runs: list[dict[str, Any]] = []
        self.used: dict[str, dict[str, str]] = {}  # fingerprints and sources of data
        self._data: dict[tuple[Any, ...], Prepared] = {}
        self._made: dict[tuple[Any, ...], Any] = {}
        self.processes = Processes(devices, num_nodes)

    def chosen(self, *settings: str) -> tuple[str, ...]:
        """Those of the settings that this call is to run."""
        found = tuple(setting for setting in settings if not self.only or setting in self.only)
        if not found:
            raise ValueError(f"only={', '.join(self.only)} leaves nothing of {', '.join(settings)}")
        return found

    def prepared(
        self, name: str, scaling: Scaling | None = None, held_out: int = 0, pixel_mean: bool = False,
        pad: int | None = None, tokens: bool = False,
    ) -> Prepared:  # fmt: skip
        """A data set whose last ``held_out`` training examples are for validation, in the units of ``scaling``.

        With a ``pad`` its images are cropped, after so many pixels on each side, and flipped where it allows that.
        With ``tokens`` inputs are sequences of whole numbers.
        """
        more = [*([] if pad is None else [pad]), *(["tokens"] if tokens else [])]
        key: tuple[Any, ...] = (name, scaling, held_out, pixel_mean, *more)
        if key not in self._data:
            data = load_data(name, root=self.data_root)
            self.used[name] = {"fingerprint": data.fingerprint(), "source": data.source}
            data = replace(data, scaling=scaling or data.scaling)
            data = replace(data, augment=()) if pad is None else replace(data, pad=pad)
            if pixel_mean:
                data = without_mean(data)
            if tokens:
                data = as_tokens(data)
            kept = len(data.train) - held_out
            validation = data.train[kept:] if held_out else data.test
            self._data[key] = Prepared(replace(data, train=data.train[:kept]), validation, repr(key[1:]))
        return self._data[key]

    def records(
        self, name: str, make: Callable[[], RecordDataset], options: dict[str, Any]
    ) -> PreparedRecords:
        """Medical records that ``make`` reads, by their name and options."""

        def read() -> PreparedRecords:
            data = make()
            self.used[name] = {"fingerprint": data.fingerprint(), "source": data.source}
            return PreparedRecords(data, repr(options))

        found: PreparedRecords = self.once(("records", name, repr(options)), read)
        return found

    def check_time(self, work: str = "what is asked for") -> None:
        """Raise when the time of this call is spent, or the process that began this one was killed.

        A session that reports what is finished has no time for any ``work``, and says what it would have been.
        """
        if self.finished is not None:
            raise Unfinished(f"{work} is not in the work folder, and nothing is trained or measured")
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise OutOfTime("the process that began this one is gone")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime("the time of this call is spent: the same command goes on where it stopped")

    def trained(
        self, recipe: Recipe, prepared: AnyPrepared, seed: int, probe: Probe | None = None, every: int = 0,
        resume: bool = True,
    ) -> Trained:  # fmt: skip
        """The network of a recipe and a seed: from ``work`` if it is there, trained (on) if not.

        ``probe(model, prepared, step)`` is called every so many steps; what it returns is kept by step, with the
        seconds of training until then. A run whose time is measured is not resumed.
        """
        facts = json.loads(json.dumps({**recipe.facts(seed), "every": every}))
        facts |= {"data": self.used[recipe.data]["fingerprint"], "prepared": prepared.key}
        folder = self._folder(recipe, seed, facts)
        shape, outputs = prepared.data.shape, prepared.data.num_outputs
        known = self.processes.agreed(_finished(folder, facts, every))
        if known is None:
            label = f"{recipe.setting} {recipe.purpose} {recipe.label} seed {seed}"
            self.processes.by_first(functools.partial(self.check_time, label))
            known = self._train(recipe, prepared, seed, folder, facts, probe, every, resume)

        def read() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                plain = network_builder(recipe.network)(shape, outputs)
            return load(plain, folder / MODEL).to(self.device).eval()

        run = {
            "setting": recipe.setting, "purpose": recipe.purpose, "label": recipe.label, "seed": seed,
            "method": recipe.method, "network": recipe.network, "data": recipe.data,
            "training": _changed(recipe.training),
            **{key: known.get(key) for key in ("steps", "seconds", "created", "commit", "hardware", "torch")},
        }  # fmt: skip
        if run not in self.runs:
            self.runs.append(run)
        probes = read_json(folder / PROBES) or {}
        return Trained(recipe, seed, probes, known["steps"], known["seconds"], folder, read)

    def _train(
        self, recipe: Recipe, prepared: AnyPrepared, seed: int, folder: Path, facts: dict[str, Any],
        probe: Probe | None, every: int, resume: bool,
    ) -> dict[str, Any]:  # fmt: skip
        model = recipe.build(prepared.data.shape, prepared.data.num_outputs, seed)
        state = read_state_step(folder) if resume else 0
        found = {
            step: kept for step, kept in (read_json(folder / PROBES) or {}).items() if int(step) <= state
        }
        missing = [step for step in range(every, state + 1, every) if str(step) not in found] if every else []
        if missing:  # what was measured is gone: train from the start rather than leave a gap
            resume, found = False, {}
        (folder / MEASURED).unlink(missing_ok=True)
        aside = 0.0  # seconds that were not training

        def callback(step: int, row: dict[str, float]) -> None:
            nonlocal aside
            if probe is not None and every and step % every == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.monotonic()
                found[str(step)] = {**probe(model, prepared, step), "seconds": start - begun - aside}
                model.train()
                write_whole(folder / PROBES, json.dumps(found))
                aside += time.monotonic() - start
            self.check_time()

        training = replace(recipe.training, seed=seed, log_every=every or recipe.training.log_every)
        label = f"{recipe.setting} {recipe.purpose} {recipe.label} seed {seed}"
        begun = time.monotonic()
        with unsaid():  # the setting is the paper's
            result = fit(
                model, prepared.data, training, folder=folder, resume=resume, progress=self.progress, label=label,
                callback=callback, fabric=self.processes.fabric,
                validation=None if training.early_stopping is None else prepared.validation,
            )  # fmt: skip
        origin = {"created": now(), "commit": commit(), "hardware": hardware(), "torch": torch.__version__}
        known = {"facts": facts, "steps": result.step, "seconds": result.seconds, **origin}
        if self.processes.first:
            save(model, folder / MODEL)
            write_whole(folder / FACTS, json.dumps(known))
            self.say(f"{label}: {result.step} steps in {result.seconds:.1f} s")
        self.processes.meet()  # others look for these files
        return known

    def _folder(self, recipe: Recipe, seed: int, facts: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        slug = re.sub(r"[^A-Za-z0-9]+", "-", recipe.label).strip("-").lower()
        return self.work / recipe.setting / recipe.purpose / f"{slug}-{seed}-{digest}"

    def figures(
        self, trained: Trained, variant: str, prepared: Prepared, samples: int,
        make: Callable[[], nn.Module] | None = None, split: str = "test",
    ) -> tuple[Figures, Figures]:  # fmt: skip
        """``measure`` of a trained network, or of what ``make`` makes of it; kept beside the network.

        What was measured of other weights, or by other code than that of version ``MEASURE``, is measured again.
        """
        figures, errors = self.kept(
            trained,
            f"{variant}, {samples} samples, {split}",
            lambda: self.measure(trained.model if make is None else make(), prepared, samples, split),
        )
        return figures, errors

    def kept(self, trained: Trained, key: str, make: Callable[[], Any]) -> Any:
        """What ``make`` finds of a trained network, as plain values, kept beside it under a name.

        It stays where the weights are deleted: a work folder without them is small enough to be sent elsewhere.
        """
        path = trained.folder / MEASURED
        known: dict[str, Any] = read_json(path) or {}
        before = known.get("state") or {}
        state = {"version": MEASURE, "weights": _digest(trained.folder / MODEL) or before.get("weights")}
        if before != state:
            known = {"state": state}
        if key not in known:
            recipe = trained.recipe
            self.check_time(f"{key!r} of {recipe.setting} {recipe.label} seed {trained.seed}")
            known[key] = make()
            write_whole(path, json.dumps(known))
        return known[key]

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What is made once in a call and not kept: corrupted images."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def measure(
        self, model: nn.Module, prepared: Prepared, samples: int, split: str = "test", seed: int = 0
    ) -> tuple[Figures, Figures]:
        """Figures on test (or validation) data with so many weight samples, and their errors over examples.

        −ELBO = E_q[−log p(y|x, w)] + KL/N per example, with the test data's likelihood and the training data's N.
        """
        rows = prepared.data.test if split == "test" else prepared.validation
        # Weights are sampled once per batch and draw: on a CPU too, many small inputs go at a time.
        small = self.device.type == "cuda" or (
            rows.inputs[:1].numel() <= 1024 and prepared.data.kind != "text"
        )
        scaling, size = prepared.data.scaling, min(10_000 if small else 1000, len(rows))
        where = rows.to(self.device)
        batches = (
            (where.inputs[i : i + size], where.targets[i : i + size]) for i in range(0, len(rows), size)
        )
        found = assess(
            model.eval(), batches, samples=samples, seed=seed, noise="shared", chunk=size, prepare=scaling
        )  # fmt: skip
        values = found.compute()
        with torch.no_grad():
            divergence = float(kl(model)) / prepared.num_train
        examples = found.examples
        correct = (examples["prediction"] == examples["target"]).double() * 100
        figures = {
            "neg_elbo": values["gibbs_nll"] + divergence, "nll": values["nll"],
            "accuracy": 100 * values["accuracy"], "brier": values["brier"] - 1, "ece": values["ece"],
            "gibbs_nll": values["gibbs_nll"], "kl_per_example": divergence,
        }  # fmt: skip
        errors = {
            "neg_elbo": _error(examples["gibbs_nll"]), "nll": _error(examples["nll"]), "accuracy": _error(correct),
            "brier": _error(examples["brier"]),
        }  # fmt: skip
        return figures, errors


def _error(values: Tensor) -> float:
    return float(values.double().std() / len(values) ** 0.5)


def _changed(training: Training) -> dict[str, Any]:
    """The settings that are not the defaults: what a reader wants to see."""
    standard = Training().to_dict()
    return {
        name: value
        for name, value in training.to_dict().items()
        if value != standard[name] and name != "seed"
    }


def _finished(folder: Path, facts: dict[str, Any], every: int) -> dict[str, Any] | None:
    """What is known of a network that was trained to its end, with all its probes; None if it was not."""
    known = read_json(folder / FACTS)
    if known is None or known.get("facts") != facts or not {"steps", "seconds"} <= known.keys():
        return None
    probes = read_json(folder / PROBES) or {}
    if every and any(str(step) not in probes for step in range(every, known["steps"] + 1, every)):
        return None
    return known


def read_state_step(folder: Path) -> int:
    """The step at which a run can be resumed; 0 where there is no whole state."""
    states = States(folder, STATE)
    try:
        found = states.read()
        return 0 if found is None else int(found[1]["step"])
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        states.clear()
        return 0


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file holds; None where it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def with_precision(session: Session) -> None:
    """On a GPU TensorFloat-32 in products, and the fastest convolutions that cuDNN finds."""
    if session.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
