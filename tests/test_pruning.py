"""Signal-to-noise pruning, posteriors beside their priors, and figures of both."""

import math
import sys

import pytest
import torch
from torch import nn

import slimbayes as sb


def network():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def trained():
    """Only the first 3 of 12 inputs say anything."""
    torch.manual_seed(0)
    x = torch.randn(400, 12)
    y = x[:, :3].argmax(1)
    model = sb.bayesianize(network(), sb.MeanField.paper(prior=sb.Normal(0.0, 0.3), stddev_init=0.05))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(250):
        loss = sb.elbo(sb.draw(model, x), y, model, num_data=400).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, x, y


def test_prune_zeroes_the_lowest_ratios_whichever_layer_they_are_in(trained):
    model, _, _ = trained
    ratios = sb.analysis.signal_to_noise(model)
    for name, ratio in ratios.items():
        weights = model.get_submodule(name)
        sigma = torch.nn.functional.softplus(weights.bayes.weight.rho) + 1e-7
        torch.testing.assert_close(ratio, (weights.weight.abs() / sigma).detach())
    every = torch.cat([ratio.flatten() for ratio in ratios.values()])
    limit = every.sort().values[round(0.6 * len(every)) - 1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cut = sb.analysis.prune(model, share=0.6)
    for name, ratio in ratios.items():
        new, gone = cut.get_submodule(name), ratio <= limit
        assert torch.equal(new.weight == 0, gone)
        sigma = sb.analysis.layers.stddev_of(new)
        assert sigma[gone].max() < 2e-7
        assert torch.equal(new.bayes.weight.rho[~gone], model.get_submodule(name).bayes.weight.rho[~gone])
        assert torch.equal(new.bias, model.get_submodule(name).bias)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    by_limit = sb.analysis.prune(model, threshold=float(limit) * (1 + 1e-6))
    assert all(torch.equal(a, b) for a, b in zip(cut.parameters(), by_limit.parameters(), strict=True))
    one = sb.analysis.prune(model, share=0.5, include="^0$")
    assert int((one[0].weight == 0).sum()) == 96 and int((one[2].weight == 0).sum()) == 0
    draws = sb.draw(cut, torch.eye(12), samples=3, seed=0)
    assert draws.isfinite().all()


def test_accuracy_against_the_share_pruned(trained):
    model, x, y = trained
    noise = sb.analysis.signal_to_noise(model)["0"]
    assert noise[:, :3].mean() > 4 * noise[:, 3:].mean()  # inputs that say nothing go first
    curve = sb.analysis.pruning_curve(model, iter([(x, y)]), shares=(0.0, 0.5, 0.99), samples=8, seed=0)
    assert curve.left == [344, 172, 4]
    whole, half, rest = (found["accuracy"] for found in curve.metrics)
    assert half > whole - 0.03 and rest < whole - 0.2
    assert str(curve).splitlines()[2].split()[:3] == ["50", "%", "172"]


def test_tied_weights_are_pruned_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    model = sb.bayesianize(Tied(), sb.MeanField.paper())
    cut = sb.analysis.prune(model, share=0.5)
    assert int((cut.one.weight == 0).sum()) == 18 and cut.one.weight is cut.two.weight


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "pass one of them"), ({"share": 0.5, "threshold": 1.0}, "pass one of them"), ({"share": 1.0}, "below 1"),
     ({"threshold": -1.0}, "at least 0")],
)  # fmt: skip
def test_prune_refuses(trained, options, words):
    with pytest.raises(ValueError, match=words):
        sb.analysis.prune(trained[0], **options)
    with pytest.raises(ValueError, match="MeanField"):
        sb.analysis.prune(sb.bayesianize(network(), sb.KTied.paper()), share=0.5)


METHODS = {
    "mean-field": sb.MeanField.paper(stddev_init=0.05),
    "tied mean": sb.MeanField.paper(tied_mean=True, biases=False),
    "k-tied": sb.KTied.paper(rank=2),
    "rank-1": sb.Rank1.paper(components=3),
    "Cauchy, mean": sb.Rank1.paper(components=3, posterior="cauchy", kl_reduction="mean"),
    "log-normal": sb.Rank1.paper(components=3, posterior="lognormal"),
    "EMP": sb.EMP.paper(components=3, prior_precision=2.0, init_noise=0.1),
    "dropout": sb.MCDropout(),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_rows_of_the_comparison_sum_to_the_kl(name):
    torch.manual_seed(1)
    model = sb.bayesianize(network(), METHODS[name])
    found = sb.analysis.compare_with_prior(model)
    assert found.kl == pytest.approx(sb.kl(model).item(), rel=1e-5, abs=1e-9)
    assert sum(found.by_layer().values()) == pytest.approx(found.kl)
    assert len(str(found).splitlines()) == len(found.rows) + 1
    assert (len(found.rows) == 0) == (name == "dropout")


def test_shift_and_ratio():
    model = sb.bayesianize(nn.Linear(4, 2), sb.MeanField.paper(prior=sb.Normal(0.5, 0.2)))
    nn.init.constant_(model.weight, 0.9)
    nn.init.constant_(model.bayes.weight.rho, math.log(math.expm1(0.1 - 1e-7)))
    row = sb.analysis.compare_with_prior(model).rows[0]
    assert (row.layer, row.tensor, row.elements) == ("", "weight", 8)
    assert row.shift == pytest.approx(2.0, rel=1e-5) and row.ratio == pytest.approx(0.5, rel=1e-5)
    assert row.kl_per_element == pytest.approx(math.log(2) + (0.25 + 4) / 2 - 0.5, rel=1e-5)


def test_figures(trained, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    model, _, _ = trained
    for values, label in (("stddev", "log₁₀ σ"), ("mean", "μ"), ("signal_to_noise", "log₁₀ |μ|/σ")):
        figure = sb.analysis.plot_stddevs(model, values=values)
        assert figure.axes[-1].get_ylabel() == label
        shown = figure.axes[0].images[0].get_array()
        assert shown.shape == (12, 16)
    sigma = sb.analysis.matrices(model)["0"].stddev
    first = sb.analysis.plot_stddevs(model, include="^0$").axes[0].images[0].get_array()
    torch.testing.assert_close(torch.as_tensor(first.data), sigma.double().log10())
    spectra = sb.analysis.plot_spectra(model, ranks=3)
    explained = sb.analysis.spectrum(model)["2"]["stddev"][:3]
    torch.testing.assert_close(torch.as_tensor(spectra.axes[1].lines[1].get_ydata()), explained)
    spectra.savefig(tmp_path / "spectra.png", dpi=40)
    wide = sb.bayesianize(nn.Linear(1000, 5), sb.MeanField.paper())
    assert sb.analysis.plot_stddevs(wide).axes[0].images[0].get_array().shape == (400, 5)
    with pytest.raises(ValueError, match="values='sigma' is unknown"):
        sb.analysis.plot_stddevs(model, values="sigma")
    with pytest.raises(ValueError, match="ranks=0"):
        sb.analysis.plot_spectra(model, ranks=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"slimbayes\[plots\]"):
        sb.analysis.plot_spectra(model)
