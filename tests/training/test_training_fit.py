"""``sb.fit`` against loops written by hand: losses, rates, decay, clipping, logs, and every kind of data."""

import copy
import csv
import io
import math
import random
import re
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes.lab.data import Batches, Split
from slimbayes.training import Training, TrainingError, make_source, mixed_seed
from slimbayes.training import monitor as monitoring
from slimbayes.training.monitor import Progress

pytestmark = pytest.mark.usefixtures("on_cpu")

QUIET = {"progress": False, "log_every": 1}


def data(count=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator).to(dtype)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def build(method=None, outputs=2):
    torch.manual_seed(1)
    return sb.bayesianize(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)), method or sb.Deterministic()
    )


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


# Losses and steps ------------------------------------------------------------------------------------------


@pytest.mark.oldest
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "method", [sb.Rank1.paper(components=3), sb.KTied.paper(rank=1)], ids=["rank1", "ktied"]
)
def test_the_whole_run_by_hand(method, every):
    """Noise is seeded by (seed, 1, step, rank), so a loop of a few lines gives the same weights and losses."""
    x, y = data()
    options = dict(epochs=3, batch_size=9, lr=0.02, weight_decay=0.1, kl_weight=0.5, samples=2, seed=5)
    model = build(method)
    result = sb.fit(model, (x, y), **options, progress=False, log_every=every)

    hand = build(method).train()
    optimizer = Training(**options).make_optimizer(hand)
    batches = Batches(Split(x, y), 9, seed=5, drop_last=True)
    rows, step = [], 0
    assert len(batches) == 4  # the last short batch is left out
    for epoch in range(3):
        for inputs, targets in batches.epoch(epoch):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + math.cos(math.pi * step / 12))
            torch.manual_seed(mixed_seed(5, 1, step, 0))
            optimizer.zero_grad()
            outputs = sb.draw(hand, inputs, samples=2)
            nll = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.repeat(len(outputs)))
            divergence = sb.kl(hand)
            weight = 0.5 * min(1.0, (step + 1) / (0.8 * 12))
            loss = nll + weight * divergence / 40
            loss.backward()
            optimizer.step()
            rows.append(
                (
                    loss.item(),
                    nll.item(),
                    divergence.item(),
                    weight,
                    0.01 * (1 + math.cos(math.pi * step / 12)),
                )
            )
            step += 1
    assert_same(weights(model), weights(hand), rtol=1e-5, atol=1e-6)
    # A row every so many steps and at the end of an epoch, with the means since the row before.
    ends = [step for step in range(1, 13) if step % every == 0 or step % 4 == 0]
    assert [row["step"] for row in result.history] == ends
    assert [row["epoch"] for row in result.history] == [round(step / 4, 4) for step in ends]
    for row, first, last in zip(result.history, [0, *ends], ends, strict=False):
        means = [sum(values) / (last - first) for values in zip(*rows[first:last], strict=True)]
        assert [row[key] for key in ("loss", "nll", "kl")] == pytest.approx(means[:3], rel=1e-5)
        assert [row[key] for key in ("kl_weight", "lr")] == pytest.approx(rows[last - 1][3:], rel=1e-9)
        if every == 1:
            assert row["loss"] == pytest.approx(row["nll"] + row["kl_weight"] * row["kl"] / 40, rel=1e-6)


def test_deterministic_equals_plain_torch():
    x, y = data(48)
    model = build()
    sb.fit(model, (x, y), epochs=2, batch_size=16, lr=0.1, schedule="constant", optimizer="sgd", **QUIET)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    batches = Batches(Split(x, y), 16, seed=0)
    for epoch in range(2):
        for inputs, targets in batches.epoch(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(inputs), targets).backward()
            optimizer.step()
    assert_same(weights(model), weights(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_l2_is_the_gradient_of_its_sum_of_squares(kind):
    """One step in float64: the loss nll + l2 · Σw² over the decayed parameters, written out."""
    x, y = data()
    l2, method = 0.05, sb.Rank1.paper(components=2)
    model = build(method)
    options = dict(
        optimizer=kind, lr=0.1, l2=l2, momentum=0.0, kl_weight=0.0, noise="mean", schedule="constant"
    )
    sb.fit(model, (x, y), steps=1, batch_size=40, precision="64-true", **options, **QUIET)

    hand = build(method).double().train()
    groups = {group["name"]: group["params"] for group in sb.parameter_groups(hand, 0.1, 0.0)}
    assert set(groups) == {"decayed", "factors"}
    order = Batches(Split(x, y), 40, seed=0).order(0)
    outputs = sb.draw(hand, x[order].double(), noise="mean")
    nll = nn.functional.cross_entropy(outputs.flatten(0, 1), y[order].repeat(2))
    (nll + l2 * sum(p.square().sum() for p in groups["decayed"])).backward()
    with torch.no_grad():
        for p in hand.parameters():
            if p.grad is None:
                continue
            step = p.grad if kind == "sgd" else p.grad / (p.grad.abs() + 1e-8)  # Adam's first step
            p -= 0.1 * step
    assert next(model.parameters()).dtype is torch.float64
    assert_same(weights(model), weights(hand), rtol=1e-9, atol=1e-9)


def test_clipping_is_torchs():
    x, y = data()
    options = dict(
        steps=1, batch_size=40, optimizer="sgd", momentum=0.0, lr=1.0, schedule="constant", **QUIET
    )
    free, clipped, hand = build(), build(), build()
    sb.fit(free, (x, y), **options)
    sb.fit(clipped, (x, y), clip_norm=0.01, **options)
    order = Batches(Split(x, y), 40, seed=0).order(0)
    nn.functional.cross_entropy(hand(x[order]), y[order]).backward()
    assert nn.utils.clip_grad_norm_(hand.parameters(), 0.01) > 0.02
    with torch.no_grad():
        for parameter in hand.parameters():
            parameter -= parameter.grad
    assert_same(weights(clipped), weights(hand), rtol=1e-5, atol=1e-7)
    start = weights(build())
    moved = math.sqrt(sum(((clipped.state_dict()[k] - v) ** 2).sum().item() for k, v in start.items()))
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert not torch.allclose(free[0].weight, clipped[0].weight, atol=1e-3)


def rates(monkeypatch, **options):
    """The optimizer's own learning rates at every step of an actual run, and the rows' ones."""
    made = []
    original = Training.make_optimizer

    def keep(self, *arguments):
        made.append(original(self, *arguments))
        return made[-1]

    monkeypatch.setattr(Training, "make_optimizer", keep)
    seen = []
    model = build(sb.Rank1.paper(components=2))

    def look(step, row):
        rates = {group["name"]: group["lr"] for group in made[-1].param_groups}
        seen.append((rates["decayed"], rates["factors"], row["lr"], row["kl_weight"]))

    sb.fit(model, data(), batch_size=20, callback=look, lr=0.5, **options, **QUIET)
    return seen


def test_papers_schedule_through_a_run(monkeypatch):
    seen = rates(
        monkeypatch, epochs=20, schedule="steps", warmup=2.0, factor_lr_multiplier=0.1, kl_annealing=0.5
    )
    assert len(seen) == 40  # 2 steps an epoch; milestones at epochs 8, 16 and 18
    for step, (shared, factors, logged, weight) in enumerate(seen):
        expected = 0.5 * min(1.0, (step + 1) / 4) * 0.2 ** ((step >= 16) + (step >= 32) + (step >= 36))
        assert shared == logged == pytest.approx(expected, rel=1e-9), step
        assert factors == pytest.approx(0.1 * expected, rel=1e-9)
        assert weight == pytest.approx(min(1.0, (step + 1) / 20))


def test_cosine_and_constant_through_a_run(monkeypatch):
    for step, (shared, *_) in enumerate(rates(monkeypatch, epochs=4, schedule="cosine")):
        assert shared == pytest.approx(0.25 * (1 + math.cos(math.pi * step / 8)))
    assert {shared for shared, *_ in rates(monkeypatch, steps=3, schedule="constant")} == {0.5}


# Precision, compilation, randomness ------------------------------------------------------------------------


def test_bfloat16_trains():
    model = build(sb.Rank1.paper(components=2))
    result = sb.fit(model, data(), epochs=10, batch_size=20, lr=0.05, precision="bf16-mixed", **QUIET)
    assert all(math.isfinite(row["loss"]) for row in result.history)
    assert result.history[-1]["nll"] < result.history[0]["nll"] - 0.1
    assert next(model.parameters()).dtype is torch.float32


@pytest.mark.uncounted
@pytest.mark.slow
def test_compiled_steps_give_the_same_losses():
    found = {}
    for compiled in (False, True):
        model = build(sb.Rank1.paper(components=2))
        result = sb.fit(
            model,
            data(),
            epochs=2,
            batch_size=20,
            noise="mean",
            lr=0.05,
            compile=compiled,
            validation=data(),
            **QUIET,
        )
        found[compiled] = [[row[k] for k in ("loss", "nll", "kl")] for row in result.history], weights(model)
    torch.testing.assert_close(
        torch.tensor(found[True][0]), torch.tensor(found[False][0]), rtol=1e-4, atol=1e-4
    )
    assert_same(found[True][1], found[False][1], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("loader", [False, True])
def test_the_callers_random_states_are_untouched(loader):
    x, y = data()
    train = DataLoader(TensorDataset(x, y), 10, shuffle=True) if loader else (x, y)
    model = build(sb.KTied.paper())
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    sb.fit(model, train, epochs=1, **QUIET)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]

    def fail(step, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sb.fit(model, train, epochs=1, callback=fail, **QUIET)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]


def test_seeds():
    found = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1), ("d", -1)):
        torch.manual_seed(sum(map(ord, name)))  # the generator's state must not matter
        model = build(sb.Rank1.paper(components=2))
        sb.fit(model, data(), epochs=2, batch_size=10, seed=seed, **QUIET)
        found[name] = weights(model)
    assert_same(found["a"], found["b"])
    for other in ("c", "d"):
        assert not torch.equal(found["a"]["0.weight"], found[other]["0.weight"])


# Kinds of data ---------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(1, 4)
        self.output = nn.Linear(4, 2)

    def forward(self, a, b):
        return self.output(torch.tanh(self.first(a) + self.second(b)))


class Pairs(torch.utils.data.Dataset):
    def __init__(self, named):
        self.named = named
        self.x, self.y = data()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        a, b = self.x[i, :2], self.x[i, 2:]
        return ({"b": b, "a": a} if self.named else (a, b)), self.y[i]


def test_models_with_two_inputs():
    """Named and positional inputs of a loader, and batches cut by hand, train to the same weights."""
    found = []
    x, y = data()
    cut = [((x[i : i + 10, :2], x[i : i + 10, 2:]), y[i : i + 10]) for i in range(0, 40, 10)]
    for source, more in (
        (DataLoader(Pairs(True), 10), {}),
        (DataLoader(Pairs(False), 10), {}),
        (cut, {"num_data": 40}),
    ):
        torch.manual_seed(0)
        model = sb.bayesianize(Two(), sb.Rank1.paper(components=2))
        result = sb.fit(model, source, epochs=2, lr=0.05, validation=source, **more, **QUIET)
        assert result.step == 8
        found.append((weights(model), [row["loss"] for row in result.history], result.best["validation_nll"]))
    for other in found[1:]:
        assert_same(found[0][0], other[0])
        assert found[0][1:] == other[1:]


def test_a_loader_shuffles_anew_every_epoch_by_the_seed():
    x, y = data()
    order = []

    class Rows(TensorDataset):
        def __getitem__(self, i):
            order.append(i)
            return super().__getitem__(i)

    for _ in range(2):
        sb.fit(build(), DataLoader(Rows(x, y), 20, shuffle=True), epochs=2, **QUIET)
    first, second, again = order[:40], order[40:80], order[80:]
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    assert again == first + second


def test_splits_data_sets_and_regression():
    wine = sb.data.load("wine")
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(13, 3), sb.Deterministic())
    result = sb.fit(model, wine, epochs=10, lr=0.05, batch_size=31, validation=wine, **QUIET)
    assert result.step == 10 * (124 // 31 if len(wine.train) == 124 else len(wine.train) // 31)
    last = result.history[-1]
    assert last["validation_accuracy"] > 0.9
    expected = sb.evaluate(model, [(wine.scaling(wine.test.inputs), wine.test.targets)])
    assert last["validation_nll"] == pytest.approx(expected["nll"], rel=1e-5)

    diabetes = sb.data.load("diabetes")
    model = sb.bayesianize(nn.Linear(10, 1), sb.Deterministic())
    result = sb.fit(model, diabetes, epochs=30, lr=0.05, batch_size=50, validation=0.2, **QUIET)
    held = result.history[-1]["validation_rmse"]
    assert 40 < held < 75  # in the targets' own units, whose deviation is 77


def test_a_learned_precision_is_trained_with_the_model():
    diabetes = sb.data.load("diabetes")
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(10, 1), sb.Deterministic())
    likelihood = sb.Gaussian(precision=1.0, learn="global")
    sb.fit(model, diabetes, epochs=60, lr=0.03, batch_size=103, likelihood=likelihood, **QUIET)
    scaled = diabetes.target_scaling(diabetes.train.targets)
    with torch.no_grad():
        error = (model(diabetes.scaling(diabetes.train.inputs)) - scaled).square().mean()
    assert float(likelihood.log_precision.detach().exp()) == pytest.approx(
        1 / float(error), rel=0.1
    )  # the optimum


@pytest.mark.parametrize("learn", ["global", "per_example", "fixed"])
def test_learned_noise_is_fitted_to_the_validation_data(learn):
    """After a long run on few rows the residuals of training are far too small."""
    torch.manual_seed(0)
    x = torch.randn(1360, 8)
    y = x[:, :1] + torch.randn(1360, 1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2 if learn == "per_example" else 1))
    sb.bayesianize(model, sb.Deterministic())
    likelihood = sb.Gaussian(precision=20.0 if learn == "fixed" else None, learn=learn)
    before = copy.deepcopy(likelihood)
    options = {"epochs": 60, "lr": 0.01, "batch_size": 60, "validate_every": 60, "progress": False}
    validation = x[60:360], y[60:360]
    sb.fit(model, (x[:60], y[:60]), validation=validation, likelihood=likelihood, **options)
    new = sb.predict(model, x[360:], likelihood=likelihood)
    share = sb.metrics.coverage(*new.interval(0.9), y[360:])
    if learn == "fixed":
        assert likelihood.precision == before.precision and share < 0.6
    else:
        narrow = copy.deepcopy(likelihood)
        narrow.log_precision.data += 1.0
        nll = [
            -sb.predict(model, x[360:], likelihood=each).log_prob(y[360:]).mean()
            for each in (likelihood, narrow)
        ]
        assert share > 0.84 and nll[0] < nll[1]


# Validation, logs, progress --------------------------------------------------------------------------------


def test_validation_by_a_split_has_the_units_of_the_data_set():
    data = sb.data.load("diabetes")
    found = []
    for validation in (data, data.test, (data.test.inputs, data.test.targets)):
        torch.manual_seed(0)
        model = sb.bayesianize(sb.models.build("dense", data.shape, 1, hidden=[8]), sb.Deterministic())
        result = sb.fit(model, data, epochs=2, batch_size=50, lr=0.01, validation=validation, progress=False)
        found.append(result.history[-1]["validation_rmse"])
    assert found[0] == found[1] == found[2] < 150


class TwoProcesses:
    global_rank, world_size, device = 1, 2, torch.device("cpu")


def test_batches_are_divided_evenly_among_processes():
    x, y = torch.arange(7.0)[:, None], torch.arange(7)
    source = make_source((x, y), Training(batch_size=8), fabric=TwoProcesses())
    (batch,) = list(source.epoch(0))
    assert len(batch[1]) == 3 and len(source) == 1  # 7 examples give one batch of 6: 3 for each
    with pytest.raises(
        ValueError, match=r"batch_size=3 cannot be divided evenly among 2 processes.*multiple of 2"
    ):
        make_source((x, y), Training(batch_size=3), fabric=TwoProcesses())


def test_validation_early_stopping_and_callbacks():
    x, y = data()
    seen = []
    model = build()
    result = sb.fit(
        model, (x, y), epochs=50, batch_size=20, lr=0.3, early_stopping=2, validate_every=2,
        validation=(x[:10], 1 - y[:10]), callback=lambda step, row: seen.append((step, row)), **QUIET,
    )  # fmt: skip
    assert result.stopped_early and result.step < 100
    assert seen == [(row["step"], row) for row in result.history]
    validated = [row for row in result.history if "validation_nll" in row]
    assert [row["step"] for row in validated] == list(range(4, result.step + 1, 4))  # every second epoch
    best = min(validated, key=lambda row: row["validation_nll"])
    assert result.best["step"] == best["step"] and validated[-3] is best
    assert not model.training
    found = sb.evaluate(model, [(x[:10], 1 - y[:10])])["nll"]
    assert found == pytest.approx(best["validation_nll"], rel=1e-6)  # the best weights are back


def test_a_fraction_holds_out_other_rows():
    x, y = data(50)
    result = sb.fit(build(), (x, y), epochs=1, batch_size=20, validation=0.2, **QUIET)
    assert result.step == 2  # 40 of 50 are left to train on
    kept, held = sb.training.hold_out((x, y), 0.2, seed=0)
    rows = {tuple(row) for row in kept.inputs.tolist()}, {tuple(row) for row in held.inputs.tolist()}
    assert len(rows[0]) == 40 and len(rows[1]) == 10 and not rows[0] & rows[1]


def test_history_on_disk_is_the_history(tmp_path):
    result = sb.fit(
        build(sb.Rank1.paper()), data(), epochs=3, batch_size=16, folder=tmp_path / "run", log_every=1, progress=False,
        validation=data(),
    )  # fmt: skip
    with open(tmp_path / "run" / "history.csv", newline="") as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert len(rows) == len(result.history) == 6
    for row, expected in zip(rows, result.history, strict=True):
        assert row == pytest.approx(expected, rel=1e-8)
    assert "validation_nll" in rows[1] and "validation_nll" not in rows[0]
    assert not list((tmp_path / "run").glob("*.partial"))


def test_tensorboard_files_hold_the_history(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = sb.fit(build(sb.Rank1.paper()), data(), epochs=2, batch_size=20, folder=tmp_path, **QUIET)
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("loss", "nll", "kl", "lr", "kl_weight"):
        found = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert [step for step, _ in found] == [1, 2, 3, 4]
        assert [v for _, v in found] == pytest.approx([row[name] for row in result.history], rel=1e-6)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_of_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in (("COLUMNS", "160"), ("LINES", "40"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    sb.fit(build(sb.Rank1.paper()), data(), epochs=2, batch_size=20, label="my run")
    text = screen.getvalue()
    assert re.search(
        r"my run .*4/4.* loss \d+\.\d{4}  nll \d\.\d{4}  kl/data \d+\.\d{4}  [\d.]+k? examples/s  0:00 left",
        text,
    ), text
    assert text.count("\n") <= text.count("\x1b[1A") + text.count("\x1b[2K") + 2  # drawn over, not scrolled


def test_lines_of_a_file_come_every_ten_seconds(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: clock[0])
    bar = Progress(steps=100, done=10, label="run")
    with bar.live():
        for done in range(11, 101):
            clock[0] += 1.0
            bar.show(done, "loss 0.5", 12_345.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9
    assert lines[0] == "run  step 20/100  loss 0.5  12.3k examples/s  1:20 left"
    assert lines[-1] == "run  step 100/100  loss 0.5  12.3k examples/s  0:00 left"
    assert monitoring._clock(3 * 3600 + 62) == "3:01:02"


def test_a_short_run_says_nothing(capsys):
    sb.fit(build(), data(), epochs=1)
    assert "step" not in capsys.readouterr().err


# Errors ----------------------------------------------------------------------------------------------------


def tensors_loader(**options):
    return DataLoader(TensorDataset(*data()), **options)


X, Y = data()
ERRORS = {
    "generator": (dict(data=((X, Y) for _ in range(1))), TypeError, "cannot train on generator.*read only once"),
    "num_data": (dict(data=[(X, Y)]), ValueError, "num_data is missing.*scales the KL"),
    "small num_data": (dict(data=[(X, Y)], num_data=3), ValueError, "num_data=3 is smaller than the batch of 40"),
    "empty": (dict(data=(X[:0], Y[:0])), ValueError, "the data hold no examples"),
    "no full batch": (dict(data=tensors_loader(batch_size=64, drop_last=True)), ValueError, "hold no batch: check"),
    "triples": (dict(data=[(X, Y, Y)], num_data=40), TypeError, r"batch 0 is a tuple of 3: batches are pairs"),
    "lists": (dict(data=[(X, [1])], num_data=40), TypeError, "targets of batch 0 are list"),
    "lengths": (dict(data=(X, Y[:5])), ValueError, "40 inputs but 5 targets"),
    "name": (dict(data="digits"), TypeError, "cannot train on str"),
    "nothing": (dict(data=None), TypeError, "cannot train on NoneType"),
    "labels": (dict(data=(X, Y + 7)), ValueError, "target 7 is out of range for 2 classes|target 8"),
    "setting": (dict(data=(X, Y), epoch=3), ValueError, "unknown training setting 'epoch'; did you mean 'epochs'"),
    "value": (dict(data=(X, Y), epochs="3"), ValueError, "epochs must be a whole number"),
    "settings": (dict(data=(X, Y), settings={"epochs": 3}), TypeError, "settings is a .*Training, got dict"),
    "early": (dict(data=(X, Y), early_stopping=2), ValueError, "early_stopping needs validation data"),
    "decay": (dict(data=(X, Y), optimizer="sgd", weight_decay=1e-4), ValueError, "l2=5e-05"),
    "resume": (dict(data=(X, Y), resume=True), ValueError, "resume=True needs the folder"),
    "fraction": (dict(data=(X, Y), validation=1.5), ValueError, "validation=1.5: give a fraction between 0 and 1"),
    "nothing held": (dict(data=(X, Y), validation=0.001), ValueError, "leaves nothing on one side"),
    "held of a list": (dict(data=[(X, Y)], num_data=40, validation=0.1), TypeError, "pass validation data"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case):
    options, kind, message = ERRORS[case]
    options = dict(options)
    model = build()
    before = weights(model)
    with pytest.raises(kind, match=message):
        sb.fit(model, options.pop("data"), options.pop("settings", None), progress=False, **options)
    assert_same(weights(model), before)


def test_a_plain_network_is_refused():
    with pytest.raises(ValueError, match=r"has not been converted; call sb.bayesianize"):
        sb.fit(nn.Linear(3, 2), data())


def test_an_iterable_that_ends_early_is_named():
    class Short:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([data()])

    with pytest.raises(ValueError, match="ended after 1 batches, and 3 were expected"):
        sb.fit(build(), Short(), num_data=40, progress=False)


def test_settings_and_overrides_together():
    """An override is judged together with the settings it changes, not with the defaults."""
    settings = Training(optimizer="sgd", epochs=1, batch_size=40)
    assert sb.fit(build(), data(), settings, l2=1e-4, **QUIET).step == 1


@pytest.mark.oldest
@pytest.mark.parametrize("clip", [None, 1e30])
def test_a_run_that_diverges_names_the_step(tmp_path, clip):
    x, y = data()
    build = lambda: sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), sb.Deterministic())  # noqa: E731
    options = dict(epochs=3, batch_size=20, optimizer="sgd", lr=1e30, schedule="constant", clip_norm=clip)
    with pytest.raises(
        TrainingError, match=r"not finite at step [23] .*lower lr=1e\+30, set clip_norm.*nothing was"
    ):
        sb.fit(build(), (x, y), **options, **QUIET)
    with pytest.raises(TrainingError, match=r"the last state in .* is whole"):
        sb.fit(build(), (x, y), folder=tmp_path, **options, **QUIET)


def test_a_loss_beyond_floats_names_the_step():
    """Finite outputs whose square is infinite: found in the loss, not in the outputs."""
    x, _ = data()
    model = build(outputs=1)
    with pytest.raises(TrainingError, match=r"not finite at step 1 \(loss inf, nll inf, KL 0.0\)"):
        sb.fit(
            model, (x, torch.full((40, 1), 1e30)), likelihood=sb.Gaussian(), epochs=1, clip_norm=1.0, **QUIET
        )


@pytest.mark.parametrize(
    "method",
    [
        sb.DeepEnsemble(members=2),
        sb.EMP.paper(components=2, patch=(nn.Conv2d,)),
        sb.Rank1.paper(components=2),
        sb.KTied.paper(),
        sb.MeanField.paper(),
    ],
    ids=lambda method: type(method).__name__,
)
def test_convolutions_of_every_kind_train_in_channels_last(method):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 8, 8, generator=generator), torch.arange(16) % 2
    found = []
    for layout in (True, False):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        model = sb.bayesianize(network, method)
        options = dict(epochs=2, batch_size=8, lr=0.01, noise="mean", progress=False, channels_last=layout)
        found.append([row["loss"] for row in sb.fit(model, (x, y), log_every=1, **options).history])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
