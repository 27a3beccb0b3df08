"""The EMP paper's image networks: one run of draws gives every S, corruptions are counted right, checks can fail."""

import pickle
import shutil

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes import metrics
from slimbayes.core.conversion import converted_layers
from slimbayes.lab.data import load as load_data
from slimbayes.lab.data import shifts_for
from slimbayes.lab.experiments import (
    averages,
    emp_checks,
    emp_extras,
    emp_figures,
    emp_images,
    emp_measures,
    emp_recipes,
)
from slimbayes.lab.experiments.averages import running_means
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.emp_recipes import SIZES, WAYS, prepare, recipe
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.outcome import Outcome, Table
from slimbayes.lab.experiments.runner import Paper, Runner, Task, together
from slimbayes.lab.experiments.session import OutOfTime, Session
from slimbayes.lab.models import WideResNet
from slimbayes.training.sources import make_source
from slimbayes.verbs.checkpoint import CheckpointError
from slimbayes.verbs.method_text import parse_stored


def network(method, include=None):
    torch.manual_seed(0)
    model = sb.bayesianize(WideResNet(10, 1, 10, channels=1), method, include=include)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that are not those of a new network
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


METHODS = {
    "EMP": sb.EMP(components=3, init_noise=0.3),
    "ECMP": sb.ECMP(components=3, init_noise=0.3),
    "Rank1": sb.Rank1(components=2),
    "Dropout": sb.MCDropout(rate=0.1),
}


@pytest.mark.parametrize("name", METHODS)
def test_averages_of_every_number_of_draws_come_from_one_run(name, monkeypatch):
    model, x = network(METHODS[name]), torch.randn(7, 1, 8, 8)
    counts, rows = (1, 3, 8), []
    draw = averages.draw_flat

    def counted(*args):
        found = draw(*args)
        rows.append(found.shape[0] * found.shape[1])
        return found

    monkeypatch.setattr(averages, "draw_flat", counted)
    for chunk in (4, 10, 1000):
        rows.clear()
        parts = list(running_means(model, x, counts, chunk, seed=5))
        assert parts[0][0].start == 0 and parts[-1][0].stop == 7
        assert max(rows) <= chunk, "a chunk bounds the rows of a pass"
        assert sum(rows) == 7 * counts[-1] * (2 if name == "Rank1" else 1), "no draw is made twice"
        means = torch.cat([part for _, part in parts], 1)  # [counts, 7, 10]
        for count, mean in zip(counts, means, strict=True):
            wanted = sb.predict(model, x, samples=count, seed=5).mean
            torch.testing.assert_close(mean, wanted, rtol=1e-4, atol=1e-6)


def test_draws_without_a_seed_follow_the_generator():
    model, x = network(METHODS["Dropout"]), torch.randn(4, 1, 8, 8)
    session = Session("smoke", "work")
    found = []
    for seed in (0, 0, 1):
        before = torch.get_rng_state()
        with emp_measures.evaluation(session, seed):
            found.append(torch.cat([p for _, p in running_means(model, x, (2,), 100, None)], 1))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_figures_are_those_of_the_metrics():
    torch.manual_seed(0)
    p, y = (2 * torch.randn(400, 12)).softmax(-1), torch.randint(12, (400,))
    y[:200] = p[:200].argmax(-1)
    found = emp_figures.figures_of(averages.columns_of(p, y))
    assert found["accuracy"] == pytest.approx(100 * metrics.accuracy(p, y))
    assert found["top5"] == pytest.approx(100 * metrics.top_k_accuracy(p, y, 5))
    assert found["nll"] == pytest.approx(metrics.nll(p, y), rel=1e-5)
    assert found["ece_percent"] == pytest.approx(100 * metrics.ece(p, y, bins=20, min_count=5))
    assert found["mce_percent"] == pytest.approx(100 * metrics.mce(p, y, bins=20, min_count=5))
    right = (p.argmax(-1) == y).double()
    assert found["errors"]["accuracy"] == pytest.approx(100 * float(right.std()) / 20)
    assert sum(found["bins"]["count"]) == 400 and len(found["bins"]["count"]) == 20


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return Session("smoke", tmp_path_factory.mktemp("work"), progress=False)


def test_corruption_rates_are_counted_image_by_image(session):
    job = Job("cifar10-c", "Vanilla", 0)
    trained = emp_recipes.train(session, job)
    rates = emp_measures.corruption_rates(session, trained, job)
    data, size = load_data("digits"), SIZES["cifar10-c", "smoke"]
    rows = data.test[: size.corrupted]

    def error(inputs):
        with torch.no_grad():
            wrong = trained.model(data.scaling(inputs)).argmax(-1) != rows.targets
        return float(wrong.double().mean())

    assert rates["clean"] == pytest.approx(error(rows.inputs))
    for shift in shifts_for(data):
        assert rates[shift.name] == pytest.approx([error(shift(rows.inputs, s)) for s in range(1, 6)])


def test_errors_are_relative_to_vanilla_of_the_same_seed(monkeypatch):
    rates = {
        ("Vanilla", 0): {"clean": 0.1, "fog": [0.2, 0.4], "snow": [0.3, 0.5], "calm": [0.05, 0.1]},
        ("EMP", 0): {"clean": 0.1, "fog": [0.1, 0.2], "snow": [0.3, 0.5], "calm": [0.1, 0.2]},
        ("Vanilla", 1): {"clean": 0.2, "fog": [0.4, 0.8], "snow": [0.3, 0.5], "calm": [0.3, 0.5]},
        ("EMP", 1): {"clean": 0.1, "fog": [0.3, 0.3], "snow": [0.3, 0.9], "calm": [0.1, 0.3]},
    }
    jobs = [Job("cifar10-c", label, seed) for label, seed in rates]
    monkeypatch.setattr(emp_images, "jobs_of", lambda session, setting: jobs)
    monkeypatch.setattr(emp_images, "train", lambda session, job: None)
    monkeypatch.setattr(emp_images, "corruption_rates", lambda s, t, job: rates[job.label, job.seed])
    monkeypatch.setattr(emp_images.checks, "robust_checks", lambda table, metric: [])
    small = Session("smoke", "work")
    for metric, wanted in (
        ("mce", {"fog": [50, 50], "snow": [100, 150], "calm": [200, 50]}),
        ("rmce", {"fog": [25, 50], "snow": [100, 250], "calm": [50]}),
    ):
        outcome = emp_images.corrupted(metric, ("EMP", "Vanilla"), small, "cifar10-c")
        row = outcome.tables[0].rows["EMP"].values
        for name, values in wanted.items():
            assert row[name] == pytest.approx(values), (metric, name)
        first = [100 * 1 / 2, 100, 200] if metric == "mce" else [25, 100]
        assert row[metric][0] == pytest.approx(sum(first) / len(first))
        others = outcome.tables[0].rows["Vanilla"].values
        assert all(value == pytest.approx(100) for values in others.values() for value in values)
        assert bool(outcome.deviations) == (metric == "rmce"), "what has no ratio is named"


def test_recipes_are_the_papers():
    for setting, scale in SIZES:
        session = Session(scale, "work")
        for label in WAYS[setting]:
            made = recipe(session, setting, label)
            training = made.training
            assert (training.optimizer, training.lr, training.batch_size) == ("adam", 1e-3, 256)
            assert training.l2 == 0.001 / 256 and training.samples == 1
            parse_stored(made.method)
    paper = recipe(Session("paper", "work"), "cifar100", "EMP")
    assert (paper.training.epochs, paper.training.schedule) == (400, "constant")
    assert paper.network == "pyramidnet(depth=110, alpha=270)"
    assert recipe(Session("gpu", "work"), "cifar100", "EMP").network == "wrn(depth=28, width=4)"


@pytest.mark.parametrize("label", ["EMP", "ECMP", "Dropout", "EMP on norms, Rank1 elsewhere"])
def test_layers_that_are_patched(label):
    setting = "cifar100" if label in WAYS["cifar100"] else "cifar100-extras"
    made = recipe(Session("smoke", "work"), setting, label)
    model = made.build((1, 8, 8), 10, 0)
    norms = {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    converted = {name: type(layer.bayes).__name__ for name, layer in converted_layers(model)}
    assert len(norms) == 7
    if label == "Dropout":
        assert converted == dict.fromkeys(norms, "DroppedRule")
    elif label in ("EMP", "ECMP"):
        assert converted == dict.fromkeys(norms | {"output"}, "IndexedRule")
        weight = model.output.weight.detach()
        assert torch.equal(weight, weight[:1].expand_as(weight)), "components start equal"
    else:
        assert {name for name, kind in converted.items() if kind == "IndexedRule"} == norms
        assert {kind for name, kind in converted.items() if name not in norms} == {"Rank1Rule"}


def test_images_are_padded_by_four_in_training(session):
    prepared = prepare(session, "cifar100")
    source = make_source(prepared.data, sb.Training(batch_size=16))
    assert source.pad == 4 and prepared.data.augment == load_data("digits").augment
    assert make_source(load_data("digits"), sb.Training()).pad == 2
    assert prepared.key != session.prepared("digits").key, "networks are told apart by it"


def test_what_was_measured_is_kept(session, monkeypatch):
    job = Job("cifar100", "Dropout", 0)
    trained = emp_recipes.train(session, job)
    found = emp_measures.by_samples(session, trained, job)
    assert list(found) == ["1", "2", "4", "6"]

    def never(*rest):
        raise AssertionError("measured again")

    monkeypatch.setattr(emp_measures, "_by_samples", never)
    assert emp_measures.by_samples(session, trained, job) == found
    spent = Session("smoke", session.work, progress=False, budget=0.0)
    with pytest.raises(OutOfTime):
        spent.kept(trained, "something else", never)


def test_what_was_measured_outlives_the_weights(session, tmp_path):
    job = Job("cifar100", "Dropout", 0)
    found = emp_measures.by_samples(session, emp_recipes.train(session, job), job)
    shutil.copytree(session.work, tmp_path / "work", ignore=shutil.ignore_patterns("*.safetensors"))
    other = Session("smoke", tmp_path / "work", progress=False)
    trained = emp_recipes.train(other, job)
    assert not list(other.work.rglob("*.safetensors")), "nothing is trained"
    assert emp_measures.by_samples(other, trained, job) == found
    with pytest.raises(CheckpointError, match="gone: delete the folder"):
        other.kept(trained, "something else", lambda: trained.model)
    path = trained.folder / "measured.json"
    path.write_text(path.read_text().replace('"version": ', '"version": 1'))
    with pytest.raises(CheckpointError, match="gone: delete the folder"):
        emp_measures.by_samples(other, trained, job)


def table_of(**ece):
    table = Table("cifar100", "T", ("ece_percent", "accuracy"))
    for label, values in ece.items():
        for value in values:
            table.add(label, {"ece_percent": value, "accuracy": 70 + value}, {})
    return table


def test_the_order_of_calibration_errors_needs_three_seeds_and_a_standard_error():
    table = table_of(ECMP=[1.0, 1.1, 0.9], EMP=[3, 3.2, 2.8], Dropout=[3.05, 3.3, 2.9], Vanilla=[9, 9, 9.3])
    one, two, three = emp_checks.order_checks(table)
    assert (one["holds"], two["holds"], three["holds"]) == (True, False, True)
    error = ((0.2**2 + 0.2**2 + 0.0) / 2 / 3 + (0.1**2 + 0.1**2) / 2 / 3) ** 0.5
    assert one["value"] == pytest.approx(2.0) and one["bound"] == f"> {error:.3f} points"
    pair = table_of(ECMP=[1, 1], EMP=[3, 3], Dropout=[5, 5], Vanilla=[9, 9])
    assert not any(check["holds"] for check in emp_checks.order_checks(pair))
    assert [c["holds"] for c in emp_checks.accuracy_checks(pair, 200)] == [False, False]
    better = table_of(ECMP=[1], EMP=[3], Vanilla=[1])
    assert [c["holds"] for c in emp_checks.accuracy_checks(better, 200)] == [True, True]


def test_the_paper_network_has_the_printed_parameters():
    found = emp_checks.parameter_checks()
    assert len(found) == 6 and all(check["holds"] for check in found)
    assert {check["value"] for check in found[::2]} == {28_825_299, 28_511_307}


def test_stacked_draws_are_those_of_the_row_beside_them(session):
    job = Job("cifar100-extras", "EMP", 0)
    trained = emp_recipes.train(session, job)
    found = emp_extras.stacked(session, trained, job)
    prepared, samples = prepare(session, job.setting), SIZES[job.setting, "smoke"].samples[-1]
    draws = []
    for rows in (prepared.validation, prepared.data.test):
        x = prepared.data.scaling(rows.inputs)
        draws.append(sb.predict(trained.model, x, samples=samples, seed=0).draws.log_softmax(-1))
    assert len(prepared.validation) == 100 and len(prepared.data.train) == 1197
    weights = sb.stack(draws[0], prepared.validation.targets, tolerance=1e-5)
    mixed = (weights[:, None, None] * draws[1].exp()).sum(0)
    assert found["nll"] == pytest.approx(metrics.nll(mixed, prepared.data.test.targets), rel=1e-4)
    assert found["accuracy"] == pytest.approx(100 * metrics.accuracy(mixed, prepared.data.test.targets))
    assert 1 <= found["draws"] <= samples
    plain = emp_measures.by_samples(session, trained, job)[str(samples)]
    equal = metrics.nll(draws[1].exp().mean(0), prepared.data.test.targets)
    assert plain["nll"] == pytest.approx(equal, rel=1e-4)


def test_the_entry_names_the_methods_that_run():
    (setting,) = find("emp/extras").settings
    for label, way in WAYS["cifar100-extras"].items():
        assert parse_stored(setting.methods[label]) == parse_stored(way.method)
    assert set(setting.methods) == set(WAYS["cifar100-extras"])


def test_gains_are_differences_seed_by_seed():
    table = Table("t", "T", ("nll", "accuracy"))
    for seed in (0, 1):
        table.add("EMP", {"nll": 1.0 + seed, "accuracy": 50.0}, {})
        table.add("EMP, own statistics", {"nll": 0.5 + 3 * seed, "accuracy": 60.0}, {})
    found = emp_extras.gains(table)
    assert list(found.rows) == ["EMP, own statistics less EMP"]
    assert found.rows["EMP, own statistics less EMP"].values["nll"] == [-0.5, 1.5]


def _measured(session, job):
    return 1.0


def _no_facts(session, setting, jobs):
    return {"setting": setting}


def _no_words(session, setting, jobs):
    return [f"{setting}: words."]


def _first(job):
    return 7


def _their_report(session, setting):
    return Outcome(deviations=[f"theirs of {setting}"])


def _their_jobs(session):
    return [Job("imagenet", "EMP", 0)]


def test_an_entry_may_have_the_settings_of_several_modules(session):
    theirs = Paper(_measured, _no_facts, _no_words, _first, ("imagenet",))
    both = together(emp_images.RUNNERS, {"emp/table9": Runner(theirs, _their_report, (_their_jobs,))})
    assert set(both) == set(emp_images.RUNNERS)
    runner = both["emp/table9"]
    jobs = [job for plan in runner.jobs for job in plan(session)]
    assert {job.setting for job in jobs} == {"cifar100", "imagenet"}
    assert runner.report(session, "imagenet").deviations == ["theirs of imagenet"]
    assert runner.report(session, "cifar100").tables[0].name == "cifar100"
    assert runner.paper is both["emp/table6"].paper, "what two entries need is one task"
    assert runner.paper.order(jobs[-1]) == 7 and runner.paper.order(jobs[0]) == 0
    assert runner.paper.facts(session, "imagenet", []) == {"setting": "imagenet"}
    assert runner.paper.deviations(session, "imagenet", []) == ["imagenet: words."]
    task = pickle.loads(pickle.dumps(Task(runner.paper, jobs[-1])))
    assert task.job == jobs[-1] and task.run(session) == 1.0
