"""Every method in every phase, timed in rounds; failures, load and memory."""

import json
import os
import shutil
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn

from slimbayes.lab.bench import cases, measuring, worker
from slimbayes.lab.bench.cases import Case, build
from slimbayes.lab.bench.measuring import Load, interleave, peak_bytes
from slimbayes.lab.bench.settings import HEADS, MANY, NETWORKS, REFERENCE
from slimbayes.lab.bench.worker import Job, measure

CPU = torch.device("cpu")
PAIRS = [("tiny", phase) for phase in ("train", "predict")] + [
    ("tiny-conv", phase) for phase in ("train", "predict", "small", "head", "many")
]
PAIRS += [("tiny-lstm", phase) for phase in ("train", "predict")]


@pytest.mark.parametrize("network, phase", PAIRS)
def test_every_method_runs(network, phase, monkeypatch):
    monkeypatch.setattr(cases, "MANY_DRAWS", 3)
    names = {"head": HEADS, "many": MANY}.get(phase, NETWORKS[network].methods)
    found = measure(Job("own", network, phase, "eager", names, rounds=2, seconds=0.0))
    assert [cell["method"] for cell in found] == [REFERENCE, *names]
    for cell in found:
        assert "error" not in cell, cell
        assert cell["ratio"] > 0 and cell["rounds"] >= 1 and cell["milliseconds"] > 0
        assert cell["parameters"] > 0 and cell["peak_bytes"] > 0 and cell["first_seconds"] is None
    assert found[0]["ratio"] == 1.0 and found[0]["memory_ratio"] == 1.0
    if phase == "train":
        assert {cell["rows"] for cell in found} == {NETWORKS[network].rows}


def test_rows_are_the_same_however_many_components():
    network = NETWORKS["tiny"]
    plain, rank1 = (build(name, network, "train", "eager", CPU) for name in (REFERENCE, "rank1"))
    assert (plain.held[1].shape[0], rank1.held[1].shape[0]) == (64, 16)
    assert plain.rows == rank1.rows == 64
    predicted = build("rank1", network, "predict", "eager", CPU)
    assert predicted.held[0].shape[0] == 64 // (4 * 4) and predicted.rows == 64
    points = build("batchensemble", network, "predict", "eager", CPU)
    assert points.held[0].shape[0] == 16  # its samples would be copies


def test_small_and_head_are_counted_per_pass():
    network = NETWORKS["tiny-conv"]
    assert build(REFERENCE, network, "small", "eager", CPU).units == 160
    assert build("rank1", network, "small", "eager", CPU).units == 640
    assert build("meanfield-shared", network, "small", "eager", CPU).units == 160
    head = build("rank1", network, "head", "eager", CPU)
    assert head.units == network.rows and head.rows == 100 * network.rows
    assert build(REFERENCE, network, "head", "eager", CPU).units == network.rows


def test_many_draws_are_passes_of_the_same_rows_in_bounded_memory(monkeypatch):
    network, peaks = NETWORKS["tiny-conv"], []
    for draws in (2, 20):
        monkeypatch.setattr(cases, "MANY_DRAWS", draws)
        plain, emp = (build(name, network, "many", "eager", CPU) for name in (REFERENCE, "emp"))
        assert plain.rows == emp.rows == plain.units == emp.units == draws * network.rows
        assert emp.held[0].shape == plain.held[0].shape
        emp.step()
        peaks.append(peak_bytes(emp, CPU, 0))
    assert peaks[1] <= 1.02 * peaks[0] + 4 * 2**14  # bytes: what passes choose ahead


def test_the_deterministic_network_is_plain_torch():
    model = build(REFERENCE, NETWORKS["tiny-conv"], "train", "eager", CPU).model
    assert all(type(m).__module__.startswith(("torch.", "slimbayes.lab.models.")) for m in model.modules())


def test_a_failure_is_recorded_and_stops_nothing(monkeypatch):
    right = worker.build

    def wrong(name, *rest):
        if name == "emp":
            raise torch.OutOfMemoryError("no\nmemory")
        return right(name, *rest)

    monkeypatch.setattr(worker, "build", wrong)
    job = Job("own", "tiny", "train", "eager", ("rank1", "emp", "ecmp"), rounds=1, seconds=0.0)
    found = {cell["method"]: cell for cell in measure(job)}
    assert found["emp"]["error"] == "OutOfMemoryError: no memory"
    assert all("ratio" in found[name] for name in (REFERENCE, "rank1", "ecmp"))
    monkeypatch.setattr(worker, "build", lambda *rest: 1 / 0)
    assert all("division" in cell["error"] for cell in measure(job))


def test_a_failure_during_the_rounds_is_recorded():
    def step(count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] > 3:
            raise ValueError("later")
        return torch.zeros(())

    good = Case("good", lambda: torch.zeros(()), 1, 1, nn.Identity())
    found = interleave([good, Case("bad", step, 1, 1, nn.Identity())], 4, 0.0, CPU)
    assert found.failures == {"bad": "ValueError: later"} and len(found.times["good"]) == 4


def test_values_that_are_not_finite_are_a_failure(monkeypatch):
    nan = Case("rank1", lambda: torch.tensor(float("nan")), 1, 1, nn.Identity())
    monkeypatch.setattr(worker, "build", lambda *rest: nan)
    cell = measure(Job("own", "tiny", "train", "eager", (), rounds=1, seconds=0.0))[0]
    assert "not finite" in cell["error"]


def test_rounds_end_with_the_budget():
    job = Job("own", "tiny", "train", "eager", ("rank1", "emp"), rounds=2, seconds=0.0, budget=0.0)
    assert measure(job) == []
    left = iter([1e9, 0.0, 0.0, 0.0])
    case = Case("a", lambda: torch.zeros(()), 1, 1, nn.Identity())
    found = interleave([case], 5, 0.0, CPU, time_left=lambda: next(left))
    assert len(found.times["a"]) == 1


def test_disturbed_rounds_are_dropped_and_counted(monkeypatch):
    case = Case("a", lambda: torch.zeros(()), 1, 1, nn.Identity())
    load = Load([0])
    pattern = iter([True, False, True, False, False])
    monkeypatch.setattr(load, "disturbed", lambda: next(pattern))
    found = interleave([case], 3, 0.0, CPU, load)
    assert (found.dropped, len(found.times["a"]), found.forced) == (2, 3, False)
    monkeypatch.setattr(load, "disturbed", lambda: True)
    found = interleave([case], 3, 0.0, CPU, load)
    assert (found.dropped, len(found.times["a"]), found.forced) == (6, 6, True)


def test_load_is_what_others_took(monkeypatch):
    load = Load([0, 1])
    clock = {"wall": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(load, "_busy", lambda: clock["busy"])
    monkeypatch.setattr(load, "_own", lambda: clock["own"])
    load.start()
    clock.update(wall=1.0, busy=1.9, own=1.9)
    assert not load.disturbed()
    clock.update(busy=2.0, own=1.5)
    assert load.disturbed()


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux only")
def test_load_reads_the_system():
    load = Load(sorted(os.sched_getaffinity(0)))
    load.start()
    assert load.busy > 0 and load.own > 0
    assert load.disturbed() in (True, False)


def test_peak_memory_counts_what_a_step_allocates():
    weight = nn.Parameter(torch.zeros(1000))
    model = nn.Module()
    model.weight = weight
    case = Case("a", lambda: (torch.zeros(5000) + 1).sum(), 1, 1, model)
    assert case.held_bytes() == 4000
    peak = peak_bytes(case, CPU, 0)
    assert 4000 + 2 * 20_000 <= peak <= 4000 + 2 * 20_000 + 1000


def test_optimizer_state_is_held():
    case = build(REFERENCE, NETWORKS["tiny"], "train", "eager", CPU)
    before = case.held_bytes()
    case.step()
    # gradients and two moments, with Adam's counters
    assert case.held_bytes() >= before + 3 * 4 * case.parameters


def test_compiled_functions_have_code_of_their_own():
    def function(x):
        return x

    one, two = cases.distinct(function, "a-b"), cases.distinct(function, "c")
    assert one.__code__ is not two.__code__ and one.__code__.co_name == "objective_a_b"
    assert one(3) == 3


@pytest.mark.parametrize("phase", ["train", "predict"])
def test_compiled_mode(monkeypatch, phase):
    if phase == "predict" and torch.__version__ < "2.7":
        pytest.skip("this torch cannot compile the context managers of predict; the failure is recorded")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", partial(real, backend="eager"))
    monkeypatch.setattr(worker, "warm_compiler", lambda device: None)
    monkeypatch.setattr(cases.sb, "compile", partial(real, backend="eager"), raising=False)
    found = measure(Job("own", "tiny", phase, "compiled", ("rank1", "ktied-local"), rounds=1, seconds=0.0))
    for cell in found:
        assert "error" not in cell, cell
        assert cell["first_seconds"] > 0 and cell["first_ratio"] > 0


def test_the_worker_writes_its_cells(tmp_path, monkeypatch, capsys):
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.extend(cores), raising=False)
    job = Job(
        "own", "tiny", "train", "eager", ("rank1",), threads=torch.get_num_threads(), rounds=1, seconds=0.0
    )
    (tmp_path / "job.json").write_text(job.to_json())
    worker.main(str(tmp_path / "job.json"), str(tmp_path / "result.json"))
    content = json.loads((tmp_path / "result.json").read_text())
    assert [cell["method"] for cell in content["cells"]] == [REFERENCE, "rank1"]
    assert content["where"]["versions"]["torch"] == torch.__version__
    assert len(pinned) <= job.threads
    events = [line for line in capsys.readouterr().out.splitlines() if line.startswith(worker.MARK)]
    assert any('"rank1"' in line for line in events)


@pytest.mark.uncounted
@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
@pytest.mark.skipif(
    os.environ.get("SLIMBAYES_COMPILE_ALL") != "1",
    reason="a quarter of a minute of inductor: set SLIMBAYES_COMPILE_ALL=1 (test_matrix.py has its case in every run)",
)
def test_inductor():
    import torch._dynamo
    import torch._inductor.config

    names = ("cache_size_limit", "recompile_limit", "accumulated_cache_size_limit")
    limits = {
        name: getattr(torch._dynamo.config, name) for name in names if hasattr(torch._dynamo.config, name)
    }
    with (
        torch._dynamo.config.patch(limits),
        torch._inductor.config.patch(compile_threads=1, fallback_random=False),
    ):
        found = measure(Job("own", "tiny", "train", "compiled", ("rank1",), rounds=1, seconds=0.0))
    assert all("error" not in cell and cell["first_seconds"] > 0 for cell in found), found


class FakeLinear(nn.Linear):
    """A peer's layer: extra options are swallowed, and it has what their KL functions look for."""

    def __init__(self, in_features, out_features, bias=True, **options):
        super().__init__(in_features, out_features, bias)
        self.log_variational_posterior, self.log_prior = self.weight.sum(), 0.0


class FakeConv(nn.Conv2d):
    def __init__(self, prior_mu=0, prior_sigma=0, num_estimators=0, **options):
        assert not isinstance(options["padding"], str)
        super().__init__(**options)


@pytest.fixture
def fake_peers(monkeypatch, tmp_path):
    """Packages with the names that the peers' conversions import."""

    def module(name, **content):
        made = types.ModuleType(name)
        made.__dict__.update(content)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)

    def dnn_to_bnn(network, prior):
        assert prior["type"] in ("Reparameterization", "Flipout")

    def kl(model, **options):
        return sum(parameter.square().sum() for parameter in model.parameters())

    module("bayesian_torch")
    module("bayesian_torch.models")
    module("bayesian_torch.models.dnn_to_bnn", dnn_to_bnn=dnn_to_bnn, get_kl_loss=kl)
    module("torchbnn", BayesLinear=FakeLinear, BayesConv2d=FakeConv)
    module("torchbnn.functional", bayesian_kl_loss=kl)
    module("blitz")
    module("blitz.modules", BayesianLinear=FakeLinear, BayesianConv2d=FakeConv)
    module("blitz.losses", kl_divergence_from_nn=kl)
    package = tmp_path / "torch_uncertainty"
    for folder in ("layers", "losses", "methods", "utils"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('torchvision')")
    (package / "losses" / "bayesian.py").write_text(
        "class KLDiv:\n    def __init__(self, model): self.model = model\n"
        "    def __call__(self): return sum(p.square().sum() for p in self.model.parameters()).reshape(1)\n"
    )
    (package / "methods" / "batch_ensemble.py").write_text(
        "import torch\nclass BatchEnsemble(torch.nn.Module):\n"
        "    def __init__(self, core, members, repeat_training_inputs):\n"
        "        super().__init__(); self.core, self.members = core, members\n"
        "    def forward(self, x): return self.core(torch.cat([x] * self.members))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (
        "torch_uncertainty",
        "torch_uncertainty.utils",
        "torch_uncertainty.losses",
        "torch_uncertainty.methods",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from slimbayes.lab.bench import peers

    yield peers
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_uncertainty"]:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    "network, phase", [("tiny", "train"), ("tiny-conv", "train"), ("tiny-conv", "small")]
)
def test_peers_run_beside_counterparts(fake_peers, monkeypatch, network, phase):
    layers = types.ModuleType("torch_uncertainty.layers")
    layers.BayesLinear, layers.BayesConv2d = FakeLinear, FakeConv
    layers.BatchLinear, layers.BatchConv2d = FakeLinear, FakeConv
    fake_peers._bare("torch_uncertainty")
    monkeypatch.setitem(sys.modules, "torch_uncertainty.layers", layers)
    names = (*fake_peers.FAMILIES, "meanfield-shared")
    found = measure(Job("peers", network, phase, "eager", names, rounds=1, seconds=0.0))
    for cell in found:
        assert "error" not in cell, cell
    assert [cell["method"] for cell in found] == [REFERENCE, *names]


def test_a_peer_that_is_not_installed_is_recorded(monkeypatch):
    for name in ("torchbnn", "torch_uncertainty"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if shutil.which("true") and any(
        __import__("importlib").util.find_spec(n) for n in ("torchbnn", "torch_uncertainty")
    ):
        pytest.skip("the peers are installed here")
    job = Job("peers", "tiny", "train", "eager", ("torchbnn", "torch-uncertainty"), rounds=1, seconds=0.0)
    found = {cell["method"]: cell for cell in measure(job)}
    assert "torchbnn" in found["torchbnn"]["error"] and "ratio" in found[REFERENCE]
    assert "torch_uncertainty" in found["torch-uncertainty"]["error"]
