"""What is fuzzed: the readers of checkpoints, configurations, CSV and npz files, each with valid files to begin from.

A reader may return, or raise one of its documented errors. Anything else is a finding.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save as serialize
from torch import nn

import slimbayes as sb
from slimbayes.containers.datasets import DataError
from slimbayes.lab.config import CompareConfig, ConfigError, RunConfig, from_dict, read_config
from slimbayes.lab.data.tables import load_table
from slimbayes.lab.data.userfiles import load_npz
from slimbayes.verbs import checkpoint
from slimbayes.verbs.method_text import SpecError

SIGNED = b"S"  # first byte of an input: what follows gets the checksums that fit it
FILE = b"F"  # and: a whole file, as it is
BETWEEN = b"\0||\0"  # members of an archive


@dataclass(frozen=True)
class Target:
    """A reader under test: valid inputs, how it is called on a file, and the errors it documents."""

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...]
    words: tuple[str, ...] = ()  # what a mutation may insert


def network() -> nn.Module:
    """The plain network that every checkpoint here is for."""
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))


METHODS = (sb.Rank1(components=2), sb.KTied(rank=2), sb.BatchEnsemble(components=3), sb.EMP(components=2),
           sb.DeepEnsemble(members=2), sb.MCDropout(rate=0.2), sb.MeanField(), sb.Deterministic())  # fmt: skip


def checkpoint_seeds() -> list[bytes]:
    """Files of every kind of method and an adapter, whole and as headers to be signed."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        for method in METHODS:
            torch.manual_seed(0)
            sb.save(sb.bayesianize(network(), method), path)
            found.append(path.read_bytes())
        torch.manual_seed(0)
        sb.save(sb.adapt(network(), sb.Rank1(components=2)), path, adapter_only=True)
        found.append(path.read_bytes())
    return [FILE + content for content in found] + [
        SIGNED + bytes([i]) + _header(c) for i, c in enumerate(found)
    ]


def _header(content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    text: str = json.loads(content[8 : 8 + size])["__metadata__"][checkpoint.HEADER]
    return text.encode()


def _signed(data: bytes) -> bytes:
    """A whole file of this header with the tensors of a valid one, and the checksum that fits: no bit is wrong."""
    contents = [seed[1:] for seed in checkpoint_files()]
    original = contents[data[0] % len(contents)] if data else contents[0]
    tensors = checkpoint.deserialize(original)
    text = data[1:].decode("utf-8", "replace")
    try:
        header = json.loads(text)
        header["sha256"] = checkpoint._digest(header, tensors)
        text = json.dumps(header)
    except Exception:  # what cannot be signed is read as it is
        pass
    return bytes(serialize(tensors, metadata={checkpoint.HEADER: text}))


_files: list[bytes] = []


def checkpoint_files() -> list[bytes]:
    """The whole files among the seeds, made once."""
    if not _files:
        _files.extend(seed for seed in checkpoint_seeds() if seed[:1] == FILE)
    return _files


def read_checkpoint(data: bytes, folder: Path) -> object:
    """``sb.load`` on a file."""
    path = folder / "net.safetensors"
    try:
        path.write_bytes(_signed(data[1:]) if data[:1] == SIGNED else data[1:])
    except (TypeError, ValueError):  # safetensors writes no such header
        return None
    torch.manual_seed(0)
    plain = network()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    try:
        return sb.load(plain, path)
    except checkpoint.CheckpointError:
        after = plain.state_dict()
        if before.keys() != after.keys() or not all(torch.equal(before[n], after[n]) for n in before):
            raise AssertionError("a refused file changed the network") from None
        raise


def config_seeds() -> list[bytes]:
    """Both kinds of configurations, as they are written, and with YAML's rarer signs."""
    texts = [
        yaml.safe_dump(RunConfig(method="KTied(rank=2, prior=Normal(0, 0.1))").to_dict(), sort_keys=False),
        yaml.safe_dump(CompareConfig().to_dict(), sort_keys=False),
        "data: &a digits\nnetwork: dense(hidden=[16, 16])\ntraining: {lr: 1e-3, epochs: 2}\nmethod: >-\n  Rank1()\n",
        "contenders:\n- label: a\n  method: Rank1\n  training: &t {kl_weight: 0.5}\n"
        "- label: b\n  method: EMP\n  training: {<<: *t, lr: 0.1}\nseeds: [0, 0x1F, 1_000, 1:30]\n",
        "data_options: {target: y, columns: !!set {a, b}, when: 2001-12-14t21:59:43.10-05:00}\ndraws: !!int '4'\n",
    ]
    return [text.encode() for text in texts]


def read_configuration(data: bytes, folder: Path) -> object:
    """``read_config`` as a run and as a comparison; what is read can be written and read again."""
    path = folder / "config.yaml"
    path.write_bytes(data)
    found = None
    for kind in (RunConfig, CompareConfig):
        try:
            found = read_config(kind, path)
        except ConfigError:
            continue
        # Methods are written with all their options; == fails for NaN, which is not equal to itself.
        written = found.to_dict()
        if repr(from_dict(kind, written).to_dict()) != repr(written) or not dataclasses.is_dataclass(found):
            raise AssertionError("a configuration does not survive being written")
    return found


def csv_seeds() -> list[bytes]:
    """Tables for classification and regression, with quotes, other separators and words."""
    rows = "".join(f"{i},{i * 0.5},{'ab'[i % 2]}\n" for i in range(12))
    return [
        f"x,z,y\n{rows}".encode(),
        b"\xef\xbb\xbfx;y\r\n1;2\r\n3;4\r\n5;7,5\r\n",
        b'"x",y\n"1",0\n"2 ",1\n 3,0\n4,1\n5,1\n6,0\n',
        b"x\ty\n1e3\ttrue\nNA\tfalse\n-1\ttrue\n",
        b"y|x\n" + b"".join(b"%d|%d\n" % (i * 100, i) for i in range(30)),
    ]


def read_csv(data: bytes, folder: Path) -> object:
    """``load_table`` for both tasks and the reader of inputs, with the columns that are there."""
    path = folder / "table.csv"
    path.write_bytes(data)
    result = None
    for task in (None, "classification", "regression"):
        try:
            result = load_table(path, target="y", task=task)  # type: ignore[arg-type]
        except DataError:
            continue
    return result


def npz_seeds() -> list[bytes]:
    """Images, tables and classes by name, stored and compressed."""
    images = (np.arange(6 * 3 * 4 * 4) % 251).astype(np.uint8).reshape(6, 3, 4, 4)
    table = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    contents = [
        _npz(np.savez, inputs=images, targets=labels[:6]),
        _npz(np.savez_compressed, inputs=images[:, 0], targets=labels[:6], classes=np.array(["a", "b", "c"])),
        _npz(np.savez, inputs=table.astype(np.float64), targets=table[:, :1]),
        _npz(np.savez, inputs=table, targets=labels, test_inputs=table[:2], test_targets=labels[:2]),
        _npz(np.savez, inputs=table.astype(">f8"), targets=np.asfortranarray(table[:, :2])),
    ]
    return [FILE + content for content in contents] + [SIGNED + _members(content) for content in contents]


def _members(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return BETWEEN.join(name.encode() + b"\0" + archive.read(name) for name in archive.namelist())


def _packed(data: bytes) -> bytes:
    """An archive of these members, each with the checksum that fits it: its headers are read, whatever they say."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # two of one name
        for part in data.split(BETWEEN)[:10]:
            name, _, content = part.partition(b"\0")
            archive.writestr(name.decode("ascii", "replace") or "_", content)
    return file.getvalue()


def _npz(write: Callable[..., None], **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    write(buffer, **arrays)
    return buffer.getvalue()


def read_npz_file(data: bytes, folder: Path) -> object:
    """``load_npz`` on a file."""
    path = folder / "data.npz"
    path.write_bytes(_packed(data[1:]) if data[:1] == SIGNED else data[1:])
    return load_npz(path)


TARGETS: dict[str, Target] = {
    "checkpoint": Target(
        checkpoint_seeds, read_checkpoint, (checkpoint.CheckpointError,),
        ('"components"', '"layers"', '"options"', "[" * 50, "{}", "null", "-1", "1e999", "99999999", '"__metadata__"',
         '"DeepEnsemble"', '"prior"', '"family"', "NaN", '"F64"', '"F4"', '"shape"', '"data_offsets"'),
    ),
    "config": Target(
        config_seeds, read_configuration, (ConfigError, SpecError),
        ("!!python/object:os.system", "&a ", "*a", "<<: ", "!!int ", "!!float ", "!!binary ", "!!timestamp ", "1:1:1.5",
         "Rank1(", "Normal(", "training:\n  ", "contenders:\n- ", "~", ".inf", ".nan", "0x" + "F" * 50, "[" * 50),
    ),
    "csv": Target(
        csv_seeds, read_csv, (DataError,),
        ('"', ",", ";", "\t", "|", "\r", "\n", "nan", "inf", "1e400", "9" * 5000, "\u2028", "\x85", "y", "true", "1_0",
         "\u0663"),
    ),
    "npz": Target(
        npz_seeds, read_npz_file, (DataError,),
        ("'shape': (", "'descr': '", "|O", "<f16", "<M8[s]", "<U999999999", "99999999999", "True", "PK\x03\x04",
         "PK\x01\x02", "\x93NUMPY"),
    ),
}  # fmt: skip
