"""Fitted estimators in one safetensors file: tensors and JSON, so that loading executes no code."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as serialize
from torch import Tensor

from slimbayes.core.methods import Method
from slimbayes.files import FALSE_CLAIMS, parse_json, shortened, write_whole
from slimbayes.sklearn.parameters import dtype_of
from slimbayes.sklearn.scaling import Standardization
from slimbayes.verbs.checkpoint import CheckpointError, load, read_tensors, save
from slimbayes.verbs.method_text import SpecError, full_text, parse_method, parse_stored
from slimbayes.verbs.untrusted_files import check_network, shapes_of

FORMAT = 1
HEADER = "slimbayes.sklearn"
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_SCALINGS = ("scaling_", "target_scaling_")
_FACTS = ("n_features_in_", "n_outputs_", "n_iter_", "weight_seen_", "loss_curve_", "validation_curve_",
          "_seed", "_row_shape", "_target_shape")  # fmt: skip


def write(estimator: Any, path: str | os.PathLike[str]) -> None:
    """The fitted estimator in one file, whole or not at all."""
    dtype = str(dtype_of(estimator.model_)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(
            f"a network of {dtype} numbers cannot be saved: use one of {', '.join(_DTYPES)}, such as network.float()"
        )
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "network"
        save(estimator.model_, network)
        tensors = {"network": torch.frombuffer(bytearray(network.read_bytes()), dtype=torch.uint8)}
    for name in _SCALINGS:
        if hasattr(estimator, name):
            found = getattr(estimator, name)
            tensors |= {
                f"{name}.mean": torch.as_tensor(found.mean),
                f"{name}.scale": torch.as_tensor(found.scale),
            }
    for name, value in estimator.likelihood_.state_dict().items():
        tensors[f"likelihood_.{name}"] = value.cpu()
    facts = {name: getattr(estimator, name) for name in _FACTS if hasattr(estimator, name)}
    if hasattr(estimator, "feature_names_in_"):
        facts["feature_names_in_"] = estimator.feature_names_in_.tolist()
    header = {
        "format": FORMAT,
        "estimator": type(estimator).__name__,
        "parameters": _parameters(estimator),
        "facts": facts,
        "classes": _labels(estimator),
        "dtype": dtype,
    }
    text = json.dumps(header, default=_plain)
    header["sha256"] = _digest(text, tensors)
    write_whole(path, serialize(tensors, metadata={HEADER: json.dumps(header, default=_plain)}))


def read(path: str | os.PathLike[str], kinds: Mapping[str, type], network: Any, device: Any) -> Any:
    """The estimator in a file, of one of these kinds; a network of one's own is given anew."""
    header, tensors = _contents(Path(path))
    try:
        return _restored(path, header, tensors, kinds, network, device)
    except (CheckpointError, _NetworkNeeded):
        raise
    except FALSE_CLAIMS as error:
        what = shortened(repr(error))
        raise CheckpointError(
            f"{str(path)!r} does not hold what it names, or {network!r} is another network ({what}); save it again"
        ) from error


class _NetworkNeeded(ValueError):
    """A network of one's own is to be given."""


def _restored(
    path: str | os.PathLike[str],
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    kinds: Mapping[str, type],
    network: Any,
    device: Any,
) -> Any:
    name = header["estimator"]
    if name not in kinds:
        raise CheckpointError(f"{str(path)!r} holds a {name}, and {' or '.join(kinds)} was asked for")
    parameters = {k: tuple(v) if isinstance(v, list) else v for k, v in header["parameters"].items()}
    parameters["method"] = _of_today(parameters["method"])
    if device is not None:
        parameters["device"] = device
    if "Net" in name:
        if network is None:
            raise _NetworkNeeded(
                f"{str(path)!r} holds the weights of a network of your own, not its code: pass network= to load"
            )
        parameters["network"] = network
    estimator = kinds[name](**parameters)
    for key in set(_FACTS) & set(header["facts"]):
        value = header["facts"][key]
        setattr(estimator, key, tuple(value) if key.endswith("_shape") else value)
    if "feature_names_in_" in header["facts"]:
        estimator.feature_names_in_ = np.asarray(header["facts"]["feature_names_in_"], dtype=object)
    if header["classes"] is not None:
        estimator.classes_ = _classes(header["classes"])
    for key in _SCALINGS:
        if f"{key}.mean" in tensors:
            parts = (tensors[f"{key}.{part}"].numpy() for part in ("mean", "scale"))
            setattr(estimator, key, Standardization(*parts))
    learned = {k.removeprefix("likelihood_."): v for k, v in tensors.items() if k.startswith("likelihood_.")}
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        file = Path(folder) / "network"
        file.write_bytes(tensors["network"].numpy().tobytes())
        dtype = getattr(torch, header["dtype"])
        if network is None:  # the file says how large it is: not larger than the weights that it holds
            shape, outputs = estimator._row_shape, estimator._likelihood()[1]
            check_network(lambda: estimator._network(shape, outputs, dtype), "of the file", shapes_of(file))
        estimator._restore(lambda plain: load(plain, file), dtype, learned)
    return estimator


def _classes(saved: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The labels in their type; one that takes more room than the labels themselves is none that was saved."""
    kind = np.dtype("object" if saved["dtype"] == "object" else str(saved["dtype"]))
    longest = max((len(str(label)) for label in saved["labels"]), default=0)
    if kind.kind not in "OUSbiuf" or kind.itemsize > 16 + 8 * longest:
        raise ValueError(f"classes of the type {shortened(kind)}")
    return np.asarray(saved["labels"], dtype=kind)


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"no estimator at {str(path)!r}")
    try:
        tensors, metadata = read_tensors(path)
        header = parse_json(metadata[HEADER])
        found = header.pop("sha256")
        whole = found == _digest(json.dumps(header), tensors)
        known = header["format"]
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        what = shortened(repr(error))
        raise CheckpointError(
            f"{str(path)!r} is no whole file of a saved estimator ({what}); save it again"
        ) from error
    if known != FORMAT:
        raise CheckpointError(
            f"{str(path)!r} has format {known!r}, and this version reads {FORMAT}: update slimbayes"
        )
    if not whole:
        raise CheckpointError(
            f"{str(path)!r} does not match its checksum: it was damaged or changed; save it again"
        )
    if header.get("dtype") not in _DTYPES:
        raise CheckpointError(
            f"{str(path)!r} has numbers of type {shortened(header.get('dtype'))!r}, and this version reads "
            f"{', '.join(_DTYPES)}"
        )
    return header, tensors


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parameters(estimator: Any) -> dict[str, Any]:
    values = estimator.get_params(deep=False)
    values.pop("network", None)
    values["method"] = method_text(values["method"])
    values["device"] = str(values["device"])
    if not isinstance(values["random_state"], (int, np.integer)):
        values["random_state"] = None  # a generator has no text
    return dict(values)


def method_text(method: Any) -> Any:
    """A method, or rules of methods, as text that gives it back.

    >>> import slimbayes as sb
    >>> method_text([("head", sb.BatchEnsemble())])
    [['head', 'BatchEnsemble(components=4, random_sign_init=-0.5)']]
    """
    if isinstance(method, Method):
        try:
            if parse_method(repr(method)) == method:
                return repr(method)
        except SpecError:
            pass
    elif isinstance(method, str):
        return full_text(method)
    elif all(selector is None or isinstance(selector, str) for selector, _ in method):
        return [[selector, method_text(inner)] for selector, inner in method]
    raise ValueError(
        f"method={method!r} has no text, and files hold no code: use a method and selectors without functions and "
        f"types, or save the network alone with sb.save(estimator.model_, path)"
    )


def _of_today(method: Any) -> Any:
    """The text of a method with all its options, or such rules: texts of before have gaps."""
    if isinstance(method, str):
        return full_text(parse_stored(method))
    return [(selector, _of_today(inner)) for selector, inner in method]


def _labels(estimator: Any) -> dict[str, Any] | None:
    if not hasattr(estimator, "classes_"):
        return None
    labels = estimator.classes_.tolist()
    if not all(isinstance(label, (str, int, float, bool)) for label in labels):
        raise ValueError(f"classes {labels} are neither texts nor numbers and cannot be saved")
    kind = estimator.classes_.dtype
    return {"labels": labels, "dtype": "object" if kind.kind == "O" else kind.str}


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise ValueError(f"{value!r} cannot be saved: give parameters as numbers, texts and tuples of them")
