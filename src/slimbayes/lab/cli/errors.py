"""Errors as a sentence, not as a traceback; exit codes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.text import Text

FAILED, INTERRUPTED, BROKEN = 1, 130, 70
screen = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, emoji=False)
Command = TypeVar("Command", bound=Callable[..., Any])


def friendly(command: Command) -> Command:
    """Turn what a user can mend into one line on stderr and exit code 1; ``--debug`` shows the traceback.

    Code 130: interrupted. Code 70: an error of slimbayes itself.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            _say("interrupted; a run with a folder goes on with --resume")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left, as head does
            raise typer.Exit(FAILED) from None
        except (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError) as error:
            if os.environ.get("SLIMBAYES_DEBUG"):
                raise
            _say(_words(error))
            raise typer.Exit(FAILED) from None
        except Exception as error:
            if os.environ.get("SLIMBAYES_DEBUG"):
                raise
            _say(f"{type(error).__name__}: {error}; this is a defect of slimbayes: --debug shows where")
            raise typer.Exit(BROKEN) from None

    return run  # type: ignore[return-value]


def _words(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory: lower --batch-size or --draws, or use --precision bf16-mixed"
    if isinstance(error, MemoryError):
        return "out of memory: lower --batch-size or --draws"
    if isinstance(error, OSError) and error.filename and not isinstance(error, ValueError):
        return f"{error.strerror or error}: {str(error.filename)!r}"
    return str(error) or type(error).__name__


def _say(message: str) -> None:
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    errors.print(Text.assemble(("error:", "bold red"), " ", line), soft_wrap=True)
