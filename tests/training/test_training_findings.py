"""What ``sb.fit`` says at its end: each finding in a run made sick on purpose, none in a healthy one."""

import warnings

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.training import judging
from slimbayes.verbs.diagnosis.findings import ModelWarning

pytestmark = pytest.mark.usefixtures("on_cpu")
KINDS = {
    "MeanField": sb.MeanField(prior=sb.Normal(0.0, 0.5), stddev_init=0.03),
    "KTied": sb.KTied(rank=1, prior=sb.Normal(0.0, 0.5), stddev_init=0.03),
    "Rank1": sb.Rank1(components=4, prior=sb.Normal(1.0, 0.5), random_sign_init=0.5, kl_reduction="mean"),
    "BatchEnsemble": sb.BatchEnsemble(components=4, random_sign_init=0.5),
    "MCDropout": sb.MCDropout(rate=0.02),
}


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, (x[:, :3] + 0.3 * torch.randn(count, 3, generator=generator)).argmax(1)


TRAIN, HELD = rows(1500, 0), rows(300, 1)


def build(method):
    torch.manual_seed(2)
    return sb.bayesianize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), method)


def run(method, data=TRAIN, **options):
    settings = {"epochs": 10, "batch_size": 100, "lr": 2e-2, "progress": False}
    return sb.fit(build(method), data, **{**settings, **options})


@pytest.mark.parametrize("name", KINDS)
def test_a_healthy_run_says_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        result = run(KINDS[name], validation=HELD, weight_decay=1e-2)
    assert result.findings == ()


def said(kind, *arguments, **options):
    """The only finding, which one warning names with its remedy, at the line of the caller."""
    with pytest.warns(ModelWarning) as caught:
        result = run(*arguments, **options)
    assert [finding.kind for finding in result.findings] == [kind]
    (found,), (warning,) = result.findings, caught
    assert f"{kind}: {found.what}. {found.remedy}" in str(warning.message)
    assert warning.filename == __file__
    return result, found


def test_the_kl_dominates():
    few = rows(60, 3)
    result, found = said(
        "kl-dominates", sb.MeanField.paper(prior=sb.Normal(0.0, 0.5)), few, batch_size=20, kl_annealing=0.1
    )
    last = result.history[-1]
    assert found.value == pytest.approx(last["kl"] / 60 / last["nll"]) and found.value > 1
    assert run(sb.MeanField.paper(), few, batch_size=20, kl_weight=0.01).findings == ()


def test_the_kl_was_never_used():
    said("kl-unused", KINDS["MeanField"], kl_coefficient=1e-3, kl_every=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        run(KINDS["BatchEnsemble"], kl_weight=0.0, weight_decay=1e-2)  # it has no KL


def test_noise_drowns_the_signal():
    said("noise-drowns", sb.MeanField.paper(stddev_init=0.8), kl_weight=0.1, lr=2e-3)


@pytest.mark.parametrize("method", [KINDS["BatchEnsemble"], KINDS["MeanField"]])
def test_validation_data_of_another_kind(method):
    """Confident and wrong on half of them. MeanField's own validation is one draw, so another batch is drawn."""
    x, y = HELD
    _, found = said(
        "overconfident", method, validation=(x, torch.where(torch.arange(300) % 2 == 0, y, (y + 1) % 3))
    )
    count = 100 if method is KINDS["MeanField"] else 300
    assert f"{count} validation examples" in found.what


def test_coverage_of_intervals():
    x = TRAIN[0]
    y = x[:, :1] + 0.1 * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(5)
    model = sb.bayesianize(nn.Linear(8, 1), sb.Deterministic())
    fixed = {"epochs": 10, "batch_size": 100, "lr": 2e-2, "progress": False, "validation": 0.2}
    with pytest.warns(ModelWarning, match="90 % intervals cover 100.0% of 300 validation targets"):
        result = sb.fit(model, (x, y), likelihood=sb.Gaussian(precision=1.0), **fixed)
    assert [finding.kind for finding in result.findings] == ["underconfident"]
    assert sb.fit(model, (x, y), likelihood=sb.Gaussian(precision=100.0), **fixed).findings == ()


def test_the_weights_that_are_kept_are_judged():
    """With early stopping the last validation is of weights that are not kept."""
    seen = []

    def spoil(step, row):
        seen.extend(row[key] for key in ("validation_nll",) if key in row)
        if step > 100:  # the training goes wrong, and the best weights come back
            with torch.no_grad():
                model[2].weight.mul_(30.0)

    model = build(KINDS["BatchEnsemble"])
    result = sb.fit(
        model, TRAIN, epochs=12, batch_size=100, lr=2e-2, weight_decay=1e-2, validation=HELD, early_stopping=3,
        progress=False, callback=spoil,
    )  # fmt: skip
    assert result.stopped_early and seen[-1] > 2 * min(seen) and result.findings == ()


class Moody(nn.Module):
    """A network that runs in training alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        if not self.training:
            raise RuntimeError("not in eval mode")
        return self.layer(x)


def test_a_look_that_fails_loses_no_training():
    model = sb.bayesianize(Moody(), sb.MeanField())
    result = sb.fit(model, TRAIN, epochs=1, batch_size=500, kl_weight=1e-3, progress=False)
    assert result.step == 3 and result.findings == ()


def test_a_look_costs_less_than_a_step(monkeypatch):
    """Two passes over the last batch, whatever the length of the run."""
    passes = []
    honest = judging.behaviour.outputs
    monkeypatch.setattr(judging.behaviour, "outputs", lambda *a, **k: passes.append(1) or honest(*a, **k))
    for epochs in (1, 3):
        run(KINDS["MeanField"], epochs=epochs, kl_weight=1e-3)
        assert len(passes) == 2
        passes.clear()


def test_draws_after_training_are_what_they_were():
    """The look at the end leaves torch's generator and the model's mode alone."""
    torch.manual_seed(9)
    model = build(KINDS["MeanField"])
    before = torch.get_rng_state()
    sb.fit(model, TRAIN, epochs=1, batch_size=500, progress=False, kl_weight=1e-3)
    assert torch.equal(before, torch.get_rng_state()) and not model.training
