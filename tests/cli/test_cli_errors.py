"""What a user can mend: one line, exit code 1, no traceback, and no file that was not there before."""

import csv
import json
import re

import numpy as np
import pytest
from helpers_cli import runner

import slimbayes as sb
from slimbayes.lab.cli import main
from slimbayes.lab.config import RunConfig
from slimbayes.lab.runs import train_run
from slimbayes.training import Training

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def slimbayes(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wine")
    config = RunConfig("wine", {}, "dense(hidden=[4])", "Rank1(components=2)", None, 4, Training(steps=2))
    train_run(config, folder, progress=False)
    return folder


def table(path, change=lambda rows: rows):
    data = sb.data.load("wine")
    rows = change([list(data.features), *data.test.inputs[:4].tolist()])
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def renamed(rows):
    rows[0][2] = "ashes"
    return rows


def spoiled(value):
    def change(rows):
        rows[3][1] = value
        return rows

    return change


def array(**arrays):
    return lambda path: np.savez(path, **arrays)


WIDE = np.zeros((3, 13), np.float32)
BAD = {
    "wrong column": ("in.csv", lambda path: table(path, renamed), r"in.csv: no column 'ash' \(did you mean 'ashes'"),
    "missing columns": ("in.csv", lambda path: table(path, lambda rows: [row[:5] for row in rows]), "no column"),
    "nan": ("in.csv", lambda path: table(path, spoiled("nan")), r"in.csv: .*row 3, column 'malic_acid'"),
    "blank": ("in.csv", lambda path: table(path, spoiled("")), r"in.csv: .*row 3, column 'malic_acid'"),
    "infinite": ("in.csv", lambda path: table(path, spoiled("1e999")), r"in.csv: .*row 3, column 'malic_acid'"),
    "text": ("in.csv", lambda path: table(path, spoiled("much")), r"in.csv: .*'much'|row 3, column 'malic_acid'"),
    "ragged": ("in.csv", lambda path: table(path, lambda rows: [*rows, [1.0, 2.0]]), r"in.csv: line 6 has 2 values"),
    "empty": ("in.csv", lambda path: path.write_text(""), "in.csv: the file is empty"),
    "blank lines": ("in.csv", lambda path: path.write_text("\n\n \n"), "in.csv: the file is empty"),
    "header only": ("in.csv", lambda path: table(path, lambda rows: rows[:1]), "it has a header .* but no rows"),
    "binary": ("in.csv", lambda path: path.write_bytes(b"\xff\xfe\x80"), "in.csv: byte 0 is not UTF-8"),
    "absent": ("in.csv", lambda path: None, "in.csv: no such file"),
    "folder": ("in", lambda path: path.mkdir(), "is a folder; this model wants a table"),
    "wrong shape": ("in.npz", array(inputs=np.zeros((3, 5))), r"in.npz: .* \[3, 5\], the model wants \[N, 13\]"),
    "no rows": ("in.npz", array(inputs=WIDE[:0]), "in.npz: it has no rows"),
    "other arrays": ("in.npz", array(x=WIDE), "in.npz: no array 'inputs' or 'images'; it has x"),
    "nan array": ("in.npz", array(inputs=WIDE * np.nan), "in.npz: 39 values are NaN or infinite"),
    "words array": ("in.npz", array(inputs=np.full((3, 13), "a")), "in.npz"),
    "pickles": ("in.npz", array(inputs=np.full((3, 13), None)), "in.npz"),
    "no archive": ("in.npz", lambda path: path.write_bytes(b"x" * 50), "in.npz"),
    "no parquet": ("in.parquet", lambda path: path.write_bytes(b"x" * 50), "in.parquet"),
}  # fmt: skip


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("case", BAD)
def test_predict_on_bad_files(slimbayes, run, tmp_path, case, existing):
    name, make, message = BAD[case]
    make(tmp_path / name)
    out = tmp_path / "out" / "predictions.csv"
    if existing:
        out.parent.mkdir()
        out.write_text("what was there")
    done = slimbayes("predict", run, tmp_path / name, "--out", out, code=1)
    assert re.search(message, done.err), done.err
    assert len(done.err.strip().splitlines()) == 1 and done.out == ""
    if existing:
        assert out.read_text() == "what was there" and [p.name for p in out.parent.iterdir()] == [
            "predictions.csv"
        ]
    else:
        assert not out.parent.exists()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "a.txt"), r"--out 'a.txt': give a name that ends in one of .csv, .json, .npz"),
        (("--out", "a"), "give a name that ends in"),
        (("--level", "1.5"), "level=1.5 must lie between 0 and 1"),
        (("--level", "nan"), "level=nan must lie between 0 and 1"),
        (("--network", "dense(hidden=[9])"), "model.safetensors"),
        (("--network", "absent_module:f"), "cannot be imported"),
    ],
)
def test_predict_with_bad_options(slimbayes, run, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "in.csv")
    done = slimbayes("predict", run, "in.csv", *words, code=1)
    assert re.search(message, done.err)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_an_output_that_cannot_be_written(slimbayes, run, tmp_path):
    table(tmp_path / "in.csv")
    (tmp_path / "out.csv").mkdir()
    slimbayes("predict", run, tmp_path / "in.csv", "--out", tmp_path / "out.csv", code=1)
    (tmp_path / "file").write_text("")
    slimbayes("predict", run, tmp_path / "in.csv", "--out", tmp_path / "file" / "out.csv", code=1)
    assert not list(tmp_path.rglob("*.partial")) and not list((tmp_path / "out.csv").iterdir())


def test_markup_in_messages_is_shown_as_it_is(slimbayes, run, tmp_path):
    done = slimbayes("predict", run, tmp_path / "a[bold]b[/bold] :car:.csv", code=1)
    assert "a[bold]b[/bold] :car:.csv" in done.err
    np.savez(tmp_path / "in.npz", inputs=np.zeros((3, 5)))
    done = slimbayes("predict", run, tmp_path / "in.npz", "--out", tmp_path / "out.csv", code=1)
    assert "are [3, 5], the model wants [N, 13]" in done.err and "\\" not in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "--data", "wein"), "wein"),
        (("compare", "--data", "absent.csv"), "absent.csv"),
        (("compare", "--methods", "Rank9"), "--methods names 'Rank9'; ready-made are Deterministic, Rank1"),
        (("compare", "-m", "Rank1(components=0)"), "components must be an integer of at least 1, got 0"),
        (("compare", "-m", "__import__('os')"), "cannot be read|unknown method"),
        (("compare", "--data", "wine", "--shifts", "fog"), "no shift 'fog' for 'wine'; choose from noise"),
        (("compare", "--config", "absent.yaml"), "no configuration file at 'absent.yaml'"),
        (("compare", "--set", "lr"), "--set 'lr': write KEY=VALUE"),
        (("compare", "--set", "lrr=3"), "unknown training setting 'lrr'; did you mean 'lr'"),
        (("compare", "--set", "lr=fast"), "lr must be a finite number above 0, got 'fast'"),
        (("compare", "--set", "lr=[1"), "the value cannot be read"),
        (("compare", "--lr", "nan"), "lr must be a finite number above 0, got nan"),
        (("compare", "--network", "wrm"), "unknown network 'wrm'; did you mean 'wrn'"),
        (("compare", "--precision", "8"), "precision='8' is unknown; use one of"),
        (("compare", "--set", "optimizer=sgd"), "set weight_decay=0 and give l2"),
        (("train", "--data", "wine", "--network", "wrn", "--quiet"), "'wrn' takes images.*use 'dense'"),
        (("train", "--validation", "2"), "validation must be a fraction between 0 and 1, got 2.0"),
        (("train", "--data", "wine", "--early-stopping", "3"), "early_stopping needs validation data"),
        (("train", "--data", "wine", "--accelerator", "abacus"), "abacus"),
        (("train", "--data", "wine", "--data-option", "splat=3"), "splat"),
        (("evaluate", "absent"), "no trained model in 'absent'.*train one: slimbayes train"),
        (("predict", "absent", "in.csv"), "no trained model in 'absent'"),
        (("report", "absent.json"), "absent.json"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_errors_are_one_line(slimbayes, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = slimbayes(*words, code=1)
    assert re.search(message, done.err), done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("results.json")) and not list(tmp_path.rglob("run.json"))


def test_files_that_are_no_results(slimbayes, tmp_path):
    for text in ("", "{", "[]", '{"format": "other"}'):
        (tmp_path / "results.json").write_text(text)
        done = slimbayes("report", tmp_path / "results.json", code=1)
        assert "results.json" in done.err
        assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_configuration_of_another_kind_names_the_file(slimbayes, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("training: {epochs: many}\n")
    assert re.search(
        "my.yaml': epochs must be a whole number", slimbayes("train", "--config", path, code=1).err
    )
    path.write_text("contenders: [Rank1]\n")
    assert "unknown entry 'contenders'" in slimbayes("train", "--config", path, code=1).err


def test_evaluate_on_data_of_another_shape(slimbayes, run, tmp_path):
    done = slimbayes("evaluate", run, "--data", "breast_cancer", "--out", tmp_path / "out", code=1)
    assert "the model was trained on" in done.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("comparr",), ("compare", "--sedes", "3"), ("compare", "--seeds", "0"), ("compare", "--seeds", "x"),
        ("train", "--epochs", "0"), ("predict",), ("predict", "run"), ("evaluate",), ("report",),
        ("train", "--draws", "-1"),
    ],
)  # fmt: skip
def test_usage_errors(slimbayes, words):
    done = slimbayes(*words, code=2)
    assert "Usage" in done.err and "Traceback" not in done.err


def test_debug_shows_the_traceback(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLIMBAYES_DEBUG", "")
    for words in (("--debug", "evaluate", "absent"), ("evaluate", "absent", "--debug")):
        monkeypatch.setattr("sys.argv", ["slimbayes", *words])
        with pytest.raises(sb.CheckpointError, match="no trained model in 'absent'"):
            main()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted; a run with a folder goes on with --resume"),
        (KeyError("x"), 70, "KeyError: 'x'; this is a defect of slimbayes: --debug shows where"),
        (MemoryError(), 1, "out of memory: lower --batch-size or --draws"),
        (PermissionError(13, "Permission denied", "a/b"), 1, "Permission denied: 'a/b'"),
        (RuntimeError("first line\n  second line\n"), 1, "first line second line"),
        (ValueError(), 1, "ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_codes(slimbayes, monkeypatch, tmp_path, error, code, message):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("slimbayes.lab.runs.train_run", fail)
    done = slimbayes("train", "--data", "wine", "--out", tmp_path, code=code)
    assert done.err.strip() == f"error: {message}"


def test_training_that_diverges(slimbayes, tmp_path):
    done = slimbayes(
        "train", "--data", "diabetes", "-m", "Deterministic", "--network", "dense(hidden=[4], norm=False)",
        "--lr", "1e30", "--set", "optimizer=sgd", "--set", "weight_decay=0", "--epochs", "2", "--out", tmp_path,
        "--quiet", code=1,
    )  # fmt: skip
    assert re.search(r"the loss is not finite at step \d+ .*lower lr=1e\+30", done.err)
    assert not (tmp_path / "run.json").exists()
    assert "has not finished" in slimbayes("evaluate", tmp_path, code=1).err


def test_own_networks_of_saved_runs_need_a_word(slimbayes, tmp_path, monkeypatch):
    (tmp_path / "network_of_the_cli_test.py").write_text(
        "from torch import nn\ndef make(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "network_of_the_cli_test:make"
    slimbayes(
        "train", "--data", "wine", "--network", own, "--steps", "2", "--out", tmp_path / "run", "--quiet"
    )
    table(tmp_path / "in.csv")
    words = ("predict", tmp_path / "run", tmp_path / "in.csv", "--out", tmp_path / "out.json")
    assert f"if you trust it, give --network '{own}'" in slimbayes(*words, code=1).err
    slimbayes(*words, "--network", own)
    assert len(json.loads((tmp_path / "out.json").read_text())) == 4
