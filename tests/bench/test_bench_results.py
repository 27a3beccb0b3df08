"""The arithmetic of ratios, files, tables, the plot and the page, on fixed figures."""

import io
import json
from pathlib import Path

import pytest
from bench.helpers_bench import RUN, cells, results
from rich.console import Console

from slimbayes.lab.bench import page as page_module
from slimbayes.lab.bench.page import page_text, write_page
from slimbayes.lab.bench.plot import write_plot
from slimbayes.lab.bench.results import BenchError, Results, median_error, read_results, timing
from slimbayes.lab.bench.settings import CONTENDERS, HEADS, MODES, NETWORKS, PEERS, PHASES, TARGETS, limit
from slimbayes.lab.bench.table import blocks, print_table, rows

ROOT = Path(__file__).parents[2]


def test_a_ratio_is_the_median_of_ratios_within_rounds():
    # The second round is slow for both: it counts as any other, and neither median of times says 2.
    cell = timing([0.2, 2.0, 0.2, 0.22], 10, [0.1, 1.0, 0.1, 0.1], 10)
    assert cell["ratio"] == pytest.approx(2.0)
    assert cell["milliseconds"] == pytest.approx(210.0)
    assert cell["rounds"] == 4
    # per unit: half as many units at the same time are twice as dear
    assert timing([0.2, 0.2], 5, [0.2, 0.2], 10)["ratio"] == pytest.approx(2.0)


def test_the_error_of_a_median_is_that_of_normal_values():
    import torch

    torch.manual_seed(0)
    sample = torch.randn(4000, 101)
    spread = sample.median(1).values.std()
    errors = torch.tensor([median_error(row.tolist()) for row in sample[:200]])
    assert errors.median() == pytest.approx(float(spread), rel=0.1)


def test_memory_parameters_and_first_step_are_ratios_to_the_same_run():
    _, rank1 = cells(mode="compiled", deterministic=[0.1], rank1=[0.3])
    assert rank1["memory_ratio"] == pytest.approx(1.1)
    assert rank1["parameters_ratio"] == pytest.approx(1.01)
    assert rank1["first_ratio"] == pytest.approx(1.1)


def test_files_come_back_and_new_cells_replace_old_ones(tmp_path):
    found = results()
    path = found.write(tmp_path / "bench-cpu.json")
    again = read_results(path)
    assert again.cells == found.cells and len(again.runs) == 1
    later = {**RUN, "created": "later"}
    again.add(cells(deterministic=[0.01], rank1=[0.05]), later)
    cell = again.find("own", "mlp", "train", "eager", "rank1")
    assert cell["ratio"] == pytest.approx(5.0) and again.runs[cell["run"]] == later
    assert again.find("own", "mlp", "train", "compiled", "rank1")["ratio"] == pytest.approx(1.5)
    assert len(again.cells) == len(found.cells)


def test_a_run_without_cells_is_dropped(tmp_path):
    found = Results("cpu")
    found.add(cells(deterministic=[0.01]), RUN)
    found.add(cells(deterministic=[0.02]), {**RUN, "created": "later"})
    assert [run["created"] for run in read_results(found.write(tmp_path / "a.json")).runs] == ["later"]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "slimbayes-results", "version": 1}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BenchError):
        read_results(path)


def test_table():
    found = results()
    shown = rows(found, ("own", "mlp", "train", "eager"))
    assert [row[0] for row in shown] == [
        "deterministic", "Rank1 normal, K=4, per example", "KTied k=2, shared sample", "EMP, K=5",
    ]  # fmt: skip
    assert shown[1][2:4] == ["2.00 ± 0.00", "≤ 1.9 ✗"]
    assert shown[2][3] == "≤ 1.2 ✓"
    assert shown[3][1:3] == ["failed", "ValueError: no / norm"]
    screen = Console(width=200, record=True, file=io.StringIO())
    print_table(found, screen)
    text = screen.export_text()
    assert "beside peers" in text and "disturbed" not in text
    found.cells[0]["disturbed"] = True
    print_table(found, screen)
    assert "idle machine" in screen.export_text()


def test_plot(tmp_path):
    found = results()
    paths = write_plot(found, tmp_path / "bench-cpu")
    assert [path.suffix for path in paths] == [".svg", ".png"] and all(path.stat().st_size for path in paths)
    svg = paths[0].read_text()
    assert "Rank1 normal, K=4, per example" in svg and "BLiTZ" not in svg
    again = write_plot(found, tmp_path / "again")[0].read_text()
    assert again == svg  # the same figures, the same file
    assert "torchbnn" in write_plot(found, tmp_path / "peers", "peers")[0].read_text()
    assert write_plot(Results("cpu"), tmp_path / "none") == []


def test_page_says_what_holds_and_what_does_not(tmp_path):
    results().write(tmp_path / "bench-cpu.json")
    write_plot(results(), tmp_path / "bench-cpu")
    (tmp_path / "notes.md").write_text("## What does not hold, and why\n\nBecause.\n")
    epochs = {
        "images": 50_000, "size": 32, "components": 4, "batch": 128, "device": "a GPU", "torch": "2", "commit": "abc",
        "created": "now", "target_seconds": 2.5, "runs": [
            {"name": "Rank1", "mode": "capture", "epoch_seconds": 2.25, "first_seconds": 30.0},
            {"name": "Rank1", "mode": "graphs", "error": "RuntimeError: no"},
        ],
    }  # fmt: skip
    (tmp_path / "epoch-gpu.json").write_text(json.dumps(epochs))
    profile = {
        "device": "a GPU", "torch": "2", "commit": "abc",
        "rates": {"bytes_per_second": 4e12, "operations_per_second": 6e14},
        "runs": {
            "mlp / deterministic / graphs": {"wall_ms": 3.0, "parts": {"products": 2.5, "optimizer": 0.5}},
            "mlp / rank1 / graphs": {"wall_ms": 4.0, "parts": {"products": 2.75, "ours: noise": 1.0}},
            "mlp / emp / graphs": {"error": "RuntimeError: no"},
        },
    }  # fmt: skip
    (tmp_path / "profile-gpu.json").write_text(json.dumps(profile))
    shares = {"products": 0.75, "host": 0.25}
    own = {"parts": {"products": 1.0, "host": 0.5}, "ratio": 1.5, "floor": {"ratio": 1.125}}
    methods = {"deterministic": {"parts": shares, "ratio": 1.0}, "ktied": own}
    networks = {"mlp": {"deterministic_ms": 10.0, "methods": methods}}
    found = {"threads": 2, "torch": "2", "commit": "abc", "time": "now", "networks": networks}
    (tmp_path / "profile-cpu.json").write_text(json.dumps(found))
    text = write_page(tmp_path, tmp_path / "docs" / "speed.md").read_text()
    assert (
        "| mlp | train | eager | Rank1 normal, K=4, per example | time | ≤ 1.9 | 2.00 ± 0.00 | **no** |"
        in text
    )
    assert "| KTied k=2, shared sample | 1.00 | 0.50 | 1.50 | 1.12 |" in text
    assert "4.00 TB/s" in text and "600 TFLOP/s" in text
    assert "| part | deterministic | Rank1 normal, K=4, per example |" in text
    shares = ["| products | 2.50 | 2.75 |", "| ours: noise | – | 1.00 |", "| optimizer | 0.50 | – |"]
    assert "\n".join([*shares, "| step | 3.00 | 4.00 |"]) in text
    assert (
        "| mlp | train | compiled | Rank1 normal, K=4, per example | time | ≤ 1.6 | 1.50 ± 0.00 | yes |"
        in text
    )
    assert (
        "| mlp | train | eager | torchbnn | 2.00 ± 0.00 | MeanField, shared sample | 1.20 ± 0.00 | yes |"
        in text
    )
    assert "failed: ImportError: x" in text
    assert "Because." in text and "2.25" in text and "(../bench-cpu.svg)" in text
    assert "more bounds have no figure" in text
    assert "commit abc" in text


def test_page_without_figures(tmp_path):
    assert "No figures yet" in page_text(tmp_path, tmp_path)


def test_the_page_in_the_docs_is_that_of_the_committed_figures():
    written = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert written == page_text(ROOT / "bench" / "results", ROOT / "docs"), "run python docs/generate.py"


def test_committed_files_are_readable():
    for name in page_module.FILES.values():
        path = ROOT / "bench" / "results" / name
        if path.is_file():
            assert blocks(read_results(path))


def test_settings_hang_together():
    assert set(HEADS) <= set(CONTENDERS)
    assert all(peer.counterpart in CONTENDERS for peer in PEERS.values())
    for network in NETWORKS.values():
        assert set(network.phases) <= set(PHASES)
        assert "head" not in network.phases or network.head
        assert network.rows % 4 == 0
    for target in TARGETS:
        assert set(target.networks) <= set(NETWORKS) and set(target.methods) <= set(CONTENDERS)
        assert target.mode in MODES and target.phase in PHASES
    assert limit("cpu", "mlp", "train", "compiled", "ktied-shared", "time") == 1.12
    assert limit("cpu", "mlp", "train", "compiled", "emp", "time") is None
