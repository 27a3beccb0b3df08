"""A result of some settings joined to what an earlier one holds of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARTS = ("tables", "curves", "maps", "checks")
ORIGIN = ("created", "commit", "command", "hardware", "versions")


def tagged(parts: Sequence[dict[str, Any]], setting: str) -> list[dict[str, Any]]:
    """Parts of a document with the setting they are of.

    >>> tagged([{"name": "snr"}], "mnist")
    [{'name': 'snr', 'setting': 'mnist'}]
    """
    return [{**part, "setting": setting} for part in parts]


def named(text: str, setting: str) -> str:
    """A sentence that begins with the name of its setting.

    >>> named("Seed 0.", "mnist"), named("mnist: seed 0.", "mnist")
    ('mnist: Seed 0.', 'mnist: seed 0.')
    """
    return text if text.startswith(f"{setting}: ") else f"{setting}: {text}"


def held(old: dict[str, Any], left_out: Sequence[str]) -> list[str]:
    """The settings that a result holds, of those that a new call leaves out."""
    settings = old.get("settings")
    return [setting for setting in left_out if isinstance(settings, dict) and setting in settings]


def joinable(old: dict[str, Any]) -> bool:
    """Whether every part of a result says which setting it is of."""
    return all("setting" in part for name in PARTS for part in old[name])


def join(new: dict[str, Any], old: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The new result, with the parts and runs of those ``settings`` that only the old one has, in their order.

    Deviations begin with the name of their setting; of the old ones those of kept settings stay. Where the kept parts
    come from is told under "joined" in the provenance.
    """
    kept = [s for s in settings if s in old["settings"] and s not in new["settings"]]
    source = {s: old if s in kept else new for s in settings if s in kept or s in new["settings"]}
    document = dict(new)
    document["settings"] = {s: whole["settings"][s] for s, whole in source.items()}
    for name in PARTS:
        document[name] = [p for s, whole in source.items() for p in whole[name] if p["setting"] == s]
    document["runs"] = [run for s, whole in source.items() for run in whole["runs"] if run["setting"] == s]
    document["deviations"] = _sentences(new, old, kept)
    made, before = dict(new["provenance"]), old["provenance"]
    known = before.get("joined") or {}
    origin = {key: before[key] for key in ORIGIN if key in before}
    made["joined"] = {setting: known.get(setting, origin) for setting in kept}
    made["training_seconds"] = sum(run["seconds"] for run in document["runs"])
    made["seeds"] = sorted({run["seed"] for run in document["runs"]})
    made["fingerprints"] = {**before.get("fingerprints", {}), **made.get("fingerprints", {})}
    return {**document, "provenance": made}


def _sentences(new: dict[str, Any], old: dict[str, Any], kept: Sequence[str]) -> list[str]:
    """The new ones but "not run", then the old ones of kept settings."""
    missing = [f"{setting}: not run at this scale." for setting in kept]
    mine = [text for text in new["deviations"] if text not in missing]
    theirs = [text for text in old["deviations"] if text.startswith(tuple(f"{s}: " for s in kept))]
    return list(dict.fromkeys([*mine, *theirs]))
