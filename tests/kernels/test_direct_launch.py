"""The direct start of a compiled kernel: what is kept, when it is found again, and when it is not used."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from slimbayes.accelerate.gpu import launch


class Kernel:
    """Stands for a kernel with arguments x, n and scale, and a constant BLOCK; counts both kinds of launch."""

    arg_names = ("x", "n", "scale", "BLOCK")

    def __init__(self, scratch: int = 0):
        self.ordinary, self.direct = [], []
        launcher = SimpleNamespace(
            launch=self._launch, global_scratch_size=scratch, profile_scratch_size=0,
            launch_cooperative_grid=False, launch_pdl=False,
        )  # fmt: skip
        self.compiled = SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 0))

    def _launch(self, *args):
        self.direct.append(args)

    def __getitem__(self, grid):
        def run(*args, **meta):
            self.ordinary.append((grid, args, meta))
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    monkeypatch.setattr(launch, "_direct", True)
    monkeypatch.setattr(launch, "_runtime", hooks)
    monkeypatch.setattr(launch, "_started", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    return hooks


def start(kernel, x, n, scale=0.5, device=0, **meta):
    launch._start(kernel, 7, device, (x, n, scale), {"BLOCK": 64, "num_warps": 4, **meta})


def test_the_second_launch_is_direct():
    kernel, x = Kernel(), torch.zeros(64)
    start(kernel, x, 32)
    assert len(kernel.ordinary) == 1 and not kernel.direct
    start(kernel, x, 48, scale=0.25)
    assert len(kernel.ordinary) == 1
    assert kernel.direct == [
        (7, 1, 1, 1000, 99, False, False, None, None, (4, 1, 0), None, None, None, x.data_ptr(), 48, 0.25, 64)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"n": 33}, {"n": 1}, {"n": 2**31}, {"x": torch.zeros(64, dtype=torch.float16)}, {"x": torch.zeros(65)[1:]},
        {"device": 1}, {"BLOCK": 32}, {"num_warps": 8}, {"scale": 1}, {"maxnreg": 64},
    ],
    ids=str,
)  # fmt: skip
def test_all_that_is_specialised_on_is_in_the_key(other):
    kernel = Kernel()
    start(kernel, torch.zeros(64), 32)
    start(kernel, **{"x": torch.zeros(64), "n": 32, **other})
    assert len(kernel.ordinary) == 2 and not kernel.direct


def test_surprises_mean_the_ordinary_launch(as_on_a_gpu):
    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(2):
        start(kernel, x, None)  # neither a number nor a tensor
    assert len(kernel.ordinary) == 2
    start(kernel, x, 32)
    as_on_a_gpu.launch_enter_hook.calls.append(print)  # a profiler
    start(kernel, x, 32)
    assert len(kernel.ordinary) == 4 and not kernel.direct
    as_on_a_gpu.launch_enter_hook.calls.clear()
    launch._started[next(iter(launch._started))]._launch = None  # another launcher than expected
    start(kernel, x, 32)
    assert len(kernel.ordinary) == 5 and not launch._direct


def test_scratch_memory_is_left_to_triton():
    kernel, x = Kernel(scratch=128), torch.zeros(64)
    for _ in range(2):
        start(kernel, x, 32)
    assert len(kernel.ordinary) == 2 and not kernel.direct


@pytest.fixture
def prepared(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(launch, "place", lambda tensor: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return kernel, launch.Prepared(kernel, 7, (32, 2), {"BLOCK": 64})


def test_a_prepared_kernel_hands_over_addresses(prepared):
    kernel, run = prepared
    kernel.arg_names = ("x", "n", "m", "BLOCK")
    x, y = torch.zeros(64), torch.zeros(64)
    run(x)
    run(y)
    assert len(kernel.ordinary) == 1
    head = (7, 1, 1, 1000, 99, False, False, None, None, (4, 1, 0), None, None, None)
    assert kernel.direct == [(*head, y.data_ptr(), 32, 2, 64)]
    for _ in range(2):
        run(torch.zeros(65)[1:])  # no multiple of 16: another program
    assert len(kernel.ordinary) == 2 and len(kernel.direct) == 2


def test_a_prepared_kernel_is_watched_recorded_and_refused(prepared, as_on_a_gpu, monkeypatch):
    kernel, run = prepared
    x = torch.zeros(64)
    for _ in range(2):
        run(x)
    assert len(kernel.ordinary) == 1 and len(kernel.direct) == 1
    as_on_a_gpu.launch_enter_hook.calls.append(print)  # a profiler
    run(x)
    assert len(kernel.ordinary) == 2
    as_on_a_gpu.launch_enter_hook.calls.clear()
    monkeypatch.setattr(launch.RECORDER, "calls", [])
    run(x)
    assert (
        launch.RECORDER.calls == [(kernel, (torch.float32, 32, 2), {"BLOCK": 64})]
        and len(kernel.ordinary) == 2
    )
    monkeypatch.setattr(launch.RECORDER, "calls", None)
    run._runs = {0: (None, *run._runs[0][1:])}  # another launcher than expected
    run(x)
    assert len(kernel.ordinary) == 3 and not launch._direct
    run(x)
    assert len(kernel.ordinary) == 4 and len(kernel.direct) == 1


def test_a_prepared_kernel_on_another_device(prepared, monkeypatch):
    kernel, run = prepared
    entered = []
    for _ in range(2):
        run(torch.zeros(64))
    monkeypatch.setattr(launch, "place", lambda tensor: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or contextlib.nullcontext())
    run(torch.zeros(64))
    assert entered == [1] and len(kernel.ordinary) == 2  # compiled for that device too
