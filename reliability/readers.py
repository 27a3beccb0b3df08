"""Every reader of files, each with a valid file in its place and the hostile ones of its own kind."""

from __future__ import annotations

import csv
import io
import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

import slimbayes as sb
from reliability import attacks
from reliability.attacks import Payload
from slimbayes.integrations.hub import from_pretrained, save_pretrained
from slimbayes.lab.bench.results import BenchError
from slimbayes.lab.bench.results import read_results as read_bench
from slimbayes.lab.config import CompareConfig, ConfigError, RunConfig, read_config
from slimbayes.lab.data import DataError, read_inputs, stream
from slimbayes.lab.data import load as load_data
from slimbayes.lab.data.corruptions.official import load_official
from slimbayes.lab.data.images import cifar10, read_idx
from slimbayes.lab.data.records import cache
from slimbayes.lab.data.records.csvs import integers, numbers, read_pieces, seconds
from slimbayes.lab.data.records.physionet_text import read_records_text
from slimbayes.lab.experiments.results import ResultError, read_result
from slimbayes.lab.exported_runs import load_served
from slimbayes.lab.report.check import ReportError
from slimbayes.lab.report.results import read_results
from slimbayes.lab.runs import load_run, train_run
from slimbayes.sklearn import BayesianMLPClassifier
from slimbayes.training.state import read_state, write_state
from slimbayes.verbs import checkpoint
from slimbayes.verbs.exporting import ExportError
from slimbayes.verbs.method_text import SpecError

DOCUMENTED = (
    BenchError, ConfigError, DataError, ExportError, ReportError, ResultError, SpecError, checkpoint.CheckpointError,
    FileNotFoundError,
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """How a file is read: ``make`` fills a folder, ``place`` is what is replaced in it, ``read`` reads."""

    place: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    own: Callable[[Path], dict[str, Payload]] = field(default=lambda canary: {})
    none: bool = False  # a file that cannot be used counts as none, and is made anew


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))


def _save(path: Path) -> None:
    sb.save(sb.bayesianize(_network(), sb.Rank1(components=2)), path)


def signed(changes: dict[str, Any], method: sb.Method | None = None) -> bytes:
    """A checkpoint with these entries in its header and a checksum that fits."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        sb.save(sb.bayesianize(_network(), method or sb.Rank1(components=2)), path)
        content = path.read_bytes()
        tensors, metadata = checkpoint.read_tensors(path)
    assert content
    header = {**json.loads(metadata[checkpoint.HEADER]), **changes}
    header["sha256"] = checkpoint._digest(header, tensors)
    return bytes(checkpoint.serialize(tensors, metadata={checkpoint.HEADER: json.dumps(header)}))


def _claims(canary: Path) -> dict[str, Payload]:
    """Checkpoints without a damaged bit, that name what they do not hold."""
    found: dict[str, Payload] = dict(attacks.tensors(canary))
    for name, option in (
        ("Rank1", "components"),
        ("DeepEnsemble", "members"),
        ("KTied", "rank"),
        ("EMP", "components"),
    ):
        method = getattr(sb, name)()
        for value in (100_000, 10**9, 10**30, -1, 0, "a", None, [1], {"family": "os.system"}, True, 1e300):
            entry = {"name": name, "options": {option: value}}
            found[f"{name} of {option}={value!r}"[:60]] = signed({"methods": [entry]}, method)
    for name, changes in {
        "a method of another module": {"methods": [{"name": "os.system", "options": {}}]},
        "methods of text": {"methods": "Rank1"},
        "a layer of a list": {"layers": [["0", [0]]]},
        "layers that are not there": {"layers": {"../../etc": 0}},
        "aliases in a circle": {"aliases": {"a": "b", "b": "a"}},
        "a base of numbers": {"base": {"0.weight": 7}, "frozen": []},
        "dropouts of lists": {"dropouts": [[1]]},
        "options of markup": {"methods": [{"name": "Rank1", "options": {attacks.EVIL: attacks.EVIL}}]},
    }.items():
        found[name] = signed(changes)
    return found


def _adapter(folder: Path) -> None:
    torch.manual_seed(0)
    sb.save(sb.adapt(_network(), sb.Rank1(components=2)), folder / "net.safetensors", adapter_only=True)


def _load_adapter(folder: Path) -> object:
    torch.manual_seed(0)
    return sb.load(_network(), folder / "net.safetensors")


def _run(folder: Path) -> None:
    config = RunConfig(network="dense(hidden=[4])", method="Rank1(components=2)",
                       training=sb.Training(epochs=1, steps=1, batch_size=8))  # fmt: skip
    train_run(config, folder, progress=False)


def _facts(canary: Path) -> dict[str, Payload]:
    """run.json with networks, shapes and classes of any size."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder))
        document = json.loads((Path(folder) / "run.json").read_text())
    found: dict[str, Payload] = {}

    def add(name: str, part: str, **changes: Any) -> None:
        found[name] = json.dumps({**document, part: {**document[part], **changes}}).encode()

    for network in ("dense(hidden=[1000000000])", "wrn(depth=10000000006, width=1)", "wrn(depth=16, width=100000000)",
                    "lstm(words=10000000000)", "os:system", "dense(hidden=[" + "4," * 100_000 + "])",
                    "dense(hidden=[True])", "__import__('os').system('x')", "dense(hidden=[-1])",
                    "a" * 100_000):  # fmt: skip
        add(f"network {network[:40]}", "config", network=network)
    add("a method of 10^9", "config", method="DeepEnsemble(members=1000000000)")
    add("a shape of 10^9", "facts", shape=[1, 10**9, 10**9])
    add("a shape of text", "facts", shape="abc")
    add("classes of markup", "facts", classes=[attacks.EVIL] * 10)
    add("10^6 classes", "facts", classes=["a"] * 1_000_000)
    add("a scaling of NaN", "facts", scaling={"mean": [float("nan")], "std": [0.0], "unit": 1.0})
    add("a precision of code", "config", training={"precision": "os.system"})
    found["facts of a list"] = json.dumps({**document, "facts": []}).encode()
    return found


def _fitted(folder: Path) -> None:
    rows = np.linspace(-1, 1, 24).reshape(12, 2)
    BayesianMLPClassifier(hidden_layer_sizes=(4,), epochs=1).fit(rows, np.arange(12) % 2).save(
        folder / "model"
    )


def _estimators(canary: Path) -> dict[str, Payload]:
    import tempfile

    from slimbayes.sklearn import saving

    with tempfile.TemporaryDirectory() as folder:
        _fitted(Path(folder))
        tensors, metadata = checkpoint.read_tensors(Path(folder) / "model")
    header = json.loads(metadata[saving.HEADER])
    found = attacks.tensors(canary)
    parameters, facts, classes = header["parameters"], header["facts"], header["classes"]
    for name, changes in {
        "hidden layers of 10^9": {"parameters": {**parameters, "hidden_layer_sizes": [10**9]}},
        "rows of 10^12": {"facts": {**facts, "_row_shape": [10**12]}},
        "a device of code": {"parameters": {**parameters, "device": "os.system"}},
        "an unknown parameter": {"parameters": {**parameters, "__class__": "x"}},
        "classes of 4 GB": {"classes": {**classes, "dtype": "<U1000000000"}},
        "classes of structures": {"classes": {**classes, "dtype": "V1000000000"}},
        "a type of torch": {"dtype": "load"},
        "another estimator": {"estimator": "os.system"},
        "an estimator of a list": {"estimator": [1]},
        "classes of 10^6": {"classes": {"labels": list(range(1_000_000)), "dtype": "<i8"}},
    }.items():
        changed = {key: value for key, value in {**header, **changes}.items() if key != "sha256"}
        changed["sha256"] = saving._digest(json.dumps(changed), tensors)
        found[name] = bytes(saving.serialize(tensors, metadata={saving.HEADER: json.dumps(changed)}))
    return found


def _configs(canary: Path) -> dict[str, Payload]:
    laughs = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
        for a, b in zip("abcdefghijkl", "bcdefghijklm", strict=True)
    )
    merges = "contenders:\n- &a {x1: 1, x2: 2}\n" + "".join(
        f"- &{b} {{<<: [{', '.join([f'*{a}'] * 90)}]}}\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
    )
    texts = {
        "billion laughs": laughs + "training: *m\n",
        "billion laughs in contenders": laughs.replace("a: &a", "contenders: &a") + "data: *m\n",
        "merges of merges": merges,
        "a circle": "training: &a {b: *a}\n",
        "a circle of lists": "contenders: &a [*a]\n",
        "sixtieths": "draws: " + ":".join(["59"] * 300_000) + "\n",
        "sixtieths with a point": "draws: " + ":".join(["59"] * 400) + ".5\n",
        "hexadecimal of 10^6": "draws: 0x" + "F" * 900_000 + "\n",
        "10^5 digits": "draws: " + "9" * 100_000 + "\n",
        "object/new": f"data: !!python/object/new:subprocess.Popen [[touch, {canary}]]\n",
        "module": "data: !!python/module:os\n",
        "name": "data: !!python/name:os.system\n",
        "a method of code": f"method: __import__('os').system('touch {canary}')\n",
        "a network of code": "network: os:system\n",
        "a lambda": "method: (lambda: 1)()\n",
        "a method of 10^5 brackets": f"method: {'(' * 100_000}\n",
        "a method of 10^5 minus": f"method: Rank1({'-' * 5_000}1)\n",
        "nested mappings": "".join(" " * i + f"a{i}:\n" for i in range(700)),
        "a set": "training: !!set {a, b}\n",
        "binary": "data: !!binary =\n",
        "a time without a time": "data: !!timestamp x\n",
        "a bool that is none": "data: !!bool x\n",
        "an int that is none": "draws: !!int ''\n",
        "several documents": "data: a\n---\ndata: b\n",
        "markup": yaml.safe_dump(
            {"contenders": [{"label": attacks.EVIL.replace("\0", ""), "method": "Rank1"}]}
        ),
        "2 MB": "# " + "x" * (2 << 20) + "\n",
    }
    return {name: text.encode() for name, text in texts.items()}


def _table(folder: Path) -> None:
    rows = "".join(f"{i},{i * 0.5},{'ab'[i % 2]}\n" for i in range(12))
    (folder / "data.csv").write_text(f"x,z,y\n{rows}")


def _tables(canary: Path) -> dict[str, Payload]:
    rows = b"1,2,a\n3,4,b\n5,6,a\n7,8,b\n"
    return {
        "10^6 columns": b"x," * 1_000_000 + b"y\n" + rows,
        "10^5 names once": b",".join(b"c%d" % i for i in range(200_000)) + b"\n1\n",
        "formulas": f'x,"{attacks.EVIL[:30]}",y\n'.encode() + rows,
        "a class of formulas": b"x,y\n1,=1+1\n2,@SUM(A1)\n3,=1+1\n4,@SUM(A1)\n",
        "10^5 digits": b"x,y\n" + b"9" * 100_000 + b",1\n2,0\n3,1\n4,0\n",
        "a label of 10^5 digits": b"x,y\n1," + b"9" * 100_000 + b"\n2,0\n3,1\n4,0\n",
        "a quote that stays open": b'x,y\n"' + b"1,2\n" * 100_000,
        "zeros inside": b"x,y\n1,\x00\n2,1\n",
        "UTF-16": "x,y\n1,2\n".encode("utf-16"),
        "a cell of 10 MB": b"x,y\n1," + b"a" * (10 << 20) + b"\n",
        "infinity": b"x,y\ninf,1\n2,0\n3,1\n4,0\n",
    }


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": np.arange(8.0), "y": list("abababab")}), folder / "data.parquet")


def _parquets(canary: Path) -> dict[str, Payload]:
    import pyarrow
    from pyarrow import parquet

    def written(table: Any, **options: Any) -> bytes:
        file = io.BytesIO()
        parquet.write_table(table, file, **options)
        return file.getvalue()

    small = written(pyarrow.table({"x": np.arange(8.0), "y": list("abababab")}))
    many = pyarrow.table({f"c{i}": pyarrow.array(np.zeros(5_000_000)) for i in range(8)})
    nested = pyarrow.table({"x": [[[1.0]]] * 4, "y": list("abab")})
    found: dict[str, Payload] = {
        "40 million zeros": written(many, compression="zstd"),
        "lists of lists": written(nested),
        "names of markup": written(pyarrow.table({attacks.EVIL: [1.0] * 4, "y": list("abab")})),
        "integers beyond float": written(
            pyarrow.table({"x": pyarrow.array([10**37] * 4, pyarrow.decimal128(38)), "y": list("abab")})
        ),
        "times": written(
            pyarrow.table({"x": pyarrow.array([2**62] * 4, pyarrow.timestamp("ns")), "y": list("abab")})
        ),
        "a footer of 2 GB": small[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "a pickled type": written(_pickled_type(canary)),
    }
    source = np.random.default_rng(0)
    for number in range(40):
        damaged = bytearray(small)
        for place in source.integers(4, len(small) - 4, 4):
            damaged[place] = source.integers(256)
        found[f"damaged {number}"] = bytes(damaged)
    return found


def _pickled_type(canary: Path) -> Any:
    """A column of the type that old versions of pyarrow unpickled."""
    import pyarrow

    metadata = {"ARROW:extension:name": "arrow.py_extension_type",
                "ARROW:extension:metadata": pickle.dumps(attacks.Canary(canary), 0)}  # fmt: skip
    column = pyarrow.field("x", pyarrow.float64(), metadata=metadata)
    return pyarrow.table(
        [pyarrow.array([1.0] * 4), pyarrow.array(list("abab"))],
        schema=pyarrow.schema([column, ("y", pyarrow.string())]),
    )


def picture(width: int = 5, height: int = 4, kind: str = "PNG") -> bytes:
    """A small image, or a large one of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 9, 9)).save(file, kind)
    return file.getvalue()


def _images(canary: Path) -> dict[str, Payload]:
    from PIL import Image

    claim = bytearray(picture())
    claim[16:24] = struct.pack(">2I", 60_000, 60_000)
    grey = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(grey, "PNG")
    eps = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n(%pipe%touch {canary}) (w) file\n%%EOF\n"
    return {
        "60,000 x 60,000 claimed": bytes(claim),
        "30,000 x 30,000 of one colour": grey.getvalue(),
        "PostScript": eps.encode(),
        "SVG": f'<svg xmlns="http://www.w3.org/2000/svg" onload="{attacks.EVIL[:20]}"/>'.encode(),
        "GIF": b"GIF89a" + struct.pack("<2H", 65535, 65535) + bytes(100),
        "TIFF": b"II*\0\x08\0\0\0\xff\xff" + bytes(1000),
        "an icon": b"\0\0\1\0\xff\xff" + bytes(1000),
        "cut short": picture()[:-30],
    }


def _tree(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(3):
            (folder / name / f"{number}.png").write_bytes(picture())


def _shards(folder: Path) -> None:
    content = attacks.tar(
        *((f"{k}.{end}", raw, {}) for k in range(4) for end, raw in (("png", picture()), ("cls", b"1")))
    )
    for part in ("train", "val"):
        (folder / f"{part}-0.tar").write_bytes(content)
    (folder / "classes.txt").write_text("a\nb\n")


def _stream(folder: Path) -> object:
    data = stream(folder, size=4)
    return [data.train[row] for row in range(len(data.train))]


def _physionet(folder: Path) -> None:
    for name in "ab":
        (folder / f"set-{name}").mkdir()
        (folder / f"set-{name}" / "1.txt").write_text("Time,Parameter,Value\n00:00,RecordID,1\n00:07,HR,70\n")
        (folder / f"Outcomes-{name}.txt").write_text("RecordID,In-hospital_death\n1,0\n")


def _records(canary: Path) -> dict[str, Payload]:
    head = b"Time,Parameter,Value\n00:00,RecordID,1\n"
    return {
        "10^5 digits": head + b"9" * 100_000 + b":00,HR,1\n",
        "a late hour": head + b"99999999999999999999:00,HR,1\n",
        "infinity": head + b"00:01,RecordID,inf\n",
        "NaN": head + b"00:01,RecordID,nan\n",
        "markup": head + f"00:01,{attacks.EVIL[:40]},1\n".encode(),
    }


def _mimic(folder: Path) -> None:
    import gzip

    text = io.StringIO()
    csv.writer(text).writerows([("ID", "VALUE", "TIME"), ("1", "2.5", "2101-10-20 19:08:00")])
    (folder / "T.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))


def _mimic_rows(folder: Path) -> object:
    path = folder / "T.csv.gz"
    pieces = read_pieces(path, ("ID", "VALUE", "TIME"))
    return [
        (integers(path, "ID", p["ID"]), numbers(path, "VALUE", p["VALUE"]), seconds(path, "TIME", p["TIME"]))
        for p in pieces
    ]


def _mimics(canary: Path) -> dict[str, Payload]:
    import gzip

    head = b"ID,VALUE,TIME\n"
    return {
        "a line of 3 GB": attacks.gzip_zeros(attacks.BOMB, head),
        "10^5 digits": gzip.compress(head + b"9" * 100_000 + b",1,2101-10-20\n"),
        "no time": gzip.compress(head + b"1,1,99999-99-99\n"),
        "not unpacked": gzip.compress(head * 1000)[:-20],
    }


def _cifar(folder: Path) -> None:
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    batch = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (place / name).write_bytes(pickle.dumps(batch, 2))


def _cifars(canary: Path) -> dict[str, Payload]:
    class Set:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (f"open({str(canary)!r}, 'w')",)

    array = np.zeros((2, 3072), np.uint8)
    return {
        "exec": pickle.dumps(Set(), 2),
        "exec among labels": pickle.dumps({b"data": array, b"labels": [Set(), Set()]}, 2),
        "a global of builtins": b"c__builtin__\neval\n(S'1'\ntR.",
        "a global by dots": b"\x80\x04\x8c\x05numpy\x94\x8c\x0cdtype.__init__\x94\x93\x94.",
        "an extension": b"\x80\x02\x82\x01.",
        "a memo of 2^31": b"\x80\x02]r\xff\xff\xff\x7f.",
        "a list of itself": b"\x80\x02]q\x00h\x00a.",
        "10^5 lists": b"(" * 100_000 + b"l" * 100_000 + b".",
        "labels of text": pickle.dumps({b"data": array, b"labels": ["a", "b"]}, 2),
        "labels of 10^30": pickle.dumps({b"data": array, b"labels": [10**30, 1]}, 2),
        "objects": pickle.dumps({b"data": np.array([{}, {}], object), b"labels": [0, 1]}, 2),
    }


def _gz(folder: Path) -> None:
    import gzip

    (folder / "t.gz").write_bytes(gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 3) + bytes(18)))


def _npz(folder: Path) -> None:
    np.savez(folder / "data.npz", inputs=np.arange(16.0).reshape(8, 2), targets=np.arange(8) % 2)


def _onnx(folder: Path) -> None:
    from slimbayes.lab.exported_runs import export_run

    _run(folder / "run")
    export_run(load_run(folder / "run", device="cpu"), folder / "model.onnx", draws=2)


def _onnxes(canary: Path) -> dict[str, Payload]:
    import onnx
    from onnx import TensorProto, helper

    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "../../../../../../etc/passwd"), ("offset", "0"), ("length", "8")):
        outside.external_data.add(key=key, value=value)
    large = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 40])

    def model(weight: Any, domain: str = "") -> bytes:
        inside = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
        node = helper.make_node("Add", ["x", "w"], ["y"], domain=domain)
        end = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
        graph = helper.make_graph([node], "g", [inside], [end], [weight])
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("evil", 1)]
        )
        onnx.helper.set_model_props(made, {"slimbayes": "[" * 100_000})
        return bytes(made.SerializeToString())

    return {
        "a tensor in another file": model(outside),
        "a tensor of 2^40": model(large),
        "an operation of its own": model(helper.make_tensor("w", TensorProto.FLOAT, [2], [1, 2]), "evil"),
        "a description of brackets": model(helper.make_tensor("w", TensorProto.FLOAT, [2], [1, 2])),
    }


def _json(name: str, document: dict[str, Any]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(document))


def _corrupted(folder: Path) -> None:
    (folder / "fog.npy").write_bytes(attacks.npy("|u1", (50_000, 32, 32, 3), bytes(50_000 * 3072)))
    (folder / "labels.npy").write_bytes(attacks.npy("<i8", (10_000,), bytes(80_000)))


_RESULT = {"format": "slimbayes-results", "version": 1, "task": "regression", "methods": []}
_BENCH = {"format": "slimbayes-bench", "version": 1, "device": "cpu", "hardware": {}, "runs": [], "cells": []}
_FACTS = {"kind": "table", "shape": [2], "features": ["x", "z"]}

READERS: dict[str, Reader] = {
    "sb.load": Reader("net.safetensors", lambda f: _save(f / "net.safetensors"),
                      lambda f: sb.load(_network(), f / "net.safetensors"), _claims),
    "sb.load of an adapter": Reader("net.safetensors", _adapter, _load_adapter, attacks.tensors),
    "training state": Reader("training.safetensors",
                             lambda f: write_state(f / "training.safetensors", {"w": torch.ones(2)}, {"step": 3}),
                             lambda f: read_state(f / "training.safetensors"), attacks.tensors),
    "run folder, run.json": Reader("run.json", _run, lambda f: load_run(f, device="cpu"), _facts),
    "run folder, weights": Reader("model.safetensors", _run, lambda f: load_run(f, device="cpu"), attacks.tensors),
    "scikit-learn estimator": Reader("model", _fitted, lambda f: BayesianMLPClassifier.load(f / "model"), _estimators),
    "hub snapshot": Reader("model.safetensors",
                           lambda f: save_pretrained(sb.bayesianize(_network(), sb.Rank1(components=2)), f),
                           lambda f: from_pretrained(_network(), f), attacks.tensors),
    "configuration of a run": Reader("config.yaml", lambda f: (f / "config.yaml").write_text("data: digits\n"),
                                     lambda f: read_config(RunConfig, f / "config.yaml"), _configs),
    "configuration of a comparison": Reader("config.yaml", lambda f: (f / "config.yaml").write_text("data: digits\n"),
                                            lambda f: read_config(CompareConfig, f / "config.yaml"), _configs),
    "CSV data": Reader("data.csv", _table, lambda f: load_data(f / "data.csv", target="y"), _tables),
    "CSV inputs": Reader("data.csv", _table, lambda f: read_inputs(f / "data.csv", _FACTS), _tables),
    "npz data": Reader("data.npz", _npz, lambda f: load_data(f / "data.npz"), attacks.archives),
    "npz inputs": Reader("data.npz", _npz, lambda f: read_inputs(f / "data.npz", _FACTS), attacks.archives),
    "Parquet data": Reader("data.parquet", _parquet, lambda f: load_data(f / "data.parquet", target="y"), _parquets),
    "image folder": Reader("a/1.png", _tree, load_data, _images),
    "image inputs": Reader("1.png", lambda f: (f / "1.png").write_bytes(picture()),
                           lambda f: read_inputs(f / "1.png", {"kind": "image", "shape": [3, 4, 5]}), _images),
    "tar shards": Reader("train-0.tar", _shards, _stream, lambda canary: attacks.shards(picture())),
    "classes of tar shards": Reader("classes.txt", _shards, _stream),
    "PhysioNet records": Reader("set-a/1.txt", _physionet, read_records_text, _records),
    "PhysioNet outcomes": Reader("Outcomes-a.txt", _physionet, read_records_text),
    "MIMIC tables": Reader("T.csv.gz", _mimic, _mimic_rows, _mimics),
    "prepared records": Reader("facts.json", _json("facts.json", {}), cache.read_facts),
    "CIFAR batches": Reader("cifar-10-batches-py/data_batch_1", _cifar, cifar10, _cifars),
    "idx files": Reader("t.gz", _gz, lambda f: read_idx(f / "t.gz")),
    "CIFAR-10-C": Reader("labels.npy", _corrupted, lambda f: load_official(f, "fog", 1)),
    "results of a comparison": Reader("r.json", _json("r.json", _RESULT), lambda f: read_results(f / "r.json")),
    "results of a bench": Reader("b.json", _json("b.json", _BENCH), lambda f: read_bench(f / "b.json")),
    "results of an experiment": Reader("e.json", lambda f: _experiment(f / "e.json"),
                                       lambda f: read_result(f / "e.json")),
    "ONNX file": Reader("model.onnx", _onnx, lambda f: load_served(f / "model.onnx", threads=1), _onnxes),
}  # fmt: skip


def _experiment(path: Path) -> None:
    parts = ("tables", "curves", "maps", "checks", "deviations", "runs")
    document: dict[str, Any] = {
        "format": "slimbayes-experiment",
        "version": 1,
        "experiment": "ktied/table2",
        "scale": "desk",
    }
    document |= {part: [] for part in parts} | {"provenance": {}, "settings": {}}
    path.write_text(json.dumps(document))
