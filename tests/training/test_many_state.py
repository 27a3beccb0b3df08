"""Many networks that are stopped and taken up again end where undisturbed ones do, bit for bit."""

import copy

import pytest
import torch
from training.helpers_many import METHODS, SETTINGS, distance, networks, table

import slimbayes as sb
from slimbayes.training import StopTraining
from slimbayes.training.many.state import STATE
from slimbayes.training.state import read_state, write_state


def mixture():
    """Two groups with different numbers of steps, and a method with a state of its own."""
    models = [*networks(METHODS["EMP learned"], 2), *networks(METHODS["MCDropout"], 1)]
    return models, [table(0), table(1), table(2, rows=37)]


OPTIONS = {
    **SETTINGS,
    "steps": None,
    "epochs": 5,
    "log_every": 4,
    "likelihood": sb.Gaussian(),
    "optimizer": "adam",
}


def train(models, data, **options):
    return sb.fit_many(models, data, seeds=[7, 8, 9], **{**OPTIONS, **options})


class Killed(Exception):
    """What ends a run without a word."""


def stopper(at, error):
    def callback(step, rows):
        if step == at:
            raise error("now")

    return callback


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("at", [4, 12, 15, 24])
def test_stopped_and_taken_up_again(at, optimizer, tmp_path):
    """Within the shorter runs, at their end, and after it."""
    start, data = mixture()
    whole = copy.deepcopy(start)
    result = train(whole, data, optimizer=optimizer)
    assert result.steps == [15, 15, 30]
    first = copy.deepcopy(start)
    with pytest.raises(StopTraining):
        train(first, data, folder=tmp_path, callback=stopper(at, StopTraining), optimizer=optimizer)
    assert distance(first, start) > 1e-4
    second = copy.deepcopy(start)
    again = train(second, data, folder=tmp_path, optimizer=optimizer)
    assert distance(second, whole) == 0
    assert again.histories == result.histories and again.steps == result.steps
    assert not list(tmp_path.glob("*.partial"))


def test_killed_between_checkpoints(tmp_path):
    start, data = mixture()
    whole, second = copy.deepcopy(start), copy.deepcopy(start)
    result = train(whole, data)
    with pytest.raises(Killed):
        train(copy.deepcopy(start), data, folder=tmp_path, checkpoint_every=7, callback=stopper(16, Killed))
    _, facts = read_state(tmp_path / STATE)
    assert facts["step"] == 14
    again = train(second, data, folder=tmp_path, checkpoint_every=7)
    assert distance(second, whole) == 0
    for rows, others in zip(again.histories, result.histories, strict=True):
        assert [row["step"] for row in rows] == [row["step"] for row in others]
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], rel=1e-12)


def test_the_same_call_after_the_end_gives_the_trained_networks(tmp_path):
    start, data = mixture()
    whole, second, third = (copy.deepcopy(start) for _ in range(3))
    result = train(whole, data, folder=tmp_path)
    again = train(second, data, folder=tmp_path, callback=stopper(4, Killed))
    assert distance(second, whole) == 0 and again.histories == result.histories
    with pytest.raises(Killed):
        train(third, data, folder=tmp_path, resume=False, callback=stopper(4, Killed))
    assert not (tmp_path / STATE).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"it has lr=0.003 \(now 0.5\)"),
        ({"seeds": [7, 8, 10]}, "network 2 had seed 9, now 10"),
        ({"data": [table(0), table(5), table(2, rows=37)]}, "network 1 had data"),
        ({"models": 2}, "it has 3 networks, now there are 2"),
        ({"models": "method"}, "network 2 had method"),
    ],
)
def test_another_call_is_refused_and_nothing_is_touched(change, message, tmp_path):
    start, data = mixture()
    with pytest.raises(StopTraining):
        train(start, data, folder=tmp_path, callback=stopper(4, StopTraining))
    before = (tmp_path / STATE).read_bytes()
    models, data = mixture()
    options = {
        "seeds": [7, 8, 9],
        **OPTIONS,
        **{k: v for k, v in change.items() if k not in ("models", "data")},
    }
    data = change.get("data", data)
    if change.get("models") == 2:
        models, data, options["seeds"] = models[:2], data[:2], [7, 8]
    elif change.get("models") == "method":
        models[2] = networks(sb.MCDropout(rate=0.3), 1)[0]
    kept = copy.deepcopy(models)
    with pytest.raises(sb.CheckpointError, match=message):
        sb.fit_many(models, data, folder=tmp_path, **options)
    assert (tmp_path / STATE).read_bytes() == before and distance(models, kept) == 0


def test_a_state_that_is_older_than_a_setting_has_its_default(tmp_path):
    models, data = mixture()
    with pytest.raises(Killed):
        train(copy.deepcopy(models), data, folder=tmp_path, checkpoint_every=4, callback=stopper(8, Killed))
    tensors, facts = read_state(tmp_path / STATE)
    del facts["settings"]["decay_norms"]
    write_state(tmp_path / STATE, tensors, facts)
    with pytest.raises(sb.CheckpointError, match="decay_norms=True"):
        train(copy.deepcopy(models), data, folder=tmp_path, decay_norms=False)
    result = train(models, data, folder=tmp_path)
    assert result.steps == train(mixture()[0], data).steps


def test_a_damaged_state_is_an_error(tmp_path):
    start, data = mixture()
    train(start, data, folder=tmp_path)
    content = bytearray((tmp_path / STATE).read_bytes())
    content[-5] ^= 1
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(sb.CheckpointError, match="checksum"):
        train(start, data, folder=tmp_path)


def test_rows_may_be_written_more_or_less_often_after_a_stop(tmp_path):
    """What is free to change does: how often rows are written, and how the device is named."""
    start, data = mixture()
    whole, second = copy.deepcopy(start), copy.deepcopy(start)
    train(whole, data)
    with pytest.raises(StopTraining):
        train(copy.deepcopy(start), data, folder=tmp_path, callback=stopper(8, StopTraining))
    again = train(
        second,
        data,
        folder=tmp_path,
        log_every=11,
        accelerator="auto" if not torch.cuda.is_available() else "cpu",
    )
    assert distance(second, whole) < 1e-12
    assert [row["step"] for row in again.histories[2]] == [4, 8, 11, 22, 30]
