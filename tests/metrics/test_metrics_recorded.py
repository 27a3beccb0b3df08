"""Every metric gives what was recorded: values of naive code (recording.py), so that a later change is noticed."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes import metrics

RECORD = json.loads(Path(__file__).with_name("recorded.json").read_text())
F64 = torch.float64
SINGLE = ("auroc", "auc_pr", "ood_scores")  # torchmetrics returns these in float32


def name_of(case):
    metric, names, options, _ = case
    return "-".join([metric, *names, *map(str, options.values())])


def given(name):
    value = RECORD["inputs"][name]
    if isinstance(value, dict):
        return value
    integers = name in ("y", "labels")
    return torch.tensor(value, dtype=torch.long if integers else F64)


def plain(value):
    """Lists, dicts and floats of what a metric returns."""
    if dataclasses.is_dataclass(value):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def assert_same(found, expected, tolerance=1e-9):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key], 1e-6 if key in SINGLE else tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair, tolerance)
    else:
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", RECORD["cases"], ids=name_of)
def test_a_metric_is_what_was_recorded(case):
    metric, names, options, expected = case
    arguments = [given(name) for name in names]
    options = dict(options)
    precision = options.pop("precision", None)
    if precision is not None:  # recorded with the draws of a network's outputs
        arguments[0] = sb.Gaussian(precision=precision).predictive(arguments[0])
    if "clean_error" in options:
        errors, baseline = arguments
        clean, reference = options["clean_error"], options["baseline_clean_error"]
        found = getattr(metrics, metric)(errors, clean, baseline, reference)
    else:
        found = getattr(metrics, metric)(*arguments, **options)
    assert_same(plain(found), expected, 1e-6 if metric in SINGLE else 1e-9)


def test_every_function_is_recorded():
    functions = {name for name in metrics.__all__ if inspect.isfunction(getattr(metrics, name))}
    assert functions == {case[0] for case in RECORD["cases"]}


@pytest.mark.parametrize(
    "case", RECORD["evaluations"], ids=lambda case: f"{case['likelihood']}-{len(case['w'])}"
)
def test_evaluate_gives_what_was_recorded(case):
    """All entries of the dict and no others; three members, batches of 32, 32 and 16."""
    w, x = (torch.tensor(case[name], dtype=F64) for name in ("w", "x"))
    net = nn.Linear(4, len(w), bias=False, dtype=F64)
    model = sb.bayesianize(net, sb.BatchEnsemble(components=3))
    with torch.no_grad():
        net.weight.copy_(w)
        net.bayes.r.loc.copy_(torch.tensor(case["r"], dtype=F64))
        net.bayes.s.loc.copy_(torch.tensor(case["s"], dtype=F64))
    y = torch.tensor(case["y"], dtype=torch.long if case["likelihood"] == "Categorical" else F64)
    likelihood = {"Gaussian": sb.Gaussian(precision=2.0), "Bernoulli": sb.Bernoulli()}.get(
        case["likelihood"], sb.Categorical()
    )
    found = sb.evaluate(model, list(zip(x.split(32), y.split(32), strict=True)), likelihood=likelihood)
    assert_same(found, case["expected"])
