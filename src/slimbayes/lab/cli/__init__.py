"""The command line: arguments to the functions of the library, nothing else."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run ``slimbayes``; ``--debug`` may stand anywhere."""
    if "--debug" in sys.argv[1:]:
        # Processes that training starts read the same command line, so the word stays in it for them.
        os.environ["SLIMBAYES_DEBUG"] = "1"
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        from slimbayes.lab.cli.app import app
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {missing}: pip install 'slimbayes[cli]'")
    app(arguments, prog_name="slimbayes")
