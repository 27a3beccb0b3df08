"""Which experiments have results, at which scales, and where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimbayes.files import read_json
from slimbayes.lab.experiments.entry import Experiment
from slimbayes.lab.experiments.results import FORMAT, SCALES, ResultError, read_result, result_path

Source = str | Path | Sequence[str | Path]  # a folder of results, or result files


@dataclass(frozen=True)
class Result:
    """A result file: how many of its checks hold, and how many seeds it has, in words."""

    scale: str
    path: Path
    shown: str  # the path from the results' folder on, as pages print it
    created: str
    seeds: str
    holds: int
    checks: int
    document: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Damage:
    """A file that could not be taken as a result, and why."""

    path: Path
    shown: str
    why: str


@dataclass(frozen=True)
class State:
    """An experiment, its results from the smallest scale to the largest, and its damaged files."""

    entry: Experiment
    results: tuple[Result, ...] = ()
    damaged: tuple[Damage, ...] = ()


@dataclass(frozen=True)
class Survey:
    """The states of all entries by name, and the files that belong to none of them."""

    states: Mapping[str, State]
    strays: tuple[Damage, ...]


def state(results: Source, entries: Mapping[str, Experiment]) -> dict[str, State]:
    """The state of every entry, by name, from a folder of results; a folder that is not there holds none.

    >>> entry = Experiment("ktied/table9", "Table 9", "Title", "Shows")
    >>> state("no-such-folder", {entry.name: entry})[entry.name].results
    ()
    """
    return dict(survey(results, entries).states)


def survey(results: Source, entries: Mapping[str, Experiment]) -> Survey:
    """Read every result file; what cannot be read is reported, and stops nothing."""
    found: dict[tuple[str, str], Result] = {}
    damaged: dict[str, list[Damage]] = {}
    strays: list[Damage] = []
    for path, shown in files(results):
        try:
            document = read_result(path)
        except ResultError as error:
            # the message starts with the file's own path, which pages must not hold
            damage = Damage(path, shown, str(error).removeprefix(f"{path}: ").replace(str(path), shown))
            owner = _named(shown, entries)
            (damaged.setdefault(owner, []) if owner else strays).append(damage)
            continue
        key = document["experiment"], document["scale"]
        if key[0] not in entries:
            strays.append(Damage(path, shown, f"there is no experiment {key[0]!r}"))
        elif key in found:
            why = f"{found[key].shown} holds {key[0]} at scale {key[1]} already: remove one of the two"
            damaged.setdefault(key[0], []).append(Damage(path, shown, why))
        else:
            found[key] = _result(document, path, shown)
    states = {
        name: State(
            entry,
            tuple(found[name, scale] for scale in SCALES if (name, scale) in found),
            tuple(damaged.get(name, ())),
        )
        for name, entry in entries.items()
    }
    return Survey(states, tuple(strays))


def _result(document: Mapping[str, Any], path: Path, shown: str) -> Result:
    rows = [row for table in document["tables"] for row in table["rows"]]
    counts = [len(values) for row in rows for values in row["values"].values()]
    counts += [len(line["y"]) for curve in document["curves"] for line in curve["lines"]]
    seeds = _seeds(document, max(counts, default=0))
    holds = sum(check["holds"] for check in document["checks"])
    created = str(document["provenance"].get("created") or "")
    return Result(document["scale"], path, shown, created, seeds, holds, len(document["checks"]), document)


def _seeds(document: Mapping[str, Any], most: int) -> str:
    """ "3 seeds", or by setting where they differ; "" where there are none."""
    settings = document.get("settings")
    known = settings.items() if isinstance(settings, Mapping) else ()
    lists = {s: v.get("seeds") for s, v in known if isinstance(v, Mapping)}
    counts = {s: len(seeds) for s, seeds in lists.items() if isinstance(seeds, list) and seeds}
    named = document["provenance"].get("seeds")
    if len(set(counts.values())) > 1:
        return ", ".join(f"{setting} {n}" for setting, n in counts.items()) + " seeds"
    n = next(iter(counts.values()), len(named) if isinstance(named, list) and named else most)
    return f"{n} {'seed' if n == 1 else 'seeds'}" if n else ""


def _named(shown: str, entries: Mapping[str, Experiment]) -> str | None:
    """The entry whose result a path is by its name."""
    for name in entries:
        for scale in SCALES:
            if shown.endswith("/" + result_path("", name, scale).as_posix()):
                return name
    return None


def files(results: Source) -> list[tuple[Path, str]]:
    """Result files in the order of their names, each with the path that pages print.

    Hidden files and folders are left out: they are the caches and the state of unfinished runs.
    """
    if isinstance(results, str | Path) and not Path(results).is_file():
        root = Path(results)
        name = root.resolve().name  # pages show no path of the machine they were made on
        inside = [path.relative_to(root) for path in sorted(root.rglob("*.json"))]
        kept = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
        return [(root / path, f"{name}/{path.as_posix()}") for path in kept]
    given: Iterable[str | Path] = [results] if isinstance(results, str | Path) else results
    # results/ktied/table2.gpu.json: the last three parts name a result wherever the folder lies
    return [(path, "/".join(path.resolve().parts[-3:])) for path in sorted(map(Path, given))]


def is_result(path: str | Path) -> bool:
    """Whether a file says that it is an experiment's result, damaged or not."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT
