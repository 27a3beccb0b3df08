"""The sums of several kernels' partial sums, by one launch where torch would need one for each."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import ceil_div, launch

_ROWS, _COLUMNS = 32, 32


def totals(*parts: Tensor) -> list[Tensor]:
    """Σ_i parts[i] of up to three float32 tensors [count, ...], which a kernel has filled.

    >>> totals(torch.ones(1, 2, 3))[0].shape
    torch.Size([2, 3])
    """
    if all(part.shape[0] == 1 for part in parts):
        return [part[0] for part in parts]
    from slimbayes.accelerate.gpu.programs import totals as programs

    found = [torch.empty(part.shape[1:], dtype=part.dtype, device=part.device) for part in parts]
    given = []
    blocks = 0
    for part, out in zip(parts, found, strict=True):
        given += [part, out, part.shape[0], out.numel()]
        blocks += ceil_div(out.numel(), _COLUMNS)
    for _ in range(3 - len(parts)):
        given += [parts[0], found[0], 0, 0]
    launch(programs.totals, blocks, parts[0], *given, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return found
