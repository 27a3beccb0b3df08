"""Abstention, detection of foreign inputs, and least expected cost."""

import math

import pytest
import torch

import slimbayes as sb
from slimbayes.decisions import Abstention, Detector, least_cost, uncertainty

D = torch.float64


def binary(count, generator):
    """Calibrated probabilities of two classes, and their targets."""
    one = torch.rand(count, generator=generator, dtype=D)
    y = (torch.rand(count, generator=generator, dtype=D) < one).long()
    return torch.stack((1 - one, one), 1), y


def test_the_risk_is_kept_as_often_as_promised():
    """Confidence c is uniform on (½, 1), the error rate above it (1 − c)/2: the true risk is known exactly."""
    generator = torch.Generator().manual_seed(0)
    broken, coverages = 0, []
    for _ in range(150):
        p, y = binary(1500, generator)
        rule = Abstention.for_risk(p, y, risk=0.15, confidence=0.9)
        true_risk = (
            rule.threshold / 2
        )  # uncertainty below t: 1 − c uniform on (0, t), an error with probability 1 − c
        broken += true_risk > 0.15
        coverages.append(rule.coverage)
        assert rule.risk <= rule.bound <= 0.15 + 1e-9
    assert broken <= 15  # 10 % of 150, and the bound is not sharp
    assert 0.35 < sum(coverages) / 150 < 0.6  # the best possible is 0.6


def test_a_wanted_coverage():
    generator = torch.Generator().manual_seed(1)
    p, y = binary(500, generator)
    rule = Abstention.for_coverage(p, 0.8)
    assert rule.coverage == 0.8 and int(rule.abstains(p).sum()) == 100
    kept = ~rule.abstains(p)
    wrong = float((p.argmax(1) != y)[kept].double().mean())
    assert wrong == pytest.approx(sb.metrics.selective_risk(p, y, coverage=0.8))
    decided = rule(p)
    assert torch.equal(decided == sb.decisions.ABSTAIN, ~kept) and torch.equal(
        decided[kept], p.argmax(1)[kept]
    )
    assert Abstention.for_coverage(p, 1.0).threshold == math.inf
    ties = torch.tensor([[0.9, 0.1]] * 3 + [[0.6, 0.4]] * 7, dtype=D)
    assert Abstention.for_coverage(ties, 0.5).coverage == 1.0  # those as sure as the last one kept are kept
    assert Abstention.for_coverage(ties, 0.25).coverage == 0.3


def test_abstention_on_real_targets():
    torch.manual_seed(2)
    scale = torch.rand(2000, 1) * 2 + 0.05
    draws = torch.cat((torch.zeros(1, 2000, 1), (-2 * scale.log()).unsqueeze(0)), -1)
    pred = sb.Gaussian(learn="per_example").predictive(draws)
    wrong = ((scale * torch.randn(2000, 1)).abs() > 1).squeeze(1)
    rule = Abstention.for_risk(pred, None, 0.1, score="variance", wrong=wrong)
    assert 0.2 < rule.coverage < 0.9 and rule.risk < 0.1 < float(wrong.float().mean())
    with pytest.raises(TypeError, match="not both"):
        Abstention.for_risk(pred, wrong, 0.1, score="variance", wrong=wrong)
    with pytest.raises(ValueError, match=r"0 \(right\) or 1"):
        Abstention.for_risk(pred, None, 0.1, score="variance", wrong=scale)
    with pytest.raises(ValueError, match="give one each"):
        Abstention.for_risk(pred, None, 0.1, score="variance", wrong=wrong[:5])


def test_no_threshold_is_an_error_with_what_would_help():
    p, y = binary(40, torch.Generator().manual_seed(3))
    with pytest.raises(
        ValueError, match=r"risk=0.001 for sure: of 40 held-out.*best bound is 0\.\d+\. Give more"
    ):
        Abstention.for_risk(p, y, risk=0.001)
    with pytest.raises(ValueError, match="coverage=0"):
        Abstention.for_coverage(p, 0.0)


def test_risk_coverage_curve():
    p, y = binary(300, torch.Generator().manual_seed(4))
    curve = sb.metrics.risk_coverage(p, y)
    assert curve.coverage[-1] == 1.0 and curve.risk[-1] == pytest.approx(1 - sb.metrics.accuracy(p, y))
    assert sum(curve.risk) / 300 == pytest.approx(sb.metrics.aurc(p, y))  # no ties
    half = curve.coverage.index(0.5)
    assert curve.risk[half] == pytest.approx(sb.metrics.selective_risk(p, y, coverage=0.5))
    assert curve.confidence == sorted(curve.confidence, reverse=True)


def test_scores():
    torch.manual_seed(5)
    draws = torch.randn(3, 6, 4, dtype=D)
    pred = sb.Categorical(temperature=2.0).predictive(draws)
    p = (draws / 2).softmax(-1).mean(0)
    first, second = p.topk(2).values.unbind(-1)
    expected = {
        "max_probability": 1 - first,
        "margin": 1 - (first - second),
        "entropy": -(p * p.log()).sum(-1),
        "mutual_information": pred.mutual_information,
        "expected_entropy": pred.expected_entropy,
        "energy": -2 * (draws / 2).logsumexp(-1).mean(0),
        "max_logit": -draws.amax(-1).mean(0),
    }
    for name, values in expected.items():
        torch.testing.assert_close(uncertainty(pred, name), values, msg=name)
    torch.testing.assert_close(uncertainty(p, "entropy"), expected["entropy"])
    assert set(expected) | {"variance", "epistemic"} == set(sb.decisions.scores.SCORES)
    one = pred.reweighted(torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(uncertainty(one, "max_logit"), -draws[1].amax(-1))
    real = sb.Gaussian().predictive(torch.randn(4, 6, 2))
    torch.testing.assert_close(uncertainty(real, "epistemic"), real.epistemic.double().sum(1))
    torch.testing.assert_close(uncertainty(real, lambda given: given.mean[:, 0]), real.mean[:, 0].double())
    with pytest.raises(ValueError, match="score='entropie' is unknown"):
        uncertainty(pred, "entropie")
    with pytest.raises(TypeError, match="score of draws"):
        uncertainty(p, "mutual_information")
    with pytest.raises(TypeError, match="use another score"):
        uncertainty(real, "energy")


def test_detector_keeps_its_false_positive_rate():
    generator = torch.Generator().manual_seed(6)
    rates, p_values = [], []
    for _ in range(200):
        p, _ = binary(200, generator)
        detector = Detector("max_probability", 0.1).fit(p[:100])
        rates.append(float(detector(p[100:]).double().mean()))
        p_values.append(detector.p_values(p[100:]))
        assert torch.equal(
            detector(p[100:]), p_values[-1] <= detector.p_values(p[100:])[detector(p[100:])].max()
        )
    assert sum(rates) / 200 == pytest.approx(1 - 91 / 101, abs=0.01)  # k = 91 of n + 1 = 101
    assert abs(float((torch.cat(p_values) <= 0.3).double().mean()) - 0.3) < 0.015


def test_detector_measures_and_refuses():
    familiar = sb.Categorical().predictive(torch.randn(4, 60, 3) * 0.1 + torch.tensor([9.0, 0.0, 0.0]))
    foreign = sb.Categorical().predictive(torch.randn(4, 60, 3))
    detector = Detector("entropy").fit(familiar)
    assert detector(foreign).float().mean() > 0.9 and detector.measure(familiar, foreign).auroc > 0.99
    assert "threshold" in repr(detector)
    with pytest.raises(ValueError, match="no threshold"):
        Detector()(foreign)
    with pytest.raises(ValueError, match=r"18 calibration points are too few for alpha=0\.05"):
        Detector().fit(familiar[:18])


def test_least_cost():
    generator = torch.Generator().manual_seed(7)
    p = torch.rand(50, 3, generator=generator, dtype=D)
    p = p / p.sum(1, keepdim=True)
    costs = torch.rand(3, 5, generator=generator, dtype=D)
    found = least_cost(p, costs)
    by_hand = torch.stack([(p * costs[:, a]).sum(1) for a in range(5)], 1)
    torch.testing.assert_close(found.cost, by_hand.min(1).values)
    assert torch.equal(found.action, by_hand.argmin(1))
    chow = least_cost(p, 1 - torch.eye(3), abstain=0.5)
    assert torch.equal(chow.action == -1, p.amax(1) < 0.5)
    assert (
        torch.equal(chow.action[chow.action >= 0], p.argmax(1)[p.amax(1) >= 0.5]) and chow.cost.max() <= 0.5
    )
    with pytest.raises(ValueError, match=r"costs \[2, 5\] do not fit 3 classes: give \[3, A\]"):
        least_cost(p, costs[:2])


def test_rules_for_real_targets_say_where_not_to_answer():
    predictive = sb.Gaussian().predictive(torch.randn(3, 600, 1, generator=torch.Generator().manual_seed(0)))
    wrong = torch.arange(600) % 20 == 0
    rule = sb.decisions.Abstention.for_risk(predictive, None, risk=0.2, score="variance", wrong=wrong)
    assert rule.abstains(predictive).shape[0] == 600
    with pytest.raises(TypeError, match="abstains"):
        rule(predictive)
