"""``slimbayes suite``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimbayes.lab.cli import options as o
from slimbayes.lab.cli.errors import friendly, screen


@friendly
def suite(
    pairs: Annotated[
        str | None,
        typer.Option("--pairs", metavar="A,B,...", help="mnist-cnn, concrete-mlp, ...; default: all."),
    ] = None,
    half: Annotated[
        str | None, typer.Option("--half", help="choosing or judging: the pairs of one half alone.")
    ] = None,
    contenders: Annotated[
        str | None,
        typer.Option(
            "--contenders",
            metavar="A;B;...",
            help='plain, KTied, "temperature scaling", or methods as text: "KTied(rank=1)"; default: all.',
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks of each.")] = 5,
    reduced: Annotated[
        bool, typer.Option("--reduced", help="Five pairs and three seeds: under two hours on two cores.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes, of one CPU thread each.")] = 2,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", help="Begin nothing after it; the next call goes on."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="JSON to write, and to go on from.")
    ] = Path("suite.json"),
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda", help="On a GPU several --jobs share it.")
    ] = "cpu",
    data_root: o.DataRoot = None,
    quiet: o.Quiet = False,
) -> None:
    """Compare every method's defaults with the plain network, and with what else there is, on unlike data and networks.

    Every contender makes the steps of the plain network, on the same rows, in the loop of the README. What the output
    file has already, with today's settings, is kept.
    """
    from slimbayes.lab.suite.page import tables
    from slimbayes.lab.suite.pairs import PAIRS
    from slimbayes.lab.suite.running import EVERYTHING, REDUCED, cells, run_suite

    names = o.words(pairs) or (REDUCED if reduced else tuple(PAIRS))
    if half not in (None, "choosing", "judging"):
        raise typer.BadParameter(f"--half={half}: choose choosing or judging")
    wanted = [name for name in names if half is None or name not in PAIRS or PAIRS[name].half == half]
    some = tuple(filter(None, map(str.strip, (contenders or "").split(";")))) or EVERYTHING
    chosen = cells(wanted, some, min(seeds, 3) if reduced else seeds)
    rows = run_suite(
        chosen, output, data_root, jobs, budget, device, (lambda text: None) if quiet else o.note
    )
    screen.print(tables(rows), markup=False)
    o.note(f"Figures: {output}")


COMMANDS = (
    (
        suite,
        o.examples(
            "slimbayes suite --reduced --data-root ~/data",
            'slimbayes suite --pairs digits-mlp --contenders "plain;KTied"',
        ),
    ),
)
