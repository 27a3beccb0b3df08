"""Training runs that can be disturbed: the command line in forked processes, and what is left in their folder."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimbayes.files import SUFFIX
from slimbayes.lab.config import RunConfig, read_config
from slimbayes.lab.runs import MODEL
from slimbayes.training.monitor import COLUMNS
from slimbayes.training.state import read_state
from slimbayes.verbs.checkpoint import CheckpointError, _read

LIMIT = 240.0  # seconds after which a run counts as hanging
IGNORED = ("examples_per_second",)  # of history: the only column that two equal runs differ in


@dataclass
class Child:
    """One command in one forked process, or in two of them under DDP; its output goes to files."""

    words: Sequence[str]
    log: Path
    ranks: int = 1
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def start(self) -> Child:
        """Fork: the imports, which take longer than the training, are done."""
        port = _free_port() if self.ranks > 1 else 0
        self.log.write_text("")
        for rank in range(self.ranks):
            place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": self.ranks, "MASTER_PORT": port}
            place |= {"MASTER_ADDR": "127.0.0.1"}
            environment = {k: str(v) for k, v in place.items()} if self.ranks > 1 else {}
            self.pids.append(self._fork(environment))
        return self

    def _fork(self, environment: dict[str, str]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()  # a signal to the harness is not one to the run
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update(environment)
            code = _run(self.words)
        except BaseException:
            traceback.print_exc()
        finally:
            for each in (sys.stdout, sys.stderr):
                each.flush()
            os._exit(code)

    @property
    def alive(self) -> bool:
        """Whether a process of it still runs."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def wait(self) -> list[int]:
        """The exit codes, by rank; a run that hangs is killed and has code -9."""
        end = time.monotonic() + LIMIT
        while self.alive and time.monotonic() < end:
            time.sleep(0.003)
        if self.alive:
            self.kill(signal.SIGKILL)
            while self.alive:
                time.sleep(0.003)
        return [self.codes[pid] for pid in self.pids]

    def kill(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one process of it, or to all."""
        for pid in self.pids if rank is None else [self.pids[rank]]:
            if pid not in self.codes:
                os.kill(pid, number)

    def children(self) -> list[int]:
        """The processes that the first one has started: its readers."""
        try:
            text = Path(f"/proc/{self.pids[0]}/task/{self.pids[0]}/children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]

    @property
    def output(self) -> str:
        """What it printed."""
        return " ".join(self.log.read_text(errors="replace").split())


def _run(words: Sequence[str]) -> int:
    """The command line, as ``slimbayes`` itself runs it; its exit code."""
    from slimbayes.lab.cli import main

    sys.argv = ["slimbayes", *words]
    try:
        main()
    except SystemExit as end:
        if "RELIABILITY_MODULES" in os.environ:
            Path(os.environ["RELIABILITY_MODULES"]).write_text("\n".join(sorted(sys.modules)))
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def preload(words: Sequence[str], log: Path) -> None:
    """Import here what a run imports, so that a forked one begins with it: a first run tells what that is."""
    import slimbayes.lab.cli.app  # noqa: F401

    names = log.with_name("modules.txt")
    os.environ["RELIABILITY_MODULES"] = str(names)
    codes = Child(words, log).start().wait()
    del os.environ["RELIABILITY_MODULES"]
    if any(codes):
        raise RuntimeError(f"the first run failed with {codes}: {log.read_text()}")
    for name in names.read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def audit(folder: Path, spared: Sequence[Path] = ()) -> tuple[list[str], list[Path]]:
    """Files that are half-written, with why, and ``.partial`` ones; ``spared`` are those that the harness damaged.

    Everything is read as slimbayes reads it, with its checksum. TensorBoard's own log is left to TensorBoard.
    """
    bad: list[str] = []
    partial: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path in spared or path.name.startswith("events.out"):
            continue
        if path.name.endswith(SUFFIX):
            partial.append(path)
            continue
        try:
            _parse(path)
        except Exception as error:
            bad.append(f"{path.name}: {error!r}")
    return bad, partial


def _parse(path: Path) -> None:
    if path.name == MODEL:
        _read(path)
    elif path.suffix == ".safetensors":
        read_state(path)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".yaml":
        read_config(RunConfig, path)
    elif path.suffix == ".csv":
        history(path.parent)
    else:
        raise CheckpointError("a file of a kind that no run writes")


def history(folder: Path) -> list[dict[str, str]]:
    """The rows of a run, without how fast they were; a row that is not whole is an error."""
    text = (folder / "history.csv").read_text()
    if not text.endswith("\n"):
        raise ValueError("the last row has no end")
    rows = list(csv.reader(text.splitlines()))
    if tuple(rows[0]) != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise ValueError("a row without all its columns")
    for row in rows[1:]:
        for cell in row:
            float(cell or 0)
    kept = [dict(zip(COLUMNS, row, strict=True)) for row in rows[1:]]
    return [{name: cell for name, cell in row.items() if name not in IGNORED} for row in kept]


def state_step(folder: Path) -> int:
    """The step of the newest whole state; 0 where there is none."""
    for name in ("training.safetensors", "training.previous.safetensors"):
        try:
            return int(read_state(folder / name)[1]["step"])
        except CheckpointError:
            continue
    return 0


def equal(folder: Path, whole: Path) -> str:
    """What differs from the undisturbed run, of weights (bit for bit) and metrics (digit for digit); empty: nothing."""
    if (folder / MODEL).read_bytes() != (whole / MODEL).read_bytes():
        return "weights differ"
    if history(folder) != history(whole):
        return "metrics differ"
    mine, theirs = (json.loads((each / "run.json").read_text()) for each in (folder, whole))
    names = ("best", "steps", "precision", "facts", "config")
    return ", ".join(f"{name} differ" for name in names if mine[name] != theirs[name])
