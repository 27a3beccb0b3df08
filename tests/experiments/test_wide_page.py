"""The page on collapse quotes the WRN-28-10 and the search for shared batches as their results have them."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "collapse.md").read_text(encoding="utf-8")


def result(name):
    return json.loads((ROOT / "results" / "rank1" / f"{name}.gpu.json").read_text(encoding="utf-8"))


def figures(row):
    values = {name: value[0] for name, value in row["values"].items()}
    return f"{values['nll']:.3f}", f"{values['accuracy']:.2f}", f"{values['ece']:.4f}"


def test_the_page_has_the_figures_of_the_recorded_network():
    document = result("table2")
    (run,) = [run for run in document["runs"] if run["setting"] == "cifar10-wide"]
    assert "random_sign_init=-0.1, dropout_rate=0.04, kl_reduction='mean'" in run["method"]
    assert run["training"]["epochs"] == 140 and "140 epochs, 13,580 steps" in PAGE and run["steps"] == 13_580
    table = next(t for t in document["tables"] if t["name"] == "cifar10-wide-samples")
    words = re.escape("cosine, 0.1 around 1, KL averaged, p = 0.04")
    quoted = re.findall(rf"^\| {words} \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M)
    assert len(quoted) == len(table["rows"]) == 3
    for row, (samples, *found) in zip(table["rows"], quoted, strict=True):
        assert row["label"].endswith(f"S = {samples}") and tuple(found) == figures(row)


def test_the_page_has_the_figures_of_the_runs_before():
    (tried,) = [text for text in result("table2")["deviations"] if "tried before" in text]
    rows = re.findall(r"^\| steps, .* \| \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M)
    assert len(rows) == 4
    assert all(figure in tried for row in rows for figure in row)


def test_the_page_has_the_figures_of_the_search():
    (table,) = result("shared")["tables"]
    part = PAGE.split("## Components that share a batch")[1].split("\n## ")[0]
    for row in table["rows"]:
        (quoted,) = re.findall(rf"^\| {re.escape(row['label'])} \| (.*) \|$", part, re.M)
        cells = [cell.strip() for cell in quoted.split("|")]
        spread = row["values"].get("spread")
        assert cells == [*figures(row), f"{spread[0]:.3f}" if spread else ""], row["label"]


def test_the_page_has_the_figures_of_figure_2():
    (table,) = [t for t in result("figure2")["tables"] if t["setting"] == "cifar10-short"]
    found = {row["label"]: {k: sum(v) / len(v) for k, v in row["values"].items()} for row in table["rows"]}
    order = ("both", "s (inputs)", "r (outputs)")
    nll, ece = ([found[label][name] for label in order] for name in ("c_nll", "c_ece"))
    text = " ".join(PAGE.split())
    assert (
        "NLL under corruption of {:.3f}, over inputs alone {:.3f}, over outputs alone {:.3f}".format(*nll)
        in text
    )
    assert "an ECE of {:.3f}, {:.3f}, {:.3f}".format(*ece) in text
