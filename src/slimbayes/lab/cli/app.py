"""The program and its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from slimbayes import __version__
from slimbayes.lab.cli import benching, comparing, reproducing, suite, training, using
from slimbayes.lab.cli.errors import screen

app = typer.Typer(
    name="slimbayes",
    help="Bayesian neural networks for about one percent more parameters: train, compare, predict.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: slimbayes compare. Add --debug to any command for tracebacks.",
)


def _version(value: bool) -> None:
    if value:
        screen.print(f"slimbayes {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


for module in (comparing, training, using, reproducing, benching, suite):
    for command, examples in module.COMMANDS:
        app.command(epilog=examples)(command)
