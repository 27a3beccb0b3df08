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


# Noise that follows the residuals


def regression(rows: int = 256, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3)
    return x, x @ torch.tensor([[1.0], [2.0], [-1.0]]) + noise * torch.randn(rows, 1)


def trained(likelihood: Gaussian, rate: float, steps: int = 300, noise: float = 0.1, **options) -> nn.Module:
    """A line by plain steps of Adam, with ``rate`` for what the likelihood has for the optimizer."""
    torch.manual_seed(0)
    x, y = regression(noise=noise)
    model = sb.bayesianize(nn.Linear(3, 1), sb.Deterministic())
    groups = sb.parameter_groups(model, lr=0.05, weight_decay=0.0)
    optimizer = torch.optim.AdamW([*groups, {"params": likelihood.parameters(), "lr": rate}], lr=0.05)
    for _ in range(steps):
        rows = torch.randint(256, (32,))
        loss = sb.elbo(sb.draw(model, x[rows]), y[rows], model, 256, likelihood, **options).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def test_noise_follows_the_residuals_whatever_the_optimizers_rate():
    found = []
    for rate in (1e-5, 0.3):
        likelihood = Gaussian(learn="global")
        trained(likelihood, rate)
        found.append(float(likelihood.residual.sqrt()))
        log_precision = float(likelihood.log_precision.detach())  # which AdamW decays, until the next batch
        assert log_precision == pytest.approx(-2 * math.log(found[-1]), abs=0.02)
    assert found[0] == found[1] == pytest.approx(0.1, rel=0.1)


def test_the_first_batch_gives_the_noise_and_later_ones_a_mean_of_the_last_tenth():
    likelihood = Gaussian(learn="global", outputs=2)
    model = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic())
    squares, expected = [], torch.zeros(2)
    for batch in range(1, 31):
        draws, y = torch.randn(3, 4, 2, requires_grad=True), 10 * torch.randn(4, 2)
        result = sb.elbo(draws, y, model, 10, likelihood)
        squares.append((y - draws.detach()).square().mean((0, 1)))
        expected = expected + 10 / (batch + 9) * (squares[-1] - expected)
        torch.testing.assert_close(likelihood.residual, expected)
        torch.testing.assert_close(likelihood.log_precision.detach(), -expected.log())
        # The loss and its gradients are those of a noise that is known.
        known = [Gaussian(1 / float(v)) for v in expected]
        same = draws.detach().requires_grad_()
        nll = sum(-each.log_prob(same[..., i], y[:, i]).mean() for i, each in enumerate(known))
        torch.testing.assert_close(result.nll, nll)
        torch.testing.assert_close(
            *(torch.autograd.grad(v, d)[0] for v, d in ((result.nll, draws), (nll, same)))
        )
    assert int(likelihood.batches) == 30 and torch.equal(squares[0], squares[0].abs())


def test_only_what_is_trained_moves_the_noise():
    likelihood = Gaussian(4.0, learn="global")
    model = sb.bayesianize(nn.Linear(3, 1), sb.Deterministic())
    x, y = regression()
    before = copy.deepcopy(likelihood.state_dict())
    with torch.no_grad():
        sb.elbo(sb.draw(model, x), y, model, 256, likelihood)
    sb.elbo(sb.draw(model, x).detach(), y, model, 256, likelihood)
    likelihood.log_prob(sb.draw(model, x), y)  # a function of its arguments
    sb.evaluate(model, [(x, y)], likelihood=likelihood)
    sb.predict(model, x, likelihood=likelihood)
    held = likelihood.requires_grad_(False)
    sb.elbo(sb.draw(model, x), y, model, 256, held)
    assert all(torch.equal(value, before[name]) for name, value in likelihood.state_dict().items())
    sb.elbo(sb.draw(model, x), y, model, 256, likelihood.requires_grad_(True))
    assert int(likelihood.batches) == 1 and likelihood.log_precision != before["log_precision"]


def test_a_batch_that_is_not_finite_leaves_the_noise_as_it_was():
    likelihood = Gaussian(learn="global")
    model = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic())
    y = torch.randn(4, 1)
    sb.elbo(torch.zeros(1, 4, 1, requires_grad=True), y, model, 10, likelihood)
    before = copy.deepcopy(likelihood.state_dict())
    sb.elbo(torch.full((1, 4, 1), 1e30, requires_grad=True), y, model, 10, likelihood)  # squares overflow
    assert all(torch.equal(value, before[name]) for name, value in likelihood.state_dict().items())


def test_a_mixture_is_given_the_noise_of_its_own_loss():
    """A mixture's most likely noise is below the mean over draws: each target counts for the draws that explain it."""
    torch.manual_seed(0)
    draws = torch.tensor([-3.0, 3.0]).view(2, 1, 1).expand(2, 4000, 1).clone().requires_grad_()
    y = torch.where(torch.rand(4000, 1) < 0.5, -3.0, 3.0) + 0.5 * torch.randn(4000, 1)
    model = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic())
    found = {}
    for reduction in ("average", "mixture", "logits"):
        likelihood = Gaussian(learn="global")
        for _ in range(60):
            sb.elbo(draws, y, model, 4000, likelihood, reduction)
        found[reduction] = float(likelihood.residual)
    assert found["mixture"] == pytest.approx(0.25, rel=0.1)
    assert found["average"] == pytest.approx(18.25, rel=0.1) and found["logits"] == pytest.approx(
        9.25, rel=0.1
    )


def test_without_noise_in_the_data_training_stays_finite():
    likelihood = Gaussian(learn="global")
    model = trained(likelihood, rate=0.05, noise=0.0)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert 1e-5 < float(likelihood.residual.sqrt()) < 0.1
    for _ in range(200):  # all right and all zero: a limit and no infinity
        sb.elbo(torch.zeros(1, 4, 1, requires_grad=True), torch.zeros(4, 1), model, 10, likelihood)
    assert 5 < float(likelihood.log_precision.detach()) < 20.01


def test_noise_follows_in_compiled_code():
    draws, y = torch.randn(4, 2, 8, 1), torch.randn(4, 8, 1)
    found = []
    for compiled in (False, True):
        likelihood = Gaussian(learn="global")

        def nll(draws: Tensor, y: Tensor, likelihood: Gaussian = likelihood) -> Tensor:
            assert likelihood.follows(draws)
            return -likelihood.followed(draws, y).mean()

        run = torch.compile(nll, fullgraph=True, backend="aot_eager") if compiled else nll
        values = [float(run(draws[i].clone().requires_grad_(), y[i]).detach()) for i in range(4)]
        found.append((values, int(likelihood.batches), float(likelihood.log_precision.detach())))
    assert found[0] == found[1] and found[0][1] == 4


def test_states_from_before_load_with_their_precision():
    likelihood = Gaussian(learn="global")
    trained(likelihood, rate=0.1, steps=20)
    state = likelihood.state_dict()
    again = Gaussian(learn="global")
    again.load_state_dict(state)
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    again.load_state_dict({"log_precision": torch.tensor(1.5)})
    assert (
        again.log_precision == 1.5 and again.batches == 0
    )  # where it is trained on, it starts from the data
    Gaussian(learn="per_example").load_state_dict({})
    with pytest.raises(RuntimeError, match="log_precision"):
        again.load_state_dict({})


def test_noise_is_fitted_to_held_out_targets():
    torch.manual_seed(0)
    loc = torch.randn(2, 3000, 2, dtype=torch.float64)
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    y = loc[0] + scale * torch.randn(3000, 2, dtype=torch.float64)
    for likelihood in (Gaussian(9.0), Gaussian(learn="global"), Gaussian(learn="global", outputs=2)):
        given = loc[:1] if likelihood.learn != "fixed" else loc
        likelihood.double()

        def nll(shift: float, likelihood: Gaussian = likelihood, given: Tensor = given) -> float:
            changed = copy.deepcopy(likelihood)
            if changed.learn == "fixed":
                changed.precision *= math.exp(shift)
            else:
                changed.log_precision.data += shift
            return -float(changed.predictive(given).log_prob(y).mean().detach())

        assert likelihood.fit_noise(likelihood.predictive(given), y) is likelihood
        assert nll(0.0) < min(nll(-0.02), nll(0.02))
    torch.testing.assert_close(likelihood.log_precision.detach(), -2 * scale.log(), rtol=0.03, atol=0.03)
    weights = torch.tensor([1.0, 0.0])
    assert Gaussian().fit_noise(
        torch.zeros(1, 2), torch.tensor([2.0, 9.0]), weights
    ).precision == pytest.approx(0.25)


def test_noise_by_example_keeps_its_shape_when_it_is_fitted():
    likelihood = Gaussian(learn="per_example")
    log_precision = torch.randn(1, 5000, 1)
    draws = torch.cat((torch.zeros(1, 5000, 1), log_precision), -1)
    y = 3 * (-0.5 * log_precision[0]).exp() * torch.randn(5000, 1)
    before = likelihood.predictive(draws).variance
    likelihood.fit_noise(likelihood.predictive(draws), y)
    torch.testing.assert_close(likelihood.predictive(draws).variance, 9 * before, rtol=0.1, atol=0.0)
    lower, upper = likelihood.predictive(draws).interval(0.9)
    assert sb.metrics.coverage(lower, upper, y) == pytest.approx(0.9, abs=0.015)
