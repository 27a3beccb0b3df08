"""Extremes that every method meets: a case returns when its result is right, and says when it is an error by name.

A case is a function of a method. It asserts that what slimbayes computes equals a float64 reference within the
tolerance stated there, or that an error names what was wrong (``named``): whatever else it raises is a wrong answer.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.core.conversion import find_record
from slimbayes.core.methods.base import Method
from tests.helpers_matrix import METHODS

EVERY: dict[str, Method] = {
    **METHODS,
    "Rank1 cauchy": sb.Rank1(components=3, posterior="cauchy"),
    "Rank1 lognormal": sb.Rank1(components=3, posterior="lognormal"),
    "Rank1 halfcauchy": sb.Rank1(components=3, posterior="halfcauchy"),
}
CASES: dict[str, Callable[[Method], None]] = {}
SPREADS = ("rho", "log_u", "log_v")
Y = torch.tensor([0, 1, 2, 0])


class NamedError(Exception):
    """A documented error that says what was wrong."""


def case(function: Callable[[Method], None]) -> Callable[[Method], None]:
    """Put a case into the table under its name."""
    CASES[function.__name__] = function
    return function


@contextmanager
def named(kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> Iterator[None]:
    """Errors of this kind with these words are documented."""
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), f"{type(error).__name__} without {words}: {error}"
        raise NamedError(str(error)) from error


def build(
    method: Method, dtype: torch.dtype = torch.float32, norm: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """A small network, converted and in eval mode."""
    torch.manual_seed(0)
    between = [] if norm is None else [norm(8)]
    net = nn.Sequential(nn.Linear(5, 8), *between, nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    return sb.bayesianize(net, method).eval()


def inputs(scale: float = 1.0, batch: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same few rows, scaled."""
    torch.manual_seed(2)
    return (torch.randn(batch, 5).clamp(-1, 1).double() * scale).to(dtype)


def double(model: nn.Module) -> nn.Module:
    """The same model in float64."""
    return copy.deepcopy(model).double()


def near(ours: Tensor, reference: Tensor, tolerance: float, what: str) -> None:
    """Finite, of one shape, and equal relative to the largest element."""
    assert ours.shape == reference.shape, f"{what}: {tuple(ours.shape)}, not {tuple(reference.shape)}"
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    error, size = (ours.double() - reference.double()).abs().max().item(), reference.abs().max().item()
    assert error <= tolerance * max(size, 1e-300), f"{what}: {error:.1e} apart at {size:.1e}"


def agree(model: nn.Module, x: Tensor, tolerance: float = 1e-5, **options: Any) -> None:
    """Seeded draws equal those of the same model in float64."""
    with torch.no_grad():
        ours = sb.draw(model, x, samples=2, seed=0, **options)
        near(ours, sb.draw(double(model), x.double(), samples=2, seed=0, **options), tolerance, "draws")


def train_once(model: nn.Module, x: Tensor, y: Tensor = Y) -> None:
    """One loss whose value and gradients are finite."""
    model.train()
    result = sb.elbo(sb.draw(model, x, seed=0), y[: len(x)], model, num_data=100)
    result.loss.backward()
    sb.check_finite(model, result)
    model.eval()


def divergence(model: nn.Module, tolerance: float = 1e-5) -> None:
    """The KL is float32 and that of the same model in float64."""
    with torch.no_grad():
        value, reference = sb.kl(model), sb.kl(double(model))
    assert value.dtype == torch.float32, f"the KL is {value.dtype}"
    near(value, reference, tolerance, "KL")


def spread_out(model: nn.Module, raw: float, logs: float) -> nn.Module:
    """Every ρ at ``raw``, every log u and log v at ``logs``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-1] in SPREADS:
                parameter.fill_(raw if name.endswith("rho") else logs)
    return model


@case
def inputs_of_1e_minus_30(method: Method) -> None:
    """Draws to 1e-5, gradients finite."""
    model = build(method)
    agree(model, inputs(1e-30))
    train_once(model, inputs(1e-30))


@case
def inputs_of_1e30(method: Method) -> None:
    """Draws to 1e-5 and gradients finite, or an error that counts the outputs or names the tensors.

    Local reparameterisation squares its inputs, which float32 holds up to 1.8e19: beyond that outputs are NaN.
    """
    model = build(method)
    with named(sb.NotFiniteError, "elements of draws", "NaN or infinite"):
        sb.predict(model, inputs(1e30), samples=2, seed=0)
    agree(model, inputs(1e30))
    with named(sb.NotFiniteError, "not finite", "of '"):
        train_once(model, inputs(1e30))


@case
def inputs_of_1e30_normalised(method: Method) -> None:
    """The variance of such inputs is beyond float32: torch's LayerNorm gives NaN, and predict says how many."""
    with named(sb.NotFiniteError, "elements of draws", "NaN or infinite"):
        found = sb.predict(build(method, norm=nn.LayerNorm), inputs(1e30), samples=2, seed=0).mean
        assert torch.isfinite(found).all(), "a prediction that is not finite"


@case
def sigma_of_1e_minus_30(method: Method) -> None:
    """σ = softplus(−1e30) + 1e-7 and U Vᵀ = 1e-30: KL and draws to 1e-5, gradients finite."""
    _spread(method, -1e30, 0.5 * math.log(1e-30))


@case
def sigma_raw_1e_minus_30(method: Method) -> None:
    """ρ = 1e-30, which is σ = log 2."""
    _spread(method, 1e-30, 1e-30)


@case
def sigma_of_1e4(method: Method) -> None:
    """σ = 1e4: KL and draws to 1e-5, gradients finite."""
    _spread(method, 1e4, 0.5 * math.log(1e4))


def _spread(method: Method, raw: float, logs: float) -> None:
    model = spread_out(build(method), raw, logs)
    divergence(model)
    agree(model, inputs())
    train_once(model, inputs())


@case
def sigma_of_1e30(method: Method) -> None:
    """A KL that float32 holds is that of float64, to 1e-5; of any other the tensors are named."""
    model = spread_out(build(method), 1e30, 0.5 * math.log(1e30))
    with torch.no_grad():
        value, reference = sb.kl(model), sb.kl(double(model)).item()
    if reference < torch.finfo(torch.float32).max:
        divergence(model)
        train_once(model, inputs())
        return
    with named(sb.NotFiniteError, "KL inf", "the KL"):
        sb.check_finite(model, sb.ELBO(value, value, value))
    raise AssertionError("a KL beyond float32 that is finite")


@case
def bfloat16(method: Method) -> None:
    """A model in bfloat16: draws to 5 % of those in float64, the KL in float32 to 1e-3 of it."""
    _sixteen_bits(method, torch.bfloat16, 0.05)


@case
def float16(method: Method) -> None:
    """A model in float16, likewise to 1 %."""
    _sixteen_bits(method, torch.float16, 0.01)


def _sixteen_bits(method: Method, dtype: torch.dtype, tolerance: float) -> None:
    model = build(method, dtype)
    agree(model, inputs(dtype=dtype), tolerance, noise="mean")
    divergence(model, 1e-3)
    train_once(model, inputs(dtype=dtype))


@case
def float16_overflow(method: Method) -> None:
    """Inputs and weights whose products are beyond 65504: the outputs are counted, never silently scored."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    nn.init.constant_(layer.weight, 100.0)
    model = sb.bayesianize(layer.half(), method).eval()
    x = torch.full((4, 5), 6e4, dtype=torch.float16)
    with named(sb.NotFiniteError, "elements of draws", "NaN or infinite"):
        assert sb.predict(model, x, samples=2, seed=0).mean is None
    raise AssertionError("a prediction of infinite outputs")


@case
def kl_under_autocast(method: Method) -> None:
    """Under autocast the KL is what it is without, bit for bit, in float32."""
    model = build(method)
    with torch.no_grad():
        plain = sb.kl(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sb.draw(model, inputs())
            inside = sb.kl(model)
    assert inside.dtype == torch.float32 and torch.equal(inside, plain), f"{inside} against {plain}"
    divergence(model)


@case
def one_component(method: Method) -> None:
    """K = 1."""
    _components(method, 1)


@case
def components_64(method: Method) -> None:
    """K = 64."""
    _components(method, 64)


def _components(method: Method, count: int) -> None:
    names = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    name = next((each for each in ("components", "members") if each in names), None)
    with named(ValueError, "components", "1"):
        model = build(method if name is None else dataclasses.replace(method, **{name: count}))  # type: ignore[type-var]
    samples = 1 if name else count
    draws = sb.draw(model, inputs(), samples=samples, seed=0)
    assert draws.shape[0] == find_record(model).components * samples
    agree(model, inputs())
    train_once(model, inputs())


@case
def one_example(method: Method) -> None:
    """A batch of one has the draws that it has among others, to 1e-6."""
    model = build(method)
    whole = sb.draw(model, inputs(), samples=3, seed=0)
    near(sb.draw(model, inputs()[:1], samples=3, seed=0), whole[:, :1], 1e-6, "draws of one example")
    assert sb.predict(model, inputs()[:1], samples=3).mean.shape == (1, 3)
    train_once(model, inputs()[:1])


@case
def one_example_batchnorm(method: Method) -> None:
    """Statistics of one row are torch's error; of several draws' rows they are finite."""
    model = build(method, norm=nn.BatchNorm1d)
    with named(ValueError, "more than 1 value per channel"):
        train_once(model, inputs()[:1])
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers()), "statistics that are not finite"


@case
def empty_batch(method: Method) -> None:
    """draw, predict, evaluate and elbo say that the batch is empty."""
    model, x, y = build(method), inputs()[:0], Y[:0]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: sb.draw(model, x),
        lambda: sb.predict(model, x),
        lambda: sb.evaluate(model, [(x, y)]),
        lambda: sb.elbo(torch.zeros(2, 0, 3), y, model, num_data=4),
    )
    for call in calls:
        try:
            with named(ValueError, "the batch is empty"):
                call()
        except NamedError:
            continue
        raise AssertionError("an answer for no example")
    raise NamedError("the batch is empty")
