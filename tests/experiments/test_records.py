"""Table 4 on medical records: what is trained, what is measured of it, and what the checks say."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from helpers_mimic import make_tables, write_tables

import slimbayes as sb
from slimbayes.core.conversion import converted_layers
from slimbayes.lab.experiments import rank1_record_tables as tables
from slimbayes.lab.experiments import rank1_records as records
from slimbayes.lab.experiments import read_result
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.ktied_recipes import recipe as tied_recipe
from slimbayes.lab.experiments.ktied_tables import counted
from slimbayes.lab.experiments.outcome import Table
from slimbayes.lab.experiments.rank1_records import (
    CAUCHY,
    DETERMINISTIC,
    GAUSSIAN,
    WAYS,
    drawn,
    interval,
    recipe,
)
from slimbayes.lab.experiments.running import reproduce
from slimbayes.lab.experiments.session import Session
from slimbayes.lab.models.text import network_builder
from slimbayes.metrics import auroc
from slimbayes.training import Training, fit
from slimbayes.training.sources import make_source
from slimbayes.verbs.method_text import parse_stored


@pytest.fixture(scope="module")
def data():
    return drawn()


def small(data):
    torch.manual_seed(0)
    network = network_builder("records(dense=4, hidden=8, dense_hidden=8)")(data.shape, 2)
    return sb.bayesianize(network, sb.Deterministic())


def test_digits_as_records(data):
    """Eight bags of at most eight codes; the youngest bag is the image's last row."""
    events, targets = next(iter(data.batches("test", 100)))
    assert data.shape == (9, data.levels, 1) and events.ages.shape == (100, 8)
    assert events.ages[0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0] and events.lengths.eq(8).all()
    assert events.weights.sum(1).eq(64).all() and 1 <= int(events.codes.max()) <= 8
    assert int(events.levels.max()) < data.levels and set(targets.tolist()) == {0, 1}


def test_fit_takes_records_and_their_validation_part(data, tmp_path):
    """A data set of records trains as its batches do, stops early by its validation part, and resumes."""
    settings = Training(epochs=3, batch_size=64, optimizer="adam", lr=1e-2, seed=3)
    whole, parts = small(data), small(data)
    fit(whole, data, settings, progress=False)
    batches = data.batches("train", 64, seed=3, drop_last=True)
    fit(parts, batches, settings, progress=False)
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    watched = small(data)
    found = fit(
        watched, data, settings, validation=data, folder=tmp_path, progress=False, early_stopping=2, lr=0.5
    )
    again = sb.evaluate(watched, data.batches("validation", 64), samples=1, seed=0)
    assert again["nll"] == pytest.approx(found.best["validation_nll"], abs=1e-6)
    assert found.best["validation_nll"] == min(row["validation_nll"] for row in found.history)
    others = dataclasses.replace(data, train=data.validation)
    options = {"validation": data, "early_stopping": 2, "lr": 0.5, "folder": tmp_path, "progress": False}
    with pytest.raises(ValueError, match="data"):
        fit(small(data), others, settings, resume=True, **options)


@pytest.mark.parametrize(("count", "world", "each"), [(5, 2, 2), (7, 4, 1), (200, 2, 32)])
def test_processes_have_as_many_records_each(data, count, world, each):
    """What is averaged over processes counts every record alike, also where there are fewer than a batch."""
    few = dataclasses.replace(data, train=data.train[:count])
    for rank in range(world):
        fabric = SimpleNamespace(global_rank=rank, world_size=world, device=torch.device("cpu"))
        source = make_source(few, Training(batch_size=64), None, fabric)
        assert {len(targets) for _, targets in source.epoch(0)} == {each} and source.num_data == count


def test_recipes_of_table_4(tmp_path):
    session = Session("desk", tmp_path)
    made = {label: recipe(session, "physionet", label) for label in WAYS}
    assert len(made) == 7 and len(records.jobs_of(session, "physionet")) == 35
    alone, members = made[DETERMINISTIC].training, made["Ensemble"].training
    assert members.l2 == alone.l2 / 4 and members.clip_norm == pytest.approx(alone.clip_norm / 2)
    last = made[CAUCHY].training.kl_factor(999, 1000)
    assert last == pytest.approx(12_000 / 694_216) and made[GAUSSIAN].training.kl_factor(999, 1000) == 1
    model = made[GAUSSIAN].build((38, 179, 160), 2, seed=0)
    kinds = {name: type(layer.bayes).__name__ for name, layer in converted_layers(model)}
    assert set(kinds) == {"codes", "values", "lstm.ih_l0", "lstm.hh_l0", "hidden", "output"}
    assert kinds["codes"] == kinds["values"] != kinds["lstm.ih_l0"] == kinds["lstm.hh_l0"]
    only = made["Bayesian embeddings"].build((38, 179, 160), 2, seed=0)
    assert {name for name, _ in converted_layers(only)} == {"codes", "values"}
    assert records.jobs_of(Session("paper", tmp_path), "mimic") and not records.jobs_of(session, "mimic")


def test_interval_of_the_auroc():
    """It holds the estimate, and is as wide as the textbook's error says (Hanley and McNeil, 1982)."""
    torch.manual_seed(0)
    labels = (torch.arange(600) % 4 == 0).long()
    scores = torch.randn(600) + labels
    area = auroc(scores, labels)
    low, high = interval(scores, labels, times=400)
    assert low < area < high and interval(scores, labels, times=400) == (low, high)
    m, n = 150, 450
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (m - 1) * (q1 - area**2) + (n - 1) * (q2 - area**2)) / (m * n)
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.2)


def test_checks_can_fail():
    def table(nll, ece):
        made = Table("test", "PhysioNet 2012, test set", ("nll", "ece", "auroc"))
        for label in (DETERMINISTIC, "BatchEnsemble", GAUSSIAN, CAUCHY, "Ensemble"):
            better = label == GAUSSIAN
            for seed in range(3):
                made.add(
                    label,
                    {"nll": 0.3 + better * nll, "ece": 0.02 + better * ece, "auroc": 0.8 + seed / 100},
                    {},
                )
        return made

    assert [found["holds"] for found in tables._not_worse(table(-0.01, 0.01))] == [True, False]
    assert [found["holds"] for found in tables._not_worse(table(0.01, 0.0))] == [False, True]
    assert "Rank-1 Gaussian NLL -0.0100 ± 0.0000, ECE +0.0100" in tables._compared(table(-0.01, 0.01))


def test_what_is_measured_is_kept(data, tmp_path):
    session = Session("smoke", tmp_path, progress=False)
    job = Job("physionet", GAUSSIAN, 0)
    trained = records.train(session, job)
    first = records.figures(session, trained, job, "test")
    assert {"nll", "auc_pr", "ece", "auroc", "auroc_low", "auroc_high", "disagreement"} <= set(first)
    with torch.no_grad():
        found = sb.evaluate(trained.model, data.batches("test", 400), samples=1, seed=0, chunk=6_400)
    assert first["nll"] == pytest.approx(found["nll"], rel=1e-6)
    (trained.folder / "model.safetensors").unlink()
    again = records.train(Session("smoke", tmp_path, progress=False), job)
    assert records.figures(session, again, job, "test") == first


def test_mimic_at_the_papers_scale(tmp_path, monkeypatch):
    """On a made-up copy of its tables, with a small network and two epochs."""
    (tmp_path / "mimic3").mkdir()
    write_tables(tmp_path / "mimic3", make_tables(patients=120))
    key = ("mimic", "paper")
    small = {"network": "records(dense=8, hidden=8, dense_hidden=8)", "batch_size": 16, "samples": 1}
    monkeypatch.setitem(
        records.SIZES, key, dataclasses.replace(records.SIZES[key], epochs=2, seeds=1, **small)
    )
    monkeypatch.setattr(records, "RESAMPLED", 10)
    path = reproduce(
        "rank1/table4", "paper", tmp_path / "results", tmp_path / "work", str(tmp_path), progress=False
    )
    found = read_result(path)
    assert [table["name"] for table in found["tables"][::2]] == ["validation", "test"] and len(
        found["runs"]
    ) == 7
    assert all([row["label"] for row in table["rows"]] == list(WAYS) for table in found["tables"])
    assert any("Normal network" in text for text in found["deviations"])


def test_parameters_of_the_tied_lstm(tmp_path):
    """Without the head, one bias per gate, the embedding a point: the counts behind Figure 6's thousands."""
    session = Session("gpu", tmp_path)
    wanted = {"Mean-field": 2_822_656, "1-tied": 2_692_864, "2-tied": 2_694_144, "3-tied": 2_695_424}
    for label, number in wanted.items():
        with torch.device("meta"):
            model = tied_recipe(session, "imdb", "converged", label).build((80,), 2, seed=0)
        assert counted(model, "imdb") == number
    assert parse_stored(tied_recipe(session, "imdb", "converged", "2-tied").method).biases is False
