"""Extremes in CI: every case for a few methods, the quick ones for all. ``python -m reliability.health`` runs all."""

import pytest
import torch

from reliability.health import count, guard_ratio
from reliability.health_cases import CASES, EVERY, NamedError
from reliability.health_runs import ALONE, large_head

FEW = ("Rank1 cauchy", "KTied local", "ECMP")
QUICK = (
    "inputs_of_1e30",
    "sigma_of_1e30",
    "kl_under_autocast",
    "float16_overflow",
    "empty_batch",
    "replayed_by_number",
)


@pytest.mark.parametrize("name", [name for name in CASES if name != "large_head"])
def test_every_case(name):
    found, wrong = count([name], EVERY if name in QUICK else FEW)
    assert not wrong and sum(found.values()) == len(EVERY if name in QUICK else FEW)


@pytest.mark.parametrize("name", ALONE)
def test_cases_without_a_method(name):
    assert count([name]) == ({"right": 1}, [])


@pytest.mark.parametrize("method", FEW)
def test_a_large_head(method):
    try:
        large_head(EVERY[method], classes=50_000)
    except NamedError as error:  # no error is expected here
        pytest.fail(str(error))


def test_a_wrong_answer_is_counted(monkeypatch):
    """The harness itself: a case that gives NaN where a number belongs is wrong."""
    monkeypatch.setattr("slimbayes.draw", lambda model, x, **options: torch.full((2, 4, 3), float("nan")))
    found, wrong = count(["inputs_of_1e_minus_30"], ["Rank1"])
    assert found == {"wrong": 1} and "not finite" in wrong[0]


def test_the_guard_costs_little():
    """Measured side by side: under 1.05 alone on a machine, with room for neighbours here."""
    assert guard_ratio("dense", rounds=3) < 1.5
