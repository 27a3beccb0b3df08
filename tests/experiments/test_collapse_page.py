"""The page on collapse quotes its results as they are."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "collapse.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
CLEAN = {"nll": 3, "accuracy": 2, "ece": 4}  # columns of the page's tables, and their digits
BOTH = {**CLEAN, "c_nll": 3, "c_accuracy": 2, "c_ece": 4}


def result(name):
    return json.loads((ROOT / "results" / "rank1" / f"{name}.gpu.json").read_text(encoding="utf-8"))


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def values(name, table):
    """The numbers of every row and column, seed by seed, of one table of a result."""
    (found,) = [t for t in result(name)["tables"] if t["name"] == table]
    return {row["label"]: row["values"] for row in found["rows"]}


def means(name, table):
    return {
        label: {column: statistics.mean(seeds) for column, seeds in row.items()}
        for label, row in values(name, table).items()
    }


def printed(name, table, columns):
    """The rows of a table as the page prints them: means over seeds."""
    return [
        [label, *(f"{row[column]:.{digits}f}" if column in row else "" for column, digits in columns.items())]
        for label, row in means(name, table).items()
    ]


def figures(row, seed=0):
    values = {name: value[seed] for name, value in row["values"].items()}
    return f"{values['nll']:.3f}", f"{values['accuracy']:.2f}", f"{values['ece']:.4f}"


def test_the_page_has_the_figures_of_the_recorded_networks():
    document = result("table2")
    runs = [run for run in document["runs"] if run["setting"] == "cifar10-wide"]
    plain, *ours = sorted(runs, key=lambda run: (run["label"], run["seed"]))
    for run in ours:
        assert "random_sign_init=-0.1, dropout_rate=0.06, kl_reduction='mean'" in run["method"]
        assert run["training"]["epochs"] == 140 and run["steps"] == 13_580
    seconds = " and ".join(f"{run['seconds']:.0f}" for run in ours)
    assert f"two seeds of 140 epochs, 13,580 steps, in {seconds} s" in TEXT
    said = (
        f"of {plain['training']['epochs']} epochs as the paper has 200 for 250, in {plain['seconds']:.0f} s"
    )
    assert said in TEXT

    (table,) = [t for t in document["tables"] if t["name"] == "cifar10-wide-samples"]
    (main,) = [t for t in document["tables"] if t["name"] == "cifar10-wide"]
    rows = {row["label"]: row for row in main["rows"]}
    for seed, word in enumerate(("first", "second")):
        words = re.escape(f"cosine, 0.1 around 1, KL averaged, p = 0.06, {word} seed")
        quoted = re.findall(
            rf"^\| {words} \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M
        )
        assert len(quoted) == len(table["rows"]) == 3
        spread = f"{rows['Rank-1 Gaussian']['values']['spread'][seed]:.3f}"
        for row, (samples, *found) in zip(table["rows"], quoted, strict=True):
            assert row["label"].endswith(f"S = {samples}") and found == [*figures(row, seed), spread]
    assert f"| no distribution, cosine | | {' | '.join(figures(rows['Deterministic']))} | |" in PAGE


def test_the_page_and_the_readme_compare_the_recorded_networks():
    found = means("table2", "cifar10-wide")
    ours, plain = found["Rank-1 Gaussian"], found["Deterministic"]
    one, four, many = means("table2", "cifar10-wide-samples").values()
    assert f"σ = {ours['scale']:.2f} at the end" in TEXT
    assert f"{one['nll'] - many['nll']:.3f} in NLL from 1 to 25" in TEXT
    assert f"an NLL that is lower by {plain['nll'] - four['nll']:.3f}" in TEXT
    assert four["ece"] < plain["ece"] / 2
    assert f"the NLL is {ours['c_nll']:.2f} against {plain['c_nll']:.2f}" in TEXT
    assert f"the accuracy {ours['c_accuracy']:.1f} % against {plain['c_accuracy']:.1f} %" in TEXT
    assert f"the ECE {ours['c_ece']:.3f} against {plain['c_ece']:.3f}" in TEXT
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = f"an NLL of {four['nll']:.3f}, an accuracy of {four['accuracy']:.1f} % and an ECE of {four['ece']:.4f}"
    other = f"{plain['nll']:.3f}, {plain['accuracy']:.1f} % and {plain['ece']:.4f}"
    assert f"{said} with four samples, where the plain network has {other}" in readme


def test_the_page_has_the_figures_of_the_runs_before():
    (tried,) = [text for text in result("table2")["deviations"] if "tried before" in text]
    ways = r"(?:steps, .*|cosine, .*, p = 0\.04)"
    rows = re.findall(rf"^\| {ways} \| \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M)
    assert len(rows) == 7
    assert all(figure in tried for row in rows for figure in row)


def test_the_page_has_the_figures_of_shared_batches_over_seeds():
    """Cauchys by first scale, and the methods at equal rows on both test sets: tables in the page's order."""
    equal = printed("table2", "cifar10-equal", BOTH)
    equal += [row for row in printed("table2", "cifar10-equal-samples", BOTH) if not row[0].endswith("S = 1")]
    wanted = [printed("shared", "cifar10-heavy", CLEAN), equal, printed("table3", "cifar100", BOTH)]
    text = section("Components that share a batch").split("\n### Ablations")[0]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert [cells(text.strip())[2:] for text in tables[1:]] == wanted


def test_the_page_has_the_gains_of_more_samples():
    rows = means("table8", "cifar10-short")
    gains = [
        rows["1 sample"][name] - rows[label][name]
        for name in ("c_nll", "c_ece")
        for label in ("4 samples", "25 samples")
    ]
    assert "by {:.3f}, and 25 by {:.3f}; the ECE by {:.3f} and {:.3f}".format(*gains) in TEXT


def test_the_page_has_the_figures_of_the_search_for_shared_batches():
    (table,) = [t for t in result("shared")["tables"] if t["name"] == "cifar10-shared"]
    text = section("Components that share a batch").split("**Cauchys by their first scale.**")[0]
    said = {words: rest for words, *rest in cells(text)}
    for row in table["rows"]:
        spread = row["values"].get("spread")
        wanted = [*figures(row), f"{spread[0]:.3f}" if spread else ""]
        assert said[row["label"]] == wanted, row["label"]


def test_the_page_has_the_figures_of_figure_2():
    found = means("figure2", "cifar10-short")
    order = ("both", "s (inputs)", "r (outputs)")
    nll, ece = ([found[label][name] for label in order] for name in ("c_nll", "c_ece"))
    said = "NLL under corruption of {:.3f}, over inputs alone {:.3f}, over outputs alone {:.3f}"
    assert said.format(*nll) in TEXT and "an ECE of {:.3f}, {:.3f}, {:.3f}".format(*ece) in TEXT

    both, inputs = (values("figure2", "cifar10-short")[label]["c_nll"] for label in order[:2])
    assert len(both) == len(inputs) == 8
    before = [float(x) for x in re.findall(r"had ([\d.]+), ([\d.]+) and ([\d.]+): over all eleven", TEXT)[0]]
    for ours, theirs, words in (
        (both, inputs, "below that of inputs alone by {:.3f}, with an error of {:.3f}"),
        (before, inputs[:3], "That was {:.3f} with {:.3f} over three seeds"),
        (both + before, inputs, "over all eleven the difference is {:.3f}, with an error of {:.3f}"),
    ):
        error = sum(statistics.variance(x) / len(x) for x in (ours, theirs)) ** 0.5
        assert words.format(statistics.mean(theirs) - statistics.mean(ours), error) in TEXT


def test_the_page_has_the_figures_of_disagreement():
    rows = means("figure5", "cifar100")
    ours, theirs = rows["Rank-1 Gaussian"], rows["BatchEnsemble"]
    said = f"{ours['disagreement']:.2f} against {theirs['disagreement']:.2f}, at"
    assert f"{said} {theirs['accuracy'] - ours['accuracy']:.1f} points less of accuracy" in TEXT


def test_the_page_has_the_figures_of_components_and_first_scales():
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.split("### Ablations")[1].split("\n## ")[0], re.M)
    wanted = [
        printed("figure3", "cifar10-short", {**BOTH, "spread": 3}),
        printed("figure-v1-5", "cifar10-short", CLEAN),
    ]
    assert [cells(text.strip())[2:] for text in tables] == wanted


def test_the_page_has_the_figures_of_the_collapse():
    (table,) = result("collapse")["tables"]
    found = {row["label"]: row["values"] for row in table["rows"]}
    columns = {"spread": 4, "predicted": 4, "disagreement": 3, "nll": 3, "ece": 4, "c_ece": 3}
    said = {words: rest for words, *rest in cells(section("What was measured")) if words in found}
    assert set(said) == set(found) - {"Deterministic"}
    for label, rest in said.items():
        assert rest == [f"{statistics.mean(found[label][name]):.{n}f}" for name, n in columns.items()], label


def test_the_page_has_the_figures_of_the_search_for_short_schedules():
    (table,) = result("tuning")["tables"]
    found = {
        row["label"]: {name: values[0] for name, values in row["values"].items()} for row in table["rows"]
    }
    names = {"no distribution": "Deterministic", "BatchEnsemble, tuned": "BatchEnsemble"}
    seen: set[str] = set()
    for words, *rest in cells(section("What short schedules want")):
        method, *more = names.get(words, words).split(", ")
        low, high = (", ".join([method, f"l2 = {l2}", *more]) for l2 in ("0.0002", "0.0005"))
        if high in found:
            best, seen = found[high], seen | {low, high}
            spread = f"{best['spread']:.3f}" if "spread" in best else ""
            values = (
                f"{found[low]['nll']:.3f} {best['nll']:.3f} {best['accuracy']:.1f} {best['ece']:.4f}".split()
            )
            assert rest == [*values, spread], words
    assert seen == set(found)
