"""Standard noise that torch's generators govern."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.core.paths import ASKED, first

KINDS = ("normal", "uniform", "sign", "cauchy")


def fresh_noise(kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard noise that torch.manual_seed and torch's generator state govern.

    "normal", "uniform" in [0, 1), "sign" (±1) or "cauchy".

    >>> torch.manual_seed(0) is not None
    True
    >>> fresh_noise("sign", (2, 3), torch.float32, torch.device("cpu")).abs().sum()
    tensor(6.)
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of noise {kind!r}; use 'normal', 'uniform', 'sign' or 'cauchy'")
    made: Tensor | None = first(ASKED.noise, kind, size, dtype, device)
    return plain_noise(kind, size, dtype, device) if made is None else made


def plain_noise(kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same from torch's own generators."""
    if kind == "normal":
        return torch.randn(size, dtype=dtype, device=device)
    uniform = torch.rand(size, dtype=dtype, device=device)
    if kind == "uniform":
        return uniform
    if kind == "sign":
        return (uniform < 0.5).to(dtype).mul(2.0).sub(1.0)
    return torch.tan(torch.pi * (uniform - 0.5))


def transformed() -> bool:
    """Whether torch.func, forward-mode AD or a dispatch mode would see other than plain tensors."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
    )
