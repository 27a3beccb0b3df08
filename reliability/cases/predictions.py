"""Cases of predictive distributions and of decisions, against sums over draws and loops over examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import slimbayes as sb
from reliability.cases import methods
from reliability.cases.judging import EQUAL, REFUSED, Outcome, Wrong, attempt, same_number, same_tensor
from reliability.cases.objective import _log_prob, likelihoods
from slimbayes import decisions
from slimbayes.core.conversion import find_record


def _xlogx(p: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0)


def brute(kind: str, likelihood: Any, f: np.ndarray) -> dict[str, np.ndarray]:
    """Every moment of the mixture of draws [D, B, ...], by its definition."""
    if kind == "Categorical":
        z = f / likelihood.temperature
        z = np.exp(z - z.max(-1, keepdims=True))
        p = z / z.sum(-1, keepdims=True)
        each, total = -_xlogx(p).sum(-1), -_xlogx(p.mean(0)).sum(-1)
        within = p * (1 - p)
    elif kind == "Bernoulli":
        p = 1 / (1 + np.exp(-f / likelihood.temperature))
        each = -_xlogx(p) - _xlogx(1 - p)
        total = -_xlogx(p.mean(0)) - _xlogx(1 - p.mean(0))
        within = p * (1 - p)
    else:
        if likelihood.learn == "per_example":
            m = f.shape[-1] // 2
            p, tau = f[..., :m], np.exp(np.clip(f[..., m:], -20, 20))
        else:
            p, tau = f, np.full_like(f, likelihood.precision)
        within, each = 1 / tau, 0.5 * (1 + math.log(2 * math.pi) - np.log(tau))
        total = None
    found = {
        "mean": p.mean(0), "aleatoric": within.mean(0), "epistemic": p.var(0), "variance": within.mean(0) + p.var(0),
        "expected_entropy": each.mean(0),
    }  # fmt: skip
    if total is not None:
        found |= {"entropy": total, "mutual_information": np.maximum(total - each.mean(0), 0)}
    return found


def moments(data: Any) -> Outcome:
    """Moments, log-probabilities and intervals of any draws; merged, cut, joined and reweighted."""
    kind, likelihood, draws, targets = likelihoods(data)
    keep = data.draw(st.booleans())
    what = f"{likelihood}, draws {list(draws.shape)}, keep={keep}"
    form = data.draw(st.sampled_from([*[""] * 10, "nan", "integer", "no batch", "empty draws", "level"]))
    if form:
        return _spoiled_draws(form, kind, likelihood, draws, what)
    cut = data.draw(st.integers(0, len(draws)))
    given: Any = draws
    if not keep:
        parts = [likelihood.moments(part) for part in (draws[:cut], draws[cut:]) if len(part)]
        given = parts[0] if len(parts) == 1 else parts[0].merge(parts[1])
    with torch.no_grad():
        predictive = likelihood.predictive(given)
        for name, value in brute(kind, likelihood, draws.numpy()).items():
            same_tensor(f"{what}: {name}", getattr(predictive, name), torch.as_tensor(value), 1e-8, 1e-3)
        b = draws.shape[1]
        if keep:
            y = targets.numpy()
            table = np.array(
                [[_log_prob(kind, d[j], y[j], likelihood) for j in range(b)] for d in draws.numpy()]
            )
            expected = np.log(np.mean(np.exp(table - table.max(0)), 0)) + table.max(0)
            same_tensor(
                f"{what}: log_prob", predictive.log_prob(targets), torch.as_tensor(expected), 1e-8, 1e-3
            )
            halves = (
                [likelihood.predictive(draws[:, :1]), likelihood.predictive(draws[:, 1:])]
                if b > 1
                else [predictive]
            )
            joined = sb.Predictive.cat(halves)
            same_tensor(f"{what}: cat", joined.variance, predictive.variance, 1e-10, 1e-6)
            same_tensor(f"{what}: rows", predictive[:1].mean, predictive.mean[:1], 0.0)
            _interval(kind, likelihood, draws, predictive, what)
    return Outcome(EQUAL, kind)


def _interval(kind: str, likelihood: Any, draws: Tensor, predictive: Any, what: str) -> None:
    lower, upper = predictive.interval(0.8)
    if kind != "Gaussian":
        p = likelihood.log_probabilities(draws).exp()
        p = (p[..., 1] if kind == "Bernoulli" else p).numpy()
        for end, q in ((lower, 0.1), (upper, 0.9)):
            same_tensor(f"{what}: interval", end, torch.as_tensor(np.quantile(p, q, axis=0)), 1e-8, 1e-3)
        return
    loc, log_tau = likelihood.components(draws)
    for end, q in ((lower, 0.1), (upper, 0.9)):  # the mixture's distribution function at its quantile
        z = (end - loc) * (0.5 * log_tau).exp()
        below = torch.special.ndtr(z.double()).mean(0)
        same_tensor(f"{what}: interval at {q}", below, torch.full_like(below, q), 1e-5)


def _spoiled_draws(form: str, kind: str, likelihood: Any, draws: Tensor, what: str) -> Outcome:
    changes: dict[str, Any] = {
        "nan": lambda: likelihood.predictive(draws * float("nan")),
        "integer": lambda: likelihood.predictive(draws.long()),
        "no batch": lambda: likelihood.predictive(draws.flatten()),
        "empty draws": lambda: likelihood.predictive(draws[:0]),
        "level": lambda: likelihood.predictive(draws).interval(1.5),
    }  # fmt: skip
    done, _ = attempt(changes[form], what=f"{what}, {form}")
    if done:
        raise Wrong(f"{what}, {form}: accepted without a word")
    return Outcome(REFUSED, kind)


def predict(data: Any) -> Outcome:
    """``sb.predict`` in any pieces has the moments of the draws of the same seed."""
    method = data.draw(methods.valid())
    kind = data.draw(st.sampled_from(["Categorical", "Bernoulli", "Gaussian"]))
    outputs = data.draw(st.integers(2, 3))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, outputs)).double(), method
    )
    likelihood = getattr(sb, kind)()
    batch, samples = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    noise, seed = data.draw(st.sampled_from(["example", "shared", "mean"])), data.draw(st.integers(0, 5))
    chunk, keep = data.draw(st.one_of(st.none(), st.integers(1, 20))), data.draw(st.booleans())
    model.train(data.draw(st.booleans()))
    mode = model.training
    x = torch.randn(batch, 3).double()
    what = f"predict of {method}, {kind}, batch={batch}, samples={samples}, noise={noise}, chunk={chunk}, keep={keep}"
    found = sb.predict(
        model, x, samples=samples, noise=noise, seed=seed, likelihood=likelihood, chunk=chunk, keep_draws=keep
    )
    if model.training != mode:
        raise Wrong(f"{what}: the model's mode has changed")
    model.eval()
    with torch.no_grad():
        draws = sb.draw(model, x, samples=samples, noise=noise, seed=seed)
    if draws.shape != (find_record(model).components * samples, batch, outputs):
        raise Wrong(f"{what}: draws {list(draws.shape)}")
    for name, value in brute(kind, likelihood, draws.numpy()).items():
        same_tensor(f"{what}: {name}", getattr(found, name), torch.as_tensor(value), 1e-7, 1e-3)
    y = torch.randint(outputs, (batch,))
    if kind == "Categorical" and batch > 1:
        cut = data.draw(st.integers(1, batch - 1))
        model.train(mode)
        pieces = [(x[:cut], y[:cut]), (x[cut:], y[cut:])]
        scores = sb.evaluate(model, pieces, samples=samples, seed=seed, noise=noise, chunk=chunk)
        p = brute(kind, likelihood, draws.numpy())["mean"]
        nll = -np.mean(np.log([p[i, int(y[i])] for i in range(batch)]))
        same_number(f"{what}: evaluate's nll", scores["nll"], nll, 1e-7)
        same_number(
            f"{what}: evaluate's accuracy", scores["accuracy"], np.mean(p.argmax(-1) == y.numpy()), 1e-9
        )
    return Outcome(EQUAL, methods.label(method), kind)


def deciding(data: Any) -> Outcome:
    """Conformal thresholds, abstention, costs, temperature and scores, each by its definition."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    n, c = data.draw(st.integers(1, 30)), data.draw(st.integers(2, 4))
    p = rng.gamma(0.5, size=(n, c)) + 1e-3
    p /= p.sum(-1, keepdims=True)
    y = rng.integers(c, size=n)
    which = data.draw(
        st.sampled_from(
            ["lac", "intervals", "coverage", "costs", "entropy", "margin", "quantile", "temperature", "stack"]
        )
    )
    alpha = data.draw(
        st.sampled_from([0.1, 0.5, 0.9, 0.25, 0.3, 0.6, 0.4, 0.0, 1.0, -1.0, float("nan"), "a", None])
    )
    what = f"decisions {which}, n={n}, c={c}, alpha={alpha!r}"
    labels = torch.as_tensor(y)
    table = p[:c].T if n >= c else np.eye(c)
    runs: dict[str, tuple[Any, Any]] = {
        "lac": (
            lambda: decisions.ConformalSets("lac", alpha, allow_empty=True).fit(p, labels)(p).double(),
            lambda: _lac(p, y, alpha),
        ),
        "intervals": (
            lambda: decisions.ConformalIntervals("absolute", alpha).fit(p[:, 0], p[:, 1])(p[:, 0])[1],
            lambda: p[:, 0] + _quantile(np.abs(p[:, 0] - p[:, 1]), alpha),
        ),
        "quantile": (lambda: decisions.conformal_quantile(p[:, 0], alpha), lambda: _quantile(p[:, 0], alpha)),
        "coverage": (lambda: decisions.Abstention.for_coverage(p, alpha)(p).double(), lambda: _kept(p, alpha)),
        "costs": (
            lambda: decisions.least_cost(p, table, alpha).cost,
            lambda: np.minimum((p @ table).min(-1), np.inf if alpha is None else alpha),
        ),
        "entropy": (lambda: decisions.uncertainty(p, "entropy"), lambda: -_xlogx(p).sum(-1)),
        "margin": (
            lambda: decisions.uncertainty(p, "margin"),
            lambda: 1 - (np.sort(p, -1)[:, -1] - np.sort(p, -1)[:, -2]),
        ),
        "temperature": (lambda: _fitted(p, labels), lambda: np.zeros(())),
        "stack": (lambda: _stacked(p, rng), lambda: np.zeros(())),
    }  # fmt: skip
    run, reference = runs[which]
    done, found = attempt(run, what=what)
    if not done:
        return Outcome(REFUSED, which)
    takes = which in ("lac", "intervals", "quantile", "coverage", "costs")
    bad = not isinstance(alpha, float) or math.isnan(alpha) or not 0 < alpha < 1
    if which == "coverage":
        bad = bad and alpha != 1.0
    if which == "costs":
        bad = isinstance(alpha, str) or (isinstance(alpha, float) and math.isnan(alpha))
    if takes and bad:
        raise Wrong(f"{what}: accepted without a word")
    same_tensor(what, torch.as_tensor(found).double(), torch.as_tensor(reference()).double(), 1e-9, 1e-3)
    return Outcome(EQUAL, which)


def _quantile(scores: np.ndarray, alpha: float) -> float:
    rank = math.ceil(round((len(scores) + 1) * (1 - alpha), 9))
    return float(np.sort(scores)[rank - 1])


def _lac(p: np.ndarray, y: np.ndarray, alpha: float) -> np.ndarray:
    p = p / p.sum(-1, keepdims=True)
    limit = _quantile(1 - p[np.arange(len(y)), y], alpha)
    return (1 - p <= limit).astype(float)


def _kept(p: np.ndarray, share: float) -> np.ndarray:
    score = 1 - (p / p.sum(-1, keepdims=True)).max(-1)
    last = np.sort(score)[max(1, math.ceil(round(share * len(score), 9))) - 1]
    return np.where(score <= last, p.argmax(-1), -1).astype(float)


def _fitted(p: np.ndarray, labels: Tensor) -> Tensor:
    """0 where no temperature nearby is better than the fitted one."""
    draws = torch.as_tensor(np.log(p))[None]
    best = decisions.Temperature().fit(draws, labels).value

    def nll(t: float) -> float:
        return float(-sb.Categorical().log_prob(draws / t, labels).mean())

    worse = [nll(min(100.0, max(0.01, best * k))) for k in (0.9, 0.99, 1.01, 1.1)]
    return torch.tensor(max(0.0, nll(best) - min(worse) - 1e-6))


def _stacked(p: np.ndarray, rng: Any) -> Tensor:
    """0 where the stacked mixture is as good as any of some random ones."""
    log_p = torch.as_tensor(np.log(p)).T
    w = sb.stack(log_p)
    score = float((w.double() @ log_p.exp()).log().mean())
    others = [
        float((torch.as_tensor(rng.dirichlet(np.ones(len(w)))) @ log_p.exp()).log().mean()) for _ in range(10)
    ]
    return torch.tensor(max(0.0, max(others) - score - 1e-5))
