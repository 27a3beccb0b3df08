"""Where a result comes from: command, commit, versions, hardware."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
FORMAT = "slimbayes-manifest"
PACKAGES = ("slimbayes", "torch", "numpy", "safetensors", "lightning", "torchmetrics", "scikit-learn")


def now() -> str:
    """The time, UTC, to the second, as ISO 8601 writes it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> dict[str, str]:
    """Python's and the installed packages' versions.

    >>> "torch" in versions()
    True
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with the build, which the metadata may leave out


def hardware() -> str:
    """The processor, its cores and threads in use, and the GPUs."""
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use"
    parts = [f"{platform.system()} {platform.machine()}, {cores}"]
    if torch.cuda.is_available():
        parts += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "; ".join(parts)


def commit() -> str | None:
    """The commit of the checkout that slimbayes runs from, with "+" if its sources were changed; None if installed.

    Where the sources are a copy without their history, the environment variable SLIMBAYES_COMMIT names the commit.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return os.environ.get("SLIMBAYES_COMMIT", "").strip() or None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def command() -> str:
    """The command line, with the program's name instead of its path.

    >>> isinstance(command(), str)
    True
    """
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    program = path.parent.name if path.name == "__main__.py" else path.name  # python -m slimbayes
    return shlex.join([program, *sys.argv[1:]])


def provenance(**more: Any) -> dict[str, Any]:
    """Everything above, and what the caller adds."""
    return {
        "created": now(), "command": command(), "commit": commit(), "versions": versions(), "hardware": hardware(),
        **more,
    }  # fmt: skip


def manifest(
    kind: str, config: dict[str, Any], data: dict[str, Any], seed: Any, **more: Any
) -> dict[str, Any]:
    """What it takes to make a result again: ``provenance``, the configuration, the data's fingerprint, the seed.

    >>> made = manifest("fit", {"lr": 0.1}, {"fingerprint": "0123456789abcdef"}, seed=0)
    >>> sorted({"versions", "config", "data", "seed", "commit", "command", "hardware"} - made.keys())
    []
    """
    head = {"format": FORMAT, "version": 1, "kind": kind}
    return {**head, **provenance(), "seed": seed, "config": config, "data": data, **more}


def beside(path: Path) -> Path:
    """Where the manifest of a single file goes.

    >>> beside(Path("out/predictions.csv")).name
    'predictions.manifest.json'
    """
    return path.with_name(f"{path.stem}.{MANIFEST}")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """A manifest; None where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None
