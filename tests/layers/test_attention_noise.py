"""What is random in attention layers: once per sequence, gradients, the KL, moments, seeds."""

import pytest
import torch
from helpers_attention import BATCH, HEADS, SEPARATE, SIZE, Attended, inputs
from torch import nn

import slimbayes as sb
from slimbayes.accelerate.late_tiling import LATE_TILING
from slimbayes.core.posteriors import positive
from slimbayes.core.rules import dropout as dropping

ONE_FUNCTION = {
    "meanfield": lambda: sb.MeanField.paper(stddev_init=0.3),
    "ktied": lambda: sb.KTied.paper(stddev_init=0.3),
    "flipout": lambda: sb.KTied.paper(stddev_init=0.3, estimator="flipout"),
    "rank1": lambda: sb.Rank1.paper(components=2, dropout_rate=0.2),
    "rank1_cauchy": lambda: sb.Rank1.paper(
        components=2, posterior="cauchy", dropout_rate=0.1, factors="input"
    ),
    "additive": lambda: sb.Rank1.paper(components=2, perturbation="additive", dropout_rate=0.1),
    "channel_dropout": lambda: sb.MCDropout(rate=0.3, granularity="channel"),
    "drop_connect": lambda: sb.DropConnect(rate=0.3),
    "emp": lambda: sb.EMP.paper(patch=(nn.MultiheadAttention,), init_noise=0.5),
}
METHODS = {
    **ONE_FUNCTION,
    "local": lambda: sb.MeanField.paper(stddev_init=0.3, estimator="local"),
    "ktied_local": lambda: sb.KTied.paper(stddev_init=0.3, estimator="local"),
    "dropout": lambda: sb.MCDropout(rate=0.3),
    "ecmp": lambda: sb.ECMP.paper(patch=(nn.MultiheadAttention,), init_noise=0.5),
}


class Self(nn.Module):
    """Causal self-attention [R, T, E], or attention to a memory of other sizes; the batch inside comes second."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, **options)

    def forward(self, x):
        x = x.transpose(0, 1)
        if self.attention._qkv_same_embed_dim:
            given = (x, x, x)
        else:
            given = (x, x[..., : self.attention.kdim], x[..., :1].expand(-1, -1, self.attention.vdim))
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return self.attention(*given, attn_mask=mask, need_weights=False)[0].transpose(0, 1)


def convert(net, method):
    torch.manual_seed(2)
    return sb.bayesianize(net.double(), METHODS[method]())


def sequences(batch=BATCH, steps=5):
    return torch.randn(batch, steps, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", ONE_FUNCTION)
def test_noise_is_one_for_a_whole_sequence(method, noise):
    """A sequence cut short has the start of the outputs; noise made for every position would not know where it ends."""
    for options in ({}, SEPARATE):
        model = convert(Self(**options), method)
        x = sequences()
        whole = sb.draw(model, x, samples=4, seed=1, noise=noise)
        part = sb.draw(model, x[:, :2], samples=4, seed=1, noise=noise)
        torch.testing.assert_close(part, whole[:, :, :2], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(whole, whole[:1])


@pytest.mark.parametrize("method", ["rank1", "flipout", "local", "dropout"])
def test_noise_of_equal_examples(method):
    """Of equal vectors at all positions of all examples: who has noise of its own is seen."""
    model = convert(Self(), method)
    x = sequences(1, 1).expand(BATCH, 5, SIZE)
    by_position = method in ("local", "dropout")
    for seed in (None, 1):
        own = sb.draw(model, x, samples=2, seed=seed)
        assert torch.allclose(own, own[:, :, :1]) != by_position
        assert not torch.isclose(own[:, 0], own[:, 1]).flatten(1).all(1).any()
        shared = sb.draw(model, x, samples=2, seed=seed, noise="shared")
        assert torch.allclose(shared, shared[:, :1])


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", METHODS)
def test_with_a_seed_pieces_have_the_draws_of_the_whole(method, noise):
    for options in ({"dropout": 0.4 if method == "dropout" else 0.0}, SEPARATE):
        model = convert(Self(**options), method).eval()
        x = sequences(4)
        whole = sb.draw(model, x, samples=2, seed=5, noise=noise)
        components = len(whole) // 2
        for grad in (False, True):
            pieces = []
            with torch.set_grad_enabled(grad):
                for s in range(2):
                    kept = {"first_sample": s, "seed": 5, "noise": noise}
                    parts = [sb.draw(model, x[i : i + 2], first_example=i, **kept) for i in (0, 2)]
                    pieces.append(torch.cat(parts, 1).unflatten(0, (components, 1)))
            joined = torch.stack(pieces, 2).reshape(whole.shape)
            torch.testing.assert_close(joined, whole, rtol=1e-10, atol=1e-10)


class Padded(nn.Module):
    """What comes before is computed once for all draws; later layers meet a mask that is not repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.MultiheadAttention(SIZE, HEADS, batch_first=True) for _ in range(2))

    def forward(self, x, padding):
        x = x.tanh()
        y, _ = self.first(x, x, x, key_padding_mask=padding)
        return self.second(y, x, x, key_padding_mask=padding)[0]


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("noise", ["example", "shared", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_late_tiling_has_the_same_draws(method, noise):
    model = convert(Padded(), method).eval()
    x, padding = sequences(6), torch.arange(5) >= torch.tensor([1, 2, 3, 4, 5, 5])[:, None]
    with torch.no_grad(), sb.fast_paths(late=True):
        late = sb.draw(model, x, padding, samples=3, seed=1, noise=noise)
        plans = [plan for plan in LATE_TILING.plans.get(model, {}).values() if plan is not None]
        with sb.fast_paths(late=False):
            plain = sb.draw(model, x, padding, samples=3, seed=1, noise=noise)
    torch.testing.assert_close(late, plain, rtol=1e-10, atol=1e-10)
    assert plans and plans[0].layers == {"first"}
    if noise == "example":
        likelihood = sb.Gaussian()
        for chunk in (None, 4):
            found = sb.predict(model, x, padding, samples=3, seed=1, chunk=chunk, likelihood=likelihood).mean
            torch.testing.assert_close(found, plain.mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["ktied", "flipout", "local", "ktied_local", "rank1", "additive"])
@pytest.mark.parametrize("noise", ["example", "shared"])
def test_gradients_by_finite_differences(method, noise):
    for options in ({"add_bias_kv": True}, SEPARATE):
        model = convert(Self(**options), method)
        x = sequences()
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch.manual_seed(0)
        direction = [torch.randn_like(p) for p in parameters]

        def loss(model=model, x=x):
            return sb.draw(model, x, samples=2, seed=1, noise=noise).square().mean() + 0.1 * sb.kl(model)

        grads = torch.autograd.grad(loss(), parameters)
        slope = sum((g * v).sum() for g, v in zip(grads, direction, strict=True))
        step, values = 1e-5, []
        for sign in (1, -2):
            with torch.no_grad():
                for p, v in zip(parameters, direction, strict=True):
                    p.add_(v, alpha=sign * step)
            with sb.fast_paths(late=False), torch.no_grad():
                values.append(loss())
        torch.testing.assert_close(slope, (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-7)


def test_estimators_have_the_same_moments():
    """One key: attention is W_out (W_v x + b) + b_out, whichever way its noise is made."""
    torch.manual_seed(0)
    net, x = Attended("self", batch_first=True), torch.randn(1, 1, SIZE)
    sizes = {"shared": (1, 20000), "local": (500, 40), "flipout": (4, 5000)}  # examples and samples
    for kind in (sb.MeanField, sb.KTied):
        moments = {}
        for estimator, (examples, samples) in sizes.items():
            torch.manual_seed(5)  # which sets the spreads
            model = sb.bayesianize(
                Attended("self", batch_first=True), kind(stddev_init=0.2, estimator=estimator)
            )
            model.load_state_dict(net.state_dict(), strict=False)
            given = x.expand(examples, 1, SIZE)
            with torch.no_grad():
                made = sb.draw(model, given, given, given, samples=samples)[0].flatten(0, 2)
            moments[estimator] = torch.cat([made.mean(0), made.std(0)])
        for estimator in ("local", "flipout"):
            torch.testing.assert_close(moments[estimator], moments["shared"], rtol=0.05, atol=0.03)


def test_kl_is_the_sum_over_the_kernels():
    for options in ({}, SEPARATE):
        for method in ("meanfield", "flipout"):
            model = sb.bayesianize(
                Self(**options).double(),
                sb.MeanField.paper(estimator="flipout" if method == "flipout" else "shared"),
            )
            total = 0.0
            for kernel in model.attention.kernels:
                for mean, spread in ((kernel.weight, kernel.bayes.weight), (kernel.bias, kernel.bayes.bias)):
                    if mean is not None:
                        q = torch.distributions.Normal(mean, positive(spread.rho))
                        p = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
                        total = total + torch.distributions.kl_divergence(q, p).sum()
            torch.testing.assert_close(sb.kl(model), total, rtol=1e-10, atol=0)
            sb.draw(model, sequences(), samples=2)  # what the draw leaves for the KL
            torch.testing.assert_close(sb.kl(model), total, rtol=1e-10, atol=0)


def test_own_dropout_follows_the_mode_and_the_method():
    x = sequences()
    for method, active in ((sb.MeanField.paper(stddev_init=1e-6), False), (sb.MCDropout(rate=0.0), True)):
        model = sb.bayesianize(Self(dropout=0.5).double(), method)
        for training in (True, False):
            model.train(training)
            a, b = (sb.draw(model, x) for _ in range(2))
            assert torch.allclose(a, b, atol=1e-4) != (active or training)
    silent = [sb.draw(model.train(), x, noise="mean") for _ in range(2)]
    assert torch.equal(*silent)


def test_an_input_is_dropped_once(monkeypatch):
    """A tensor that is query, key and value has one mask; what is projected out has another."""
    calls, drop = [], dropping.dropped
    monkeypatch.setattr(dropping, "dropped", lambda x, *rest: calls.append(x.shape) or drop(x, *rest))
    for form, count in (("self", 2), ("memory", 3), ("three", 4)):
        model = sb.bayesianize(Attended(form, batch_first=True), sb.MCDropout(rate=0.5)).eval()
        given = inputs(dtype=torch.float32)
        with sb.fast_paths(late=False):
            sb.draw(model, *given)
            calls.clear()
            sb.draw(model, *given, samples=2)
        assert len(calls) == count and all(shape[0] == 2 * BATCH for shape in calls)
