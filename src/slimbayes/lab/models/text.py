"""Networks as text: ``wrn(depth=16, width=4)``, or ``package.module:function`` for one of one's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from torch import nn

from slimbayes.lab.models.build import NETWORKS, build, default_network
from slimbayes.verbs.method_text import SpecError, named_call, unknown_name


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
    name, arguments, options = named_call(text, "network")
    if name not in NETWORKS:
        raise SpecError(unknown_name("network", name, NETWORKS) + ", auto, or package.module:function")
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
