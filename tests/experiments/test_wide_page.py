"""The page on collapse quotes the WRN-28-10 as its result has it."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_figures_of_the_result():
    document = json.loads((ROOT / "results" / "rank1" / "table2.gpu.json").read_text())
    table = next(t for t in document["tables"] if t["name"] == "cifar10-wide-samples")
    text = (ROOT / "docs" / "collapse.md").read_text(encoding="utf-8")
    quoted = re.findall(
        r"^\| KL summed, p = 0.05 \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.M
    )
    assert len(quoted) == len(table["rows"]) == 3
    for row, (samples, nll, accuracy, ece) in zip(table["rows"], quoted, strict=True):
        values = {name: value[0] for name, value in row["values"].items()}
        assert row["label"].endswith(f"S = {samples}")
        assert (nll, accuracy) == (f"{values['nll']:.3f}", f"{values['accuracy']:.2f}")
        assert ece == f"{values['ece']:.4f}"
    tried = next(text for text in document["deviations"] if "tried before" in text)
    assert "NLL 0.163, accuracy 95.30, ECE 0.0191" in tried and "| 0.163 | 95.30 | 0.0191 |" in text
