"""The suite, cell by cell: a cell is a pair, a contender and a seed; what the file has already is kept."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slimbayes.files import read_json, write_whole
from slimbayes.lab.processes import workers
from slimbayes.lab.suite.contenders import OURS, PLAIN, RIVALS, contender, lacking, suits
from slimbayes.lab.suite.data import Task
from slimbayes.lab.suite.estimators import ON_TABLES
from slimbayes.lab.suite.pairs import PAIRS
from slimbayes.lab.suite.scores import measure

FORMAT = 1
EVERYTHING = (PLAIN, *OURS, *RIVALS, *ON_TABLES)
REDUCED = ("mnist-cnn", "breast-mlp", "power-mlp", "digits-mlp", "headlines-transformer")
Row = dict[str, Any]
Say = Callable[[str], None]


class Cell(NamedTuple):
    """One network to train and measure."""

    pair: str
    contender: str
    seed: int


def cells(pairs: Sequence[str], contenders: Sequence[str], seeds: int) -> list[Cell]:
    """Every cell, seed by seed, so that a run that is stopped has something of everything.

    >>> len(cells(["mnist-cnn"], ["plain", "KTied"], seeds=3))
    6
    """
    for name in pairs:
        if name not in PAIRS:
            raise ValueError(f"no pair {name!r}; choose from {', '.join(PAIRS)}")
    for name in contenders:
        contender(name)  # says what is wrong with it
    return [
        Cell(pair, one, seed)
        for seed in range(seeds)
        for pair in pairs
        for one in contenders
        if suits(one, PAIRS[pair])
    ]


def run_suite(
    wanted: Sequence[Cell],
    output: Path,
    root: str | None = None,
    jobs: int = 1,
    budget: float | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
) -> list[Row]:
    """Measure the cells that ``output`` lacks, write each as it is done, and return all its rows.

    A row whose contender has other settings now than when it was measured is measured again. With a ``budget`` of
    seconds no cell is begun after it; the next call goes on. A cell that fails is said, and an error when all others
    are measured.
    """
    end = None if budget is None else time.monotonic() + budget
    rows = {Cell(row["pair"], row["contender"], row["seed"]): row for row in read_rows(output)}
    current = {cell: rows[cell] for cell in wanted if cell in rows and rows[cell]["is"] == described(cell)}
    missing = [cell for cell in wanted if cell not in current]
    say(f"{len(wanted) - len(missing)} of {len(wanted)} cells are there")
    lacks = {cell: lacking(cell.contender, PAIRS[cell.pair]) for cell in missing}
    for package in sorted(filter(None, set(lacks.values()))):
        out = [cell for cell in missing if lacks[cell] == package]
        say(f"{len(out)} cells are left out: they need pip install {package}, in an environment of its own")
    missing = [cell for cell in missing if lacks[cell] is None]
    failed: list[str] = []
    for count, (cell, row) in enumerate(_measured(missing, (root, device), jobs, end), 1):
        if isinstance(row, str):
            failed.append(f"{cell.pair}, {cell.contender}, seed {cell.seed}: {row}")
            say(f"[{count}/{len(missing)}] failed: {failed[-1]}")
            continue
        rows[cell] = row
        write_whole(output, _text([rows[key] for key in sorted(rows)]))
        shown = f"NLL {row['clean']['nll']:.4f}, shifted {row['shifted']['nll']:.4f}"
        say(
            f"[{count}/{len(missing)}] {cell.pair}, {cell.contender}, seed {cell.seed}: {shown}, {row['seconds']:.0f} s"
        )
    if failed:
        raise ValueError(f"{len(failed)} cells could not be measured: {'; '.join(failed)}")
    return [rows[cell] for cell in sorted(rows)]


def _text(rows: Sequence[Row]) -> str:
    """JSON with a line for each row, so that a change of one is a change of a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"format": {FORMAT}, "rows": [\n{lines}\n]}}\n'


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of the suite; none where there is no file."""
    if not path.exists():
        return []
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no file of the suite of format {FORMAT}: give another --output, or remove it"
        )
    return list(document["rows"])


def described(cell: Cell) -> str:
    """What a row was measured of: a change of it makes the row an old one."""
    pair = PAIRS[cell.pair]
    loop = f"{pair.optimizer} {pair.lr:g}, batches of {pair.batch}, {pair.epochs} epochs"
    return f"{contender(cell.contender)[1]}; {loop}"


def _measured(
    missing: list[Cell], where: tuple[str | None, str], jobs: int, end: float | None
) -> Iterator[tuple[Cell, Row | str]]:
    if jobs == 1:
        for cell in missing:
            if end is None or time.monotonic() < end:
                yield cell, _attempt(cell, *where)
        return
    with workers(min(jobs, len(missing)) or 1, _prepare, ()) as pool:
        waiting: dict[concurrent.futures.Future[Row | str], Cell] = {}
        rest = iter(missing)
        while True:
            while len(waiting) < jobs and (end is None or time.monotonic() < end):
                following = next(rest, None)
                if following is None:
                    break
                waiting[pool.submit(_attempt, following, *where)] = following
            if not waiting:
                return
            done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), future.result()


def _attempt(cell: Cell, root: str | None, device: str) -> Row | str:
    """The cell's row, or why there is none."""
    try:
        return measure_cell(cell, root, device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(1)


@lru_cache
def _task(pair: str, root: str | None, device: str) -> Task:
    return PAIRS[pair].data(root).to(device)


def measure_cell(cell: Cell, root: str | None, device: str = "cpu") -> Row:
    """Train one network and measure it; estimators train where they please, from rows on the CPU."""
    pair, task = PAIRS[cell.pair], _task(cell.pair, root, "cpu" if cell.contender in ON_TABLES else device)
    start = time.perf_counter()
    answer = contender(cell.contender)[0](pair, task, cell.seed)
    seconds = round(time.perf_counter() - start, 2)
    figures = {
        where: {name: round(value, 5) for name, value in part.items()}
        for where, part in measure(answer, task).items()
    }
    return {**cell._asdict(), "is": described(cell), "seconds": seconds, **figures}
