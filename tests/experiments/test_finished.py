"""Reports of what a work folder holds: those of the run that trained, without weights, and what is missing is said."""

import json
import shutil

import pytest
import torch
from helpers_cli import runner

from slimbayes.lab.experiments import rank1_recipes, read_result
from slimbayes.lab.experiments.finished import Unfinished, trained_on
from slimbayes.lab.experiments.rank1_recipes import BATCH_ENSEMBLE, GAUSSIAN, MAIN, jobs_of, recipe
from slimbayes.lab.experiments.running import reproduce
from slimbayes.lab.experiments.session import MEASURED, Session

ENTRY = "rank1/figure5"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two networks of seed 0 and two of seed 1, and the report of the call that trained them."""
    folder = tmp_path_factory.mktemp("made")
    path = reproduce(
        ENTRY, "smoke", folder / "results", folder / "work", seeds=2, progress=False, only=(MAIN,)
    )
    return folder / "work", read_result(path)


@pytest.fixture
def work(made, tmp_path):
    """What travels: everything but the weights."""
    shutil.copytree(made[0], tmp_path / "work", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "work"


def report(work, **options):
    path = reproduce(
        ENTRY, "smoke", work.parent / "results", work, seeds=2, progress=False, only=(MAIN,), finished=True, **options
    )  # fmt: skip
    return read_result(path)


def folder_of(work, label, seed):
    slug = label.lower().replace(" ", "-")
    (found,) = (work / MAIN / "trained").glob(f"{slug}-{seed}-*")
    return found


def test_a_report_without_weights_is_that_of_the_run(made, work):
    found, wanted = report(work, jobs=4), made[1]
    for part in ("tables", "curves", "checks", "settings"):
        assert found[part] == wanted[part], part
    assert sorted(found["runs"], key=str) == sorted(wanted["runs"], key=str)
    before, after = wanted["provenance"], found["provenance"]
    assert after["command"] == f"{before['command']} --finished"
    assert after["hardware"] == before["hardware"] and after["commit"] == before["commit"]
    assert after["reported"]["hardware"] and not list(work.rglob("*.safetensors"))


def test_networks_that_are_not_finished_are_left_out_and_named(made, work):
    (folder_of(work, BATCH_ENSEMBLE, 1) / "run.json").unlink()
    found = report(work)
    assert found["deviations"][0] == f"{MAIN}: not finished, and left out: {BATCH_ENSEMBLE} seed 1."
    rows = {row["label"]: row["values"]["nll"] for row in found["tables"][0]["rows"]}
    before = {row["label"]: row["values"]["nll"] for row in made[1]["tables"][0]["rows"]}
    assert rows[GAUSSIAN] == before[GAUSSIAN] and rows[BATCH_ENSEMBLE] == before[BATCH_ENSEMBLE][:1]
    assert len(found["runs"]) == 3 and not list(work.rglob("*.safetensors"))


def test_what_was_not_measured_is_said_and_not_measured_now(work):
    (folder_of(work, GAUSSIAN, 0) / MEASURED).unlink()
    with pytest.raises(
        Unfinished, match=f"'clean, .*' of {MAIN} {GAUSSIAN} seed 0 is not in .*nothing is trained"
    ):
        report(work)
    assert not (folder_of(work, GAUSSIAN, 0) / MEASURED).exists()


def test_a_folder_without_finished_networks_is_an_error(tmp_path):
    with pytest.raises(Unfinished, match=f"{ENTRY}: .*empty' holds no finished network of {MAIN}"):
        report(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_entries_that_need_every_network_name_the_first_that_is_missing(tmp_path):
    with pytest.raises(Unfinished, match=r"mnist converged Mean-field seed 0 is not in .*nothing is trained"):
        reproduce(
            "ktied/table2", "smoke", tmp_path, tmp_path / "w", progress=False, only=("mnist",), finished=True
        )


def test_the_command_fails_for_good_where_something_is_missing(monkeypatch, capsys, work):
    """Not with the code of a spent budget: a loop that goes on while it sees that one would never end."""
    run = runner(monkeypatch, capsys)
    words = (
        "reproduce",
        ENTRY,
        "--seeds",
        2,
        "--only",
        MAIN,
        "--work",
        work,
        "--results",
        work.parent / "r",
        "--finished",
    )
    run(*words, code=0)
    (folder_of(work, GAUSSIAN, 1) / MEASURED).unlink()
    assert f"{GAUSSIAN} seed 1" in " ".join(run(*words, code=1).err.split())


def test_networks_of_a_gpu_are_found_where_there_is_none(work):
    """Recipes name the precision and the device of training, and folders are named by recipes."""
    gpu = Session("smoke", work, progress=False, finished=torch.device("cuda"))
    for label in (GAUSSIAN, BATCH_ENSEMBLE):
        old, training = folder_of(work, label, 0), recipe(gpu, MAIN, label).training.to_dict()
        assert training["precision"] == "bf16-mixed"
        known = json.loads((old / "run.json").read_text())
        known["facts"]["training"] = training
        old.rename(gpu._folder(recipe(gpu, MAIN, label), 0, known["facts"]))
        (folder_of(work, label, 0) / "run.json").write_text(json.dumps(known))
        shutil.rmtree(folder_of(work, label, 1))
    # Another entry's network of a CPU lies beside them, and the folder's first is no guide.
    other = {"facts": {"training": {"accelerator": "cpu"}}}
    (work / "a" / "b").mkdir(parents=True)
    (work / "a" / "b" / "run.json").write_text(json.dumps(other))
    assert trained_on(work) == [torch.device("cpu"), torch.device("cuda")]
    found = report(work)
    assert {row["label"] for row in found["tables"][0]["rows"]} == {GAUSSIAN, BATCH_ENSEMBLE}
    assert len(found["runs"]) == 2
    assert any("bfloat16" in text for text in found["deviations"])


def test_only_a_report_looks_for_finished_networks(work):
    everything = jobs_of(Session("smoke", work, progress=False), MAIN)
    there = jobs_of(Session("smoke", work, progress=False, finished=torch.device("cpu")), MAIN)
    assert len(everything) == len(rank1_recipes.rows_of(MAIN))
    assert {job.label for job in there} == {GAUSSIAN, BATCH_ENSEMBLE}
    left_out = Session("smoke", work, progress=False, finished=torch.device("cpu"), only=("cifar100",))
    assert jobs_of(left_out, MAIN) == everything and not left_out.missing


def test_table_8_has_what_was_measured_of_it(tmp_path):
    folder, work = tmp_path / "results", tmp_path / "work"
    options = {"progress": False, "only": (MAIN,)}
    whole = read_result(reproduce("rank1/table8", "smoke", folder, work, **options))
    path = next((work / MAIN / "trained").glob("rank-1-gaussian-0-*")) / MEASURED
    known = json.loads(path.read_text())
    dropped = [key for key in known if key.startswith("corrupted") and ", 2 samples" in key]
    assert dropped  # four and 25 samples are two at this scale
    path.write_text(json.dumps({key: value for key, value in known.items() if key not in dropped}))
    found = read_result(reproduce("rank1/table8", "smoke", folder, work, finished=True, **options))
    labels = [row["label"] for row in found["tables"][0]["rows"]]
    assert "1 sample" in labels and not {"4 samples", "25 samples"} & set(labels)
    assert {"4 samples", "25 samples"} < {row["label"] for row in whole["tables"][0]["rows"]}
    said = f"{MAIN}: {dropped[0]!r} of {MAIN} {GAUSSIAN} seed 0 is not in the work folder"
    assert any(text.startswith(said) for text in found["deviations"])
