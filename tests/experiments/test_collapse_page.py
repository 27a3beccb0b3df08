"""The page on collapse quotes its results as they are."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "collapse.md").read_text(encoding="utf-8")


def result(name):
    return json.loads((ROOT / "results" / "rank1" / f"{name}.gpu.json").read_text(encoding="utf-8"))


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def figures(row):
    values = {name: value[0] for name, value in row["values"].items()}
    return f"{values['nll']:.3f}", f"{values['accuracy']:.2f}", f"{values['ece']:.4f}"


def test_the_page_has_the_figures_of_the_recorded_network():
    document = result("table2")
    (run,) = [run for run in document["runs"] if run["setting"] == "cifar10-wide"]
    assert "random_sign_init=-0.1, dropout_rate=0.06, kl_reduction='mean'" in run["method"]
    assert run["training"]["epochs"] == 140 and "140 epochs, 13,580 steps" in PAGE and run["steps"] == 13_580
    table = next(t for t in document["tables"] if t["name"] == "cifar10-wide-samples")
    words = re.escape("cosine, 0.1 around 1, KL averaged, p = 0.06")
    quoted = re.findall(rf"^\| {words} \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M)
    assert len(quoted) == len(table["rows"]) == 3
    for row, (samples, *found) in zip(table["rows"], quoted, strict=True):
        assert row["label"].endswith(f"S = {samples}") and tuple(found) == figures(row)
    (network,) = means("table2", "cifar10-wide").values()
    assert f"σ = {network['scale']:.2f} at the end" in " ".join(PAGE.split())
    spreads = re.findall(rf"^\| {words} .*\| ([\d.]+) \|$", PAGE, re.M)
    assert spreads == [f"{network['spread']:.3f}"] * 3
    nll, accuracy, ece = figures(table["rows"][1])
    said = f"an NLL of {nll}, an accuracy of {float(accuracy):.1f} % and an ECE of {ece} with four samples"
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_page_has_the_figures_of_the_runs_before():
    (tried,) = [text for text in result("table2")["deviations"] if "tried before" in text]
    ways = r"(?:steps, .*|cosine, .*, p = 0\.04)"
    rows = re.findall(rf"^\| {ways} \| \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M)
    assert len(rows) == 7
    assert all(figure in tried for row in rows for figure in row)


def means(name, table):
    """The mean of every row and column over seeds, of one table of a result."""
    (found,) = [t for t in result(name)["tables"] if t["name"] == table]
    return {row["label"]: {k: statistics.mean(v) for k, v in row["values"].items()} for row in found["rows"]}


def test_the_page_has_the_figures_of_shared_batches_over_seeds():
    """Cauchys by first scale, and the methods at equal rows on both test sets: tables in the page's order."""
    clean = {"nll": 3, "accuracy": 2, "ece": 4}
    both = {**clean, "c_nll": 3, "c_accuracy": 2, "c_ece": 4}
    wanted = [
        [[label, *(f"{row[k]:.{n}f}" for k, n in columns.items())] for label, row in means(*where).items()]
        for columns, *where in (
            (clean, "shared", "cifar10-heavy"),
            (both, "table2", "cifar10-equal"),
            (both, "table3", "cifar100"),
        )
    ]
    more = means("table2", "cifar10-equal-samples")
    wanted[1] += [
        [label, *(f"{row[k]:.{n}f}" for k, n in clean.items()), "", "", ""]
        for label, row in more.items()
        if not label.endswith("S = 1")
    ]
    tables = re.findall(r"(?:^\|.*\n)+", section("Components that share a batch"), re.M)
    assert [cells(text.strip())[2:] for text in tables[1:]] == wanted


def test_the_page_has_the_figures_of_the_networks_trained_again():
    (table,) = [t for t in result("table8")["tables"] if t["setting"] == "cifar10-short"]
    rows = {row["label"]: row["values"] for row in table["rows"]}
    again = rows["1 sample"]["c_nll"]
    (first,) = [t for t in result("figure2")["tables"] if t["setting"] == "cifar10-short"]
    found = {row["label"]: row["values"]["c_nll"] for row in first["rows"]}
    six, inputs = found["both"] + again, found["s (inputs)"]
    error = sum(statistics.variance(x) / len(x) for x in (six, inputs)) ** 0.5
    text, mean = " ".join(PAGE.split()), statistics.mean
    assert "have {:.3f}, {:.3f} and {:.3f}".format(*again) in text
    words = f"the mean is {mean(six):.3f}, which is {mean(inputs) - mean(six):.3f} below that of inputs alone"
    assert f"{words}, with a standard error of {error:.3f}" in text
    gains = [
        mean(rows["1 sample"][name]) - mean(rows[label][name])
        for name in ("c_nll", "c_ece")
        for label in ("4 samples", "25 samples")
    ]
    assert "by {:.3f}, and 25 by {:.3f}; the ECE by {:.3f} and {:.3f}".format(*gains) in text


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
    text = " ".join(PAGE.split())
    assert (
        "NLL under corruption of {:.3f}, over inputs alone {:.3f}, over outputs alone {:.3f}".format(*nll)
        in text
    )
    assert "an ECE of {:.3f}, {:.3f}, {:.3f}".format(*ece) in text


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
