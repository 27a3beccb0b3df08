"""Settings for every test process."""

import os
import sys
import zlib
from collections import Counter

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


# A test whose lines are counted takes twice as long: Python traces those of torch and its compiler, too. Those marked
# "uncounted" are not, but for every so many of their cases; they run all the same, and the coverage can only come out
# too low.
UNCOUNTED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items):
    numbers = Counter()
    for item in items:
        mark, name = item.get_closest_marker("uncounted"), item.nodeid.split("[")[0]
        if mark is not None:
            every = mark.kwargs.get("but", 0)  # other cases in other tests
            item.stash[UNCOUNTED] = not every or numbers[name] % every != zlib.crc32(name.encode()) % every
            numbers[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    trace = sys.gettrace()
    if trace is None or not item.stash.get(UNCOUNTED, False):
        return (yield)
    sys.settrace(None)  # of the test alone: its fixtures may be another's
    try:
        return (yield)
    finally:
        sys.settrace(trace)
