"""The rank-1 paper's entries that train no image network, and its counts: against closed forms, scipy and by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import nn

import slimbayes as sb
from slimbayes.core import priors
from slimbayes.lab.experiments import (
    find,
    rank1_counts,
    rank1_priors,
    rank1_scores,
    rank1_settings,
    rank1_theorem,
)
from slimbayes.lab.experiments import rank1_values as values
from slimbayes.lab.experiments.rank1_counts import counts, factors, overhead, parameter_checks, parameters_of
from slimbayes.lab.experiments.rank1_priors import InverseGamma, density, horseshoe, quantiles, tail
from slimbayes.lab.experiments.rank1_tables import STEPS
from slimbayes.lab.experiments.running import RUNNERS
from slimbayes.lab.experiments.session import Session

NAMES = ("rank1/figure1", "rank1/table5", "rank1/table6", "rank1/table7", "rank1/theorem1")
X = torch.logspace(-3, 1.5, 40, dtype=torch.float64)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    small = Session("smoke", tmp_path_factory.mktemp("work"))
    return {name: RUNNERS[name].report(small, "") for name in NAMES}


def test_everything_that_was_to_hold_holds(outcomes):
    for name, outcome in outcomes.items():
        assert outcome.deviations and outcome.checks and not find(name).needs, name
        assert [one["what"] for one in outcome.checks if not one["holds"]] == [], name


# Counts


def test_parameters_are_those_of_the_reference():
    ten, hundred, images = rank1_settings.cifar(10), rank1_settings.cifar(100), rank1_settings.imagenet()
    wanted = {
        "Deterministic": (36_479_194, 36_536_884, 25_557_032),
        "BatchEnsemble": (36_557_548, 36_615_868, 25_768_588),
        "Rank-1 Gaussian": (36_635_872, 36_694_552, 25_977_144),
        "Rank-1 Cauchy": (36_635_872, 36_694_552, 25_977_144),
    }
    for settings, place in ((ten, 0), (hundred, 1), (images, 2)):
        found = {label: parameters_of(setting, label) for setting in settings for label in setting.methods}
        assert {label: found[label] for label in wanted} == {k: v[place] for k, v in wanted.items()}
    assert (factors(ten[0]), factors(hundred[0]), factors(images[0])) == (19_581, 19_671, 52_139)
    assert counts("rank1/table2")["Ensemble 4×WRN-28-5"] == 4 * 9_132_634


@pytest.mark.parametrize("name", rank1_counts.COUNTED)
def test_counts_are_as_printed_or_have_an_erratum(name):
    entry, checks = find(name), parameter_checks(name)
    assert list(counts(name)) == list(entry.printed[0].rows)
    assert all(one["holds"] for one in checks), [one for one in checks if not one["holds"]]
    wrong = [one["what"].partition(":")[0] for one in checks if "erratum" in one["what"]]
    assert (
        wrong
        == {
            "rank1/table1": ["Ensemble 4×ResNet-50"],
            "rank1/table2": ["Ensemble 4×WRN-28-5"],
            "rank1/table3": ["Rank-1 Gaussian", "Rank-1 Cauchy", "Ensemble 4×WRN-28-5"],
        }[name]
    )


def test_a_wrong_count_would_be_noticed(monkeypatch):
    plain = rank1_counts._count
    monkeypatch.setattr(rank1_counts, "_count", lambda *given: plain(*given) + 100_000)
    held = [one["holds"] for one in parameter_checks("rank1/table2")]
    assert held.count(False) >= 8


def test_a_small_network_by_hand():
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.Flatten(), nn.Linear(5, 2))
    base = sum(p.numel() for p in net.parameters())
    model = sb.bayesianize(net, sb.Rank1(components=4))
    assert sum(p.numel() for p in model.parameters()) == base + 2 * 4 * (3 + 5 + 5 + 2) + 3 * 2


def test_the_texts_share_of_ten_components_is_that_of_one():
    resnet = find("rank1/table1").settings[2]
    assert [round(overhead(resnet, k), 1) for k in (1, 10)] == [0.4, 4.1]
    assert round(overhead(resnet, 10, spreads=1), 1) == 2.1
    assert any(
        "K = 10 adds 4.1 % (BatchEnsemble 2.1 %)" in sentence for sentence in find("rank1/table1").errata
    )


def test_what_cannot_be_counted_says_so():
    setting = rank1_settings.gaussian_cifar(10)
    with pytest.raises(ValueError, match="no row 'EMP'; it has Rank-1 Gaussian"):
        parameters_of(setting, "EMP")
    with pytest.raises(ValueError, match="mimic3"):
        factors(rank1_settings.mimic()[0])
    with pytest.raises(ValueError, match="no column of parameters"):
        counts("rank1/table8")


# Hyper-parameters


def test_tables_have_the_printed_rows_from_the_settings(outcomes):
    for name in NAMES[1:4]:
        (table,), (printed,) = outcomes[name].tables, find(name).printed
        assert list(table.rows) == [row for row in printed.rows if row != "cores"]
        for row in table.rows:
            for column in printed.columns:
                ours, theirs = table.mean(row, column), printed.value(row, column)
                stretched = 1.25 if name == "rank1/table5" and "decay, epoch" in row else 1.0
                assert ours == pytest.approx(stretched * theirs, rel=1e-12), (name, row, column)
    drops = [
        outcomes["rank1/table5"].tables[0].mean(f"{w} decay, epoch", "CIFAR-10, Normal")
        for w in values.ORDINALS
    ]
    assert drops == pytest.approx([100, 200, 225])


def test_a_changed_setting_or_a_missing_erratum_fails():
    entry = find("rank1/table5")
    (printed,) = entry.printed
    errata = {"first decay, epoch": STEPS}

    def failed(entry, **training):
        changed = dataclasses.replace(entry.settings[0], training={**entry.settings[0].training, **training})
        ours = {"CIFAR-10, Normal": values.image_values(changed, 8)}
        checks = values.compared(entry, printed, ours, errata)
        return [one["what"].partition(":")[0] for one in checks if not one["holds"]]

    assert failed(entry) == ["second decay, epoch", "third decay, epoch"]  # no erratum was given for these
    assert "l2" in failed(entry, l2=2e-4) and "base learning rate" in failed(entry, lr=0.2)
    assert "first decay, epoch" in failed(entry, milestones=[0.32, 0.8, 0.9])  # the printed 80
    assert "first decay, epoch" in failed(dataclasses.replace(entry, errata=()))


# Priors


@pytest.mark.parametrize(
    ("prior", "pdf"),
    [
        (priors.Normal(0.0, 1.0), lambda r: stats.norm.pdf(r)),
        (priors.Cauchy(1.0, 0.1), lambda r: stats.cauchy.pdf(r, 1.0, 0.1)),
        (priors.Normal(1.0, 0.1), lambda r: stats.norm.pdf(r, 1.0, 0.1)),
        (InverseGamma(3.0), lambda r: 2 * r * stats.invgamma.pdf(r * r, 1.5, scale=1.5) if r > 0 else 0.0),
    ],
)
def test_densities_are_scipys_integrals(prior, pdf):
    for x in (0.3, 1.0, 4.0):
        edges = (-np.inf, -2.0, -1e-9, 1e-9, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 10.0, np.inf)
        pieces = [
            integrate.quad(
                lambda r, x=x: stats.norm.pdf(x / r) / abs(r) * pdf(r) if r else 0.0, *ends, epsabs=1e-13
            )[0]
            for ends in itertools.pairwise(edges)
        ]
        assert float(density(prior, torch.tensor([x]).double())) == pytest.approx(sum(pieces), rel=1e-6)


def test_closed_forms_are_scipys():
    z = (X.square() / 2).numpy()
    kept = z < 500
    exact = np.exp(z[kept]) * special.exp1(z[kept]) / math.sqrt(2 * math.pi**3)
    np.testing.assert_allclose(horseshoe(X).numpy()[kept], exact, rtol=1e-12)
    np.testing.assert_allclose(rank1_priors.bessel(X).numpy(), special.k0(X.numpy()) / math.pi, rtol=1e-12)
    np.testing.assert_allclose(rank1_priors.student(X).numpy(), stats.t.pdf(X.numpy(), 3), rtol=1e-12)
    np.testing.assert_allclose(tail(InverseGamma(3.0), X).numpy(), 2 * stats.t.sf(X.numpy(), 3), rtol=1e-9)


def test_quantiles_and_tails_are_inverse():
    p = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    for prior in (None, *rank1_priors.SHOWN.values(), *rank1_priors.trained().values()):
        torch.testing.assert_close(1 - tail(prior, quantiles(prior, p)), p, rtol=0, atol=1e-9)


def test_samples_of_another_prior_are_told_apart():
    wrong = rank1_priors.sampled(priors.Normal(0.0, 1.05), 200_000)
    assert rank1_priors.distance(priors.Normal(0.0, 1.0), wrong) > 1.95


# Theorem 1


def test_the_network_is_at_a_minimum_and_the_sides_agree_by_layer():
    problem = rank1_scores.trained(3)
    known = rank1_scores.exact(problem)
    assert float(known.first.sum(0).abs().max()) < 1e-9
    assert float(torch.linalg.eigvalsh(known.second)[0]) > 0
    for layer in range(rank1_scores.DEPTH):
        alone = torch.zeros_like(problem.sigma)
        alone[layer] = problem.sigma[layer]
        one = dataclasses.replace(problem, sigma=alone)
        thin, full = rank1_scores.exact_factors(one), known.of(one.covariance())
        for quantity in rank1_scores.QUANTITIES:
            assert thin[quantity] == pytest.approx(full[quantity], rel=1e-9) and thin[quantity] > 0
            assert known.of(one.covariance("jk"))[quantity] != pytest.approx(full[quantity], rel=1e-3)


def test_derivatives_are_differences():
    problem = rank1_scores.trained(1)
    known = rank1_scores.exact(problem)
    torch.manual_seed(0)
    delta = torch.randn_like(problem.weights)
    ends = [problem.weights + h * delta for h in (1e-5, -1e-5)]
    slope = (problem.losses(ends[0]) - problem.losses(ends[1])) / 2e-5
    torch.testing.assert_close(slope, known.first @ delta.flatten(), rtol=1e-6, atol=1e-7)
    scores = rank1_scores.gradients(problem, torch.stack(ends))
    torch.testing.assert_close(
        (scores[0] - scores[1]) / 2e-5, known.second @ delta.flatten(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("side", ["s", "W"])
def test_samples_have_the_covariance(side):
    problem, number = rank1_scores.trained(0), 40_000
    delta = rank1_theorem.perturbations(problem, side, number, seed=5).flatten(2)  # [draws, layers, M²]
    found = torch.einsum("dhp,dhq->hpq", delta, delta) / number
    wanted = problem.covariance()
    scale = wanted.diagonal(dim1=1, dim2=2).sqrt()
    gap = (found - wanted) / (scale.unsqueeze(1) * scale.unsqueeze(2))
    assert float(gap.abs().max()) < 5 * math.sqrt(2 / number)
    across = torch.einsum("dp,dq->pq", delta[:, 0] / scale[0], delta[:, 1] / scale[1]) / number
    assert float(across.abs().max()) < 5 / math.sqrt(number)  # layers are independent


def test_ratios_go_to_one(outcomes):
    for table in outcomes["rank1/theorem1"].tables[1:]:
        away = [abs(table.mean(row, "first order exact: ratio − 1")) for row in table.rows]
        assert away == sorted(away, reverse=True) and away[0] > 1e-3 and away[-1] < 1e-4
