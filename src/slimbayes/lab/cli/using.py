"""``slimbayes evaluate``, ``predict``, ``export``, ``report`` and ``info``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from slimbayes.lab.cli import options as o
from slimbayes.lab.cli.errors import friendly, screen
from slimbayes.lab.config import ConfigError

PAGES = "docs/results"  # of experiments, which live in a checkout
Folder = Annotated[Path, typer.Argument(help="The folder of a trained model.", metavar="RUN")]


@friendly
def evaluate(
    run: Folder,
    data: o.Data = None,
    shifts: Annotated[
        str | None,
        typer.Option(
            "--shifts", metavar="A,B,...", help="Which shifts; default: all that fit; none: clean only."
        ),
    ] = None,
    max_test: Annotated[
        int | None, typer.Option("--max-test", min=1, help="At most so many test examples.")
    ] = None,
    draws: o.Draws = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where results.json and the page go; default: the run's folder."
        ),
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the HTML page too.")] = False,
    network: Annotated[
        str | None,
        typer.Option(
            "--network", help="Needed if the run has a network of your own: package.module:function."
        ),
    ] = None,
    data_root: o.DataRoot = None,
    data_option: o.DataOption = None,
    device: o.OnDevice = None,
    threads: o.Threads = None,
) -> None:
    """Measure a trained model on its test data, clean and shifted."""
    from slimbayes.lab.compare import evaluate_run
    from slimbayes.lab.report import print_summary, write_report, write_results
    from slimbayes.lab.runs import load_run

    o.set_threads(threads)
    loaded = load_run(run, network, device)
    results = evaluate_run(
        loaded,
        run,
        data=data,
        data_options=o.pairs(data_option, "--data-option"),
        data_root=data_root,
        shifts=() if shifts == "none" else o.words(shifts),
        max_test=max_test,
        draws=draws,
    )
    folder = out or run
    write_results(results, folder / "results.json")
    print_summary(results, screen)
    _by_severity(results)
    o.note(f"Results: {folder / 'results.json'}")
    if page:
        o.note(f"Page: {write_report(results, folder)}")


def _by_severity(results: dict[str, Any]) -> None:
    from rich.table import Table

    run = results["methods"][0]["runs"][0]
    if not run["shifted"]:
        return
    keys = (
        ("nll", "accuracy", "ece") if results["task"] == "classification" else ("nll", "rmse", "coverage_90")
    )
    table = Table(title="By shift and severity: NLL", title_justify="left")
    severities = list(next(iter(run["shifted"].values())))
    table.add_column("shift")
    for severity in severities:
        table.add_column(severity, justify="right")
    for name, rows in run["shifted"].items():
        table.add_row(name, *(f"{rows[severity][keys[0]]:.3f}" for severity in severities))
    screen.print(table)


@friendly
def export(
    run: Folder,
    out: Annotated[
        Path,
        typer.Option("--out", "--output", metavar="FILE", help="Where to write: a name that ends in .onnx."),
    ] = Path("model.onnx"),
    draws: o.Draws = None,
    seed: Annotated[int, typer.Option("--seed", help="Which draws: the same seed, the same file.")] = 0,
    network: Annotated[
        str | None,
        typer.Option(
            "--network", help="Needed if the run has a network of your own: package.module:function."
        ),
    ] = None,
    threads: o.Threads = None,
) -> None:
    """Write a trained model as one ONNX file: fixed draws, any batch, compared with PyTorch before it appears."""
    from slimbayes.lab.exported_runs import ENDING, export_run
    from slimbayes.lab.runs import load_run

    if out.suffix != ENDING:
        raise ConfigError(f"--out {str(out)!r}: give a name that ends in {ENDING}")
    o.set_threads(threads)
    loaded = load_run(run, network, "cpu")
    count = export_run(loaded, out, draws, seed)
    o.note(f"{count} draws, {out.stat().st_size / 2**20:.2f} MiB, outputs compared with PyTorch's: {out}")


@friendly
def predict(
    run: Annotated[
        Path, typer.Argument(help="The folder of a trained model, or an exported .onnx file.", metavar="RUN")
    ],
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="INPUTS", help="A .csv or .parquet table, an .npz file, an image, or a folder of images."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where to write: .csv, .json or .npz.")
    ] = Path("predictions.csv"),
    level: Annotated[float, typer.Option("--level", help="Of the intervals.")] = 0.9,
    draws: o.Draws = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of the draws: the same seed, the same predictions.", show_default="0"),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network", help="Needed if the run has a network of your own: package.module:function."
        ),
    ] = None,
    device: o.OnDevice = None,
    threads: o.Threads = None,
) -> None:
    """Predict new data: probabilities or means, entropy, mutual information, intervals."""
    from slimbayes.lab.data import read_inputs
    from slimbayes.lab.exported_runs import ENDING, ServedRun, load_served
    from slimbayes.lab.predictions import SUFFIXES, predict_table, write_predictions
    from slimbayes.lab.runs import Run, load_run

    if out.suffix not in SUFFIXES:
        raise ConfigError(f"--out {str(out)!r}: give a name that ends in one of {', '.join(SUFFIXES)}")
    o.set_threads(threads)
    loaded: Run | ServedRun
    if run.suffix == ENDING and not run.is_dir():
        _fixed({"--draws": draws, "--seed": seed, "--network": network, "--device": device}, run)
        loaded = load_served(run, threads)
    else:
        loaded = load_run(run, network, device)
        if draws is not None:
            loaded.config = dataclasses.replace(loaded.config, draws=draws)
    raw, names = read_inputs(inputs, loaded.facts.to_dict())
    table = predict_table(loaded, raw, level, seed or 0, names=list(names))
    write_predictions(table, out, loaded, raw, run, level, seed or 0)
    o.note(f"{len(raw)} predictions: {out}")


def _fixed(given: dict[str, Any], path: Path) -> None:
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value}: {str(path)!r} holds fixed draws and a network of its own, and runs on the CPU; "
                f"leave {option} out, or predict from the run's folder"
            )


@friendly
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="results.json files of the same data set; or the folder (or files) that slimbayes reproduce wrote.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help=f"Where pages go; default: beside the first file, for experiments {PAGES}.",
        ),
    ] = None,
) -> None:
    """Turn results into tables, figures and one HTML page: of a comparison, or of experiments."""
    from slimbayes.lab.report import merge_results, print_summary, read_results, write_report

    if _of_experiments(results):
        return _experiments(results, out or Path(PAGES))
    found = read_results(results[0]) if len(results) == 1 else merge_results(list(results))
    print_summary(found, screen)
    o.note(f"Page: {write_report(found, out or results[0].parent)}")


def _of_experiments(results: list[Path]) -> bool:
    """Whether these are results of experiments, as their format says, and not of a comparison."""
    from slimbayes.lab.experiments.state import files, is_result

    folders = [path for path in results if path.is_dir()]
    if folders:
        if len(results) > 1:
            raise ConfigError(f"{folders[0]}: give one folder alone, or result files")
        if not any(is_result(path) for path, _ in files(folders[0])):
            raise ConfigError(
                f"{folders[0]}: no result of slimbayes reproduce lies there; of a comparison, give its results.json"
            )
        return True
    known = [is_result(path) for path in results]
    if any(known) and not all(known):
        other = results[known.index(False)]
        raise ConfigError(
            f"{other}: no result of slimbayes reproduce, unlike the others: report it by itself"
        )
    return all(known)


def _experiments(results: list[Path], out: Path) -> None:
    from slimbayes.lab.experiments.catalogue import ENTRIES
    from slimbayes.lab.experiments.pages import write_pages
    from slimbayes.lab.experiments.sections import damages, shown, status
    from slimbayes.lab.experiments.state import survey

    source = results[0] if results[0].is_dir() else results
    found = survey(source, ENTRIES)
    for state in found.states.values():
        for first in shown(state)[:1]:
            o.note(f"{state.entry.name}: {status(state)}; {first.holds} of {first.checks} checks hold")
    for damage in damages(found):
        o.note(f"Left out: {damage.shown}: {damage.why}")
    changed = write_pages(source, out, ENTRIES)
    o.note(f"Pages: {out / 'index.md'}, {out / 'results.html'} ({len(changed)} files changed)")


@friendly
def info(data_root: o.DataRoot = None) -> None:
    """Show versions, devices, extras, and which data sets are there."""
    from slimbayes.lab.cli.info import show

    show(screen, data_root)


COMMANDS = (
    (
        evaluate,
        o.examples(
            "slimbayes evaluate runs/digits",
            "slimbayes evaluate runs/digits --shifts rotation,noise --page",
        ),
    ),
    (
        predict,
        o.examples(
            "slimbayes predict runs/patients new.csv --out risk.csv",
            "slimbayes predict runs/digits images/ --out predictions.json",
            "slimbayes predict runs/cifar images.npz --level 0.95",
            "slimbayes predict patients.onnx new.csv --out risk.csv",
        ),
    ),
    (
        export,
        o.examples(
            "slimbayes export runs/patients --out patients.onnx",
            "slimbayes export runs/digits --out digits.onnx --draws 16",
        ),
    ),
    (
        report,
        o.examples(
            "slimbayes report slimbayes-compare/results.json",
            "slimbayes report a.json b.json --out both",
            "slimbayes report results",
            "slimbayes report results --out pages",
        ),
    ),
    (
        info,
        o.examples(
            "slimbayes info --data-root data",
        ),
    ),
)
