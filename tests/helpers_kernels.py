"""Where the kernel tests run: on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimbayes.accelerate.gpu import available
from slimbayes.accelerate.gpu.launch import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not available(DEVICE), reason="Triton kernels need a GPU, or Triton with TRITON_INTERPRET=1"
)


def _repair_interpreter() -> None:
    """Triton 3.6's interpreter calls int() on arrays of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter  # type: ignore[import-not-found]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED and available(DEVICE):
    _repair_interpreter()
