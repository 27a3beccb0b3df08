"""Runs and comparisons as data: dataclasses that a YAML file holds, so that they can be saved and replayed."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slimbayes.files import write_whole
from slimbayes.methods import Method
from slimbayes.specs import network_builder, parse_method
from slimbayes.training import Training


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the entry and what it may be."""


@dataclass(frozen=True)
class RunConfig:
    """One model: data, network, method, training.

    >>> RunConfig(method="KTied(rank=1)").to_dict()["method"]
    'KTied(rank=1)'
    """

    data: str = "digits"
    data_options: dict[str, Any] = field(default_factory=dict)
    network: str = "auto"
    method: str = "Rank1(components=4)"
    validation: float | None = None  # the fraction of the training data to hold out
    draws: int = 32  # components × samples in evaluation and prediction
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        parse_method(self.method)
        if self.network != "auto" and ":" not in self.network:
            network_builder(self.network)
        if not (isinstance(self.draws, int) and self.draws >= 1):
            raise ConfigError(f"draws must be a whole number of at least 1, got {self.draws!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return {**_plain(self), "training": self.training.to_dict()}


@dataclass(frozen=True)
class Contender:
    """A method in a comparison, with what its training does differently.

    >>> Contender("Rank1", "Rank1(components=4)", {"kl_weight": 0.1}).parsed.components
    4
    """

    label: str
    method: str
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def parsed(self) -> Method:
        """The method itself."""
        return parse_method(self.method)


# The settings were chosen on held-out parts of the training digits, never on the test digits.
CONTENDERS: tuple[Contender, ...] = (
    Contender("Deterministic", "Deterministic()"),
    # Random signs set the components apart, and this prior holds both signs to be as likely: the default,
    # N(1, 0.1²), pulls all components into one where data are few.
    Contender("Rank1", "Rank1(components=4, random_sign_init=0.5, prior=Normal(0.0, 1.0))"),
    Contender("BatchEnsemble", "BatchEnsemble(components=4, random_sign_init=0.5)"),
    # At full weight the KL of all the weights outweighs a thousand examples, and the network underfits.
    Contender("KTied", "KTied(rank=2)", {"kl_weight": 0.1}),
    Contender("EMP", "EMP(components=5)"),
    Contender("MCDropout", "MCDropout(rate=0.1)"),
    Contender("DeepEnsemble", "DeepEnsemble(members=4)"),
)


@dataclass(frozen=True)
class CompareConfig:
    """Several methods on one data set, over several seeds, clean and shifted."""

    data: str = "digits"
    data_options: dict[str, Any] = field(default_factory=dict)
    network: str = "auto"
    contenders: tuple[Contender, ...] = CONTENDERS
    seeds: tuple[int, ...] = (0, 1, 2)
    draws: int = 32
    shifts: tuple[str, ...] | None = None  # None: those that suit the data
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    max_test: int | None = None  # evaluate on so many test examples at most
    validation: float | None = None
    training: Training = field(
        default_factory=lambda: Training(epochs=30, lr=3e-3, weight_decay=1e-2, batch_size=64)
    )

    def __post_init__(self) -> None:
        for name in ("contenders", "seeds", "severities"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.shifts is not None:
            object.__setattr__(self, "shifts", tuple(self.shifts))
        if not self.contenders or not self.seeds:
            raise ConfigError("a comparison needs at least one method and one seed")
        labels = [contender.label for contender in self.contenders]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(f"two methods have the label {twice[0]!r}: give each its own")
        for contender in self.contenders:
            _ = contender.parsed
            Training.from_dict({**self.training.to_dict(), **contender.training})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        contenders = [dataclasses.asdict(contender) for contender in self.contenders]
        return {**_plain(self), "training": self.training.to_dict(), "contenders": contenders}


Config = TypeVar("Config", RunConfig, CompareConfig)


def _plain(config: RunConfig | CompareConfig) -> dict[str, Any]:
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(kind: type[Config], values: Any, base: Config | None = None) -> Config:
    """A configuration from plain values over the defaults, or over another configuration.

    >>> from_dict(RunConfig, {"training": {"epochs": 3}}).training.epochs
    3
    """
    base = base or kind()
    if not isinstance(values, dict):
        raise ConfigError(f"a configuration is a mapping of names to values, got {type(values).__name__}")
    known = [item.name for item in dataclasses.fields(kind)]
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown entry {name!r}; {hint}")
        if name == "training":
            if not isinstance(value, dict):
                raise ConfigError(f"training must be a mapping of settings, got {value!r}")
            value = Training.from_dict({**base.training.to_dict(), **value})
        elif name == "contenders":
            value = tuple(_contender(entry) for entry in value)
        changes[name] = value
    try:
        return dataclasses.replace(base, **changes)
    except TypeError as error:
        raise ConfigError(str(error)) from error


def _contender(entry: Any) -> Contender:
    """A mapping, or the text of a method."""
    if isinstance(entry, Contender):
        return entry
    if isinstance(entry, str):
        preset = {contender.label: contender for contender in CONTENDERS}.get(entry)
        return preset or Contender(entry, entry)
    try:
        return Contender(**entry)
    except TypeError as error:
        raise ConfigError(f"a method is a text or label, method and training; got {entry!r}") from error


def read_config(kind: type[Config], path: Path, base: Config | None = None) -> Config:
    """The configuration in a YAML file."""
    yaml = _yaml()
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {str(path)!r}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is no YAML: {' '.join(str(error).split())}") from error
    try:
        return from_dict(kind, {} if values is None else values, base)
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from error


def write_config(config: RunConfig | CompareConfig, path: Path) -> None:
    """Write a configuration as YAML that ``read_config`` takes back."""
    write_whole(path, _yaml().safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("configuration files need PyYAML: pip install 'slimbayes[cli]'") from error
    return yaml
