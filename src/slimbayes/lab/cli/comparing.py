"""``slimbayes compare``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from slimbayes.lab.cli import options as o
from slimbayes.lab.cli.errors import friendly, screen
from slimbayes.lab.config import CONTENDERS, CompareConfig, ConfigError, from_dict, read_config
from slimbayes.lab.data.embedded import EMBEDDED


@friendly
def compare(
    data: o.Data = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,...", help="Which of the ready-made methods to compare."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--method",
            metavar="METHOD",
            help='A method of your own, "Rank1(components=8)"; repeat for more.',
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="How many seeds: 0, 1, ...")] = None,
    network: o.Network = None,
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    batch_size: o.BatchSize = None,
    lr: o.Rate = None,
    draws: o.Draws = None,
    shifts: Annotated[
        str | None,
        typer.Option(
            "--shifts",
            metavar="A,B,...",
            help="Which shifts of the test data; default: all that fit; none: clean only.",
        ),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            "--validation",
            help="Hold out this fraction of the training data; the page's first line then chooses by it.",
        ),
    ] = None,
    max_test: Annotated[
        int | None, typer.Option("--max-test", min=1, help="At most so many test examples.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where results and page go.")] = Path(
        "slimbayes-compare"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what an interrupted comparison finished.")
    ] = False,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the HTML page.")] = True,
    data_root: o.DataRoot = None,
    data_option: o.DataOption = None,
    accelerator: o.Device = None,
    precision: o.Precision = None,
    compile: o.Compile = None,
    setting: o.Set = None,
    config: o.ConfigFile = None,
    save_config: o.SaveConfig = None,
    dry_run: o.DryRun = False,
    quiet: o.Quiet = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Processes that share the work; default: one per core for small data."
        ),
    ] = None,
    threads: o.Threads = None,
) -> None:
    """Train several methods, test them on clean and shifted data, and write one page.

    With no argument it runs on embedded digits in about a minute.
    """
    base = read_config(CompareConfig, config) if config is not None else CompareConfig()
    training = o.given(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        accelerator=accelerator,
        precision=precision,
        compile=compile,
    ) | o.pairs(setting, "--set")
    changes = o.given(
        data=data,
        network=network,
        draws=draws,
        max_test=max_test,
        validation=validation,
        seeds=tuple(range(seeds)) if seeds is not None else None,
        shifts=o.words(shifts) if shifts != "none" else (),
        data_options=o.data_options(data_option, data, base),
        contenders=_contenders(methods, method),
    )
    wanted = from_dict(CompareConfig, {**changes, "training": training}, base)
    if o.settle(wanted, save_config, dry_run):
        return
    o.set_threads(threads)
    start = time.monotonic()
    say = (lambda text: None) if quiet else o.note
    number = jobs or _default_jobs(wanted)
    say(
        f"{wanted.data}: {len(wanted.contenders)} methods, {len(wanted.seeds)} seeds, {number} at a time; "
        f"interrupted, it goes on with --resume"
    )
    from slimbayes.lab.compare import compare as run_comparison
    from slimbayes.lab.report import choose, print_summary, write_report, write_results

    results = run_comparison(wanted, out, data_root, resume, progress=not quiet, say=say, jobs=number)
    write_results(results, out / "results.json")
    print_summary(results, screen)
    if page:
        path = write_report(results, out)
        o.note(f"Page: {path}   results: {out / 'results.json'}")
    screen.print(f"{time.monotonic() - start:.0f} s in all")
    o.note(choose(results).text)  # once more: after long tables the first line is out of sight


def _default_jobs(config: CompareConfig) -> int:
    """A process per core where the data are embedded, and so small that one network leaves cores idle."""
    small = config.data in EMBEDDED and not torch.cuda.is_available()
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 8) if small else 1


def _contenders(methods: str | None, own: list[str] | None) -> tuple[Any, ...] | None:
    if methods is None and not own:
        return None
    chosen: list[Any] = list(o.words(methods) or ())
    if methods is None and own:
        chosen = ["Deterministic"]  # what the others are measured against
    presets = {contender.label: contender for contender in CONTENDERS}
    unknown = [name for name in chosen if name not in presets]
    if unknown:
        raise ConfigError(
            f"--methods names {unknown[0]!r}; ready-made are {', '.join(presets)}. For another use "
            f'-m "{unknown[0]}(...)"'
        )
    return tuple([presets[name] for name in chosen] + [text for text in own or () if text not in chosen])


COMMANDS = (
    (
        compare,
        o.examples(
            "slimbayes compare",
            "slimbayes compare --data wine --methods Deterministic,Rank1 --seeds 5",
            'slimbayes compare --data cubic -m "Rank1(components=4)" -m "MeanField()" --epochs 200',
            "slimbayes compare --config comparison.yaml --resume",
        ),
    ),
)
