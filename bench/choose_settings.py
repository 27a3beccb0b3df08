"""How the settings of ``slimbayes compare`` were chosen: NLL on a fifth of the training digits, held out.

The test digits and their shifts take no part. Prints one line per candidate and writes JSON with --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import slimbayes as sb
from slimbayes.lab.config import CompareConfig
from slimbayes.lab.runs import samples_for
from slimbayes.training import hold_out
from slimbayes.verbs.method_text import parse_method

WEIGHTS = (1.0, 0.3, 0.1, 0.03, 0.01)
SIGNS = "Rank1.paper(components=4, random_sign_init=0.5, prior=Normal(0.0, 1.0))"
CANDIDATES: list[tuple[str, dict[str, float]]] = [
    ("Deterministic()", {}),
    ("Rank1.paper(components=4)", {}),
    *[(SIGNS, {"kl_weight": weight}) for weight in WEIGHTS],
    ("BatchEnsemble(components=4)", {}),
    ("BatchEnsemble(components=4, random_sign_init=0.5)", {}),
    *[("KTied.paper(rank=2)", {"kl_weight": weight}) for weight in WEIGHTS],
    *[(f"MCDropout(rate={rate})", {}) for rate in (0.05, 0.1, 0.2)],
    ("EMP.paper(components=5)", {}),
]


def main(seeds: int, out: Path | None) -> None:
    torch.set_num_threads(1)
    config = CompareConfig()
    rows = []
    for method, changes in CANDIDATES:
        values = []
        for seed in range(seeds):
            train, held = hold_out(sb.data.load("digits"), 0.2, seed)
            torch.manual_seed(seed)
            model = sb.bayesianize(sb.models.build("dense", train.shape, 10), parse_method(method))
            settings = {**config.training.to_dict(), **changes, "seed": seed}
            sb.fit(model, train, sb.Training.from_dict(settings), progress=False)
            batches = sb.data.Batches(held.test, 512, scaling=train.scaling, shuffle=False)
            samples = samples_for(model, config.draws)
            values.append(sb.evaluate(model, batches, samples, seed=0, noise="shared")["nll"])
        mean = sum(values) / len(values)
        rows.append({"method": method, "training": changes, "validation_nll": mean, "by_seed": values})
        print(f"{mean:.4f}  {method}  {changes or ''}", flush=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    main(**vars(parser.parse_args()))
