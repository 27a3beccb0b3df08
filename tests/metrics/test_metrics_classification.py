"""Likelihood, accuracy, Brier score, ranking, selective prediction: by hand, brute force, scikit-learn."""

import math

import pytest
import sklearn.metrics as reference
import torch
from helpers_metrics import close, problem
from hypothesis import given, settings
from hypothesis import strategies as st

from slimbayes import metrics

P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.04, 0.9, 0.06]])
Y = torch.tensor([0, 2, 2, 0])


def test_by_hand():
    close(metrics.nll(P, Y), -sum(map(math.log, (0.7, 0.3, 0.4, 0.04))) / 4, 1e-6)
    close(metrics.accuracy(P, Y), 0.5)
    close(metrics.top_k_accuracy(P, Y, k=2), 0.75)
    close(metrics.top_k_accuracy(P, Y, k=3), 1.0)
    # (.09+.04+.01) + (.01+.36+.49) + (.09+.09+.36) + (.9216+.81+.0036)
    close(metrics.brier(P, Y), (0.14 + 0.86 + 0.54 + 1.7352) / 4, 1e-6)
    close(metrics.brier(P, Y, tfp=True), (0.14 + 0.86 + 0.54 + 1.7352) / 4 - 1, 1e-6)


def test_against_scikit_learn():
    p, y = problem()
    close(metrics.nll(p, y), reference.log_loss(y, p))
    close(metrics.accuracy(p, y), reference.accuracy_score(y, p.argmax(-1)))
    for k in (1, 2, 4):
        close(metrics.top_k_accuracy(p, y, k), reference.top_k_accuracy_score(y, p, k=k))
    p, y = problem(classes=2)
    close(metrics.brier(p, y), 2 * reference.brier_score_loss(y, p[:, 1]))
    for scores in (p[:, 1], 1000 * p[:, 1] - 500, (p[:, 1] * 8).round()):  # logits and ties too
        close(metrics.auroc(scores, y), reference.roc_auc_score(y, scores), 1e-6)
        close(metrics.auc_pr(scores, y), reference.average_precision_score(y, scores), 1e-6)


def test_scores_beyond_the_reach_of_a_sigmoid_keep_their_order():
    """A library that squashes scores outside [0, 1] would tie these."""
    scores, labels = torch.tensor([100.0, 200.0, 300.0, 400.0]), [0, 1, 0, 1]
    close(metrics.auroc(scores, labels), 0.75)


def test_auroc_is_the_probability_to_rank_a_pair_right():
    p, y = problem(rows=60, classes=2)
    scores = (p[:, 1] * 10).round()
    positive, negative = scores[y == 1], scores[y == 0]
    difference = positive[:, None] - negative[None]
    close(metrics.auroc(scores, y), float(((difference > 0) + 0.5 * (difference == 0)).double().mean()), 1e-6)


def test_ood_scores():
    inside, outside = torch.rand(40), torch.rand(25) * 3
    found = metrics.ood_scores(inside, outside)
    labels = [0] * 40 + [1] * 25
    close(found.auroc, reference.roc_auc_score(labels, torch.cat((inside, outside))), 1e-6)
    close(found.aupr, reference.average_precision_score(labels, torch.cat((inside, outside))), 1e-6)


def test_gibbs_nll():
    p, y = problem(draws=7)
    close(metrics.gibbs_nll(p, y), sum(metrics.nll(each, y) for each in p) / 7)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 30), st.integers(2, 7))
@settings(max_examples=40, deadline=None)
def test_jensen(seed, draws, rows, classes):
    p, y = problem(seed, rows, classes, draws)
    assert metrics.nll(p.mean(0), y) <= metrics.gibbs_nll(p, y) + 1e-12


FUNCTIONS = [
    metrics.nll, metrics.accuracy, metrics.brier, metrics.ece, metrics.mce, metrics.adaptive_ece,
    metrics.aurc,
    lambda p, y: metrics.top_k_accuracy(p, y, 2), lambda p, y: metrics.selective_risk(p, y, 0.3),
]  # fmt: skip


@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_order_of_examples_does_not_matter(seed, rows, ties):
    p, y = problem(seed, rows, 3)
    if ties:
        p = p[torch.randint(max(1, rows // 4), (rows,))]
    order = torch.randperm(rows)
    for function in FUNCTIONS:
        close(function(p, y), function(p[order], y[order]), 1e-10)


def test_ties_go_to_the_first_class():
    p = [[0.4, 0.4, 0.2]] * 3
    close(metrics.accuracy(p, [0, 1, 2]), 1 / 3)
    close(metrics.top_k_accuracy(p, [0, 1, 2], k=2), 2 / 3)


def test_one_probability_is_that_of_class_one():
    p, y = problem(classes=2)
    for function in FUNCTIONS:
        close(function(p[:, 1], y), function(torch.stack((1 - p[:, 1], p[:, 1]), -1), y))


def test_zero_probability_is_infinitely_bad():
    assert metrics.nll([[1.0, 0.0]], [1]) == math.inf


def test_rounding_does_not_rank_examples_that_are_alike():
    """Saturated networks: all are sure to the last bit or the one before, and every second is wrong."""
    p = torch.ones(40, dtype=torch.float32)
    p[::4] -= torch.finfo(torch.float32).eps
    y = torch.arange(40) % 2
    for order in (torch.arange(40), torch.randperm(40)):
        close(metrics.aurc(p[order], y[order]), 0.5)
        close(metrics.selective_risk(p[order], y[order], 0.1), 0.5)
        close(metrics.adaptive_ece(p[order], y[order]), 0.5, 1e-6)
    close(metrics.aurc(([2e-9, 1e-9], [0, 1])), 0.75)  # any score: taken as it is


def test_aurc_against_brute_force():
    p, y = problem(rows=50)
    confidence, prediction = p.max(-1)
    wrong = (prediction != y)[confidence.argsort(descending=True)].double()
    risks = [float(wrong[:i].mean()) for i in range(1, 51)]
    close(metrics.aurc(p, y), sum(risks) / 50)
    close(metrics.aurc((confidence, prediction == y)), sum(risks) / 50)
    close(metrics.selective_risk(p, y, coverage=0.3), risks[14])
    close(metrics.selective_risk(p, y, coverage=0.01), risks[0])
    close(metrics.accuracy_at_coverage(p, y, coverage=1.0), metrics.accuracy(p, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types_are_computed_wide(dtype):
    p, y = problem(dtype=dtype, classes=10)
    for function in FUNCTIONS:
        if function is not metrics.mce:  # an example that changes its bin changes the maximum
            close(function(p, y), function(p.double() / p.double().sum(-1, keepdim=True), y), 3e-2)


def test_numpy_and_gradients_are_accepted():
    p, y = problem()
    close(metrics.nll(p.numpy(), y.numpy()), metrics.nll(p, y))
    close(metrics.brier(p.clone().requires_grad_(), y), metrics.brier(p, y))


@pytest.mark.parametrize(
    ("p", "y", "says"),
    [
        (torch.randn(4, 3) * 3, Y, "logits"),
        (P.log(), Y, "logits"),
        (P * 0.9, Y, "sums to"),
        (P, Y + 1, "target 3 is out of range for 3 classes"),
        (P, Y[:3], r"targets \[3\] do not fit 4 rows"),
        (P, Y.float(), "targets.long()"),
        (P[:0], Y[:0], "no empty axis"),
        (P[None, None], Y, r"shape \[N, C\]"),
        (P.masked_fill(P == 0.9, torch.nan), Y, "1 of 12 elements of probabilities are NaN"),
        ([[1, 0]], [0], "floating-point"),
    ],
)
@pytest.mark.parametrize(
    "function", [metrics.nll, metrics.ece, metrics.adaptive_ece, metrics.aurc, metrics.brier]
)
def test_wrong_input_is_refused(function, p, y, says):
    with pytest.raises((TypeError, ValueError), match=says):
        function(p, y)


def test_other_wrong_input():
    for call, says in [
        (lambda: metrics.gibbs_nll(P.log()[None], Y), "logits"),
        (lambda: metrics.gibbs_nll([0.5], [0]), r"\[K, N, C\]"),
        (lambda: metrics.top_k_accuracy(P, Y, k=4), "k=4 for 3 classes"),
        (lambda: metrics.auroc([0.1, 0.2], [1, 1]), "both labels"),
        (lambda: metrics.auroc([0.1, 0.2], [1, 2]), "0 or 1"),
        (lambda: metrics.auc_pr([[0.1, 0.2]], [[1, 0]]), r"\[N\]"),
        (lambda: metrics.aurc(P), "pair"),
        (lambda: metrics.aurc(([0.1, 0.2], [1.0])), r"\[N\] each"),
        (lambda: metrics.aurc(([0.1, 0.2], [1.0, 0.5])), "0 .wrong. or 1"),
        (lambda: metrics.selective_risk(P, Y, coverage=0.0), "coverage=0.0"),
        (lambda: metrics.ood_scores([], [1.0]), "in_scores are empty"),
    ]:
        with pytest.raises((TypeError, ValueError), match=says):
            call()


def test_without_torchmetrics_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics.functional", None)
    with pytest.raises(ImportError, match=r"slimbayes\[metrics\]"):
        metrics.auroc([0.1, 0.2], [0, 1])
