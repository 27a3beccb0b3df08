"""Time of all 19 corruptions at 5 severities on one device, beside the PyPI package ``imagecorruptions``.

    python bench/corruptions.py --images 10000 --size 32 --out corruptions.json

On a GPU if there is one. Where ``imagecorruptions`` can be imported (numpy < 2, see record_corruptions.py), the
same images go through it one by one on one CPU thread, turn and turn about with ours; ``--reference-images`` of
them, for it is slow. It has the ImageNet severities only, so ours run with that table then too. ``--threads 1``
gives both one CPU thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings

import numpy as np
import torch

from slimbayes.lab.data.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, corrupt

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from record_corruptions import pictures, reference


def images(count, size):
    """Distinct test images uint8 [count, 3, size, size]: 16 pictures, shifted around."""
    base = torch.from_numpy(pictures(min(count, 16), size).transpose(0, 3, 1, 2).copy())
    tiles = [base.roll((5 * k, 3 * k), (2, 3)) for k in range(-(-count // len(base)))]
    return torch.cat(tiles)[:count].contiguous()


def ours(batch, name, severity, table, repeats):
    """Seconds for the whole batch, the median of some runs."""
    times = []
    for repeat in range(repeats):
        if batch.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        corrupt(batch, name, severity, seed=repeat, table=table)
        if batch.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def theirs(package, pictures, name, severity):
    """Seconds for these images, one by one."""
    start = time.perf_counter()
    for picture in pictures:
        package.corrupt(picture, severity=severity, corruption_name=name)
    return time.perf_counter() - start


def importable():
    """The package ready to run, or None."""
    warnings.filterwarnings("ignore")
    try:
        return reference()
    except ImportError:
        return None


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument(
        "--table", choices=["cifar", "imagenet"], help="severities; by default those of the size"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads for torch")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--reference-images", type=int, default=16, help="0: ours alone")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args()


def main():
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    package = importable() if options.reference_images else None
    if package is not None:
        import cv2

        cv2.setNumThreads(1)
    table = "imagenet" if package is not None else options.table
    batch = images(options.images, options.size).to(options.device)
    few = batch[: options.reference_images].cpu().numpy().transpose(0, 2, 3, 1)
    few = [np.ascontiguousarray(picture) for picture in few]
    rows, begun = [], time.perf_counter()
    for name in CORRUPTIONS + EXTRA:
        corrupt(batch[:2], name, 1, table=table)  # tables and textures are made once, outside the clock
        row = {"name": name, "seconds": 0.0, "reference_seconds": None, "ratio": None}
        slow = 0.0
        for severity in SEVERITIES:
            row["seconds"] += ours(batch, name, severity, table, options.repeats)
            if package is not None:
                slow += theirs(package, few, name, severity) * len(batch) / len(few)
        if package is not None:
            row["reference_seconds"], row["ratio"] = slow, slow / row["seconds"]
        rows.append(row)
        beside = f"  reference {slow:9.3f} s  ratio {row['ratio']:8.1f}" if package is not None else ""
        print(f"{name:18} {row['seconds']:9.3f} s{beside}", flush=True)
    total = sum(row["seconds"] for row in rows)
    result = {
        "images": len(batch),
        "size": options.size,
        "table": table or ("cifar" if options.size <= 64 else "imagenet"),
        "device": torch.cuda.get_device_name() if batch.is_cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "seconds": total,
        "wall_seconds": time.perf_counter() - begun,
        "peak_bytes": torch.cuda.max_memory_allocated() if batch.is_cuda else None,
        "corruptions": rows,
    }
    if package is not None:
        slow = sum(row["reference_seconds"] for row in rows)
        result["reference_seconds"], result["ratio"] = slow, slow / total
        result["reference_images"] = len(few)
    print(
        f"{len(batch)} images of {options.size}, 19 corruptions, 5 severities: {total:.2f} s on {result['device']}"
    )
    if package is not None:
        print(f"imagecorruptions: {slow:.2f} s, ratio {slow / total:.1f}")
    if options.out:
        with open(options.out + ".part", "w") as file:
            json.dump(result, file, indent=2)
        os.replace(options.out + ".part", options.out)


if __name__ == "__main__":
    main()
