"""Predictions that run out of memory: a few of the cases of ``python -m reliability.memory``."""

import sys
from dataclasses import replace

from reliability import memory


def test_smaller_passes_give_what_one_gives():
    cases = [memory.predict_once(number, seed=1) for number in range(12)]
    assert sum(case.refused > 0 for case in cases) >= 9
    assert max(case.difference for case in cases) <= memory.BOUND, cases


def test_passes_with_other_noise_are_seen(monkeypatch):
    predicting = sys.modules["slimbayes.core.predict"]
    real = predicting.draw_flat

    def shifted(model, part, plan, course):
        return real(model, part, replace(plan, first_sample=plan.first_sample + (part.batch == 1)), course)

    monkeypatch.setattr(predicting, "draw_flat", shifted)
    cases = [memory.predict_once(number, seed=1) for number in range(12)]
    assert max(case.difference for case in cases) > 100 * memory.BOUND


def test_the_command_fails_where_nothing_ran_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "predict_once", lambda number, seed: memory.Case("roomy", 0, 0.0))
    monkeypatch.setattr("sys.argv", ["memory", "--cases", "2", "--out", str(tmp_path)])
    assert memory.main() == 1
    assert "0 of 0" in capsys.readouterr().out
