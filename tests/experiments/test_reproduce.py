"""Every experiment with code runs at its smallest scale, is resumed where it was stopped, and measures what it says."""

import concurrent.futures
import json
import math
import multiprocessing
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.data import Scaling, Split
from slimbayes.lab.data import load as load_data
from slimbayes.lab.experiments import pool, read_result, running, session
from slimbayes.lab.experiments.catalogue import ENTRIES
from slimbayes.lab.experiments.ktied_checks import parameter_checks
from slimbayes.lab.experiments.ktied_probes import snr
from slimbayes.lab.experiments.ktied_recipes import CHOSEN, LABELS, Choice, Job, recipe, size_of, train
from slimbayes.lab.experiments.ktied_runners import KTIED
from slimbayes.lab.experiments.ktied_times import without_start
from slimbayes.lab.experiments.networks import Prepared, count_parameters
from slimbayes.lab.experiments.outcome import Table
from slimbayes.lab.experiments.results import write_result
from slimbayes.lab.experiments.runner import Task
from slimbayes.lab.experiments.running import RUNNERS, reproduce, train_for
from slimbayes.lab.experiments.session import OutOfTime, Session

SMALL = {"imagenet": "imagenet-tree", "uci/boston": "diabetes"}  # data of smoke runs, by setting
ROWS = dict.fromkeys(("mnist", "cifar100", "imdb", "resnet", "resnet-he", "snr"), LABELS)


def numbers(value):
    if isinstance(value, dict):
        return [x for item in value.values() for x in numbers(item)]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [value] if isinstance(value, float) else []


ELSEWHERE = (
    "emp/table3",
    "rank1/theorem1",
)  # run at this scale by test_emp_counts and test_rank1_untrained, seconds each


@pytest.mark.parametrize("paper", dict.fromkeys(name.split("/")[0] for name in RUNNERS))
def test_every_experiment_with_code_runs_at_smoke_scale(paper, tmp_path):
    for name in (name for name in RUNNERS if name.startswith(f"{paper}/") and name not in ELSEWHERE):
        entry = ENTRIES[name]
        assert not entry.needs, f"{name} has code"
        path = reproduce(name, "smoke", tmp_path / "results", tmp_path / "work", progress=False)
        document = read_result(path)
        assert document["experiment"] == name and document["scale"] == "smoke"
        found = {table["name"]: table for table in document["tables"]}
        assert found or document["maps"], name
        wanted = {table.name for table in entry.printed}
        assert wanted <= set(found), name
        for table in document["tables"]:
            ours = name.startswith("ktied/") and name not in ("ktied/local", "ktied/compress")
            if ours and table["name"] in ROWS:
                assert [row["label"] for row in table["rows"]] == list(ROWS[table["name"]]), name
            for row in table["rows"]:
                assert set(row["values"]) <= set(table["columns"]) and row["values"], (name, row["label"])
        assert all(
            math.isfinite(x) for part in ("tables", "curves", "maps") for x in numbers(document[part])
        ), name
        provenance = document["provenance"]
        assert {"command", "commit", "hardware", "seconds", "versions", "fingerprints", "seeds"} <= set(
            provenance
        )
        if RUNNERS[name].jobs:
            small = {SMALL.get(setting, "digits") for setting in document["settings"]}
            assert document["runs"] and small and set(provenance["fingerprints"]) == small, name
            assert any("only a test that the code runs" in text for text in document["deviations"]), name


def test_counts_keep_their_digits(tmp_path):
    from slimbayes.lab.experiments import write_result

    table = {"name": "t", "title": "T", "columns": ["parameters", "nll"]}
    table["rows"] = [
        {"label": "x", "values": {"parameters": [9_814_026.0], "nll": [0.123456789]}, "errors": {}}
    ]
    parts = {part: [] for part in ("curves", "maps", "checks", "deviations", "runs")}
    document = {"format": "slimbayes-experiment", "version": 1, "experiment": "ktied/table5", "scale": "desk"}
    path = write_result({**document, "tables": [table], **parts, "provenance": {}}, tmp_path)
    assert read_result(path)["tables"][0]["rows"][0]["values"] == {
        "parameters": [9_814_026.0],
        "nll": [0.123457],
    }
    table["rows"][0]["values"]["nll"] = [math.inf]  # JSON has no word for it
    path = write_result({**document, "tables": [table], **parts, "provenance": {}}, tmp_path)
    assert read_result(path)["tables"][0]["rows"][0]["values"]["nll"] == [None]


def test_entries_without_code_say_what_they_need(monkeypatch):
    assert set(ENTRIES) == set(RUNNERS)
    monkeypatch.delitem(RUNNERS, "rank1/table4")
    monkeypatch.setitem(ENTRIES, "rank1/table4", replace(ENTRIES["rank1/table4"], needs="a runner"))
    with pytest.raises(ValueError, match="cannot be run yet; it needs a runner"):
        reproduce("rank1/table4")
    with pytest.raises(ValueError, match="the closest are ktied/table2"):
        reproduce("ktied/tabel2")


def tables(path):
    return json.loads(path.read_text())["tables"]


def test_a_stopped_experiment_goes_on_to_the_same_result(tmp_path, monkeypatch):
    options = {"only": ("mnist",), "progress": False}
    whole = reproduce("ktied/table2", "smoke", tmp_path / "a", tmp_path / "a-work", **options)
    calls = iter(range(1000))
    trained = []

    def stop(self, work=""):
        if next(calls) == 4:
            raise OutOfTime("spent")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "check_time", stop)
        with pytest.raises(OutOfTime):
            reproduce("ktied/table2", "smoke", tmp_path / "b", tmp_path / "b-work", **options)
    assert not list((tmp_path / "b").rglob("*.json")), "no result of half an experiment"
    fit = session.fit

    def counted(model, data, *rest, **more):
        result = fit(model, data, *rest, **more)
        trained.append(len(result.history))
        return result

    monkeypatch.setattr(session, "fit", counted)
    again = reproduce("ktied/table2", "smoke", tmp_path / "b", tmp_path / "b-work", **options)
    assert tables(again) == tables(whole) and len(trained) == 1
    reproduce("ktied/table2", "smoke", tmp_path / "b", tmp_path / "b-work", **options)
    assert len(trained) == 1, "what is trained is used again"


def test_a_spent_budget_stops_before_anything_is_trained(tmp_path):
    with pytest.raises(OutOfTime, match="goes on where it stopped"):
        reproduce("ktied/table2", "smoke", tmp_path, tmp_path / "work", budget=0.0, progress=False)


def test_networks_are_told_apart_by_everything_that_made_them(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    job = Job("mnist", "by-nll", "2-tied", 0)
    one = train(small, job)
    others = [
        Job("mnist", "by-nll", "2-tied", 1),
        Job("mnist", "by-nll", "3-tied", 0),
        Job("mnist", "by-nll", "2-tied", 0, estimator="local"),
        Job("mnist", "by-nll", "2-tied", 0, Choice(2e-3, 0.3, 5e-6)),
    ]
    folders = {train(small, other).folder for other in others}
    assert one.folder not in folders and len(folders) == len(others)
    assert train(small, job).folder == one.folder


def test_a_process_of_several_trains_what_one_does(tmp_path, monkeypatch):
    """What a process of the pool does, here in this one: starting some takes longer than the work."""
    turn = multiprocessing.get_context("spawn").Value("i", 0)
    options = {"scale": "smoke", "data_root": None, "seeds": 1, "budget": None, "only": ("mnist",)}
    monkeypatch.setattr(pool.signal, "signal", lambda *rest: None)
    threads = torch.get_num_threads()
    for gpu in ("3", "5"):  # each takes the next that is visible
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        pool._prepare({**options, "work": str(tmp_path / "together")}, turn, 2, threads)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    job = Job("mnist", "converged", "Mean-field", 0)
    assert pool._work(Task(KTIED, job)) > 0
    together, alone = (
        train(Session("smoke", tmp_path / name, progress=False), job) for name in ("together", "alone")
    )
    assert (together.folder / "measured.json").exists()
    for one, other in zip(
        together.model.state_dict().values(), alone.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other)


class Pool:
    """A pool of processes that is this process."""

    def __init__(self, *arguments):
        self.given = arguments

    def submit(self, function, job):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(job))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options):
        pass


def test_training_together_tells_time_from_faults(monkeypatch):
    jobs = [Task(KTIED, Job("mnist", "by-nll", label, 0)) for label in LABELS]
    said = []
    monkeypatch.setattr(pool.concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(pool, "_work", lambda task: 1.0)
    pool.work_together(jobs, {}, 2, said.append)
    assert len(said) == 4 and said[0].startswith("1/4 mnist by-nll")

    def late(task):
        if task.job.label == "2-tied":
            raise OutOfTime("spent")
        return 1.0

    monkeypatch.setattr(pool, "_work", late)
    with pytest.raises(OutOfTime):
        pool.work_together(jobs, {}, 2, said.append)
    assert len(said) == 7, "the others were trained"
    monkeypatch.setattr(pool, "_work", lambda task: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.work_together(jobs, {}, 2, said.append)


def test_networks_of_several_experiments_are_trained_once(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(running, "work_together", lambda tasks, *rest: seen.extend(tasks))
    train_for(
        ["ktied/table2", "ktied/figure3", "ktied/figure5", "ktied/time"], 2, scale="smoke", work=str(tmp_path)
    )
    assert [task.job.setting for task in seen] == ["imdb", "resnet", "cifar100", "mnist"], (
        "the longest first, none to be timed"
    )


@pytest.fixture
def tiny():
    digits = load_data("digits")
    scaling = Scaling((0.5,), (0.5,), 1 / 255)
    data = sb.data.Dataset("digits", "classification", "image", digits.train[:100], digits.test[:60], scaling,
                           digits.classes)  # fmt: skip
    return Prepared(data, digits.train[100:150])


def test_measured_figures_are_those_of_their_definitions(tmp_path, tiny):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), sb.MeanField(stddev_init=0.3))
    figures, errors = Session("smoke", tmp_path).measure(model, tiny, samples=5, seed=3)
    x, y = tiny.data.scaling(tiny.data.test.inputs), tiny.data.test.targets
    with torch.no_grad():
        draws = sb.draw(model, x, samples=5, noise="shared", seed=3).double()
    each = -draws.log_softmax(-1)[:, torch.arange(60), y]  # [5, 60]
    mixture = -(draws.softmax(-1)[:, torch.arange(60), y].mean(0)).log()
    p = draws.softmax(-1).mean(0)
    brier = p.square().sum(-1) - 2 * p[torch.arange(60), y]
    assert figures["neg_elbo"] == pytest.approx(float(each.mean() + sb.kl(model).detach() / 100), rel=1e-5)
    assert figures["nll"] == pytest.approx(float(mixture.mean()), rel=1e-5)
    assert figures["brier"] == pytest.approx(float(brier.mean()), rel=1e-4)
    assert figures["accuracy"] == pytest.approx(100 * float((p.argmax(-1) == y).double().mean()))
    assert errors["nll"] == pytest.approx(float(mixture.std() / 60**0.5), rel=1e-4)
    assert errors["neg_elbo"] == pytest.approx(float(each.mean(0).std() / 60**0.5), rel=1e-4)


def test_snr_leaves_out_what_only_the_kl_moves(tiny):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    with torch.no_grad():
        network[1].bias[:3] = -1e3  # dead units: a quarter of the next layer's inputs
    model = sb.bayesianize(network, sb.MeanField(stddev_init=0.01))
    found = snr(model, tiny, "3", 32, seed=0)
    assert found["constant"] == pytest.approx(0.25) and 1.0 <= found["snr"] <= found["snr_mean"] < 1e6
    assert 1.0 <= found["snr_pooled"] < 1e6
    tied = sb.bayesianize(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)), sb.KTied(2)
    )
    assert snr(tied, tiny, "3", 32, seed=0)["constant"] < 0.1


def test_running_statistics_count_as_the_paper_counts_them():
    network = sb.bayesianize(sb.models.TFPResNet(), sb.MeanField(biases=False, estimator="flipout"))
    assert count_parameters(network) == 9_814_026


@pytest.mark.parametrize(
    ("setting", "label", "count"),
    [("mnist", "Mean-field", 956_820), ("mnist", "3-tied", 486_402), ("cifar100", "2-tied", 2_267_408)],
)
def test_recipes_have_the_papers_parameters(tmp_path, setting, label, count):
    made = recipe(Session("paper", tmp_path), setting, "by-nll", label)
    shape = (1, 28, 28) if setting == "mnist" else (3, 32, 32)
    assert count_parameters(made.build(shape, 10 if setting == "mnist" else 100, seed=0)) == count
    assert made.training.epochs == 300 and made.training.batch_size == 1024 and made.training.kl_every == 100


def test_shortened_runs_anneal_as_much_faster(tmp_path):
    desk, paper = (
        recipe(Session(s, tmp_path), "mnist", "by-nll", "2-tied").training for s in ("desk", "paper")
    )
    assert desk.kl_coefficient * desk.epochs == pytest.approx(paper.kl_coefficient * paper.epochs)


def test_chosen_hyperparameters_won_the_sweep(repository):
    document = read_result(repository / "results" / "ktied" / "tuning.gpu.json")
    tables = [(table, *table["name"].split("-", 1)) for table in document["tables"]]
    tables.append((tables[0][0], "mnist", "by-elbo"))
    for table, setting, purpose in tables:
        metric = "nll" if purpose == "by-nll" else "neg_elbo"
        best = {}  # prior -> label -> (value, winner)
        for row in table["rows"]:
            label, *words = row["label"].split(", ")
            schedule = words.pop() if words[-1] in ("cosine", "steps") else "constant"
            found = {name: float(x) for name, x in (word.split() for word in words)}
            found["schedule"] = schedule
            rows = best.setdefault(found["prior"], {})
            rows[label] = min(
                rows.get(label, (math.inf,)), (row["values"][metric][0], found), key=lambda one: one[0]
            )
        winners = min(best.values(), key=lambda rows: sum(value for value, _ in rows.values()))
        for label, (_, winner) in winners.items():
            chosen = CHOSEN[setting, purpose, label]
            assert (chosen.lr, chosen.prior) == (winner["lr"], winner["prior"]), (table["name"], label)
            assert (chosen.coefficient, chosen.schedule) == (winner.get("coefficient"), winner["schedule"])
        assert len({CHOSEN[key].prior for key in CHOSEN if key[:2] == (setting, purpose)}) == 1


@pytest.fixture
def repository(request):
    return request.config.rootpath


def test_tables_are_selected_and_derived_by_seed():
    table = Table("t", "T", ("a", "b"))
    table.add("x", {"a": 1.0, "b": 2.0}, {"a": 0.1})
    table.add("x", {"a": 3.0, "b": 4.0}, {"a": 0.3})
    table.derive("c", lambda values: values["a"] / values["b"])
    row = table.select("a", "c").document()["rows"][0]
    assert row == {
        "label": "x",
        "values": {"a": [1.0, 3.0], "c": [0.5, 0.75]},
        "errors": {"a": pytest.approx(0.2)},
    }


def test_the_validation_examples_are_the_last_and_not_trained_on(tmp_path):
    one = Session("smoke", tmp_path).prepared("digits", Scaling((0.0,), (1.0,), 1 / 255), 200)
    raw = load_data("digits")
    assert one.num_train == len(raw.train) - 200 and len(one.validation) == 200
    assert torch.equal(one.validation.inputs, raw.train.inputs[-200:])
    assert torch.equal(one.data.test.inputs, raw.test.inputs)


def test_the_mean_image_is_the_training_datas(tmp_path):
    one = Session("smoke", tmp_path).prepared("digits", pixel_mean=True)
    assert isinstance(one.validation, Split) and one.data.scaling == Scaling((0.0,), (1.0,))
    assert float(one.data.train.inputs.mean(0).abs().max()) < 1e-6
    raw = load_data("digits")
    mean = raw.train.inputs.double().mean(0) / 255
    torch.testing.assert_close(
        one.data.test.inputs.double(), raw.test.inputs.double() / 255 - mean, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(("options", "words"), [({"scale": "huge"}, "scale='huge' is unknown"), ({}, None)])
def test_sessions_check_their_scale(tmp_path, options, words):
    if words is None:
        assert size_of("resnet-he", Session("gpu", tmp_path).scale).epochs == 50
        with pytest.raises(ValueError, match="leaves nothing of mnist"):
            Session("smoke", tmp_path, only=("resnet",)).chosen("mnist")
        return
    with pytest.raises(ValueError, match=words):
        Session(work=tmp_path, **options)


def test_a_result_of_some_settings_is_joined_to_one_of_more(tmp_path):
    options = {"results": tmp_path / "results", "work": tmp_path / "work", "progress": False}
    path = reproduce("ktied/figure4", "smoke", **options)
    before = read_result(path)
    assert list(before["settings"]) == ["cifar100", "mnist"]  # the paper's order
    assert [part["setting"] for part in before["maps"]] == ["cifar100", "mnist"]
    before["maps"][0]["title"] = before["maps"][1]["title"] = "kept"
    before["deviations"] += ["cifar100: from a cloudy day.", "mnist: from a sunny day."]
    write_result(before, tmp_path / "results")
    assert reproduce("ktied/figure4", "smoke", only=("mnist",), **options) == path
    after = read_result(path)
    assert list(after["settings"]) == ["cifar100", "mnist"] and len(after["runs"]) == 2
    assert [part["title"] == "kept" for part in after["maps"]] == [True, False]
    said = after["deviations"]
    assert "cifar100: from a cloudy day." in said and len(said) == len(set(said))
    assert all(text.startswith(("mnist: ", "cifar100: ")) for text in said)
    assert not any("sunny" in text or "not run" in text for text in said)
    made = after["provenance"]
    assert made["command"].endswith("--only mnist") and list(made["joined"]) == ["cifar100"]
    assert made["joined"]["cifar100"]["created"] == before["provenance"]["created"]
    # again: the kept part goes on naming the call that made it
    reproduce("ktied/figure4", "smoke", only=("mnist",), **options)
    assert read_result(path)["provenance"]["joined"] == made["joined"]
    assert "joined" not in read_result(reproduce("ktied/figure4", "smoke", **options))["provenance"]


def test_what_cannot_be_joined_is_not_replaced(tmp_path):
    options = {"results": tmp_path / "results", "work": tmp_path / "work", "progress": False}
    path = reproduce("ktied/figure4", "smoke", **options)
    document = read_result(path)
    del document["maps"][0]["setting"]
    write_result(document, tmp_path / "results")
    before = path.read_text()
    with pytest.raises(ValueError, match="also holds cifar100, but not which of its parts are theirs"):
        reproduce("ktied/figure4", "smoke", only=("mnist",), **options)
    assert path.read_text() == before
    with pytest.raises(ValueError, match="leaves nothing of resnet"):
        reproduce("ktied/figure11", "smoke", only=("mnist",), **options)


def test_a_fault_in_a_probe_leaves_no_gap(tmp_path, monkeypatch):
    small = Session("smoke", tmp_path, progress=False)
    job = Job("mnist", "probed", "2-tied", 0)
    measure = Session.measure

    def failing(self, *rest, **more):
        if len(json.loads(probes.read_text())) == 1 if probes.exists() else False:
            raise KeyboardInterrupt
        return measure(self, *rest, **more)

    folder = train(Session("smoke", tmp_path / "whole", progress=False), job).folder
    probes = tmp_path / folder.relative_to(tmp_path / "whole") / "probes.json"
    with monkeypatch.context() as patch:
        patch.setattr(Session, "measure", failing)
        with pytest.raises(KeyboardInterrupt):
            train(small, job)
    found = train(small, job).probes
    assert list(found) == ["4", "8", "12", "16", "20"]
    whole = json.loads((folder / "probes.json").read_text())
    assert [found[step]["neg_elbo"] for step in found] == pytest.approx(
        [whole[step]["neg_elbo"] for step in whole]
    )


@pytest.mark.parametrize("damage", ["run.json", "probes.json", "training.safetensors", "measured.json"])
@pytest.mark.parametrize("content", ["[]", "{}", None])
def test_damaged_work_is_made_again(tmp_path, damage, content):
    small = Session("smoke", tmp_path, progress=False)
    job = Job("mnist", "converged", "Mean-field", 0)
    first = train(small, job)
    prepared = small.prepared("digits", Scaling((0.5,), (0.5,), 1 / 255), 200)
    figures = small.figures(first, "trained", prepared, 2)
    path = first.folder / damage
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    again = train(small, job)
    assert again.steps == first.steps and list(again.probes) == list(first.probes)
    assert small.figures(again, "trained", prepared, 2)[0] == pytest.approx(figures[0])


def test_what_was_measured_of_other_weights_is_measured_again(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    found = train(small, Job("mnist", "by-nll", "2-tied", 0))
    prepared = small.prepared("digits", Scaling((0.5,), (0.5,), 1 / 255), 200)
    before = small.figures(found, "trained", prepared, 2)[0]
    with torch.no_grad():
        found.model.output.bias += 1.0
        found.model.output.bias[0] += 5.0
    assert small.figures(found, "trained", prepared, 2)[0] == before, "kept"
    sb.save(found.model, found.folder / "model.safetensors")
    assert small.figures(found, "trained", prepared, 2)[0]["nll"] > before["nll"]


def test_other_preparations_are_other_networks(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    job = Job("mnist", "by-nll", "2-tied", 0)
    made = recipe(small, "mnist", "by-nll", "2-tied")
    one = train(small, job)
    other = small.trained(made, small.prepared("digits", Scaling((0.5,), (0.5,), 1 / 255), 100), 0)
    assert one.folder != other.folder
    (one.folder / "model.safetensors").unlink()
    with pytest.raises(sb.CheckpointError, match="delete the folder to train again"):
        train(small, job).parameters  # noqa: B018 - a property that reads the file


@pytest.mark.parametrize(
    ("options", "words"), [({"seeds": 0}, "give at least 1"), ({"budget": -1.0}, "give seconds, at least 0")]
)
def test_sessions_check_their_numbers(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        Session("smoke", tmp_path, **options)


def test_the_callers_settings_come_back(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    reproduce("ktied/table4", "smoke", tmp_path, tmp_path, progress=False)
    assert torch.equal(torch.get_rng_state(), state)


def rows(**counts):
    table = Table("mnist", "MNIST", ("parameters",))
    for label, number in counts.items():
        table.add(label.replace("_", "-"), {"parameters": float(number)}, {})
    return table


def test_parameter_columns_are_compared_with_the_print(tmp_path):
    session = Session("gpu", tmp_path)
    table = rows(Mean_field=956_820)
    table.rows["2-tied"] = rows(x=483_400).rows["x"]
    first, second = parameter_checks(session, "ktied/figure6", table)
    assert first["holds"] and first["bound"] == "957 thousand" and first["value"] == 956_820
    assert not second["holds"] and "2-tied" in second["what"]  # 483 thousand, 484 in print
    assert parameter_checks(Session("smoke", tmp_path), "ktied/figure6", table) == []


def test_a_misprint_is_named_and_the_count_is_checked(tmp_path):
    table = rows(x=2_267_408)
    table.name = "cifar100"
    table.rows = {"2-tied": table.rows["x"]}
    (found,) = parameter_checks(Session("gpu", tmp_path), "ktied/figure6", table)
    assert found["holds"] and "the paper prints 2,268 thousand" in found["what"]
    table.rows["2-tied"].values["parameters"] = [2_268_000.0]
    assert not parameter_checks(Session("gpu", tmp_path), "ktied/figure6", table)[0]["holds"]


def test_parameters_printed_in_full_must_be_equal(tmp_path):
    table = rows(Mean_field=9_814_026)
    table.name = "resnet"
    assert parameter_checks(Session("gpu", tmp_path), "ktied/table5", table)[0]["holds"]
    table.rows["Mean-field"].values["parameters"] = [9_814_027.0]
    assert not parameter_checks(Session("gpu", tmp_path), "ktied/table5", table)[0]["holds"]


def test_seeds_that_are_asked_for_are_all_run(tmp_path):
    jobs = RUNNERS["ktied/by-elbo"].jobs[0](Session("gpu", tmp_path))
    assert {job.seed for job in jobs} == {0, 1, 2}
    for name in ("ktied/by-elbo", "ktied/local", "ktied/figure7", "ktied/figure6"):
        plans = RUNNERS[name].jobs
        jobs = [job for plan in plans for job in plan(Session("gpu", tmp_path, seeds=5))]
        assert {job.seed for job in jobs} == set(range(5)), name


def test_the_start_is_not_training_time():
    """The first reading came late: a GPU started, a step was recorded."""
    assert without_start([250, 500, 1000], [4.5, 4.75, 5.25]) == pytest.approx([0.25, 0.5, 1.0])
    assert without_start([250, 500], [0.2, 0.5]) == [0.2, 0.5], "a quick start is no credit"
    assert without_start([250], [4.5]) == [4.5]
