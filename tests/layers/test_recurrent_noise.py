"""What is random in recurrent layers: once per sequence, gradients, the KL, counts, seeds."""

import copy
import math

import pytest
import torch
from helpers_sequences import BATCH, CELLS, HIDDEN, LAYERS, SIZE, Looped, Sequences, inputs
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import cpu
from slimbayes.accelerate.cpu import lstm_layer
from slimbayes.core.posteriors import positive

METHODS = {
    "meanfield": lambda: sb.MeanField.paper(stddev_init=0.3),
    "ktied": lambda: sb.KTied.paper(stddev_init=0.3),
    "flipout": lambda: sb.MeanField.paper(stddev_init=0.3, estimator="flipout"),
    "rank1": lambda: sb.Rank1.paper(components=2, dropout_rate=0.2),
    "rank1_cauchy": lambda: sb.Rank1.paper(components=2, posterior="cauchy", dropout_rate=0.1),
    "additive": lambda: sb.Rank1.paper(components=2, perturbation="additive", dropout_rate=0.1),
    "variational_dropout": lambda: sb.MCDropout(rate=0.3, granularity="channel"),
    "drop_connect": lambda: sb.DropConnect(rate=0.3),
    "emp": lambda: sb.EMP.paper(
        patch=tuple(kind for kind, _ in (*LAYERS.values(), *CELLS.values())), init_noise=0.5
    ),
}
VARIANTS = {
    "only_inputs": lambda: sb.Rank1.paper(components=2, factors="input", dropout_rate=0.1),
    "only_outputs": lambda: sb.Rank1.paper(components=2, factors="output", dropout_rate=0.1),
    "random_inputs": lambda: sb.Rank1.paper(components=2, random="input", dropout_rate=0.1),
    "lognormal": lambda: sb.Rank1.paper(
        components=2, posterior="lognormal", dropout_rate=0.1, kl_reduction="mean"
    ),
    "additive_output": lambda: sb.Rank1.paper(
        components=2, perturbation="additive", factors="output", dropout_rate=0.1
    ),
}
EVERY = {**METHODS, **VARIANTS, "dropout": lambda: sb.MCDropout(rate=0.3)}


def convert(net, method):
    torch.manual_seed(2)
    return sb.bayesianize(net.double(), EVERY[method]())


@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_noise_is_one_for_a_whole_sequence(kind, method, noise):
    """A sequence cut short has the start of the outputs; noise made for every step would not know where it ends."""
    for net in (Sequences(kind, batch_first=True, num_layers=2), Looped(kind)):
        model = convert(net, method)
        x = inputs()
        whole = sb.draw(model, x, samples=4, seed=1, noise=noise)
        part = sb.draw(model, x[:, :2], samples=4, seed=1, noise=noise)
        torch.testing.assert_close(part, whole[:, :, :2], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(whole, whole[:1])


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_of_equal_inputs_stays_a_function_of_its_state(method):
    """Two halves of a sequence, the second started where the first ended, meet the same weights: h → h' is one map."""
    model = convert(Sequences("rnn_tanh", states=True, batch_first=True), method)
    x = torch.ones(BATCH, 6, SIZE, dtype=torch.float64)
    whole, last = sb.draw(model, x, seed=3)
    _, half = sb.draw(model, x[:, :3], seed=3)
    for draw in range(len(whole)):
        rest, end = sb.draw(model, x[:, 3:], None, half[draw], seed=3)
        torch.testing.assert_close(rest[draw], whole[draw, :, 3:], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(end[draw], last[draw], rtol=1e-12, atol=1e-12)


def in_pieces(model, given, **options):
    """The draws of two examples at a time."""
    starts = range(0, len(given[0]), 2)
    return torch.cat(
        [sb.draw(model, *[g[i : i + 2] for g in given], first_example=i, **options) for i in starts], 1
    )


@pytest.mark.parametrize("noise", ["example", "shared", "mean"])
@pytest.mark.parametrize("method", [*METHODS, "dropout"])
@pytest.mark.parametrize("packed", [False, True])
def test_with_a_seed_pieces_have_the_draws_of_the_whole(method, noise, packed):
    model = convert(
        Sequences(num_layers=2, bidirectional=True, dropout=0.4 if method == "dropout" else 0.0), method
    )
    model.eval()
    x, lengths = inputs(5), torch.tensor([5, 2, 3, 5, 1])
    given = (x, lengths) if packed else (x,)
    whole = sb.draw(model, *given, samples=3, seed=5, noise=noise)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            pieces = [in_pieces(model, given, first_sample=s, seed=5, noise=noise) for s in range(3)]
        components = len(whole) // 3
        joined = torch.stack([p.unflatten(0, (components, 1)) for p in pieces], 2).reshape(whole.shape)
        torch.testing.assert_close(joined, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["meanfield", "ktied", "rank1", "flipout"])
def test_predictions_are_those_of_draws(method):
    """Repeated late and in chunks, the draws of a seed are the same."""
    model = convert(nn.Sequential(nn.Linear(SIZE, SIZE), Sequences(batch_first=True)), method).eval()
    x = inputs(5)
    draws = sb.draw(model, x, samples=4, seed=1)
    likelihood = sb.Gaussian()
    for chunk in (None, 3):
        found = sb.predict(model, x, samples=4, seed=1, chunk=chunk, likelihood=likelihood).mean
        torch.testing.assert_close(found, draws.mean(0), rtol=1e-9, atol=1e-9)


PAIRS = [(m, net) for m in METHODS if m != "emp" for net in ("lstm", "gru", "cell")]


@pytest.mark.parametrize(("method", "net"), [*PAIRS, *[(m, "lstm") for m in VARIANTS]])
@pytest.mark.parametrize("noise", ["example", "shared"])
def test_gradients_by_finite_differences(method, noise, net):
    """Several samples before one backward pass."""
    made = Looped("lstm") if net == "cell" else Sequences(net, num_layers=2, batch_first=True)
    model = convert(made, method)
    x, y = inputs(3, 4), torch.randn(3, 4, HIDDEN, dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    direction = [torch.randn_like(p) for p in parameters]

    def loss():
        draws = [sb.draw(model, x, samples=2, seed=s, noise=noise) for s in (1, 2)]
        return sum((d - y).square().mean() for d in draws) + 0.1 * sb.kl(model)

    grads = torch.autograd.grad(loss(), parameters)
    slope = sum((g * v).sum() for g, v in zip(grads, direction, strict=True))
    step, values = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for p, v in zip(parameters, direction, strict=True):
                p.add_(v, alpha=sign * step)
        with sb.fast_paths(late=False), torch.no_grad():
            values.append(loss())
        with torch.no_grad():
            for p, v in zip(parameters, direction, strict=True):
                p.sub_(v, alpha=sign * step)
    torch.testing.assert_close(slope, (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("steps", [1, 5, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_of_steps(monkeypatch, steps, reverse):
    """However many steps go together, outputs and gradients are those of one block."""
    model = convert(Sequences(bidirectional=reverse, batch_first=True), "rank1")
    x = inputs(2, steps).requires_grad_()
    rows = 2 * 2 * 4 * HIDDEN
    results = []
    for length in (100, 1, 2, 3):
        monkeypatch.setattr(lstm_layer, "_BLOCK", length * rows)
        draws = sb.draw(model, x, seed=1)
        grads = torch.autograd.grad(draws.square().sum(), [x, *model.parameters()], allow_unused=True)
        results.append([draws, *[g for g in grads if g is not None]])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_parts_of_rows(monkeypatch, rows, packed):
    """However many rows are predicted together, repeated late or not, they are those of a draw with gradients."""
    model = convert(Sequences(bidirectional=True, batch_first=True, num_layers=2), "rank1").eval()
    given = (inputs(5), torch.tensor([5, 2, 3, 5, 1])) if packed else (inputs(5),)
    whole = sb.draw(model, *given, samples=2, seed=1)
    monkeypatch.setattr(lstm_layer, "_PART", rows * 4 * HIDDEN)
    for late in (True, False):
        with torch.no_grad(), sb.fast_paths(late=late):
            parts = sb.draw(model, *given, samples=2, seed=1)
        torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-12)


def test_kl_is_the_sum_over_the_kernels():
    for kind, both in (("lstm", True), ("gru", False)):
        model = convert(Sequences(kind, num_layers=2, bidirectional=both), "meanfield")
        total = 0.0
        for kernel in model.rnn.kernels:
            for mean, spread in ((kernel.weight, kernel.bayes.weight), (kernel.bias, kernel.bayes.bias)):
                q = torch.distributions.Normal(mean, positive(spread.rho))
                p = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
                total = total + torch.distributions.kl_divergence(q, p).sum()
        torch.testing.assert_close(sb.kl(model), total, rtol=1e-10, atol=0)
        sb.draw(model, inputs())  # what the draw leaves for the KL
        torch.testing.assert_close(sb.kl(model), total, rtol=1e-10, atol=0)


def test_kl_after_a_draw_counts_every_bias_once():
    """Under flipout a kernel's weight is sampled without its mean, and its bias with it."""
    for kind in (sb.MeanField, sb.KTied):
        model = sb.bayesianize(nn.Sequential(Sequences(), nn.Linear(HIDDEN, 2)), kind(estimator="flipout"))
        before = sb.kl(model)
        for seed in (None, 1):
            sb.draw(model, inputs(dtype=torch.float32), samples=2, seed=seed)
            torch.testing.assert_close(sb.kl(model), before, rtol=1e-5, atol=0)


def test_kl_of_factors_and_tied_spreads():
    model = convert(Sequences(proj_size=2, bidirectional=True), "rank1")
    total = 0.0
    for kernel in model.rnn.kernels:
        for factor in (kernel.bayes.r, kernel.bayes.s):
            q = torch.distributions.Normal(factor.loc, positive(factor.spread.rho))
            p = torch.distributions.Normal(torch.ones_like(factor.loc), 0.1)
            total = total + torch.distributions.kl_divergence(q, p).sum()
    torch.testing.assert_close(sb.kl(model), total, rtol=1e-10, atol=0)
    model = convert(Sequences(), "ktied")
    total = 0.0
    for kernel in model.rnn.kernels:
        spread = kernel.bayes.weight
        sigma = spread.log_u.exp() @ spread.log_v.exp().t()
        for mean, own in ((kernel.weight, sigma), (kernel.bias, positive(kernel.bayes.bias.rho))):
            total = (
                total + (math.log(0.3) - own.log() + (own.square() + mean.square()) / (2 * 0.09) - 0.5).sum()
            )
    torch.testing.assert_close(sb.kl(model), total, rtol=1e-10, atol=0)


def test_one_index_for_all_kernels_of_a_layer():
    """EMP draws one component per layer: its kernels come from the same version."""
    model = convert(Sequences(num_layers=2, batch_first=True), "emp")
    x = inputs()
    versions = []
    for k in range(5):
        alone = Sequences(num_layers=2, batch_first=True).double()
        alone.load_state_dict({n: p[k] for n, p in model.state_dict().items() if ".bayes." not in n})
        versions.append(alone(x))
    for options in ({"seed": 1}, {"seed": 2, "noise": "shared"}, {}):
        for draw in sb.draw(model, x, samples=8, **options):
            assert any(torch.allclose(draw, v, rtol=1e-10) for v in versions)
    with torch.no_grad():
        for seed in range(8):
            found = sb.draw(model.eval(), x, seed=seed)[0]
            assert any(torch.allclose(found, v, rtol=1e-10) for v in versions)


def imdb():
    net = nn.Sequential(nn.Embedding(20_000, 128), nn.LSTM(128, 128, batch_first=True))
    nn.init.zeros_(net[1].bias_hh_l0).requires_grad_(False)  # one bias, as in Keras
    return net


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (sb.MeanField.paper(biases=False), 2_822_656),
        (sb.KTied.paper(rank=1, biases=False), 2_692_864),
        (sb.KTied.paper(rank=2, biases=False), 2_694_144),
        (sb.KTied.paper(rank=3, biases=False), 2_695_424),
    ],
)
def test_counts_of_the_ktied_papers_lstm(method, count):
    assert sb.summary(sb.bayesianize(imdb(), method)).trainable == count


def test_counts_of_rank1_factors():
    """α [K, in] and γ [K, 4u] for both kernels, means and scales; K biases."""
    model = sb.bayesianize(nn.LSTM(10, 6), sb.Rank1.paper(components=4))
    added = 4 * 2 * (10 + 24 + 6 + 24) + 3 * 2 * 24
    assert sb.summary(model).parameters == sum(p.numel() for p in nn.LSTM(10, 6).parameters()) + added


def test_long_sequences_with_heavy_tails():
    """A thousand steps of Cauchy factors: finite losses and gradients that an optimizer can use."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"rnn": nn.LSTM(4, 8, batch_first=True), "head": nn.Linear(8, 2)})
    net.forward = lambda x: net["head"](net["rnn"](x)[0][:, -1])
    model = sb.bayesianize(net, sb.Rank1.paper(components=2, posterior="cauchy", dropout_rate=1e-3))
    optimizer = torch.optim.Adam(sb.parameter_groups(model, 1e-2, 0.0))
    x, y = torch.randn(8, 1000, 4), torch.randint(2, (8,))
    for step in range(6):
        loss = sb.elbo(sb.draw(model, x, noise=("example", "shared")[step % 2]), y, model, num_data=1000).loss
        optimizer.zero_grad()
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()


def test_one_component_per_step():
    """A training step of one component is that component's part of a step of all."""
    torch.manual_seed(0)
    net = Sequences(batch_first=True, num_layers=2).double()
    model = sb.bayesianize(net, sb.Rank1.paper(components=3, components_per_step=1, dropout_rate=0.1))
    x = inputs()
    for noise in ("example", "shared", "mean"):
        whole = sb.draw(model.eval(), x, seed=4, noise=noise)
        part = sb.draw(model.train(), x, seed=4, noise=noise)
        assert part.shape[0] == 1
        assert any(torch.allclose(part[0], own, rtol=1e-9) for own in whole)


def test_copies_keep_their_own_noise():
    model = convert(Sequences(batch_first=True), "rank1")
    twin = copy.deepcopy(model)
    x = inputs()
    torch.testing.assert_close(sb.draw(twin, x, seed=1), sb.draw(model, x, seed=1), rtol=0, atol=0)
    with torch.no_grad():
        twin.rnn.weight_ih_l0.zero_()
        twin.rnn.bayes["hh_l0"].r.loc.zero_()
    assert twin.rnn.kernels[0].weight is twin.rnn.weight_ih_l0
    assert model.rnn.weight_ih_l0.any() and model.rnn.kernels[1].bayes.r.loc.any()


def test_second_derivatives_are_an_error_or_right():
    x = inputs().requires_grad_()
    model = convert(Sequences(), "rank1")
    for right in (model, convert(Looped(), "rank1")):  # in float64 by torch's operations
        (grad,) = torch.autograd.grad(sb.draw(right, x, seed=0).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        assert second.abs().max() > 0
    if cpu.library() is not None:
        x = x.detach().float().requires_grad_()
        with pytest.raises(RuntimeError, match=r"no second derivatives .* nn.LSTMCell in a loop"):
            torch.autograd.grad(sb.draw(model.float(), x, seed=0).sum(), x, create_graph=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_autocast(kind, packed):
    model = sb.bayesianize(Sequences(kind, num_layers=2), EVERY["dropout"]())
    x, lengths = inputs(dtype=torch.float32), torch.tensor([3, 5, 1, 4])
    given = (x, lengths) if packed else (x,)
    whole = sb.draw(model, *given, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sb.draw(model, *given, seed=0)
    torch.testing.assert_close(found.float(), whole, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("method", ["rank1", "meanfield"])
def test_no_rows_and_no_steps(method):
    model = convert(Sequences(batch_first=True), method)
    with pytest.raises(ValueError, match=r"'rnn' .LSTM. got sequences without steps"):
        sb.draw(model, inputs(steps=0))
    single = sb.bayesianize(Sequences(batch_first=True).double(), sb.Rank1.paper(components=1))
    assert single(inputs(batch=0)).shape == (0, 5, HIDDEN)
