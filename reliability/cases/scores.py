"""Cases of ``sb.metrics``: every metric against a loop over examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from sklearn import metrics as sk

from reliability.cases.judging import EQUAL, REFUSED, Outcome, Wrong, attempt, same_number
from slimbayes import metrics

FORMS = [
    *[""] * 18,
    "logits",
    "shape",
    "labels",
    "float labels",
    "nan",
    "empty",
    "integers",
    "one class",
    "fewer",
]
_CLASS = [
    "nll", "gibbs_nll", "accuracy", "top_k_accuracy", "ece", "mce", "adaptive_ece", "brier", "aurc", "selective_risk",
    "disagreement", "pairwise_kl", "pairwise_cosine",
]  # fmt: skip
_REAL = ["rmse", "mae", "coverage", "interval_width", "crps", "gradient_snr", "auroc", "auc_pr", "ood_scores"]


def _probabilities(data: Any, n: int, c: int, draws: int | None = None) -> np.ndarray:
    """Rows that sum to one; some with ties, zeros and ones."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    shape = (n, c) if draws is None else (draws, n, c)
    kind = data.draw(st.sampled_from(["smooth", "sharp", "ties", "onehot"]))
    if kind == "onehot":
        return np.eye(c)[rng.integers(c, size=shape[:-1])]
    if kind == "ties":
        p = rng.integers(1, 4, size=shape).astype(float)
    else:
        p = rng.gamma(1.0 if kind == "smooth" else 0.1, size=shape) + 1e-9
    return p / p.sum(-1, keepdims=True)


def _bins(confidence: np.ndarray, right: np.ndarray, bins: int) -> list[tuple[int, float, float]]:
    edges = np.arange(bins + 1) / bins
    found = []
    for b in range(bins):
        inside = (confidence >= edges[b]) & ((confidence < edges[b + 1]) | (b == bins - 1))
        if inside.any():
            found.append((int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean())))
    return found


def _ranked_risk(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Error rates of the i surest, examples of one confidence sharing their error."""
    key = np.round(confidence * 2**20) / 2**20
    error = np.array([1 - right[key == k].mean() for k in key])
    order = np.argsort(-key, kind="stable")
    return np.cumsum(error[order]) / np.arange(1, len(error) + 1)


def _pairs(p: np.ndarray, score: Any) -> float:
    k = len(p)
    return float(np.mean([score(p[i], p[j]) for i in range(k) for j in range(k) if i != j]))


def _expected(name: str, p: np.ndarray, y: np.ndarray, bins: int, k: int, cover: float) -> float:
    """A metric of probabilities (or draws) by a loop."""
    n = p.shape[-2]
    if name == "gibbs_nll":
        return float(
            np.mean([[-np.log(d[i, y[i]]) if d[i, y[i]] > 0 else np.inf for i in range(n)] for d in p])
        )
    if name == "disagreement":
        return _pairs(p, lambda a, b: float(np.mean(a.argmax(-1) != b.argmax(-1))))
    if name == "pairwise_kl":
        tiny = np.finfo(np.float64).tiny
        return _pairs(
            p,
            lambda a, b: float(
                np.mean(np.sum(a * (np.log(np.maximum(a, tiny)) - np.log(np.maximum(b, tiny))), -1))
            ),
        )
    if name == "pairwise_cosine":
        return _pairs(
            p,
            lambda a, b: float(
                np.mean(np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)))
            ),
        )
    confidence, right = p.max(-1), p.argmax(-1) == y
    if name == "nll":
        return float(np.mean([-np.log(p[i, y[i]]) if p[i, y[i]] > 0 else np.inf for i in range(n)]))
    if name == "accuracy":
        return float(right.mean())
    if name == "top_k_accuracy":
        return float(np.mean([y[i] in np.argsort(-p[i], kind="stable")[:k] for i in range(n)]))
    if name == "brier":
        return float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, -1)))
    if name == "ece":
        return sum(m / n * abs(a - c) for m, c, a in _bins(confidence, right, bins))
    if name == "mce":
        return max(abs(a - c) for _, c, a in _bins(confidence, right, bins))
    if name == "adaptive_ece":
        key = np.round(confidence * 2**20) / 2**20
        gap = right - confidence
        gap = np.array([gap[key == v].mean() for v in key])[np.argsort(key, kind="stable")]
        return float(sum(abs(part.sum()) for part in np.array_split(gap, min(bins, n))) / n)
    risk = _ranked_risk(confidence, right)
    if name == "aurc":
        return float(risk.mean())
    return float(risk[max(1, math.ceil(round(cover * n, 9))) - 1])


def classes(data: Any) -> Outcome:
    """Metrics of class probabilities."""
    name = data.draw(st.sampled_from(_CLASS))
    n, c = data.draw(st.integers(1, 12)), data.draw(st.integers(2, 5))
    several = name in ("gibbs_nll", "disagreement", "pairwise_kl", "pairwise_cosine")
    p = _probabilities(data, n, c, data.draw(st.integers(2, 4)) if several else None)
    y = np.random.default_rng(data.draw(st.integers(0, 99))).integers(c, size=n)
    bins, k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, c))
    cover = data.draw(st.sampled_from([0.1, 0.5, 0.7, 1.0]))
    extra: dict[str, Any] = {"top_k_accuracy": {"k": k}, "selective_risk": {"coverage": cover}}.get(name, {})
    if name in ("ece", "mce", "adaptive_ece"):
        extra = {"bins": bins}
    form = data.draw(st.sampled_from(FORMS))
    given, labels = _spoil(form, p, y)
    what = f"metrics.{name}({form}, p {list(np.shape(given))}, y {list(np.shape(labels))}, {extra})"
    one = name in ("pairwise_kl", "pairwise_cosine", "disagreement")
    call = data.draw(st.sampled_from(["numpy", "torch", "list"]))
    if call == "torch":
        given, labels = torch.as_tensor(given), torch.as_tensor(labels)
    elif call == "list":
        given, labels = given.tolist(), labels.tolist()
    run = (
        (lambda: getattr(metrics, name)(given, **extra))
        if one
        else (lambda: getattr(metrics, name)(given, labels, **extra))
    )
    done, found = attempt(run, what=what)
    if not done:
        return Outcome(REFUSED, name)
    if form and not _passes(form, one, c):
        raise Wrong(f"{what}: accepted without a word, {found}")
    with np.errstate(divide="ignore"):
        same_number(what, found, _expected(name, p, y, bins, k, cover), 1e-9)
    return Outcome(EQUAL, name)


def _passes(form: str, one: bool, c: int) -> bool:
    """What spoils the labels does not matter where there are none."""
    return one and form in ("labels", "float labels", "fewer")


def _spoil(form: str, p: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    c = p.shape[-1]
    if form == "logits":
        return p * 7 + 1.5, y
    if form == "shape":
        return p[..., None, None], y
    if form == "labels":
        return p, y + c
    if form == "float labels":
        return p, y.astype(float)
    if form == "nan":
        return p * np.nan, y
    if form == "empty":
        return p[..., :0, :], y[:0]
    if form == "integers":
        return np.round(p).astype(int), y
    if form == "one class":
        return p[..., :1] * 0.5, y
    if form == "fewer":
        return p, np.concatenate([y, y])
    return p, y


def numbers(data: Any) -> Outcome:
    """Metrics of real targets and of scores."""
    name = data.draw(st.sampled_from(_REAL))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    n = data.draw(st.integers(1, 12))
    shape = data.draw(st.sampled_from([(n,), (n, 1), (n, 3)]))
    form = data.draw(st.sampled_from([*[""] * 12, "column", "nan", "empty", "complex", "fewer", "text"]))
    m, y, s = rng.normal(size=shape), rng.normal(size=shape), rng.integers(0, 4, size=n).astype(float)
    labels = rng.integers(0, 2, size=n)

    def change(x: np.ndarray) -> Any:
        changes = {
            "column": lambda: x[..., None], "nan": lambda: x * np.nan, "empty": lambda: x[:0],
            "complex": lambda: x + 1j, "fewer": lambda: np.concatenate([x, x]), "text": lambda: "text",
        }  # fmt: skip
        return changes[form]() if form else x

    samples = rng.normal(size=(data.draw(st.integers(1, 5)), *shape))
    lower, upper = np.minimum(m, y), np.maximum(m, y)
    runs: dict[str, tuple[Any, Any]] = {
        "rmse": (lambda: metrics.rmse(change(m), y), lambda: np.sqrt(np.mean((m - y) ** 2))),
        "mae": (lambda: metrics.mae(change(m), y), lambda: np.mean(np.abs(m - y))),
        "coverage": (
            lambda: metrics.coverage(lower, upper, change(m * 1.5)),
            lambda: np.mean((lower <= m * 1.5) & (m * 1.5 <= upper)),
        ),
        "interval_width": (lambda: metrics.interval_width(change(lower), upper), lambda: np.mean(upper - lower)),
        "crps": (lambda: metrics.crps(samples, change(y)), lambda: _crps(samples, y)),
        "gradient_snr": (
            lambda: metrics.gradient_snr(change(samples)),
            lambda: np.mean((samples**2).mean(0) / samples.var(0)),
        ),
        "auroc": (lambda: metrics.auroc(change(s), labels), lambda: sk.roc_auc_score(labels, s)),
        "auc_pr": (lambda: metrics.auc_pr(change(s), labels), lambda: sk.average_precision_score(labels, s)),
        "ood_scores": (
            lambda: metrics.ood_scores(change(s), s + 0.5).auroc,
            lambda: sk.roc_auc_score([0] * n + [1] * n, np.concatenate([s, s + 0.5])),
        ),
    }  # fmt: skip
    run, reference = runs[name]
    what = f"metrics.{name}({form}, n={n}, shape {shape})"
    done, found = attempt(run, what=what)
    if not done:
        degenerate = (name in ("auroc", "auc_pr") and len(set(labels.tolist())) < 2) or (
            name == "gradient_snr" and len(samples) < 2
        )
        if not form and not degenerate:
            raise Wrong(f"{what}: refused, and all is as it should be")
        return Outcome(REFUSED, name)
    flat = form in ("column", "fewer") and name in ("ood_scores", "gradient_snr")
    if form and not flat:
        raise Wrong(f"{what}: accepted without a word, {found}")
    if not (form == "fewer" and flat):
        same_number(
            what, found, float(reference()), 1e-6 if name in ("auroc", "auc_pr", "ood_scores") else 1e-9
        )
    return Outcome(EQUAL, name)


def _crps(x: np.ndarray, y: np.ndarray) -> float:
    own = np.abs(x - y).mean(0)
    spread = np.abs(x[:, None] - x[None]).mean((0, 1)) / 2
    return float((own - spread).mean())
