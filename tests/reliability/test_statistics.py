"""Statistical trust in small: ranks, coverage, HMC and what theory says; and that the page has the file's figures."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import slimbayes as sb
from reliability import beside, covering, failing, simulated, statistics, trustpage
from reliability.figures import RESULTS, read_figures
from reliability.mcmc import effective_size, hmc, split_rhat

F64 = torch.float64
FAMILIES = {family.name: family for family in (*simulated.CONTAINED, *simulated.BROKEN)}


@pytest.fixture(scope="module")
def document():
    return read_figures(RESULTS / "statistics.json")


# ---- simulation-based calibration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["MeanField, shared", "KTied, rank 2, two outputs", "Rank1, four components, KL averaged"]
)
def test_ranks_are_uniform_where_the_family_holds_the_truth(name):
    found = simulated.calibrate(FAMILIES[name], replications=100, steps=250)
    assert min(found.p_values().values()) > 0.01
    assert found.mean_error < 0.1
    assert min(found.sd_ratio) > 0.95 and max(found.sd_ratio) < 1.05


def test_ranks_tell_a_wrong_prior():
    name = "MeanField, prior half as wide as the truth's"
    found = simulated.calibrate(FAMILIES[name], replications=100, steps=250)
    assert found.p_values()["chi_square"] < 1e-6


def test_four_times_the_kl_is_another_posterior():
    """Precisions τ of the data and 1 of the prior make 1/√(1 + τ) the right σ, and 1/√(1 + τ/4) the tempered one."""
    family = FAMILIES["MeanField, KL times 4"]
    found = simulated.calibrate(family, replications=60, steps=250)
    squares = torch.cat((simulated.design().square().sum(0), torch.tensor([simulated.ROWS], dtype=F64)))
    worth = squares / simulated.NOISE**2
    expected = ((1 + worth) / (1 + worth / 4)).sqrt()
    assert torch.tensor(found.sd_ratio, dtype=F64).sub(expected).abs().max() < 0.06


def test_the_test_of_uniformity():
    random = np.random.default_rng(0)
    uniform = random.integers(0, 100, (1000, 8))
    assert min(statistics_of := simulated.uniformity(uniform).values()) > 0.01, statistics_of
    for wrong in (
        uniform // 2 + 25,
        np.minimum(uniform + 12, 99),
    ):  # too wide a posterior, and one that is off
        assert simulated.uniformity(wrong)["chi_square"] < 1e-6
        assert simulated.uniformity(wrong)["kolmogorov"] < 1e-6
    one = uniform.copy()
    one[:, 3] = np.minimum(one[:, 3] + 12, 99)  # one parameter of eight is enough
    assert simulated.uniformity(one)["chi_square"] < 1e-6
    with pytest.raises(ValueError, match="100 ranks do not fall into 15"):
        simulated.uniformity(uniform, bins=15)


def test_the_exact_posterior_is_that_of_a_single_regression():
    """By conditioning the joint Normal of parameters and targets, which the normal equations do not do."""
    family = FAMILIES["MeanField, shared"]
    x = simulated.design()
    y = torch.randn(1, simulated.ROWS, 1, dtype=F64, generator=torch.Generator().manual_seed(0))
    mean, sd = simulated.exact(family, x, y)
    columns = torch.cat((x, torch.ones(len(x), 1, dtype=F64)), 1)
    cross = columns.T
    inverse = torch.linalg.inv(columns @ columns.T + simulated.NOISE**2 * torch.eye(len(x), dtype=F64))
    covariance = torch.eye(8, dtype=F64) - cross @ inverse @ columns
    assert torch.allclose(mean[0], (cross @ inverse @ y[0]).squeeze(1))
    assert torch.allclose(sd, covariance.diagonal().sqrt())
    assert torch.allclose(
        covariance, torch.diag(covariance.diagonal()), atol=1e-12
    )  # the design is orthogonal


# ---- coverage --------------------------------------------------------------------------------------------


def test_intervals_cover_what_they_say():
    """1,280 points of 80 data sets: 0.03 are three standard errors, the points of a set not being independent."""
    found = covering.cover(covering.RIGHT[0], sets=80, steps=250)
    assert found["points"] == 1280
    assert abs(found["coverage_90"] - 0.9) < 0.03
    assert abs(found["coverage_50"] - 0.5) < 0.05
    assert found["coverage_99"] > 0.975


def test_coverage_tells_a_wrong_model():
    narrow = next(world for world in covering.WRONG if world.name == "prior 10 times as narrow")
    assert covering.cover(narrow, sets=20, steps=100)["coverage_90"] < 0.75


def test_heavy_tails_have_the_variance_that_is_said():
    """Only the data change: t noise of 5 degrees has a fourth moment, whose error is known."""
    world = dataclasses.replace(covering.RIGHT[0], tails=5.0)
    found = covering.cover(world, sets=2, points=8, steps=5)
    assert 0.0 <= found["coverage_90"] <= 1.0
    assert found["width_90"] > 3.2  # at least the noise that the model takes: 2 · 1.645


# ---- exact posteriors ------------------------------------------------------------------------------------


def test_hmc_finds_a_correlated_normal():
    covariance = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 25.0]], dtype=F64)
    precision, mean = torch.linalg.inv(covariance), torch.tensor([1.0, 2.0, 3.0], dtype=F64)

    def log_density(theta):
        return -0.5 * ((theta - mean) @ precision * (theta - mean)).sum(1)

    start = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    chains = hmc(log_density, start, draws=500, warmup=200)
    sample = chains.draws.flatten(0, 1)
    assert chains.rhat() < 1.02 and chains.ess() > 800 and 0.6 < chains.acceptance < 0.99
    scale = covariance.diagonal().sqrt()
    assert ((sample.mean(0) - mean) / scale).abs().max() < 5 / chains.ess() ** 0.5
    found = torch.cov(sample.T) / scale / scale.unsqueeze(1)
    assert (found - covariance / scale / scale.unsqueeze(1)).abs().max() < 0.15


def test_diagnostics_of_chains():
    random = np.random.default_rng(0)
    noise = random.normal(size=(4, 4000))
    assert split_rhat(noise) < 1.005
    assert split_rhat(noise + np.arange(4)[:, None]) > 1.3  # chains that stay apart
    assert split_rhat(noise + np.linspace(0, 3, 4000)) > 1.2  # chains that drift alike
    assert 0.85 < effective_size(noise) / noise.size < 1.15
    walk = np.zeros_like(noise)
    for i in range(1, walk.shape[1]):
        walk[:, i] = 0.8 * walk[:, i - 1] + noise[:, i]
    assert effective_size(walk) / walk.size == pytest.approx(0.2 / 1.8, rel=0.2)  # (1 − φ)/(1 + φ)


def test_mean_field_has_the_conditional_spread_of_a_correlated_posterior():
    found = {
        name: torch.tensor(value) for name, value in beside.linear(steps=400).items() if name != "mean_error"
    }
    assert (found["sd"] / found["conditional_sd"] - 1).abs().max() < 0.06  # 1/√Λ_ii
    assert (found["sd"] < 1.03 * found["marginal_sd"]).all()  # √Σ_ii
    assert (found["sd"][:4] < 0.6 * found["marginal_sd"][:4]).all()  # and it can be far too small


def test_every_member_of_an_ensemble_has_the_penalty_that_it_would_have_alone():
    """Ridge regression: members that share a loss are found at the single network's weights."""
    x = beside.inputs(30, seed=0)
    y = x.sum(1, keepdim=True)

    def weights(method):
        torch.manual_seed(0)
        model = sb.bayesianize(nn.Linear(beside.INPUTS, 1, dtype=F64), method)
        l2 = simulated.penalty(method, 0.5)
        simulated.fit([model], [(x, y)], sb.Gaussian(), steps=600, lr=0.05, samples=1, l2=l2)
        return simulated.parameters_of(model, beside.INPUTS, True, 1, seed=0)

    alone, members = weights(sb.Deterministic()), weights(sb.DeepEnsemble(members=3))
    assert members.shape == (3, 5) and (alone[0, :4] < 0.9).any()
    assert torch.allclose(members, alone.expand(3, -1), atol=1e-3)


def test_the_process_is_that_of_a_wide_network():
    """The kernel beside 100,000 units of the prior."""
    x, y = failing.gap_data()
    grid = torch.tensor([[0.0], [1.0], [3.5]], dtype=F64)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(2, 1, 100_000, generator=generator, dtype=F64)
    features = torch.cat(((grid * weight + bias).relu(), (x * weight + bias).relu())) * (2 / 100_000) ** 0.5
    kernel = features @ features.T + 2 / failing.HIDDEN
    inside = kernel[3:, 3:] + failing.GAP_NOISE**2 * torch.eye(40, dtype=F64)
    gain = torch.linalg.solve(inside, kernel[3:, :3]).T
    mean, sd = failing.gap_process(x, y, grid)
    assert torch.allclose(mean, gain @ y, atol=0.02)
    expected = (kernel[:3, :3] - gain @ kernel[3:, :3]).diagonal().sqrt()
    assert torch.allclose(sd, expected, rtol=0.05)


def test_the_error_of_few_draws():
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(2, 2, dtype=F64), sb.MeanField(stddev_init=0.7))
    for row in failing.few_draws(model, repeats=24, sizes=(1, 16)):
        assert row["measured"] == pytest.approx(row["formula"], rel=0.25)
        assert row["measured"] < row["bound"]
    assert failing.few_draws(model, repeats=2, sizes=(1,))[0]["information"] == pytest.approx(0.0, abs=1e-9)


def test_distance_finds_far_inputs():
    """As docs/trust.md says: 100 x, told from x by the distance to the nearest training input."""
    train, new = failing.moons(200, seed=0)[0], failing.moons(1000, seed=1)[0]
    near, far = (torch.cdist(points, train).min(1).values for points in (new, 100 * new))
    assert (far <= near.max()).double().mean() < 0.005


# ---- the file and the page -------------------------------------------------------------------------------


def test_everything_that_was_asked_holds(document):
    asked = [figure for figure in document["figures"] if figure["bound"]]
    assert len(asked) >= 14 and all(figure["holds"] for figure in asked)
    assert document["details"]["calibration"]["replications"] >= 1000
    for row in document["details"]["coverage"]["right"].values():
        assert row["points"] >= 10_000


def test_the_figures_are_those_of_the_details(document):
    again = [dataclasses.asdict(figure) for figure in statistics.figures(document["details"])]
    assert again == document["figures"]


def test_a_figure_that_does_not_hold_says_so(document):
    details = {"calibration": {**document["details"]["calibration"]}}
    row = {"chi_square": 0.001, "kolmogorov": 0.5}
    details["calibration"].update(contained={"one": row}, broken={"two": {**row, "chi_square": 1e-3}})
    assert [figure.holds for figure in statistics.figures(details)] == [False, False]


def test_the_page_has_the_figures_of_the_file(document):
    text = trustpage.PAGE.read_text()
    assert trustpage.filled(text, document["details"]) == text, "run python -m reliability.statistics --page"
    with pytest.raises(ValueError, match="0 blocks of 'calibration'"):
        trustpage.filled("nothing", document["details"])


def test_what_the_page_says_in_words(document):
    """Its sentences without figures are claims about the tables."""
    found = document["details"]
    exact = found["gap"]["HMC, the same network"]
    for name, row in found["gap"].items():
        if name not in ("HMC, the same network", "exact, infinitely wide"):
            assert row["gap"] < exact["gap"], name  # "no method here is as unsure in the gap"
    for name in ("MeanField", "KTied(rank=2)", "MCDropout(0.1)", "DropConnect(0.1)"):
        assert found["gap"][name]["gap"] < found["gap"][name]["data"], (
            name
        )  # "less unsure in it than at the data"
    nearest = max(failing.gap_methods(), key=lambda name: found["gap"][name]["gap"])
    assert nearest == "BatchEnsemble(K=4)" and found["gap"][nearest]["outside"] < 0.3 * exact["outside"]
    assert max(found["gap"]["DeepEnsemble(4)"][key] for key in ("data", "gap", "outside")) < 0.05
    assert exact["rhat"] > 1.01  # "nearly and not perfectly"
    wrong = {name: row["coverage_90"] for name, row in found["coverage"]["wrong"].items()}
    worst = sorted(wrong, key=wrong.get)[:2]
    assert set(worst) == {"prior 10 times as narrow", "seven more cosines than the model has"}
    assert wrong["KL times 0.1"] < 0.88 and wrong["KL times 4"] > 0.92
    tails = found["coverage"]["wrong"]["noise with heavy tails (t, 3 degrees)"]
    assert tails["coverage_90"] > 0.9 and tails["coverage_99"] < 0.99
    learned = found["coverage"]["learned"]["noise learned"]
    assert learned["coverage_90"] < found["coverage"]["right"]["MeanField"]["coverage_90"]
    ensemble = found["logistic"]["methods"]["DeepEnsemble(4)"]
    assert max(ensemble["sd_ratio"]) < 1e-3  # "no spread at all here"
    methods = {name: row for name, row in found["shift"]["methods"].items() if name != "Deterministic"}
    better = {name for name, row in methods.items() if row["information_auroc"] > 0.5}
    assert better == {"MeanField", "KTied(rank=2)"}  # "better than chance", and "the least accurate"
    for column in ("accuracy_clean", "confidence_1"):
        assert set(sorted(methods, key=lambda name: methods[name][column])[:2]) == better
    for row in found["shift"]["methods"].values():
        assert row["ece_rotated"] > 2 * row["ece_clean"]  # "none is calibrated under a shift of this size"
    draws = {row["draws"]: row for row in found["shift"]["draws"]}
    assert draws[1]["information"] == pytest.approx(0.0, abs=1e-6)
    assert draws[4]["information"] == pytest.approx(3 / 4, abs=0.1)
