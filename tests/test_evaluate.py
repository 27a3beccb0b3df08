"""``sb.evaluate``: equal to the metrics of one prediction over all data, however they are cut."""

import itertools
import pickle
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from helpers_metrics import close
from helpers_networks import METHODS, convert, features, mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes import metrics
from slimbayes.containers.datasets import Scaling
from slimbayes.metrics import Evaluation
from slimbayes.metrics import evaluation as module
from slimbayes.verbs.evaluation import assess

N = 90
X = features(N)


def labels(classes):
    return torch.randint(classes, (N,), generator=torch.Generator().manual_seed(classes))


def batches(y, size, x=X):
    return list(zip(x.split(size), y.split(size), strict=True))


def same(first, second, tolerance=1e-6):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value == pytest.approx(second[name], abs=tolerance, rel=tolerance), name


@pytest.mark.parametrize("noise", ["example", "shared", "mean"])
@pytest.mark.parametrize(
    "method", ["rank1", "meanfield", "mc_dropout", "deep_ensemble", "emp", "deterministic"]
)
def test_classes_against_one_prediction(method, noise):
    model, y = convert(lambda: mlp(3, 12), METHODS[method]()), labels(12)
    found = sb.evaluate(model, batches(y, 16), samples=4, seed=3, noise=noise)
    whole = sb.predict(model, X, samples=4, seed=3, noise=noise)
    draws = whole.draws.double().softmax(-1)
    p = draws.mean(0)
    expected = {
        "nll": metrics.nll(p, y),
        "gibbs_nll": metrics.gibbs_nll(draws, y),
        "accuracy": metrics.accuracy(p, y),
        "top_5_accuracy": metrics.top_k_accuracy(p, y, 5),
        "ece": metrics.ece(p, y),
        "ece_20": metrics.ece(p, y, bins=20, min_count=5),
        "mce": metrics.mce(p, y),
        "adaptive_ece": metrics.adaptive_ece(p, y),
        "brier": metrics.brier(p, y),
        "aurc": metrics.aurc(p, y),
        "entropy": float(whole.entropy.mean()),
        "mutual_information": float(whole.mutual_information.mean()),
        "examples": float(N),
    }
    if method in ("rank1", "deep_ensemble"):
        expected["disagreement"] = metrics.disagreement(draws, y, samples=4)
        assert expected["disagreement"] > 0
    same(found, expected, 2e-6)


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
def test_batch_size_and_chunk_do_not_matter(method):
    model, y = convert(lambda: mlp(3, 4), METHODS[method]()), labels(4)
    expected = sb.evaluate(model, batches(y, N), samples=3, seed=5)
    for size, chunk in ((7, None), (64, None), (64, 25)):
        same(sb.evaluate(model, batches(y, size), samples=3, seed=5, chunk=chunk), expected)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_within_and_beyond_a_batch(chunk):
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()), labels(4)
    whole = sb.evaluate(model, [(X[:20], y[:20])], samples=2, seed=5)
    same(sb.evaluate(model, [(X[:20], y[:20])], samples=2, seed=5, chunk=chunk), whole)


def test_chunks_bound_the_rows_of_a_pass_and_the_draws_held(monkeypatch):
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()), labels(4)
    rows, held, update = [], [], Evaluation.update
    model[0].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    monkeypatch.setattr(
        Evaluation, "update", lambda self, p, t: (held.append(p.draws.numel()), update(self, p, t))[1]
    )
    monkeypatch.setattr(
        sys.modules["slimbayes.verbs.evaluation"], "_HELD", 3 * 5 * 4 * 6
    )  # draws of six examples
    sb.evaluate(model, [(X, y)], samples=5, chunk=40)
    assert max(rows) <= 40 and sum(rows) >= 15 * N
    assert max(held) == 3 * 5 * 4 * 6 and sum(held) == 3 * 5 * 4 * N


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_an_accelerator():
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()), labels(4)
    for targets, likelihood in ((y, None), (torch.randn(N, 4), sb.Gaussian(learn="global"))):
        expected = sb.evaluate(model.cpu(), batches(targets, 16), 4, 5, likelihood)
        same(sb.evaluate(model.cuda(), batches(targets, 16), 4, 5, likelihood), expected, 1e-4)
    p = torch.rand(N, 4, device="cuda").softmax(-1)
    for function in (metrics.nll, metrics.ece, metrics.adaptive_ece, metrics.aurc, metrics.brier):
        close(function(p, y), function(p.cpu(), y), 1e-5)


def test_parts_of_the_data_merge_to_the_whole():
    """As two processes would: the second starts at its own place in the data."""
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()), labels(4)
    whole = assess(model, batches(y, 16), samples=2, seed=1)
    first = assess(model, [(X[:50], y[:50])], samples=2, seed=1)
    second = assess(model, [(X[50:], y[50:])], samples=2, seed=1, first_example=50)
    merged = first.merge(pickle.loads(pickle.dumps(second)))
    assert (len(first), len(second), len(merged)) == (50, 40, N)
    same(merged.compute(), whole.compute())
    for name, column in whole.examples.items():
        torch.testing.assert_close(merged.examples[name], column, rtol=1e-5, atol=1e-6)
    same(Evaluation().merge(whole).compute(), whole.compute(), 0)
    same(whole.merge(Evaluation()).compute(), whole.compute(), 0)
    unlike = assess(convert(lambda: mlp(3, 5), METHODS["rank1"]()), [(X, y)])
    with pytest.raises(ValueError, match=r"4 classes.*5 classes"):
        whole.merge(unlike)
    wrong = assess(model, [(X[50:], y[50:])], samples=2, seed=1)  # other noise
    assert abs(first.merge(wrong).compute()["nll"] - whole.compute()["nll"]) > 1e-6


def test_gather(monkeypatch):
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()), labels(4)
    parts = [assess(model, [(X[:50], y[:50])], seed=1), assess(model, [(X[50:], y[50:])], seed=1)]
    assert parts[0].gather() is parts[0]  # one process
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        module.dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), parts)
    )
    same(parts[1].gather().compute(), parts[0].merge(parts[1]).compute(), 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_streaming_equals_one_pass(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    draws = 3 * torch.randn(6, sum(sizes), 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    whole, parts = Evaluation(components=3), Evaluation(components=3)
    whole.update(sb.Categorical().predictive(draws), y)
    for rows, targets in zip(draws.split(sizes, 1), y.split(sizes), strict=True):
        parts.update(sb.Categorical().predictive(rows), targets)
    same(parts.compute(), whole.compute(), 1e-9)
    assert whole.compute()["nll"] <= whole.compute()["gibbs_nll"] + 1e-9


@pytest.mark.parametrize("shape", [(), (1,)])
def test_bernoulli_is_the_two_class_problem(shape):
    y = labels(2)
    model = convert(lambda: nn.Sequential(mlp(3, 1), nn.Flatten(0) if shape == () else nn.Identity()),
                    METHODS["rank1"]())  # fmt: skip
    found = sb.evaluate(model, batches(y.float().view(N, *shape), 16), 4, 3, sb.Bernoulli())
    one = sb.predict(model, X, samples=4, seed=3, likelihood=sb.Bernoulli())
    p, draws = one.mean.view(N).double(), one.draws.view(12, N).double().sigmoid()
    assert found["examples"] == N
    for name, expected in {
        "nll": metrics.nll(p, y),
        "gibbs_nll": metrics.gibbs_nll(draws, y),
        "accuracy": metrics.accuracy(p, y),
        "ece": metrics.ece(p, y),
        "brier": metrics.brier(p, y),
        "auroc": metrics.auroc(p, y),
        "auc_pr": metrics.auc_pr(p, y),
        "disagreement": metrics.disagreement(torch.stack((1 - draws, draws), -1), y, samples=4),
        "entropy": float(one.entropy.mean()),
        "mutual_information": float(one.mutual_information.mean()),
    }.items():
        close(found[name], expected, 2e-6)
    # Two logits of which one is 0 are the same model.
    twin = Evaluation(3)
    logits = one.draws.view(12, N)
    twin.update(sb.Categorical().predictive(torch.stack((torch.zeros_like(logits), logits), -1)), y)
    same(twin.compute(), found)


@pytest.mark.parametrize("kind", ["fixed", "global", "per_example"])
@pytest.mark.parametrize("targets", [1, 2])
def test_regression_in_original_units(kind, targets):
    likelihood = sb.Gaussian(learn=kind) if kind == "per_example" else sb.Gaussian(precision=2.0, learn=kind)
    outputs = 2 * targets if kind == "per_example" else targets
    model = convert(lambda: mlp(3, outputs), METHODS["rank1"]())
    raw = 5 * torch.randn(N, targets, generator=torch.Generator().manual_seed(0)) + 20
    scaling = Scaling.of(raw)
    found = assess(
        model, batches(scaling(raw), 16), samples=4, seed=2, likelihood=likelihood, target_scaling=scaling
    )
    whole = sb.predict(model, X, samples=4, seed=2, likelihood=likelihood)
    lower, upper = (scaling.undo(end) for end in whole.interval(0.9))
    mean, std = scaling.undo(whole.mean), torch.tensor(scaling.std)
    density = metrics.log_predictive_density(whole, scaling(raw), scaling)
    expected = {
        "nll": -density,
        "log_predictive_density": density,
        "rmse": metrics.rmse(mean, raw),
        "mae": metrics.mae(mean, raw),
        "coverage_90": metrics.coverage(lower, upper, raw),
        "width_90": metrics.interval_width(lower, upper),
        "variance": float((whole.variance * std**2).mean()),
        "epistemic": float((whole.epistemic * std**2).mean()),
        "examples": float(N),
    }
    same(found.compute(), expected, 1e-5)
    curve = metrics.coverage_curve(whole, scaling(raw))
    assert found.reliability()["level"] == curve.level
    assert found.reliability()["coverage"] == pytest.approx(curve.coverage)
    torch.testing.assert_close(found.examples["target"], raw.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.examples["upper"], upper.double(), rtol=1e-4, atol=1e-4)
    scaled = sb.evaluate(model, batches(scaling(raw), 7), samples=4, seed=2, likelihood=likelihood)
    close(scaled["nll"] + float(std.log().mean()), -density, 1e-5)
    with pytest.raises(ValueError, match=f"target_scaling has 3 columns, the model {targets} targets"):
        sb.evaluate(model, [(X, raw)], likelihood=likelihood, target_scaling=Scaling((0.0,) * 3, (1.0,) * 3))


def test_a_flat_output_has_one_target():
    model = convert(lambda: nn.Sequential(mlp(3, 1), nn.Flatten(0)), sb.Deterministic())
    y = torch.randn(N)
    found = sb.evaluate(
        model, batches(y, 16), likelihood=sb.Gaussian(), target_scaling=Scaling((1.0,), (2.0,))
    )
    close(found["rmse"], 2 * metrics.rmse(sb.predict(model, X, likelihood=sb.Gaussian()).mean, y), 1e-5)


def test_per_example_values():
    model, y = convert(lambda: mlp(3, 3), METHODS["rank1"]()), labels(3)
    found = assess(model, batches(y, 16), samples=4, seed=3)
    whole = sb.predict(model, X, samples=4, seed=3)
    columns = found.examples
    assert torch.equal(columns["target"], y)
    assert torch.equal(columns["prediction"], whole.mean.argmax(-1))
    for name, expected in {
        "confidence": whole.mean.max(-1).values,
        "nll": -whole.log_prob(y),
        "entropy": whole.entropy,
        "mutual_information": whole.mutual_information,
    }.items():
        torch.testing.assert_close(columns[name].float(), expected, rtol=1e-4, atol=1e-5)
    assert all(column.shape == (N,) and not column.requires_grad for column in columns.values())
    diagram, reference = found.reliability(bins=10), metrics.reliability(whole.mean, y, bins=10)
    assert diagram["count"] == reference.count.tolist() and len(diagram["edges"]) == 11
    assert diagram["accuracy"] == pytest.approx(reference.accuracy.tolist())
    assert repr(found) == "Evaluation(90 examples, 3 classes)" and repr(Evaluation()).endswith("empty)")


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(3, 4)

    def forward(self, x, offset, table=None):
        return OrderedDict(scores=self.net(x + offset), table=table)


def test_inputs_by_position_by_name_and_prepared():
    model, y = convert(TwoInputs, METHODS["rank1"]()), labels(4)
    table = torch.ones(16, 16)  # as long as a batch, and no batch
    options = {
        "samples": 2,
        "seed": 0,
        "select": lambda output: output["scores"],
        "shared_inputs": ("table",),
    }
    parts = list(zip(X.split(16), y.split(16), strict=True))
    named = [({"x": x, "offset": x.flip(0), "table": table}, t) for x, t in parts]
    placed = [((x, x.flip(0), table), t) for x, t in parts]
    expected = sb.evaluate(model, named, **options)
    same(sb.evaluate(model, placed, **options), expected, 0)
    same(sb.evaluate(model, parts, prepare=lambda x: (x, x.flip(0), table), **options), expected, 0)
    same(sb.evaluate(model, named, chunk=16, **options), expected)
    loader = DataLoader(TensorDataset(X, y), 16)
    same(sb.evaluate(model, loader, prepare=lambda x: (x, x.flip(0), table), **options), expected, 0)


def test_pixels_are_examples_and_ignored_ones_are_not():
    net = nn.Conv2d(2, 3, 1)
    model = sb.bayesianize(net, sb.Rank1(components=2))
    x, y = torch.randn(5, 2, 4, 4), torch.randint(3, (5, 4, 4))
    y[0, 0] = -100
    likelihood = sb.Categorical(class_axis=1)
    nothing = torch.full((1, 4, 4), -100)
    parts = [(x[:2], y[:2]), (x[2:], y[2:]), (x[:1], nothing)]
    found = sb.evaluate(model, parts, seed=0, likelihood=likelihood)
    p = sb.predict(model, x, seed=0, likelihood=likelihood).mean.movedim(1, -1).flatten(0, -2)
    kept = y.flatten() >= 0
    assert found["examples"] == 76
    close(found["nll"], metrics.nll(p[kept], y.flatten()[kept]), 1e-5)


def test_the_model_is_left_as_it_was():
    model, y = convert(lambda: nn.Sequential(nn.BatchNorm1d(3), mlp(3, 2)), METHODS["rank1"]()), labels(2)
    model.train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sb.evaluate(model, batches(y, 16))
    assert model.training and not model[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_shared_noise_is_one_function_for_all_batches():
    """The same examples twice: a shared draw without a seed treats both batches alike."""
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()), labels(4)
    for noise, equal in (("shared", True), ("example", False)):
        column = assess(model, [(X, y), (X, y)], noise=noise).examples["nll"]
        assert torch.allclose(column[:N], column[N:]) is equal


def test_bfloat16_model():
    model, y = convert(lambda: mlp(3, 4), METHODS["rank1"]()).bfloat16(), labels(4)
    found = sb.evaluate(model, batches(y, 16, X.bfloat16()), seed=0)
    close(found["nll"], metrics.nll(sb.predict(model, X.bfloat16(), seed=0).mean, y), 1e-5)


def test_small_and_one_sided_data_leave_out_what_is_not_defined():
    model = convert(lambda: mlp(3, 2), METHODS["rank1"]())
    found = sb.evaluate(model, [(X[:3], torch.zeros(3, dtype=torch.long))])
    assert not {"auroc", "auc_pr", "ece_20"} & found.keys() and found["examples"] == 3
    assert all(isinstance(value, float) for value in found.values())


def test_without_torchmetrics(monkeypatch):
    model, y = convert(lambda: mlp(3, 2), METHODS["rank1"]()), labels(2)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "_warned", set())
    with pytest.warns(UserWarning, match=r"slimbayes\[metrics\]"):
        found = sb.evaluate(model, batches(y, 16))
    assert "auroc" not in found and "brier" in found
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.evaluate(model, batches(y, 16))  # said once


def test_wrong_use_is_explained():
    model, y = convert(lambda: mlp(3, 2), METHODS["rank1"]()), labels(2)
    used = iter(batches(y, 16))
    list(used)
    gaussian, bernoulli = sb.Gaussian(), sb.Bernoulli()
    for call, says in [
        (lambda: sb.evaluate(model, []), "batches gave no example"),
        (lambda: sb.evaluate(model, used), "only once"),
        (lambda: sb.evaluate(model, [X]), "batch 0 is a Tensor: batches are pairs"),
        (lambda: sb.evaluate(model, (X, y)), r"a single batch is \[\(inputs, targets\)\]"),
        (lambda: sb.evaluate(model, [(X, X, y)]), "tuple of 3"),
        (lambda: sb.evaluate(model, [(X, y.tolist())]), "targets of batch 0 are list"),
        (lambda: sb.evaluate(model, [(X, y), (X, y[:4])]), "batch 1 has 90 inputs but 4 targets"),
        (lambda: sb.evaluate(model, [(X, y + 1)]), "target 2 is out of range"),
        (lambda: sb.evaluate(model, [(X, y.float())]), "class indices"),
        (lambda: sb.evaluate(model, [(X, y[:, None])]), "reshape the targets"),
        (lambda: sb.evaluate(model, [(X, y)], chunk=0), "chunk must be"),
        (lambda: sb.evaluate(model, [(X, y)], samples=0), "samples must be"),
        (lambda: sb.evaluate(model, [(X, y)], samples=0, chunk=8), "samples must be"),
        (lambda: sb.evaluate(model, [(X, y)], noise="none"), "unknown noise"),
        (lambda: sb.evaluate(mlp(3, 2), [(X, y)]), "has not been converted"),
        (
            lambda: sb.evaluate(model, [(X, torch.rand(N, 2))], likelihood=bernoulli),
            "several outputs per example",
        ),
        (lambda: sb.evaluate(model, [(X, torch.full((N, 2), torch.nan))], likelihood=gaussian), "NaN"),
        (lambda: sb.evaluate(model, [(X * torch.nan, y)]), "NaN"),
        (lambda: sb.evaluate(model, [(X, torch.full((N,), -100))]), "batches gave no example"),
        (lambda: Evaluation().compute(), "nothing has been evaluated"),
        (
            lambda: Evaluation(2).update(sb.Categorical().predictive(torch.zeros(3, 1, 2)), y[:1]),
            "no multiple of 2",
        ),
    ]:
        with pytest.raises((TypeError, ValueError), match=says):
            call()


def test_kinds_do_not_mix():
    evaluation = Evaluation()
    evaluation.update(sb.Categorical().predictive(torch.zeros(1, 1, 2)), torch.tensor([0]))
    with pytest.raises(ValueError, match="3 classes, those before had 2 classes"):
        evaluation.update(sb.Categorical().predictive(torch.zeros(1, 1, 3)), torch.tensor([0]))
    with pytest.raises(ValueError, match="real targets"):
        evaluation.update(sb.Gaussian().predictive(torch.zeros(1, 1, 3)), torch.zeros(1, 3))
    fractions = sb.Bernoulli().predictive(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="not fractions"):
        evaluation.update(fractions, torch.tensor([0.5]))
    with pytest.raises(ValueError, match="keep_draws=True"):
        evaluation.update(
            sb.Categorical().predictive(sb.Categorical().moments(torch.zeros(1, 1, 2))), torch.tensor([0])
        )


def test_memory_does_not_grow_with_classes_and_draws():
    evaluation = Evaluation()
    for _ in range(3):
        evaluation.update(sb.Categorical().predictive(torch.randn(8, 10, 500)), torch.randint(500, (10,)))
    kept = sum(column.element_size() * column.numel() for column in evaluation.examples.values())
    assert kept <= 100 * 30


def test_predict_in_chunks_refuses_to_draw_nothing():
    with pytest.raises(ValueError, match="samples must be"):
        sb.predict(convert(lambda: mlp(3, 2), METHODS["rank1"]()), X, samples=0, chunk=8)


def test_predict_takes_the_place_of_its_first_example():
    model = convert(lambda: mlp(3, 2), METHODS["rank1"]())
    whole = sb.predict(model, X, samples=2, seed=4).draws
    for start, chunk in itertools.product((0, 40), (None, 7)):
        part = sb.predict(model, X[start:], samples=2, seed=4, first_example=start, chunk=chunk).draws
        torch.testing.assert_close(part, whole[:, start:], rtol=1e-5, atol=1e-6)
