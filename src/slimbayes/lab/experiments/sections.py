"""What a page says about an experiment, in parts that markdown and HTML share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimbayes.lab.experiments.entry import Experiment
from slimbayes.lab.experiments.plots import plots
from slimbayes.lab.experiments.results import SCALES
from slimbayes.lab.experiments.state import Damage, Result, State, Survey
from slimbayes.lab.experiments.tables import Table, figure, join, merged
from slimbayes.lab.report.panels import Plot
from slimbayes.lab.report.results import number

SHOWN = SCALES[1:]  # smoke results show that the code runs, and nothing else
_KNOWN = {
    "created": "Created",
    "command": "Command",
    "commit": "Commit",
    "seeds": "Seeds",
    "hardware": "Hardware",
    "seconds": "Time of this call",
    "training_seconds": "Time of all training",
    "fingerprints": "Fingerprints of data",
    "versions": "Versions",
    "joined": "Kept from earlier calls",
}


@dataclass(frozen=True)
class Section:
    """One experiment with its largest result, and the results at other scales."""

    entry: Experiment
    result: Result
    others: tuple[Result, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]

    @property
    def heading(self) -> str:
        """Its item and title."""
        return heading(self.entry)

    @property
    def deviations(self) -> list[str]:
        """Where the run differs from the paper's, in sentences."""
        return [str(sentence) for sentence in self.result.document["deviations"]]

    def checks(self) -> list[tuple[bool, str]]:
        """Whether each check holds, and the words for it."""
        return [(check["holds"], _check(check)) for check in self.result.document["checks"]]

    def facts(self) -> dict[str, str]:
        """The scale and the seeds."""
        words = self.result.seeds.removesuffix(" seeds").removesuffix(" seed") or "none"
        paper = "" if self.entry.beyond else f" ({self.entry.seeds} in the paper)"
        return {"Scale": self.result.scale, "Seeds": words + (paper if self.result.seeds else "")}

    def provenance(self) -> dict[str, tuple[str, bool]]:
        """What made the result: values by title, and whether they are code; what we do not know comes last."""
        document = self.result.document
        made = document["provenance"]
        keys = (*(key for key in _KNOWN if key in made), *(key for key in made if key not in _KNOWN))
        items = {_KNOWN.get(key, key): (_words(key, made[key]), key in ("command", "commit")) for key in keys}
        if document["runs"]:
            items["Training runs"] = str(len(document["runs"])), False
        if document.get("settings"):
            items["Settings"] = _words("", document["settings"]), False
        return {name: item for name, item in items.items() if item[0]}


def heading(entry: Experiment) -> str:
    """An entry's item and title, and that it is ours where the paper has no such item.

    >>> heading(Experiment("ktied/times", "Times", "Time to an ELBO", "", beyond=True))
    'Times: Time to an ELBO (beyond the paper)'
    """
    ours = entry.beyond and "beyond" not in entry.item.lower()
    return f"{entry.item}: {entry.title}" + (" (beyond the paper)" if ours else "")


def sections(survey: Survey) -> list[Section]:
    """One section per entry that has a result to show, in the order of the entries."""
    return [_section(state.entry, *shown(state)) for state in survey.states.values() if shown(state)]


def shown(state: State) -> list[Result]:
    """The results that pages show or name, the largest scale first."""
    return [result for result in reversed(state.results) if result.scale in SHOWN]


def damages(survey: Survey) -> list[Damage]:
    """The files that could not be taken as results, in the order of their names."""
    found = [*survey.strays, *(damage for state in survey.states.values() for damage in state.damaged)]
    smoke = f".{SCALES[0]}.json"
    return sorted((d for d in found if not d.shown.endswith(smoke)), key=lambda damage: damage.shown)


def _section(entry: Experiment, result: Result, *others: Result) -> Section:
    ours = merged(result.document["tables"])
    names = dict.fromkeys((*(table.name for table in entry.printed), *ours))
    tables = tuple(join(ours.get(name), entry.table(name)) for name in names)
    return Section(entry, result, others, tables, tuple(plots(result.document)))


def status(state: State) -> str:
    """The state of an entry in the table of all entries, without its checks."""
    results = shown(state)
    if not results:
        damaged = any(not damage.shown.endswith(f".{SCALES[0]}.json") for damage in state.damaged)
        return (
            "damaged"
            if damaged
            else f"not run; needs {state.entry.needs}"
            if state.entry.needs
            else "not run"
        )
    first = results[0]
    seeds = f", {first.seeds}" if first.seeds else ""
    others = "".join(f"; also {result.scale}" for result in results[1:])
    return f"{first.scale}{seeds}{others}"


def day(result: Result) -> str:
    """The date of a result."""
    return result.created.partition("T")[0]


def link(path: Path, out: Path) -> str:
    """A link from a page in ``out`` to a file."""
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


def _check(check: Mapping[str, Any]) -> str:
    named = ((name, check.get(name)) for name in ("value", "bound"))
    numbers = [f"{name} {_plain(value)}" for name, value in named if value not in (None, "", [])]
    return str(check["what"]) + (f" ({', '.join(numbers)})" if numbers else "")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        if value.is_integer() and 1000 <= abs(value) < 1e12:  # a count
            return f"{value:,.0f}"
        return figure(value, -1) if number(value) is not None else "not finite"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_plain(item) for item in value)
    return "" if value is None else str(value)


def _words(key: str, value: Any) -> str:
    if key in ("seconds", "training_seconds") and number(value) is not None:
        return f"{value:,.0f} s"
    return _plain(value)
