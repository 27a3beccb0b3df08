"""Beyond the EMP paper: draws weighted by stacking, and what each change of EMP adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.lab.data import Split
from slimbayes.lab.experiments.averages import columns_of, passes
from slimbayes.lab.experiments.emp_figures import figures_of
from slimbayes.lab.experiments.emp_measures import VERSION, inputs_of
from slimbayes.lab.experiments.emp_recipes import STARTS, prepare, size_of
from slimbayes.lab.experiments.images import Job, evaluation, ready
from slimbayes.lab.experiments.networks import Trained
from slimbayes.lab.experiments.outcome import Table
from slimbayes.lab.experiments.session import Session
from slimbayes.verbs.stacking import stack

STACKED = "EMP, stacked"
# Every row beside the one that it changes.
REFERENCES = {
    "EMP": "Vanilla",
    STACKED: "EMP",
    "EMP, learned mixing": "EMP",
    "EMP, own statistics": "EMP",
    "EMP on norms": "EMP",
    "EMP on norms, Rank1 elsewhere": "EMP on norms",
    "EMP on norms, dropout elsewhere": "EMP on norms",
    "ECMP": "EMP",
    **{f"{kind}, start {noise}": kind for kind in ("EMP", "ECMP") for noise in STARTS},
}


def stacked(session: Session, trained: Trained, job: Job) -> dict[str, Any]:
    """Figures of the network's draws weighted as held-out data want them; kept beside it.

    The predictions that are weighted are S draws of one seed, each the same function for all examples. The K networks
    that take component k in every layer would be K of the K^layers that training has seen, and are no better known.
    """
    samples = size_of(job.setting, session.scale).samples[-1]
    key = f"stacked {samples} draws, version {VERSION}"
    return dict(session.kept(trained, key, lambda: _stacked(session, trained, job, samples)))


def _stacked(session: Session, trained: Trained, job: Job, samples: int) -> dict[str, Any]:
    prepared, change = prepare(session, job.setting), inputs_of(session, job.setting)
    model, chunk = ready(session, trained), size_of(job.setting, session.scale).chunk
    held, test = (rows.to(session.device) for rows in (prepared.validation, prepared.data.test))
    with evaluation(session, job.seed):
        log_p = torch.zeros(samples, len(held), device=session.device)
        for block, done, p in passes(model, held.inputs, (samples,), chunk, 0, change):
            targets = held.targets[block][None, :, None].expand(len(p), -1, 1)
            log_p[done - len(p) : done, block] = p.gather(2, targets).squeeze(2).log()
        weights = stack(log_p.cpu(), tolerance=1e-5).to(session.device)
        mixed = weighted(passes(model, test.inputs, (samples,), chunk, 0, change), weights, test)
    return {**figures_of(mixed), "draws": float(1 / weights.square().sum())}


def weighted(found: Any, weights: Tensor, rows: Split) -> Tensor:
    """``columns_of`` the mixture Σ_s w_s p_s, from passes over all draws of the rows."""
    parts, total = [], None
    for block, done, p in found:
        part = torch.einsum("s,sbc->bc", weights[done - len(p) : done], p)
        total = part if total is None else total + part
        if done == len(weights):
            parts.append(columns_of(total, rows.targets[block]).cpu())
            total = None
    return torch.cat(parts)


def gains(table: Table) -> Table:
    """What every row adds to the one that it changes, seed by seed.

    >>> table = Table("t", "T", ("nll",))
    >>> for label, nll in (("Vanilla", 1.0), ("EMP", 0.75)): table.add(label, {"nll": nll}, {})
    >>> gains(table).rows["EMP less Vanilla"].values
    {'nll': [-0.25]}
    """
    columns = tuple(c for c in ("accuracy", "nll", "ece_percent", "mce_percent") if c in table.columns)
    found = Table(f"{table.name}-gains", f"{table.title}: what each change adds, seed by seed", columns)
    for label, reference in REFERENCES.items():
        if label not in table.rows or reference not in table.rows:
            continue
        ours, theirs = (table.rows[row].values for row in (label, reference))
        for i in range(len(ours[columns[0]])):
            found.add(f"{label} less {reference}", {c: ours[c][i] - theirs[c][i] for c in columns}, {})
    return found


def words_of_stacking(session: Session, setting: str) -> str:
    """How draws were stacked, in words."""
    size = size_of(setting, session.scale)
    return (
        f"{STACKED}: {size.samples[-1]} draws of one seed, weighted by sb.stack on {size.held_out:,} held-out "
        f"examples; the same draws, with equal weights, are the row EMP."
    )
