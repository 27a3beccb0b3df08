"""The suite of unlike tasks: cells that go on where they stopped, contenders on equal batches, and its page."""

import json
from dataclasses import replace

import pytest
import torch

import slimbayes as sb
from slimbayes.containers.datasets import Split
from slimbayes.lab.suite import contenders, page, running, training
from slimbayes.lab.suite.data import Task
from slimbayes.lab.suite.pairs import PAIRS
from slimbayes.lab.suite.running import Cell, cells, measure_cell, read_rows, run_suite
from slimbayes.lab.suite.scores import measure, score

SMALL = ("breast-mlp", "wine-mlp", "digits-mlp")  # from scikit-learn, without files


@pytest.fixture
def short(monkeypatch):
    for name in SMALL:
        monkeypatch.setitem(PAIRS, name, replace(PAIRS[name], epochs=1))


def test_every_pair_has_a_half_and_there_are_enough():
    halves = [pair.half for pair in PAIRS.values()]
    assert halves.count("choosing") >= 7 and halves.count("judging") >= 7
    assert set(running.REDUCED) <= set(PAIRS) and len(running.REDUCED) == 5


def test_batches_are_those_of_the_seed_for_every_contender():
    pair = PAIRS["wine-mlp"]
    task = pair.data(None)
    first = [inputs for inputs, _, _ in training.batches(pair, task, 0)]
    again = [inputs for inputs, _, _ in training.batches(pair, task, 0)]
    other = [inputs for inputs, _, _ in training.batches(pair, task, 1)]
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, other))
    assert len(first) == pair.epochs * (len(task.train) // pair.batch)


def test_networks_of_a_seed_start_alike(monkeypatch):
    starts = []
    pair = replace(PAIRS["wine-mlp"], epochs=0)
    task = pair.data(None)
    monkeypatch.setattr(
        training, "answer_of", lambda model, *rest: starts.append(model[1].weight.detach().clone())
    )
    for method in (sb.Deterministic(), sb.KTied(), sb.Rank1()):
        training.train(pair, task, method, 3)
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("name", ["plain", "Rank1", "KTied(rank=1)", "EMP", "SWAG", "ensemble of 5"])
def test_contenders_learn(name):
    pair = replace(PAIRS["wine-mlp"], epochs=20)
    task = pair.data(None)
    untrained = contenders.contender(name)[0](replace(pair, epochs=1), task, 0)
    trained = contenders.contender(name)[0](pair, task, 0)
    assert score(trained, task.test, False)["nll"] < 0.7 * score(untrained, task.test, False)["nll"]


def test_temperature_scaling_changes_how_sure_a_network_is_and_not_what_it_says():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=generator)
    y = (x[:, 0] + 1.5 * torch.randn(500, generator=generator) > 0).long()
    test = Split(x[300:], y[300:])
    task = Task(Split(x[:300], y[:300]), test, (test,), 2)
    pair = replace(PAIRS["adult-mlp"], epochs=40, batch=30)
    plain = score(contenders.contender("plain")[0](pair, task, 0), test, False)
    scaled = score(contenders.contender("temperature scaling")[0](pair, task, 0), test, False)
    assert scaled["nll"] < plain["nll"] - 0.02 and scaled["ece"] < plain["ece"]


def test_regressions_have_noise_of_the_residuals():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 3, generator=generator)
    y = x[:, :1] + 0.3 * torch.randn(600, 1, generator=generator)
    task = Task(Split(x[:400], y[:400]), Split(x[400:], y[400:]), (Split(x[400:], y[400:]),), 1, True)
    pair = replace(PAIRS["power-mlp"], epochs=20, batch=40)
    for name in ("plain", "KTied", "temperature scaling", "SWAG"):
        figures = measure(contenders.contender(name)[0](pair, task, 0), task)["clean"]
        assert 0.82 < figures["coverage"] < 0.97, (name, figures)


def test_a_run_goes_on_where_it_stopped(short, tmp_path, monkeypatch):
    output, said = tmp_path / "suite.json", []
    wanted = cells(["breast-mlp"], ["plain", "KTied"], 2)
    assert len(run_suite(wanted[:2], output, say=said.append)) == 2
    before = {Cell(row["pair"], row["contender"], row["seed"]): row for row in read_rows(output)}
    rows = run_suite(wanted, output, say=said.append)
    assert len(rows) == 4 and said.count("2 of 4 cells are there") == 1
    assert all(row in rows for row in before.values())
    assert run_suite(wanted, output, say=said.append) == rows and said[-1] == "4 of 4 cells are there"
    # Another setting of the loop makes a row an old one.
    monkeypatch.setitem(PAIRS, "breast-mlp", replace(PAIRS["breast-mlp"], lr=0.01))
    run_suite(wanted[:1], output, say=said.append)
    assert said[-2] == "0 of 1 cells are there"
    assert run_suite(wanted, tmp_path / "none.json", budget=0.0) == []


def test_a_cell_that_fails_is_said_and_the_others_are_measured(short, tmp_path, monkeypatch):
    def broken(pair, task, seed):
        raise OSError("no room")

    monkeypatch.setitem(contenders.RIVALS, "SWAG", broken)
    output, said = tmp_path / "suite.json", []
    with pytest.raises(
        ValueError, match="1 cells could not be measured: wine-mlp, SWAG, seed 0: OSError: no room"
    ):
        run_suite(cells(["wine-mlp"], ["SWAG", "plain"], 1), output, say=said.append)
    assert [row["contender"] for row in read_rows(output)] == ["plain"] and "[1/2] failed" in said[1]


@pytest.mark.parametrize("name", ["scikit-learn's MLP", "slimbayes.sklearn"])
def test_estimators_take_rows_of_any_shape(name, short):
    pytest.importorskip("sklearn")
    row = measure_cell(Cell("digits-mlp", name, 0), None)
    assert 0.8 < row["clean"]["accuracy"] <= 1


def test_rows_do_not_depend_on_the_process(short, tmp_path):
    row = measure_cell(Cell("wine-mlp", "Rank1", 0), None)
    again = measure_cell(Cell("wine-mlp", "Rank1", 0), None)
    assert row["clean"] == again["clean"] and row["shifted"] == again["shifted"]


def test_wrong_names_are_said(tmp_path):
    with pytest.raises(ValueError, match="no pair 'mnist'"):
        cells(["mnist"], ["plain"], 1)
    with pytest.raises(ValueError, match="Rank2"):
        cells(["wine-mlp"], ["Rank2"], 1)
    (tmp_path / "other.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="no file of the suite"):
        read_rows(tmp_path / "other.json")


def test_what_needs_another_package_is_left_out(short, tmp_path, monkeypatch):
    said = []
    monkeypatch.setitem(contenders._PACKAGES, "IVON", ("no_such_module", "ivon-opt"))
    assert run_suite(cells(["wine-mlp"], ["IVON"], 1), tmp_path / "suite.json", say=said.append) == []
    assert "1 cells are left out: they need pip install ivon-opt" in said[1]


def rows_of(pair, contender, values):
    known = {"pair": pair, "contender": contender, "is": contender}
    rest = {"accuracy": 0.9, "ece": 0.01}
    return [
        {**known, "seed": seed, "clean": {"nll": value, **rest}, "shifted": {"nll": 2 * value, **rest}}
        for seed, value in enumerate(values)
    ]


def test_worse_is_two_standard_errors_and_one_per_cent():
    plain = rows_of("mnist-deep", "plain", [1.0, 1.1, 0.9])
    within_noise = page.differences([*plain, *rows_of("mnist-deep", "EMP", [1.3, 1.0, 0.9])], "EMP")[0]
    small = page.differences([*plain, *rows_of("mnist-deep", "EMP", [1.005, 1.105, 0.905])], "EMP")[0]
    clear = page.differences([*plain, *rows_of("mnist-deep", "EMP", [1.05, 1.15, 0.96])], "EMP")[0]
    assert (within_noise.worse, small.worse, clear.worse) == (False, False, True)
    assert clear.clean.mean == pytest.approx(0.16 / 3) and clear.plain == pytest.approx(1.0)


def test_the_page_marks_what_is_worse():
    rows = [*rows_of("mnist-deep", "plain", [1.0, 1.1]), *rows_of("mnist-deep", "EMP", [1.2, 1.3])]
    rows += [*rows_of("breast-mlp", "plain", [0.5, 0.6]), *rows_of("breast-mlp", "EMP", [0.4, 0.5])]
    text = page.tables(rows)
    assert text.index("chosen on") < text.index("looked at once")
    assert "| EMP | +19.0 % |" in text and "| mnist-deep |" in text
    assert "**+0.200 ± 0.000**" in text and "| −0.100 ± 0.000 |" in text


def test_the_table_of_all_pairs_takes_both_halves():
    rows = [*rows_of("mnist-deep", "plain", [1.0, 1.0]), *rows_of("mnist-deep", "EMP", [0.9, 0.9])]
    rows += [*rows_of("breast-mlp", "plain", [1.0, 1.0]), *rows_of("breast-mlp", "EMP", [1.3, 1.3])]
    assert "| EMP | +10.0 % | +10.0 % |" in "\n".join(page.summary(rows))
    assert "| EMP | −10.0 % |" in "\n".join(page.summary(rows, "judging"))
    assert page.summary(rows)[-1].endswith("| breast-mlp |")


def test_what_is_worse_is_named_with_its_figures():
    rows = [*rows_of("mnist-deep", "plain", [1.0, 1.0]), *rows_of("mnist-deep", "EMP", [1.2, 1.2])]
    rows += [*rows_of("breast-mlp", "plain", [0.5, 0.6]), *rows_of("breast-mlp", "EMP", [0.4, 0.5])]
    rows += rows_of("breast-mlp", "Rank1", [0.4, 0.5])
    assert page.worse(rows)[2:] == ["| Rank1 | 1 | none |", "| EMP | 2 | mnist-deep (+0.200 ± 0.000) |"]


def test_studies_are_tables_of_their_own():
    known = {"pair": "breast-mlp", "seed": 0, "clean": 0.1, "shifted": -0.2}
    rows = [{**known, "variant": "a"}, {**known, "variant": "b", "pair": "mnist-cnn", "study": "starts"}]
    assert page.study(rows)[0] == "| setting | breast-mlp |" and page.study(rows)[2:] == [
        "| a | +0.100 / −0.200 (1) |"
    ]
    assert page.study(rows, "starts")[0] == "| setting | mnist-cnn |"


def test_intervals_out_of_bounds_by_two_standard_errors_are_marked():
    def covered(contender, values):
        figures = {"nll": 0.0, "rmse": 1.0}
        known = {"pair": "power-mlp", "contender": contender, "is": contender}
        clean = [{**figures, "coverage": value} for value in values]
        return [{**known, "seed": seed, "clean": one, "shifted": one} for seed, one in enumerate(clean)]

    rows = [*covered("plain", [0.95, 0.95]), *covered("Rank1", [0.942, 0.944]), *covered("EMP", [0.6, 1.0])]
    lines = page.intervals([*rows, *rows_of("mnist-deep", "plain", [1.0])])
    # 1,500 test rows: two standard errors are 1.5 points, and more where seeds differ
    assert lines[0] == "| way | power-mlp |" and "| plain | **95.0** |" in lines
    assert "| Rank1 | 94.3 |" in lines and "| EMP | 80.0 |" in lines
    assert "## Intervals" in page.tables(rows) and "## Intervals" not in page.tables(
        rows_of("mnist-deep", "plain", [1.0])
    )
