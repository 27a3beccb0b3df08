"""The EMP paper's counts, priors and trend: what the runners find against closed forms and by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.experiments import emp_cards, emp_counts, emp_priors, find
from slimbayes.lab.experiments.emp_cards import CARDS, Trend, fit_trend, jackknife
from slimbayes.lab.experiments.emp_priors import Prior, functions, measured
from slimbayes.lab.experiments.running import RUNNERS
from slimbayes.lab.experiments.session import Session

K = 5


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    small = Session("smoke", tmp_path_factory.mktemp("work"))
    names = ("emp/figure1", "emp/table1", "emp/figure3", "emp/table3")
    return {name: RUNNERS[name].report(small, "") for name in names}


def test_everything_that_was_to_hold_holds(outcomes):
    for name, outcome in outcomes.items():
        assert outcome.deviations and bool(outcome.checks) == (name != "emp/figure1"), name
        assert [one["what"] for one in outcome.checks if not one["holds"]] == [], name


def test_table1_is_the_print_in_all_its_digits(outcomes):
    (table,) = outcomes["emp/table1"].tables
    printed = find("emp/table1").table("overhead")
    for label, column in itertools.product(printed.rows, printed.columns):
        assert float(f"{table.mean(label, column):.3g}") == printed.value(label, column), (label, column)
    # by hand: 20 norms of 4,800 channels and an output of 512·1000 + 1000, four more of each
    assert table.mean("EMP", "ResNet-18") == pytest.approx(
        (11_689_512 + 4 * (9_600 + 513_000)) / 1e6, abs=1e-9
    )
    assert table.mean("EMP", "PyramidNet") == pytest.approx(
        (28_511_307 + 4 * (49_798 + 28_700)) / 1e6, abs=1e-9
    )
    norms = outcomes["emp/table1"].checks[-1]
    assert (
        norms["value"] == pytest.approx(100 * 4 * 9_600 / 11_689_512, rel=1e-12)
        and round(norms["value"], 4) == 0.3285
    )


def test_a_wrong_count_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(emp_counts, "COMPONENTS", 4)
    wrong = [
        one["what"] for one in emp_counts.table1(Session("smoke", tmp_path), "").checks if not one["holds"]
    ]
    assert len(wrong) == 5 and all(
        what.startswith("EMP") for what in wrong
    )  # two networks, and the norms alone


def test_table3_in_closed_form(outcomes):
    table, sizes = outcomes["emp/table3"].tables
    mlp, normed = "MLP, L = H = 100", "MLP, L = H = 100, with its norms"
    layers = width = 100
    base, norms, output = (layers - 1) * (width**2 + width) + width**2, (layers - 1) * 2 * width, width**2
    for label, expected in (
        ("EMP", base + (K - 1) * (norms + output)), ("ECMP", base + (K - 1) * (norms + output)),
        ("Dropout", base), ("DropConnect", base), ("Explicit ensemble", K * base),
    ):  # fmt: skip
        assert table.mean(label, mlp) == expected
    assert table.mean("EMP", normed) == table.mean("EMP", mlp) + norms
    bits = math.log2(K)
    assert sizes.mean("EMP", "ResNet-18") == pytest.approx((20 + 1) * bits)
    assert sizes.mean("EMP", "PyramidNet") == pytest.approx((164 + 1) * bits)
    assert sizes.mean("ECMP", "ResNet-18") == pytest.approx((9_600 + 513_000) * bits)
    assert sizes.mean("ECMP", mlp) == pytest.approx((norms + output) * bits)
    # dropped before norms: the stem at 112, its first stage at 56, then 28, 14 and 7 pixels with a shortcut's norm each
    pixels = [64 * 112**2, 4 * 64 * 56**2, 5 * 128 * 28**2, 5 * 256 * 14**2, 5 * 512 * 7**2]
    assert sizes.mean("Dropout", "ResNet-18") == sum(pixels)
    assert sizes.mean("DropConnect", "ResNet-18") == 11_689_512 - 9_600 - 1_000


def test_ensembles_of_a_small_network_by_listing_them():
    """Distinct functions of a patched network: as many as the indices of its layers can make."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model = sb.bayesianize(net, sb.EMP(2, patch=("norm", "output"), init_noise=1.0))
    with torch.no_grad():
        draws = sb.draw(model, torch.randn(5, 3), samples=200, seed=0)
    distinct = {tuple(one.flatten().mul(1e4).round().tolist()) for one in draws}
    assert len(distinct) == 2 ** len(sb.summary(model).rows) == 4


@pytest.mark.parametrize("label", ["Whole network", "Dropout", "EMP"])
def test_priors_have_the_expected_jumps_and_spread(label):
    prior = Prior(units=30, span=8.0)
    values = functions(prior, label, 300, seed=3)
    jumps = measured(values)["jumps"]
    error = float(jumps.std() / 300**0.5)
    assert abs(float(jumps.mean()) - prior.jumps(label)) < 4 * error and error < 0.05 * prior.jumps(label)
    across = values[:, -1] - values[:, 0]
    # the standard deviation of a standard deviation, with room for heavy tails
    assert float(across.square().mean().sqrt()) == pytest.approx(prior.spread(label), rel=0.2)


def test_a_dropped_unit_keeps_its_jump_with_probability_a_quarter():
    whole, dropped = Prior().jumps("EMP"), Prior().jumps("Dropout")
    exact = 100 * 2 / math.pi * math.atan(10.0 / 4.0)
    assert whole < exact and exact - whole < 0.03 * exact  # two jumps in one step of the grid count as one
    assert dropped < exact / 4 and exact / 4 - dropped < 0.01 * exact / 4


def test_jumps_and_levels_of_a_function_by_hand():
    values = torch.tensor([[0.0, 0.0, 3.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    found = measured(values)
    assert found["jumps"].tolist() == [2.0, 0.0]
    assert found["largest jump, % of the range"].tolist() == [100.0, 0.0]


def test_a_draw_is_a_function_of_the_network_itself():
    """EMP: one of the K · K combinations of whole layers, as plain arithmetic has them."""
    prior = Prior(units=7, components=2)
    torch.manual_seed(1)
    model = emp_priors.patched(prior)
    (w, b), (v, c) = ((layer.weight.detach(), layer.bias.detach()) for layer in (model[0], model[2]))
    x = torch.linspace(-3, 3, 11, dtype=torch.float64).unsqueeze(-1)
    known = [(x @ w[i].T + b[i]).sign() @ v[j].T + c[j] for i, j in itertools.product(range(2), repeat=2)]
    with torch.no_grad():
        draws = sb.draw(model, x, samples=40, seed=0, noise="shared")
    nearest = torch.stack([(draws - one).abs().amax((1, 2)) for one in known]).argmin(0)
    assert set(nearest.tolist()) == {0, 1, 2, 3}
    assert all(torch.allclose(one, known[which]) for one, which in zip(draws, nearest.tolist(), strict=True))


def test_kept_weights_are_the_priors_own():
    """No division by 1 − p: with nothing dropped the function is the plain network's."""
    prior = Prior(units=9, rate=1e-12)
    torch.manual_seed(2)
    plain = emp_priors._network(prior)
    torch.manual_seed(2)
    model = emp_priors.dropped(prior)
    x = torch.randn(20, 1, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(sb.draw(model, x, noise="shared", seed=0)[0], plain(x), rtol=1e-9)
        halved = emp_priors.dropped(Prior(units=9, rate=0.5))
        kept = sb.draw(halved, x, samples=50, noise="shared", seed=0)
    weights = 2 * halved[2].weight.detach().abs()
    assert float((kept - halved[2].bias.detach()).abs().max()) <= float(weights.sum()) + 1e-9


@pytest.mark.parametrize(("years", "gamma"), [(3.2, 0.3), (1.5, -2.0), (12.0, 0.0)])
def test_the_fit_finds_a_known_doubling_time(years, gamma):
    x = np.linspace(2004, 2019, 40)
    y = np.exp2((x - 2010) / years) + gamma
    found = fit_trend(x.tolist(), y.tolist())
    assert found.years == pytest.approx(years, rel=1e-5) and found.gamma == pytest.approx(gamma, abs=1e-4)
    assert found.alpha * 2010 + found.beta == pytest.approx(0.0, abs=1e-3)
    np.testing.assert_allclose(found(x), y, rtol=1e-5)
    if gamma == 0.0:
        assert fit_trend(x.tolist(), y.tolist(), intercept=False).years == pytest.approx(years, rel=1e-6)


@pytest.mark.parametrize("intercept", [True, False])
def test_the_fit_is_where_the_gradient_vanishes(intercept):
    years, memory = emp_cards.cards()
    trend = fit_trend(years, memory, intercept)
    x, y = np.array(years), np.array(memory)

    def loss(alpha, factor, gamma):
        return float(np.square(Trend(alpha, factor, gamma, trend.origin)(x) - y).sum())

    best = (trend.alpha, trend.factor, trend.gamma)
    for place in range(3 if intercept else 2):
        for change in (-1e-4, 1e-4):
            other = list(best)
            other[place] += change
            assert loss(*other) > loss(*best)


def test_noisy_cards_give_the_years_within_their_error():
    random = np.random.default_rng(0)
    x = random.uniform(2004, 2019, 200)
    y = np.exp2((x - 2010) / 3.2) + 0.3 + random.normal(0, 0.3, 200)
    found, error = fit_trend(x.tolist(), y.tolist()).years, jackknife(x.tolist()[:60], y.tolist()[:60], True)
    assert found == pytest.approx(3.2, abs=0.2) and 0.01 < error < 0.6


@pytest.mark.parametrize(
    ("years", "memory", "words"),
    [
        ([2000, 2001], [1.0, 2.0], "give at least 3"),
        ([2000, 2001, 2001], [1.0, 2.0, 2.0], "at least 3 different years"),
        ([2000, 2001, 2002, 2003], [1.0, 2.0, math.nan, 4.0], "must be finite"),
        ([2000, 2001, 2002, 2003], [4.0, 3.0, 2.0, 1.0], "do not grow exponentially"),
    ],
)
def test_what_cannot_be_fitted_says_so(years, memory, words):
    with pytest.raises(ValueError, match=words):
        fit_trend(years, memory)


def test_cards_are_told_apart_and_in_order(outcomes):
    assert len({name for name, *_ in CARDS}) == len(CARDS)
    when = [(year, month) for _, year, month, _ in CARDS]
    assert when == sorted(when) and all(1 <= month <= 12 for _, month in when)
    largest = {name: (year, memory / 1024) for name, year, _, memory in CARDS}
    assert (largest["GeForce GTX Titan X"], largest["Titan RTX"]) == emp_cards.TEXT
    fit, text = outcomes["emp/figure1"].tables
    assert list(fit.rows) == list(find("emp/figure1").table("fit").rows)
    assert text.document()["rows"][0]["values"] == {"years": [3.0]}
    assert any("not published" in words for words in outcomes["emp/figure1"].deviations)
