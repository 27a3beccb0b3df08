"""``reproduce``: run an experiment at a scale, and write its result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slimbayes.lab.experiments import emp_runners, ktied_runners, rank1_runners
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.finished import Unfinished, left_out, origin, trained_on
from slimbayes.lab.experiments.joining import PARTS, held, join, joinable, named, tagged
from slimbayes.lab.experiments.pool import default_jobs, work_together
from slimbayes.lab.experiments.results import FORMAT, read_result, result_path, write_result
from slimbayes.lab.experiments.runner import Runner, Task
from slimbayes.lab.experiments.session import Session
from slimbayes.verbs.provenance import provenance

WORK = "slimbayes-reproduce"
RUNNERS: dict[str, Runner] = {**ktied_runners.RUNNERS, **rank1_runners.RUNNERS, **emp_runners.RUNNERS}


def reproduce(
    name: str,
    scale: str = "smoke",
    results: str | Path = "results",
    work: str | Path = WORK,
    data_root: str | None = None,
    seeds: int | None = None,
    budget: float | None = None,
    jobs: int | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
    only: Sequence[str] = (),
    trained: bool = False,
    devices: int = 1,
    num_nodes: int = 1,
    finished: bool = False,
) -> Path:
    """Run one experiment and write its result; returns the file.

    Trained networks stay in ``work``, where other experiments, and the same one after an interruption, find them.
    With a ``budget`` of seconds the call raises ``OutOfTime`` when they are spent; called again, it goes on.

    Args:
        name: an entry of the catalogue, as "ktied/table2".
        scale: "smoke" (seconds, embedded data), "desk", "gpu" or "paper".
        results: the folder of results.
        work: the folder of trained networks.
        data_root: where real data lie; None is the environment variable SLIMBAYES_DATA.
        seeds: so many instead of the scale's own.
        budget: seconds of this call.
        jobs: processes that train networks at the same time; None: one per GPU, or one.
        progress: show a line of progress for each network.
        say: called with a sentence now and then.
        only: settings of the entry that are run, as "mnist"; none: all.
        trained: ``train_for`` has trained what it needs: no processes are started.
        devices: processes, each with a device of its own, that train one network together (DDP).
        num_nodes: machines of so many devices, through torchrun.
        finished: report the networks that ``work`` holds, wherever they were trained; nothing is trained or measured.
    """
    check_names([name])
    options: dict[str, Any] = {
        "scale": scale,
        "work": str(work),
        "data_root": data_root,
        "seeds": seeds,
        "budget": budget,
        "only": tuple(only),
    }
    more: dict[str, Any] = {"progress": progress, "say": say, "devices": devices, "num_nodes": num_nodes}
    if not finished:
        return _run(name, Session(**options, **more), options, results, jobs, trained)
    missing = Unfinished(f"{name}: {str(work)!r} holds no network")
    for device in trained_on(Path(work)):  # networks of a CPU and of a GPU may lie side by side
        try:
            return _run(name, Session(**options, **more, finished=device), options, results, 1, trained)
        except Unfinished as error:
            missing = error
    raise missing


def _run(
    name: str, session: Session, options: dict[str, Any], results: str | Path, jobs: int | None, trained: bool
) -> Path:
    runner, finished = RUNNERS[name], session.finished is not None
    together = session.processes.number > 1
    needed = settings_of(name, session)
    if finished and runner.jobs and not set(session.only or needed) & set(needed):
        what = ", ".join(session.only) or "its settings"
        raise Unfinished(f"{name}: {str(session.work)!r} holds no finished network of {what}")
    before = _other_settings(result_path(results, name, session.scale), needed, session)
    settings = session.chosen(*needed) if needed else ()
    if together and (not settings or not set(settings) <= set(runner.several)):
        raise ValueError(_one_device(name, runner))
    wanted = _wanted(runner, session)
    gaps = [text for setting in settings for text in left_out(session, setting)]
    number = 1 if together else default_jobs() if jobs is None else jobs
    if number > 1 and not runner.alone and not trained:
        work_together(wanted, options, number, session.say)
    with settings_kept():
        for task in () if finished else wanted:
            task.run(session)
        parts = _report(runner, session, settings)
    spent = sum(run["seconds"] for run in session.runs)
    document: dict[str, Any] = {
        "format": FORMAT, "version": 1, "experiment": name, "scale": session.scale,
        "settings": {setting: _facts(runner, session, setting, wanted) for setting in settings},
        **parts, "deviations": [*gaps, *_deviations(runner, session, needed, wanted), *parts["deviations"]],
        "runs": session.runs,
        "provenance": provenance(
            command=_command(name, session, number), seconds=time.monotonic() - session.begun, training_seconds=spent,
            fingerprints={name: facts["fingerprint"] for name, facts in session.used.items()},
            seeds=sorted({run["seed"] for run in session.runs}),
        ),
    }  # fmt: skip
    if finished:
        document["provenance"] |= origin(session.runs, document["provenance"])
    if not session.processes.first:
        return result_path(results, name, session.scale)
    return write_result(document if before is None else join(document, before, needed), results)


def _one_device(name: str, runner: Runner) -> str:
    some = f"give --only {','.join(runner.several)}, or " if runner.several else ""
    return f"{name}: its networks are trained on one device each; {some}use --jobs for several at a time"


def _report(runner: Runner, session: Session, settings: Sequence[str]) -> dict[str, list[Any]]:
    """The parts that the runner makes, setting by setting: each says which it is of."""
    parts: dict[str, list[Any]] = {name: [] for name in (*PARTS, "deviations")}
    for setting in settings or ("",):
        outcome = runner.report(session, setting)
        found = {**vars(outcome), "tables": [table.document() for table in outcome.tables]}
        for name in PARTS:
            parts[name] += tagged(found[name], setting) if setting else found[name]
        parts["deviations"] += [named(text, setting) if setting else text for text in outcome.deviations]
    return parts


def _command(name: str, session: Session, jobs: int) -> str:
    """The command that gives this result anywhere: without the folders of this machine."""
    more = {
        "seeds": session.seeds,
        "only": ",".join(session.only) or None,
        "jobs": jobs if jobs > 1 else None,
        "devices": session.processes.devices if session.processes.devices > 1 else None,
        "num-nodes": session.processes.num_nodes if session.processes.num_nodes > 1 else None,
    }
    words = [f"--{option} {value}" for option, value in more.items() if value is not None]
    words += [] if session.finished is None else ["--finished"]
    return " ".join([f"slimbayes reproduce {name} --scale {session.scale}", *words])


def check_names(names: Iterable[str]) -> None:
    """Raise on a name that is no entry, or on an entry without code."""
    for name in names:
        experiment = find(name)
        if name not in RUNNERS:
            raise ValueError(f"{name} ({experiment.item}) cannot be run yet; it needs {experiment.needs}")


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Torch's precision and random state come back as the caller had them."""
    kept = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = kept[1:]


def settings_of(name: str, session: Session) -> tuple[str, ...]:
    """The settings whose networks an experiment needs."""
    return tuple(dict.fromkeys(job.setting for plan in RUNNERS[name].jobs for job in plan(session)))


def _other_settings(path: Path, needed: tuple[str, ...], session: Session) -> dict[str, Any] | None:
    """The result that is already there, if it holds settings that this call leaves out."""
    if not needed:
        if session.only:
            raise ValueError(f"only={', '.join(session.only)}: this experiment has no settings; leave it out")
        return None
    left_out = [setting for setting in needed if setting not in session.chosen(*needed)]
    if not left_out or not path.exists():
        return None
    old = read_result(path)
    others = held(old, left_out)
    if others and not joinable(old):
        raise ValueError(
            f"{path} also holds {', '.join(others)}, but not which of its parts are theirs, so that a result of "
            f"{', '.join(session.only)} cannot be joined to it: leave out --only, or choose another folder of results"
        )
    return old if others else None


def _wanted(runner: Runner, session: Session) -> list[Task]:
    found = dict.fromkeys(job for plan in runner.jobs for job in plan(session))
    return [Task(runner.paper, job) for job in found if not session.only or job.setting in session.only]


def _deviations(
    runner: Runner, session: Session, needed: tuple[str, ...], tasks: Sequence[Task]
) -> list[str]:
    """Where this call differs from the paper: settings that were not run, and what its scale makes of the others."""
    run = session.chosen(*needed) if needed else ()
    missing = [f"{setting}: not run at this scale." for setting in needed if setting not in run]
    said = [runner.paper.deviations(session, setting, _jobs_of(setting, tasks)) for setting in run]
    return [*missing, *[text for texts in said for text in texts]]


def _jobs_of(setting: str, tasks: Iterable[Task]) -> list[Any]:
    return [task.job for task in tasks if task.job.setting == setting]


def train_for(names: Sequence[str], jobs: int, say: Callable[[str], None] = print, **options: Any) -> None:
    """Train what several experiments need, in so many processes; ``options`` are those of ``Session``."""
    runners = [RUNNERS[name] for name in names if name in RUNNERS and not RUNNERS[name].alone]
    session = Session(**options, progress=False)
    wanted = dict.fromkeys(task for runner in runners for task in _wanted(runner, session))
    # The longest first, so that none of them is left alone at the end.
    work_together(sorted(wanted, key=lambda task: task.paper.order(task.job)), options, jobs, say)


def _facts(runner: Runner, session: Session, setting: str, tasks: Iterable[Task]) -> dict[str, Any]:
    """What was run of a setting, as plain values; the runs themselves have their training settings."""
    return runner.paper.facts(session, setting, _jobs_of(setting, tasks))
