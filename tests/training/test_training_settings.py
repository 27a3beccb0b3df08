"""Settings: schedules against hand-computed values, and every wrong value a clear ValueError."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies
from torch import nn

import slimbayes as sb
from slimbayes.training import Training
from slimbayes.training.settings import LEAST_STEPS, OPTIMIZERS


def test_steps_of_the_papers():
    """Warm-up over 1 epoch, then a fifth at epochs 100, 200 and 225 of 250."""
    training = Training(epochs=250, schedule="steps", warmup=1.0)
    per_epoch = 4
    expected = {
        0: 0.25,
        1: 0.5,
        2: 0.75,
        3: 1.0,
        4: 1.0,
        399: 1.0,
        400: 0.2,
        799: 0.2,
        800: 0.04,
        899: 0.04,
        900: 0.008,
    }
    for step, factor in expected.items():
        assert training.multiplier(step, 1000, per_epoch) == pytest.approx(factor, rel=1e-12), step


@pytest.mark.parametrize("epochs", [5, 30, 90, 250])
def test_milestones_fall_on_whole_epochs_when_shortened(epochs):
    """0.4, 0.8 and 0.9 of the run, rounded up to the next step: never one step early."""
    training = Training(epochs=epochs, schedule="steps")
    steps = epochs * 7
    found = [training.multiplier(step, steps, 7) for step in range(steps)]
    for milestone, factor in ((0.4, 0.2), (0.8, 0.04), (0.9, 0.008)):
        first = next(step for step in range(steps) if 10 * step >= round(10 * milestone) * steps)
        assert found[first] == pytest.approx(factor) and found[first - 1] > found[first] * 2


def test_cosine_and_constant():
    training = Training(schedule="cosine")
    for step in range(20):
        assert training.multiplier(step, 20, 5) == pytest.approx((1 + math.cos(math.pi * step / 20)) / 2)
    assert [Training(schedule="constant").multiplier(step, 20, 5) for step in (0, 19)] == [1.0, 1.0]


def test_annealing_of_the_kl():
    training = Training(kl_weight=0.5, kl_annealing=0.4)
    assert [training.kl_factor(step, 10) for step in range(6)] == pytest.approx(
        [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    )
    assert Training(kl_annealing=0.0).kl_factor(0, 10) == 1.0
    assert Training(kl_annealing=0.01).kl_factor(0, 10) == 1.0  # a ramp of less than a step


def test_annealing_may_begin_late():
    training = Training(kl_weight=0.5, kl_start=0.4, kl_annealing=0.8)
    assert [training.kl_factor(step, 10) for step in (0, 3, 4, 5, 7, 9)] == pytest.approx(
        [0.0, 0.0, 0.125, 0.25, 0.5, 0.5]
    )
    jump = Training(kl_start=0.5, kl_annealing=0.55)  # less than a step
    assert [jump.kl_factor(step, 10) for step in (4, 5, 9)] == [0.0, 1.0, 1.0]
    same, late = Training(kl_start=0.4), sb.LinearAnnealing(80, start=40)
    assert [same.kl_factor(step, 100) for step in range(100)] == pytest.approx(list(map(late, range(100))))
    for start in (0.8, 0.9):
        with pytest.raises(ValueError, match=rf"kl_start={start} goes with a later kl_annealing"):
            Training(kl_start=start, kl_annealing=0.8)
    with pytest.raises(ValueError, match=r"kl_start=0\.1 .* not with a kl_coefficient"):
        Training(kl_start=0.1, kl_coefficient=1e-4)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_groups(kind):
    """L2 of the papers is torch's weight_decay / 2, on shared weights alone; factors have their own rate."""
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=2))
    decay = {"weight_decay": 0.01} if kind == "adamw" else {"l2": 0.005}
    training = Training(optimizer=kind, lr=0.1, factor_lr_multiplier=3.0, momentum=0.7, **decay)
    precision = nn.Parameter(torch.zeros(()))
    optimizer = training.make_optimizer(model, [precision])
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "decayed": (0.1, 0.01),
        "factors": (pytest.approx(0.3), 0.0),
        "factors, 20 times as fast": (pytest.approx(6.0), 0.0),
        "likelihood": (0.1, 0.0),
    }
    assert type(optimizer).__name__.lower() == kind
    if kind == "sgd":
        assert groups["decayed"]["momentum"] == 0.7 and groups["decayed"]["nesterov"]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()]) + 1


def test_sgd_without_momentum_has_no_nesterov():
    model = sb.bayesianize(nn.Linear(3, 2), sb.Deterministic())
    optimizer = Training(optimizer="sgd", momentum=0.0).make_optimizer(model)
    assert not optimizer.param_groups[0]["nesterov"]


def test_round_trip():
    training = Training(epochs=3, optimizer="sgd", l2=1e-4, milestones=[0.5, 0.75], clip_norm=1.0, steps=7)
    values = training.to_dict()
    assert values["milestones"] == [0.5, 0.75]
    assert Training.from_dict(values) == training
    assert hash(Training.from_dict(values)) == hash(training)


WRONG = {
    "epochs": (0, -1, 1.5, "3", True, [3], {}),
    "steps": (0, "3", 2.0, False),
    "batch_size": (0, None, "64"),
    "optimizer": ("lion", None, 3, ["adam"]),
    "lr": (0, -0.1, "1e-3x", None, [0.1], math.nan, math.inf, True, 10**400),
    "momentum": (-0.1, "0.9"),
    "schedule": ("linear", None),
    "milestones": (0.5, "abc", None, ["a"], [None], [1.5], [[0.1]], {"a": 1}, [math.nan]),
    "decay": (-1, None),
    "warmup": (-1, "one"),
    "kl_weight": (-1, math.inf),
    "kl_annealing": (-0.1, 1.1, "x"),
    "kl_start": (-0.1, 1.1, None),
    "samples": (0, 1.0),
    "noise": ("gauss",),
    "reduction": ("sum",),
    "clip_norm": (0, -1, "x"),
    "precision": ("16", None),
    "compile": ("yes", 1, None),
    "channels_last": ("no",),
    "augment": (None, "crop"),
    "early_stopping": (0, "x"),
    "validate_every": (0,),
    "workers": (-1, None, 0.5),
    "seed": ("x", 1.5, None, 2**64, True),
    "accelerator": (3, None),
    "devices": (0, "auto"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        Training.from_dict({name: value})


def test_decay_goes_with_its_optimizer():
    with pytest.raises(ValueError, match=r"weight_decay=0.01 goes with optimizer='adamw'.*l2=0.005"):
        Training(optimizer="sgd", weight_decay=0.01)
    with pytest.raises(ValueError, match=r"l2=0.1 goes with 'sgd' and 'adam'"):
        Training(l2=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "unknown training setting 'epoch'; did you mean 'epochs'"),
        ({"zzz": 3}, "unknown training setting 'zzz'; known: epochs, steps"),
        ({3: 3}, "unknown training setting 3"),
        ({None: 3}, "unknown training setting None"),
    ],
)
def test_unknown_names(values, message):
    with pytest.raises(ValueError, match=message):
        Training.from_dict(values)


anything = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=5),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(strategies.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
NAMES = [field.name for field in dataclasses.fields(Training)]


@pytest.mark.uncounted
@settings(max_examples=150, deadline=None)
@given(
    strategies.dictionaries(
        strategies.sampled_from(NAMES) | strategies.text(max_size=4), anything, max_size=3
    )
)
def test_any_mapping_works_or_is_a_value_error(values):
    try:
        training = Training.from_dict(values)
    except ValueError as error:
        assert str(error)
    else:
        assert Training.from_dict(training.to_dict()) == training
        assert math.isfinite(training.multiplier(3, 10, 5)) and math.isfinite(training.kl_factor(3, 10))


def test_the_kl_weight_can_grow_in_steps():
    training = Training(kl_coefficient=5e-5, kl_every=100, kl_weight=0.5)
    assert [training.kl_factor(step, 10) for step in (0, 99, 100, 250)] == pytest.approx(
        [0.0, 0.0, 0.0025, 0.005]
    )
    assert training.kl_factor(10**6, 10) == 0.5
    with pytest.raises(ValueError, match="kl_coefficient must be a finite number above 0"):
        Training(kl_coefficient=0.0)
    with pytest.raises(ValueError, match="kl_every must be a whole number"):
        Training(kl_every=0)
    with pytest.raises(ValueError, match="capture must be true or false"):
        Training(capture="yes")


def test_small_data_get_a_thousand_steps_and_who_names_epochs_gets_those():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    quiet = {"batch_size": 20, "progress": False, "log_every": 1000}
    ends = []
    for options in ({}, {"epochs": 2}, {"steps": 7}):
        torch.manual_seed(0)
        model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
        ends.append(sb.fit(model, (x, (x[:, 0] > 0).long()), **options, **quiet).step)
    assert ends == [LEAST_STEPS, 4, 7]
    with pytest.raises(ValueError, match="epochs must be a whole number of at least 1, got 0"):
        Training(epochs=0)
