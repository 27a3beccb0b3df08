"""``slimbayes train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimbayes.lab.cli import options as o
from slimbayes.lab.cli.errors import friendly
from slimbayes.lab.config import CompareConfig, RunConfig, from_dict, read_config


@friendly
def train(
    data: o.Data = None,
    method: Annotated[
        str | None,
        typer.Option("-m", "--method", metavar="METHOD", help='As in Python: "Rank1(components=4)".'),
    ] = None,
    network: o.Network = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the model goes.")] = Path(
        "slimbayes-run"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    batch_size: o.BatchSize = None,
    lr: o.Rate = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of weights, batches and noise.")] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            "--validation",
            help="Hold out this fraction of the training data (real targets: 0.1 unless given, to fit the noise to).",
        ),
    ] = None,
    early_stopping: Annotated[
        int | None,
        typer.Option("--early-stopping", min=1, help="Stop after so many validations without a better NLL."),
    ] = None,
    draws: o.Draws = None,
    data_root: o.DataRoot = None,
    data_option: o.DataOption = None,
    accelerator: o.Device = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes, each with a device of its own (DDP).")
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num-nodes", min=1, help="Machines, through torchrun.")
    ] = None,
    precision: o.Precision = None,
    compile: o.Compile = None,
    setting: o.Set = None,
    config: o.ConfigFile = None,
    save_config: o.SaveConfig = None,
    dry_run: o.DryRun = False,
    quiet: o.Quiet = False,
    threads: o.Threads = None,
) -> None:
    """Train one model and keep it in a folder."""
    from slimbayes.lab.runs import train_run
    from slimbayes.training import make_fabric
    from slimbayes.verbs.summary import summary

    before = out / "config.yaml"
    if config is None and resume and before.exists():
        config = before
    base = read_config(RunConfig, config) if config is not None else _train_defaults()
    training = o.given(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        early_stopping=early_stopping,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        compile=compile,
    ) | o.pairs(setting, "--set")
    changes = o.given(
        data=data,
        method=method,
        network=network,
        validation=validation,
        draws=draws,
        data_options=o.data_options(data_option, data, base),
    )
    wanted = from_dict(RunConfig, {**changes, "training": training}, base)
    if o.settle(wanted, save_config, dry_run):
        return
    o.set_threads(threads)
    fabric = make_fabric(wanted.training)
    fabric.launch()
    run, result = train_run(
        wanted, out, data_root, resume, progress=not quiet, fabric=fabric, hold_out=config is None
    )
    if not fabric.is_global_zero:
        return
    counted = summary(run.model)
    o.note(
        f"{wanted.method}: {counted.parameters:,} parameters ({100 * counted.overhead:+.2f} %), {result.step} steps in "
        f"{result.seconds:.1f} s{', stopped early' if result.stopped_early else ''}"
    )
    last = result.history[-1]
    shown = [
        name for name in ("nll", "validation_nll", "validation_accuracy", "validation_rmse") if name in last
    ]
    o.note("  ".join(f"{name} {last[name]:.4f}" for name in shown))
    for finding in result.findings:
        o.note(str(finding))
    o.note(f"Model: {out}   next: slimbayes evaluate {out}")


def _train_defaults() -> RunConfig:
    """A single run trains as the comparison does."""
    return RunConfig(training=CompareConfig().training)


COMMANDS = (
    (
        train,
        o.examples(
            "slimbayes train --data digits --out runs/digits",
            'slimbayes train --data patients.csv --data-option target=outcome -m "KTied(rank=2)" --validation 0.1',
            'slimbayes train --data cifar10 --data-root data --network "wrn(depth=16, width=4)" --compile',
            "slimbayes train --config runs/digits/config.yaml --out runs/again",
            "torchrun --nproc-per-node 4 -m slimbayes train --devices 4 --data cifar10",
        ),
    ),
)
