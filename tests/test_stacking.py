"""``stack``: against a grid over the simplex, closed forms, and the bound on what is missing."""

import itertools

import pytest
import torch

import slimbayes as sb


def score(weights, p):
    return (weights @ p).log().mean(-1)


def grid(members, steps):
    """Every point of the simplex whose coordinates are multiples of 1/steps."""
    cuts = itertools.combinations(range(steps + members - 1), members - 1)
    rows = []
    for cut in cuts:
        edges = (-1, *cut, steps + members - 1)
        rows.append([b - a - 1 for a, b in itertools.pairwise(edges)])
    return torch.tensor(rows, dtype=torch.float64) / steps


@pytest.mark.parametrize("seed", range(4))
def test_no_point_of_a_grid_is_better(seed):
    torch.manual_seed(seed)
    logits = 2 * torch.randn(3, 40, 5, dtype=torch.float64)
    targets = torch.randint(5, (40,))
    w = sb.stack(logits.log_softmax(-1), targets, tolerance=1e-9)
    p = logits.softmax(-1)[:, torch.arange(40), targets]
    points = grid(3, 100)
    scores = score(points, p)
    assert float(w.sum()) == pytest.approx(1) and bool((w >= 0).all())
    assert float(score(w, p)) >= float(scores.max()) - 1e-9
    assert float((w - points[scores.argmax()]).abs().max()) < 0.02
    torch.testing.assert_close(sb.stack(p.log(), tolerance=1e-9), w)


def test_predictions_that_are_right_in_turn_have_the_shares_in_which_they_are():
    right = torch.full((3, 10), float("-inf"))
    right[0, :6], right[1, 6:9], right[2, 9:] = 0.0, -1.0, -2.0  # how sure they are does not matter
    torch.testing.assert_close(sb.stack(right), torch.tensor([0.6, 0.3, 0.1]), atol=1e-5, rtol=0)


def test_one_prediction_better_everywhere_gets_everything():
    p = torch.tensor([[0.9, 0.8, 0.7], [0.5, 0.4, 0.3], [0.8, 0.7, 0.6]])
    w = sb.stack(p.log())
    assert float(w[0]) > 1 - 1e-4
    assert float(sb.stack(p[:1].log())) == 1.0
    equal = sb.stack(p[:1].expand(4, -1).log())
    torch.testing.assert_close(equal, torch.full((4,), 0.25))


def test_many_predictions_reach_the_bound():
    torch.manual_seed(0)
    p = torch.randn(60, 500, 10).mul(1.5).softmax(-1)[..., 0].double()
    w = sb.stack(p.log(), tolerance=1e-5)
    g = (p / (w @ p)).mean(1)
    assert float(g.max()) - 1 <= 1.1e-5
    assert float(score(w, p)) > float(score(torch.full_like(w, 1 / 60), p))


def test_extreme_probabilities_and_small_types():
    log_p = torch.tensor([[-2000.0, -1.0], [-2001.0, -900.0]])
    w = sb.stack(log_p)
    assert float(w[0]) > 0.999 and w.dtype == torch.float32
    assert sb.stack(log_p.bfloat16()).dtype == torch.float32


def test_an_early_end_is_said(monkeypatch):
    from slimbayes.verbs import stacking

    monkeypatch.setattr(stacking, "_MOST", 2)
    with pytest.warns(UserWarning, match=r"stopped after 2 steps, .* nats or less from the highest score"):
        sb.stack(torch.randn(5, 50).log_softmax(0), tolerance=1e-12)


@pytest.mark.parametrize(
    ("log_probs", "targets", "says"),
    [
        (torch.zeros(3), None, r"shape \[3\]: give \[M, N\]"),
        (torch.zeros(3, 4), torch.zeros(4, dtype=torch.long), r"shape \[3, 4\]: give \[M, N, C\]"),
        (torch.zeros(3, 4, 2), torch.zeros(5, dtype=torch.long), "give 4 classes as integers"),
        (torch.zeros(3, 4, 2), torch.zeros(4), "give 4 classes as integers"),
        (torch.zeros(3, 4, 2), torch.full((4,), 2), r"must lie in 0\.\.1"),
        (torch.full((2, 3), float("-inf")), None, "probability 0 in every prediction"),
        (torch.full((2, 3), float("nan")), None, "not finite"),
    ],
)
def test_errors_say_what_to_give(log_probs, targets, says):
    with pytest.raises(ValueError, match=says):
        sb.stack(log_probs, targets)
