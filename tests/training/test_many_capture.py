"""Blocks of steps that are recorded and replayed are the same steps.

On the CPU a tape stands for the GPU's graphs: it keeps every operation with the tensors that it was given, and does
them again on the same memory. As in a graph, whatever a step took from Python stays what it was when it was recorded.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training.helpers_many import METHODS, SETTINGS, distance, networks, table

import slimbayes as sb
from slimbayes.training import StopTraining, Training
from slimbayes.training.many import fit, group, recording
from slimbayes.training.many.group import Group
from slimbayes.training.many.inputs import alike, make_members

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")


class Calls(TorchDispatchMode):
    """Keeps the operations."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result


class CpuTape:
    """What ``CudaTape`` does, on the CPU; ``recorded`` counts the graphs, ``replays`` their replays."""

    recorded = replays = 0

    def __init__(self, group):
        self.group = group

    def aside(self):
        return nullcontext()

    def record(self, work):
        """The work is done while the tape listens, and undone: a graph does nothing while it is recorded."""
        group = self.group
        state = [*group.stack.tensors().values(), group.step, group.sums, group.watch.flag, group.watch.step]
        state.append(group.watch.networks)
        state += [
            v
            for entry in group.optimizer.state.values()
            for v in entry.values()
            if isinstance(v, torch.Tensor)
        ]
        before = [tensor.detach().clone() for tensor in state]
        with Calls() as heard:
            work()
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        CpuTape.recorded += 1
        return CpuGraph(heard.calls)


class CpuGraph:
    """Operations on fixed memory."""

    def __init__(self, calls):
        self.calls = calls

    @torch.no_grad()
    def replay(self):
        CpuTape.replays += 1
        for operation, args, kwargs, first in self.calls:
            again = operation(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(first), pytree.tree_leaves(again), strict=True):
                if (
                    isinstance(old, torch.Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)


@pytest.fixture
def taped(monkeypatch):
    monkeypatch.setattr(recording, "CudaTape", CpuTape)
    monkeypatch.setattr(fit, "_check", lambda settings, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    CpuTape.recorded = CpuTape.replays = 0


OPTIONS = {
    **SETTINGS,
    "steps": 33,
    "log_every": 8,
    "likelihood": sb.Gaussian(),
    "schedule": "cosine",
    "warmup": 2.0,
}


def trained(models, data, **options):
    copies = copy.deepcopy(models)
    return copies, sb.fit_many(copies, data, seeds=range(len(models)), **{**OPTIONS, **options})


@pytest.mark.uncounted(but=2)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", ["MCDropout", "EMP learned", "DeepEnsemble"])
def test_replayed_blocks_are_the_same_steps(name, optimizer, traced, taped, monkeypatch):
    monkeypatch.setattr(group, "TRACED_FROM", 0 if traced else 10**9)
    models, data = networks(METHODS[name], 2), [table(i) for i in range(2)]
    more = {"optimizer": optimizer, "clip_norm": 1.0}
    plain, result = trained(models, data, **more)
    replayed, again = trained(models, data, capture=True, **more)
    # After 3 steps in eager code come 5 single ones to the first row, three blocks of 8, and the last step.
    assert (CpuTape.recorded, CpuTape.replays) == (2, 5 + 3 + 1)
    assert distance(replayed, plain) < 1e-7  # rates are float32 on the device
    for row, other in zip(again.histories[1], result.histories[1], strict=True):
        assert row == pytest.approx(other, rel=1e-6)


@pytest.mark.uncounted(but=5)
@pytest.mark.parametrize("name", ["ECMP", "Rank1", "Rank1 by steps", "MeanField local", "KTied"])
def test_replayed_blocks_of_other_methods(name, taped):
    models, data = networks(METHODS[name], 2), [table(i) for i in range(2)]
    plain, _ = trained(models, data)
    replayed, _ = trained(models, data, capture=True)
    assert CpuTape.replays > 0 and distance(replayed, plain) < 1e-7


def test_replayed_groups_over_chunks_of_epochs(taped, monkeypatch):
    """Groups of other lengths beside each other; the order of the rows is made again every few epochs."""
    monkeypatch.setattr(group, "_CHUNK_STEPS", 7)
    models = [*networks(METHODS["MCDropout"], 2), *networks(METHODS["EMP"], 1)]
    data = [table(0), table(1), table(2, rows=41)]
    plain, result = trained(models, data, steps=None, epochs=9)
    monkeypatch.setattr(group, "_CHUNK_STEPS", 2048)
    whole, _ = trained(models, data, steps=None, epochs=9)
    assert distance(whole, plain) == 0
    monkeypatch.setattr(group, "_CHUNK_STEPS", 7)
    replayed, again = trained(models, data, steps=None, epochs=9, capture=True)
    assert result.steps == again.steps == [27, 27, 54] and distance(replayed, plain) < 1e-7


def test_a_replayed_loss_that_is_not_finite_is_found(taped):
    x, y = table(0)
    y = y.clone()
    y[11] = 1e200
    rows = torch.cat([sb.data.files.permutation(23, 0, "batches.order", epoch)[:18] for epoch in range(11)])
    step = int((rows == 11).nonzero()[0]) // 6 + 1
    with pytest.raises(sb.TrainingError, match=f"network 0 is not finite at step {step}:"):
        trained(networks(sb.Deterministic(), 1), (x, y), capture=True)


def test_a_recorded_run_is_stopped_and_taken_up_again(taped, tmp_path):
    models, data = networks(METHODS["MCDropout"], 2), [table(i) for i in range(2)]

    def stop(step, rows):
        if step == 16:
            raise StopTraining("now")

    whole, _ = trained(models, data, capture=True)
    with pytest.raises(StopTraining):
        trained(models, data, capture=True, folder=tmp_path, callback=stop)
    again, _ = trained(models, data, capture=True, folder=tmp_path)
    assert distance(again, whole) < 1e-12


def test_blocks_of_any_length_are_the_same_steps():
    settings = Training(**{k: v for k, v in OPTIONS.items() if k not in ("progress", "likelihood")})

    def group(lengths):
        models = networks(METHODS["MCDropout"], 2)
        members = make_members(models, table(0), sb.Gaussian(), [1, 2], settings, CPU)
        made = Group(alike(members)[0], settings, CPU)
        made.prepare()
        for length in lengths:
            made.advance(length)
        return made

    one, other = group([1] * 9), group([4, 5])
    for name, value in one.stack.tensors().items():
        assert torch.allclose(value, other.stack.tensors()[name], rtol=0, atol=1e-14)
    assert torch.allclose(one.sums, other.sums) and int(one.step) == int(other.step) == 9


def compiled_case():
    models = networks(sb.ECMP(components=2, patch=("norm",)), 2)
    return models, [table(i) for i in range(2)]


@pytest.mark.uncounted
def test_compiled_steps_are_the_same_steps(monkeypatch):
    """The step by the compiler; running statistics of the norms included. Few steps are not compiled."""
    made = []
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: made.append(args) or real(*args, **options)
    )
    models, data = compiled_case()
    plain, _ = trained(models, data, compile=True)
    assert not made
    monkeypatch.setattr(group, "COMPILED_FROM", {"cpu": 0})
    compiled, _ = trained(models, data, compile=True)
    assert len(made) == 1 and distance(compiled, plain) < 1e-10
    assert int(compiled[0][0].num_batches_tracked) == 33


@pytest.mark.uncounted
def test_compiled_noise_is_the_same_noise():
    from slimbayes.core.context import Request
    from slimbayes.training.many.noise import NoisePlan
    from slimbayes.training.many.tracing import compiled_noise

    kinds = ("normal", "uniform", "sign", "cauchy")
    requests = [Request(kind, f"layer{i}", i, (1, 2, 3, 5), torch.float32) for i, kind in enumerate(kinds)]
    plan = NoisePlan(requests, [3, 4], CPU)
    steps = torch.tensor([5, 6, 7])
    plain, made = plan.make(steps), compiled_noise(plan, steps)(steps)
    for name, value in plain.items():
        assert torch.allclose(made[name], value, rtol=1e-4, atol=1e-5)


# Recorded steps read the rate as float32: this one is the same there, so that no rounding is left to grow.
EXACT = {"accelerator": "cuda", "lr": 2**-8, "schedule": "constant", "warmup": 0.0}


@cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu_captured_steps_are_those_of_eager_code(name, compiled, monkeypatch):
    monkeypatch.setattr(group, "COMPILED_FROM", {"cuda": 0})
    models, data = networks(METHODS[name], 2), [table(i) for i in range(2)]
    options = {**EXACT, "steps": 60, "log_every": 20}
    plain, _ = trained(models, data, **options)
    captured, _ = trained(models, data, capture=True, compile=compiled, **options)
    assert distance(captured, plain) < 1e-6
    on_cpu, _ = trained(models, data, **{**options, "accelerator": "cpu"})
    assert distance(plain, on_cpu) < 1e-6


@cuda
def test_on_a_gpu_groups_run_beside_each_other():
    models = [*networks(METHODS["ECMP"], 3), *networks(METHODS["MCDropout"], 2)]
    models += [
        sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double(), sb.Rank1())
    ]
    data = [table(i, rows=23 if i < 3 else 41) for i in range(6)]
    options = {**EXACT, "steps": None, "epochs": 40, "log_every": 25}
    plain, result = trained(models, data, **options)
    captured, again = trained(models, data, capture=True, **options)
    assert distance(captured, plain) < 1e-6 and again.steps == result.steps
    assert next(captured[0].parameters()).device.type == "cpu"
