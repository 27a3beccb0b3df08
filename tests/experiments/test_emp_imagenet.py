"""The EMP paper's networks on ImageNet: rows and recipes are the paper's, what is measured is right and kept."""

import concurrent.futures
import json
from unittest.mock import patch

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.data.corruptions import corrupt
from slimbayes.lab.experiments import emp_imagenet as emp
from slimbayes.lab.experiments import emp_imagenet_tables as tables
from slimbayes.lab.experiments import find, imagenet, session
from slimbayes.lab.experiments.averages import columns_of, running_means
from slimbayes.lab.experiments.emp_figures import figures_of
from slimbayes.lab.experiments.imagenet_data import SIZES, prepare
from slimbayes.lab.experiments.session import OutOfTime, Session

pytest.importorskip("PIL.Image")


def test_halves_of_shared_entries_have_the_printed_rows(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    for name in ("emp/figure6", "emp/table9", "emp/table10", "emp/table11"):
        (table,) = tables.RUNNERS[name].report(small, "imagenet").tables
        printed = find(name).table("imagenet")
        if name == "emp/figure6":
            assert list(table.rows) == list(printed.rows) and table.columns == ("1", "2", "3", "4")
            continue
        assert table.columns == printed.columns
        assert list(table.rows) == ["S = 1", "S = 2", "S = 3", "S = 4", "Vanilla"]
        assert all(0 <= table.mean(row, "accuracy") <= table.mean(row, "top5") <= 100 for row in table.rows)


def test_recipes_are_the_papers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    paper = Session("paper", tmp_path)
    printed = find("emp/table4").table("imagenet")
    for label in tables.ALL:
        made = emp.recipe(paper, label)
        training = made.training
        assert (training.optimizer, training.lr, training.schedule) == ("adam", 1e-3, "constant")
        assert (training.epochs, training.batch_size, training.samples) == (100, 256, 1)
        assert training.l2 == pytest.approx(0.001 / 256) and made.network == "resnet18"
        with torch.device("meta"):
            model = made.build((3, 224, 224), 1000, seed=0)
        counted = sb.summary(model)
        assert float(f"{100 * counted.overhead:.3g}") == printed.value(label, "overhead_percent"), label
        if label == "Dropout":  # before every norm, and nowhere else
            dropped = {row.name for row in counted.rows if row.method == "MCDropout"}
            assert dropped == {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
            assert len(dropped) == 20
    size, run = SIZES["paper"], emp.RUNS["paper"]
    assert run.samples == (1, 20, 100, 200) and run.corrupted == 100 and size.pixels == 224
    assert len(size.types) == 15 and size.severities == (1, 2, 3, 4, 5)


def test_averages_of_ever_more_draws_by_hand():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model = sb.bayesianize(net, sb.ECMP(3, init_noise=0.5)).eval()
    x = torch.randn(5, 3)
    with torch.no_grad():
        draws = sb.draw(model, x, samples=7, seed=0, first_example=11).softmax(-1)  # [7, 5, 4]
    for chunk in (5, 12, 1000):
        ((_, found),) = running_means(model, x, (1, 4, 7), chunk, first=11)
        for count, p in zip((1, 4, 7), found, strict=True):
            torch.testing.assert_close(p, draws[:count].mean(0), atol=1e-6, rtol=1e-5)


def test_figures_by_their_definitions():
    torch.manual_seed(1)
    p, y = torch.randn(400, 9).mul(2).softmax(-1), torch.randint(9, (400,))
    found = figures_of(columns_of(p, y))
    assert found["accuracy"] == pytest.approx(100 * sb.metrics.accuracy(p, y))
    assert found["top5"] == pytest.approx(100 * sb.metrics.top_k_accuracy(p, y, 5))
    assert found["ece_percent"] == pytest.approx(100 * sb.metrics.ece(p, y, bins=20, min_count=5), rel=1e-6)
    assert found["mce_percent"] == pytest.approx(100 * sb.metrics.mce(p, y, bins=20, min_count=5), rel=1e-6)
    assert found["nll"] == pytest.approx(-float(p[torch.arange(400), y].log().mean()), rel=1e-5)
    share = found["accuracy"] / 100
    assert found["errors"]["accuracy"] == pytest.approx(100 * (share * (1 - share) / 399) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("relative", [False, True])
def test_corruption_errors_are_the_metrics_own(relative):
    ours = {"clean": 0.3, "fog": [0.4, 0.6], "snow": [0.5, 0.9]}
    vanilla = {"clean": 0.25, "fog": [0.5, 0.6], "snow": [0.4, 0.8]}
    found = tables.errors_against(ours, vanilla, relative)
    rates, base = ({k: v for k, v in each.items() if k != "clean"} for each in (ours, vanilla))
    if relative:
        expected = sb.metrics.relative_mean_corruption_error(rates, 0.3, base, 0.25)
    else:
        expected = sb.metrics.mean_corruption_error(rates, base)
    assert sum(found.values()) / 2 == pytest.approx(expected)
    assert tables.errors_against(ours, {**vanilla, "fog": [0.25, 0.25]}, relative=True).keys() == {"snow"}


def test_corrupted_errors_are_those_of_corrupted_images(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    trained = emp.train(small, emp.Job("imagenet", "Vanilla", 0))
    rates, data = emp.corruption_rates(small, trained), prepare(small).data
    images = torch.stack([data.test[row][0] for row in range(len(data.test))])
    labels = torch.tensor([data.test.label(row) for row in range(len(data.test))])
    for name, severity, rate in [
        ("contrast", 5, rates["contrast"][1]),
        ("brightness", 3, rates["brightness"][0]),
    ]:
        x = data.scaling(corrupt(images, name, severity))
        with torch.no_grad():
            wrong = (sb.draw(trained.model, x)[0].argmax(-1) != labels).double().mean()
        assert rate == pytest.approx(float(wrong), abs=1e-9)
    assert len(set(map(str, rates.values()))) > 1, "corruption does something"


def test_what_was_measured_is_kept_until_weights_change(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    job = emp.Job("imagenet", "EMP (BN)", 0)
    trained = emp.train(small, job)
    before = emp.by_samples(small, trained)
    with patch.object(emp, "columns", side_effect=AssertionError("measured again")):
        assert emp.by_samples(small, trained) == before
        sb.save(
            sb.bayesianize(sb.models.WideResNet(10, 1, 8), sb.EMP(5, ("norm",))),
            trained.folder / "model.safetensors",
        )
        with pytest.raises(AssertionError, match="measured again"):
            emp.by_samples(small, trained)


@pytest.mark.parametrize("damage", ["[]", "{", '{"state": {}}'])
def test_damaged_figures_are_measured_again(tmp_path, damage):
    small = Session("smoke", tmp_path, progress=False)
    trained = emp.train(small, emp.Job("imagenet", "Vanilla", 0))
    before = emp.by_samples(small, trained)
    (trained.folder / imagenet.KEPT).write_text(damage)
    assert emp.by_samples(small, trained) == before
    (trained.folder / "model.safetensors").unlink()
    with pytest.raises(sb.CheckpointError, match="delete the folder to train again"):
        emp.by_samples(small, emp.train(small, emp.Job("imagenet", "Vanilla", 0)))


def test_two_jobs_of_one_network_do_not_train_it_twice(tmp_path, monkeypatch):
    """In two threads here, in two processes of a pool else: the second finds what the first has trained."""
    trained, inside, fit = [], [], session.fit

    def slow(*rest, **more):
        inside.append(1)
        assert len(inside) == 1, "both train at once"
        result = fit(*rest, **more)
        trained.append(result.step)
        inside.pop()
        return result

    monkeypatch.setattr(session, "fit", slow)
    jobs = [emp.Job("imagenet", "Vanilla", 0, corrupted) for corrupted in (False, True)]
    sessions = [Session("smoke", tmp_path, progress=False) for _ in jobs]
    prepare(sessions[0])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(emp.measure, sessions, jobs))
    assert trained == [3]
    found = emp.train(sessions[0], jobs[0])
    known = json.loads((found.folder / imagenet.KEPT).read_text())
    assert any(key.startswith("by samples") for key in known) and any(
        key.startswith("error of") for key in known
    )


def test_a_spent_budget_stops_between_batches(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    trained = emp.train(small, emp.Job("imagenet", "Vanilla", 0))
    small.deadline = 0.0
    with pytest.raises(OutOfTime):
        emp.by_samples(small, trained)
    assert not (trained.folder / imagenet.KEPT).exists()
