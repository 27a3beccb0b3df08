"""What a run says while it runs: history in memory, a CSV file, TensorBoard, and one line on the screen."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from slimbayes.analysis.factors import COLLAPSED, component_spread
from slimbayes.files import FULL, no_room, write_whole

COLUMNS = (
    "step", "epoch", "loss", "nll", "kl", "lr", "kl_weight", "examples_per_second",
    "validation_nll", "validation_accuracy", "validation_ece", "validation_rmse", "component_spread",
    "skipped",
)  # fmt: skip
Row = dict[str, float]


class History:
    """Rows of numbers by step, mirrored in a CSV file that is whole after every row."""

    def __init__(self, path: Path | None = None, rows: list[Row] | None = None) -> None:
        self.path = path
        self.rows: list[Row] = list(rows or [])
        if path is not None:
            write_whole(path, self._text())

    def add(self, row: Row) -> None:
        """Append a row, in memory and to the file."""
        self.rows.append(row)
        if self.path is not None:
            line, before = _line(row), self.path.stat().st_size
            try:
                with open(self.path, "a", newline="") as file:
                    file.write(line)
            except OSError as error:
                os.truncate(self.path, before)  # a disk that is full may take a part of the row
                raise no_room(error, self.path, len(line)) if error.errno in FULL else error from None

    def _text(self) -> str:
        return ",".join(COLUMNS) + "\n" + "".join(_line(row) for row in self.rows)


def _line(row: Row) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_cell(row.get(name)) for name in COLUMNS])
    return text.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.9g}"


def spread_of(model: nn.Module) -> Row:
    """The mean over layers and factors of ``analysis.component_spread``, where there are components.

    >>> import slimbayes as sb
    >>> spread_of(sb.bayesianize(nn.Linear(2, 3), sb.BatchEnsemble(random_sign_init=0.0)))
    {'component_spread': 0.0}
    """
    spreads = _spreads(model)
    return {"component_spread": sum(spreads) / len(spreads)} if spreads else {}


def _spreads(model: nn.Module) -> list[float]:
    return [value for layer in component_spread(model).values() for value in layer.values()]


def warn_of_collapse(rows: list[Row], start: Row, model: nn.Module) -> None:
    """Warn where the last row is the first in which components are no longer apart, though they once were.

    ``start``: the spread before the first step of this call. Where ``model`` has them apart in any of its factors, they
    are not one, however small the mean is.
    """
    spreads = [row["component_spread"] for row in (start, *rows) if "component_spread" in row]
    if len(spreads) < 2 or not spreads[-1] < COLLAPSED <= min(spreads[:-1]):
        return
    if max(_spreads(model)) >= COLLAPSED:
        return
    warnings.warn(
        f"the components of the rank-1 factors have become one: by step {rows[-1]['step']:.0f} their spread has "
        f"fallen from {spreads[0]:.2g} to {spreads[-1]:.2g}, and the mixture is hardly better than a member. Let the "
        f"KL begin, or reach its full weight, only when the learning rate has fallen (kl_start=0.4, kl_annealing=0.8 "
        f"with schedule='steps'), average it over components (kl_reduction='mean'), or widen the prior, say to "
        f"prior=Normal(1, 0.5). For optimizer='sgd' slimbayes.training.predicted_spread says what each will do",
        stacklevel=7,  # who called fit
    )


def tensorboard(folder: Path | None) -> Any:
    """Fabric's TensorBoard logger for the folder, or None where tensorboard is not installed."""
    if folder is None:
        return None
    from lightning.fabric.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(root_dir=folder, name="tensorboard", version="")
    except ModuleNotFoundError:
        return None


class Progress:
    """One line with loss, NLL, KL per datum, throughput and time left: live in a terminal, else now and then."""

    def __init__(self, steps: int, done: int, label: str, quiet_seconds: float = 10.0) -> None:
        self.steps, self.first, self.label = steps, done, label
        self.start = self.printed = time.monotonic()
        self.quiet_seconds = quiet_seconds
        self.bar: Any = None
        self.task: Any = None

    def show(self, done: int, text: str, examples_per_second: float) -> None:
        """Say how far the run is."""
        now = time.monotonic()
        rate = (done - self.first) / max(now - self.start, 1e-9)
        left = _clock((self.steps - done) / rate) if rate > 0 else "?"
        line = f"{text}  {_thousands(examples_per_second)} examples/s  {left} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=line)
        elif now - self.printed >= self.quiet_seconds:
            self.printed = now
            print(f"{self.label}  step {done}/{self.steps}  {line}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def live(self) -> Iterator[Progress]:
        """Draw the bar, if there is a terminal and rich to draw it with."""
        if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                   TextColumn("{task.fields[text]}"))  # fmt: skip
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            self.bar = bar
            self.task = bar.add_task(self.label, total=self.steps, completed=self.first, text="")
            yield self


def _clock(seconds: float) -> str:
    whole = int(seconds + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 10_000 else f"{rate:.0f}"
