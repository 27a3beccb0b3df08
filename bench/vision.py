"""Training steps of torchvision's ResNet-50 and a timm ViT under every method, as ratios in one run.

Rows per step are the same for all methods: ``--rows`` in all, so a method with K components sees rows/K
distinct images. Needs a GPU, torchvision and timm; prints a table and writes JSON with --output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

import slimbayes as sb


def methods():
    return {
        "deterministic": sb.Deterministic(),
        "batchensemble K=4": sb.BatchEnsemble(),
        "rank1 normal K=4": sb.Rank1.paper(),
        "rank1 cauchy K=4": sb.Rank1.paper(posterior="cauchy"),
        "meanfield shared": sb.MeanField.paper(),
        "meanfield flipout": sb.MeanField.paper(estimator="flipout"),
        "meanfield local": sb.MeanField.paper(estimator="local"),
        "2-tied shared": sb.KTied.paper(),
        "2-tied local": sb.KTied.paper(estimator="local"),
        "EMP K=5": sb.EMP.paper(),
        "ECMP K=5": sb.ECMP.paper(),
        "mc dropout": sb.MCDropout(),
        "dropconnect": sb.DropConnect(),
        "deep ensemble K=4": sb.DeepEnsemble(),
    }


def networks():
    import timm
    import torchvision

    return {
        "torchvision resnet50": lambda: torchvision.models.resnet50(weights=None),
        "timm vit_small_patch16_224": lambda: timm.create_model("vit_small_patch16_224", num_classes=1000),
    }


class Trainer:
    """One network under one method, with a training step to time."""

    def __init__(self, build, method, rows, compiled):
        torch.manual_seed(0)
        self.model = sb.bayesianize(build().cuda().to(memory_format=torch.channels_last), method)
        self.summary = sb.summary(self.model)
        batch = rows // method.traits.components
        self.x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        self.y = torch.randint(1000, (batch,), device="cuda")
        groups = sb.parameter_groups(self.model, lr=1e-4, weight_decay=1e-4)
        self.optimizer = torch.optim.SGD(groups, lr=1e-4, momentum=0.9, nesterov=True)
        self.objective = torch.compile(self._objective, fullgraph=True) if compiled else self._objective

    def _objective(self, x, y):
        with torch.autocast("cuda", torch.bfloat16):
            draws = sb.draw(self.model, x)
        return sb.elbo(draws, y, self.model, num_data=1_281_167, kl_weight=1e-3).loss

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.objective(self.x, self.y)
        loss.backward()
        self.optimizer.step()
        return loss


def measure(trainer, repeats):
    start = time.perf_counter()
    first = float(trainer.step().detach())
    first_seconds = time.perf_counter() - start
    trainer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss = trainer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {
        "milliseconds": statistics.median(times),
        "first_step_seconds": first_seconds,
        "first_loss": first,
        "last_loss": float(loss.detach()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=128, help="rows per training step (default 128)")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps per method (default 10)")
    parser.add_argument("--compile", action="store_true", help="compile draw and loss with fullgraph=True")
    parser.add_argument("--output", help="write the results to this JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/vision.py needs a GPU: nothing was measured.")
        return 0
    results = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "rows": options.rows,
        "runs": [],
    }
    for network, build in networks().items():
        reference = None
        for name, method in methods().items():
            trainer = Trainer(build, method, options.rows, options.compile)
            figures = measure(trainer, options.repeats)
            reference = reference or figures["milliseconds"]
            row = {
                "network": network,
                "method": name,
                "compiled": options.compile,
                "parameters": trainer.summary.parameters,
                "overhead": trainer.summary.overhead,
                "ratio": figures["milliseconds"] / reference,
                **figures,
            }
            results["runs"].append(row)
            print(
                f"{network:28} {name:20} {row['parameters']:>12,} {100 * row['overhead']:+7.2f} % "
                f"{row['milliseconds']:8.1f} ms  x{row['ratio']:.2f}  {row['peak_gib']:.1f} GiB  "
                f"loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}",
                flush=True,
            )
            del trainer
            torch.cuda.empty_cache()
            if options.compile:
                torch.compiler.reset()
            if options.output:
                with open(options.output, "w") as file:
                    json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
