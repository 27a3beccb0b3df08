"""Results of some settings joined to those of others."""

import copy

import pytest

from slimbayes.lab.experiments.joining import join, joinable


def result(*settings, day, seeds):
    """A document with one part of every kind for each setting."""
    return {
        "settings": {s: {"epochs": day, "seeds": seeds} for s in settings},
        "tables": [{"name": s, "day": day, "setting": s} for s in settings],
        "curves": [{"name": s, "day": day, "setting": s} for s in settings],
        "maps": [{"name": s, "day": day, "setting": s} for s in settings],
        "checks": [{"what": s, "day": day, "setting": s} for s in settings],
        "runs": [{"setting": s, "seed": seed, "seconds": 10.0 * day} for s in settings for seed in seeds],
        "deviations": [f"{s}: on day {day}." for s in settings],
        "provenance": {
            "created": f"day {day}", "commit": f"c{day}", "command": f"run {day}", "hardware": f"machine {day}",
            "versions": {"torch": str(day)}, "seconds": 1.0, "training_seconds": 0.0, "seeds": seeds,
            "fingerprints": {s: f"{s}{day}" for s in settings},
        },
    }  # fmt: skip


def test_every_part_comes_from_the_call_that_ran_its_setting():
    old = result("a", "b", "c", day=1, seeds=[0, 1])
    new = result("b", day=2, seeds=[0])
    new["deviations"] += ["a: not run at this scale.", "c: not run at this scale."]
    kept = copy.deepcopy((old, new))
    found = join(new, old, ("a", "b", "c"))
    assert (old, new) == kept, "the two are left as they are"
    for part in ("tables", "curves", "maps", "checks"):
        assert [(one["setting"], one["day"]) for one in found[part]] == [("a", 1), ("b", 2), ("c", 1)], part
    assert {s: v["epochs"] for s, v in found["settings"].items()} == {"a": 1, "b": 2, "c": 1}
    assert [(run["setting"], run["seed"]) for run in found["runs"]] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("c", 0),
        ("c", 1),
    ]
    assert sorted(found["deviations"]) == ["a: on day 1.", "b: on day 2.", "c: on day 1."]
    made = found["provenance"]
    assert made["created"] == "day 2" and made["seeds"] == [0, 1] and made["training_seconds"] == 60.0
    assert made["fingerprints"] == {"a": "a1", "b": "b2", "c": "c1"}
    origin = {key: old["provenance"][key] for key in ("created", "commit", "command", "hardware", "versions")}
    assert made["joined"] == {"a": origin, "c": origin}


def test_what_was_joined_keeps_its_origin_and_nothing_else_of_the_old():
    first = join(result("b", day=2, seeds=[0]), result("a", day=1, seeds=[0]), ("a", "b"))
    first["deviations"].append("A sentence of no setting.")
    second = join(result("b", day=3, seeds=[0]), first, ("a", "b"))
    assert second["provenance"]["joined"]["a"]["created"] == "day 1"
    assert second["deviations"] == ["b: on day 3.", "a: on day 1."]
    third = join(result("a", day=4, seeds=[0]), second, ("a", "b"))
    assert {s: one["created"] for s, one in third["provenance"]["joined"].items()} == {"b": "day 3"}


@pytest.mark.parametrize("part", ["tables", "curves", "maps", "checks"])
def test_parts_without_a_setting_cannot_be_joined(part):
    document = result("a", day=1, seeds=[0])
    assert joinable(document)
    del document[part][0]["setting"]
    assert not joinable(document)


def test_an_old_result_may_know_little_of_itself():
    old = result("a", day=1, seeds=[0])
    old["provenance"] = {"commit": None}
    assert join(result("b", day=2, seeds=[0]), old, ("a", "b"))["provenance"]["joined"] == {
        "a": {"commit": None}
    }
