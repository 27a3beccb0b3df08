"""Likelihoods p(y|x, d): what one draw of a network says about targets.

A datum is a row of the batch: ``log_prob`` sums over a row's trailing target elements. To treat tokens or
pixels as data, flatten them into the batch axis first.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.core.options import is_count, is_number
from slimbayes.core.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    Moments,
    Predictive,
    entropy,
)

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_LOG_PRECISION_LIMIT = 20.0
_SHARE = 10.0  # of a run: the running mean of residuals is over its last tenth
_LEAST_WEIGHT = 1e-3  # of a batch in that mean
_LEAST = 1e-30  # of a scale of variances
_ROUNDS, _CLOSE = 500, 1e-5  # of expectation maximisation


class Likelihood(nn.Module, ABC):
    """What outputs ``draws`` [D, B, ...] say about targets. Every result is in float32 or wider."""

    @abstractmethod
    def check(self, draws: Tensor, targets: Tensor | None = None) -> None:
        """Raise on wrong types and shapes and, except under torch.compile, on wrong values."""

    @abstractmethod
    def log_prob(self, draws: Tensor, targets: Tensor) -> Tensor:
        """``check``, then log p(y_b|x_b, d), [D, B]: the sum over the row's target elements."""

    def mean_nll(self, draws: Tensor, targets: Tensor) -> Tensor:
        """−(1/DB) Σ_db log p(y_b|x_b, d), a scalar."""
        return -self.log_prob(draws, targets).mean()

    @abstractmethod
    def average_logits(self, draws: Tensor) -> Tensor:
        """The mean of the network's outputs over draws, [1, B, ...]: itself a single draw."""

    @abstractmethod
    def moments(self, draws: Tensor) -> Moments:
        """The averages over these draws that a predictive needs: ``merge`` them with other draws'."""

    @abstractmethod
    def predictive(self, draws: Tensor | Moments) -> Predictive:
        """The predictive distribution, from draws (which it keeps) or from moments."""


def check_likelihood(value: object, needs: tuple[str, ...] = ("predictive", "moments")) -> None:
    """Raise unless a value has what is ``needs``-ed of a likelihood: a class of one has not, it is to be made first.

    >>> check_likelihood("gaussian")
    Traceback (most recent call last):
        ...
    TypeError: likelihood must be one such as sb.Categorical() or sb.Gaussian(), got 'gaussian'
    """
    if isinstance(value, type) or not all([callable(getattr(value, name, None)) for name in needs]):
        raise TypeError(f"likelihood must be one such as sb.Categorical() or sb.Gaussian(), got {value!r}")


@final
class Categorical(Likelihood):
    """Classes: logits [D, B, ..., C] and integer targets [B, ...].

    log p(y|x, d) = log softmax(f_d / T)_y. ``class_axis`` counts in the network's own output, without the draws
    axis: 1 for images [B, C, H, W]. Targets equal to ``ignore_index`` contribute 0. ``temperature`` T is for
    calibration after training (``sb.decisions.Temperature`` fits it).

    >>> Categorical().log_prob(torch.zeros(2, 1, 4), torch.tensor([3]))
    tensor([[-1.3863],
            [-1.3863]])
    """

    def __init__(
        self, class_axis: int = -1, ignore_index: int | None = -100, temperature: float = 1.0
    ) -> None:
        super().__init__()
        if class_axis == 0:
            raise ValueError("class_axis=0 is the batch: pass 1 for outputs [B, C, ...], -1 for [B, ..., C]")
        for name, value in (("class_axis", class_axis), ("ignore_index", ignore_index)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole and (name == "class_axis" or value is not None):
                raise ValueError(f"{name}={value!r}: pass an integer")
        self.temperature = _checked(temperature)
        self.class_axis = class_axis
        self.ignore_index = ignore_index

    def check(self, draws: Tensor, targets: Tensor | None = None) -> None:
        """Raise on wrong types and shapes, non-finite draws and labels out of range."""
        _check_types(draws, targets, self, axes=3)
        axis = self.axis(draws.ndim - 1)
        if not 2 - draws.ndim <= axis <= -1:
            raise ValueError(
                f"class_axis={self.class_axis} is no class axis of network outputs {list(draws.shape[1:])} "
                f"(draws {list(draws.shape)}): pass 1 for outputs [B, C, ...], -1 for [B, ..., C]"
            )
        if targets is None:
            return
        if targets.dtype not in _INTEGERS:
            raise TypeError(
                f"Categorical targets are integer class indices, got {targets.dtype} {list(targets.shape)}: "
                "pass targets.long(), or targets.argmax(-1) of one-hot targets"
            )
        shape = draws.shape
        _check_shape(draws, targets, shape[1:axis] + shape[axis:][1:], squeeze=False)
        if not _looks_at(draws):
            return
        classes, labels = draws.shape[axis], targets.long()
        if labels.numel() == 0:
            return
        least, most = labels.aminmax()
        if int(least) >= 0 and int(most) < classes:
            return
        wrong = ((labels < 0) | (labels >= classes)) & ~self._ignored(labels)
        if wrong.any():
            raise ValueError(
                f"target {int(labels[wrong][0])} is out of range for {classes} classes (draws "
                f"{list(draws.shape)}, ignore_index={self.ignore_index}): label from 0 to {classes - 1}"
            )

    def log_prob(self, draws: Tensor, targets: Tensor) -> Tensor:
        """Σ log softmax(f)_y over the row's targets, [D, B]."""
        self.check(draws, targets)
        if draws.ndim == 3 and self.ignore_index is not None:
            return -self._nll(draws, targets, "none").view(draws.shape[:2])
        axis, labels = self.axis(draws.ndim - 1), targets.long()  # a uint8 never equals -100
        ignored = self._ignored(labels)
        index = labels.masked_fill(ignored, 0).unsqueeze(axis)  # [B, ..., 1]
        log_p = self.log_probabilities(draws)  # [D, B, ..., C]
        picked = log_p.gather(axis, index.expand(draws.shape[0], *index.shape)).squeeze(axis)  # [D, B, ...]
        return _sum_rows(picked.masked_fill(ignored, 0.0))

    def mean_nll(self, draws: Tensor, targets: Tensor) -> Tensor:
        """−(1/DB) Σ_db log softmax(f_d)_y, a scalar."""
        own = type(self).log_prob is Categorical.log_prob  # not one of a user's own
        if not own or draws.ndim != 3 or self.ignore_index is None:
            return super().mean_nll(draws, targets)
        self.check(draws, targets)
        return self._nll(draws, targets, "sum") / (draws.shape[0] * draws.shape[1])

    def _nll(self, draws: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """−log softmax(f)_y of draws [D, B, C], or its sum."""
        log_p = self.log_probabilities(draws).flatten(0, 1)  # [D·B, C]
        labels = targets.long().expand(draws.shape[0], -1).reshape(-1)
        assert self.ignore_index is not None
        return F.nll_loss(log_p, labels, ignore_index=self.ignore_index, reduction=reduction)

    def average_logits(self, draws: Tensor) -> Tensor:
        """The mean logits, [1, B, ..., C]."""
        return _full(draws).mean(0, keepdim=True)

    def moments(self, draws: Tensor) -> Moments:
        """The averages of p, p(1 − p), H[p] and the spread of p, per class."""
        self.check(draws)
        log_p = self.log_probabilities(draws)
        p = log_p.exp()
        return Moments.of(p, -p * log_p.expm1(), entropy(log_p, self.axis(draws.ndim - 1)), log_p)

    def predictive(self, draws: Tensor | Moments) -> CategoricalPredictive:
        """The distribution over classes."""
        if isinstance(draws, Moments):
            return CategoricalPredictive(self, draws)
        return CategoricalPredictive(self, self.moments(draws), draws)

    def axis(self, ndim: int) -> int:
        """The class axis, counted from the end, of network outputs with ``ndim`` axes."""
        return self.class_axis if self.class_axis < 0 else self.class_axis - ndim

    def log_probabilities(self, draws: Tensor) -> Tensor:
        """log softmax(f) along the class axis, in the shape of the draws."""
        return _tempered(_full(draws), self.temperature).log_softmax(self.axis(draws.ndim - 1))

    def _ignored(self, labels: Tensor) -> Tensor:
        none = torch.zeros_like(labels, dtype=torch.bool)
        return none if self.ignore_index is None else labels == self.ignore_index

    def extra_repr(self) -> str:
        """The settings."""
        heat = "" if self.temperature == 1.0 else f", temperature={self.temperature:.6g}"
        return f"class_axis={self.class_axis}, ignore_index={self.ignore_index}{heat}"


@final
class Bernoulli(Likelihood):
    """Independent yes-or-no outputs: logits [D, B, ...] and targets in [0, 1] of shape [B, ...].

    log p(y|x, d) = y log σ(f_d/T) + (1 − y) log σ(−f_d/T). A single output [D, B, 1] takes targets [B] too.
    ``temperature`` T as in ``Categorical``.

    >>> Bernoulli().log_prob(torch.zeros(1, 2, 1), torch.tensor([True, False]))
    tensor([[-0.6931, -0.6931]])
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = _checked(temperature)

    def check(self, draws: Tensor, targets: Tensor | None = None) -> None:
        """Raise on wrong types and shapes, non-finite draws and targets outside [0, 1]."""
        _check_types(draws, targets, self, axes=2)
        if targets is None:
            return
        _check_shape(draws, targets, draws.shape[1:])
        if targets.is_complex():
            raise TypeError(f"Bernoulli targets are bool, integer or float, got {targets.dtype}")
        if not _looks_at(draws):
            return
        wrong = ~((targets >= 0) & (targets <= 1))
        if wrong.any():
            value = targets[wrong][0].item()
            raise ValueError(f"Bernoulli targets lie in [0, 1], got {value}: map the two labels to 0 and 1")

    def log_prob(self, draws: Tensor, targets: Tensor) -> Tensor:
        """Σ y log σ(f) + (1 − y) log σ(−f) over the row's targets, [D, B]."""
        self.check(draws, targets)
        logits = _tempered(_full(draws), self.temperature)
        y = targets.to(logits.dtype).view(draws.shape[1:]).expand_as(logits)  # [D, B, ...]
        return _sum_rows(-F.binary_cross_entropy_with_logits(logits, y, reduction="none"))

    def average_logits(self, draws: Tensor) -> Tensor:
        """The mean logits, [1, B, ...]."""
        return _full(draws).mean(0, keepdim=True)

    def moments(self, draws: Tensor) -> Moments:
        """The averages of p, p(1 − p), H[p] and the spread of p, per output."""
        self.check(draws)
        log_p = self.log_probabilities(draws)
        return Moments.of(log_p[..., 1].exp(), log_p.sum(-1).exp(), entropy(log_p, -1), log_p)

    def predictive(self, draws: Tensor | Moments) -> BernoulliPredictive:
        """The distribution over zeros and ones."""
        if isinstance(draws, Moments):
            return BernoulliPredictive(self, draws)
        return BernoulliPredictive(self, self.moments(draws), draws)

    def log_probabilities(self, draws: Tensor) -> Tensor:
        """log p(0) and log p(1), [D, B, ..., 2]."""
        logits = _tempered(_full(draws), self.temperature)
        return torch.stack((F.logsigmoid(-logits), F.logsigmoid(logits)), dim=-1)

    def extra_repr(self) -> str:
        """The settings."""
        return "" if self.temperature == 1.0 else f"temperature={self.temperature:.6g}"


@final
class Gaussian(Likelihood):
    """Real targets [B, ...] with noise of precision τ: y ~ N(f_d, 1/τ).

    log p(y|x, d) = ½ (log τ − log 2π − τ (y − f_d)²). ``learn`` says where τ comes from:

    - "fixed": ``precision``, 1 by default;
    - "global": ``log_precision``, which is log ``precision`` until ``sb.elbo`` scores draws that are trained. It then
      follows their residuals, 1/τ = E[(y − f)²], by a running mean over about the last tenth of all batches so far:
      from the first batch on and whatever the optimizer's rate, for its gradient is 0 there. With ``outputs=m`` there
      are m values, one for each place of the outputs' last axis. ``requires_grad_(False)`` holds it where it is;
    - "per_example": the last axis of the network's output holds 2m values, m means and then m values of
      log τ, clamped to ±20 (the gradient is 0 beyond).

    A single output [D, B, 1] takes targets [B] too; no other shapes are broadcast.

    >>> Gaussian(precision=4.0).log_prob(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0]))
    tensor([[-0.2258],
            [-2.2258]])
    """

    log_precision: Tensor
    residual: Tensor
    batches: Tensor

    def __init__(
        self,
        precision: float | None = None,
        learn: Literal["fixed", "global", "per_example"] = "fixed",
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(learn, str) or learn not in ("fixed", "global", "per_example"):
            raise ValueError(f'learn={learn!r}: pass "fixed", "global" or "per_example"')
        if learn == "per_example" and precision is not None:
            raise ValueError(
                f'precision={precision} with learn="per_example", where the network outputs it: leave '
                'precision out, or pass learn="fixed" or "global"'
            )
        if precision is not None and not (is_number(precision) and precision > 0):
            raise ValueError(
                f"precision={precision!r}: pass a positive finite number, 1 / (noise deviation)²"
            )
        self.precision = 1.0 if precision is None else float(precision)
        if outputs is not None and (learn != "global" or not is_count(outputs)):
            raise ValueError(
                f'outputs={outputs} with learn={learn!r}: it is a number of outputs for learn="global", each with a '
                "precision of its own"
            )
        self.learn = learn
        if learn == "global":
            shape = () if outputs is None else (outputs,)
            self.log_precision = nn.Parameter(torch.full(shape, math.log(self.precision)))
            self.register_buffer(
                "residual", torch.full(shape, 1 / self.precision)
            )  # running mean of (y − f)²
            self.register_buffer("batches", torch.zeros((), dtype=torch.int64))  # that it has seen
        if learn == "per_example":
            self.register_buffer("log_precision", torch.zeros(()))  # added to the network's, by ``fit_noise``

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """nn.Module's; files from before have no buffers, and start anew where they are trained on."""
        for name, buffer in self.named_buffers():
            state_dict.setdefault(prefix + name, torch.zeros_like(buffer))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def check(self, draws: Tensor, targets: Tensor | None = None) -> None:
        """Raise on wrong types and shapes and non-finite draws or targets."""
        per_example = self.learn == "per_example"
        _check_types(draws, targets, self, axes=3 if per_example else 2)
        if per_example and draws.shape[-1] % 2:
            raise ValueError(
                f'learn="per_example" got draws {list(draws.shape)}: the last axis holds m means and m '
                "log-precisions, so give the network twice as many outputs as there are targets"
            )
        if targets is None:
            return
        if targets.is_complex() or targets.dtype is torch.bool:
            raise TypeError(f"Gaussian targets are real numbers, got {targets.dtype}: pass targets.float()")
        _check_shape(draws, targets, self.components(draws)[0].shape[1:])
        if _looks_at(draws) and not torch.isfinite(targets).all():
            raise ValueError(f"Gaussian targets {list(targets.shape)} hold NaN or infinity: drop those rows")

    def log_prob(self, draws: Tensor, targets: Tensor) -> Tensor:
        """Σ ½ (log τ − log 2π − τ (y − f)²) over the row's targets, [D, B]."""
        self.check(draws, targets)
        loc, log_precision = self.components(draws)
        square = (targets.to(loc.dtype).view(loc.shape[1:]) - loc).square()  # [D, B, ...]
        return _log_density(square, log_precision)

    def follows(self, draws: Tensor) -> bool:
        """Whether the scores of these draws train a network whose residuals the precision is to follow."""
        return (
            self.learn == "global"
            and torch.is_grad_enabled()
            and _has_gradients(draws)
            and _has_gradients(self.log_precision)
        )

    def followed(
        self, draws: Tensor, targets: Tensor, mixture: bool = False, weights: Tensor | None = None
    ) -> Tensor:
        """``log_prob`` of a training batch whose residuals have just moved the precision, [D, B].

        v ← v + w (Σ_db c_db (y_b − f_db)² / Σ_db c_db − v) with w = 10/(t + 9) in batch t, then log τ = −log v. The
        weight of a batch in v grows as t⁹, so that v is of the last tenth of a run, however long it is; of the last
        thousand batches at most, for a stream that does not end. c_db are the rows' ``weights`` [B]; for the loss of a
        ``mixture`` times each draw's share p_d(y_b) / Σ_d p_d(y_b).
        """
        self.check(draws, targets)
        loc, log_precision = self.components(draws)
        y = targets.to(loc.dtype).view(loc.shape[1:])
        square = (y - loc).square()  # [D, B, ...]
        with torch.no_grad():
            counts = loc.new_ones(loc.shape[:2]) if weights is None else weights.to(loc).expand(loc.shape[:2])
            if mixture:
                counts = counts * _log_density(square, log_precision).softmax(0)
            new = self._follow(square, y, counts / counts.mean())
        # The gradient is 0, not missing: processes that share a step wait for one.
        return _log_density(square, (0.0 * self.log_precision + new).to(loc.dtype).expand_as(loc))

    def _follow(self, square: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        """Move the running mean by one batch; log τ."""
        outputs = self.log_precision.dim()
        old, batches = self.residual.to(square.dtype), self.batches + 1
        # Without noise the mean would tend to 0 and its inverse overflow: at least a ten-thousandth of the targets.
        size = _mean_of_rows(targets.square().unsqueeze(0), torch.ones_like(counts[:1]), outputs)
        least = torch.where(size > 0, 1e-8 * size, math.exp(-_LOG_PRECISION_LIMIT))
        found = _mean_of_rows(square, counts, outputs).maximum(least)
        weight = (_SHARE / (batches.to(old.dtype) + (_SHARE - 1))).clamp(min=_LEAST_WEIGHT)
        moved = old + weight * (found - old)
        good = moved.isfinite()  # a step that is not is lost, and this must not be
        moved = torch.where(good, moved, old)
        new = torch.where(good, -moved.log(), self.log_precision.to(old.dtype))
        self.residual.copy_(moved)
        self.batches.copy_(torch.where(good.all(), batches, self.batches))
        self.log_precision.copy_(new)
        return new

    @torch.no_grad()
    def fit_noise(
        self, predicted: Predictive | Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Gaussian:
        """Scale the noise to the least nll of held-out targets, with ``weights`` [B] of rows; returns itself.

        c = argmin −Σ_b log (1/D) Σ_d N(y_b; f_db, c/τ_db), one for each of several ``outputs``: residuals on rows that
        were trained on understate the noise where a network overfits. By expectation maximisation,
        c ← Σ_db w_db τ_db (y_b − f_db)² / Σ_db w_db with each draw's share w_db of p(y_b).

        >>> likelihood = Gaussian().fit_noise(torch.zeros(1, 4), torch.tensor([-2.0, 2.0, 2.0, -2.0]))
        >>> likelihood
        Gaussian(precision=0.25, learn='fixed')
        """
        draws = predicted if isinstance(predicted, Tensor) else predicted.draws
        self.check(draws, targets)
        wide = torch.float32 if draws.device.type == "mps" else torch.float64  # MPS has no float64
        loc, log_precision = (part.to(wide) for part in self.components(draws))
        square = (targets.to(loc).view(loc.shape[1:]) - loc).square()
        outputs = self.log_precision.dim() if self.learn == "global" else 0
        counts = loc.new_ones(loc.shape[1]) if weights is None else weights.to(loc)
        prior = loc.new_zeros(len(loc), 1)
        if not isinstance(predicted, Tensor) and predicted._weights is not None:
            prior = predicted._weights.to(prior).log().unsqueeze(1)
        shift = loc.new_zeros(loc.shape[-1:] if outputs else ())  # of log τ
        for _ in range(_ROUNDS):
            precision = log_precision + shift
            share = counts * (_log_density(square, precision) + prior).softmax(0)  # [D, B]
            found = _mean_of_rows(square * precision.exp(), share / share.mean(), outputs).clamp(min=_LEAST)
            shift = shift - found.log()
            if float(found.log().abs().max()) < _CLOSE:
                break
        if self.learn == "fixed":
            self.precision *= math.exp(shift)
        else:
            self.log_precision += shift.to(self.log_precision)
        return self

    def average_logits(self, draws: Tensor) -> Tensor:
        """The mean outputs, [1, B, ...]; of means and of log-precisions alike."""
        return _full(draws).mean(0, keepdim=True)

    def moments(self, draws: Tensor) -> Moments:
        """The averages of f, 1/τ, H[N(f, 1/τ)] and the spread of f."""
        self.check(draws)
        loc, log_precision = self.components(draws)
        spread = 0.5 * (1 + math.log(2 * math.pi) - log_precision)
        return Moments.of(loc, (-log_precision).exp(), spread, loc.new_empty(*loc.shape[:2], 0))

    def predictive(self, draws: Tensor | Moments) -> GaussianPredictive:
        """The mixture of Gaussians, at the present value of a learned precision."""
        likelihood = copy.deepcopy(self)
        if isinstance(draws, Moments):
            return GaussianPredictive(likelihood, draws)
        return GaussianPredictive(likelihood, self.moments(draws), draws)

    def components(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The mean f and the log-precision log τ of every draw, both [D, B, ...]."""
        outputs = _full(draws)
        if self.learn == "per_example":
            loc, log_precision = outputs.chunk(2, dim=-1)  # [D, B, ..., m] each
            return loc, log_precision.clamp(-_LOG_PRECISION_LIMIT, _LOG_PRECISION_LIMIT) + self.log_precision
        if self.learn == "global":
            return outputs, self.log_precision.to(outputs.dtype).expand_as(outputs)
        return outputs, torch.full_like(outputs, math.log(self.precision))

    def extra_repr(self) -> str:
        """The settings."""
        if self.learn == "per_example":
            return "learn='per_example'"
        values = self.log_precision.exp().flatten().tolist() if self.learn == "global" else [self.precision]
        precision = ", ".join(f"{value:.6g}" for value in values)
        own = self.learn == "global" and self.log_precision.dim() > 0
        return f"precision={f'[{precision}]' if own else precision}, learn={self.learn!r}"


def _log_density(square: Tensor, log_precision: Tensor) -> Tensor:
    """Σ ½ (log τ − log 2π − τ (y − f)²) over a row's elements, [D, B]."""
    return _sum_rows(0.5 * (log_precision - math.log(2 * math.pi) - log_precision.exp() * square))


def _mean_of_rows(values: Tensor, counts: Tensor, outputs: int) -> Tensor:
    """The mean of [D, B, ...] by counts [D, B] of mean 1; with ``outputs`` = 1 for each place of the last axis."""
    counted = values * counts.view(*counts.shape, *[1] * (values.dim() - 2))
    return counted.flatten(0, -2).mean(0) if outputs else counted.mean()


def _has_gradients(x: Tensor) -> bool:
    """Whether a tensor has a gradient; under vmap what it stands for says so."""
    if torch.compiler.is_compiling():
        return x.requires_grad
    while not x.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def _full(draws: Tensor) -> Tensor:
    return draws if draws.dtype in (torch.float32, torch.float64) else draws.float()


def _checked(temperature: float) -> float:
    if not (is_number(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature!r}: pass a positive finite number, 1 for none")
    return float(temperature)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _sum_rows(values: Tensor) -> Tensor:
    return values.flatten(2).sum(2) if values.ndim > 2 else values  # [D, B, ...] to [D, B]


class NotFiniteError(ValueError):
    """Outputs of a network that are NaN or infinite."""


def not_finite(bad: int, of: str) -> NotFiniteError:
    """What to say of so many outputs that are NaN or infinite."""
    return NotFiniteError(
        f"{bad} {of} are NaN or infinite: if training diverged, lower the learning rate or clip gradients; mask "
        "classes with finite logits, say -1e4"
    )


_EVERY = 100
_steps = [0]  # of training on a GPU, over all likelihoods


class _Looks(threading.local):
    off = False
    guarded = False


_LOOKS = _Looks()


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Values are not checked inside: the caller has them looked at in another way."""
    _LOOKS.off, before = True, _LOOKS.off
    try:
        yield
    finally:
        _LOOKS.off = before


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Draws that are not finite are no error inside: the caller looks at the loss and its gradients."""
    _LOOKS.guarded, before = True, _LOOKS.guarded
    try:
        yield
    finally:
        _LOOKS.guarded = before


def _looks_at(draws: Tensor) -> bool:
    """Whether values are checked: always, except in compiled code, under vmap and in most training steps on a GPU.

    To look at a value is to wait for the GPU, which then waits for the next step to be prepared: there only the
    first two steps and every hundredth are checked.
    """
    if torch.compiler.is_compiling() or _LOOKS.off or _is_batched(draws):
        return False
    if not draws.is_cuda or not draws.requires_grad:
        return not (draws.is_cuda and torch.cuda.is_current_stream_capturing())
    return _steps[0] % _EVERY in (1, 2) and not torch.cuda.is_current_stream_capturing()


def _is_batched(x: Tensor) -> bool:
    """Whether a tensor stands for many under vmap, itself or below the layers of other transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def _check_types(draws: object, targets: object, likelihood: Likelihood, axes: int) -> None:
    if not isinstance(draws, Tensor) or not draws.is_floating_point():
        kind = draws.dtype if isinstance(draws, Tensor) else type(draws).__name__
        raise TypeError(f"draws are a floating-point tensor, got {kind}: pass the outputs, say draws.logits")
    if targets is not None and not isinstance(targets, Tensor):
        raise TypeError(f"targets are a tensor, got {type(targets).__name__}: pass torch.as_tensor(targets)")
    if draws.ndim < axes or draws.shape[0] == 0:
        raise ValueError(
            f"{likelihood} takes draws [draws, batch, ...] with at least {axes} axes and one draw, got "
            f"{list(draws.shape)}: use sb.draw(model, x), or outputs.unsqueeze(0) for a single draw"
        )
    if not torch.compiler.is_compiling() and draws.is_cuda and draws.requires_grad:
        _steps[0] += 1
    if not _looks_at(draws) or _LOOKS.guarded:
        return
    # A finite sum has finite terms; only another one may have been too large.
    if not math.isfinite(draws.detach().sum()) and not torch.isfinite(draws).all():
        bad = draws.numel() - int(torch.isfinite(draws).sum())
        raise not_finite(bad, f"of {draws.numel()} elements of draws {list(draws.shape)}")


def _check_shape(draws: Tensor, targets: Tensor, expected: torch.Size, squeeze: bool = True) -> None:
    single = squeeze and len(expected) == 2 and expected[1] == 1 and targets.shape == expected[:1]
    if targets.shape != expected and not single:
        raise ValueError(
            f"targets {list(targets.shape)} do not fit draws {list(draws.shape)}: these draws take targets "
            f"{list(expected)}; reshape the targets or the network's output"
        )
