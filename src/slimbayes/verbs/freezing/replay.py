"""A layer of which nothing but its forward pass is known, frozen: it runs as it is, and its noise is made once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.context import Draw, Late, Request, Supply, activate
from slimbayes.verbs.freezing.layers import FrozenLayer, kept_noise
from slimbayes.verbs.freezing.network import CALL


class _Untiled(Late):
    """Every layer is handed the rows of one draw."""

    def untiled(self, layer: str, rows: int) -> bool:
        """Always."""
        return True

    def result(self, output: Any) -> Any:
        """As it is."""
        return output


class Replay(FrozenLayer, Supply):
    """A converted layer in a draw of its own: noise as ``sb.draw`` makes it from the seed, the same in every call."""

    def __init__(self, layer: nn.Module, seed: int, components: int, samples: int) -> None:
        super().__init__()
        self.layer = layer.eval()
        self.seed, self.components, self.samples = seed, components, samples

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the layer returns for the rows of all draws."""
        call = CALL.get()
        assert call is not None  # that of the frozen model
        if call.draw is None:
            call.draw = Draw(self.components, self.samples, call.batch, "shared")
        # What one call of the network has sampled is known to all its layers; each keeps its own noise.
        own = replace(call.draw, seed=self, late=_Untiled() if self.repeats > 1 else None)
        with activate(own):
            return self.layer(*inputs, **named)

    def noise(self, request: Request, device: torch.device) -> Tensor:
        """Standard noise [components, samples, 1, *shape]."""
        if request.size[2] != 1:
            raise ValueError(
                f"the noise {request.source!r} is drawn for every example under noise='shared', so that a draw is no "
                f"fixed function: ask sample and frame.noise_like with per_example=frame.noise == 'example'"
            )
        return kept_noise(self, request, device).to(device, request.dtype)
