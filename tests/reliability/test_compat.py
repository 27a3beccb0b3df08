"""The figures of compatibility are counted from what pytest writes, and a failure is one."""

import subprocess
import sys

import pytest
import torch

from reliability import compat
from reliability.figures import read_figures

CASES = """
import pytest

def test_good(): pass

@pytest.mark.skipif(True, reason="no")
def test_skipped(): pass

@pytest.mark.parametrize("entry", range({files}))
def test_a_released_file_gives_what_it_gave(entry): pass
"""
BAD = "def test_bad(): assert False\n"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of a suite that passes with one of the files missing, and of one that fails."""
    folder = tmp_path_factory.mktemp("suites")
    files = sum(compat.recorded_files().values())
    root = compat.ROOT
    (folder / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = uncounted\n")
    found = {}
    for name, code in {"good": CASES.format(files=files), "bad": CASES.format(files=files - 1) + BAD}.items():
        (folder / f"test_{name}.py").write_text(code)
        path = folder / f"{name}.xml"
        words = [f"--junitxml={path}", "-q", "-p", "no:cacheprovider", "-c", str(folder / "pytest.ini")]
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, str(folder / f"test_{name}.py")], capture_output=True
        )
        found[name] = path
    return found


def test_counts(reports, tmp_path, capsys):
    files = sum(compat.recorded_files().values())
    good, bad = (compat.read_report(reports[name]) for name in ("good", "bad"))
    assert (good.passed, good.skipped, good.failed, good.files) == (1 + files, 1, (), files)
    assert good.torch == torch.__version__ and good.python == sys.version.split()[0]
    assert (bad.passed, bad.files) == (files, files - 1) and [name[-8:] for name in bad.failed] == [
        "test_bad"
    ]
    assert compat.main(["--reports", str(reports["good"]), "--out", str(tmp_path)]) == 0
    assert compat.main(["--reports", *map(str, reports.values()), "--out", str(tmp_path)]) == 1
    document = read_figures(tmp_path / "compat.json")
    assert [figure["holds"] for figure in document["figures"]] == [True, True, False, False]
    assert "FAILED" in capsys.readouterr().out


def test_a_report_without_versions_is_refused(tmp_path):
    (tmp_path / "report.xml").write_text("<testsuites><testsuite/></testsuites>")
    with pytest.raises(ValueError, match="does not say which torch"):
        compat.read_report(tmp_path / "report.xml")
