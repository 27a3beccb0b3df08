"""Likelihoods against scipy, their checks and messages, and their behaviour under autograd and compile."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from slimbayes.core.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive

D, B = 3, 5


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Likelihood, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    draws = torch.randn(D, B, 4, generator=g, dtype=torch.float64).to(dtype)
    real = torch.randn(B, 4, generator=g, dtype=torch.float64).to(dtype)
    return {
        "categorical": (Categorical(), draws, torch.tensor([0, 3, 1, -100, 2])),
        "bernoulli": (Bernoulli(), draws, (real > 0).to(dtype)),
        "fixed": (Gaussian(2.0), draws, real),
        "global": (Gaussian(2.0, learn="global"), draws, real),
        "per_example": (Gaussian(learn="per_example"), draws, real[:, :2]),
    }[name]


CASES = ["categorical", "bernoulli", "fixed", "global", "per_example"]


# Values


def test_categorical_is_the_log_softmax_at_the_label() -> None:
    draws, y = torch.randn(D, B, 4, dtype=torch.float64) * 5, torch.randint(4, (B,))
    expected = special.log_softmax(draws.numpy(), axis=-1)[:, range(B), y.numpy()]
    torch.testing.assert_close(Categorical().log_prob(draws, y), torch.from_numpy(expected))


@pytest.mark.parametrize("axis", [1, -3])
def test_class_axis_counts_in_the_networks_own_output(axis: int) -> None:
    draws, y = torch.randn(D, B, 4, 2, 3), torch.randint(4, (B, 2, 3))  # images [B, C, H, W]
    last = Categorical().log_prob(draws.movedim(2, -1), y)
    torch.testing.assert_close(Categorical(class_axis=axis).log_prob(draws, y), last)
    pixels = draws.movedim(2, -1).flatten(1, 3)  # every pixel a datum
    flat = Categorical().log_prob(pixels, y.flatten()).view(D, B, -1).sum(-1)
    torch.testing.assert_close(flat, last)


def test_ignored_targets_contribute_nothing_and_carry_no_gradient() -> None:
    draws = torch.randn(D, B, 2, 4, requires_grad=True)
    y = torch.randint(4, (B, 2))
    whole = Categorical().log_prob(draws, y)
    y[:, 1] = -100
    y[0, 0] = -100
    half = Categorical().log_prob(draws, y)
    assert (half[:, 0] == 0).all()
    torch.testing.assert_close(half[:, 1:], Categorical().log_prob(draws[:, :, :1], y[:, :1])[:, 1:])
    assert not torch.allclose(half, whole)
    (gradient,) = torch.autograd.grad(half.sum(), draws)
    assert (gradient[:, :, 1] == 0).all()
    zero = Categorical(ignore_index=0).log_prob(draws, torch.zeros(B, 2, dtype=torch.int64))
    assert (zero == 0).all()


def test_small_integer_labels_are_not_taken_for_the_ignore_index() -> None:
    draws, y = torch.randn(D, 1, 200), torch.tensor([156], dtype=torch.uint8)  # 156 is -100 modulo 256
    torch.testing.assert_close(Categorical().log_prob(draws, y), Categorical().log_prob(draws, y.long()))


def test_bernoulli_matches_scipy_and_takes_every_kind_of_target() -> None:
    draws, y = torch.randn(D, B, 2, dtype=torch.float64) * 4, torch.rand(B, 2).round()
    expected = stats.bernoulli.logpmf(y.numpy(), special.expit(draws.numpy())).sum(-1)
    for target in (y, y.bool(), y.int(), y.double()):
        torch.testing.assert_close(Bernoulli().log_prob(draws, target), torch.from_numpy(expected))
    soft = Bernoulli().log_prob(draws[..., :1], torch.full((B, 1), 0.25))
    mixed = 0.25 * Bernoulli().log_prob(draws[..., :1], torch.ones(B))
    mixed = mixed + 0.75 * Bernoulli().log_prob(draws[..., :1], torch.zeros(B))
    torch.testing.assert_close(soft, mixed)


def test_bernoulli_is_finite_at_extreme_logits() -> None:
    draws = torch.tensor([[1e4, -1e4]], requires_grad=True)
    value = Bernoulli().log_prob(draws, torch.tensor([0, 0]))
    assert value.tolist() == [[-1e4, 0.0]]
    assert torch.autograd.grad(value.sum(), draws)[0].tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("tau", [0.1, 1.0, 7.0])
def test_gaussian_matches_scipy_for_every_source_of_precision(tau: float) -> None:
    draws, y = torch.randn(D, B, 2, dtype=torch.float64), torch.randn(B, 2, dtype=torch.float64)
    expected = torch.from_numpy(stats.norm.logpdf(y, draws, tau**-0.5).sum(-1))
    outputs = torch.cat([draws, torch.full_like(draws, math.log(tau))], -1)  # means, then log-precisions
    torch.testing.assert_close(Gaussian(tau).log_prob(draws, y), expected)
    learned = Gaussian(tau, learn="global").log_prob(draws, y)  # log_precision is float32
    torch.testing.assert_close(learned, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Gaussian(learn="per_example").log_prob(outputs, y), expected)


def test_per_example_precision_is_clamped_with_finite_gradients() -> None:
    outputs = torch.tensor([[[0.0, 1e30], [0.0, -1e30], [1.0, 0.5]]], requires_grad=True)
    value = Gaussian(learn="per_example").log_prob(outputs, torch.tensor([0.0, 3.0, 2.0]))
    (gradient,) = torch.autograd.grad(value.sum(), outputs)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert value[0, 0].item() == pytest.approx(0.5 * (20 - math.log(2 * math.pi)))
    assert gradient[0, :2, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", CASES)
def test_average_logits_is_a_single_draw_of_mean_outputs(name: str) -> None:
    likelihood, draws, y = case(name)
    mean = likelihood.average_logits(draws)
    torch.testing.assert_close(mean, draws.mean(0, keepdim=True))
    assert likelihood.log_prob(mean, y).shape == (1, B)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian()], ids=repr)
def test_a_single_output_takes_flat_targets(likelihood: Likelihood) -> None:
    draws, y = torch.randn(D, B, 1), torch.rand(B).round()
    torch.testing.assert_close(likelihood.log_prob(draws, y), likelihood.log_prob(draws.squeeze(-1), y))
    torch.testing.assert_close(likelihood.log_prob(draws, y), likelihood.log_prob(draws, y.unsqueeze(-1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_draws_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    likelihood, draws, y = case(name, dtype)
    value = likelihood.log_prob(draws, y)
    assert value.dtype is torch.float32
    torch.testing.assert_close(value, likelihood.log_prob(draws.float(), y))
    pred = likelihood.predictive(draws)
    assert pred.draws.dtype is dtype and pred.mean.dtype is torch.float32
    torch.testing.assert_close(pred.variance, likelihood.predictive(draws.float()).variance)


# Gradients, learning, compiling


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    likelihood, draws, y = case(name)
    likelihood.double()
    inputs = (draws.requires_grad_(), *likelihood.parameters())
    assert torch.autograd.gradcheck(lambda f, *_: likelihood.log_prob(f, y), inputs)


def test_global_precision_learns_the_noise_of_the_data() -> None:
    torch.manual_seed(0)
    y = 0.5 * torch.randn(4000)
    likelihood = Gaussian(precision=1.0, learn="global")
    optimizer = torch.optim.LBFGS(likelihood.parameters(), line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -likelihood.log_prob(torch.zeros(2, 4000), y).mean()
        value.backward()
        return value

    optimizer.step(loss)
    assert likelihood.log_precision.exp().item() == pytest.approx(1 / y.square().mean().item(), rel=1e-3)
    assert likelihood.log_precision.exp().item() == pytest.approx(4.0, rel=0.1)
    assert [name for name, _ in likelihood.named_parameters()] == ["log_precision"]
    assert not list(Gaussian().parameters()) and not list(Gaussian(learn="per_example").parameters())


@pytest.mark.parametrize("name", CASES)
def test_log_prob_compiles_without_a_graph_break(name: str) -> None:
    likelihood, draws, y = case(name)
    draws.requires_grad_()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return likelihood.log_prob(f, y).mean() + likelihood.log_prob(likelihood.average_logits(f), y).mean()

    compiled = torch.compile(loss, fullgraph=True, backend="eager")(draws, y)
    torch.testing.assert_close(compiled, loss(draws, y))
    gradients = [torch.autograd.grad(value, draws) for value in (compiled, loss(draws, y))]
    torch.testing.assert_close(*gradients)


def test_predictives_have_their_own_type_and_a_copy_of_the_learned_precision() -> None:
    kinds = (CategoricalPredictive, BernoulliPredictive, GaussianPredictive)
    for name, kind in zip(("categorical", "bernoulli", "global"), kinds, strict=True):
        likelihood, draws, _ = case(name)
        assert type(likelihood.predictive(draws)) is kind
        assert type(likelihood.predictive(likelihood.moments(draws))) is kind
    likelihood, draws, y = case("global")
    with torch.inference_mode():
        pred = likelihood.predictive(draws)
    before = pred.log_prob(y)
    with torch.no_grad():
        next(likelihood.parameters()).add_(1.0)
    torch.testing.assert_close(pred.log_prob(y), before)
    torch.testing.assert_close(copy.deepcopy(likelihood).log_prob(draws, y), likelihood.log_prob(draws, y))


# Messages


@pytest.mark.parametrize(
    ("likelihood", "draws", "targets", "words"),
    [
        (Categorical(), (2, 5, 3), (4,), ["[4]", "[2, 5, 3]", "[5]"]),
        (Categorical(), (2, 5, 3), (5, 1), ["[5, 1]", "[2, 5, 3]", "reshape"]),
        (Categorical(), (2, 5, 1, 3), (5,), ["[5]", "[2, 5, 1, 3]", "[5, 1]"]),
        (Categorical(), (5, 3), (5,), ["[5, 3]", "sb.draw", "unsqueeze(0)"]),
        (Categorical(class_axis=3), (2, 5, 3), (5,), ["class_axis=3", "[5, 3]"]),
        (Categorical(class_axis=-2), (2, 5, 3), (5,), ["class_axis=-2", "[5, 3]"]),
        (Bernoulli(), (2, 5), (5, 1), ["[5, 1]", "[2, 5]", "[5]"]),
        (Bernoulli(), (2, 5, 4), (5,), ["[5]", "[2, 5, 4]", "[5, 4]"]),
        (Gaussian(), (2, 5), (5, 1), ["[5, 1]", "[2, 5]"]),
        (Gaussian(), (2, 5, 1), (1,), ["[1]", "[2, 5, 1]", "[5, 1]"]),
        (Gaussian(), (2, 5, 4, 1), (5, 4), ["[5, 4]", "[2, 5, 4, 1]"]),
        (Gaussian(), (0, 5), (5,), ["[0, 5]", "one draw"]),
        (Gaussian(learn="per_example"), (2, 5, 3), (5,), ["[2, 5, 3]", "twice as many"]),
        (Gaussian(learn="per_example"), (2, 5, 4), (5, 4), ["[5, 4]", "[2, 5, 4]", "[5, 2]"]),
    ],
)
def test_shape_errors_print_both_shapes(
    likelihood: Likelihood, draws: tuple[int, ...], targets: tuple[int, ...], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        likelihood.log_prob(torch.zeros(draws), torch.zeros(targets, dtype=torch.int64))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("likelihood", "targets", "words"),
    [
        (Categorical(), torch.tensor([0, 7]), "target 7 is out of range for 3 classes"),
        (Categorical(), torch.tensor([0, -1]), "target -1 is out of range"),
        (Categorical(ignore_index=None), torch.tensor([0, -100]), "target -100 .* ignore_index=None"),
        (Bernoulli(), torch.full((2, 3), 2), r"lie in \[0, 1\], got 2"),
        (Bernoulli(), torch.full((2, 3), -1), r"got -1"),
        (Bernoulli(), torch.full((2, 3), math.nan), r"got nan"),
        (Gaussian(), torch.full((2, 3), math.inf), r"\[2, 3\] hold NaN or infinity"),
    ],
)
def test_targets_out_of_range_are_named(likelihood: Likelihood, targets: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        likelihood.log_prob(torch.zeros(4, 2, 3), targets)


@pytest.mark.parametrize(
    ("likelihood", "draws", "targets", "words"),
    [
        (Categorical(), torch.zeros(4, 2, 3), torch.zeros(2), r"integer class indices.*float32.*long"),
        (Categorical(), torch.zeros(4, 2, 3), torch.zeros(2, 3), r"argmax"),
        (Categorical(), torch.zeros(4, 2, 3), torch.zeros(2).bool(), r"torch.bool"),
        (Categorical(), torch.zeros(4, 2, 3).long(), torch.zeros(2), r"floating-point.*got torch.int64"),
        (Categorical(), {"logits": 0}, torch.zeros(2), r"got dict.*draws.logits"),
        (Bernoulli(), torch.zeros(4, 2), [0, 1], r"targets are a tensor, got list"),
        (Bernoulli(), torch.zeros(4, 2), torch.zeros(2).cfloat(), r"complex64"),
        (Gaussian(), torch.zeros(4, 2), torch.zeros(2).bool(), r"real numbers, got torch.bool"),
    ],
)
def test_wrong_types_are_named(likelihood: Likelihood, draws: Tensor, targets: Tensor, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        likelihood.log_prob(draws, targets)


@pytest.mark.parametrize("name", CASES)
def test_non_finite_draws_are_counted(name: str) -> None:
    likelihood, draws, y = case(name)
    draws[0, 0, 0], draws[1, 0, 0] = math.nan, math.inf
    for call in (lambda: likelihood.check(draws), lambda: likelihood.log_prob(draws, y)):
        with pytest.raises(ValueError, match=r"2 of 60 elements of draws \[3, 5, 4\]"):
            call()


def test_settings_are_checked_and_printed() -> None:
    with pytest.raises(ValueError, match="class_axis=0"):
        Categorical(class_axis=0)
    with pytest.raises(ValueError, match="learn='both'"):
        Gaussian(learn="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"precision=2\.0 with"):
        Gaussian(2.0, learn="per_example")
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"precision={wrong}"):
            Gaussian(wrong)
    assert repr(Categorical()) == "Categorical(class_axis=-1, ignore_index=-100)"
    assert repr(Gaussian(2.0, learn="global")) == "Gaussian(precision=2, learn='global')"
    assert repr(Gaussian()) == "Gaussian(precision=1, learn='fixed')"
    assert repr(Gaussian(learn="per_example")) == "Gaussian(learn='per_example')"


@pytest.mark.parametrize("ignore", [-100, None])
@pytest.mark.parametrize("axes", [1, 2])
def test_mean_nll_is_the_mean_of_log_prob(ignore, axes):
    draws = torch.randn(3, 4, *[2] * (axes - 1), 5, dtype=torch.float64)
    targets = torch.randint(5, draws.shape[1:-1])
    if ignore is not None:
        targets[0] = ignore
    likelihood = Categorical(ignore_index=ignore)
    expected = -likelihood.log_prob(draws, targets).mean()
    torch.testing.assert_close(likelihood.mean_nll(draws, targets), expected)


def test_a_log_prob_of_ones_own_is_what_elbo_scores():
    class Smoothed(Categorical):
        def log_prob(self, draws, targets):
            return 0.9 * super().log_prob(draws, targets) + 0.1 * draws.log_softmax(-1).mean(-1)

    class Bare:
        def log_prob(self, draws, targets):
            return -draws.square().sum(-1)

    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    draws, y = torch.randn(2, 4, 2), torch.tensor([0, 1, 1, 0])
    for likelihood in (Smoothed(), Bare()):
        found = sb.elbo(draws, y, model, num_data=10, likelihood=likelihood).nll
        torch.testing.assert_close(found, -likelihood.log_prob(draws, y).mean())


def test_a_weight_of_the_kl_may_be_a_tensor():
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    found = sb.elbo(sb.draw(model, x), y, model, num_data=10, kl_weight=torch.tensor(0.5))
    torch.testing.assert_close(found.loss, found.nll + 0.05 * found.kl)


def test_a_learned_precision_for_each_output():
    likelihood = sb.Gaussian(precision=4.0, learn="global", outputs=2)
    assert likelihood.log_precision.shape == (2,) and "precision=[4, 4], learn='global'" in repr(likelihood)
    with torch.no_grad():
        likelihood.log_precision[1] = 0.0
    draws, targets = torch.randn(3, 5, 2), torch.randn(5, 2)
    apart = [
        sb.Gaussian(precision=p).log_prob(draws[..., i], targets[:, i]) for i, p in enumerate((4.0, 1.0))
    ]
    assert torch.allclose(likelihood.log_prob(draws, targets), apart[0] + apart[1])
    for options in ({"learn": "fixed", "outputs": 2}, {"learn": "global", "outputs": 0}):
        with pytest.raises(ValueError, match='it is a number of outputs for learn="global"'):
            sb.Gaussian(**options)
