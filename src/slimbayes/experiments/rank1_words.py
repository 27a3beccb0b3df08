"""Where the rank-1 paper's networks on CIFAR, as they are run here, differ from the paper's, in words."""

from __future__ import annotations

from slimbayes.experiments.rank1_recipes import (
    DATA,
    DETERMINISTIC,
    GAUSSIAN,
    MORE,
    data_of,
    epochs_of,
    network_of,
    prepare,
    rows_of,
    size_of,
)
from slimbayes.experiments.session import Session

_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "Digits (a test of the code)"}


def title(session: Session, setting: str) -> str:
    """A table's title: the data and the network that were run.

    >>> title(Session("gpu", "work"), "cifar10-ablations")
    'CIFAR-10, wrn(depth=16, width=2)'
    """
    data = data_of(setting, session.scale)
    return f"{_NAMES.get(data, data)}, {network_of(setting, session.scale, GAUSSIAN)}"


def deviations(session: Session, setting: str) -> list[str]:
    """Where a setting at this scale differs from the paper's."""
    size, data = size_of(setting, session.scale), data_of(setting, session.scale)
    said = []
    if size.data:
        said.append(f"trained on {data}, not on {DATA[setting]}: only a test that the code runs.")
    else:
        said.append(session.used.get(data, {}).get("source", ""))
    if size.networks:
        said.append(
            "; ".join(f"{ours} for the paper's {theirs}" for theirs, ours in size.networks.items()) + "."
        )
    if size.share != 1:
        said.append(_epochs(session, setting))
    count = len(prepare(session, setting).data.test)
    if size.corrupted < count:
        said.append(f"corrupted: the first {size.corrupted:,} test images, of every type and severity.")
    types = "17 of the paper's CIFAR-100-C" if setting == MORE else "15 of CIFAR-10-C"
    said.append(
        f"the corruptions are slimbayes' own images of the {types} types, not the published files, whose severities "
        f"they follow."
    )
    said.append("mean-field networks train on all images, as the others do; the paper's on 95 % of them.")
    if session.device.type == "cuda":
        said.append("trained and evaluated in bfloat16 (mixed); norms' statistics are those of all rows.")
    return [f"{setting}: {text}" for text in said if text]


def _epochs(session: Session, setting: str) -> str:
    """One budget for all: the paper's epochs in one proportion.

    >>> _epochs(Session("gpu", "work"), "cifar10")
    "40 epochs for the deterministic network and 50 for rank-1 networks, the paper's 200 and 250; rates fall and ..."
    """
    ours = [epochs_of(setting, session.scale, label) for label in (DETERMINISTIC, GAUSSIAN)]
    paper = [rows_of(setting)[label].setting.training["epochs"] for label in (DETERMINISTIC, GAUSSIAN)]
    return (
        f"{ours[0]} epochs for the deterministic network and {ours[1]} for rank-1 networks, the paper's {paper[0]} and "
        f"{paper[1]}; rates fall and the KL grows at the same fractions of the run."
    )
