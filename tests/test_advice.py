"""One recommendation: the same sentence wherever somebody asks which method to take."""

from pathlib import Path

import pytest

from slimbayes.lab.report.choice import ADVICE, verdict

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/defaults.md"])
def test_pages_have_it(page):
    assert ADVICE in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_reports_have_it_last():
    plain = {"name": "Deterministic", "runs": [{"seed": 0, "clean": {"nll": 0.5}}]}
    document = {"format": "slimbayes-results", "version": 1, "task": "classification", "methods": [plain]}
    assert verdict(document)[-1] == f"On other data: {ADVICE}"
