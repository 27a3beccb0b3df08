"""Disturb real training runs at random moments; each must end as the undisturbed one does, or say what to do.

python -m reliability.faults                    # 200 disturbances
python -m reliability.faults --disturbances 8   # one of each kind
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from reliability.figures import RESULTS, Figure, write_figures
from reliability.kinds import KINDS, Outcome, Place, small_disk
from reliability.runs import audit, equal, preload, state_step

SHARES = {
    "SIGKILL": 40, "SIGTERM": 30, "disk full": 25, "truncated state": 25, "bit-flipped state": 25,
    "lost or damaged shard": 25, "reader process dies": 15, "DDP rank dies": 15,
}  # fmt: skip
TRIES = 8  # a disturbance that comes after the end is none: another moment is drawn
NETWORK = ("--network", "dense(hidden=[24])", "-m", "Rank1(components=2)", "--quiet", "--accelerator", "cpu")
OFTEN = ("--set", "checkpoint_every=2", "--set", "log_every=5")
TABLE = (
    "train", "--data", "digits", "--epochs", "4", "--batch-size", "64", "--validation", "0.1", "--early-stopping", "50",
    *NETWORK, *OFTEN,
)  # fmt: skip
PAIR = ("train", "--data", "wine", "--epochs", "12", "--batch-size", "16", "--devices", "2", *NETWORK, *OFTEN)
STREAM = (
    "train", "--epochs", "5", "--batch-size", "16", "--data-option", "stream=true", "--data-option", "size=8",
    "--set", "workers=2", *NETWORK, *OFTEN,
)  # fmt: skip


@dataclass
class Case:
    """What came of one disturbance."""

    number: int
    kind: str
    detail: str
    seconds: float = 0.0
    state: int = 0  # the step that was on disk after it
    resumed: int = -1  # the step that the next run went on from
    half: tuple[str, ...] = ()  # half-written files that were seen
    partial: int = 0  # .partial files that the disturbance left; the next start removes them
    told: bool = False  # the run could not go on by itself, and its words, followed, led on
    equal: bool = False
    wrong: str = ""  # what is not as it is to be

    @property
    def good(self) -> bool:
        """Nothing lost, nothing half-written, the same end."""
        return self.equal and not self.half and not self.wrong


class Harness:
    """Undisturbed runs, made once, and disturbed ones beside them."""

    def __init__(self, work: Path, seed: int, say: Callable[[str], None]) -> None:
        self.work, self.seed, self.say = work, seed, say
        self.references: dict[tuple[str, ...], tuple[Path, float]] = {}
        self.sources: dict[str, Path] = {}

    def run(self, number: int, kind: str) -> Case:
        """One disturbance, and what the same command does afterwards."""
        begun = time.monotonic()
        generator = random.Random(f"{self.seed} {number} {kind}")
        for attempt in range(TRIES):
            place = self._place(f"{number}-{attempt}", kind, generator)
            with small_disk(place) if kind == "disk full" else contextlib.nullcontext():
                outcome = KINDS[kind](place)
                case = (
                    None
                    if outcome is None
                    else self._after(Case(number, kind, outcome.detail), place, outcome)
                )
            shutil.rmtree(place.folder, ignore_errors=True)
            if case is not None:
                case.seconds = round(time.monotonic() - begun, 2)
                return case
        return Case(number, kind, f"{TRIES} runs ended before it", wrong="no disturbance")

    def _place(self, name: str, kind: str, generator: random.Random) -> Place:
        words, ranks, data = TABLE, 1, None
        form = {
            "DDP rank dies": "pair",
            "lost or damaged shard": "stream",
            "reader process dies": "stream",
        }.get(kind, "table")
        if kind == "SIGTERM":
            form = generator.choice(("table", "table", "stream", "pair"))
        if form == "pair":
            words, ranks = PAIR, 2
        elif form == "stream":
            layout = generator.choice(("shards", "tree"))
            source = self.sources.get(layout) or self.sources.setdefault(
                layout, write_images(self.work / layout)
            )
            data = self.work / "data" / layout  # one path for all, as the configuration names it
            shutil.rmtree(data, ignore_errors=True)
            shutil.copytree(source, data)
            words = (*STREAM, "--data", str(data))
        whole, seconds = self._reference(words, ranks)
        return Place(words, self.work / name, data, whole, seconds, generator, self.work / "log.txt", ranks)

    def _reference(self, words: tuple[str, ...], ranks: int) -> tuple[Path, float]:
        if words not in self.references:
            folder = self.work / f"whole-{len(self.references)}"
            begun = time.monotonic()
            child = Place(
                words, folder, None, folder, 0, random.Random(0), self.work / "log.txt", ranks
            ).start(False)  # fmt: skip
            codes = child.wait()
            if any(codes):
                raise RuntimeError(f"the undisturbed run failed with {codes}: {child.output}")
            self.references[words] = folder, time.monotonic() - begun
        return self.references[words]

    def _after(self, case: Case, place: Place, outcome: Outcome) -> Case:
        """Look at what is left, follow the words, go on, and compare the end."""
        wrong = missing_words(place.log.read_text(errors="replace"), outcome.expected)
        half, partial = audit(place.folder, place.spared)
        case.half, case.partial, case.state = tuple(half), len(partial), state_step(place.folder)
        if outcome.refused:
            child = place.start()
            if not any(child.wait()):
                wrong.append("the next run was to be refused")
            wrong += missing_words(child.output, outcome.refused)
            case.told = True
        outcome.remedy()
        place.spared.clear()
        child = place.start()
        codes = child.wait()
        if any(codes):
            case.wrong = f"the next run ended with {codes}: {child.output[-500:]}"
            return case
        wrong += missing_words(child.output, outcome.warned)
        half, partial = audit(place.folder)
        case.half += tuple(half)
        case.resumed = json.loads((place.folder / "manifest.json").read_text())["resumed"][-1]["step"]
        if case.resumed != (case.state if not (case.told and case.state == 0) else 0):
            wrong.append(f"went on from step {case.resumed}, and the state was of step {case.state}")
        wrong += [f"{path.name} is still there" for path in partial]
        difference = equal(place.folder, place.whole)
        case.equal, case.wrong = not difference, "; ".join([*wrong, *([difference] if difference else [])])
        return case


def missing_words(output: str, wanted: tuple[str, ...]) -> list[str]:
    """Which of the words a run did not say."""
    text = " ".join(output.split())
    return [f"did not say {word!r}: {text[-400:]}" for word in wanted if word not in text]


def write_images(folder: Path) -> Path:
    """Digits as PNG images: tar shards, or a folder for every class; 160 of four classes to train on."""
    import io
    import tarfile

    from PIL import Image

    import slimbayes as sb

    digits = sb.data.load("digits").train
    rows = [i for i in range(len(digits)) if int(digits.targets[i]) < 4][:192]
    for place, row in enumerate(rows):
        picture = Image.fromarray((digits.inputs[row, 0].float().numpy() * 15).clip(0, 255).astype("uint8"))
        file = io.BytesIO()
        picture.convert("RGB").save(file, "PNG")
        part, label = ("train" if place < 160 else "val"), int(digits.targets[row])
        if folder.name == "tree":
            path = folder / part / f"class{label}" / f"{place:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / f"{part}-{place % 4:06d}.tar", "a") as tar:
            for suffix, raw in (("png", file.getvalue()), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{place:03d}.{suffix}")
                entry.size = len(raw)
                tar.addfile(entry, io.BytesIO(raw))
    return folder


def plan(count: int, seed: int, only: str | None = None) -> list[str]:
    """The kinds of so many disturbances, in the shares of ``SHARES``, in an order of the seed."""
    if only is not None:
        return [only] * count
    if count <= len(SHARES):
        return list(SHARES)[:count]
    total = sum(SHARES.values())
    kinds = [kind for kind, share in SHARES.items() for _ in range(round(share * count / total))]
    kinds = (kinds + ["SIGKILL"] * count)[:count]
    random.Random(seed).shuffle(kinds)
    return kinds


def disturb(
    count: int, seed: int, work: Path, only: str | None = None, say: Callable[[str], None] = print
) -> list[Case]:
    """So many disturbances, one after the other."""
    import torch

    torch.set_num_threads(1)  # a process with threads of its own must not be forked
    preload((*TABLE, "--out", str(work / "first")), work / "log.txt")
    harness = Harness(work, seed, say)
    cases: list[Case] = []
    for number, kind in enumerate(plan(count, seed, only)):
        case = harness.run(number, kind)
        cases.append(case)
        say(
            f"{number + 1}/{count} {kind}: {case.detail}; {'good' if case.good else 'NOT GOOD: ' + repr(case)}"
        )
    return cases


def figures(cases: list[Case]) -> list[Figure]:
    """What is asked of them all."""
    count, good = len(cases), sum(case.good for case in cases)
    half = sum(len(case.half) for case in cases)
    same = sum(case.equal for case in cases)
    on = sum(case.resumed >= 0 for case in cases)
    told = sum(case.told for case in cases)
    return [
        Figure("training runs disturbed that ended with nothing lost", f"{good} of {count}", "all", good == count),
        Figure("gone on from the last whole state", f"{on} of {count}, {told} as the error told", "all", on == count),
        Figure("half-written files seen", str(half), "0", half == 0),
        Figure("final weights and metrics equal, bit for bit", f"{same} of {count}", "all", same == count),
    ]  # fmt: skip


def by_kind(cases: list[Case]) -> dict[str, dict[str, int]]:
    """The counts of every kind."""
    found: dict[str, dict[str, int]] = {}
    for kind in dict.fromkeys(case.kind for case in cases):
        mine = [case for case in cases if case.kind == kind]
        found[kind] = {
            "disturbances": len(mine), "resumed": sum(c.resumed >= 0 for c in mine),
            "told what to do": sum(c.told for c in mine), "half-written": sum(len(c.half) for c in mine),
            "partial files left, then removed": sum(c.partial for c in mine), "equal": sum(c.equal for c in mine),
            "good": sum(c.good for c in mine),
        }  # fmt: skip
    return found


def notes(cases: list[Case]) -> list[str]:
    """What a reader of the figures should know."""
    mounted = any("disk full," in case.detail for case in cases)
    full = (
        "a tmpfs of 2 MiB that is filled"
        if mounted
        else "a limit on the size of files (no tmpfs could be mounted)"
    )
    seconds = sorted(case.seconds for case in cases)[len(cases) // 2]
    return [
        f"Every disturbance is one of a real `slimbayes train`, in its own process; the full disk is {full}. "
        f"A disturbance and the run that goes on take {seconds:.1f} s together (median).",
        "TensorBoard's own log is not looked at: a killed process may leave its last record unfinished there.",
    ]


def main() -> int:
    """Measure, write the figures, and say whether they hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disturbances", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        cases = disturb(given.disturbances, given.seed, Path(work), given.only)
    found = figures(cases)
    command = f"python -m reliability.faults --disturbances {given.disturbances} --seed {given.seed}"
    write_figures(
        "faults", command, found, time.monotonic() - begun, notes=notes(cases), folder=given.out, kinds=by_kind(cases),
        cases=[asdict(case) for case in cases],
    )  # fmt: skip
    for figure in found:
        print(f"{figure.what}: {figure.value}")
    return 0 if all(figure.holds for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
