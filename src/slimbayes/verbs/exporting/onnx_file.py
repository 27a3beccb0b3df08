"""A frozen model as an ONNX file with its own description, compared with PyTorch before it is left anywhere."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from slimbayes.core.rows import FlatInputs
from slimbayes.extras import need
from slimbayes.files import parse_json, read_whole, shortened, write_whole
from slimbayes.verbs.exporting.programs import (
    FORMAT,
    Dynamic,
    ExportError,
    argument_names,
    describe,
    example_inputs,
    to_program,
)
from slimbayes.verbs.freezing.network import Frozen

KEY = "slimbayes"  # of the description among the file's metadata
TOLERANCE = 1e-5
LARGEST = 2**31 - 1  # bytes of one file: a limit of the format
_FILE = "an ONNX file"  # what needs the packages


def to_onnx(
    frozen: Frozen,
    example: Any,
    path: str | os.PathLike[str],
    metadata: dict[str, Any] | None = None,
    check: bool = True,
    tolerance: float = TOLERANCE,
    dynamic_batch: bool = True,
    dynamic: Dynamic | None = None,
    program: Any = None,
) -> Path:
    """Write the frozen model as ONNX, for any batch, and return the path. The file appears whole or not at all.

    With ``check`` onnxruntime runs it on the example and on two other batch sizes first, and where an output is further
    than ``tolerance`` (relative to the largest output, if that is above one) from PyTorch's, nothing is written.
    ``metadata`` is kept in the file, beside the methods, draws, seed and versions: see ``read_metadata``. ``dynamic``
    as in ``to_program``, whose result for this model ``program`` is, if it is at hand.
    """
    onnx = _onnx()
    flat = example_inputs(frozen, example)
    description = json.dumps(describe(frozen, metadata))
    if program is None:
        program = to_program(frozen, example, dynamic_batch, dynamic)
    names = _input_names(frozen, flat)
    outputs = len(pytree.tree_leaves(_run(frozen, flat)))
    output_names = ["draws"] if outputs == 1 else [f"draws_{i}" for i in range(outputs)]
    with _quiet():
        made = torch.onnx.export(
            program, (), dynamo=True, input_names=names, output_names=output_names, verbose=False
        )
        assert made is not None
        proto = made.model_proto
    _without_remarks(proto)
    onnx.helper.set_model_props(proto, {KEY: description})
    if proto.ByteSize() > LARGEST:
        raise ExportError(
            f"the model has {proto.ByteSize() / 2**30:.1f} GiB, and an ONNX file holds at most 2: freeze fewer draws, "
            f"or use sb.export.to_program"
        )
    content = proto.SerializeToString()
    if check:
        compare(frozen, OnnxModel(content), flat, tolerance, dynamic_batch)
    return write_whole(path, content)


def compare(
    frozen: Frozen, exported: OnnxModel, flat: FlatInputs, tolerance: float, other_batches: bool = True
) -> float:
    """The largest difference between an ONNX model and the frozen one; an error where it is above ``tolerance``."""
    worst = 0.0
    for batch in (flat.batch, 1, flat.batch + 2) if other_batches else (flat.batch,):
        given = flat if batch == flat.batch else flat.map_tiled(functools.partial(_cycled, batch), batch)
        found = exported.run([leaf for leaf in given.leaves if isinstance(leaf, Tensor)])
        expected = [leaf for leaf in pytree.tree_leaves(_run(frozen, given)) if isinstance(leaf, Tensor)]
        for i, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            if mine.shape != theirs.shape:
                raise ExportError(
                    f"the exported model's output {i} has shape {list(theirs.shape)} for a batch of {batch}, PyTorch's "
                    f"{list(mine.shape)}; nothing was written"
                )
            if mine.numel() == 0:
                continue
            scale = max(1.0, float(mine.double().abs().max()))
            error = float((mine.double() - theirs.double()).abs().max()) / scale
            if not error <= tolerance:
                raise ExportError(
                    f"the exported model's output {i} is {error:.1e} from PyTorch's for a batch of {batch}, more than "
                    f"tolerance={tolerance}; nothing was written"
                )
            worst = max(worst, error)
    return worst


class OnnxModel:
    """An exported model run by onnxruntime: call it with the inputs, and it returns the draws.

    ``metadata`` is what the file says of it; an empty dict where slimbayes did not write it.
    """

    def __init__(self, source: str | os.PathLike[str] | bytes, threads: int | None = None) -> None:
        onnxruntime = need("onnxruntime", _FILE, "export")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        name = "the model" if isinstance(source, bytes) else repr(str(source))
        # The bytes, not the path: a file may name others, and beside a path onnxruntime would read them.
        given = source if isinstance(source, bytes) else _content(source)
        try:
            self.session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has an exception type for every status
            raise ExportError(
                f"{name} is no ONNX model that onnxruntime can read: {shortened(error)}"
            ) from error
        self.metadata = _parsed(self.session.get_modelmeta().custom_metadata_map.get(KEY))

    def __call__(self, *inputs: Tensor) -> Any:
        """The draws, a tensor; a tuple where the network has several outputs."""
        found = self.run(list(inputs))
        return found[0] if len(found) == 1 else tuple(found)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """All outputs for all tensors, in the order of the network's arguments."""
        known = self.session.get_inputs()
        if len(known) != len(inputs):
            raise ValueError(f"the model takes {len(known)} inputs, got {len(inputs)}")
        feed = {one.name: value.detach().cpu().numpy() for one, value in zip(known, inputs, strict=True)}
        return [torch.from_numpy(value) for value in self.session.run(None, feed)]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What an ONNX file that slimbayes wrote says of the model in it, without running it."""
    onnx = _onnx()
    try:
        proto = onnx.load_model(io.BytesIO(_content(path)), load_external_data=False)
    except (ExportError, FileNotFoundError):
        raise
    except Exception as error:  # protobuf's own types
        raise ExportError(f"{str(path)!r} is no ONNX model: {shortened(error)}; export it again") from error
    return _parsed(next((entry.value for entry in proto.metadata_props if entry.key == KEY), None))


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_whole(path, LARGEST)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ExportError(f"{str(path)!r} cannot be read ({error}): give an exported file") from error


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ExportError(f"the model's own description is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != 1:
        raise ExportError("the model's own description is of another format: update slimbayes")
    return found


def _without_remarks(proto: Any) -> None:
    """Take out the exporter's notes on every node: half of a small file, and the paths of this machine."""
    for graph in (proto.graph, *proto.functions):
        for entry in (graph, *graph.node, *graph.value_info):
            for field in ("metadata_props", "doc_string"):
                entry.ClearField(field)
    for entry in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        entry.ClearField("metadata_props")
        entry.ClearField("doc_string")


def _run(frozen: Frozen, flat: FlatInputs) -> Any:
    args, kwargs = flat.tile(1)
    with torch.no_grad():
        return frozen(*args, **kwargs)


def _cycled(batch: int, leaf: Tensor) -> Tensor:
    """So many rows, the given ones over and over."""
    return leaf[torch.arange(batch, device=leaf.device) % leaf.shape[0]]


def _input_names(frozen: Frozen, flat: FlatInputs) -> list[str]:
    """One for every tensor among the inputs, after the network's arguments."""
    args, kwargs = pytree.tree_unflatten(flat.leaves, flat.spec)
    own = argument_names(frozen, len(args), list(kwargs))
    return [
        each
        for name, value in zip(own, (*args, *kwargs.values()), strict=True)
        for each in _numbered(name, value)
    ]


def _numbered(name: str, value: Any) -> list[str]:
    count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


def _onnx() -> Any:
    onnx = need("onnx", _FILE, "export")  # first: onnxscript imports it, and would be named in its place
    need("onnxscript", _FILE, "export")  # torch's exporter imports it
    return onnx


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on packages that it would use if they were there."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
