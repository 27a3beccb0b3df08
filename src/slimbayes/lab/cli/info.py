"""What is installed and found: versions, devices, extras, data."""

from __future__ import annotations

import importlib.util

import torch
from rich.console import Console
from rich.table import Table

from slimbayes.accelerate import cpu
from slimbayes.lab.data import find_root, found
from slimbayes.verbs.provenance import commit, hardware, versions

EXTRAS = {
    "metrics": ("torchmetrics",),
    "train": ("lightning", "rich", "torchmetrics"),
    "lightning": ("lightning", "torchmetrics"),
    "sklearn": ("sklearn",),
    "data": ("PIL", "pyarrow", "sklearn"),
    "plots": ("matplotlib",),
    "cli": ("typer", "yaml"),
    "tensorboard": ("tensorboard",),
    "transformers": ("transformers", "accelerate"),
    "peft": ("peft", "transformers"),
    "hub": ("huggingface_hub",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "int8": ("torchao",),
}


def show(screen: Console, data_root: str | None) -> None:
    """Print it all."""
    screen.print(f"commit {commit() or 'none: an installed package'}")
    screen.print("  ".join(f"{name} {version}" for name, version in versions().items()))
    screen.print(hardware())
    screen.print(cpu.state())
    if not torch.cuda.is_available() and torch.backends.mps.is_available():
        screen.print("Apple GPU (mps)")
    table = Table(title="Extras", title_justify="left")
    table.add_column("extra")
    table.add_column("state")
    for extra, modules in EXTRAS.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        table.add_row(
            extra,
            f"missing {', '.join(absent)}: pip install 'slimbayes\\[{extra}]'" if absent else "installed",
        )
    screen.print(table)
    root = find_root(data_root)
    where = f"under {root}" if root else "no data root: --data-root or SLIMBAYES_DATA"
    table = Table(title=f"Data ({where})", title_justify="left")
    table.add_column("name")
    table.add_column("state")
    for entry in found(data_root):
        table.add_row(entry.name, entry.where or f"not found; see {entry.home}")
    screen.print(table)
