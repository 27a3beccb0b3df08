"""The kinds of disturbance: what each does to a run, and what the run is to say."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from reliability.runs import Child, state_step

STATE, PREVIOUS = "training.safetensors", "training.previous.safetensors"
TMPFS = 2 << 20  # bytes: room for a few states
POLL = 0.002


@dataclass
class Place:
    """A run of one kind: its command, where it writes and reads, and an undisturbed run to compare with."""

    words: tuple[str, ...]
    folder: Path
    data: Path | None  # this run's own copy of the shards
    whole: Path
    seconds: float  # that the undisturbed run took
    random: random.Random
    log: Path
    ranks: int = 1
    spared: list[Path] = field(default_factory=list)  # files that the harness damaged itself
    mounted: bool = False  # the folder is a file system of its own

    def start(self, resume: bool = True) -> Child:
        """The command; with ``--resume`` from the first time on, as a scheduler's script has it."""
        more = ("--resume",) if resume else ()
        return Child((*self.words, "--out", str(self.folder), *more), self.log, self.ranks).start()

    def moment(self, child: Child, states: int = 0) -> bool:
        """Wait for a random moment of the run, when it has written so many states; False if the run was faster."""
        while states and child.alive and not (self.folder / (STATE, PREVIOUS)[states - 1]).exists():
            time.sleep(POLL)
        end = time.monotonic() + self.random.uniform(0.0, self.seconds * (0.5 if states else 0.9))
        while child.alive and time.monotonic() < end:
            time.sleep(POLL)
        return child.alive


@dataclass
class Outcome:
    """What a disturbance did: None where it came too late to be one."""

    detail: str
    expected: tuple[str, ...] = ()  # what the disturbed run must have said
    remedy: Callable[[], None] = lambda: None  # what its words, or those of the next one, tell the user to do
    refused: tuple[str, ...] = ()  # what the next run must say before the remedy; empty: it goes on by itself
    warned: tuple[str, ...] = ()  # what the next run says while it goes on


def killed(place: Place) -> Outcome | None:
    """SIGKILL at any moment, the start included."""
    child = place.start()
    if not place.moment(child, states=place.random.choice((0, 1, 1))):
        child.wait()
        return None
    child.kill(signal.SIGKILL)
    child.wait()
    return Outcome(f"SIGKILL, state of step {state_step(place.folder)}")


def terminated(place: Place) -> Outcome | None:
    """SIGTERM to all processes of a run, or to one rank of two: the state is kept first and the exit code is 143.

    Before and after the steps there is nothing to keep, and the run ends at once.
    """
    child = place.start()
    if not place.moment(child, states=place.random.choice((0, 1, 1))):
        child.wait()
        return None
    if place.ranks > 1:
        child.kill(signal.SIGTERM, place.random.randrange(place.ranks))
    else:
        os.killpg(child.pids[0], signal.SIGTERM)  # the readers of a stream too, as a scheduler does
    codes = child.wait()
    step = state_step(place.folder)
    if -signal.SIGTERM in codes:
        return Outcome(f"SIGTERM outside the steps, state of step {step}")
    if not any(codes):
        return None  # it had all but finished
    if set(codes) != {143}:
        return Outcome(f"SIGTERM gave exit codes {codes}", ("exit code 143",))
    said = (f"stopped after step {step} of", str(place.folder), "resume=True", "--resume")
    return Outcome(f"SIGTERM, exit code 143, state of step {step}", said)


@contextlib.contextmanager
def small_disk(place: Place) -> Iterator[None]:
    """The run's folder as a file system of 2 MiB of its own; only root can mount one."""
    place.folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS}", "tmpfs", str(place.folder)]
    place.mounted = os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if place.mounted:
            subprocess.run(["umount", str(place.folder)], check=True, capture_output=True)


def disk_full(place: Place) -> Outcome | None:
    """Everything that is left of a small file system is taken by somebody else.

    Where none can be mounted, the size of files is limited instead (RLIMIT_FSIZE), from that moment on.
    """
    child = place.start()
    ballast = place.folder / "ballast"
    left = place.random.choice((0, 0, 4096, 8192, 16384))  # room for a part of a file
    if place.moment(child, states=1):
        if not place.mounted:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(child.pids[0], resource.RLIMIT_FSIZE, (left, left))
        else:
            with contextlib.suppress(OSError), open(ballast, "wb") as file:
                free = shutil.disk_usage(place.folder).free
                os.posix_fallocate(file.fileno(), 0, max(1, free - left))
    (code,) = child.wait()
    ballast.unlink(missing_ok=True)
    if code == 0:
        return None
    said = ("the disk is full" if place.mounted else "ulimit", str(place.folder), "make room", "--resume")
    how = "disk full" if place.mounted else "file size limited"
    return Outcome(f"{how}, exit code {code}, state of step {state_step(place.folder)}", said)


def _damage(place: Place, change: Callable[[bytes], bytes], word: str) -> Outcome | None:
    """Damage the newest state of a killed run; in one case of four the one before as well."""
    child = place.start()
    if not place.moment(child, states=2):
        child.wait()
        return None
    child.kill(signal.SIGKILL)
    child.wait()
    both = place.random.random() < 0.25
    for name in (STATE, PREVIOUS) if both else (STATE,):
        path = place.folder / name
        path.write_bytes(change(path.read_bytes()))
        place.spared.append(path)
    newest, before = (str(place.folder / name) for name in (STATE, PREVIOUS))
    if not both:
        step = state_step(place.folder)
        return Outcome(
            f"newest state {word}",
            warned=(newest, before, f"goes on from the state before it, '{before}' (step {step})"),
        )

    def remedy() -> None:
        for path in place.spared:
            path.unlink()

    return Outcome(
        f"both states {word}",
        remedy=remedy,
        refused=(newest, before, "delete it to train from the start", "delete both"),
    )


def truncated(place: Place) -> Outcome | None:
    """A state is cut off anywhere."""
    return _damage(place, lambda raw: raw[: place.random.randrange(len(raw))], "truncated")


def flipped(place: Place) -> Outcome | None:
    """One bit of a state is another, anywhere."""

    def change(raw: bytes) -> bytes:
        found = bytearray(raw)
        found[place.random.randrange(len(found))] ^= 1 << place.random.randrange(8)
        return bytes(found)

    return _damage(place, change, "with a flipped bit")


def shard(place: Place) -> Outcome | None:
    """A tar shard, or the images of a class, vanish or turn to garbage while they are read."""
    assert place.data is not None
    trees = sorted(path for path in (place.data / "train").glob("*") if path.is_dir())
    victims = sorted(place.data.glob("train-*.tar"))
    victim = place.random.choice(victims or trees)
    files = [victim] if victims else sorted(victim.iterdir())
    kept = {path: path.read_bytes() for path in files}
    child = place.start()
    if not place.moment(child, states=1):
        child.wait()
        return None
    vanish = place.random.random() < 0.5
    for path, raw in kept.items():
        if vanish:
            path.unlink()
        else:
            path.write_bytes(place.random.randbytes(len(raw)))
    (code,) = child.wait()

    def remedy() -> None:
        for path, raw in kept.items():
            path.write_bytes(raw)

    if code == 0:
        remedy()
        return None
    said = (str(victim), "put the file back as it was", "--resume", "on_error=skip")
    what = f"{'shard' if victims else 'class folder'} {'vanished' if vanish else 'turned to garbage'}"
    # A tree does not read its images at the start: the next run finds garbage when it comes to it, or missing rows.
    refused = (str(victim),) if not vanish else ("num_data",)
    return Outcome(f"{what}, exit code {code}", said, remedy, refused)


def worker(place: Place) -> Outcome | None:
    """A process that reads images dies."""
    child = place.start()
    if not place.moment(child, states=1):
        child.wait()
        return None
    end = time.monotonic() + 5
    while child.alive and time.monotonic() < end:
        readers = child.children()
        if readers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.random.choice(readers), signal.SIGKILL)
            break
        time.sleep(POLL)
    (code,) = child.wait()
    if code == 0:
        return None  # it had nothing left to read
    said = ("a process that reads the data died", "workers=2", "--resume", str(place.folder))
    return Outcome(f"reader killed, exit code {code}, state of step {state_step(place.folder)}", said)


def rank(place: Place) -> Outcome | None:
    """One of two processes under DDP dies; the other one must end, and say why."""
    child = place.start()
    if not place.moment(child, states=place.random.choice((0, 1))):
        child.wait()
        return None
    chosen = place.random.randrange(2)
    begun = (place.folder / "history.csv").exists()
    child.kill(signal.SIGKILL, chosen)
    codes = child.wait()
    if -signal.SIGKILL in codes[:chosen] + codes[chosen + 1 :]:
        return Outcome(f"rank {chosen} killed, the other one hung", ("an end",))
    said = ("lost another one", "start them all again", "--resume") if begun and codes[1 - chosen] else ()
    return Outcome(f"rank {chosen} killed, state of step {state_step(place.folder)}, codes {codes}", said)


KINDS: dict[str, Callable[[Place], Outcome | None]] = {
    "SIGKILL": killed, "SIGTERM": terminated, "disk full": disk_full, "truncated state": truncated,
    "bit-flipped state": flipped, "lost or damaged shard": shard, "reader process dies": worker,
    "DDP rank dies": rank,
}  # fmt: skip
