"""The rank-1 paper's networks on ImageNet: recipes are the paper's, what is measured is right, runs are resumed."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import slimbayes as sb
from slimbayes.core.priors import Cauchy, Normal
from slimbayes.lab.data.corruptions import corrupt
from slimbayes.lab.experiments import imagenet, rank1_checks
from slimbayes.lab.experiments import rank1_imagenet as rank1
from slimbayes.lab.experiments.averages import columns_of
from slimbayes.lab.experiments.imagenet_data import SIZES
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import MODEL
from slimbayes.lab.experiments.outcome import Table
from slimbayes.lab.experiments.rank1_recipes import BATCH_ENSEMBLE, CAUCHY, DETERMINISTIC, GAUSSIAN, rows_of
from slimbayes.lab.experiments.session import Session
from slimbayes.training import loop
from slimbayes.verbs.method_text import parse_stored

pytest.importorskip("PIL.Image")
ENSEMBLE = "Ensemble 4×ResNet-50"


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return Session("smoke", tmp_path, progress=False)


@pytest.mark.parametrize(
    ("label", "parameters", "samples", "wanted"),
    [
        (DETERMINISTIC, 25_557_032, 1, sb.Deterministic()),
        (BATCH_ENSEMBLE, 25_768_588, 1, sb.BatchEnsemble(components=4, random_sign_init=-0.5)),
        (
            GAUSSIAN, 25_977_144, 1,
            sb.Rank1.paper(components=4, prior=Normal(1, 0.05), random_sign_init=-0.75, dropout_rate=1e-3),
        ),
        (
            CAUCHY, 25_977_144, 4,
            sb.Rank1.paper(
                components=4, posterior="cauchy", prior=Cauchy(1, 0.005), random_sign_init=-0.5, dropout_rate=1e-6
            ),
        ),
        (ENSEMBLE, 4 * 25_557_032, 1, sb.DeepEnsemble(members=4)),
    ],
)  # fmt: skip
def test_recipes_are_the_papers(tmp_path, monkeypatch, label, parameters, samples, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    paper = Session("paper", tmp_path)
    made = rank1.recipe(paper, label)
    assert made.network == "resnet50" and parse_stored(made.method) == wanted
    assert made.parameters((3, 224, 224), 1000) == parameters and rank1.samples_of(paper, label) == samples
    long, members = label in (BATCH_ENSEMBLE, GAUSSIAN, CAUCHY), 4 if label == ENSEMBLE else 1
    training = made.training
    epochs, batch, lr, warmup = (135, 1024, 0.4, 7.0) if long else (90, 4096, 1.6, 5.0)
    assert (training.epochs, training.batch_size, training.warmup) == (epochs, batch, warmup)
    assert (training.lr, training.l2) == pytest.approx((members * lr, 1e-4 / members))
    assert (training.optimizer, training.momentum, training.decay_norms) == ("sgd", 0.9, False)
    assert (training.noise, training.reduction, training.samples) == ("example", "average", 1)
    assert training.factor_lr_multiplier == (0.25 if label == BATCH_ENSEMBLE else 1.0)
    per_epoch = 1_281_167 // batch
    rates = [training.multiplier(e * per_epoch, epochs * per_epoch, per_epoch) for e in range(epochs)]
    falls = [e for e in range(1, epochs) if rates[e] < rates[e - 1]]
    assert falls == ([45, 90, 120] if long else [30, 60, 80]) and rates[-1] == pytest.approx(1e-3)
    if label in (GAUSSIAN, CAUCHY):
        assert training.kl_annealing * epochs == pytest.approx(90)
    assert {job.seed for job in rank1.jobs(paper)} == set(range(10))


def test_figures_by_their_definitions():
    torch.manual_seed(0)
    p, y = torch.randn(300, 9).mul(2).softmax(-1), torch.randint(9, (300,))
    found = rank1.figures_of(columns_of(p, y))
    assert found["nll"] == pytest.approx(sb.metrics.nll(p, y), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * sb.metrics.accuracy(p, y))
    assert found["ece"] == pytest.approx(sb.metrics.ece(p, y), rel=1e-6)
    each = -p[torch.arange(300), y].log()
    assert found["errors"]["nll"] == pytest.approx(float(each.std() / 300**0.5), rel=1e-4)


def test_what_is_measured_is_that_of_the_mixtures_predictions(small, monkeypatch):
    monkeypatch.setitem(SIZES, "smoke", replace(SIZES["smoke"], types=("contrast",)))
    found = rank1.train(
        small, Job("imagenet", BATCH_ENSEMBLE, 0)
    )  # without noise: predictions can be made again
    data = rank1.prepare(small).data
    assert data.test.resample == "bicubic"
    images = torch.stack([data.test[row][0] for row in range(len(data.test))])
    labels = torch.tensor([data.test.label(row) for row in range(len(data.test))])
    measured = rank1.on_corrupted(small, found)
    cases = [(images, rank1.clean(small, found)), (corrupt(images, "contrast", 5), measured["contrast"][1])]
    for changed, figures in cases:
        p = sb.predict(found.model, changed.float()).mean
        assert figures["nll"] == pytest.approx(sb.metrics.nll(p, labels), rel=1e-4)
        assert figures["accuracy"] == pytest.approx(100 * sb.metrics.accuracy(p, labels))
        assert figures["ece"] == pytest.approx(sb.metrics.ece(p, labels), abs=1e-3)
    assert list(measured) == ["contrast"] and set(measured["contrast"][0]) == {
        "nll",
        "accuracy",
        "ece",
    }


def test_a_killed_run_goes_on_to_the_same_network(small, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet, "EVERY", 1)
    job, step = Job("imagenet", GAUSSIAN, 0), loop.Run._train_step

    def killed(self, batch):
        if self.step == 2:
            raise KeyboardInterrupt
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            rank1.train(small, job)
    taken = []
    monkeypatch.setattr(
        loop.Run, "_train_step", lambda self, batch: taken.append(self.step) or step(self, batch)
    )
    one = rank1.train(small, job)
    assert taken == [2], "the two steps before it are not trained again"
    whole = Session("smoke", tmp_path / "whole", progress=False)
    other = rank1.train(whole, job)
    weights, wanted = load_file(one.folder / MODEL), load_file(other.folder / MODEL)
    assert weights.keys() == wanted.keys() and all(torch.equal(weights[k], wanted[k]) for k in wanted)


def test_what_the_paper_says_is_checked_and_can_fail():
    table = Table("imagenet", "ImageNet", ("nll", "ece", "c_nll", "c_ece", "mce", "accuracy", "c_accuracy"))
    for label, offset in ((GAUSSIAN, 0.0), (CAUCHY, 0.1), (BATCH_ENSEMBLE, 1.0), (DETERMINISTIC, 2.0)):
        for seed in range(3):
            low = dict.fromkeys(table.columns[:5], 1 + offset + 0.01 * seed)
            table.add(label, {**low, **dict.fromkeys(table.columns[5:], 70 - offset - 0.01 * seed)}, {})
    found = rank1_checks.imagenet_checks(table)
    assert len(found) == 28 and all(check["holds"] for check in found)
    table.rows[GAUSSIAN].values["accuracy"] = [68.5, 68.6, 68.4]  # between the two others
    failed = [check["what"] for check in rank1_checks.imagenet_checks(table) if not check["holds"]]
    assert len(failed) == 1 and "accuracy of 'Rank-1 Gaussian' above that of 'BatchEnsemble'" in failed[0]


def test_rows_are_those_that_the_paper_trained():
    assert list(rows_of("imagenet")) == [DETERMINISTIC, BATCH_ENSEMBLE, GAUSSIAN, CAUCHY, ENSEMBLE]
