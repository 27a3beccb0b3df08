"""Networks on ImageNet, of any paper: trained and measured by one or several processes, and what is kept of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.containers.streaming import StreamBatches
from slimbayes.files import write_whole
from slimbayes.lab.data.corruptions import corrupt
from slimbayes.lab.experiments.averages import columns_of, running_means
from slimbayes.lab.experiments.imagenet_data import CLASSES, RAW, SIZES, TEST, TRAIN, TREE, Streamed
from slimbayes.lab.experiments.networks import MODEL, Recipe, Trained
from slimbayes.lab.experiments.session import Session, read_json, with_precision
from slimbayes.training.step import channels_last
from slimbayes.verbs.checkpoint import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SETTING = "imagenet"
KEPT, VERSION = "imagenet.json", 1  # raise it when what is measured changes
EVERY = 2000  # steps between the states from which a run is resumed


def options(session: Session) -> dict[str, Any]:
    """The settings of ``Training`` that are the machine's and not a paper's."""
    return {
        "accelerator": session.device.type, "workers": SIZES[session.scale].workers, "checkpoint_every": EVERY,
        "precision": "bf16-mixed" if session.device.type == "cuda" else "32-true",
    }  # fmt: skip


def train(session: Session, recipe: Recipe, seed: int, prepare: Callable[[Session], Streamed]) -> Trained:
    """The trained network of a recipe; the processes that are to train it together are started with the first."""
    with_precision(session)
    session.processes.launch(recipe.training)
    # Of the data it asks for shapes and a key, which a stream has too.
    return session.trained(recipe, prepare(session), seed)  # type: ignore[arg-type]


@contextlib.contextmanager
def alone(session: Session, label: str, seed: int) -> Iterator[None]:
    """Jobs of one network in several processes: the second waits for the first, and then finds it trained."""
    if fcntl is None or session.processes.number > 1:
        yield
        return
    slug = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-").lower()
    path = session.work / SETTING / f"{slug}-{seed}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, by a kill too
        yield


def columns(
    session: Session, trained: Trained, prepared: Streamed, counts: Sequence[int],
    corruption: tuple[str, int] | None = None,
) -> dict[int, Tensor]:  # fmt: skip
    """``columns_of`` all test images for every number of draws, [N, 4]: every process measures a part of each batch."""
    size, data = SIZES[session.scale], prepared.data
    batch = even_batch(len(data.test), size.chunk, session.processes.number)
    batches = StreamBatches(
        data.test, batch, RAW, session.processes.rank, session.processes.number, device=session.device,
        workers=size.workers,
    )  # fmt: skip
    model = trained.model
    if session.device.type == "cuda":
        channels_last(model)
    found: dict[int, list[Tensor]] = {count: [] for count in counts}
    for index, (images, labels) in enumerate(batches.epoch(0)):
        first, raw = batches.rows(index)[0], images.to(torch.uint8)
        if corruption is not None:
            raw = corrupt(raw, *corruption, first=first)
        x = data.scaling(raw).contiguous(memory_format=torch.channels_last)
        for block, means in running_means(model, x, counts, size.chunk, first=first):
            for count, p in zip(counts, means, strict=True):
                found[count].append(columns_of(p, labels[block]).cpu())
        session.processes.by_first(session.check_time)
    return {count: torch.cat(session.processes.gathered(torch.cat(parts))) for count, parts in found.items()}


def even_batch(count: int, most: int, processes: int) -> int:
    """The largest batch up to ``most`` whose last, short one still has a row for every process.

    >>> even_batch(50, 16, 4), even_batch(48, 16, 4)
    (15, 16)
    """
    batch = max(processes, min(most, count))
    while batch > processes and 0 < count % batch < processes:
        batch -= 1
    return batch


def kept(session: Session, trained: Trained, key: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, from beside the network if it was measured of these weights before.

    ``make`` is called in all processes or in none.
    """
    path, weights = trained.folder / KEPT, trained.folder / MODEL
    if not weights.is_file():
        raise CheckpointError(
            f"the weights in {str(trained.folder)!r} are gone: delete the folder to train again"
        )
    state = {"version": VERSION, "weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:16]}
    known = (read_json(path) or {}) if session.processes.first else {}
    known = session.processes.agreed(known if known.get("state") == state else {"state": state})
    if key not in known:
        session.processes.by_first(session.check_time)
        known[key] = make()
        if session.processes.first:
            write_whole(path, json.dumps(known))
    return known[key]


CORRUPTED = (
    "The corrupted images are made from the test images by slimbayes.data.corruptions; ImageNet-C itself, which has "
    "them as JPEG files, is not read."
)


def words(session: Session, network: str) -> list[str]:
    """What there is to say of a scale's images and of the devices, whatever the paper."""
    size = SIZES[session.scale]
    said = [session.used.get(size.data, {}).get("source", "")]
    if size.data == TREE:
        said = [
            f"trained on {CLASSES * TRAIN} made-up images of {CLASSES} classes, tested on {CLASSES * TEST}, with "
            f"{network}: only a test that the code runs."
        ]
    if session.processes.number > 1:
        said.append(
            f"{session.processes.number} processes share a batch; each norm sees its own process's part."
        )
    if session.device.type == "cuda":
        said.append("trained in bfloat16 (mixed), tested in float32 with TensorFloat-32 products.")
    return said
