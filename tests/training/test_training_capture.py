"""A step recorded as a CUDA graph is the same step: weights after some steps equal those of eager code."""

import copy

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.training import Training

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
METHODS = {
    "Rank1": sb.Rank1(components=2),
    "Cauchy": sb.Rank1(components=2, posterior="cauchy"),
    "random input": sb.Rank1(components=2, random="input"),
    "BatchEnsemble": sb.BatchEnsemble(components=2),
    "MeanField": sb.MeanField(),
    "flipout": sb.MeanField(estimator="flipout"),
    "local": sb.MeanField(estimator="local"),
    "KTied": sb.KTied(rank=2),
    "KTied local": sb.KTied(rank=2, estimator="local"),
    "EMP": sb.EMP(components=3),
    "ECMP": sb.ECMP(components=3),
    "MCDropout": sb.MCDropout(rate=0.2),
    "DropConnect": sb.DropConnect(rate=0.2),
    "DeepEnsemble": sb.DeepEnsemble(members=2),
    "Deterministic": sb.Deterministic(),
}


def network():
    layers = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 160),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(160, 4))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 1, 6, 6, generator=generator)
    return x, (x.mean((1, 2, 3)) * 6).clamp(-2, 1).floor().long() + 2


def trained(method, **settings):
    torch.manual_seed(3)
    model = sb.bayesianize(network(), method)
    settings = {
        "epochs": 5,
        "batch_size": 24,
        "lr": 0.01,
        "optimizer": "sgd",
        "schedule": "cosine",
        **settings,
    }
    result = sb.fit(model, data(), Training(**settings), progress=False)
    return model, result


@cuda
@pytest.mark.parametrize("name", METHODS)
def test_recorded_steps_equal_eager_ones(name):
    eager, first = trained(METHODS[name], capture=False)
    recorded, second = trained(METHODS[name], capture=True)
    assert first.step == second.step == 20
    for one, other in zip(first.history, second.history, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-4)
    for (key, value), other in zip(eager.state_dict().items(), recorded.state_dict().values(), strict=True):
        torch.testing.assert_close(
            other, value, rtol=1e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@cuda
def test_a_recorded_run_resumes_to_the_same_weights(tmp_path):
    whole, _ = trained(sb.KTied(rank=2), capture=True, optimizer="adam", clip_norm=1.0)
    torch.manual_seed(3)
    model = sb.bayesianize(network(), sb.KTied(rank=2))
    settings = Training(
        epochs=5,
        batch_size=24,
        lr=0.01,
        optimizer="adam",
        clip_norm=1.0,
        capture=True,
        checkpoint_every=7,
        log_every=1,
    )

    def stop(step, row):
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sb.fit(copy.deepcopy(model), data(), settings, folder=tmp_path, progress=False, callback=stop)
    result = sb.fit(model, data(), settings, folder=tmp_path, resume=True, progress=False)
    assert result.step == 20 and [row["step"] for row in result.history][-1] == 20
    for value, other in zip(whole.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-6)


@cuda
def test_a_scheduled_kl_weight_reaches_the_recorded_step():
    settings = {"optimizer": "adam", "kl_coefficient": 0.1, "kl_every": 2, "log_every": 1}
    _, eager = trained(sb.MeanField(), capture=False, **settings)
    _, recorded = trained(sb.MeanField(), capture=True, **settings)
    assert [row["loss"] for row in recorded.history] == pytest.approx(
        [row["loss"] for row in eager.history], rel=2e-3
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_without_a_gpu_capture_is_refused():
    with pytest.raises(ValueError, match="records a step on one GPU"):
        trained(sb.MeanField(), capture=True)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (sb.EMP(components=2, learn_mixing=True), "learn_mixing"),
        (sb.Rank1(components_per_step=2), "components_per_step"),
    ],
)
def test_what_lives_between_steps_is_refused(method, words):
    from slimbayes.training.recording import check_recordable

    class Fabric:
        device, world_size = torch.device("cuda"), 1

    model = sb.bayesianize(network(), method)
    with pytest.raises(ValueError, match=words):
        check_recordable(model, Training(capture=True), Fabric())


class StandIn:
    """Streams, graphs and their contexts without a GPU: a graph runs its step again when it is replayed."""

    def __init__(self, *arguments):
        self.replays = 0

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def replay(self):
        self.replays += 1
        self.recorder.figures.copy_(
            self.recorder.compute(self.recorder.inputs, self.recorder.targets, self.recorder.weight)
        )


def test_a_recorder_copies_batches_and_weights_into_the_recorded_step(monkeypatch):
    from slimbayes.training import recording

    for name in ("Stream", "CUDAGraph", "stream", "graph", "current_stream"):
        monkeypatch.setattr(recording.torch.cuda, name, StandIn)
    seen = []

    def compute(inputs, targets, weight):
        seen.append((inputs["x"].clone(), targets.clone(), float(weight)))
        return torch.stack([inputs["x"].sum() * weight, targets.sum().float()])

    recorder = recording.Recorder(compute, torch.device("cpu"))
    batches = [({"x": torch.full((4, 2), float(i)), "flag": True}, torch.full((4,), i)) for i in range(8)]
    for number, (inputs, targets) in enumerate(batches):
        if number == recording.WARM:
            assert recorder.graph is None, "the first steps are eager"
        if recorder.graph is not None:
            recorder.graph.recorder = recorder
        if number == recording.WARM:
            with pytest.raises(AttributeError):  # the stand-in does not know its recorder before it is made
                recorder(inputs, targets, 0.5)
            recorder.graph.recorder = recorder
        figures = recorder(inputs, targets, 0.5 + number)
        assert figures.tolist() == [8 * number * (0.5 + number), 4 * number]
    assert recorder.graph.replays == len(batches) - recording.WARM + 1
    assert torch.equal(seen[-1][0], batches[-1][0]["x"]) and seen[-1][2] == 7.5
    kept = recorder.figures.clone()
    odd = recorder({"x": torch.ones(3, 2), "flag": True}, torch.ones(3, dtype=torch.long), 2.0)
    assert odd.tolist() == [12.0, 3.0], "another shape runs in eager code"
    assert torch.equal(recorder.figures, kept) and recorder.graph.replays == len(batches) - recording.WARM + 1


@cuda
@pytest.mark.parametrize(
    "way", [{}, {"capture": True}, {"compile": True}], ids=["eager", "recorded", "compiled"]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_is_left_out(way, optimizer):
    """On the device, without waiting: a run that stops has the weights of the step before, one that skips is finite."""
    x, y = data()
    batches = [(x[i : i + 24].clone(), y[i : i + 24]) for i in range(0, 96, 24)] * 2
    batches[5] = (batches[5][0].clone(), batches[5][1])
    batches[5][0][3] = float("inf")  # the sixth step is recorded
    options = dict(
        num_data=96, optimizer=optimizer, lr=0.01, schedule="constant", kl_annealing=0.0, progress=False
    )

    def run(**more):
        torch.manual_seed(3)
        model = sb.bayesianize(network(), sb.Rank1(components=2))
        try:
            result = sb.fit(model, batches, epochs=2, **options, **way, **more)
        except sb.TrainingError as error:
            result = str(error)
        return result, {name: value.cpu() for name, value in model.state_dict().items()}

    (_, short), (text, stopped) = run(steps=5), run()
    assert "not finite at step 6 " in text and "the last finite step is 5" in text and "of '0.weight'" in text
    for name, value in short.items():
        torch.testing.assert_close(stopped[name], value, rtol=1e-3, atol=1e-5)
    with pytest.warns(UserWarning, match="left out: the loss is not finite at step 6"):
        result, skipped = run(on_nonfinite="skip")
    assert result.skipped == 2 and all(torch.isfinite(value).all() for value in skipped.values())
