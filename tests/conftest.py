"""Settings for every test process."""

import os

import pytest

# Some virtual machines advertise AMX without letting processes use it, and oneDNN's bfloat16 kernels then die
# on an illegal instruction. Read by oneDNN when torch is first imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch._dynamo  # noqa: F401 - slimbayes does not import the compiler, and tests reset it


@pytest.fixture(scope="module")
def on_cpu():
    """Let "auto" choose the CPU where there is a GPU: for tests that repeat a run by hand."""
    import lightning.fabric.accelerators.cuda
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(lightning.fabric.accelerators.cuda, "num_cuda_devices", lambda: 0)
        yield
