"""``slimbayes reproduce``."""

from __future__ import annotations

import fnmatch
import time
from pathlib import Path
from typing import Annotated

import typer

from slimbayes.lab.cli import options as o
from slimbayes.lab.cli.errors import INTERRUPTED, errors, friendly, screen
from slimbayes.lab.config import ConfigError

LATER = 75  # the exit code of a call whose time was spent: run it again


@friendly
def reproduce(
    experiment: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPERIMENT...", help="Entries by name or pattern: ktied/table2, 'ktied/*'."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show every entry of the three papers and its state.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            "--scale",
            help="smoke (seconds, embedded data), desk (minutes to an hour), gpu (one GPU), paper (in full).",
        ),
    ] = "smoke",
    results: Annotated[
        Path, typer.Option("--results", metavar="FOLDER", help="Where the results lie.")
    ] = Path("results"),
    work: Annotated[
        Path,
        typer.Option("--work", metavar="FOLDER", help="Where trained networks are kept, to be used again."),
    ] = Path("slimbayes-reproduce"),
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="So many seeds instead of the scale's own.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", help="Stop then, whole; the same command goes on."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Processes that train at the same time; default: one per GPU, or one."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="A,B,...", help="Only these settings of the entries, as mnist,cifar100."
        ),
    ] = None,
    devices: Annotated[
        int,
        typer.Option("--devices", min=1, help="Processes that train one network together (DDP): ImageNet."),
    ] = 1,
    num_nodes: Annotated[
        int, typer.Option("--num-nodes", min=1, help="Machines of so many devices, through torchrun.")
    ] = 1,
    finished: Annotated[
        bool,
        typer.Option(
            "--finished",
            help="Report what the work folder holds, wherever it was trained; train and measure nothing.",
        ),
    ] = False,
    data_root: o.DataRoot = None,
    quiet: o.Quiet = False,
    threads: o.Threads = None,
) -> None:
    """Run a paper's table or figure again, and write the result beside what the paper printed.

    Networks are trained once and kept in the work folder, for every entry that needs them. An interrupted call
    goes on where it stopped when the same command is given again.
    """
    if list_all:
        from slimbayes.lab.cli.listing import show

        show(screen, results)
        return
    if not experiment:
        raise ConfigError(
            "which experiment? Name one, as ktied/table2; slimbayes reproduce --list shows them all"
        )
    from slimbayes.lab.experiments.pool import default_jobs
    from slimbayes.lab.experiments.running import RUNNERS, check_names, settings_of, train_for
    from slimbayes.lab.experiments.running import reproduce as run
    from slimbayes.lab.experiments.session import OutOfTime, Session
    from slimbayes.lab.experiments.several import Processes, is_first

    wanted = o.words(only) or ()
    known_at = Session(scale, work)
    here = [n for n, runner in RUNNERS.items() if not runner.jobs or settings_of(n, known_at)]
    names = list(dict.fromkeys(name for word in experiment for name in _matching(word, here)))
    check_names(names)
    if wanted and len(names) > 1:  # of a pattern, what has such settings
        trial = Session(scale, work, only=wanted)
        having = {name: settings_of(name, trial) for name in names}
        known = list(dict.fromkeys(setting for settings in having.values() for setting in settings))
        if unknown := [setting for setting in wanted if setting not in known]:
            raise ConfigError(
                f"--only {', '.join(unknown)}: these entries have {', '.join(known) or 'no settings'}"
            )
        names = [name for name in names if set(having[name]) & set(wanted)]
    several = Processes(devices, num_nodes).number
    if several > 1 and (jobs or 1) > 1:
        raise ConfigError(
            f"--jobs {jobs} on {several} devices: they train one network together; leave out --jobs"
        )
    jobs = 1 if several > 1 else default_jobs() if jobs is None else jobs
    o.set_threads(threads)
    begun = time.monotonic()
    say = (lambda text: None) if quiet else o.note
    try:
        together = jobs > 1 and len(names) > 1 and not finished
        if together:
            train_for(
                names,
                jobs,
                say,
                scale=scale,
                work=str(work),
                data_root=data_root,
                seeds=seeds,
                budget=budget,
                only=wanted,
            )
        for name in names:
            left = None if budget is None else max(0.0, budget - (time.monotonic() - begun))
            shown = not quiet and jobs == 1
            path = run(
                name, scale, results, work, data_root, seeds, left, jobs, shown, say, wanted, together,
                devices, num_nodes, finished,
            )  # fmt: skip
            if is_first():
                o.note(f"{name} at scale {scale}: {path}")
    except OutOfTime as error:
        if not is_first():
            return  # another exit code than 0 would end the first process before it is done
        o.note(str(error))
        raise typer.Exit(LATER) from None
    except KeyboardInterrupt:
        errors.print("interrupted: the same command goes on where it stopped")
        raise typer.Exit(INTERRUPTED) from None


def _matching(word: str, names: list[str]) -> list[str]:
    """Entries of a pattern such as ktied/* that the scale has; a plain name is itself, known or not."""
    if not any(sign in word for sign in "*?["):
        return [word]
    found = fnmatch.filter(names, word)
    if not found:
        raise ConfigError(f"no entry with code matches {word!r}; slimbayes reproduce --list shows them all")
    return found


COMMANDS = (
    (
        reproduce,
        o.examples(
            "slimbayes reproduce --list",
            "slimbayes reproduce ktied/table1",
            "slimbayes reproduce ktied/table2 --scale desk --data-root data",
            "slimbayes reproduce ktied/figure6 --scale gpu --budget 540 --jobs 4",
            "slimbayes reproduce emp/table4 --scale paper --data-root data --devices 8",
            "slimbayes reproduce rank1/table2 --scale gpu --only cifar10 --finished",
            "slimbayes report results",
        ),
    ),
)
