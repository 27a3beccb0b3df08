"""Options that several commands share, and how they change a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from slimbayes.extras import need
from slimbayes.lab.cli.errors import screen
from slimbayes.lab.config import CompareConfig, ConfigError, RunConfig, read_yaml, write_config

DataRoot = Annotated[
    str | None,
    typer.Option("--data-root", metavar="FOLDER", help="Where real data lie; default: $SLIMBAYES_DATA."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="NAME",
        help="A data set by name (see slimbayes info), or a .csv, .parquet or .npz file.",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data-option",
        metavar="KEY=VALUE",
        help="An option of the data set, as target=price for a table; repeat for more.",
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NAME",
        help='"wrn(depth=16, width=4)", "dense(hidden=[64])", auto, or package.module:function.',
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        "--epochs",
        min=1,
        help="Passes over the training data; default: 30, and in train at least 1,000 steps.",
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Stop after so many steps.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Examples per step, over all devices.")
]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Draws = Annotated[int | None, typer.Option("--draws", min=1, help="Components × samples in evaluation.")]
Device = Annotated[str | None, typer.Option("--accelerator", help="auto, cpu, cuda or mps.")]
Precision = Annotated[
    str | None, typer.Option("--precision", help="32-true, bf16-mixed, bf16-true or 64-true.")
]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other training setting, as schedule=steps or l2=1e-4; repeat for more.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A YAML configuration; options given here come on top."),
]
SaveConfig = Annotated[
    Path | None,
    typer.Option("--save-config", metavar="FILE", help="Write the resulting configuration and go on."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the configuration and stop.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress line.")]
OnDevice = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1 or mps; default: a GPU if there is one.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of torch.")]


def given(**values: Any) -> dict[str, Any]:
    """The options that were given.

    >>> given(epochs=3, lr=None)
    {'epochs': 3}
    """
    return {name: value for name, value in values.items() if value is not None}


def pairs(entries: list[str] | None, option: str) -> dict[str, Any]:
    """KEY=VALUE words as a mapping, values read as YAML reads them.

    >>> pairs(["l2=1e-4", "milestones=[0.5, 0.9]", "name=a"], "--set")
    {'l2': 0.0001, 'milestones': [0.5, 0.9], 'name': 'a'}
    """
    found: dict[str, Any] = {}
    for entry in entries or ():
        key, separator, text = entry.partition("=")
        if not separator or not key:
            raise ConfigError(f"{option} {entry!r}: write KEY=VALUE")
        try:
            value = read_yaml(text, option)
        except ConfigError as error:
            raise ConfigError(f"{option} {entry!r}: the value cannot be read") from error
        found[key.strip()] = value
    return found


def data_options(
    entries: list[str] | None, data: str | None, base: RunConfig | CompareConfig
) -> dict[str, Any] | None:
    """Options of the data set on top of the configuration's, which do not apply to other data."""
    new = pairs(entries, "--data-option")
    if data is not None and data != base.data:
        return new
    return {**base.data_options, **new} if new else None


def examples(*lines: str) -> str:
    """Examples at the end of a command's help, a line each."""
    return "Examples:" + "".join(f"\n\n  {line}" for line in lines)


def words(text: str | None) -> tuple[str, ...] | None:
    """Words between commas.

    >>> words("a, b")
    ('a', 'b')
    """
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def settle(config: RunConfig | CompareConfig, save: Path | None, dry_run: bool) -> bool:
    """Save or show a configuration; whether that was all."""
    if save is not None:
        write_config(config, save)
    if dry_run:
        yaml = need("yaml", "--dry-run", "cli")
        # No line may be wrapped: what is shown can be saved and replayed.
        text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
        screen.print(text, markup=False, end="", soft_wrap=True)
    return dry_run


def set_threads(threads: int | None) -> None:
    """As many CPU threads as asked for."""
    if threads is not None:
        torch.set_num_threads(threads)


def note(text: str) -> None:
    """A line on the screen, as it is."""
    screen.print(text, markup=False, soft_wrap=True)
