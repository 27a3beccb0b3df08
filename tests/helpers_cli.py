"""Run the command line in this process, as the program would be run."""

import os
import sys
from dataclasses import dataclass

import pytest

from slimbayes.lab.cli import main


@dataclass
class Done:
    code: int
    out: str
    err: str


def runner(monkeypatch, capsys):
    """A function of words that gives exit code, output and errors; its environment is undone by monkeypatch."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    monkeypatch.setenv("SLIMBAYES_DEBUG", "")  # so that what main sets is undone

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["slimbayes", *map(str, words)])
        os.environ["SLIMBAYES_DEBUG"] = ""
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        done = Done(caught.value.code or 0, *capsys.readouterr())
        assert done.code == code, done
        if code == 1:
            lines = done.err.strip().splitlines()
            assert lines[-1].startswith("error: ") and "Traceback" not in done.err, done.err
        return done

    return run
