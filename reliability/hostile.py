"""Hostile files in the place of every file that slimbayes reads: ``python -m reliability.hostile``.

Each case is a process of its own, with a limit of time and of memory. It must read the file, or refuse it with a
documented error that names it. Nothing in it may run, end the process, hang, or take memory beyond measure.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import importlib
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from reliability import attacks
from reliability.figures import RESULTS, Figure, write_figures
from reliability.readers import DOCUMENTED, READERS, Reader

SECONDS = 30.0  # of the processor for one case; the readers themselves take a few at most
WAIT = 120.0  # s by the clock
MEMORY = 2 << 30  # bytes that a case may take beyond what the process had
NOBODY = 65534
KINDS = ("executed", "crashed", "hung", "blew up", "unclear", "unnamed")
_LAZY = (
    "PIL.Image",
    "pyarrow.parquet",
    "yaml",
    "onnx",
    "onnxruntime",
    "sklearn.utils",
    "huggingface_hub",
    "rich",
)


def attempt(read: Callable[[Path], object], folder: Path, named: str) -> dict[str, Any]:
    """Read once, in this process: what came out. ``named`` is what an error must contain."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(folder)
        return {"outcome": "read"}
    except DOCUMENTED as error:
        text = str(error)
        good = named in text and len(text) < 5000
        return {"outcome": "refused" if good else "unnamed", "error": f"{type(error).__name__}: {text[:300]}"}
    except BaseException as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return {
            "outcome": "unclear",
            "error": f"{type(error).__name__}: {str(error)[:300]} at {' '.join(frames[-5:])}",
        }


def _child(read: Callable[[Path], object], folder: Path, named: str, unprivileged: bool, answer: int) -> None:
    """What the new process does; it does not return."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MEMORY, used + 2 * MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = _resident()
    if unprivileged and os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    found = attempt(read, folder, named)
    found["bytes"] = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
    os.write(answer, json.dumps(found).encode())
    os._exit(0)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def isolated(
    read: Callable[[Path], object], folder: Path, named: str, canary: Path, unprivileged: bool = False
) -> dict[str, Any]:
    """``attempt`` in a process of its own."""
    start = time.monotonic()
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ours)
        with contextlib.suppress(BaseException):
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            _child(read, folder, named, unprivileged, theirs)
        os._exit(99)
    os.close(theirs)
    status, busy = None, 0.0
    while status is None and time.monotonic() - start < WAIT:
        ended, code, used = os.wait4(process, os.WNOHANG)
        if ended:
            status, busy = code, used.ru_utime + used.ru_stime
        time.sleep(0.002)
    if status is None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        found: dict[str, Any] = {"outcome": "hung"}
    else:
        with os.fdopen(ours, "rb", closefd=False) as pipe:
            said = pipe.read()
        found = json.loads(said) if said else {"outcome": "crashed", "error": f"status {status}"}
    os.close(ours)
    if busy > SECONDS:
        found["outcome"] = "hung"
    if found.get("bytes", 0) > MEMORY:
        found["outcome"] = "blew up"
    if canary.exists():
        canary.unlink()
        found["outcome"] = "executed"
    return {**found, "seconds": round(busy or time.monotonic() - start, 2)}


def place(payload: attacks.Payload, path: Path) -> None:
    """Put a payload where the valid file was."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if isinstance(payload, bytes):
        path.write_bytes(payload)
    else:
        payload(path)


def cases(
    reader: Reader, canary: Path, everywhere: dict[str, attacks.Payload]
) -> Iterator[tuple[str, attacks.Payload]]:
    """The payloads of one reader: those of all, and its own."""
    yield from everywhere.items()
    yield from reader.own(canary).items()


def try_reader(
    name: str, canary: Path, everywhere: dict[str, attacks.Payload], only: int | None = None
) -> list[dict[str, Any]]:
    """Every case of a reader, after the valid file, which must be read."""
    reader, found = READERS[name], []
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o755)
        valid, trial = Path(temporary) / "valid", Path(temporary) / "trial"
        valid.mkdir()
        made = isolated(lambda _: reader.make(valid), valid, "", canary)
        shutil.copytree(valid, trial, symlinks=True)
        first = isolated(reader.read, trial, "", canary)
        if made["outcome"] != "read" or first["outcome"] != "read":
            raise RuntimeError(f"{name}: the valid file is not read: {made} {first}")
        # The file, or the folder that it lies in: several readers take a folder.
        for number, (title, payload) in enumerate(cases(reader, canary, everywhere)):
            if only is not None and number >= only:
                break
            shutil.rmtree(trial)
            shutil.copytree(valid, trial, symlinks=True)
            place(payload, trial / reader.place)
            outcome = isolated(reader.read, trial, trial.name, canary, title == "not to be read")
            found.append({"reader": name, "case": title, **outcome})
    return found


def record(found: list[dict[str, Any]], seconds: float, folder: Path = RESULTS) -> Path:
    """The figures of all cases."""
    counts = Counter(case["outcome"] for case in found)
    wrong = [case for case in found if case["outcome"] not in ("read", "refused")]
    names = {
        "executed": "hostile files that ran code", "crashed": "that ended the process",
        "hung": "that took more than 30 s", "blew up": "that took more than 2 GB",
        "unclear": "with an undocumented error", "unnamed": "with an error that does not name the file",
    }  # fmt: skip
    figures = [
        Figure(
            "hostile files tried", f"{len(found)} on {len({c['reader'] for c in found})} readers", "", None
        )
    ]
    figures += [Figure(names[kind], str(counts[kind]), "0", counts[kind] == 0) for kind in KINDS]
    most, slowest = max(c.get("bytes", 0) for c in found), max(c["seconds"] for c in found)
    notes = [
        f"{counts['refused']} were refused with an error that names the file; {counts['read']} did no harm: they are "
        f"read as what they are.",
        f"The slowest case took {slowest:.1f} s of the processor, the largest {most / 2**20:.0f} MB of memory beyond "
        f"what the process had.",
    ]
    by_reader = {name: dict(Counter(c["outcome"] for c in found if c["reader"] == name)) for name in READERS}
    read = sorted(f"{case['reader']}: {case['case']}" for case in found if case["outcome"] == "read")
    return write_figures(
        "hostile", "python -m reliability.hostile", figures, seconds, notes, folder,
        readers=by_reader, read=read, wrong=wrong,
    )  # fmt: skip


def prepare() -> None:
    """Import what readers import when they are used: a process without rights could not, and forks share it."""
    torch.set_num_threads(1)
    for name in _LAZY:
        importlib.import_module(name)


def main() -> int:
    """Try all readers, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=list(READERS), metavar="READER", help="and record nothing"
    )
    given = parser.parse_args()
    prepare()
    start, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        canary = Path(folder) / "canary"
        everywhere = attacks.everywhere(canary)
        for name in given.only or READERS:
            new = try_reader(name, canary, everywhere)
            wrong = [case for case in new if case["outcome"] not in ("read", "refused")]
            print(f"{name}: {dict(Counter(case['outcome'] for case in new))}", flush=True)
            for case in wrong:
                print("   ", json.dumps(case), flush=True)
            found += new
    if not given.only:
        record(found, time.monotonic() - start)
    return int(any(case["outcome"] not in ("read", "refused") for case in found))


if __name__ == "__main__":
    sys.exit(main())
