"""Synthetic results that look like a comparison's, without training anything."""

import numpy as np

METHODS = [
    ("Deterministic", "Deterministic", 1, 0.0, 0.0),
    ("MCDropout", "MC dropout", 8, 0.0, -0.08),
    ("BatchEnsemble", "BatchEnsemble", 4, 0.021, 0.16),
    ("Rank1", "Rank-1 BNN", 4, 0.043, 0.30),
    ("KTied", "k-tied Normal", 8, 0.12, 0.01),
    ("ECMP", "ECMP", 5, 0.015, 0.18),
    ("DeepEnsemble", "Deep ensemble", 4, 3.0, 0.42),
]
SHIFTS = ["gaussian_noise", "rotation", "contrast", "pixelate", "motion_blur"]
DIGITS = [
    "00111100 01100110 01100110 01100110 01100110 01100110 01100110 00111100",
    "00011000 00111000 01111000 00011000 00011000 00011000 00011000 01111110",
    "00111100 01100110 00000110 00001100 00011000 00110000 01100000 01111110",
    "01111110 00001100 00011000 00001100 00000110 00000110 01100110 00111100",
    "00001100 00011100 00111100 01101100 01111110 00001100 00001100 00001100",
    "01111110 01100000 01111100 00000110 00000110 00000110 01100110 00111100",
    "00111100 01100000 01100000 01111100 01100110 01100110 01100110 00111100",
    "01111110 00000110 00001100 00011000 00110000 00110000 00110000 00110000",
    "00111100 01100110 01100110 00111100 01100110 01100110 01100110 00111100",
    "00111100 01100110 01100110 01100110 00111110 00000110 00000110 00111100",
]


def _document(title, task, dataset, methods, shifts, ood, seeds):
    return {
        "format": "slimbayes-results",
        "version": 1,
        "title": title,
        "created": "2026-01-02T03:04:05Z",
        "task": task,
        "provenance": {
            "command": "slimbayes compare --seeds 3",
            "commit": "0123456789abcdef",
            "seeds": list(range(seeds)),
            "versions": {"slimbayes": "0.1.0", "torch": "2.13.0", "numpy": "2.1.0"},
            "hardware": "2 CPU cores",
            "wall_seconds": 83.4,
            "config": {"epochs": 20, "batch_size": 64, "optimizer": {"name": "adam", "lr": 1e-3}},
        },
        "dataset": dataset,
        "network": "MLP 64-128-128-10, ReLU",
        "shifts": [{"name": n, "description": f"{n.replace('_', ' ')} of growing strength",
                    "severities": [1, 2, 3, 4, 5]} for n in shifts],
        "ood": ood,
        "methods": methods,
    }  # fmt: skip


def _method(name, label, draws, overhead, runs):
    base = 26_122
    return {"name": name, "label": label, "settings": {"components": draws}, "parameters": round(base * (1 + overhead)),
            "base_parameters": base, "overhead": overhead, "draws": draws, "runs": runs}  # fmt: skip


def _history(rng, epochs, start, end, kl):
    steps = []
    for epoch in range(epochs):
        share = np.exp(-epoch / (epochs / 4))
        nll = end + (start - end) * share + 0.02 * rng.standard_normal()
        steps.append({"step": (epoch + 1) * 22, "epoch": epoch + 1, "nll": nll, "kl": kl * (0.6 + 0.4 * share),
                      "loss": nll + kl * (0.6 + 0.4 * share) / 1400, "lr": 1e-3, "kl_weight": 1.0,
                      "validation_nll": nll * 1.1 + 0.03, "validation_accuracy": 1 - nll / 4})  # fmt: skip
    return steps


def _reliability(rng, gap, n):
    edges = np.linspace(0, 1, 16)
    count = np.round(n * np.linspace(0.01, 1, 15) ** 4 / 3.5).astype(int)
    count[:2] = 0
    middle = (edges[1:] + edges[:-1]) / 2
    accuracy = np.clip(middle - gap * middle + 0.03 * rng.standard_normal(15), 0, 1)
    empty = count == 0
    return {"edges": edges.tolist(), "count": count.tolist(),
            "confidence": np.where(empty, np.nan, middle).tolist(),
            "accuracy": np.where(empty, np.nan, accuracy).tolist()}  # fmt: skip


def _classification_metrics(rng, level, quality, luck):
    wobble = 0.01 * rng.standard_normal()
    quality = quality + luck
    return {"nll": 0.12 + 0.35 * level * (1 - quality) + wobble, "accuracy": 0.97 - 0.09 * level + wobble / 2,
            "ece": 0.02 + 0.05 * level * (1 - quality) + abs(wobble), "ece_20": 0.02, "mce": 0.2,
            "brier": 0.05 + 0.1 * level, "entropy": 0.1 + 0.2 * level, "mutual_information": 0.02 * level,
            "examples": 360}  # fmt: skip


def _counts(rng, mean, n, bins):
    return np.histogram(rng.gamma(1.5, mean / 1.5, n), bins=bins)[0].tolist()


def picture(digit, rng, channels=1):
    rows = np.array([[int(c) for c in row] for row in DIGITS[digit].split()])
    image = np.clip(rows * 215 + rng.integers(0, 40, rows.shape), 0, 255).astype(np.uint8)
    return np.stack([image] * channels).tolist()


def _examples(rng, classes, image):
    groups = {}
    for kind, sharp in (("least", 0.6), ("most", 12.0), ("wrong", 5.0)):
        groups[kind] = []
        for i in range(6):
            target = int(rng.integers(classes))
            guess = (target + 1) % classes if kind == "wrong" else target
            logits = rng.standard_normal(classes)
            logits[guess] = logits.max() + sharp
            p = np.exp(logits) / np.exp(logits).sum()
            features = None if image else {f"feature {j}": float(rng.standard_normal()) for j in range(8)}
            groups[kind].append({
                "index": 11 * i, "target": target, "prediction": guess, "confidence": p.max(),
                "entropy": float(-(p * np.log(p)).sum()), "mutual_information": 0.01, "probabilities": p.tolist(),
                "pixels": picture(target, rng) if image else None, "features": features,
            })  # fmt: skip
    return groups


def classification(seeds=3, image=True, methods=METHODS, shifts=SHIFTS, seed=0):
    """Ten digits as 8×8 images, or a table of two classes."""
    rng = np.random.default_rng(seed)
    classes = [str(i) for i in range(10)] if image else ["benign", "malignant"]
    bins, most = np.linspace(0, np.log(len(classes)), 25), np.log(len(classes))
    out = []
    for name, label, draws, overhead, quality in methods:
        runs = []
        for s in range(seeds):
            luck = 0.03 * rng.standard_normal()
            kl = 0.0 if name in ("Deterministic", "DeepEnsemble") else 900 * (quality + 0.1)
            shifted = {n: {str(v): _classification_metrics(rng, v * (0.4 + 0.2 * i), quality, luck)
                           for v in range(1, 6)} for i, n in enumerate(shifts)}  # fmt: skip
            spots = [{"shift": n, "severity": v, "accuracy": shifted[n][str(v)]["accuracy"],
                      "disagreement": 0.15 + quality + 0.04 * v} for n in shifts for v in range(1, 6)]  # fmt: skip
            clean = _classification_metrics(rng, 0.0, quality, luck)
            spots.append(
                {
                    "shift": "clean",
                    "severity": 0,
                    "accuracy": clean["accuracy"],
                    "disagreement": 0.1 + quality,
                }
            )
            auroc = {f"{a}_{b}": 0.8 + quality / 4 + 0.01 * rng.standard_normal()
                     for a in ("auroc", "aupr") for b in ("entropy", "mutual_information")}  # fmt: skip
            runs.append({
                "seed": s, "train_seconds": 2.0 * draws**0.5 + rng.random(), "predict_seconds": 0.02 * draws,
                "clean": clean, "shifted": shifted, "ood": auroc if image else None,
                "reliability": {"clean": _reliability(rng, 0.03, 360),
                                "shifted": _reliability(rng, 0.4 * (1 - quality), 9000)} if shifts else
                               {"clean": _reliability(rng, 0.03, 360)},
                "entropy": {"edges": bins.tolist(), "clean": _counts(rng, 0.1 * most, 360, bins),
                            "shifted": _counts(rng, 0.25 * most, 9000, bins),
                            "ood": _counts(rng, (0.35 + quality) * most, 360, bins) if image else None},
                "disagreement": spots if draws > 1 else None,
                "history": _history(rng, 20, 2.2, 0.1, kl),
                "examples": _examples(rng, len(classes), image) if s == 0 else None, "fit": None, "scatter": None,
            })  # fmt: skip
        out.append(_method(name, label, draws, overhead, runs))
    dataset = {"name": "digits" if image else "breast_cancer", "kind": "image" if image else "table",
               "classes": classes, "features": [] if image else [f"feature {i}" for i in range(8)], "outputs": [],
               "num_train": 1437, "num_test": 360, "shape": [1, 8, 8] if image else [8],
               "source": "Handwritten digits, 8×8 pixels.", "fingerprint": "00112233445566aa"}  # fmt: skip
    ood = {"name": "letters", "description": "letters instead of digits", "num": 360} if image else None
    title = "Seven methods on digits" if image else "Seven methods on breast cancer"
    return _document(title, "classification", dataset, out, shifts, ood, seeds)


def regression(seeds=3, one_dimensional=True, methods=METHODS, shifts=("noise", "missing"), seed=1):
    """The cubic of one input, or a table of ten inputs."""
    rng = np.random.default_rng(seed)
    out = []
    train_x = rng.uniform(-4, 4, 40)
    train_y = train_x**3 + 3 * rng.standard_normal(40)
    levels = np.linspace(0.05, 0.95, 19)
    x = np.linspace(-6, 6, 80)
    for name, label, draws, overhead, quality in methods:
        runs = []
        for s in range(seeds):
            luck = 0.03 * rng.standard_normal()

            def metrics(level, quality=quality + luck):
                wobble = 0.02 * rng.standard_normal()
                nll = 2.5 + level * (1 - quality) + wobble
                return {"nll": nll, "log_predictive_density": -nll, "rmse": 3 + level + wobble, "mae": 2 + level,
                        "coverage_90": 0.9 - 0.06 * level * (1 - quality), "width_90": 10 + 5 * quality * level,
                        "variance": 9.0, "epistemic": quality, "examples": 100}  # fmt: skip

            spread = 0.2 + max(quality, 0.0) * np.maximum(np.abs(x) - 3, 0) * 60
            mean = x**3 + 5 * rng.standard_normal() * (np.abs(x) > 4)
            fit = {"x": x, "mean": mean, "lower": mean - 15 - spread, "upper": mean + 15 + spread,
                   "epistemic_lower": mean - spread, "epistemic_upper": mean + spread, "level": 0.9,
                   "train_x": train_x, "train_y": train_y, "truth": x**3}  # fmt: skip
            target = 150 + 60 * rng.standard_normal(90)
            guess = target + 30 * rng.standard_normal(90)
            scatter = {"target": target, "mean": guess, "lower": guess - 50, "upper": guess + 50}
            fit, scatter = ({k: np.asarray(v).tolist() for k, v in d.items()} for d in (fit, scatter))
            cover = np.clip(levels + 0.1 * (quality - 0.3) * np.sin(np.pi * levels), 0, 1)
            features = (
                None if one_dimensional else {f"feature {j}": float(rng.standard_normal()) for j in range(10)}
            )
            examples = {kind: [{"index": i, "target": 10.0 * i, "prediction": 10.0 * i + miss, "lower": 10.0 * i - 8,
                                "upper": 10.0 * i + 8, "confidence": None, "entropy": 2.0, "mutual_information": 0.1,
                                "probabilities": None, "pixels": None, "features": features} for i in range(4)]
                        for kind, miss in (("least", 2.0), ("most", 1.0), ("wrong", 15.0))}  # fmt: skip
            runs.append({
                "seed": s, "train_seconds": 1.0 + rng.random(), "predict_seconds": 0.01 * draws,
                "clean": metrics(0.0), "shifted": {n: {str(v): metrics(v / 2) for v in range(1, 6)} for n in shifts},
                "ood": None, "reliability": {"clean": {"level": levels.tolist(), "coverage": cover.tolist()},
                                             "shifted": {"level": levels.tolist(), "coverage": (cover * 0.8).tolist()}},
                "entropy": None, "disagreement": [], "history": _history(rng, 20, 6.0, 2.5, 500 * (quality + 0.1)),
                "examples": examples if s == 0 else None,
                "fit": fit if one_dimensional else None, "scatter": None if one_dimensional else scatter,
            })  # fmt: skip
        out.append(_method(name, label, draws, overhead, runs))
    dataset = {"name": "cubic" if one_dimensional else "diabetes", "kind": "table", "classes": [],
               "features": ["x"] if one_dimensional else [f"feature {j}" for j in range(10)], "outputs": ["y"],
               "num_train": 40, "num_test": 100, "shape": [1] if one_dimensional else [10],
               "source": "y = x³ + noise.", "fingerprint": "ffeeddccbbaa0011"}  # fmt: skip
    title = "Seven methods on the cubic" if one_dimensional else "Seven methods on diabetes"
    return _document(title, "regression", dataset, out, list(shifts), None, seeds)


ALL = {
    "images": lambda **k: classification(**k),
    "table": lambda **k: classification(image=False, **k),
    "cubic": lambda **k: regression(**k),
    "diabetes": lambda **k: regression(one_dimensional=False, **k),
}
