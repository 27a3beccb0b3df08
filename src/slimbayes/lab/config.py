"""Runs and comparisons as data: dataclasses that a YAML file holds, so that they can be saved and replayed."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slimbayes.core.methods import Method
from slimbayes.extras import need
from slimbayes.files import read_text, shortened, write_whole
from slimbayes.lab.models.text import network_builder
from slimbayes.training import Training
from slimbayes.training.settings import real_number, whole_number
from slimbayes.verbs.method_text import full_text, parse_method, parse_stored

LARGEST = 1 << 20  # bytes of a configuration file, and its values when every alias is written out
# Of what ``to_dict`` gives: methods with all their options. In format 1, which no entry names, a method leant on the
# defaults of its day.
FORMAT = 2
_MERGED = 100  # mappings that one "<<" may name


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the entry and what it may be."""


@dataclass(frozen=True)
class RunConfig:
    """One model: data, network, method, training.

    >>> RunConfig(method="BatchEnsemble(8)").to_dict()["method"]
    'BatchEnsemble(components=8, random_sign_init=-0.5)'
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
        _check_common(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return {
            **_plain(self),
            "method": full_text(self.method),
            "training": self.training.to_dict(),
            "format": FORMAT,
        }


@dataclass(frozen=True)
class Contender:
    """A method in a comparison, with what its training does differently.

    >>> Contender("Rank1", "Rank1(components=4)", {"kl_weight": 0.1}).parsed.components
    4
    """

    label: str
    method: str
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.label, str) and self.label and isinstance(self.training, dict)):
            raise ConfigError(f"a method has a label (text) and training (a mapping of settings); got {self}")

    @property
    def parsed(self) -> Method:
        """The method itself."""
        return parse_method(self.method)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return {**dataclasses.asdict(self), "method": full_text(self.method)}


CONTENDERS: tuple[Contender, ...] = tuple(
    Contender(text.partition("(")[0], text)
    for text in (
        "Deterministic()", "Rank1(components=4)", "BatchEnsemble(components=4)", "KTied(rank=2)", "EMP(components=5)",
        "MCDropout(rate=0.1)", "DeepEnsemble(members=4)",
    )
)  # fmt: skip


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
        lists: dict[str, tuple[str, Callable[[Any], bool]]] = {
            "contenders": ("methods", lambda value: isinstance(value, Contender)),
            "seeds": ("whole numbers", lambda value: whole_number(value) and abs(value) < 2**63),
            "severities": ("numbers from 1 to 5", lambda value: whole_number(value) and 1 <= value <= 5),
            "shifts": ("names", lambda value: isinstance(value, str)),
        }
        for name, (what, good) in lists.items():
            values = getattr(self, name)
            if name == "shifts" and values is None:
                continue
            if not isinstance(values, (list, tuple)) or not all(map(good, values)):
                raise ConfigError(f"{name} must be a list of {what}, got {values!r}")
            object.__setattr__(self, name, tuple(values))
        _check_common(self)
        if not self.contenders or not self.seeds:
            raise ConfigError("a comparison needs at least one method and one seed")
        if self.max_test is not None and not (whole_number(self.max_test) and self.max_test >= 1):
            raise ConfigError(f"max_test must be a whole number of at least 1, got {self.max_test!r}")
        for what, entries in (("methods have the label", [c.label for c in self.contenders]),
                              ("runs have the seed", list(self.seeds))):  # fmt: skip
            twice = [entry for i, entry in enumerate(entries) if entry in entries[:i]]
            if twice:
                raise ConfigError(f"two {what} {twice[0]!r}: give each its own")
        for contender in self.contenders:
            _ = contender.parsed
            Training.from_dict({**self.training.to_dict(), **contender.training})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        contenders = [contender.to_dict() for contender in self.contenders]
        own = {"training": self.training.to_dict(), "contenders": contenders}
        return {**_plain(self), **own, "format": FORMAT}


def _check_common(config: RunConfig | CompareConfig) -> None:
    """What both kinds hold; a file may have anything in their place."""
    if not (isinstance(config.data, str) and config.data):
        raise ConfigError(f"data must be a name or a file, got {config.data!r}")
    if not (isinstance(config.data_options, dict) and all(isinstance(k, str) for k in config.data_options)):
        raise ConfigError(f"data_options must be a mapping of names to values, got {config.data_options!r}")
    if not isinstance(config.network, str) or ":" not in config.network:
        network_builder(config.network)
    if not (whole_number(config.draws) and config.draws >= 1):
        raise ConfigError(f"draws must be a whole number of at least 1, got {config.draws!r}")
    if config.validation is not None and not (real_number(config.validation) and 0 < config.validation < 1):
        raise ConfigError(f"validation must be a fraction between 0 and 1, got {config.validation!r}")
    if not isinstance(config.training, Training):
        raise ConfigError(f"training must be a Training, got {config.training!r}")


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
    values = _of_today(values, known)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown entry {name!r}; {hint}")
        if name == "training":
            if not isinstance(value, dict):
                raise ConfigError(f"training must be a mapping of settings, got {shortened(repr(value))}")
            value = Training.from_dict({**base.training.to_dict(), **value})
        elif name == "contenders":
            if not isinstance(value, (list, tuple)):
                raise ConfigError(f"contenders must be a list of methods, got {shortened(repr(value))}")
            value = tuple(_contender(entry) for entry in value)
        changes[name] = value
    return dataclasses.replace(base, **changes)


def _of_today(values: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """The same without its format; methods with all their options where a program of before has written the whole.

    By hand nobody writes down every entry, and there the defaults are today's.
    """
    values = dict(values)
    named = values.pop("format", None)
    if named not in (None, FORMAT):
        raise ConfigError(
            f"a configuration of format {named!r}, and this version reads {FORMAT}: update slimbayes"
        )
    if named is None and set(known) <= set(values):
        if isinstance(values.get("method"), str):
            values["method"] = full_text(parse_stored(values["method"]))
        if isinstance(values.get("contenders"), list):
            values["contenders"] = [
                {**entry, "method": full_text(parse_stored(entry["method"]))}
                if isinstance(entry, dict) and isinstance(entry.get("method"), str)
                else entry
                for entry in values["contenders"]
            ]
    return values


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
    try:
        text = read_text(path, LARGEST)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {str(path)!r}") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error}): give a YAML file") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no YAML, which is text in UTF-8: {error}") from error
    values = read_yaml(text, repr(str(path)))
    try:
        return from_dict(kind, {} if values is None else values, base)
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{str(path)!r}: {shortened(error, 2000)}") from error


def read_yaml(text: str, name: str) -> Any:
    """Plain values from YAML; what is no YAML, or grows beyond measure by its aliases, is a ConfigError."""
    yaml = _yaml()  # whose absence is no fault of the text
    try:
        values = yaml.load(text, yaml_loader())
    except (
        Exception
    ) as error:  # of a hostile text PyYAML's constructors raise a dozen types, RecursionError too
        what = shortened(" ".join(str(error).split()), 500) or type(error).__name__
        raise ConfigError(f"{name} is no YAML: {what}; write plain names, numbers and lists") from error
    if _written_out(values, {}) > LARGEST:
        raise ConfigError(
            f"{name} has aliases that repeat its values without end: write the values themselves"
        )
    return values


def _written_out(value: Any, known: dict[int, float]) -> float:
    """How many values and characters there are, each alias counted as often as it is used; infinity for a circle."""
    if isinstance(value, (str, bytes)):
        return 1 + len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() / 4
    if not isinstance(value, (dict, list, tuple, set)):
        return 1
    if id(value) not in known:
        known[id(value)] = float("inf")  # until it is counted: inside of itself it would not end
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(entry, known) for entry in inner)
    return known[id(value)]


def write_config(config: RunConfig | CompareConfig, path: Path) -> None:
    """Write a configuration as YAML that ``read_config`` takes back."""
    write_whole(path, _yaml().safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def yaml_loader() -> Any:
    """PyYAML's safe loader, with 1e-4 a number: YAML 1.1 takes it for a word, and 1.0e-4 is seldom written.

    >>> import yaml
    >>> yaml.load("{lr: 1e-3, name: e3}", yaml_loader())
    {'lr': 0.001, 'name': 'e3'}
    """

    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def flatten_mapping(self, node: Any) -> None:
            # "<<: [*a, *a, ...]" on top of another multiplies the entries with every level.
            for key, value in node.value:
                many = isinstance(value, yaml.SequenceNode) and len(value.value) > _MERGED
                if key.tag == "tag:yaml.org,2002:merge" and many:
                    raise ConfigError(f"one << joins {len(value.value)} mappings: at most {_MERGED}")
            super().flatten_mapping(node)
            if len(node.value) > 100 * _MERGED:
                raise ConfigError(f"a mapping has {len(node.value)} entries: at most {100 * _MERGED}")

        def construct_yaml_int(self, node: Any) -> Any:
            _check_length(node)
            return super().construct_yaml_int(node)

        def construct_yaml_float(self, node: Any) -> Any:
            _check_length(node)
            return super().construct_yaml_float(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _check_length(node: Any) -> None:
    """Numbers to the base of sixty, 1:30:00, take a time that grows with the square of their length."""
    if len(str(node.value)) > 1000:
        raise ConfigError(f"a number of {len(str(node.value))} characters: write at most 1000")


def _yaml() -> Any:
    return need("yaml", "a configuration file", "cli")
