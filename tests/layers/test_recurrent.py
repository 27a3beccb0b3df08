"""Converted recurrent layers against torch's own, in every form that theirs have."""

import copy
import itertools

import pytest
import torch
from helpers_sequences import BATCH, HIDDEN, LAYERS, LENGTHS, SIZE, STEPS, Sequences, inputs
from torch import nn
from torch.func import functional_call

import slimbayes as sb
from slimbayes.core.context import RowError
from slimbayes.core.rules.rank1 import Rank1Rule

ONES = {"random_sign_init": 1.0}  # all factors at 1
METHODS = {
    "meanfield": lambda: sb.MeanField.paper(),
    "ktied": lambda: sb.KTied.paper(),
    "flipout": lambda: sb.MeanField.paper(estimator="flipout"),
    "rank1": lambda: sb.Rank1.paper(components=2, **ONES),
    "rank1_cauchy": lambda: sb.Rank1.paper(components=1, posterior="cauchy", **ONES),
    "additive": lambda: sb.Rank1.paper(components=2, perturbation="additive", random_sign_init=0.0),
    "batch_ensemble": lambda: sb.BatchEnsemble(components=2, **ONES),
    "dropout": lambda: sb.MCDropout(),
    "variational_dropout": lambda: sb.MCDropout(granularity="channel"),
    "drop_connect": lambda: sb.DropConnect(),
    "emp": lambda: sb.EMP.paper(patch=(nn.LSTM, nn.GRU, nn.RNN)),
    "ecmp": lambda: sb.ECMP.paper(patch=(nn.LSTM, nn.GRU, nn.RNN)),
}


def grid():
    for kind, layers, both, projected, packed, first, bias in itertools.product(
        LAYERS, (1, 2), (False, True), (False, True), (False, True), (False, True), (True, False)
    ):
        if (projected and kind != "lstm") or (not bias and layers > 1):
            continue
        options = {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
        yield kind, options | ({"proj_size": 2} if projected else {}), packed


GRID = list(grid())


def gradients(outputs, parameters):
    total = sum(
        (y * torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y[0].shape)).sum() for y in outputs
    )
    return torch.autograd.grad(total, parameters)


def pair(kind, options, method, dtype=torch.float64):
    torch.manual_seed(1)
    plain = Sequences(kind, states=True, **options).to(dtype)
    return plain, sb.bayesianize(copy.deepcopy(plain), method)


def check_mean(kind, options, packed, method, dtype, tolerance):
    plain, model = pair(kind, options, method, dtype)
    args = (inputs(dtype=dtype), LENGTHS) if packed else (inputs(dtype=dtype),)
    names = [name for name, _ in plain.named_parameters()]
    expected = plain(*args)
    wanted = gradients(expected, list(plain.parameters()))
    found = sb.draw(model, *args, noise="mean")
    own = gradients([y.mean(0) for y in found], [dict(model.named_parameters())[name] for name in names])
    for y, z in zip(expected, found, strict=True):
        torch.testing.assert_close(z, y.expand_as(z), rtol=tolerance, atol=tolerance)
    for wanted_grad, grad in zip(wanted, own, strict=True):
        grad = grad.sum(0) if grad.dim() > wanted_grad.dim() else grad
        torch.testing.assert_close(grad, wanted_grad, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(("kind", "options", "packed"), GRID)
def test_at_the_mean_it_is_torchs_own_layer(kind, options, packed):
    for method in (sb.MeanField.paper(), sb.Rank1.paper(components=2, **ONES)):
        check_mean(kind, options, packed, method, torch.float64, 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_every_method_at_the_mean(method, kind):
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    for packed in (False, True):
        check_mean(kind, options, packed, METHODS[method](), torch.float32, 1e-5)


def without_spread(model):
    """σ of 1e-7, the least there is: what the noise adds is below any tolerance of 1e-5."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("rho", "log_u", "log_v")):
                parameter.fill_(-60.0)
    return model


@pytest.mark.parametrize(("kind", "options", "packed"), [g for g in GRID if g[1]["bias"]])
def test_step_by_step_it_is_torchs_own_layer(kind, options, packed):
    args = (inputs(), LENGTHS) if packed else (inputs(),)
    for method in (sb.Rank1.paper(components=2, **ONES), sb.MeanField.paper(estimator="flipout")):
        plain, model = pair(kind, options, method)
        for y, z in zip(plain(*args), sb.draw(without_spread(model), *args, samples=2), strict=True):
            torch.testing.assert_close(z, y.expand_as(z), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 2}])
def test_every_row_has_the_weights_of_its_factors(monkeypatch, kind, options, packed):
    """Outputs and gradients of per-example factors, against torch's layer on each row with r sᵀ in its weights."""
    if "proj_size" in options and kind != "lstm":
        pytest.skip("only LSTMs project")
    plain, model = pair(kind, options, sb.Rank1.paper(components=2))
    made = {}
    mapped = Rank1Rule.mapped

    def kept(rule, op, frame):
        one = mapped(rule, op, frame)
        if one.inner is not None:  # not the pass that looks at the rows
            made[op.key] = one
        return one

    monkeypatch.setattr(Rank1Rule, "mapped", kept)
    args = (inputs(), LENGTHS) if packed else (inputs(),)
    found = [y.flatten(0, 1) for y in sb.draw(model, *args, samples=2, seed=3)]
    factors = [t for one in made.values() for t in (one.inner, one.outer)]
    shared = {name: p for name, p in model.named_parameters() if ".bayes" not in name}
    rows = []
    for row in range(len(found[0])):
        own = {}
        for kernel in model.rnn.kernels:
            one = made[kernel.key]
            own[f"rnn.{kernel.names['weight']}"] = kernel.weight * torch.outer(one.outer[row], one.inner[row])
            if kernel.bias is not None:
                own[f"rnn.{kernel.names['bias']}"] = kernel.bias[row // (2 * BATCH)]
        example = [a[row % BATCH : row % BATCH + 1] for a in args]
        rows.append(functional_call(plain, own, tuple(example)))
    expected = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    for y, z in zip(expected, found, strict=True):
        torch.testing.assert_close(z, y, rtol=1e-12, atol=1e-12)
    everything = [*factors, *shared.values()]
    weights = [torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5)) for y in found]
    totals = [sum((y * w).sum() for y, w in zip(ys, weights, strict=True)) for ys in (found, expected)]
    grads = [torch.autograd.grad(total, everything, retain_graph=True) for total in totals]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("method", ["meanfield", "rank1", "flipout", "dropout"])
def test_packed_sequences_are_each_alone(method, kind):
    torch.manual_seed(0)
    net = Sequences(
        kind, states=True, num_layers=2, bidirectional=True, batch_first=True, dropout=0.0
    ).double()
    model = sb.bayesianize(net, METHODS[method]())
    x = inputs()
    for noise in ("example", "shared"):
        y, *last = sb.draw(model, x, LENGTHS, samples=2, seed=4, noise=noise)
        for i, length in enumerate(LENGTHS.tolist()):
            alone, *own = sb.draw(
                model, x[i : i + 1, :length], samples=2, seed=4, noise=noise, first_example=i
            )
            if method == "dropout":  # masks of elements are made for the whole sequence
                continue
            torch.testing.assert_close(y[:, i, :length], alone[:, 0], rtol=1e-12, atol=1e-12)
            assert not y[:, i, length:].any()
            for a, b in zip(last, own, strict=True):
                torch.testing.assert_close(a[:, i], b[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["meanfield", "rank1", "batch_ensemble", "additive"])
def test_initial_states(method, packed, kind):
    """A sequence cut in two, the states handed over, is the sequence; with the same noise in both parts."""
    _, model = pair(kind, {"num_layers": 2, "batch_first": True}, METHODS[method]())
    x = inputs()
    lengths = torch.full((BATCH,), 3) if packed else None
    whole = sb.draw(model, x, seed=1)
    start, *states = sb.draw(model, x[:, :2], seed=1)
    for component in range(len(start)):
        own = [s[component] for s in states]
        rest, *_ = sb.draw(model, x[:, 2:], lengths, *own, seed=1)
        torch.testing.assert_close(rest[component], whole[0][component, :, 2:], rtol=1e-12, atol=1e-12)


def test_unbatched_sequences():
    for kind, (make, own) in LAYERS.items():
        plain = make(SIZE, HIDDEN, num_layers=2, **own).double()
        model = sb.bayesianize(copy.deepcopy(plain), sb.MeanField.paper(stddev_init=1e-6))
        x = inputs()[0]
        states = [torch.randn(2, HIDDEN, dtype=x.dtype) for _ in range(2 if kind == "lstm" else 1)]
        hx = tuple(states) if kind == "lstm" else states[0]
        (y, last), (z, own_last) = plain(x, hx), model(x, hx)
        torch.testing.assert_close(z, y, rtol=1e-3, atol=1e-3)
        assert [s.shape for s in own_last] == [s.shape for s in last]


def test_wrong_inputs_say_what_is_wrong():
    model = sb.bayesianize(Sequences(batch_first=True), sb.MeanField.paper())
    with pytest.raises(ValueError, match=r"layer 'rnn' \(LSTM\).*2 or 3 dimensions"):
        model.rnn(torch.zeros(2, 2, 2, SIZE))
    with pytest.raises(RuntimeError, match=r"layer 'rnn'.*states"):
        model.rnn(torch.zeros(2, 2, SIZE), (torch.zeros(1, HIDDEN), torch.zeros(1, HIDDEN)))
    with pytest.raises(RuntimeError, match="input_size"):
        model.rnn(torch.zeros(2, 2, SIZE + 1))
    with pytest.raises(RuntimeError, match="hidden"):
        model.rnn(torch.zeros(2, 2, SIZE), (torch.zeros(1, 3, HIDDEN), torch.zeros(1, 3, HIDDEN)))
    with pytest.raises(RowError, match="rows"):
        sb.draw(sb.bayesianize(nn.LSTM(SIZE, HIDDEN), sb.Rank1.paper()), torch.zeros(STEPS, 3, SIZE))
