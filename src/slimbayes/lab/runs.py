"""A trained model in a folder: configuration, weights, and the facts that reading new data needs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.core.convert import bayesianize
from slimbayes.core.likelihoods import Categorical, Gaussian, Likelihood
from slimbayes.core.predict import predict
from slimbayes.core.predictive import Predictive
from slimbayes.files import read_json, shortened, write_whole
from slimbayes.lab.config import RunConfig, from_dict, write_config
from slimbayes.lab.data import Dataset, Scaling, StreamedDataset, stream
from slimbayes.lab.data import load as load_data
from slimbayes.lab.models.text import network_builder
from slimbayes.training import FitResult, fit, mixed_seed
from slimbayes.training.judging import unsaid
from slimbayes.training.rows import LEAST_HELD_OUT
from slimbayes.training.settings import whole_number
from slimbayes.verbs.checkpoint import CheckpointError, load, save
from slimbayes.verbs.method_text import SpecError, parse_method
from slimbayes.verbs.provenance import provenance
from slimbayes.verbs.summary import summary
from slimbayes.verbs.untrusted_files import check_network, shapes_of

FORMAT = "slimbayes-run"
_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
_NOISE_PART = 0.1  # of the rows
MODEL, FACTS, CONFIG = "model.safetensors", "run.json", "config.yaml"


@dataclass(frozen=True)
class Facts:
    """What a model must know of its data to read new ones, and to name what it says."""

    name: str
    task: str
    kind: str
    shape: tuple[int, ...]
    scaling: Scaling
    target_scaling: Scaling | None
    classes: tuple[str, ...]
    features: tuple[str, ...]
    outputs: tuple[str, ...]
    num_train: int
    source: str
    fingerprint: str
    crop: bool = False  # images come in any size and are resized and cropped at the centre

    @classmethod
    def of(cls, data: Dataset | StreamedDataset) -> Facts:
        """The facts of a data set."""
        common = (data.name, data.task, data.kind, data.shape, data.scaling)
        if isinstance(data, StreamedDataset):
            mark = data.fingerprint()  # of names and labels
            return cls(*common, None, data.classes, (), (), len(data.train), data.source, mark, True)
        names = (data.classes, data.features, data.outputs)
        return cls(*common, data.target_scaling, *names, len(data.train), data.source, data.fingerprint())

    @property
    def num_outputs(self) -> int:
        """One per class, or one per target."""
        return len(self.classes) or len(self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Facts:
        """Back from plain values."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for name in ("scaling", "target_scaling"):
            if values[name] is not None:
                entry = values[name]
                values[name] = Scaling(tuple(entry["mean"]), tuple(entry["std"]), entry["unit"])
        facts = cls(**values)
        facts._check()
        return facts

    def _check(self) -> None:
        regression = self.task == "regression"
        names = (*self.classes, *self.features, *self.outputs)
        if not (
            self.task in ("classification", "regression")
            and self.kind in ("image", "table", "text")
            and all(whole_number(size) and size > 0 for size in self.shape)
            and isinstance(self.scaling, Scaling)
            and isinstance(self.target_scaling, Scaling) == regression
            and all(isinstance(name, str) for name in names)
            and bool(self.outputs if regression else self.classes)
        ):
            raise ValueError(f"facts that do not fit together: {self}")


@dataclass
class Run:
    """A model with its configuration, facts and likelihood."""

    model: nn.Module
    config: RunConfig
    facts: Facts
    likelihood: Likelihood

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters."""
        return next(self.model.parameters()).dtype

    def prepared(self, raw: Tensor) -> Tensor:
        """Raw inputs as the model takes them, on its device and in its type of numbers."""
        return self.cast(self.facts.scaling(raw.to(self.device)))

    def cast(self, inputs: Tensor) -> Tensor:
        """Scaled inputs in the model's type of numbers; tokens stay whole numbers."""
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def predictive(self, raw: Tensor, seed: int = 0, chunk: int | None = None) -> Predictive:
        """What the model says of raw inputs."""
        given = self.prepared(raw)
        return predict(
            self.model, given, samples=self.samples, seed=seed, likelihood=self.likelihood, chunk=chunk
        )

    @property
    def samples(self) -> int:
        """Samples per component that give the configuration's number of draws."""
        return samples_for(self.model, self.config.draws)


def samples_for(model: nn.Module, draws: int) -> int:
    """Samples per component for about so many draws; 1 where further samples would be copies.

    >>> from slimbayes.core.methods import Rank1
    >>> samples_for(bayesianize(nn.Linear(2, 2), Rank1(components=4)), draws=32)
    8
    """
    record = find_record(model)
    if not any(method.traits.noisy for method in record.methods):
        return 1
    return max(1, draws // record.components)


def make_likelihood(task: str) -> Likelihood:
    """Classes: Categorical. Real targets: Gaussian with one learned precision, in scaled units."""
    return Categorical() if task == "classification" else Gaussian(learn="global")


def held_out_for_noise(data: Dataset | StreamedDataset) -> float | None:
    """The fraction of rows with real targets that a default run holds out to fit the noise to, if they are enough."""
    if data.task == "classification" or round(_NOISE_PART * len(data.train)) < LEAST_HELD_OUT:
        return None
    return _NOISE_PART


def make_model(
    config: RunConfig, shape: tuple[int, ...], outputs: int, seed: int, code: bool = True
) -> nn.Module:
    """A new converted network; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(seed, 5))
        network = network_builder(config.network, allow_code=code)(shape, outputs)
        return bayesianize(network, parse_method(config.method))


def open_data(name: str, root: str | None, options: dict[str, Any]) -> Dataset | StreamedDataset:
    """A data set by name or path; "imagenet", and folders with the option ``stream``, are read as they are used."""
    options = dict(options)
    if options.pop("stream", False) or name == "imagenet":
        return stream(name, root, **options)
    return load_data(name, root=root, **options)


def train_run(
    config: RunConfig, folder: Path, data_root: str | None = None, resume: bool = False, progress: bool = True,
    fabric: Any = None, data: Dataset | StreamedDataset | None = None, hold_out: bool = False,
) -> tuple[Run, FitResult]:  # fmt: skip
    """Train as the configuration says and leave everything that ``load_run`` needs in the folder.

    With ``hold_out`` a configuration that does not say what to hold out gets the part that the noise is fitted to.
    """
    if data is None:
        data = open_data(config.data, data_root, config.data_options)
    if hold_out and config.validation is None:
        config = dataclasses.replace(config, validation=held_out_for_noise(data))
    model = make_model(config, data.shape, data.num_outputs, config.training.seed)
    likelihood = make_likelihood(data.task)
    first = fabric is None or fabric.is_global_zero
    facts = Facts.of(data)

    def begin() -> None:
        if first:
            if not resume:  # what an earlier run left there must not pass for this one's
                for name in (MODEL, FACTS):
                    (folder / name).unlink(missing_ok=True)
            write_config(config, folder / CONFIG)

    with unsaid():
        result = fit(
            model, data, config.training, validation=config.validation, likelihood=likelihood, folder=folder,
            resume=resume, progress=progress, fabric=fabric, on_start=begin,
        )  # fmt: skip
    run = Run(model, config, facts, likelihood)
    if first:
        save(model, folder / MODEL)
        counted = summary(model)
        content = {
            "format": FORMAT, "version": 2, "config": config.to_dict(), "facts": facts.to_dict(),
            "precision": precision_of(likelihood), "parameters": counted.parameters,
            "base_parameters": counted.base_parameters, "steps": result.step, "seconds": result.seconds,
            "stopped_early": result.stopped_early, "best": result.best, "provenance": provenance(),
        }  # fmt: skip
        write_whole(folder / FACTS, json.dumps(content, indent=1))
    return run, result


def precision_of(likelihood: Likelihood) -> float | None:
    """What a file keeps of a likelihood: the precision of a Gaussian."""
    if not isinstance(likelihood, Gaussian):
        return None
    if likelihood.learn != "global":
        return likelihood.precision
    # In float64: the logarithm of what is written is the same float32 again.
    return math.exp(float(likelihood.log_precision.detach()))


def _check_claims(folder: Path, text: str, build: Callable[[], nn.Module]) -> None:
    """Raise unless the network that a folder names is the one whose weights it holds, before it is made."""
    try:
        check_network(build, text, shapes_of(folder / MODEL))
    except (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{FACTS} and {MODEL} of {str(folder)!r} do not fit together ({shortened(error)}): train again"
        ) from error


def load_run(folder: str | Path, network: str | None = None, device: str | None = None) -> Run:
    """A trained model from its folder, on a GPU if there is one and ``device`` does not say otherwise.

    No code runs but slimbayes' own, unless ``network`` names some.
    """
    folder = Path(folder)
    try:
        content = read_json(folder / FACTS)
        if content["format"] != FORMAT or content["version"] not in (1, 2):
            raise CheckpointError(f"{str(folder / FACTS)!r} is of another format: update slimbayes")
        config = from_dict(RunConfig, content["config"])
        facts = Facts.from_dict(content["facts"])
        likelihood = (
            Categorical()
            if facts.task == "classification"
            else Gaussian(precision=content["precision"], learn="fixed")
        )
    except FileNotFoundError:
        unfinished = (folder / CONFIG).exists()
        why = (
            "its training has not finished: slimbayes train --resume"
            if unfinished
            else "train one: slimbayes train"
        )
        raise CheckpointError(f"no trained model in {str(folder)!r} ({FACTS} is missing); {why}") from None
    except CheckpointError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        what = shortened(repr(error))
        raise CheckpointError(f"{str(folder / FACTS)!r} is damaged ({what}): train again") from error
    again = f"slimbayes train --resume --out {str(folder)!r} writes them again from the last state, if that is there"
    if not (folder / MODEL).is_file():
        raise CheckpointError(f"the weights of {str(folder)!r} are gone ({MODEL} is missing): {again}")
    if network is not None:
        config = dataclasses.replace(config, network=network)
    with torch.random.fork_rng(devices=[]):
        try:
            builder = network_builder(config.network, allow_code=network is not None)
        except SpecError as error:
            raise SpecError(f"{str(folder)!r}: {error}") from error
        if network is None:
            _check_claims(folder, config.network, lambda: builder(facts.shape, facts.num_outputs))
        plain = builder(facts.shape, facts.num_outputs).to(
            _DTYPES.get(config.training.precision, torch.float32)
        )
        try:
            model = load(plain, folder / MODEL)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {again}") from error
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Run(model.eval().to(where), config, facts, likelihood)
