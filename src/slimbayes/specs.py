"""Methods and networks as text: ``Rank1(components=4, prior=Normal(0, 1))``, read without executing anything."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from slimbayes import priors
from slimbayes.files import shortened
from slimbayes.methods import METHODS, Method
from slimbayes.models.build import NETWORKS, build, default_network

_PRIORS = {
    kind.__name__: kind
    for kind in (priors.Normal, priors.Cauchy, priors.LogNormal, priors.HalfCauchy, priors.HeNormal)
}


_LONGEST = 10_000  # characters of a method or network


class SpecError(ValueError):
    """A text that names no method or network, with what would."""


def parse_method(text: str) -> Method:
    """The method that a text describes, as one would write it in Python.

    >>> parse_method("KTied(rank=3, prior=Normal(0, 0.2))")
    KTied(rank=3, prior=Normal(loc=0, scale=0.2), stddev_init=0.01, estimator='shared', biases=True)
    >>> parse_method("Rank2")
    Traceback (most recent call last):
        ...
    slimbayes.specs.SpecError: unknown method 'Rank2'; did you mean 'Rank1'? Known: Rank1, BatchEnsemble, ...
    """
    if not isinstance(text, str):
        raise SpecError(f"a method is a text such as 'Rank1(components=4)', got {text!r}")
    name, arguments, options = _call(text, "method")
    if name not in METHODS:
        raise SpecError(_unknown("method", name, METHODS))
    try:
        return METHODS[name](*arguments, **options)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:  # prior=5 has no distribution
        raise SpecError(f"{_shorten(text)}: {shortened(error)}") from error


def network_builder(text: str, allow_code: bool = True) -> Callable[[tuple[int, ...], int], nn.Module]:
    """A function of (input shape, outputs) that makes the network a text describes.

    A name of ``slimbayes.models`` with options, ``wrn(depth=16, width=4)``; ``auto``; or ``package.module:function``
    for a network of one's own, called with (shape, outputs). Only the last runs code, and only if allowed.

    >>> type(network_builder("dense(hidden=[16])")((4,), 2)).__name__
    'DenseNet'
    """
    if not isinstance(text, str):
        raise SpecError(f"a network is a text such as 'wrn(depth=16)', got {text!r}")
    if ":" in text:
        if not allow_code:
            raise SpecError(
                f"the network {text!r} is code of its own, and a saved run does not start code by itself: if you "
                f"trust it, give --network {text!r}"
            )
        return _imported(text)
    if text == "auto":
        return lambda shape, outputs: network_builder(default_network(shape))(shape, outputs)
    name, arguments, options = _call(text, "network")
    if name not in NETWORKS:
        raise SpecError(_unknown("network", name, NETWORKS) + ", auto, or package.module:function")
    if arguments:
        raise SpecError(f"{text!r}: give options by name, as in wrn(depth=16)")
    return lambda shape, outputs: build(name, shape, outputs, **options)


def _imported(text: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    module, _, function = text.partition(":")
    if os.getcwd() not in sys.path:  # as for python -m: one's own file in the folder one works in
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SpecError(f"the network {text!r} cannot be imported: {error}") from error

    def make(shape: tuple[int, ...], outputs: int) -> nn.Module:
        network = found(shape, outputs)
        if not isinstance(network, nn.Module):
            raise SpecError(f"{text!r} returned {type(network).__name__}, not a torch module")
        return network

    return make


def _call(text: str, what: str) -> tuple[str, list[Any], dict[str, Any]]:
    if len(text) > _LONGEST:
        raise SpecError(
            f"the {what} {_shorten(text)} has {len(text):,} characters: write at most {_LONGEST:,}"
        )
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id, [_value(argument) for argument in node.args], _options(node)
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise SpecError(f"the {what} {_shorten(text)} cannot be read: {str(error)[:200]}") from error
    raise SpecError(
        f"the {what} {_shorten(text)} cannot be read: write a name with options, as in Name(option=1)"
    )


def _value(node: ast.expr) -> Any:
    """A literal, or a prior such as Normal(0, 1)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PRIORS:
        return _PRIORS[node.func.id](*[_value(argument) for argument in node.args], **_options(node))
    try:
        return ast.literal_eval(node)
    except ValueError:
        known = ", ".join(_PRIORS)
        raise ValueError(f"{ast.unparse(node)} is neither a literal nor a prior ({known})") from None


def _options(call: ast.Call) -> dict[str, Any]:
    names = [keyword.arg for keyword in call.keywords]
    if None in names or len(set(names)) < len(names):
        raise ValueError("options are written by name, each once")
    return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def _unknown(what: str, name: str, known: dict[str, Any]) -> str:
    lower = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower(), lower, 1)
    hint = f" did you mean {lower[close[0]]!r}?" if close else ""
    return f"unknown {what} {_shorten(name)};{hint} Known: {', '.join(known)}"
