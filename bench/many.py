"""Seconds per step of N small networks trained at once by ``sb.fit_many``, against ``sb.fit`` on one after the other.

    python bench/many.py --networks 20 --epochs 100
    python bench/many.py --device cuda --capture --epochs 400 --output bench/results/many-gpu.json

The network, the batches and the methods are those of the EMP paper's regressions: one hidden layer of 50 units, batches
of 100, Adam. The two sides take turns, round after round, and the ratio is the median of the rounds' ratios. One by one
only ``--alone`` networks are trained in a round, and their time is scaled to N. Times are of training, the first
``--warm`` epochs and whatever is compiled in them left out: each side trains for so many epochs and for ``--epochs``
more, and the difference counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import slimbayes as sb
from slimbayes.files import write_whole
from slimbayes.lab.bench.measuring import describe
from slimbayes.training.many import group
from slimbayes.verbs.provenance import commit, now

METHODS = {
    "deterministic": (sb.Deterministic(), "batch"),
    "EMP": (sb.EMP.paper(components=5, patch=("norm",)), "batch"),
    "ECMP": (sb.ECMP.paper(components=5, patch=("norm",)), "batch"),
    "dropout": (sb.MCDropout(rate=0.005), "none"),
    "ensemble": (sb.DeepEnsemble(members=5), "none"),
}


def make(name, options):
    """N networks and their data: inputs of as many columns as Boston has, targets with noise."""
    method, normalization = METHODS[name]
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(options.networks):
        x = torch.randn(options.rows, options.inputs, generator=generator)
        noise = torch.randn(options.rows, 1, generator=generator)
        data.append((x, x[:, :1].sin() + 0.1 * noise))
    torch.manual_seed(0)
    networks = [
        sb.models.RegressionNet(options.inputs, hidden=options.hidden, normalization=normalization)
        for _ in range(options.networks)
    ]
    return [sb.bayesianize(network, method) for network in networks], data


def settings(options, epochs):
    steps_per_epoch = max(1, options.rows // min(options.batch, options.rows))
    return {
        "epochs": epochs, "batch_size": options.batch, "optimizer": "adam", "lr": 1e-3, "l2": 0.005,
        "schedule": "constant", "log_every": max(1, epochs * steps_per_epoch), "progress": False,
        "accelerator": options.device,
    }  # fmt: skip


def wait(options):
    if options.device == "cuda":
        torch.cuda.synchronize()


def difference(train, options):
    """Seconds that ``--epochs`` epochs take beyond the first ones; once before, for what is imported and allocated."""
    train(1)
    times = []
    for epochs in (options.warm, options.warm + options.epochs):
        wait(options)
        begun = time.perf_counter()
        train(epochs)
        wait(options)
        times.append(time.perf_counter() - begun)
    return times[1] - times[0]


def at_once(models, data, options):
    def train(epochs):
        more = {"capture": options.capture, "compile": options.compile, "seeds": range(len(models))}
        trained = copy.deepcopy(models)
        sb.fit_many(trained, data, likelihood=sb.Gaussian(), **settings(options, epochs), **more)

    return difference(train, options)


def one_by_one(models, data, options):
    count = min(options.alone, len(models))

    def train(epochs):
        for i in range(count):
            more = {"capture": options.capture}
            sb.fit(
                copy.deepcopy(models[i]),
                data[i],
                likelihood=sb.Gaussian(),
                seed=i,
                **settings(options, epochs),
                **more,
            )

    return difference(train, options) * len(models) / count


def measure(name, options):
    models, data = make(name, options)
    steps = options.epochs * max(1, options.rows // min(options.batch, options.rows))
    rounds = []
    for _ in range(options.rounds):
        rounds.append((at_once(models, data, options), one_by_one(models, data, options)))
    return {
        "seconds_at_once": [one for one, _ in rounds],
        "seconds_one_by_one": [other for _, other in rounds],
        "ratio": statistics.median(other / one for one, other in rounds),
        "microseconds_per_step": 1e6 * statistics.median(one for one, _ in rounds) / steps,
        "steps": steps,
    }


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--rows", type=int, default=455)
    parser.add_argument("--inputs", type=int, default=13)
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=100, help="timed epochs")
    parser.add_argument("--warm", type=int, default=10, help="epochs before the timed ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--alone", type=int, default=2, help="networks that are trained one by one in a round"
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--capture", action="store_true", help="CUDA graphs, on both sides")
    parser.add_argument("--compile", action="store_true", help="compile the steps of fit_many")
    parser.add_argument("--output", type=Path, help="JSON to write")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.compile:  # few steps, which stand for many
        group.COMPILED_FROM = dict.fromkeys(group.COMPILED_FROM, 0)
    cpu = f"CPU, {torch.get_num_threads()} threads"
    content = {
        **{key: value for key, value in vars(options).items() if key not in ("output", "methods")},
        "hardware": torch.cuda.get_device_name() if options.device == "cuda" else cpu,
        "torch": torch.__version__, "commit": commit(), "created": now(), "runs": [],
    }  # fmt: skip
    for name in options.methods.split(","):
        run = {"method": name}
        try:
            run |= measure(name, options)
            print(
                f"{name:14} {run['microseconds_per_step']:9.1f} µs a step of {options.networks} networks, "
                f"{run['ratio']:6.1f} times as fast as one by one",
                flush=True,
            )
        except Exception as error:
            run["error"] = describe(error)
            print(f"{name:14} failed: {run['error']}", flush=True)
        content["runs"].append(run)
        if options.output is not None:
            write_whole(options.output, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
