"""What the time of a training step on the CPU goes to, and the floor that measured primitives give it.

    python bench/profile_cpu.py --output bench/results/profile-cpu.json

All contenders of a network run in turn, in one process; a step's time is the shortest over rounds, for other processes
only add to it, and a ratio that of the times. Parts of a step:

- host: the same step of an MLP of width 8 on 8 rows, which is calls and nothing else (not for other networks, where it
  is small beside the rest);
- products, random numbers (generators, and what turns their words into noise), sweeps (every other operation of torch
  outside the optimizer) and optimizer: the rest of the step, in the proportion of the operations' own times in torch's
  profiler.

The floor is the deterministic step, and what a method cannot do without, each measured in the same run as one call of
torch at the network's sizes: the products it adds, its random numbers, its sweeps, its optimizer's extra work. It has
no host part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.accelerate import cpu
from slimbayes.core.noise import fresh_noise
from slimbayes.files import write_whole
from slimbayes.lab.models.build import build
from slimbayes.verbs.provenance import commit, now

METHODS = {
    "deterministic": (None, "example"),
    "batchensemble": (sb.BatchEnsemble(), "example"),
    "rank1-shared": (sb.Rank1.paper(), "shared"),
    "rank1": (sb.Rank1.paper(), "example"),
    "meanfield": (sb.MeanField.paper(), "example"),
    "ktied": (sb.KTied.paper(), "example"),
}
WIDTHS, ROWS, COMPONENTS = (784, 400, 400, 10), 1024, 4
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "conv2d", "mkldnn", "slow_conv", "linear")
NUMBERS = ("rand", "normal", "uniform", "bernoulli", "random_", "noise")


def mlp(widths=WIDTHS):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def tiny():
    return mlp((8, 8, 8, 10))


def wrn():
    return build("wrn", (3, 32, 32), 10, depth=16, width=2).to(memory_format=torch.channels_last)


NETWORKS = {
    "mlp": (mlp, (784,), ROWS, tuple(METHODS)),
    "wrn-16-2": (wrn, (3, 32, 32), 256, ("deterministic", "rank1")),
}


def training_step(make, shape, rows, method, noise):
    """One step of a network under a method; torch's own network and loss without one."""
    torch.manual_seed(0)
    model = make()
    if method is not None:
        model = sb.bayesianize(model, method)
    batch = rows // (1 if method is None else method.traits.components)
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    if len(shape) == 3:
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad(set_to_none=True)
        if method is None:
            loss = F.cross_entropy(model(x), y)
        else:
            loss = sb.elbo(sb.draw(model, x, noise=noise), y, model, num_data=60_000).loss
        loss.backward()
        optimizer.step()

    return step


def timed(functions, seconds, least=5):
    """Milliseconds of each function, the shortest: in turn, in a new order each round."""
    times = {name: [] for name in functions}
    for run in functions.values():
        run()
        run()
    order, start = list(functions), time.perf_counter()
    while time.perf_counter() - start < seconds or len(times[order[0]]) < least:
        random.shuffle(order)
        for name in order:
            before = time.perf_counter()
            functions[name]()
            times[name].append((time.perf_counter() - before) * 1e3)
    return {name: min(values) for name, values in times.items()}


def category(event):
    """The part of a step that an operation belongs to; None for what is no operation."""
    node = event
    while node is not None:
        if node.name.startswith("Optimizer.step"):
            return "optimizer"
        if node.name == "random numbers":
            return "random numbers"
        node = node.cpu_parent
    if not event.name.startswith("aten::"):
        return None
    name = event.name.removeprefix("aten::").lstrip("_")
    if name.startswith(NUMBERS):
        return "random numbers"
    return "products" if name.startswith(PRODUCTS) else "sweeps"


def parts(step, wall, host, steps):
    """Milliseconds of a step by part."""
    fill = cpu.noise

    def marked(*arguments):
        with torch.profiler.record_function("random numbers"):
            return fill(*arguments)

    cpu.noise = marked
    shortest, found = math.inf, {}
    try:
        for _ in range(steps):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step()
            now = dict.fromkeys(("products", "random numbers", "sweeps", "optimizer"), 0.0)
            for event in profile.events():
                kind = category(event)
                if kind is not None:
                    now[kind] += event.self_cpu_time_total / 1e3
            if sum(now.values()) < shortest:
                shortest, found = sum(now.values()), now
    finally:
        cpu.noise = fill
    return {name: value * (wall - host) / shortest for name, value in found.items()} | {"host": host}


def primitives():
    """Calls of torch at the MLP's sizes."""
    wide, narrow = torch.randn(ROWS, 784), torch.randn(ROWS, 400)
    weight, out_wide, out = torch.randn(400, 784), torch.empty(ROWS, 784), torch.empty(ROWS, 400)
    draws = ROWS * (784 + 4 * 400 + 10)
    weights = sum(a * b for a, b in itertools.pairwise(WIDTHS))
    flat, sample = torch.randn(weights), torch.empty(weights)
    cpu = torch.device("cpu")
    shapes = [(400, 784), (400,), (400, 400), (400,), (10, 400), (10,)]
    factors = [(COMPONENTS, width) for width in (784, 400, 400, 400, 400, 10) for _ in range(2)]
    own = torch.empty(400, 784)
    return {
        "input gradient of the first layer": lambda: torch.mm(narrow, weight),
        "normals, one per row and channel": lambda: fresh_noise("normal", (draws,), torch.float32, cpu),
        "normals, one per weight": lambda: fresh_noise("normal", (weights,), torch.float32, cpu),
        "sweep, 784 channels": lambda: torch.mul(wide, wide, out=out_wide),
        "sweep, 400 channels": lambda: torch.mul(narrow, narrow, out=out),
        "sweep, first weight": lambda: torch.mul(own, weight, out=own),
        "sweep, all weights": lambda: torch.mul(flat, flat, out=sample),
        "adam": adam(shapes),
        "adam with factors": adam(shapes + factors),
        "adam with a spread per weight": adam(shapes * 2),
    }


def adam(shapes):
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Adam(parameters, lr=1e-4).step


def floors(at):
    """Milliseconds that a method adds to the MLP's deterministic step at the least, by part.

    A sweep is one product of two tensors, written to a third. As if every pass over the same data were fused to one: a
    factor is applied by one sweep over its rows, and its backward pass is another (both gradients, and the sum over the
    batch); a factor of every row has to be made, which is a third. In the first layer a shared factor of the input has
    its gradient from those of the draws' weights: one sweep over a weight for each draw. A sampled weight: one sweep
    for the sample, one for its gradients, the KL in passing.
    """
    wide, narrow = at["sweep, 784 channels"], at["sweep, 400 channels"]
    factors = max(0.0, at["adam with factors"] - at["adam"])
    spreads = max(0.0, at["adam with a spread per weight"] - at["adam"])
    shared = wide + COMPONENTS * at["sweep, first weight"] + 4 * 2 * narrow
    return {
        "batchensemble": {"sweeps": shared, "optimizer": factors / 2},
        "rank1-shared": {"sweeps": shared, "optimizer": factors},
        "rank1": {
            "products": at["input gradient of the first layer"],
            "random numbers": at["normals, one per row and channel"],
            "sweeps": 3 * wide + 4 * 3 * narrow,
            "optimizer": factors,
        },
        "meanfield": {
            "random numbers": at["normals, one per weight"],
            "sweeps": 2 * at["sweep, all weights"],
            "optimizer": spreads,
        },
        "ktied": {"random numbers": at["normals, one per weight"], "sweeps": 2 * at["sweep, all weights"]},
    }


def convolved(make, shape, rows):
    """Shapes of what goes into and comes out of every layer with a weight, the rows included."""
    seen, model = [], make()
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(
                lambda _, given, made: seen.extend([tuple(given[0].shape), tuple(made.shape)])
            )
    with torch.no_grad():
        model(torch.randn(rows, *shape))
    return seen


def sweeps_of(shapes):
    """One sweep over each size of activations, the random numbers, and the input gradient of the first layer."""
    runs = {}
    for shape in set(shapes):
        flat = torch.randn(math.prod(shape))
        runs[f"sweep {shape}"] = lambda flat=flat, out=torch.empty_like(flat): torch.mul(flat, flat, out=out)
    draws = sum(shape[0] * shape[1] for shape in shapes)
    runs["normals, one per row and channel"] = lambda: fresh_noise(
        "normal", (draws,), torch.float32, torch.device("cpu")
    )
    first, made = (torch.randn(s).contiguous(memory_format=torch.channels_last) for s in shapes[:2])
    weight = torch.randn(made.shape[1], first.shape[1], 3, 3).contiguous(memory_format=torch.channels_last)
    options = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
    backward = torch.ops.aten.convolution_backward
    runs["input gradient of the first layer"] = lambda: backward(made, first, weight, *options)
    return runs


def convolved_floor(at, shapes):
    """As ``floors``: a factor is applied by one sweep over its rows, and its backward pass is another."""
    return {
        "rank1": {
            "products": at["input gradient of the first layer"],
            "random numbers": at["normals, one per row and channel"],
            "sweeps": 2 * sum(at[f"sweep {shape}"] for shape in shapes),
        }
    }


def profile_network(name, seconds, steps):
    make, shape, rows, methods = NETWORKS[name]
    runs = {key: training_step(make, shape, rows, *METHODS[key]) for key in methods}
    shapes = convolved(make, shape, rows)
    extra = primitives() if name == "mlp" else sweeps_of(shapes)
    measured = {f"primitive: {key}": run for key, run in extra.items()}
    if name == "mlp":
        measured |= {f"host: {key}": training_step(tiny, (8,), 8, *METHODS[key]) for key in methods}
    times = timed(runs | measured, seconds)
    base = times["deterministic"]
    result = {}
    at = {key: times[f"primitive: {key}"] for key in extra}
    floor = floors(at) if name == "mlp" else convolved_floor(at, shapes)
    for key in methods:
        found = parts(runs[key], times[key], times.get(f"host: {key}", 0.0), steps)
        entry = {
            "ratio": round(times[key] / base, 3),
            "shares": {part: round(value / times[key], 3) for part, value in found.items()},
            "parts": {part: round(value / base, 3) for part, value in found.items()},
        }
        if key in floor:
            entry["floor"] = {part: round(value / base, 3) for part, value in floor[key].items()}
            entry["floor"]["ratio"] = round(1 + sum(floor[key].values()) / base, 3)
        result[key] = entry
        print(f"{name:9} {key:14} {json.dumps(entry)}", file=sys.stderr)
    return {
        "rows": rows,
        "deterministic_ms": round(base, 2),
        "methods": result,
        "primitives": {key: round(value / base, 4) for key, value in at.items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--networks", default="mlp,wrn-16-2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, per network")
    parser.add_argument("--steps", type=int, default=7, help="profiled, per contender")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    networks = {
        name: profile_network(name, options.seconds, options.steps) for name in options.networks.split(",")
    }
    result = {
        "format": "slimbayes profile",
        "torch": torch.__version__,
        "device": "cpu",
        "threads": options.threads,
        "allocator": "keeps its pages" if os.environ.get("MALLOC_TOP_PAD_") else "as it is",
        "commit": commit(),
        "time": now(),
        "unit": "ratios to the deterministic step; shares of the contender's own step",
        "networks": networks,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        write_whole(options.output, text)


if __name__ == "__main__":
    main()
