"""Made-up entries and results for the tests of pages."""

import copy
import math

from slimbayes.lab.experiments import Experiment, Printed

TABLE2 = Experiment(
    "ktied/table2",
    "Table 2",
    "Post-hoc ranks",
    "Two ranks are enough.",
    metrics=("nll", "accuracy"),
    seeds=3,
    printed=(
        Printed(
            "mnist",
            "MNIST, MLP",
            ("nll", "accuracy", "parameters"),
            {
                "Mean-field": (0.431, 97.613, 957000.0),
                "Rank 2": (0.434, 97.5, None),
                "Rank 9": (0.777, 91.25, None),
            },
            {
                "Mean-field": (0.0057, 0.16, None),
                "Rank 2": (0.0057, None, None),
                "Rank 9": (None, None, None),
            },
            "standard error over test examples",
        ),
        Printed("lstm", "IMDB, LSTM", ("nll",), {"Mean-field": (0.478,)}),
    ),
    errata=("The caption says 100 samples; it is 1.",),
)
FIGURE3 = Experiment("ktied/figure3", "Figure 3", "Spectra", "σ is of low rank.")
FIGURE9 = Experiment("rank1/figure9", "Figure 9", "Corruptions", "It holds.", needs="ImageNet-C")
ENTRIES = {entry.name: entry for entry in (TABLE2, FIGURE3, FIGURE9)}


def document(experiment="ktied/table2", scale="gpu", **more):
    """A result with three seeds; ``more`` replaces parts of it."""
    found = {
        "format": "slimbayes-experiment",
        "version": 1,
        "experiment": experiment,
        "scale": scale,
        "settings": {"epochs": 17},
        "tables": [
            {
                "name": "mnist",
                "title": "MNIST, MLP",
                "columns": ["nll", "accuracy", "parameters", "seconds to go"],
                "rows": [
                    {
                        "label": "Mean-field",
                        "values": {
                            "nll": [0.441, 0.453, 0.462],
                            "accuracy": [97.1, 97.4, 97.9],
                            "parameters": [956800, 956800, 956800],
                        },
                        "errors": {"nll": 0.0083},
                    },
                    {"label": "Rank 2", "values": {"nll": [0.5182], "accuracy": [96.2, 96.3, 96.9]}},
                    {
                        "label": "Ours alone",
                        "values": {"nll": [0.6, 0.7, math.nan], "seconds to go": [7.25, 7.5, 8]},
                    },
                ],
            }
        ],
        "curves": [],
        "maps": [],
        "checks": [
            {"what": "rank 2 within 5 %", "holds": False, "value": 1.1472, "bound": 1.05},
            {"what": "rank 1 is worse", "holds": True, "value": 1.52, "bound": "above 1.1"},
        ],
        "deviations": ["30 epochs instead of 300."],
        "runs": [{"setting": "mnist", "label": "Mean-field", "seed": 0, "seconds": 4.5}],
        "provenance": {
            "created": "2026-03-04T05:06:07Z",
            "command": "slimbayes reproduce ktied/table2 --scale gpu",
            "commit": "0123456789ab",
            "seeds": [0, 1, 2],
            "fingerprints": {"mnist": "feedc0de"},
            "hardware": "one GPU",
            "seconds": 1234.5,
            "versions": {"torch": "2.11.0"},
        },
    }
    return copy.deepcopy(found) | more


def drawn(**more):
    """A result with curves (two of a kind, and another) and maps."""
    xs = [1, 10, 100, 1000]
    lines = [
        {"label": label, "x": xs, "y": [[v * (1 + 0.1 * s) / x for x in xs] for s in range(2)]}
        for label, v in (("mean", 8.0), ("stddev", 3.0))
    ]
    spectrum = {"x": "index", "y": "explained variance", "log_x": True, "log_y": True, "lines": lines}
    steps = [{"label": "stddev", "x": [0, 1], "y": [[5.0, math.nan]]}]
    curves = [
        {"name": "layer1", "title": "Layer 1", **spectrum},
        {"name": "layer2", "title": "Layer 2", **spectrum},
        {"name": "elbo", "title": "−ELBO on MNIST", "x": "step", "y": "−ELBO", "lines": steps},
    ]
    panels = [
        {"label": "μ", "shape": [784, 400], "values": [[-0.25, 0.125], [0.5, None]]},
        {"label": "σ", "shape": [400, 10], "values": [[0.0625, 0.125]]},
    ]
    maps = [{"name": "heat", "title": "Weights", "panels": panels}]
    return document("ktied/figure3", "desk", tables=[], curves=curves, maps=maps, **more)
