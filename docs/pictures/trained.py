"""Pictures of networks that are trained for them: of docs/decisions.md and docs/analysis.md, half a minute on a CPU."""

from __future__ import annotations

import functools

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import slimbayes as sb


def digits() -> tuple[Tensor, Tensor]:
    """Noisy scans of digits, in random order."""
    torch.manual_seed(0)
    x, y = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(x))
    return x[order].float() / 16 + 0.3 * torch.randn(len(x), 64), y[order]


def trained(
    method: sb.Rank1 | sb.BatchEnsemble | sb.MeanField, x: Tensor, y: Tensor, steps: int = 300
) -> nn.Module:
    """A small network with this method, fitted to 700 of them."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = sb.bayesianize(net, method)
    optimizer = torch.optim.Adam(sb.parameter_groups(model, lr=1e-2, weight_decay=0.0))
    for _ in range(steps):
        loss = sb.elbo(sb.draw(model, x[:700]), y[:700], model, num_data=700).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@functools.cache
def predicted() -> tuple[sb.Predictive, Tensor]:
    """Four members' prediction of held-out scans, and what these are."""
    x, y = digits()
    held = slice(700, 1797)
    return sb.predict(trained(sb.BatchEnsemble(components=4, random_sign_init=0.5), x, y), x[held]), y[held]


@functools.cache
def spread() -> nn.Module:
    """A mean-field network."""
    return trained(sb.MeanField.paper(prior=sb.Normal(0.0, 0.3), stddev_init=0.05), *digits(), steps=1000)


def temperature() -> Figure:
    """NLL over T, of the mixture and of averaged logits, with their minima."""
    predictive, targets = predicted()
    figure = Figure(figsize=(5.0, 2.8), layout="constrained")
    axes = figure.subplots()
    mean = sb.Categorical().predictive(predictive.draws.mean(0, keepdim=True))
    values = torch.logspace(-0.5, 1.2, 80).tolist()
    for given, label in ((predictive, "mixture of the draws"), (mean, "averaged logits")):
        curve = [-float(sb.decisions.Temperature(t)(given).log_prob(targets).mean()) for t in values]
        best = sb.decisions.Temperature().fit(given, targets)
        (line,) = axes.plot(values, curve, label=f"{label}: T = {best.value:.2f}")
        axes.axvline(best.value, color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="temperature T", ylabel="held-out NLL", ylim=(0.4, 1.6))
    axes.legend(frameon=False)
    return figure


def risk_coverage() -> Figure:
    """Risk over coverage, of the mixture and of one member, with the threshold for a risk of 5 %."""
    predictive, targets = predicted()
    figure = Figure(figsize=(5.0, 2.8), layout="constrained")
    axes = figure.subplots()
    member = sb.Categorical().predictive(predictive.draws[:1])
    for given, label in ((predictive, "mixture of 4"), (member, "one member")):
        curve = sb.metrics.risk_coverage(given.mean, targets)
        area = sb.metrics.aurc(given.mean, targets)
        axes.plot(
            curve.coverage[::4], curve.risk[::4], label=f"{label}: area {area:.3f}", drawstyle="steps-post"
        )
    rule = sb.decisions.Abstention.for_risk(predictive, targets, risk=0.05)
    axes.plot(rule.coverage, rule.risk, "ko", markersize=4)
    axes.plot([rule.coverage] * 2, [rule.risk, rule.bound], "k-", linewidth=1)
    axes.annotate(
        "risk at most 5 %, for sure", (rule.coverage, rule.bound), (0.2, 0.1), arrowprops={"arrowstyle": "-"}
    )
    axes.set(
        xlabel="coverage: share of examples answered",
        ylabel="risk: share of those wrong",
        ylim=(-0.005, 0.25),
    )
    axes.legend(frameon=False, loc="upper left")
    return figure


def spectra() -> Figure:
    """Explained variance by singular value, of σ and of μ."""
    return sb.analysis.plot_spectra(spread(), ranks=10)


def stddevs() -> Figure:
    """Heat maps of log σ."""
    return sb.analysis.plot_stddevs(spread())
