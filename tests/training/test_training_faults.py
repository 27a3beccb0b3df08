"""What happens to a run from outside: signals, memory and disks that end, readers that die, states that are damaged."""

import errno
import os
import signal
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import slimbayes as sb
from slimbayes import files
from slimbayes.training import Terminated, TrainingError, loop
from slimbayes.training.faults import Ending, dead_worker, explained
from slimbayes.training.state import DamagedState, States, read_state, write_state
from slimbayes.verbs.diagnosis.findings import ModelWarning

pytestmark = pytest.mark.usefixtures("on_cpu")
STATE, PREVIOUS = "training.safetensors", "training.previous.safetensors"
SETTINGS = {"epochs": 4, "batch_size": 10, "log_every": 1, "checkpoint_every": 3, "progress": False}


def data():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def build():
    torch.manual_seed(1)
    return sb.bayesianize(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), sb.Rank1(components=2))


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def at(step, action):
    return lambda now, row: action() if now == step else None


def stop(step, folder, **more):
    """A run that an error ends after a step."""

    def fault():
        raise KeyError("a fault")

    with pytest.raises(KeyError):
        sb.fit(build(), data(), folder=folder, callback=at(step, fault), **SETTINGS, **more)


@pytest.fixture(scope="module")
def whole():
    model = build()
    result = sb.fit(model, data(), **SETTINGS)
    return model, result


def test_sigterm_keeps_the_state_and_resume_goes_on(tmp_path, whole, capsys):
    callback = at(5, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Terminated) as caught:
        sb.fit(build(), data(), folder=tmp_path, callback=callback, **SETTINGS)
    assert caught.value.code == 143 and isinstance(caught.value, SystemExit)
    text = capsys.readouterr().err
    assert f"stopped after step 5 of 16, with the state in {str(tmp_path)!r}" in text and "--resume" in text
    assert str(caught.value) == text.strip()
    assert read_state(tmp_path / STATE)[1]["step"] == 5, "between two of its checkpoints"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    again = build()
    result = sb.fit(again, data(), folder=tmp_path, resume=True, **SETTINGS)
    assert same(whole[0], again)
    assert [row["loss"] for row in result.history] == [row["loss"] for row in whole[1].history]


def test_a_handler_of_ones_own_stays(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        callback = at(5, lambda: signal.raise_signal(signal.SIGTERM))
        assert sb.fit(build(), data(), folder=tmp_path, callback=callback, **SETTINGS).step == 16
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_handler_without_a_folder_or_outside_the_main_thread(tmp_path):
    handlers = []
    look = at(2, lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    sb.fit(build(), data(), callback=look, **SETTINGS)
    thread = threading.Thread(
        target=lambda: sb.fit(build(), data(), folder=tmp_path, callback=look, **SETTINGS)
    )
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL] * 2
    sb.fit(build(), data(), folder=tmp_path, callback=look, **SETTINGS)
    assert handlers[-1] is not signal.SIG_DFL


def test_a_process_that_works_for_another_is_ended(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    monkeypatch.setattr(signal, "raise_signal", sent.append)
    Ending().end("words")
    assert sent == [signal.SIGTERM] and "words" in capsys.readouterr().err


def test_sigterm_ends_fit_many_with_its_state(tmp_path):
    options = {**SETTINGS, "folder": tmp_path}
    models = [build(), build()]
    with pytest.raises(Terminated):
        sb.fit_many(
            models,
            data(),
            seeds=[0, 1],
            callback=at(5, lambda: signal.raise_signal(signal.SIGTERM)),
            **options,
        )
    assert read_state(tmp_path / "many.safetensors")[1]["step"] == 5
    alone = [build(), build()]
    sb.fit_many(alone, data(), seeds=[0, 1], **SETTINGS)
    again = [build(), build()]
    sb.fit_many(again, data(), seeds=[0, 1], **options)
    assert all(same(one, other) for one, other in zip(alone, again, strict=True))


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def test_a_damaged_state_falls_back_to_the_one_before(tmp_path, whole):
    stop(8, tmp_path)
    assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == [6, 3]
    damage(tmp_path / STATE)
    again = build()
    with pytest.warns(UserWarning, match=rf"{STATE}' was damaged.*goes on from.*{PREVIOUS}' \(step 3\)"):
        sb.fit(again, data(), folder=tmp_path, resume=True, **SETTINGS)
    assert same(whole[0], again)
    assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == [16, 15]


def test_a_damaged_state_never_takes_the_place_of_the_whole_one(tmp_path):
    stop(8, tmp_path)
    damage(tmp_path / STATE)
    with pytest.warns(UserWarning, match="goes on from"), pytest.raises(OSError, match="no"):

        def fault():
            raise OSError("no")

        sb.fit(build(), data(), folder=tmp_path, resume=True, callback=at(7, fault), **SETTINGS)
    # The run wrote one state, of step 6: the one before it is still the whole one of step 3.
    assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == [6, 3]


def test_two_damaged_states_are_named_and_deleting_them_helps(tmp_path, whole):
    stop(8, tmp_path)
    for name in (STATE, PREVIOUS):
        damage(tmp_path / name)
    with pytest.raises(DamagedState, match=rf"{STATE}.*to train from the start.*{PREVIOUS}.*delete both"):
        sb.fit(build(), data(), folder=tmp_path, resume=True, **SETTINGS)
    for name in (STATE, PREVIOUS):
        (tmp_path / name).unlink()
    again = build()
    sb.fit(again, data(), folder=tmp_path, resume=True, **SETTINGS)
    assert same(whole[0], again)


def test_a_folder_of_an_earlier_version_has_one_state(tmp_path, whole):
    stop(8, tmp_path)
    (tmp_path / PREVIOUS).unlink()
    (tmp_path / "manifest.json").unlink()
    again = build()
    sb.fit(again, data(), folder=tmp_path, resume=True, **SETTINGS)
    assert same(whole[0], again)


def test_a_new_run_removes_both_states(tmp_path):
    stop(8, tmp_path)
    sb.fit(build(), data(), folder=tmp_path, **{**SETTINGS, "epochs": 1, "checkpoint_every": 99})
    assert not (tmp_path / PREVIOUS).exists() and read_state(tmp_path / STATE)[1]["step"] == 4


def test_states_without_hard_links(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    states = States(tmp_path, STATE)
    for step in (1, 2, 3):
        states.write({"w": torch.ones(1)}, {"step": step})
    assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == [3, 2]
    (tmp_path / STATE).unlink()  # killed between the two renamings
    with pytest.warns(UserWarning, match=rf"{STATE}' is missing.*{PREVIOUS}"):
        assert States(tmp_path, STATE).read()[1]["step"] == 2


def test_two_names_of_one_state_leave_nothing_behind(tmp_path):
    states = States(tmp_path, STATE)
    states.write({"w": torch.ones(1)}, {"step": 1})
    os.link(tmp_path / STATE, tmp_path / PREVIOUS)  # as a copy by hard links may be
    states.write({"w": torch.ones(1)}, {"step": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((STATE, PREVIOUS))
    assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == [2, 1]


def test_two_whole_states_at_every_moment(tmp_path, monkeypatch):
    """Killed before any of its renamings, a run leaves two whole states that are not one file."""
    states = States(tmp_path, STATE)
    for step in (1, 2):
        states.write({"w": torch.ones(1)}, {"step": step})

    class Killed(BaseException):
        pass

    def kill_at(call, real=os.replace, unlink=os.unlink):
        seen = []

        def replace(*paths):
            seen.append(paths)
            if len(seen) == call:
                raise Killed
            real(*paths)

        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "unlink", lambda *rest: None)  # who is killed tidies nothing
        with pytest.raises(Killed):
            states.write({"w": torch.ones(1)}, {"step": 10 + call})
        monkeypatch.setattr(os, "replace", real)
        monkeypatch.setattr(os, "unlink", unlink)

    for call, expected in ((1, [2, 1]), (2, [12, 1])):
        kill_at(call)
        assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == expected
        assert not (tmp_path / STATE).samefile(tmp_path / PREVIOUS)


def test_a_state_of_a_newer_format_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("slimbayes.training.state.FORMAT", 2)
    write_state(tmp_path / STATE, {"w": torch.ones(1)}, {"step": 1})
    monkeypatch.undo()
    with pytest.raises(sb.CheckpointError, match="format 2: update slimbayes"):
        States(tmp_path, STATE).read()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path, monkeypatch, number, whole):
    def full(*rest):
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=r"no room for .* bytes.*make room.*--resume") as caught:
        sb.fit(
            build(),
            data(),
            folder=tmp_path,
            callback=at(7, lambda: monkeypatch.setattr(os, "fsync", full)),
            **SETTINGS,
        )
    assert caught.value.filename == str(tmp_path / STATE) and caught.value.errno == number
    assert not list(tmp_path.glob("*.partial"))
    assert [read_state(tmp_path / name)[1]["step"] for name in (STATE, PREVIOUS)] == [6, 3]
    monkeypatch.undo()
    again = build()
    sb.fit(again, data(), folder=tmp_path, resume=True, **SETTINGS)
    assert same(whole[0], again)


def test_a_row_of_history_is_whole_on_a_full_disk(tmp_path, monkeypatch):
    from slimbayes.training import monitor

    history = monitor.History(tmp_path / "history.csv")
    history.add({"step": 1, "loss": 0.5})
    before = history.path.read_text()

    class Full:
        def __init__(self, path, *rest, **named):
            self.path = path

        def __enter__(self):
            return self

        def __exit__(self, *rest):
            pass

        def write(self, text):
            with files.open(self.path, "a") as file:
                file.write(text[:5])
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "open", open, raising=False)
    monkeypatch.setattr(monitor, "open", Full, raising=False)
    with pytest.raises(OSError, match="the disk is full"):
        history.add({"step": 2, "loss": 0.4})
    assert history.path.read_text() == before


def test_tensorboard_that_fails_does_not_end_the_run(tmp_path, monkeypatch, whole):
    class Broken:
        def log_metrics(self, metrics, step):
            raise ValueError("not currently supported")

    monkeypatch.setattr(loop, "tensorboard", lambda folder: Broken())
    again = build()
    with pytest.warns(UserWarning, match="TensorBoard cannot be written from step 1 on.*not currently"):
        sb.fit(again, data(), folder=tmp_path, **SETTINGS)
    assert same(whole[0], again)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory: 9 B")],
)
def test_out_of_memory_in_training_says_which_settings_help(tmp_path, monkeypatch, error):
    def full(*rest):
        raise error

    callback = at(4, lambda: monkeypatch.setattr(loop.Run, "_compute", full))
    with pytest.raises(TrainingError) as caught:
        sb.fit(build(), data(), folder=tmp_path, callback=callback, samples=3, **SETTINGS)
    text = str(caught.value)
    for word in (
        "step 5 ran out of memory on cpu: 10 examples x 2 components x 3 samples = 60 rows", "batch_size=10",
        "samples=3", "components_per_step=2", "precision=", "devices",
        f"the last state in {str(tmp_path)!r}, which is whole",
    ):  # fmt: skip
        assert word in text, text
    assert caught.value.__cause__ is error


def test_out_of_memory_names_only_what_applies(monkeypatch):
    def full(*rest):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(loop.Run, "_compute", full)
    model = sb.bayesianize(nn.Linear(3, 2), sb.Deterministic())
    with pytest.raises(
        TrainingError, match=r"Lower batch_size=10, or .*nothing was saved: give folder="
    ) as caught:
        sb.fit(model, data(), epochs=1, batch_size=10, precision="bf16-true", progress=False)
    assert "samples=" not in str(caught.value) and "components" not in str(caught.value).split("Lower")[1]
    assert "precision" not in str(caught.value)


class Deadly(Dataset):
    """Its reader dies at an example, once a file is there."""

    def __init__(self, switch):
        self.x, self.y = data()
        self.switch = str(switch)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        if row == 33 and os.path.exists(self.switch) and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[row], self.y[row]


def test_a_reader_that_dies_is_named_and_resume_goes_on(tmp_path):
    switch, folder = tmp_path / "switch", tmp_path / "run"

    def train(model, **more):
        loader = DataLoader(Deadly(switch), batch_size=10, shuffle=True, num_workers=1)
        return sb.fit(model, loader, **SETTINGS, **more)

    alone = build()
    train(alone)
    with pytest.raises(TrainingError, match=r"reads the data died.*num_workers.*resume=True.*is whole"):
        train(build(), folder=folder, callback=at(4, switch.touch))
    switch.unlink()
    again = build()
    train(again, folder=folder, resume=True)
    assert same(alone, again)


def test_an_error_that_the_data_raise_is_no_dead_reader():
    assert not dead_worker(ConnectionResetError(104, "the data's own"))
    assert not dead_worker(RuntimeError("Caught RuntimeError in DataLoader worker process 0.\n"))
    try:
        try:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        except RuntimeError:
            raise KeyError("of what was interrupted")  # noqa: B904
    except KeyError as error:
        assert dead_worker(error)


def test_a_lost_process_is_named():
    class Two:
        world_size, global_rank, device = 2, 1, torch.device("cpu")

    class Run:
        fabric, folder, states, settings = Two(), None, None, sb.Training()

    text = str(
        explained(RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer"), 7, Run())
    )
    assert "process 1 of 2 lost another one at step 7" in text and "start them all again" in text
    assert explained(RuntimeError("shapes differ"), 7, Run()) is None
    assert explained(TrainingError("already said, by gloo"), 7, Run()) is None


def test_an_interrupted_explanation_is_given_all_the_same(monkeypatch):
    """A loader raises once more for every reader that ends, wherever the run is by then."""
    lost = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    calls = []

    def interrupted(error, step, run):
        calls.append(error)
        if len(calls) < 3:
            raise lost
        return explained(error, step, run)

    def full(*rest):
        raise lost

    monkeypatch.setattr(loop, "explained", interrupted)
    monkeypatch.setattr(loop.Run, "_compute", full)
    with pytest.raises(TrainingError, match="reads the data died"):
        sb.fit(build(), data(), **SETTINGS)
    assert len(calls) == 3


def test_no_warning_where_all_is_whole(tmp_path):
    stop(8, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ModelWarning)  # of the model, not of the state
        sb.fit(build(), data(), folder=tmp_path, resume=True, **SETTINGS)
