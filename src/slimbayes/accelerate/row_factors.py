"""Factors on rows, x ∘ s: one GPU kernel each way, and in compiled code a call that ``compile`` finds in its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate import switches
from slimbayes.accelerate.situation import eager
from slimbayes.core.context import Frame
from slimbayes.core.paths import FastPath


class RowFactors(FastPath):
    """Scaling in one sweep, and its gradients in few."""

    def on(self) -> bool:
        """By ``rows``."""
        return switches.paths.rows

    def scaled(self, x: Tensor, factor: Tensor, axis: int, frame: Frame, private: bool) -> Tensor | None:
        """x ∘ f for rows x [R, C, ...] and a factor [K, S, B or 1, C]."""
        if (
            torch.compiler.is_compiling()
        ):  # broadcast over many axes, a traced batch gets strides that no view knows
            rows = row_vectors(factor.to(x.dtype), frame, x.shape[0])
            return (
                row_product(x, rows) if axis == 1 else x * rows.view(rows.shape[0], *[1] * (x.dim() - 2), -1)
            )
        if axis != 1 or not (on_gpu(x) and switches.paths.triton and eager() and 3 <= x.dim() <= 5):
            return None
        kernel = cuda_kernel()
        if kernel is None:
            return None
        lines = lined(factor, frame) and factor.is_contiguous()
        made: Tensor = kernel(x, factor if lines else row_vectors(factor, frame, x.shape[0]))
        return made


def on_gpu(x: Tensor) -> bool:
    """Whether the rows are where the GPU kernels run."""
    return x.is_cuda


def row_product(x: Tensor, factor: Tensor) -> Tensor:
    """x ∘ f for x [R, C, ...] and f [R, C]: a function that ``compile.graph_patterns`` finds in a graph."""
    return x * factor.reshape(factor.shape + (1,) * (x.dim() - 2))


def row_vectors(factor: Tensor, frame: Frame, rows: int) -> Tensor:
    """A factor [K, S, B or 1, C] as [rows, C].

    A gradient of [rows, C] is summed over the positions of a row first and over the batch afterwards.
    """
    channels = factor.shape[-1]
    groups = factor.expand(frame.components, frame.samples, -1, channels).flatten(0, 2)  # [G, C]
    if rows == groups.shape[0]:
        return groups
    return groups[:, None].expand(-1, rows // groups.shape[0], -1).flatten(0, 1)  # [R, C]


def lined(factor: Tensor, frame: Frame) -> bool:
    """Whether a factor [K, S or 1, B or 1, C] has one line for each of equal, consecutive parts of the rows."""
    components, samples, examples = factor.shape[:3]
    if components != frame.components:
        return False
    if examples == 1:
        return samples == 1 or samples == frame.samples
    return examples == frame.batch and samples == frame.samples


def cuda_kernel() -> Any:
    """The GPU kernel of ``scaled``, or None where it cannot be had."""
    try:
        from slimbayes.accelerate.gpu.rows import scale_rows
    except ImportError:
        return None
    return scale_rows
