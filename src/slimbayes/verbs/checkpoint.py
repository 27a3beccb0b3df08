"""``save`` and ``load``: one safetensors file whose JSON header says how the network was converted.

Loading never executes code: tensors are raw bytes, the header is JSON, and methods and priors are looked up
by name in closed tables.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor, nn

from slimbayes.core.conversion import ATTRIBUTE, Record, find_record, shared_out, unwrap
from slimbayes.core.convert import all_or_nothing, bayesianize
from slimbayes.core.layers.dropout import ACTIVE
from slimbayes.core.methods import METHODS, DeepEnsemble, Deterministic, MCDropout, Method
from slimbayes.core.methods.base import as_written
from slimbayes.core.priors import PRIORS, Prior
from slimbayes.core.sharded import local, one_writes, shared_as, whole
from slimbayes.files import FALSE_CLAIMS, parse_json, read_whole, shortened, write_whole
from slimbayes.verbs.adapters import base_tensors, fingerprint, other_base
from slimbayes.verbs.untrusted_files import check_members, outgrows, weightless

FORMAT = 1
HEADER = "slimbayes"
MOST_TENSORS = 100_000  # of one file: making them takes time, however small they are
Network = TypeVar("Network", bound=nn.Module)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the reason and the remedy."""


def save(model: nn.Module, path: str | os.PathLike[str], adapter_only: bool = False) -> None:
    """Write the converted model's tensors and conversion to one file, whole or not at all.

    ``adapter_only`` leaves out the frozen parameters of the network before its conversion and writes a fingerprint of
    each instead: the file holds everything new, everything trained, and buffers, which move in training. ``sb.load``
    then takes the pretrained network, and refuses one with other weights.

    Where processes share out the parameters (FSDP2, tensor parallel), all of them call this, and the first writes.

    >>> import slimbayes as sb, tempfile, os
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
    >>> sb.save(net, path)
    >>> again = sb.load(nn.Linear(3, 2), path)
    >>> bool((again.bayes.r.loc == net.bayes.r.loc).all())
    True
    """
    inner = unwrap(model)
    record: Record | None = inner.__dict__.get(ATTRIBUTE)
    if record is None:
        find_record(model)  # says that nothing was converted
        raise CheckpointError(
            "only a part of this model was converted: save that part, as sb.load takes its network"
        )
    base = base_tensors(inner) if adapter_only else {}
    tensors, aliases = _tensors(inner, base)
    header: dict[str, Any] = {
        "format": FORMAT,
        "architecture": type(inner).__name__.removeprefix("FSDP").removeprefix("Ensembled"),
        "methods": describe_methods(record),
        "layers": record.layers,
        "dropouts": record.dropouts,
        "aliases": aliases,
    }
    if adapter_only:
        header["base"] = {name: fingerprint(value) for name, value in base.items()}
        header["frozen"] = _frozen(inner, base)
    header["sha256"] = _digest(header, tensors)
    with one_writes(shared_out(inner)) as writes:
        if writes:
            write_whole(path, serialize(tensors, metadata={HEADER: json.dumps(header)}))


def load(network: Network, path: str | os.PathLike[str]) -> Network:
    """Convert the plain ``network`` as the saved one was and give it the saved weights, bit for bit.

    A network that was already converted in the same way is accepted too. An adapter (``adapter_only``) is put on the
    pretrained network it was trained on, whose parameters are frozen where they were. Returns the same network.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"load takes the plain network and a path, got {type(network).__name__} as network")
    header, tensors = _read(Path(path))
    methods = [_method_from_json(entry, path) for entry in header["methods"]]
    inner = unwrap(network)
    existing: Record | None = inner.__dict__.get(ATTRIBUTE)
    with all_or_nothing(inner):
        if existing is not None:
            _check_same(existing, header, path)
        else:
            _check_architecture(inner, header, _with_base(inner, header, tensors), path)
        _check_base(inner, header, path)
        if existing is None:
            _convert_checked(inner, methods, header, tensors, path)
        tensors = _with_base(inner, header, tensors)
        _check_tensors(inner.state_dict(), tensors, path)
        state = inner.state_dict()
        inner.load_state_dict({name: shared_as(value, state[name]) for name, value in tensors.items()})
        if "base" in header:
            for name, parameter in inner.named_parameters():
                parameter.requires_grad_(name not in header["base"] and name not in header["frozen"])
    return network


def _frozen(model: nn.Module, base: dict[str, Tensor]) -> list[str]:
    """The parameters that an adapter holds although they are not trained."""
    return [n for n, p in model.named_parameters() if not p.requires_grad and n not in base]


def _with_base(network: nn.Module, header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, with those that an adapter leaves to the network."""
    state = network.state_dict()
    return {**{name: state[name] for name in header.get("base", ()) if name in state}, **tensors}


def _check_base(network: nn.Module, header: dict[str, Any], path: str | os.PathLike[str]) -> None:
    known = header.get("base", {})
    other = other_base(network, known)
    if other:
        raise CheckpointError(
            f"{str(path)!r} is an adapter for another base than the given {type(network).__name__}: {len(other)} of "
            f"its {len(known)} frozen tensors differ in numbers, type or shape ({', '.join(other[:4])}). Load the "
            f"pretrained weights that the adapter was trained on first"
        )


def _tensors(model: nn.Module, without: Container[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state_dict with every storage once, and which names are aliases of which."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if name in without:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the state entry {name!r} is not a tensor ({type(value).__name__}); it cannot be saved"
            )
        here = local(value)
        place = (value.device, here.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        value = whole(value)
        if here.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases


def _digest(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    content = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.contiguous().reshape(-1)
        flat = flat.as_strided(
            flat.shape, (1,)
        )  # one element is contiguous with any stride, and then no bytes
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {str(path)!r}")
    try:
        tensors, metadata = read_tensors(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a whole safetensors file ({error}); it was truncated or is of another "
            f"kind. Use an earlier checkpoint"
        ) from error
    if HEADER not in metadata:
        raise CheckpointError(
            f"{str(path)!r} was not written by sb.save; load plain weights with load_state_dict"
        )
    try:
        header = parse_json(metadata[HEADER])
        known = header["format"]
        if known != FORMAT:
            raise CheckpointError(
                f"{str(path)!r} has format {known!r}, and this version reads {FORMAT}: update slimbayes"
            )
        intact = header["sha256"] == _digest(header, tensors)
        aliases = dict(header["aliases"])
        header["dropouts"] = set(header["dropouts"])
        if "base" in header:
            header.update(base=dict(header["base"]), frozen=set(header["frozen"]))
        tensors.update({name: tensors[original] for name, original in aliases.items()})
        header["layers"] = dict(header["layers"])
        if not isinstance(header["methods"], list):
            raise TypeError("its methods are no list")
        if not all(type(r) is int and 0 <= r < len(header["methods"]) for r in header["layers"].values()):
            raise ValueError("a layer names a method that is not there")
    except CheckpointError:
        raise
    except (
        AttributeError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # JSON errors are ValueErrors
        raise CheckpointError(
            f"the header of {str(path)!r} is damaged ({shortened(repr(error))}); use an earlier checkpoint"
        ) from error
    if not intact:
        raise CheckpointError(
            f"the contents of {str(path)!r} do not match their checksum: the file was damaged or changed "
            f"after it was saved. Use an earlier checkpoint"
        )
    return header, tensors


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, from one reading of it.

    safe_open opens a file twice: if another process puts a new one in its place in between, the two do not match.
    A file that cannot be read is an OSError, one that is no whole safetensors file a ValueError.
    """
    content = read_whole(path)
    names = content.count(b'"data_offsets"', 8, 8 + min(int.from_bytes(content[:8], "little"), len(content)))
    if names > MOST_TENSORS:
        raise ValueError(f"it names {names:,} tensors, more than {MOST_TENSORS:,}")
    try:
        tensors = deserialize(content)  # checks that the file is whole, header included
        size = int.from_bytes(content[:8], "little")
        return tensors, parse_json(content[8 : 8 + size].decode()).get("__metadata__") or {}
    except (SafetensorError, LookupError, RuntimeError, TypeError, OverflowError, MemoryError) as error:
        # A type of numbers that torch does not have, a shape that overflows: what is damaged can fail anywhere.
        raise ValueError(shortened(error) or type(error).__name__) from error


def describe_methods(record: Record) -> list[dict[str, Any]]:
    """The methods of a converted model with their options, as JSON has them."""
    return [_method_to_json(record, index) for index in range(len(record.methods))]


def _method_to_json(record: Record, index: int) -> dict[str, Any]:
    method = record.methods[index]
    options: dict[str, Any] = {}
    for item in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, item.name)
        if item.metadata.get("later") and value == getattr(as_written(type(method))(), item.name):
            continue
        if isinstance(value, Prior):
            value = {"family": type(value).__name__, **dataclasses.asdict(value)}  # type: ignore[call-overload]
        elif item.name == "patch" and not all(isinstance(entry, str) for entry in value):
            value = [name for name, rule in record.layers.items() if rule == index]
        elif callable(value):
            value = True  # a custom re-initialiser has done its work
        options[item.name] = value
    return {"name": type(method).__name__, "options": options}


def _method_from_json(entry: dict[str, Any], path: str | os.PathLike[str]) -> Method:
    try:
        kind = METHODS[entry["name"]]
        options = dict(entry["options"])
        for key, value in options.items():
            if isinstance(value, dict):
                fields = dict(value)
                options[key] = PRIORS[fields.pop("family")](**fields)
            elif isinstance(value, list):
                options[key] = tuple(value)
        return as_written(kind)(**options)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} names a method that this version does not know: {shortened(repr(entry))}; update slimbayes"
        ) from error


def _check_same(existing: Record, header: dict[str, Any], path: str | os.PathLike[str]) -> None:
    mine = describe_methods(existing)
    # Compare as JSON does: tuples and lists are alike there.
    if json.dumps(mine) != json.dumps(header["methods"]) or existing.layers != header["layers"]:
        names = ", ".join(entry["name"] for entry in header["methods"])
        have = ", ".join(entry["name"] for entry in mine)
        raise CheckpointError(
            f"{str(path)!r} holds a network converted by {names}, and the given network is already converted "
            f"by {have} with other options or layers; pass the plain network to sb.load"
        )


def _check_architecture(
    network: nn.Module, header: dict[str, Any], tensors: dict[str, Tensor], path: str | os.PathLike[str]
) -> None:
    modules = dict(network.named_modules())
    missing = [name for name in header["layers"] if name not in modules]
    state = network.state_dict()
    absent = [name for name in state if name not in tensors]
    wrong = [
        f"{name} {tuple(value.shape)} against {tuple(tensors[name].shape)}"
        for name, value in state.items()
        if name in tensors and value.shape not in (tensors[name].shape, tensors[name].shape[1:])
    ]
    if any(value.is_meta for value in state.values()):
        raise CheckpointError(
            f"the given {type(network).__name__} is on the meta device, which holds no numbers: give it "
            f"memory first, with network.to_empty(device=...)"
        )
    if missing or absent or wrong:
        what = (
            f"layers {missing[:4]} are not in the network" if missing
            else f"tensors {absent[:4]} are not in the checkpoint" if absent
            else f"shapes differ: {'; '.join(wrong[:4])}"
        )  # fmt: skip
        raise CheckpointError(
            f"{str(path)!r} holds another architecture ({header.get('architecture')}) than the given "
            f"{type(network).__name__}: {what}"
        )


def _check_tensors(
    expected: dict[str, Any], tensors: dict[str, Tensor], path: str | os.PathLike[str]
) -> None:
    extra = sorted(set(tensors) - set(expected))
    absent = sorted(set(expected) - set(tensors))
    wrong = [n for n in expected if n in tensors and expected[n].shape != tensors[n].shape]
    other = sorted(
        {str(tensors[n].dtype) for n in expected if n in tensors and expected[n].dtype != tensors[n].dtype}
    )
    if other:
        raise CheckpointError(
            f"{str(path)!r} holds numbers of type {', '.join(other)}, and the network's are of another type; "
            f"convert the network first, with network.to(dtype)"
        )
    if extra or absent or wrong:
        raise CheckpointError(
            f"{str(path)!r} does not fit this network: not in the network {extra[:4]}, not in the checkpoint "
            f"{absent[:4]}, of another shape {wrong[:4]}"
        )


def _convert_checked(
    network: nn.Module,
    methods: list[Method],
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    path: str | os.PathLike[str],
) -> None:
    """``_convert_like``, tried without memory first where the file names far more than it holds."""
    asked = methods, header["layers"], header["dropouts"]
    try:
        check_members(methods, header["layers"], tensors)
        if outgrows(network, methods, tensors):
            trial = weightless(network)
            _convert_like(trial, *asked)
            _check_tensors(trial.state_dict(), _with_base(trial, header, tensors), path)
        _convert_like(network, *asked)
    except CheckpointError:
        raise
    except FALSE_CLAIMS as error:
        raise CheckpointError(
            f"{str(path)!r} names a conversion that the given {type(network).__name__} does not take "
            f"({shortened(error)}): pass the network that was saved, or use an earlier checkpoint"
        ) from error


def _convert_like(
    network: nn.Module, methods: list[Method], layers: dict[str, int], dropouts: set[str]
) -> None:
    rules: list[Any] = []
    for index, method in enumerate(methods):
        names = {name for name, rule in layers.items() if rule == index}
        if not names:
            continue
        if isinstance(method, DeepEnsemble):
            method = dataclasses.replace(method, reinitialize=False)
        rules.append((None if names == {""} and isinstance(method, DeepEnsemble) else _named(names), method))
    silent = set()
    if any(isinstance(method, MCDropout) for method in methods):
        silent = {n for n, m in network.named_modules() if type(m) in ACTIVE and n not in dropouts}
    with torch.random.fork_rng(devices=[]):
        bayesianize(network, rules or [(None, Deterministic())], exclude=_named(silent) if silent else None)
    record: Record = network.__dict__[ATTRIBUTE]
    # As it was, rules that converted nothing and re-initialisers included: saved again, it is the same file.
    record.methods = tuple(methods)
    record.layers = {name: layers[name] for name in record.layers}


def _named(names: set[str]) -> Any:
    return lambda name, module: name in names
