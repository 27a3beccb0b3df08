"""Write recorded.json: inputs, and what every metric is of them by naive code that shares nothing with slimbayes.

``python tests/metrics/recording.py`` writes the file again, ``--check`` says whether it is still the same. Loops, numpy
in float64, scipy and scikit-learn; slimbayes is not imported.
"""

import argparse
import json
import math
import sys
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.metrics import average_precision_score, roc_auc_score

FILE = Path(__file__).with_name("recorded.json")
# AlexNet's mean errors on ImageNet-C, as Hendrycks and Dietterich publish them.
ALEXNET = {"fog": 0.819324, "snow": 0.866816, "jpeg_compression": 0.6065}


def softmax(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def inputs():
    """Arrays as lists. Some probabilities are rounded, so that there are ties and values on the edges of bins."""
    rng = np.random.default_rng(7)
    y = rng.integers(0, 5, 60)
    draws = softmax(rng.normal(size=(6, 60, 5)) * 1.5 + 2.0 * np.eye(5)[y])
    tenths = np.array([rng.multinomial(10, p) / 10 for p in draws[0]])
    lower = rng.normal(size=40)
    errors = {"fog": [0.1, 0.2, 0.35], "snow": [0.3, 0.42, 0.5], "jpeg_compression": [0.05, 0.1, 0.2]}
    baseline = {"fog": [0.2, 0.3, 0.4], "snow": [0.35, 0.4, 0.6], "jpeg_compression": [0.15, 0.15, 0.3]}
    return {
        "p": draws.mean(0).tolist(), "draws": draws.tolist(), "ties": tenths.tolist(), "y": y.tolist(),
        "scores": np.round(rng.normal(size=50), 1).tolist(), "labels": rng.integers(0, 2, 50).tolist(),
        "others": np.round(rng.normal(0.7, 1.0, 30), 1).tolist(),
        "mean": rng.normal(size=(20, 2)).tolist(), "target": rng.normal(size=(20, 2)).tolist(),
        "lower": lower.tolist(), "upper": (lower + rng.exponential(1.0, 40)).tolist(),
        "point": rng.normal(size=40).tolist(), "samples": rng.normal(size=(9, 40)).tolist(),
        "gradients": rng.normal(0.3, 1.0, (8, 12)).tolist(), "errors": errors, "baseline": baseline,
        "outputs": rng.normal(size=(5, 20, 2)).tolist(),
    }  # fmt: skip


# ---- classes ---------------------------------------------------------------------------------------------


def nll(p, y):
    return -sum(math.log(row[k]) for row, k in zip(p, y, strict=True)) / len(y)


def place(row, k):
    """How many classes come before class k: the more probable, of equals those with a lower index."""
    return sum(v > row[k] or (v == row[k] and j < k) for j, v in enumerate(row))


def top(p, y, k):
    return sum(place(row, label) < k for row, label in zip(p, y, strict=True)) / len(y)


def brier(p, y):
    return sum(
        sum((v - (j == k)) ** 2 for j, v in enumerate(row)) for row, k in zip(p, y, strict=True)
    ) / len(y)


def surest(p, y):
    """(confidence, right or wrong) of every example."""
    chosen = [max(range(len(row)), key=lambda j: (row[j], -j)) for row in p]
    return [(row[c], float(c == k)) for row, c, k in zip(p, chosen, y, strict=True)]


def diagram(p, y, bins):
    found = {"edges": [i / bins for i in range(bins + 1)], "count": [], "confidence": [], "accuracy": []}
    for b in range(bins):
        inside = [
            e for e in surest(p, y) if b / bins <= e[0] < (b + 1) / bins or (b == bins - 1 and e[0] >= 1)
        ]
        found["count"].append(len(inside))
        for i, name in enumerate(("confidence", "accuracy")):
            found[name].append(sum(e[i] for e in inside) / max(1, len(inside)))
    return found


def gaps(p, y, bins, least=0):
    """(count, |accuracy − confidence|) of the bins with more than ``least`` examples."""
    d = diagram(p, y, bins)
    rows = zip(d["count"], d["accuracy"], d["confidence"], strict=True)
    return [(n, abs(a - c)) for n, a, c in rows if n > least]


def ece(p, y, bins=15, least=0, kept=False):
    found = gaps(p, y, bins, least)
    return sum(n * g for n, g in found) / (sum(n for n, _ in found) if kept else len(y))


def mce(p, y, bins=15):
    return max(g for _, g in gaps(p, y, bins))


def grouped(pairs):
    """Examples from the surest on, those of one confidence (to 2⁻²⁰) together: lists of (confidence, right)."""
    groups = {}
    for confidence, right in pairs:
        groups.setdefault(round(confidence * 2**20) / 2**20, []).append((confidence, right))
    return [groups[key] for key in sorted(groups, reverse=True)]


def adaptive(p, y, bins=15):
    gap = []
    for group in reversed(grouped(surest(p, y))):
        gap += [sum(r - c for c, r in group) / len(group)] * len(group)
    parts = np.array_split(np.array(gap), min(bins, len(gap)))
    return sum(abs(part.sum()) for part in parts) / len(gap)


def risks(pairs):
    """The error rate of the i surest, i = 1 .. N."""
    found, wrong = [], 0.0
    for group in grouped(pairs):
        share = sum(1 - r for _, r in group) / len(group)
        for _ in group:
            wrong += share
            found.append(wrong / (len(found) + 1))
    return found


def curve(pairs):
    coverage, risk, confidence, seen = [], [], [], 0
    every = risks(pairs)
    for group in grouped(pairs):
        seen += len(group)
        coverage.append(seen / len(pairs))
        risk.append(every[seen - 1])
        confidence.append(round(group[0][0] * 2**20) / 2**20)
    return [coverage, risk, confidence]


def differing(members):
    labels = np.array(members).argmax(-1)
    return np.mean([np.mean(a != b) for a, b in combinations(labels, 2)])


def disagreement(members, y):
    accuracy = top(np.mean(members, 0).tolist(), y, 1)
    return differing(members) / (1 - accuracy + 1e-7)


def entropy(p):
    return -sum(v * math.log(v) for v in p if v > 0)


# ---- real targets ----------------------------------------------------------------------------------------


def mixture_log_density(outputs, target, precision):
    """Per target, of examples whose targets are taken together: log (1/D) Σ_d Π_t N(y_t; f_dt, 1/τ)."""
    scale, total = precision**-0.5, 0.0
    for n in range(len(target)):
        each = [norm.logpdf(target[n], draw[n], scale).sum() for draw in outputs]
        total += math.log(sum(math.exp(v) for v in each) / len(each))
    return total / (len(target) * len(target[0]))


def interval(values, precision, level):
    """The ends of a mixture's central interval, by root finding."""
    scale = precision**-0.5

    def end(q):
        low, high = min(values) - 12 * scale, max(values) + 12 * scale
        return brentq(lambda t: float(np.mean(norm.cdf(t, values, scale))) - q, low, high, xtol=1e-13)

    return end((1 - level) / 2), end((1 + level) / 2)


def covered(outputs, target, precision, level):
    """Coverage and mean width of the central intervals."""
    outputs, target, inside, width = np.array(outputs), np.array(target), [], []
    for place_ in np.ndindex(*target.shape):
        low, high = interval([draw[place_] for draw in outputs], precision, level)
        inside.append(low <= target[place_] <= high)
        width.append(high - low)
    return float(np.mean(inside)), float(np.mean(width))


def crps(samples, point):
    x, total = np.array(samples), 0.0
    for n, y in enumerate(point):
        column = x[:, n]
        total += np.mean([abs(v - y) for v in column])
        total -= np.mean([abs(v - w) for v in column for w in column]) / 2
    return total / len(point)


def snr(gradients):
    columns = np.array(gradients).T
    return float(np.mean([np.mean(c**2) / np.mean((c - c.mean()) ** 2) for c in columns]))


# ---- corruptions -----------------------------------------------------------------------------------------


def ratios(errors, baseline):
    return {c: 100 * np.mean(rates) / np.mean(baseline[c]) for c, rates in errors.items()}


def relative(errors, clean, baseline, reference):
    return {c: 100 * (np.mean(e) - clean) / (np.mean(baseline[c]) - reference) for c, e in errors.items()}


def cases(i):
    """[metric, names of its inputs, options, value] of every function."""
    p, ties, y, draws = i["p"], i["ties"], i["y"], i["draws"]
    flat = {f"{k}": v for k, v in ratios(i["errors"], i["baseline"]).items()}
    rates = relative(i["errors"], 0.04, i["baseline"], 0.1)
    both = [0] * len(i["scores"]) + [1] * len(i["others"])
    joined = i["scores"] + i["others"]
    found = [
        ["nll", ["p", "y"], {}, nll(p, y)],
        ["gibbs_nll", ["draws", "y"], {}, np.mean([nll(d, y) for d in draws])],
        ["brier", ["p", "y"], {}, brier(p, y)],
        ["brier", ["p", "y"], {"tfp": True}, brier(p, y) - 1],
        ["auroc", ["scores", "labels"], {}, roc_auc_score(i["labels"], i["scores"])],
        ["auc_pr", ["scores", "labels"], {}, average_precision_score(i["labels"], i["scores"])],
        ["ood_scores", ["scores", "others"], {},
         [roc_auc_score(both, joined), average_precision_score(both, joined)]],
        ["disagreement", ["draws", "y"], {}, disagreement(draws, y)],
        ["disagreement", ["draws"], {}, differing(draws)],
        ["disagreement", ["draws", "y"], {"samples": 2},
         disagreement(np.array(draws).reshape(3, 2, 60, 5).mean(1).tolist(), y)],
        ["pairwise_kl", ["draws"], {},
         np.mean([np.sum(np.array(a) * np.log(np.array(a) / np.array(b)), -1).mean()
                  for a, b in permutations(draws, 2)])],
        ["pairwise_cosine", ["draws"], {},
         np.mean([np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v)
                  for a, b in combinations(draws, 2) for u, v in zip(a, b, strict=True)])],
        ["rmse", ["mean", "target"], {}, float(np.sqrt(np.mean((np.array(i["mean"]) - i["target"]) ** 2)))],
        ["mae", ["mean", "target"], {}, float(np.mean(np.abs(np.array(i["mean"]) - i["target"])))],
        ["coverage", ["lower", "upper", "point"], {},
         np.mean([a <= t <= b for a, b, t in zip(i["lower"], i["upper"], i["point"], strict=True)])],
        ["interval_width", ["lower", "upper"], {}, np.mean(np.array(i["upper"]) - i["lower"])],
        ["crps", ["samples", "point"], {}, crps(i["samples"], i["point"])],
        ["gradient_snr", ["gradients"], {}, snr(i["gradients"])],
        ["log_predictive_density", ["outputs", "target"], {"precision": 4.0},
         mixture_log_density(i["outputs"], i["target"], 4.0)],
        ["coverage_curve", ["outputs", "target"], {"precision": 4.0, "levels": [0.2, 0.5, 0.9]},
         [[0.2, 0.5, 0.9], [covered(i["outputs"], i["target"], 4.0, v)[0] for v in (0.2, 0.5, 0.9)]]],
        ["corruption_errors", ["errors", "baseline"], {}, flat],
        ["corruption_errors", ["errors"], {}, ratios(i["errors"], ALEXNET)],
        ["mean_corruption_error", ["errors", "baseline"], {}, np.mean(list(flat.values()))],
        ["mean_corruption_error", ["errors"], {}, np.mean(list(ratios(i["errors"], ALEXNET).values()))],
        ["relative_corruption_errors", ["errors", "baseline"],
         {"clean_error": 0.04, "baseline_clean_error": 0.1}, rates],
        ["relative_mean_corruption_error", ["errors", "baseline"],
         {"clean_error": 0.04, "baseline_clean_error": 0.1}, np.mean(list(rates.values()))],
    ]  # fmt: skip
    for name, q in (("p", p), ("ties", ties)):
        pairs = surest(q, y)
        found += [
            ["accuracy", [name, "y"], {}, top(q, y, 1)],
            ["top_k_accuracy", [name, "y"], {"k": 3}, top(q, y, 3)],
            ["ece", [name, "y"], {}, ece(q, y)],
            ["ece", [name, "y"], {"bins": 10}, ece(q, y, 10)],
            ["ece", [name, "y"], {"bins": 20, "min_count": 5}, ece(q, y, 20, 5)],
            ["ece", [name, "y"], {"bins": 20, "min_count": 5, "total": "kept"}, ece(q, y, 20, 5, kept=True)],
            ["mce", [name, "y"], {}, mce(q, y)],
            ["adaptive_ece", [name, "y"], {"bins": 7}, adaptive(q, y, 7)],
            ["reliability", [name, "y"], {"bins": 10}, diagram(q, y, 10)],
            ["aurc", [name, "y"], {}, np.mean(risks(pairs))],
            ["selective_risk", [name, "y"], {"coverage": 0.6}, risks(pairs)[math.ceil(0.6 * len(y)) - 1]],
            ["accuracy_at_coverage", [name, "y"], {"coverage": 0.6},
             1 - risks(pairs)[math.ceil(0.6 * len(y)) - 1]],
            ["risk_coverage", [name, "y"], {}, curve(pairs)],
        ]  # fmt: skip
    return found


def evaluations():
    """What sb.evaluate gives of three linear members W ∘ r sᵀ, by likelihood."""
    rng = np.random.default_rng(11)
    found = []
    for kind, outputs in (("Categorical", 12), ("Categorical", 2), ("Bernoulli", 1), ("Gaussian", 2)):
        x, w = rng.normal(size=(80, 4)), rng.normal(size=(outputs, 4))
        r, s = rng.normal(1, 0.5, (3, outputs)), rng.normal(1, 0.5, (3, 4))
        draws = np.einsum("ko,kno->kno", r, (s[:, None] * x) @ w.T)  # [3, 80, outputs]
        if kind == "Gaussian":
            y = draws.mean(0) + rng.normal(size=(80, 2))
            expected = regression(draws, y, 2.0)
        else:
            p = softmax(draws) if kind == "Categorical" else 1 / (1 + np.exp(-draws))
            p = p if kind == "Categorical" else np.concatenate((1 - p, p), -1)
            y = np.array([rng.choice(len(row), p=row) for row in p.mean(0)])
            expected = classes(p, y.tolist())
        given = {name: value.tolist() for name, value in (("x", x), ("w", w), ("r", r), ("s", s), ("y", y))}
        found.append({"likelihood": kind, **given, "expected": expected})
    return found


def classes(draws, y):
    p, wide = draws.mean(0).tolist(), draws.tolist()
    total = np.mean([entropy(row) for row in p])
    found = {
        "nll": nll(p, y), "gibbs_nll": np.mean([nll(d, y) for d in wide]), "accuracy": top(p, y, 1),
        "ece": ece(p, y), "ece_20": ece(p, y, 20, 5), "mce": mce(p, y), "adaptive_ece": adaptive(p, y),
        "brier": brier(p, y), "aurc": np.mean(risks(surest(p, y))), "entropy": total,
        "mutual_information": total - np.mean([entropy(row) for d in wide for row in d]),
        "disagreement": disagreement(wide, y), "examples": len(y),
    }  # fmt: skip
    if len(p[0]) >= 10:
        found["top_5_accuracy"] = top(p, y, 5)
    if len(p[0]) == 2:
        scores = [row[1] for row in p]
        found |= {"auroc": roc_auc_score(y, scores), "auc_pr": average_precision_score(y, scores)}
    return found


def regression(draws, y, precision):
    error = draws.mean(0) - y
    density = mixture_log_density(draws, y, precision)
    coverage, width = covered(draws, y, precision, 0.9)
    epistemic = np.mean((draws - draws.mean(0)) ** 2)
    return {
        "nll": -density, "log_predictive_density": density, "rmse": np.sqrt(np.mean(error**2)),
        "mae": np.mean(np.abs(error)), "coverage_90": coverage, "width_90": width,
        "variance": epistemic + 1 / precision, "epistemic": epistemic, "examples": len(y),
    }  # fmt: skip


def document():
    given = inputs()
    record = {"inputs": given, "cases": cases(given), "evaluations": evaluations()}
    text = json.dumps(record, default=float, separators=(",", ":"))
    return text.replace('],["', '],\n["').replace('],"', '],\n"') + "\n"


def same(a, b):
    """Equal but for rounding, which differs between machines."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file would change")
    if parser.parse_args().check:
        sys.exit(0 if same(json.loads(document()), json.loads(FILE.read_text())) else f"{FILE} would change")
    FILE.write_text(document())
