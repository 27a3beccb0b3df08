"""Predictive distributions against brute force and scipy, and streaming against all draws at once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import Tensor

from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from slimbayes.core.predictive import GaussianPredictive, Moments, Predictive

D, B, C = 7, 6, 4
LIKELIHOODS = [Categorical(), Bernoulli(), Gaussian(3.0), Gaussian(learn="per_example")]
STATISTICS = ["mean", "variance", "aleatoric", "epistemic", "expected_entropy"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def outputs(*shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def targets(likelihood: Likelihood, pred: Predictive) -> Tensor:
    return pred.sample(1)[0] if isinstance(likelihood, Categorical | Bernoulli) else pred.mean + 0.3


def close(actual: Tensor, expected: object, tolerance: float = 1e-10) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Closed forms


def test_categorical_against_brute_force() -> None:
    draws, y = outputs(D, B, C), torch.randint(C, (B,))
    pred = Categorical().predictive(draws)
    p = special.softmax(draws.numpy(), axis=-1)
    close(pred.mean, p.mean(0))
    close(pred.aleatoric, (p * (1 - p)).mean(0))
    close(pred.epistemic, p.var(0))
    close(pred.variance, pred.mean * (1 - pred.mean))
    close(pred.entropy, stats.entropy(p.mean(0), axis=-1))
    close(pred.expected_entropy, stats.entropy(p, axis=-1).mean(0))
    divergence = stats.entropy(p, p.mean(0, keepdims=True), axis=-1).mean(0)  # KL of each draw to the mean
    close(pred.mutual_information, divergence)
    close(pred.log_prob(y), np.log(p.mean(0)[range(B), y]))


def test_bernoulli_is_the_two_class_categorical() -> None:
    draws, y = outputs(D, B, 1), torch.randint(2, (B,))
    pred = Bernoulli().predictive(draws)
    both = Categorical().predictive(torch.cat([torch.zeros_like(draws), draws], -1))
    for name in STATISTICS[:4]:
        close(getattr(pred, name), getattr(both, name)[:, 1:])
    for name in ("entropy", "expected_entropy", "mutual_information"):
        close(getattr(pred, name).squeeze(-1), getattr(both, name))
    close(pred.log_prob(y), both.log_prob(y))
    close(pred.interval(0.8)[1], both.interval(0.8)[1][:, 1:])


def test_gaussian_against_brute_force() -> None:
    draws, y = outputs(D, B, 4), outputs(B, 2)
    pred = Gaussian(learn="per_example").predictive(draws)
    f, variance = draws[..., :2].numpy(), np.exp(-draws[..., 2:].numpy())
    close(pred.mean, f.mean(0))
    close(pred.aleatoric, variance.mean(0))
    close(pred.epistemic, f.var(0))
    close(pred.variance, (f**2 + variance).mean(0) - f.mean(0) ** 2)
    close(pred.expected_entropy, stats.norm.entropy(f, variance**0.5).mean(0))
    joint = stats.norm.logpdf(y, f, variance**0.5).sum(-1)  # one draw explains all of a row's targets
    close(pred.log_prob(y), special.logsumexp(joint, axis=0) - math.log(D))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_law_of_total_variance_and_of_entropy(likelihood: Likelihood) -> None:
    pred = likelihood.predictive(outputs(D, B, C))
    assert torch.equal(pred.variance, pred.aleatoric + pred.epistemic)
    close(pred.entropy, pred.expected_entropy + pred.mutual_information)
    assert (pred.epistemic > 0).all() and (pred.mutual_information > 0).all()
    agreed = likelihood.predictive(outputs(1, B, C).expand(D, B, C))
    assert agreed.epistemic.max() < 1e-25
    assert agreed.mutual_information.min() >= 0 and agreed.mutual_information.max() < 1e-9


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-50, 50), min_size=4, max_size=4), min_size=1, max_size=6),
    which=st.integers(0, 3),
)
def test_jensen_the_mixture_is_never_worse_than_the_average(rows: list[list[float]], which: int) -> None:
    likelihood, draws = LIKELIHOODS[which], torch.tensor(rows, dtype=torch.float64).unsqueeze(1)
    pred = likelihood.predictive(draws)
    y = [torch.tensor([2]), torch.ones(1, 4), torch.zeros(1, 4), torch.zeros(1, 2)][which]
    average = likelihood.log_prob(draws, y).mean(0)
    assert (pred.log_prob(y) >= average - 1e-9 * (1 + average.abs())).all()
    assert (pred.epistemic >= 0).all() and (pred.mutual_information >= 0).all()


def test_log_prob_survives_probabilities_that_underflow() -> None:
    draws = torch.tensor([[[0.0, -500.0]], [[0.0, -400.0]]])
    for pred in (Categorical().predictive(draws), Categorical().predictive(Categorical().moments(draws))):
        assert pred.log_prob(torch.tensor([1])).item() == pytest.approx(-400 - math.log(2))
        assert pred.entropy.isfinite().all()


def test_gradients_flow_through_the_statistics() -> None:
    for likelihood in LIKELIHOODS:
        draws = outputs(3, 2, 4).requires_grad_()

        def statistics(f: Tensor, likelihood: Likelihood = likelihood) -> tuple[Tensor, ...]:
            pred = likelihood.predictive(f)
            return pred.mean, pred.variance, pred.mutual_information

        assert torch.autograd.gradcheck(statistics, draws, atol=1e-4)


# The Gaussian mixture


def mixture(loc: list[float], scale: list[float]) -> GaussianPredictive:
    f, s = torch.tensor(loc, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64)
    return Gaussian(learn="per_example").predictive(torch.stack([f, -2 * s.log()], -1).unsqueeze(1))


MIXTURES = {
    "one": ([3.0], [0.01]),
    "two": ([-1.0, 1.0], [0.5, 0.5]),
    "spike": ([0.3, 0.0], [1.0, 1e-3]),
    "apart": ([0.0, 1e4], [1.0, 2.0]),
    "many": (np.random.default_rng(0).normal(size=40).tolist(), np.geomspace(0.05, 3, 40).tolist()),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_entropy_against_adaptive_integration(name: str) -> None:
    loc, scale = (np.array(each) for each in MIXTURES[name])

    def integrand(y: float) -> float:
        return float(special.entr(stats.norm.pdf(y, loc, scale).mean()))

    knots = np.unique(np.concatenate([loc + k * scale for k in (-9, -4, -2, 0, 2, 4, 9)]))
    if name == "many":
        knots = np.append(knots[::12], knots[-1])
    expected = sum(integrate.quad(integrand, a, b)[0] for a, b in itertools.pairwise(knots))
    close(mixture(*MIXTURES[name]).entropy, [[expected]], 1e-5)


def test_mixture_entropy_in_pieces_equals_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = outputs(D, B, C)
    whole = Gaussian(learn="per_example").predictive(draws).entropy
    monkeypatch.setattr("slimbayes.core.mixtures.BUDGET", 2 * 64 * D)
    close(Gaussian(learn="per_example").predictive(draws).entropy, whole, 1e-6)
    assert Gaussian().predictive(draws[:, :0]).entropy.shape == (0, C)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_interval_inverts_the_distribution_function(name: str, level: float) -> None:
    loc, scale = (np.array(each) for each in MIXTURES[name])
    lower, upper = (end.item() for end in mixture(*MIXTURES[name]).interval(level))
    for end, q in ((lower, (1 - level) / 2), (upper, (1 + level) / 2)):
        step = 1e-6 * scale.min()
        below, above = (stats.norm.cdf(end + side, loc, scale).mean() for side in (-step, step))
        assert below - 1e-12 <= q <= above + 1e-12


def test_single_draw_interval_is_the_gaussian_quantile() -> None:
    lower, upper = Gaussian(4.0).predictive(torch.tensor([[1.0, 2.0]])).interval(0.9)
    close(upper, [1 + 0.5 * 1.6448536, 2 + 0.5 * 1.6448536], 1e-6)
    close(lower, [1 - 0.5 * 1.6448536, 2 - 0.5 * 1.6448536], 1e-6)


def test_class_interval_is_the_quantile_over_draws() -> None:
    for draws in (outputs(D, B, C), outputs(1, B, C)):
        p = special.softmax(draws.numpy(), axis=-1)
        for end, q in zip(Categorical().predictive(draws).interval(0.5), (0.25, 0.75), strict=True):
            close(end, np.quantile(p, q, axis=0))
    for wrong in (0.0, 1.0, 90):
        with pytest.raises(ValueError, match=f"level={wrong}"):
            Categorical().predictive(outputs(D, B, C)).interval(wrong)


# Samples


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_sample_moments(likelihood: Likelihood) -> None:
    pred = likelihood.predictive(outputs(3, 2, 4, scale=1.0))
    samples = pred.sample(40_000, torch.Generator().manual_seed(1))
    if isinstance(likelihood, Categorical):
        assert samples.shape == (40_000, 2) and samples.dtype is torch.int64
        samples = torch.nn.functional.one_hot(samples, 4).double()
    error = 5 * (pred.variance / 40_000).sqrt()  # five standard errors
    assert ((samples.mean(0) - pred.mean).abs() < error).all()
    torch.testing.assert_close(samples.var(0), pred.variance, rtol=0.08, atol=1e-3)


def test_targets_of_a_row_are_sampled_from_one_draw() -> None:
    draws = torch.tensor([-40.0, 40.0]).view(2, 1, 1).expand(2, 3, 2)  # both outputs of a draw agree
    for likelihood in (Bernoulli(), Gaussian(precision=100.0)):
        first, second = likelihood.predictive(draws).sample(200).unbind(-1)
        assert ((first - second).abs() < 1.5).all() and first.std() > 0.4
    tokens = torch.stack([draws, -draws], -1)  # [2, 3, 2, 2]
    first, second = Categorical().predictive(tokens).sample(200).unbind(-1)
    assert torch.equal(first, second) and 0.3 < first.double().mean() < 0.7


def test_samples_repeat_with_the_generators_seed() -> None:
    for likelihood in LIKELIHOODS:
        pred = likelihood.predictive(outputs(D, B, C))
        one, two, other = (pred.sample(5, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
        assert torch.equal(one, two) and not torch.equal(one, other) and pred.sample(2).shape[0] == 2


# Streaming


def stream(likelihood: Likelihood, draws: Tensor, sizes: list[int]) -> Moments:
    first, *rest = (likelihood.moments(chunk) for chunk in draws.split(sizes))
    for chunk in rest:
        first = first.merge(chunk)
    return first


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1), which=st.integers(0, 3), offset=st.booleans())
def test_streaming_equals_all_draws_at_once(sizes: list[int], which: int, offset: bool) -> None:
    likelihood = LIKELIHOODS[which]
    draws = outputs(sum(sizes), B, C)
    if offset and which >= 2:
        draws[..., :2] += 1e3  # where a sum of squares would lose six digits
    whole, streamed = likelihood.predictive(draws), likelihood.predictive(stream(likelihood, draws, sizes))
    names = STATISTICS + (["entropy", "mutual_information"] if which < 2 else [])
    for name in names:
        close(getattr(streamed, name), getattr(whole, name), 1e-10)


def test_streamed_float32_keeps_a_small_spread_on_a_large_mean() -> None:
    draws = (1000 + 0.1 * torch.randn(500, 1, dtype=torch.float64)).float()
    pred = Gaussian().predictive(stream(Gaussian(), draws, [1] * 500))
    close(pred.epistemic, draws.double().var(0, correction=0).float(), 1e-2)


@pytest.mark.parametrize("name", ["Categorical", "Bernoulli", "Bernoulli [B, 1]"])
def test_streamed_log_prob_and_samples_where_they_are_exact(name: str) -> None:
    likelihood = Categorical() if name == "Categorical" else Bernoulli()
    draws = {"Categorical": outputs(D, B, C), "Bernoulli": outputs(D, B)}.get(name, outputs(D, B, 1))
    whole, streamed = likelihood.predictive(draws), likelihood.predictive(stream(likelihood, draws, [3, 4]))
    y = targets(likelihood, whole)
    close(streamed.log_prob(y), whole.log_prob(y), 1e-10)
    samples = streamed.sample(4000)
    if isinstance(likelihood, Categorical):
        samples = torch.nn.functional.one_hot(samples, C)
    close(samples.double().mean(0), whole.mean, 0.05)


def test_what_needs_draws_says_so() -> None:
    draws = outputs(D, B, C)
    categorical, bernoulli, gaussian = (each.predictive(each.moments(draws)) for each in LIKELIHOODS[:3])
    tokens = Categorical().predictive(Categorical().moments(outputs(D, B, 2, C)))
    single = Bernoulli().predictive(Bernoulli().moments(draws[..., 0]))
    ones, labels = torch.ones(B, C), torch.zeros(B, 2, dtype=torch.int64)
    asked = {
        "draws of": lambda: categorical.draws,
        "interval of": lambda: categorical.interval(),
        "log_prob of this Cat": lambda: tokens.log_prob(labels),
        "sample of this Cat": lambda: tokens.sample(1),
        "interval of this B": lambda: bernoulli.interval(),
        "log_prob of this B": lambda: bernoulli.log_prob(ones),
        "log_prob of fractional": lambda: single.log_prob(ones[:, 0] / 2),
        "entropy of": lambda: gaussian.entropy,
        "entropy of this G": lambda: gaussian.mutual_information,
        "interval of this G": lambda: gaussian.interval(),
        "log_prob of this G": lambda: gaussian.log_prob(ones),
        "sample of this G": lambda: gaussian.sample(1),
    }
    for words, call in asked.items():
        with pytest.raises(ValueError, match=f"{words}.*keep_draws=True"):
            call()
    one_output = Gaussian().predictive(Gaussian().moments(draws[..., 0]))
    with pytest.raises(ValueError, match="log_prob of this GaussianPredictive"):
        one_output.log_prob(ones[:, 0])
    with pytest.raises(ValueError, match=r"\[6, 4\] and \[5, 4\].*Predictive\.cat"):
        Gaussian().moments(draws).merge(Gaussian().moments(draws[:, :5]))


# Batches, devices, printing


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_cat_undoes_indexing(likelihood: Likelihood, keep: bool) -> None:
    draws = outputs(D, B, C)
    pred = likelihood.predictive(draws if keep else likelihood.moments(draws))
    again = Predictive.cat([pred[:2], pred[2:5], pred[5:]])
    assert type(again) is type(pred) and len(pred[2:5]) == 3
    for name in STATISTICS:
        assert torch.equal(getattr(again, name), getattr(pred, name))
    masked, picked = pred[torch.arange(B) % 2 == 0], pred[torch.tensor([4])]
    assert torch.equal(masked.mean, pred.mean[::2]) and torch.equal(picked.mean, pred.mean[4:5])
    if keep:
        assert torch.equal(again.draws, draws) and torch.equal(masked.draws, draws[:, ::2])
        y = targets(likelihood, pred)
        close(again.log_prob(y), pred.log_prob(y))


def test_cat_and_indexing_refuse_what_they_cannot_do() -> None:
    pred = Categorical().predictive(outputs(D, B, C))
    others = [
        Categorical().predictive(outputs(D + 1, B, C)),
        Categorical().predictive(outputs(D, B, C + 1)),
        Categorical(ignore_index=0).predictive(outputs(D, B, C)),
        Categorical().predictive(Categorical().moments(outputs(D, B, C))),
        Bernoulli().predictive(outputs(D, B, C)),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"cannot cat .*same likelihood, number of draws"):
            Predictive.cat([pred, other])
    with pytest.raises(ValueError, match="empty list"):
        Predictive.cat([])
    with pytest.raises(TypeError, match=r"not by 3: pred\[i:i \+ 1\]"):
        pred[3]  # type: ignore[index]


def test_class_axis_stays_where_the_network_has_it() -> None:
    draws = outputs(D, B, C, 2, 3)  # [D, B, C, H, W]
    pred, last = Categorical(class_axis=1).predictive(draws), Categorical().predictive(draws.movedim(2, -1))
    for name in STATISTICS[:4]:
        close(getattr(pred, name), getattr(last, name).movedim(-1, 1))
    close(pred.entropy, last.entropy)
    close(pred.interval()[0], last.interval()[0].movedim(-1, 1))
    y = pred.sample(2)
    assert y.shape == (2, B, 2, 3)
    close(pred.log_prob(y[0]), last.log_prob(y[0]))


def test_printing_and_moving() -> None:
    draws = outputs(D, B, C).float()
    pred = Categorical().predictive(draws)
    assert repr(pred) == "CategoricalPredictive(7 draws, shape=[6, 4], dtype=torch.float32, device=cpu)"
    assert "7 draws (not kept)" in repr(Categorical().predictive(Categorical().moments(draws)))
    assert (len(pred), pred.shape) == (B, (B, C))
    learned = Gaussian(2.0, learn="global").predictive(draws)
    assert torch.equal(learned.cpu().variance, learned.variance)
    meta = learned.to("meta")
    moved = (meta.mean, meta.draws, *meta.likelihood.parameters())
    assert [tensor.device.type for tensor in moved] == ["meta"] * 3
    assert Categorical().predictive(Categorical().moments(draws)).cpu().shape == (B, C)
