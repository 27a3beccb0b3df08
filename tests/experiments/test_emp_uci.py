"""The EMP paper's regressions: densities, figures, checks and the rows of the tables."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.data import Dataset, Scaling, Split
from slimbayes.lab.experiments import emp_uci, emp_uci_tables
from slimbayes.lab.experiments.emp_regressions import SETS
from slimbayes.lab.experiments.outcome import Row, Table
from slimbayes.lab.experiments.results import ResultError, read_result, write_result
from slimbayes.lab.experiments.session import Session
from slimbayes.lab.models import RegressionNet


def test_density_is_that_of_a_mixture_of_gaussians():
    torch.manual_seed(0)
    draws, targets = torch.randn(7, 5, 2, dtype=torch.float64) * 4, torch.randn(5, 2, dtype=torch.float64)
    members = torch.distributions.Independent(
        torch.distributions.Normal(draws.movedim(0, 1), 1 / math.sqrt(emp_uci.TAU)), 1
    )
    weights = torch.distributions.Categorical(torch.ones(5, 7, dtype=torch.float64))
    mixture = torch.distributions.MixtureSameFamily(weights, members)
    torch.testing.assert_close(emp_uci.log_density(draws, targets), mixture.log_prob(targets))


@pytest.fixture
def two_targets():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(60, 3, generator=generator) * 5 + 2
    targets = torch.stack([inputs.sum(1) * 10, inputs[:, 0] - 7], 1)
    train, test = Split(inputs[:40], targets[:40]), Split(inputs[40:], targets[40:])
    return Dataset(
        "made", "regression", "table", train, test, Scaling.of(train.inputs), outputs=("a", "b"),
        target_scaling=Scaling.of(train.targets),
    )  # fmt: skip


@pytest.mark.parametrize("held", [1 << 23, 100])
def test_figures_are_in_the_units_of_the_targets(two_targets, monkeypatch, held):
    """A plain network, by hand; in one pass or a few rows at a time."""
    monkeypatch.setattr(emp_uci, "_HELD", {"cpu": held})
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    model = sb.bayesianize(network, sb.Deterministic())
    size = emp_uci.Size("made", 4, 1, 1, 3)
    found = emp_uci.measured(model, two_targets, size)
    for name, split in (("rmse", two_targets.test), ("train_rmse", two_targets.train)):
        with torch.no_grad():
            scaled = network(two_targets.scaling(split.inputs))
        error = (two_targets.target_scaling.undo(scaled) - split.targets).double().square()
        assert found[name] == pytest.approx(error.mean().sqrt().item(), rel=1e-5)
        if name == "rmse":
            density = 0.5 * math.log(0.1 / (2 * math.pi)) - 0.05 * error.mean().item()
            assert found["lpd"] == pytest.approx(density, rel=1e-5)


def test_draws_are_one_function_whatever_the_rows_of_a_pass(two_targets, monkeypatch):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), sb.EMP(patch=("norm",)))
    with torch.no_grad():
        model[0].weight.add_(torch.randn_like(model[0].weight))
    size = emp_uci.Size("made", 4, 1, 1, 50)
    whole = emp_uci.measured(model.eval(), two_targets, size)
    monkeypatch.setattr(emp_uci, "_HELD", {"cpu": 600})
    assert emp_uci.measured(model, two_targets, size) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("label", [name for name in SETS if name != "Year"])
def test_paper_scale_has_the_papers_values(label):
    size = emp_uci.size_of(SETS[label].data, "paper")
    assert (size.epochs, size.samples, size.batch_size) == (4000, 10_000, 100)
    assert size.hidden == (100 if label == "Protein" else 50)
    assert size.splits == (5 if label == "Protein" else 20)
    assert emp_uci.size_of(SETS[label].data, "gpu") == size


def test_training_is_the_papers(tmp_path):
    size = emp_uci.size_of("uci/boston", "paper")
    values, decayed = (emp_uci.training(Session("paper", tmp_path), size, which) for which in (False, True))
    model = emp_uci.build("EMP", emp_uci.Size("diabetes", 5, 1, 1, 1), sb.data.load("diabetes"), 0)
    groups = decayed.make_optimizer(model).param_groups
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(1e-3, 0.01)}, "all alike"
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in values.make_optimizer(model).param_groups:
        assert group["lr"] == 1e-3 and group["weight_decay"] in (0.0, 0.01)
        norms = group["weight_decay"] == 0
        assert all(("norm" in names[id(parameter)]) == norms for parameter in group["params"])


def test_patched_networks_have_norms_and_the_others_none():
    data = sb.data.load("diabetes")
    size = emp_uci.Size("diabetes", 5, 1, 1, 1)
    norms = {
        label: sum("norm" in name for name, _ in emp_uci.build(label, size, data, 0).named_parameters())
        for label in emp_uci.METHODS
    }
    assert norms == {"ECMP": 4, "EMP": 4, "Dropout": 0, "Ensemble": 0}
    same = [emp_uci.build("EMP", size, data, 1).state_dict() for _ in range(2)]
    for one, other in zip(same[0].values(), same[1].values(), strict=True):
        assert torch.equal(one, other)


def made(values, label="Boston"):
    table = Table("rmse", "RMSE", tuple(emp_uci.METHODS), over="splits")
    table.rows[label] = Row(values)
    return table


def test_checks_allow_two_standard_errors_and_rounding():
    values = {"ECMP": [3.4, 3.6], "EMP": [4.9, 5.1], "Dropout": [4.0, 4.0], "Ensemble": [4.0, 4.0]}
    checks = emp_uci_tables._checks("Boston", "rmse", made(values), [9.2])
    by_name = {one["what"]: one for one in checks}
    assert len(checks) == 4
    good = by_name["Boston, ECMP: RMSE no worse than the paper's 3.48 by more than two standard errors"]
    assert good["holds"] and good["value"] == pytest.approx(0.02)
    assert good["bound"] == f"≤ {2 * math.hypot(0.1, 0.18) + 0.005:.3f}"
    bad = by_name["Boston, EMP: RMSE no worse than the paper's 3.56 by more than two standard errors"]
    assert not bad["holds"] and bad["value"] == pytest.approx(1.44)
    assert by_name["Boston: ECMP ahead of dropout in RMSE"]["holds"]
    assert not by_name["Boston: EMP ahead of dropout in RMSE"]["holds"]


def test_a_higher_density_is_better():
    values = {method: [-2.5, -2.5] for method in emp_uci.METHODS}
    checks = emp_uci_tables._checks("Boston", "lpd", made(values), [9.2])
    assert len(checks) == 2 and all(one["holds"] and one["value"] < 0 for one in checks)
    values = {method: [-3.5, -3.5] for method in emp_uci.METHODS}
    assert not any(one["holds"] for one in emp_uci_tables._checks("Boston", "lpd", made(values), [9.2]))


def test_a_density_that_the_mean_would_have_is_not_checked():
    values = {method: [-2.073, -2.073] for method in emp_uci.METHODS}
    assert emp_uci_tables._checks("Kin8nm", "lpd", made(values, "Kin8nm"), [0.26]) == []
    assert len(emp_uci_tables._checks("Kin8nm", "rmse", made(values, "Kin8nm"), [0.26])) == 2


def test_protein_is_reported_and_not_compared(tmp_path, monkeypatch):
    values = {
        label: {"rmse": [4.0, 4.1], "lpd": [-2.9, -2.8], "train_rmse": [3.0, 3.1]}
        for label in emp_uci.METHODS
    }
    known = {"figures": values, "target_std": [6.118]}
    monkeypatch.setattr(emp_uci_tables, "figures", lambda session, job: known)
    outcome = emp_uci_tables.table("rmse", Session("gpu", tmp_path), "uci/protein")
    assert outcome.checks == [] and outcome.tables[0].mean("Protein", "EMP") == pytest.approx(4.05)
    assert "explain 90 % of the variance" in outcome.deviations[0]
    assert "4.05 on test data and 3.05 on the training data" in outcome.deviations[0]


def test_a_member_of_the_ensemble_trains_as_if_alone(tmp_path):
    """The loss is five times the mean over members: else each would be decayed five times as much."""
    data, size = sb.data.load("diabetes"), emp_uci.Size("diabetes", 5, 3, 1, 1)
    session = Session("smoke", tmp_path)
    ensemble = emp_uci.build("Ensemble", size, data, 0).double()
    first = emp_uci.build("Dropout", size, data, 0)  # the same weights, and no noise below
    alone = sb.bayesianize(RegressionNet(10, 1, 5, "none"), sb.Deterministic()).double()
    alone.load_state_dict(first.state_dict())
    values = replace(emp_uci.training(session, size), precision="64-true")
    for model, label in ((ensemble, "Ensemble"), (alone, "EMP")):
        sb.fit_many([model], data, values, likelihood=emp_uci.loss_of(label, 1), seeds=[0], progress=False)
    members = dict(ensemble.named_parameters())
    for name, value in alone.named_parameters():
        torch.testing.assert_close(members[name][0], value, rtol=1e-9, atol=1e-12)


def test_tables_of_several_settings_are_shown_as_one(tmp_path):
    tables = [
        {**made({"EMP": [1.0, 2.0]}, label).document(), "setting": setting}
        for label, setting in (("Boston", "uci/boston"), ("Wine", "uci/wine"))
    ]
    empty = {part: [] for part in ("curves", "maps", "checks", "deviations", "runs")}
    document = {
        "format": "slimbayes-experiment", "version": 1, "experiment": "emp/table12", "scale": "desk", "settings": {},
        "tables": tables, **empty, "provenance": {},
    }  # fmt: skip
    assert len(read_result(write_result(document, tmp_path))["tables"]) == 2
    from slimbayes.lab.experiments.catalogue import find
    from slimbayes.lab.experiments.tables import join, markdown, merged, note

    shown = join(merged(tables)["rmse"], find("emp/table12").table("rmse"))
    text = markdown(shown)
    assert "| Boston | – | 3.48" in text and "| Wine |" in text and "1.5 ± 0.5 | 3.56 ± 0.22" in text
    assert "over 2 splits" in note(shown)
    twice = [tables[0], {**tables[1], "rows": tables[0]["rows"]}]
    with pytest.raises(ResultError, match="two rows 'Boston'"):
        read_result(write_result({**document, "tables": twice}, tmp_path))
    with pytest.raises(ResultError, match="two tables 'rmse'"):
        read_result(write_result({**document, "tables": [tables[0], tables[0]]}, tmp_path))
