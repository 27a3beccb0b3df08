"""Means, standard errors, paired differences, the verdict's words, and the tables, against numbers by hand."""

import csv
import io
import math

import pytest
from report.helpers_results import ALL, classification, regression
from rich.console import Console

from slimbayes.lab.report import Results, choose, markdown_summary, print_summary, summary_rows, verdict
from slimbayes.lab.report.statistics import Stat, cells, margin, stat
from slimbayes.lab.report.tables import best, columns, csv_summary


def tiny(values, task="classification", shifted=True):
    """Results from {method: {seed: nll}}: NLL at severities 1 and 2 is the value ∓ 0.5, and 0.1 on clean data."""
    methods = []
    for name, by_seed in values.items():
        runs = []
        for seed, nll in by_seed.items():
            levels = {
                "1": {"nll": None if nll is None else nll - 0.5},
                "2": {"nll": None if nll is None else nll + 0.5},
            }
            runs.append(
                {"seed": seed, "clean": {"nll": 0.1}, "shifted": {"noise": levels} if shifted else None}
            )
        methods.append({"name": name, "runs": runs})
    return {"format": "slimbayes-results", "version": 1, "task": task, "methods": methods}


BASE = {0: 1.0, 1: 1.2, 2: 1.4}


def test_mean_and_standard_error_by_hand():
    assert stat([1.0, 1.2, 1.4]) == pytest.approx((1.2, 0.2 / math.sqrt(3), 3))
    assert stat([]) == Stat(None, None, 0)
    rows = summary_rows(tiny({"Deterministic": BASE, "Rank1": {0: 0.9, 1: 0.9, 2: 0.9}}))
    assert rows[0]["shifted_nll"] == pytest.approx((1.2, 0.2 / math.sqrt(3), 3))
    # differences −0.1, −0.3, −0.5: mean −0.3, sd 0.2
    assert rows[1]["difference"] == pytest.approx((-0.3, 0.2 / math.sqrt(3), 3))
    assert rows[1]["shifted_nll"] == pytest.approx((0.9, 0.0, 3))
    assert rows[0]["difference"].mean is None


def test_differences_are_paired_by_seed():
    """Only seed 2 is in both: the difference is 1.0 − 1.4, whatever the other seeds gave."""
    rows = summary_rows(tiny({"Deterministic": BASE, "Rank1": {2: 1.0, 7: 50.0}}))
    assert rows[1]["difference"].mean == pytest.approx(-0.4)
    assert rows[1]["difference"].error is None and rows[1]["difference"].n == 1


def test_means_over_shifts_use_the_cells_that_all_runs_have():
    document = tiny({"Deterministic": BASE, "Rank1": BASE})
    del document["methods"][1]["runs"][0]["shifted"]["noise"]["2"]  # one run lacks the harder severity
    results = Results.of(document)
    assert cells(results) == [("noise", "1")]
    rows = summary_rows(results)
    assert rows[0]["shifted_nll"].mean == pytest.approx(0.7)  # 1.2 − 0.5 for both methods
    assert rows[1]["shifted_nll"].mean == pytest.approx(0.7)


def test_a_method_without_shifts_is_missing_and_does_not_hide_the_others():
    document = tiny({"Deterministic": BASE, "Rank1": {0: 0.8, 1: 1.01, 2: 1.19}, "EMP": BASE})
    document["methods"][2]["runs"][1]["shifted"] = None
    rows = summary_rows(document)
    assert rows[1]["difference"].mean == pytest.approx(-0.2) and rows[2]["shifted_nll"].mean is None
    assert "Without a finite paired value: EMP." in verdict(document)
    for run in document["methods"][1]["runs"]:
        run["shifted"] = {"other": {"1": {"nll": 0.1}}}
    assert any("share no shift" in words for words in verdict(document))


def test_a_run_with_nan_does_not_drop_out_of_the_mean():
    rows = summary_rows(tiny({"Deterministic": BASE, "Rank1": {0: 0.5, 1: None, 2: 0.5}}))
    assert rows[1]["shifted_nll"].mean is None
    words = " ".join(verdict(tiny({"Deterministic": BASE, "Rank1": {0: 0.5, 1: None, 2: 0.5}})))
    assert "Without a finite paired value: Rank1." in words and "Lower by" not in words


@pytest.mark.parametrize(
    ("mine", "words", "not_words"),
    [
        ({0: 0.8, 1: 1.01, 2: 1.19}, "Shown to be lower: Rank1 (−0.200", "Shown to be higher"),
        ({0: 1.2, 1: 1.41, 2: 1.59}, "Shown to be higher: Rank1 (+0.200", "Shown to be lower"),
        ({0: 0.5, 1: 1.2, 2: 1.4}, "Not shown to differ: Rank1 (−0.167", "Shown to be lower"),
        ({0: 0.9, 1: 1.0, 2: 1.1}, "Not shown to differ: Rank1 (−0.200 ± 0.058, 3.5 s.e.)", "Shown to be lower"),
        ({0: 0.1}, "One seed only, so there is no standard error and no claim is made: Rank1 (−0.900)", "Shown"),
        ({0: 0.7, 1: 0.9, 2: 1.1}, "Shown to be lower: Rank1 (−0.300 ± 0.000).", "s.e."),
        (BASE, "Not shown to differ: Rank1 (+0.000 ± 0.000)", "Shown to be lower"),
    ],
)  # fmt: skip
def test_verdict_says_what_is_shown(mine, words, not_words):
    text = " ".join(verdict(tiny({"Deterministic": BASE, "Rank1": mine})))
    assert words in text and not_words not in text
    assert "1.200 ± 0.115 over 3 seeds" in text
    assert len(mine) == 1 or "two standard errors of the paired difference, 4.3 with 3 seeds" in text


@pytest.mark.parametrize("n", [2, 3, 4, 6, 11, 31, 200])
def test_the_margin_is_students_quantile(n):
    from scipy.stats import t

    assert margin(n) == pytest.approx(max(2.0, t.ppf(0.975, n - 1)), rel=0.01)


def test_verdict_counts_standard_errors_by_hand():
    """Differences −0.2, −0.19, −0.21: mean −0.2, sd 0.01, s.e. 0.01/√3, so 34.6 standard errors."""
    text = " ".join(verdict(tiny({"Deterministic": BASE, "Rank1": {0: 0.8, 1: 1.01, 2: 1.19}})))
    assert "Rank1 (−0.200 ± 0.006, 34.6 s.e.)" in text


def test_verdict_passes_on_what_fit_found():
    document = tiny({"Deterministic": BASE, "Rank1": BASE, "KTied": BASE})
    assert "sb.fit" not in " ".join(verdict(document))
    for run, kinds in zip(
        document["methods"][2]["runs"], (["kl-dominates"], [], ["kl-dominates"]), strict=True
    ):
        run["findings"] = kinds
    document["methods"][0]["runs"] = [
        run | {"findings": ["overconfident"]} for run in document["methods"][0]["runs"]
    ]
    words = "sb.fit says: Deterministic (overconfident) and KTied (kl-dominates in 2 of 3 runs)."
    assert words in " ".join(verdict(document))


def test_verdict_without_a_comparison():
    assert "was not run" in " ".join(verdict(tiny({"Rank1": BASE})))
    assert "nothing to compare it with" in " ".join(verdict(tiny({"Deterministic": BASE})))
    assert verdict(tiny({"Deterministic": BASE}))[0] == "Nothing to choose from: Deterministic was run alone."
    assert "no runs" in " ".join(verdict(tiny({})))
    assert "no finite" in " ".join(verdict(tiny({"Deterministic": {0: None}, "Rank1": {0: 1.0}})))
    clean = verdict(tiny({"Deterministic": BASE, "Rank1": BASE}, shifted=False))
    assert any("On clean test data the" in words for words in clean)


def test_best_is_by_direction_and_by_closeness():
    results = Results.of(regression(seeds=2))
    rows, wanted = summary_rows(results), {c.key: c for c in columns(results)}
    by_hand = min(range(len(rows)), key=lambda i: abs(rows[i]["shifted_coverage_90"].mean - 0.9))
    assert by_hand in best(rows, wanted["shifted_coverage_90"])
    assert best(rows, wanted["clean_width_90"]) == set()
    lowest = min(range(len(rows)), key=lambda i: rows[i]["shifted_nll"].mean)
    assert best(rows, wanted["shifted_nll"]) == {lowest}
    worse = Results.of(tiny({"Deterministic": BASE, "A": {0: 2.0, 1: 2.0}, "B": {0: 3.0, 1: 3.0}}))
    column = next(c for c in columns(worse) if c.key == "difference")
    assert best(summary_rows(worse), column) == set()  # no star for the least bad


@pytest.mark.parametrize("kind", ALL)
def test_csv_has_every_number(kind):
    document = ALL[kind](seeds=2)
    rows = list(csv.DictReader(io.StringIO(csv_summary(document))))
    wanted = summary_rows(document)
    assert [row["label"] for row in rows] == [row["label"] for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        assert float(row["clean_nll"]) == pytest.approx(want["clean_nll"].mean, rel=1e-5)
        assert float(row["clean_nll_error"]) == pytest.approx(want["clean_nll"].error, rel=1e-5)
        assert float(row["overhead"]) == pytest.approx(want["overhead"].mean, rel=1e-5)


def test_predict_milliseconds_are_seconds_per_thousand():
    document = classification(seeds=1)
    assert (
        summary_rows(document)[1]["predict_ms"].mean == document["methods"][1]["runs"][0]["predict_seconds"]
    )


def test_markdown_escapes_and_marks():
    document = tiny({"Deterministic": BASE, "A|B": {0: 0.5, 1: 0.7, 2: 0.9}})
    lines = markdown_summary(document).splitlines()
    assert "A\\|B" in lines[3] and "**0.700 ± 0.115**" in lines[3] and "−0.500 ± 0.000" in lines[3]
    assert {line.replace("\\|", "").count("|") for line in lines} == {lines[0].count("|")}


@pytest.mark.parametrize("width", [72, 400])
def test_terminal_table(width):
    document = classification(seeds=2)
    document["methods"][1]["label"] = "[red]MC[/red]"  # rich's markup is not obeyed in names
    out = io.StringIO()
    print_summary(document, Console(file=out, width=width, color_system=None))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "[red]MC[/red]" in text and "★" in text and "±" in text
    assert "Mean ± standard error over 2 seeds." in text and "standard errors" in text
    assert " ".join(text.split()).startswith(choose(document).text)  # before the tables
    first = text.index("Shifted" if width == 400 else "shifted")
    assert first < text.index("Clean" if width == 400 else "· clean")


def test_one_seed_has_no_error():
    out = io.StringIO()
    print_summary(classification(seeds=1), Console(file=out, width=400, color_system=None))
    assert "±" not in out.getvalue()
    assert "One seed per method: there is no standard error" in out.getvalue()
