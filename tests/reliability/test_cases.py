"""A thousand generated cases: none may be wrong, and the checks that say so can fail."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from reliability.cases import judging
from reliability.cases.groups import GROUPS, counts
from reliability.cases.running import BLOCK, run_group
from slimbayes.core.rules.rank1 import Rank1Rule


@pytest.mark.parametrize("name", GROUPS)
def test_no_case_is_wrong(name):
    torch.set_num_threads(1)
    count = counts(1000)[name]
    tally = run_group(name, GROUPS[name][0], count)
    assert not tally.failures, tally.failures[0]
    assert tally.cases >= min(count, 5)


def test_a_thousand_cases_are_enough_of_each():
    assert sum(counts(1000).values()) >= 1000
    assert max(counts(1000).values()) <= BLOCK


def test_a_wrong_draw_is_found(monkeypatch):
    """Factors that are off by a thousandth."""
    right = Rank1Rule.sample_factor
    monkeypatch.setattr(
        Rank1Rule, "sample_factor", lambda self, f, w, frame: right(self, f, w, frame) * 1.001
    )
    assert run_group("draws.replayed", GROUPS["draws.replayed"][0], 100).wrong == 1


def test_a_bare_error_is_no_refusal():
    def bare():
        return {}["missing"]

    with pytest.raises(judging.Wrong, match="bare KeyError"):
        judging.attempt(bare)
    done, error = judging.attempt(lambda: sb.Rank1(components=0), tokens=("components",))
    assert not done and isinstance(error, ValueError)
    with pytest.raises(judging.Wrong):  # it says nothing of what was wrong
        judging.attempt(lambda: sb.Rank1(components=0), tokens=("posterior",))
    with pytest.raises(
        judging.Wrong
    ):  # torch's own error, out of slimbayes' code, where the plain network runs
        judging.attempt(
            lambda: sb.draw(sb.bayesianize(nn.Linear(2, 2), sb.Deterministic()), torch.zeros(1, 3))
        )
