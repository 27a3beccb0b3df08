"""A run that is killed and resumed ends with the weights of one that was not, bit for bit."""

import csv
import multiprocessing
import random
import runpy
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes.training import StopTraining, TrainingError
from slimbayes.training.state import read_state, write_state

pytestmark = pytest.mark.usefixtures("on_cpu")

COMMAND = (
    "train",
    "--data",
    "digits",
    "--epochs",
    "20",
    "--validation",
    "0.1",
    "--early-stopping",
    "50",
    "--quiet",
)


# Processes that begin where the imports are done: these take longer than the training.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lightning.fabric", "slimbayes.cli", "slimbayes.training"])


def start(monkeypatch, out, *more):
    words = [
        *COMMAND,
        "--network",
        "dense(hidden=[32])",
        "-m",
        "Rank1(components=2)",
        "--out",
        str(out),
        *more,
    ]
    monkeypatch.setattr(sys, "argv", ["slimbayes", *words])  # the process gets these
    process = SERVER.Process(target=runpy.run_module, args=("slimbayes",), kwargs={"run_name": "__main__"})
    process.start()
    return process


def rows(folder):
    with open(folder / "history.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "examples_per_second"} for row in csv.DictReader(file)]


def state_step(folder):
    return (
        read_state(folder / "training.safetensors")[1]["step"]
        if (folder / "training.safetensors").exists()
        else 0
    )


@pytest.mark.slow
def test_sigkill_at_random_moments(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(monkeypatch, whole)
    generator = random.Random(time.time_ns())
    moments = []
    for _ in range(2):
        before = state_step(killed)
        victim = start(monkeypatch, killed, "--resume")
        while state_step(killed) == before and victim.is_alive():
            time.sleep(0.005)  # the program is up and has written a state of its own
        delay = generator.uniform(0, 0.5)
        time.sleep(delay)
        victim.kill()
        victim.join()
        moments.append((delay, state_step(killed)))
    process.join(120)
    assert process.exitcode == 0
    total = state_step(whole) or 360
    assert any(0 < step < total for _, step in moments), f"every kill came too late: {moments}"
    assert not (killed / "run.json").exists() or moments[-1][1] == total
    last = start(monkeypatch, killed, "--resume")
    last.join(120)
    assert last.exitcode == 0
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(), moments
    assert rows(killed) == rows(whole)
    assert not list(killed.glob("*.partial"))


class Interrupted(Exception):
    pass


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    return x, (x[:, 0] > 0).long()


def build(method=None, norm=False):
    torch.manual_seed(1)
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 2)]
    return sb.bayesianize(nn.Sequential(*layers), method or sb.Rank1(components=2))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


CASES = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "lr": 0.05, "l2": 1e-4, "schedule": "steps", "warmup": 1.0},
    "adam": {"optimizer": "adam", "l2": 1e-4, "clip_norm": 0.5},
    "mixing": {"method": sb.EMP(components=3, patch=("norm", "output"), learn_mixing=True), "norm": True},
    "ensemble": {"method": sb.DeepEnsemble(members=2), "norm": True},
    "subset": {"method": sb.Rank1(components=4, components_per_step=2)},
    "loader": {"loader": True},
}


@pytest.mark.oldest
@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop", [1, 7, 12])
def test_interrupted_anywhere(tmp_path, case, stop):
    options = dict(CASES[case])
    method, norm, loader = (
        options.pop(k, d) for k, d in (("method", None), ("norm", False), ("loader", False))
    )
    x, y = data()
    train = DataLoader(TensorDataset(x, y), 10, shuffle=True) if loader else (x, y)
    common = {
        "epochs": 4,
        "batch_size": 10,
        "progress": False,
        "checkpoint_every": 3,
        "log_every": 1,
        **options,
    }
    undisturbed = build(method, norm)
    expected = sb.fit(undisturbed, train, folder=tmp_path / "a", validation=(x, y), **common)

    def interrupt(step, row):
        if step == stop:
            raise Interrupted

    torch.manual_seed(99)  # another state of the generators must not matter
    with pytest.raises(Interrupted):
        sb.fit(
            build(method, norm), train, folder=tmp_path / "b", validation=(x, y), callback=interrupt, **common
        )
    resumed = build(method, norm)
    nn.init.zeros_(resumed[0].weight)  # nor the weights before the state is read
    again = sb.fit(resumed, train, folder=tmp_path / "b", validation=(x, y), resume=True, **common)
    if stop == 1:  # nothing had been saved: a fresh start, from the weights given
        assert again.step == expected.step
        return
    assert same(weights(resumed), weights(undisturbed))
    strip = [
        [{k: v for k, v in r.items() if k != "examples_per_second"} for r in h.history]
        for h in (again, expected)
    ]
    assert strip[0] == strip[1]


def test_a_finished_run_is_not_trained_again(tmp_path):
    model = build()
    sb.fit(model, data(), epochs=2, batch_size=10, folder=tmp_path, progress=False)
    called = []
    again = build()
    result = sb.fit(
        again,
        data(),
        epochs=2,
        batch_size=10,
        folder=tmp_path,
        resume=True,
        progress=False,
        callback=called.append,
    )
    assert result.step == 12 and not called and same(weights(again), weights(model))
    assert len(result.history) == 2


@pytest.mark.oldest
def test_early_stopping_survives_an_interruption(tmp_path):
    x, y = data()
    options = dict(
        epochs=60, batch_size=10, lr=0.3, early_stopping=3, validation=(x[:20], 1 - y[:20]), progress=False
    )
    whole = build(sb.Deterministic())
    expected = sb.fit(whole, (x, y), folder=tmp_path / "a", **options)
    assert expected.stopped_early and expected.step < 360
    best = min(expected.history, key=lambda row: row["validation_nll"])
    assert expected.best["step"] == best["step"] < expected.step

    def interrupt(step, row):
        if step == expected.step - 6:
            raise Interrupted

    with pytest.raises(Interrupted):
        sb.fit(build(sb.Deterministic()), (x, y), folder=tmp_path / "b", callback=interrupt, **options)
    resumed = build(sb.Deterministic())
    result = sb.fit(resumed, (x, y), folder=tmp_path / "b", resume=True, **options)
    assert result.stopped_early and result.step == expected.step
    assert same(weights(resumed), weights(whole))
    found = sb.evaluate(resumed, [(x[:20], 1 - y[:20])])["nll"]
    assert found == pytest.approx(best["validation_nll"], abs=1e-6)  # the best weights came back


def test_other_settings_cannot_resume(tmp_path):
    sb.fit(build(), data(), epochs=2, batch_size=10, folder=tmp_path, progress=False)
    with pytest.raises(sb.CheckpointError, match=r"lr=0\.001 \(now 0\.5\); use the same settings"):
        sb.fit(build(), data(), epochs=2, batch_size=10, lr=0.5, folder=tmp_path, resume=True, progress=False)
    x, y = data()
    with pytest.raises(sb.CheckpointError, match="num_data=60, now it is 50"):
        sb.fit(
            build(), (x[:50], y[:50]), epochs=2, batch_size=10, folder=tmp_path, resume=True, progress=False
        )


def test_the_state_of_another_network_is_refused(tmp_path):
    sb.fit(build(), data(), epochs=1, batch_size=10, folder=tmp_path, progress=False)
    cases = (
        (sb.KTied(), False, "trained with method=Rank1"),
        (None, True, "another network or method .*: use another"),
    )
    for method, norm, message in cases:
        with pytest.raises(sb.CheckpointError, match=message):
            sb.fit(
                build(method, norm),
                data(),
                epochs=1,
                batch_size=10,
                folder=tmp_path,
                resume=True,
                progress=False,
            )


def test_early_stopping_puts_a_learned_precision_back(tmp_path):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = x[:, :1]
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(3, 1), sb.Deterministic())
    likelihood = sb.Gaussian(precision=1.0, learn="global")
    seen = {}

    def remember(step, row):
        seen[step] = likelihood.log_precision.item()

    result = sb.fit(
        model, (x, y), epochs=80, batch_size=20, lr=0.2, schedule="constant", likelihood=likelihood, early_stopping=2,
        validation=(x[:20], 5 * y[:20]), progress=False, callback=remember,
    )  # fmt: skip
    assert result.stopped_early and result.best["step"] < result.step
    # Of more than these 20 rows the noise would be fitted to them.
    assert likelihood.log_precision.item() == seen[result.best["step"]] != seen[result.step]


def test_without_resume_a_folder_is_started_anew(tmp_path):
    sb.fit(build(), data(), epochs=3, batch_size=10, folder=tmp_path, progress=False)
    result = sb.fit(build(), data(), epochs=1, batch_size=10, folder=tmp_path, progress=False)
    assert result.step == 6
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 2
    assert read_state(tmp_path / "training.safetensors")[1]["step"] == 6


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign"])
def test_a_damaged_state_is_named(tmp_path, damage):
    path = tmp_path / "training.safetensors"
    write_state(path, {"w": torch.arange(100.0)}, {"step": 1})
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-7] ^= 4
    else:
        content = bytearray(b"something else")
    path.write_bytes(content)
    with pytest.raises(sb.CheckpointError, match=r"training.safetensors.*elete it to train from the start"):
        read_state(path)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    x, y = data()
    with pytest.raises((TrainingError, ValueError), match=r"not finite at step|NaN or infinite"):
        sb.fit(build(), (x * float("inf"), y), epochs=1, batch_size=10, progress=False)


@pytest.mark.parametrize("kept", [True, False])
def test_a_callback_can_stop_a_run(tmp_path, kept):
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    settings = {"epochs": 4, "batch_size": 10, "log_every": 3, "checkpoint_every": 5, "progress": False}

    def model():
        torch.manual_seed(1)
        return sb.bayesianize(nn.Linear(3, 2), sb.MeanField())

    def stop(step, row):
        if step == 8:
            raise StopTraining("enough") if kept else KeyError("a fault")

    whole = model()
    first = sb.fit(whole, (x, y), **settings)
    with pytest.raises(StopTraining if kept else KeyError):
        sb.fit(model(), (x, y), folder=tmp_path, callback=stop, **settings)
    seen = []
    again = model()
    result = sb.fit(
        again, (x, y), folder=tmp_path, resume=True, callback=lambda s, r: seen.append(s), **settings
    )
    assert seen[0] == (9 if kept else 6), "stopped: after the row; a fault: from the last state, at step 5"
    assert [row["step"] for row in result.history] == [row["step"] for row in first.history]
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_that_stops_early_between_checkpoints_leaves_its_state(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    model = sb.bayesianize(nn.Linear(3, 2), sb.Deterministic())
    settings = {"epochs": 50, "batch_size": 10, "lr": 1.0, "checkpoint_every": 10_000, "early_stopping": 1}
    result = sb.fit(model, (x, y), validation=(x, 1 - y), folder=tmp_path, progress=False, **settings)
    assert result.stopped_early and result.step < 200
    assert read_state(tmp_path / "training.safetensors")[1]["done"]


@pytest.mark.oldest
def test_a_state_from_before_a_setting_was_there_is_taken_up(tmp_path):
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    sb.fit(model, (x, y), epochs=2, batch_size=10, folder=tmp_path, progress=False)
    path = tmp_path / "training.safetensors"
    tensors, facts = read_state(path)
    for name in ("kl_every", "kl_coefficient", "capture"):
        del facts["settings"][name]
    write_state(path, tensors, facts)
    assert (
        sb.fit(model, (x, y), epochs=2, batch_size=10, folder=tmp_path, resume=True, progress=False).step == 4
    )


def test_checkpoints_every_so_many_steps_are_not_also_written_every_epoch(tmp_path, monkeypatch):
    from slimbayes.training import loop

    kept = []
    keep = loop.keep
    monkeypatch.setattr(loop, "keep", lambda run: (kept.append(run.step), keep(run)))
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    sb.fit(model, (x, y), epochs=3, batch_size=10, checkpoint_every=5, folder=tmp_path, progress=False)
    assert kept == [5, 10, 12]


def test_an_optimizer_gets_its_state_back_in_the_parameters_layout():
    from slimbayes.training.state import optimizer_tensors, restore_optimizer

    def made():
        weight = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        return weight, torch.optim.Adam([weight])

    weight, optimizer = made()
    weight.square().sum().backward()
    optimizer.step()
    tensors, scalars = optimizer_tensors(optimizer)
    flat = {name: value.contiguous().clone() for name, value in tensors.items()}  # as a file holds them
    other, restored = made()
    restore_optimizer(restored, flat, scalars)
    for name in ("exp_avg", "exp_avg_sq"):
        assert restored.state[other][name].stride() == other.stride()
        assert torch.equal(restored.state[other][name], optimizer.state[weight][name])
