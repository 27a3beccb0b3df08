"""What a path asks of the moment: whether it may run what compilers, traces and transforms of functions do not see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimbayes.core.noise import transformed

_BATCHED = torch._C._dispatch_key_parse("Batched")


def eager() -> bool:
    """Whether an autograd function may run: no compiler, no transform of functions, no dual numbers."""
    return not torch.compiler.is_compiling() and not transformed()


def by_pointers() -> bool:
    """Whether code that torch does not see may fill memory: torch.jit.trace would keep it as it was before."""
    return eager() and torch._C._get_tracing_state() is None


def dense_float(*tensors: Tensor) -> bool:
    """Whether all are torch's own tensors in float32 on the CPU, as the kernels in C take them."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or type(tensor) not in (Tensor, nn.Parameter):
            return False
    return True


def further(*grads: Tensor | None) -> bool:
    """Whether a backward pass must use plain operations: it is differentiated itself, or gradients stand for many."""
    if torch.is_grad_enabled() or transformed():
        return True
    for grad in grads:
        if grad is not None and (type(grad) is not Tensor or torch._C._dispatch_keys(grad).has(_BATCHED)):
            return True  # a vectorised Jacobian's
    return False
