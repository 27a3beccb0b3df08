"""Seconds per epoch of a wide ResNet on CIFAR-10-shaped images that lie on the device, captured as CUDA graphs or not.

    python bench/epoch.py --output bench/results/epoch-gpu.json
    python bench/epoch.py --data DATA_ROOT --modes graphs,capture --methods deterministic,rank1

Random crops and flips on the device, bfloat16, channels_last, a compiled loss, fused SGD with momentum. Every network
takes as many steps per epoch: one for each ``--batch`` images. "4 × 128 rows" is the deterministic network on every
image four times, which multiplies as much as four components do. Modes: ``compiled``; ``graphs``, the same with
mode="reduce-overhead"; ``capture``, the whole step (augmentation, loss, backward, optimizer) recorded once in a
torch.cuda.CUDAGraph and replayed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.files import write_whole
from slimbayes.lab.bench.measuring import describe
from slimbayes.verbs.provenance import commit, now

TARGET = 2.5  # seconds per epoch of Rank1 on an H200
PAD = 4
METHODS = ("deterministic", "deterministic-rows", "batchensemble", "rank1")


def read_images(options):
    """uint8 images [N, H, W, 3] and labels [N] on the device: CIFAR-10 if its folder is given, else random ones."""
    if options.data is not None:
        train = sb.data.load("cifar10", root=options.data).train
        images, labels = train.inputs[: options.images], train.targets[: options.images]
        return images.permute(0, 2, 3, 1).contiguous().to(options.device), labels.to(options.device)
    generator = torch.Generator().manual_seed(0)
    shape = (options.images, options.size, options.size, 3)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return images.to(options.device), torch.randint(10, shape[:1], generator=generator).to(options.device)


class Images:
    """Padded images, and an epoch's order, offsets and flips drawn at once."""

    def __init__(self, images, labels):
        self.padded = F.pad(images, (0, 0, PAD, PAD, PAD, PAD))  # [N, H + 8, W + 8, 3]
        self.labels, self.count, self.size = labels, images.shape[0], images.shape[1]
        self.device = images.device

    def order(self):
        """What one epoch takes: [N, 4] of index, row offset, column offset, flip."""
        return torch.stack(
            [
                torch.randperm(self.count, device=self.device),
                torch.randint(2 * PAD + 1, (self.count,), device=self.device),
                torch.randint(2 * PAD + 1, (self.count,), device=self.device),
                torch.randint(2, (self.count,), device=self.device),
            ],
            1,
        )

    def batch(self, plan):
        """Augmented images [B, 3, H, W] in channels_last, and labels, of rows of the plan."""
        index, down, right, flip = plan.unbind(1)
        places = torch.arange(self.size, device=self.device)
        rows = down[:, None] + places  # [B, H]
        columns = right[:, None] + torch.where(flip[:, None] == 1, self.size - 1 - places, places)  # [B, W]
        pixels = self.padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]  # [B, H, W, 3]
        x = (pixels.float() - 120.0) / 64.0
        return x.permute(0, 3, 1, 2), self.labels[index]


class Trainer:
    """A network under a method, with a step that takes rows of the plan."""

    def __init__(self, name, mode, images, options):
        torch.manual_seed(0)
        self.mode, self.images = mode, images
        self.cuda = images.device.type == "cuda"
        network = sb.models.WideResNet(options.depth, options.width).to(images.device)
        self.model = network.to(memory_format=torch.channels_last)
        self.repeats = options.components if name == "deterministic-rows" else 1
        self.bayesian = not name.startswith("deterministic")
        if self.bayesian:
            method = {"batchensemble": sb.BatchEnsemble, "rank1": sb.Rank1}[name](options.components)
            sb.bayesianize(self.model, method)
        # On the device, so that a recorded step follows a schedule.
        rate = torch.tensor(0.1, device=images.device) if self.cuda else 0.1
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4,
            fused=True if self.cuda else None,
        )  # fmt: skip
        self.loss_of = self._loss
        if mode != "eager":
            extra = {"mode": "reduce-overhead"} if mode == "graphs" else {}
            compiler = getattr(sb, "compile", torch.compile) if self.bayesian else torch.compile
            self.loss_of = compiler(self._loss, fullgraph=True, **extra)
        self.plan = images.order()[: options.batch].clone()
        self.graph = None

    def _loss(self, plan):
        x, y = self.images.batch(plan)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            if self.bayesian:
                draws = sb.draw(self.model, x)
                return sb.elbo(draws, y, self.model, num_data=self.images.count).loss
            if self.repeats > 1:
                x, y = x.repeat(self.repeats, 1, 1, 1), y.repeat(self.repeats)
            return F.cross_entropy(self.model(x), y)

    def _step(self):
        if self.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.plan)
        loss.backward()
        self.optimizer.step()
        return loss

    def prepare(self):
        """The first step, timed, a few more, and for ``capture`` the recording."""
        begun = time.perf_counter()
        loss = float(self._step().detach())
        first = time.perf_counter() - begun
        if not loss == loss:
            raise RuntimeError("the first loss is not a number")
        for _ in range(3):
            self._step()
        if self.mode == "capture":
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph):
                self.recorded = self._step().detach()
        return first

    def epoch(self):
        """Seconds of one epoch; the last, smaller batch is left out."""
        self._wait()
        begun = time.perf_counter()
        order = self.images.order()
        batch = self.plan.shape[0]
        for start in range(0, self.images.count - batch + 1, batch):
            self.plan.copy_(order[start : start + batch])
            if self.graph is not None:
                self.graph.replay()
            else:
                loss = self._step()
        self._wait()
        seconds = time.perf_counter() - begun
        last = float(self.recorded if self.graph is not None else loss.detach())
        return seconds, last

    def _wait(self):
        if self.cuda:
            torch.cuda.synchronize()


def measure(name, mode, images, options):
    trainer = Trainer(name, mode, images, options)
    first = trainer.prepare()
    epochs = [trainer.epoch() for _ in range(options.epochs + 1)][1:]
    return {
        "epoch_seconds": statistics.median(seconds for seconds, _ in epochs),
        "epochs": [seconds for seconds, _ in epochs],
        "last_loss": epochs[-1][1],
        "first_seconds": first,
        "peak_bytes": torch.cuda.max_memory_allocated() if trainer.cuda else None,
    }


def title(name, options):
    rows = f"{options.components} × {options.batch} rows"
    return {
        "deterministic": f"deterministic, batch {options.batch}",
        "deterministic-rows": f"deterministic, {rows}",
        "batchensemble": f"BatchEnsemble, {rows}",
        "rank1": f"Rank1 normal per example, {rows}",
    }[name]


def kept_runs(content, options):
    """Runs of the same commit and settings that the output file already has."""
    if options.output is None or not options.output.is_file():
        return []
    old = json.loads(options.output.read_text(encoding="utf-8"))
    same = all(old.get(key) == value for key, value in content.items() if key not in ("created", "runs"))
    return old["runs"] if same else []


def parse(arguments):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with cifar10.npz or CIFAR-10's own files; default: random"
    )
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=32, help="pixels of random images")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--components", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs, after one that is not")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--modes", default="compiled,graphs,capture" if cuda else "eager")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--budget", type=float, default=540.0, help="seconds after which nothing new is begun"
    )
    parser.add_argument("--output", type=Path, help="JSON to write")
    return parser.parse_args(arguments)


def main(arguments=None):
    begun = time.monotonic()
    options = parse(arguments)
    torch.backends.cudnn.benchmark = True
    images = Images(*read_images(options))
    content = {
        "images": images.count, "size": images.size, "data": "CIFAR-10" if options.data else "random",
        "components": options.components, "batch": options.batch, "depth": options.depth, "width": options.width,
        "device": torch.cuda.get_device_name() if images.device.type == "cuda" else "CPU",
        "torch": torch.__version__, "commit": commit(), "created": now(), "target_seconds": TARGET, "runs": [],
    }  # fmt: skip
    content["runs"] = kept_runs(content, options)
    for mode in options.modes.split(","):
        for name in options.methods.split(","):
            if time.monotonic() - begun > options.budget:
                break
            run = {"name": title(name, options), "method": name, "mode": mode}
            try:
                run |= measure(name, mode, images, options)
                print(
                    f"{run['name']:42} {mode:9} {run['epoch_seconds']:8.3f} s  first {run['first_seconds']:.1f} s",
                    flush=True,
                )
            except Exception as error:
                run["error"] = describe(error)
                print(f"{run['name']:42} {mode:9} failed: {run['error']}", flush=True)
            content["runs"] = [r for r in content["runs"] if (r["method"], r["mode"]) != (name, mode)] + [run]
            if options.output is not None:
                write_whole(options.output, json.dumps(content, indent=1) + "\n")
            torch.compiler.reset()
            gc.collect()
            if images.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    return 0


if __name__ == "__main__":
    sys.exit(main())
