"""The comparison: its results against numbers made by hand, kept runs, several processes, trained runs alike."""

import dataclasses
import json
import math
import multiprocessing

import pytest
import torch

import slimbayes as sb
from slimbayes.lab.compare import Bench, compare, evaluate_run
from slimbayes.lab.compare.bench import spread
from slimbayes.lab.config import CompareConfig, Contender, RunConfig
from slimbayes.lab.data import DataError
from slimbayes.lab.report import read_results, write_report, write_results
from slimbayes.lab.runs import make_model, train_run
from slimbayes.training import Training, TrainingError, fit

pytestmark = pytest.mark.usefixtures("on_cpu")


WINE = CompareConfig(
    data="wine",
    network="dense(hidden=[8])",
    contenders=(
        Contender("plain", "Deterministic()"),
        Contender("Rank1(components=2)", "Rank1(components=2)", {"kl_weight": 0.1}),
    ),
    seeds=(0, 3),
    draws=6,
    shifts=("noise", "covariate"),
    severities=(1, 4),
    max_test=30,
    training=Training(epochs=4, lr=0.02, batch_size=31),
)
CLASS_METRICS = {
    "nll", "gibbs_nll", "accuracy", "ece", "ece_20", "mce", "adaptive_ece", "brier", "aurc", "entropy",
    "mutual_information", "examples",
}  # fmt: skip
REAL_METRICS = {
    "nll", "log_predictive_density", "rmse", "mae", "coverage_90", "width_90", "variance", "epistemic", "examples",
}  # fmt: skip


def run_it(config, **options):
    return compare(config, progress=False, **options)


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wine")
    said = []
    return run_it(WINE, folder=folder, say=said.append), folder, said


def test_the_schema(wine):
    results, _, said = wine
    assert json.loads(json.dumps(results, allow_nan=False)) == results  # plain, finite values
    assert (results["format"], results["version"], results["task"]) == (
        "slimbayes-results",
        1,
        "classification",
    )
    assert results["title"] == "wine: 2 methods, 2 seeds" and results["network"] == "dense(hidden=[8])"
    dataset = results["dataset"]
    assert dataset["name"] == "wine" and dataset["kind"] == "table" and dataset["shape"] == [13]
    assert dataset["num_test"] == 30 and dataset["num_train"] == len(sb.data.load("wine").train)
    assert (
        len(dataset["classes"]) == 3 and len(dataset["features"]) == 13 and len(dataset["fingerprint"]) == 16
    )
    assert [s["name"] for s in results["shifts"]] == ["noise", "covariate"]
    assert all(s["severities"] == [1, 4] and s["description"] for s in results["shifts"])
    assert {"command", "commit", "seeds", "versions", "hardware", "wall_seconds", "config"} <= set(
        results["provenance"]
    )
    assert results["provenance"]["seeds"] == [0, 3] and results["provenance"]["config"] == WINE.to_dict()
    assert [(m["name"], m["label"]) for m in results["methods"]] == [
        ("Deterministic", "plain"), ("Rank1", "Rank1(components=2)"),
    ]  # fmt: skip
    assert len(said) == 4 and said[0].startswith("[1/4] plain, seed 0: NLL ")


def test_the_methods(wine):
    plain, rank1 = wine[0]["methods"]
    base = 13 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    assert plain["parameters"] == plain["base_parameters"] == rank1["base_parameters"] == base
    assert plain["overhead"] == 0.0 and plain["draws"] == 1 and rank1["draws"] == 6
    assert rank1["overhead"] == pytest.approx(rank1["parameters"] / base - 1)
    assert rank1["settings"] == {"method": "Rank1(components=2)", "kl_weight": 0.1}


def test_the_runs(wine):
    for method in wine[0]["methods"]:
        metrics = CLASS_METRICS | ({"disagreement"} if method["name"] == "Rank1" else set())
        assert [run["seed"] for run in method["runs"]] == [0, 3]
        for run in method["runs"]:
            assert set(run["clean"]) == metrics and run["clean"]["examples"] == 30
            assert {name: set(rows) for name, rows in run["shifted"].items()} == {
                "noise": {"1", "4"}, "covariate": {"1", "4"},
            }  # fmt: skip
            # Of 30 rows no bin need have five, and then there is no ECE of bins with as many.
            assert all(
                metrics - {"ece_20"} <= set(m) <= metrics
                for rows in run["shifted"].values()
                for m in rows.values()
            )
            for where, count in (("clean", 30), ("shifted", 120)):
                assert sum(run["reliability"][where]["count"]) == count
                assert sum(run["entropy"][where]) == count
            assert run["entropy"]["edges"][-1] == pytest.approx(math.log(3))
            assert [row["step"] for row in run["history"]] == [4, 8, 12, 16]
            assert run["train_seconds"] > 0 and run["predict_seconds"] > 0
            places = [(point["shift"], point["severity"]) for point in run["disagreement"]]
            expected = [("clean", 0), *((s, v) for s in ("noise", "covariate") for v in (1, 4))]
            assert places == (expected if method["name"] == "Rank1" else [])
        assert "examples" in method["runs"][0] and "examples" not in method["runs"][1]
        weights = [run["clean"]["nll"] for run in method["runs"]]
        assert weights[0] != weights[1]  # the seeds do matter


def test_the_examples(wine):
    test = sb.data.load("wine").test
    classes = wine[0]["dataset"]["classes"]
    for method in wine[0]["methods"]:
        examples = method["runs"][0]["examples"]
        least, most = ([e["entropy"] for e in examples[kind]] for kind in ("least", "most"))
        assert least == sorted(least, reverse=True) and most == sorted(most) and least[-1] >= most[-1]
        for entry in (e for entries in examples.values() for e in entries):
            assert entry["target"] == classes[int(test.targets[entry["index"]])]
            assert list(entry["features"].values()) == test.inputs[entry["index"]].tolist()
            p = torch.tensor(entry["probabilities"])
            assert classes[int(p.argmax())] == entry["prediction"]
            # From another call: the noise is keyed by the example, so the numbers agree.
            assert float(p.max()) == pytest.approx(entry["confidence"], rel=1e-4)
            assert float(-(p * p.log()).sum()) == pytest.approx(entry["entropy"], rel=1e-3, abs=1e-5)
        assert all(e["target"] != e["prediction"] for e in examples.get("wrong", ()))


def test_validation_rows_are_measured_apart(wine):
    """The rows that ``fit`` held out, clean and shifted, by hand; without a fraction there are none."""
    assert "validation" not in wine[0]["methods"][0]["runs"][0]
    config = dataclasses.replace(WINE, validation=0.25, contenders=WINE.contenders[:1], max_test=None)
    bench = Bench(config, sb.data.load("wine"), None)
    run = bench.measure(config.contenders[0], 3, False, "")["run"]
    held = run["validation"]
    assert {name: set(rows) for name, rows in held["shifted"].items()} == {
        "noise": {"1", "4"}, "covariate": {"1", "4"},
    }  # fmt: skip
    assert held["clean"]["nll"] == pytest.approx(run["history"][-1]["validation_nll"], rel=1e-4)
    assert held["clean"]["nll"] != run["clean"]["nll"]
    assert held["shifted"]["noise"]["4"]["nll"] != held["clean"]["nll"]


def test_one_cell_by_hand(wine):
    """Train the same model with the library's parts and score it with plain torch."""
    data = sb.data.load("wine")
    config = RunConfig("wine", {}, WINE.network, "Rank1(components=2)", None, 6, WINE.training)
    model = make_model(config, (13,), 3, seed=3)
    fit(model, data, WINE.training, seed=3, kl_weight=0.1, progress=False)
    shift = next(s for s in sb.data.shifts_for(data) if s.name == "noise")
    split = shift.apply(data.test[spread(len(data.test), 30)], 4, seed=7)
    draws = sb.predict(
        model, data.scaling(split.inputs), samples=3, seed=7, noise="shared"
    ).draws  # [6, 30, 3]
    p = draws.double().softmax(-1)[:, torch.arange(30), split.targets]  # [6, 30]
    found = wine[0]["methods"][1]["runs"][1]["shifted"]["noise"]["4"]
    assert found["nll"] == pytest.approx(-p.mean(0).log().mean().item(), rel=1e-5)
    assert found["gibbs_nll"] == pytest.approx(-p.log().mean().item(), rel=1e-5)
    right = draws.softmax(-1).mean(0).argmax(1) == split.targets
    assert found["accuracy"] == pytest.approx(right.float().mean().item())


def test_the_report_reads_it(wine, tmp_path):
    write_results(wine[0], tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") is not None
    page = write_report(tmp_path / "results.json", tmp_path)
    assert page.suffix == ".html" and "Rank1(components=2)" in page.read_text()


# Resuming --------------------------------------------------------------------------------------------------


def strip(results):
    """Without what a clock says."""
    found = json.loads(json.dumps(results["methods"]))
    for method in found:
        for run in method["runs"]:
            del run["train_seconds"], run["predict_seconds"]
            for row in run["history"]:
                del row["examples_per_second"]
    return found


def counted(monkeypatch):
    calls = []
    original = Bench.measure

    def measure(self, contender, seed, *arguments):
        calls.append((contender.label, seed))
        return original(self, contender, seed, *arguments)

    monkeypatch.setattr(Bench, "measure", measure)
    return calls


def test_finished_runs_are_kept(wine, monkeypatch):
    results, folder, _ = wine
    calls, said = counted(monkeypatch), []
    again = run_it(WINE, folder=folder, resume=True, say=said.append)
    assert calls == [] and again["methods"] == results["methods"]
    assert said == ["4 runs of 4 kept from before"]
    reordered = dataclasses.replace(WINE, contenders=WINE.contenders[::-1], seeds=(3,))
    found = run_it(reordered, folder=folder, resume=True)
    assert calls == [] and [m["label"] for m in found["methods"]] == ["Rank1(components=2)", "plain"]
    more = dataclasses.replace(WINE, seeds=(0, 3, 5), contenders=WINE.contenders[:1])
    run_it(more, folder=folder, resume=True)
    assert calls == [("plain", 5)]


@pytest.mark.parametrize(
    "change",
    [
        {"training": dataclasses.replace(WINE.training, lr=0.03)},
        {"draws": 8},
        {"shifts": ("noise",)},
        {"max_test": 20},
        {"network": "dense(hidden=[7])"},
        {"data_options": {"split": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_configurations_are_trained_anew(wine, tmp_path, monkeypatch, change):
    (tmp_path / "runs").mkdir()
    for path in (wine[1] / "runs").iterdir():
        (tmp_path / "runs" / path.name).write_bytes(path.read_bytes())
    called = []

    def measure(self, contender, seed, *arguments):
        called.append((contender.label, seed))
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run_it(dataclasses.replace(WINE, **change), folder=tmp_path, resume=True)
    assert called == [("plain", 0)]


def test_damaged_and_missing_cells_are_trained_again(wine, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    paths = sorted((wine[1] / "runs").iterdir())
    for path in paths:
        (tmp_path / "runs" / path.name).write_bytes(path.read_bytes())
    plain = [path for path in paths if path.name.startswith("plain")]
    (tmp_path / "runs" / plain[0].name).write_text('{"key": ')
    (tmp_path / "runs" / plain[1].name).write_text("[]")
    calls = counted(monkeypatch)
    again = run_it(WINE, folder=tmp_path, resume=True)
    assert sorted(calls)[:2] == [("plain", 0), ("plain", 3)] and len(calls) == 2
    assert strip(again) == strip(wine[0])  # and to the same numbers
    assert not list(tmp_path.rglob("*.partial"))


def test_without_resume_everything_is_trained(wine, monkeypatch):
    calls = counted(monkeypatch)
    run_it(dataclasses.replace(WINE, seeds=(0,), shifts=(), contenders=WINE.contenders[:1]), folder=wine[1])
    assert calls == [("plain", 0)]


@pytest.mark.slow
def test_two_processes_give_the_same_numbers(wine):
    training = dataclasses.replace(WINE.training, accelerator="cpu")  # the other processes may see a GPU
    assert strip(run_it(dataclasses.replace(WINE, training=training), jobs=2)) == strip(wine[0])


@pytest.mark.slow
def test_an_error_ends_the_other_processes(tmp_path, monkeypatch):
    """One contender diverges at once, the others would train for hours."""
    # Processes that begin where the imports are done: these take longer than the rest.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["lightning.fabric", "slimbayes.cli", "slimbayes.training"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda *kind: server)
    fast = Contender("bad", "Deterministic()", {"lr": 1e30, "optimizer": "sgd", "momentum": 0.0})
    config = dataclasses.replace(
        WINE,
        contenders=(Contender("long", "Rank1(components=2)"), fast),
        network="dense(hidden=[8], norm=False)",
        training=Training(epochs=10_000_000, batch_size=31),
    )
    with pytest.raises(TrainingError, match="not finite at step"):
        run_it(dataclasses.replace(config, seeds=(0,)), folder=tmp_path, jobs=2)
    assert not multiprocessing.active_children()


def test_processes_read_data_by_name():
    with pytest.raises(ValueError, match="jobs=2 processes read the data by name"):
        run_it(WINE, jobs=2, data=sb.data.load("wine"))


def test_labels_that_look_alike_have_files_of_their_own(tmp_path):
    contenders = tuple(Contender(label, "Deterministic()") for label in ("a b", "a/b", "../a b", "a-b"))
    config = dataclasses.replace(
        WINE,
        contenders=contenders,
        seeds=(0,),
        shifts=(),
        training=dataclasses.replace(WINE.training, steps=1),
    )
    run_it(config, folder=tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


# Other data ------------------------------------------------------------------------------------------------


def test_images_have_pixels_and_data_from_elsewhere():
    config = CompareConfig(
        data="digits", network="dense(hidden=[16])", contenders=WINE.contenders[:1], seeds=(0,), max_test=40,
        severities=(3,), shifts=("rotation",), training=Training(steps=40, lr=0.01, batch_size=64),
    )  # fmt: skip
    results = run_it(config)
    run = results["methods"][0]["runs"][0]
    assert "top_5_accuracy" in run["clean"]
    pixels = torch.tensor(run["examples"]["least"][0]["pixels"])
    assert torch.equal(
        pixels, sb.data.load("digits").test.inputs[run["examples"]["least"][0]["index"]].long()
    )
    assert set(run["ood"]) == {
        "auroc_entropy", "aupr_entropy", "auroc_mutual_information", "aupr_mutual_information",
    }  # fmt: skip
    assert sum(run["entropy"]["ood"]) == results["ood"]["num"]


def regression(data):
    return CompareConfig(
        data=data, network="dense(hidden=[8], norm=False)", contenders=(Contender("a", "MeanField()"),), seeds=(0,),
        draws=4, shifts=("noise",), severities=(2,), training=Training(epochs=5, lr=0.02, batch_size=20),
    )  # fmt: skip


def test_the_cubic_has_a_curve():
    results = run_it(regression("cubic"))
    run = results["methods"][0]["runs"][0]
    assert results["task"] == "regression" and set(run["clean"]) == REAL_METRICS
    curve = run["fit"]
    x = torch.tensor(curve["x"])
    assert len(x) == 121 and (x[0].item(), x[-1].item()) == (-6.0, 6.0)
    truth = torch.tensor(curve["truth"])
    torch.testing.assert_close(truth, x**3, rtol=0, atol=0.05)
    train = sb.data.load("cubic").train
    assert (
        curve["train_x"] == train.inputs[:, 0].tolist() and curve["train_y"] == train.targets[:, 0].tolist()
    )
    order = torch.tensor([curve[k] for k in ("lower", "epistemic_lower", "mean", "epistemic_upper", "upper")])
    assert (order.diff(dim=0) >= -1e-3).all()
    assert set(run["reliability"]["clean"]) == {"level", "coverage"}
    assert {"least", "most"} <= set(run["examples"])
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_diabetes_has_a_scatter():
    results = run_it(regression("diabetes"))
    run = results["methods"][0]["runs"][0]
    scatter = run["scatter"]
    test = sb.data.load("diabetes").test
    assert scatter["target"] == pytest.approx(test.targets[:300, 0].tolist(), rel=1e-5)
    error = torch.tensor(scatter["mean"]) - torch.tensor(scatter["target"])
    assert run["clean"]["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    inside = (torch.tensor(scatter["lower"]) <= test.targets[:, 0]) & (
        test.targets[:, 0] <= torch.tensor(scatter["upper"])
    )
    assert run["clean"]["coverage_90"] == pytest.approx(inside.float().mean().item(), abs=1e-6)
    assert "fit" not in run


# Trained runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    training = dataclasses.replace(WINE.training, seed=3, kl_weight=0.1)
    config = RunConfig("wine", {}, WINE.network, "Rank1(components=2)", None, 6, training)
    return train_run(config, folder, progress=False)[0], folder


def test_a_trained_run_measures_as_in_the_comparison(wine, trained):
    run, folder = trained
    results = evaluate_run(run, folder, shifts=("noise", "covariate"), max_test=30)
    mine, theirs = results["methods"][0]["runs"][0], wine[0]["methods"][1]["runs"][1]
    assert mine["clean"] == theirs["clean"] and mine["seed"] == 3
    for name in ("noise", "covariate"):
        assert set(mine["shifted"][name]) == {"1", "2", "3", "4", "5"}
        assert all(mine["shifted"][name][s] == theirs["shifted"][name][s] for s in ("1", "4"))
    keys = ("step", "loss", "nll", "kl", "lr", "kl_weight")
    assert [[row[k] for k in keys] for row in mine["history"]] == [
        pytest.approx([row[k] for k in keys], rel=1e-8) for row in theirs["history"]
    ]
    assert mine["train_seconds"] > 0
    assert evaluate_run(run, folder, shifts=(), draws=2)["methods"][0]["draws"] == 2


def test_a_run_on_other_data(trained):
    run, folder = trained
    other = evaluate_run(run, folder, data="wine", data_options={"split": 1}, shifts=())
    mine = evaluate_run(run, folder, shifts=())
    assert other["dataset"]["fingerprint"] != mine["dataset"]["fingerprint"]
    assert other["provenance"]["config"]["data_options"] == {"split": 1}
    # The numbers must mean the same to the model in every data set: its own scaling, not the new data's.
    test = sb.data.load("wine", split=1).test
    draws = sb.predict(run.model, run.facts.scaling(test.inputs), samples=3, seed=7, noise="shared").draws
    p = draws.double().softmax(-1).mean(0)[torch.arange(len(test)), test.targets]
    assert other["methods"][0]["runs"][0]["clean"]["nll"] == pytest.approx(-p.log().mean().item(), rel=1e-6)
    for name in ("breast_cancer", "digits", "diabetes"):
        with pytest.raises(DataError, match=rf"the model was trained on .*, the data '{name}' have"):
            evaluate_run(run, folder, data=name, shifts=())


def test_a_folder_without_history(trained, tmp_path):
    results = evaluate_run(trained[0], tmp_path, shifts=())
    run = results["methods"][0]["runs"][0]
    assert run["history"] == [] and run["train_seconds"] is None and run["reliability"]["shifted"] is None
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_unknown_shifts_and_data_are_found_before_training(monkeypatch):
    calls = counted(monkeypatch)
    for change, message in (({"shifts": ("fog",)}, "no shift 'fog' for 'wine'"), ({"data": "wein"}, "wein")):
        with pytest.raises(DataError, match=message):
            run_it(dataclasses.replace(WINE, **change))
    assert calls == []
