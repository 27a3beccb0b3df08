"""What draws of a network say about unseen targets: means, both kinds of uncertainty, intervals, samples."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from slimbayes.core.mixtures import central, mixture_entropy, mixture_quantile, tails

if TYPE_CHECKING:
    from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Running averages over draws, in bounded memory: ``likelihood.moments(chunk)``, then ``merge`` them.

    δ = m₂ − m₁;  m = m₁ + δ n₂/n;  Σ(f − m)² = S₁ + S₂ + δ² n₁n₂/n  (Chan's merge of Welford's sums).

    >>> from slimbayes.core.likelihoods import Gaussian
    >>> first, second, third = (Gaussian().moments(torch.tensor([[f]])) for f in (1.0, 2.0, 6.0))
    >>> Gaussian().predictive(first.merge(second).merge(third)).epistemic
    tensor([4.6667])
    """

    count: int
    mean: Tensor  # [B, ...] of E[y|d]
    deviation: Tensor  # [B, ...] sum over draws of (E[y|d] − mean)²
    aleatoric: Tensor  # [B, ...] mean of Var[y|d]
    expected_entropy: Tensor  # [B, ...] mean of H[y|d], per target element
    log_mean: Tensor  # log of the mean probability of every outcome; [B, 0] for continuous targets

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor, entropy: Tensor, log_p: Tensor) -> Moments:
        """The averages of one chunk of draws, from E[y|d], Var[y|d], H[y|d] and log p(y|d) of each."""
        count, centre = mean.shape[0], mean.mean(0)
        deviation = (mean - centre).square().sum(0)
        log_mean = log_p.logsumexp(0) - math.log(count)
        return cls(count, centre, deviation, variance.mean(0), entropy.mean(0), log_mean)

    def merge(self, other: Moments) -> Moments:
        """The averages over this chunk's draws and the other's, for the same examples."""
        if self.mean.shape != other.mean.shape:
            raise ValueError(
                f"cannot merge moments of shapes {list(self.mean.shape)} and {list(other.mean.shape)}: merge "
                "joins draws of the same examples; Predictive.cat joins different examples"
            )
        count = self.count + other.count
        mine, theirs = self.count / count, other.count / count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * theirs,
            self.deviation + other.deviation + delta.square() * (self.count * theirs),
            self.aleatoric * mine + other.aleatoric * theirs,
            self.expected_entropy * mine + other.expected_entropy * theirs,
            torch.logaddexp(self.log_mean + math.log(mine), other.log_mean + math.log(theirs)),
        )

    @classmethod
    def weighted(cls, parts: Sequence[Moments], weights: Tensor) -> Moments:
        """The averages Σ_d w_d (...)_d over draws whose own moments are ``parts``, with weights [D] that sum to one.

        >>> from slimbayes.core.likelihoods import Gaussian
        >>> parts = [Gaussian().moments(torch.tensor([[f]])) for f in (1.0, 5.0)]
        >>> Moments.weighted(parts, torch.tensor([0.75, 0.25])).mean
        tensor([2.])
        """
        columns = zip(*(list(vars(moments).values())[1:] for moments in parts), strict=True)
        means, _, aleatoric, entropies, log_p = (torch.stack(column) for column in columns)

        def average(values: Tensor) -> Tensor:
            result: Tensor = torch.tensordot(weights.to(values), values, dims=1)
            return result

        centre = average(means)
        logs = weights.to(log_p).log().view(-1, *[1] * (log_p.ndim - 1))
        return cls(
            len(parts),
            centre,
            len(parts) * average((means - centre).square()),
            average(aleatoric),
            average(entropies),
            (log_p + logs).logsumexp(0),
        )

    def map(self, function: Callable[..., Tensor], *others: Moments) -> Moments:
        """``function`` of every tensor (and the others' of that name): each has the batch axis first."""
        columns = zip(*(list(vars(moments).values())[1:] for moments in (self, *others)), strict=True)
        return Moments(self.count, *(function(*column) for column in columns))


class Predictive(ABC):
    """The distribution of unseen targets, p(y|x) = Σ_d w_d p(y|x, d): a mixture over the draws, w_d = 1/D.

    Var[y] = E_d Var[y|d] + Var_d E[y|d] (``variance = aleatoric + epistemic``, population 1/D), and
    H[y] = E_d H[y|d] + I[y; d] (``entropy = expected_entropy + mutual_information``). ``reweighted`` gives the draws
    other weights; E_d and Var_d are then taken with those.

    >>> from slimbayes.core.likelihoods import Bernoulli
    >>> pred = Bernoulli().predictive(torch.tensor([[-9.0, 0.0], [9.0, 0.0]]))  # they differ on example 0
    >>> pred
    BernoulliPredictive(2 draws, shape=[2], dtype=torch.float32, device=cpu)
    >>> pred.mean, pred.mutual_information
    (tensor([0.5000, 0.5000]), tensor([0.6919, 0.0000]))
    """

    def __init__(
        self,
        likelihood: Likelihood,
        moments: Moments | None,
        draws: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.likelihood = likelihood
        self._moments = moments
        self._draws = draws
        self._weights = weights  # [D]; None: all equal
        self._mean: Tensor | None = None

    @property
    def moments(self) -> Moments:
        """The averages over the draws; from the draws when first asked for, where they were not given."""
        if self._moments is None:
            draws = self._need("moments")
            if self._weights is None:
                self._moments = self.likelihood.moments(draws)
            else:
                parts = [self.likelihood.moments(draws[d : d + 1]) for d in range(len(draws))]
                self._moments = Moments.weighted(parts, self._weights)
        return self._moments

    @property
    def weights(self) -> Tensor:
        """The share of every draw in the mixture, [D]: 1/D unless ``reweighted``."""
        if self._weights is not None:
            return self._weights
        return torch.full((self._count,), 1 / self._count, device=self.mean.device)

    def reweighted(self, weights: Tensor) -> Predictive:
        """The mixture Σ_d w_d p(y|x, d) of the same draws, with weights [D] of at least 0 and not all 0.

        >>> from slimbayes.core.likelihoods import Gaussian
        >>> pred = Gaussian().predictive(torch.tensor([[1.0], [5.0]])).reweighted(torch.tensor([3.0, 1.0]))
        >>> pred.mean, pred.epistemic
        (tensor([2.]), tensor([3.]))
        """
        draws = self._need("reweighted")
        given = torch.as_tensor(weights).detach().to(draws.device)
        if given.shape != draws.shape[:1] or given.is_complex():
            raise ValueError(f"weights {list(given.shape)} do not fit {len(draws)} draws: pass one for each")
        given = given.to(torch.promote_types(given.dtype, torch.float32))
        if not (torch.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
            raise ValueError(
                f"weights between {float(given.min()):.4g} and {float(given.max()):.4g}: pass numbers of at "
                "least 0, finite and not all 0"
            )
        return type(self)(self.likelihood, None, draws, given / given.sum())

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """H[y] of the mixture in nats, per target element."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The lower and the upper end of the central interval, each in the shape of ``mean``."""

    @abstractmethod
    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """``n`` targets per example, [n, B, ...]: a draw for each row, then the row's targets from it."""

    @abstractmethod
    def _mean_of_draws(self) -> Tensor:
        """E[y] without the other averages: the same number as in ``moments``."""

    @abstractmethod
    def _mixture(self, what: str) -> Tensor:
        """The network output [B, ...] that would give the mixture; ``what`` asks, for the error."""

    @property
    def draws(self) -> Tensor:
        """The network's outputs, [D, B, ...]."""
        return self._need("draws")

    @property
    def mean(self) -> Tensor:
        """E[y] in the shape of the network's output; probabilities where y is discrete."""
        if self._moments is not None:
            return self._moments.mean
        if self._weights is not None:
            return self.moments.mean
        if self._mean is None:
            self._mean = self._mean_of_draws()
        return self._mean

    @property
    def aleatoric(self) -> Tensor:
        """E_d Var[y|d]: the noise that more knowledge of the network would leave."""
        return self.moments.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Var_d E[y|d]: the disagreement of the draws."""
        return self.moments.deviation / self.moments.count

    @property
    def variance(self) -> Tensor:
        """Var[y] = aleatoric + epistemic, per element of ``mean``."""
        return self.aleatoric + self.epistemic

    @property
    def expected_entropy(self) -> Tensor:
        """E_d H[y|d] in nats, per target element."""
        return self.moments.expected_entropy

    @property
    def mutual_information(self) -> Tensor:
        """I[y; d] = H[y] − E_d H[y|d] in nats, per target element, with rounding below 0 removed."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)

    def log_prob(self, targets: Tensor) -> Tensor:
        """log p(y|x) = logsumexp_d (log w_d + log p(y|x, d)), [B]: joint over a row's target elements."""
        log_prob = self.likelihood.log_prob(self._outputs("log_prob"), targets)  # [D, B]
        if self._draws is None and targets.is_floating_point() and (targets % 1 != 0).any():
            self._need("log_prob of fractional targets")
        if self._draws is not None and self._weights is not None:
            return (log_prob + self._weights.to(log_prob).log().unsqueeze(1)).logsumexp(0)
        return log_prob.logsumexp(0) - math.log(log_prob.shape[0])

    @property
    def shape(self) -> torch.Size:
        """The shape of ``mean``, [B, ...]."""
        return self.mean.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        kept = "" if self._draws is not None else " (not kept)"
        kept += "" if self._weights is None else " with weights"
        where = f"dtype={self.mean.dtype}, device={self.mean.device}"
        return f"{type(self).__name__}({self._count} draws{kept}, shape={list(self.shape)}, {where})"

    @property
    def _count(self) -> int:
        return self.moments.count if self._draws is None else self._draws.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Predictive:
        """The predictive of some rows of the batch: a slice, a mask or a tensor of row numbers."""
        if not (isinstance(index, slice) or (isinstance(index, Tensor) and index.ndim == 1)):
            raise TypeError(f"index by a slice or a 1-d tensor, not by {index!r}: pred[i:i + 1] is row i")
        draws = None if self._draws is None else self._draws[:, index]
        moments = self.moments.map(lambda tensor: tensor[index])
        return type(self)(self.likelihood, moments, draws, self._weights)

    def to(self, device: torch.device | str) -> Predictive:
        """The same predictive on another device."""
        draws = None if self._draws is None else self._draws.to(device)
        moments = self.moments.map(lambda tensor: tensor.to(device))
        weights = None if self._weights is None else self._weights.to(device)
        return type(self)(copy.deepcopy(self.likelihood).to(device), moments, draws, weights)

    def cpu(self) -> Predictive:
        """The same predictive in host memory."""
        return self.to("cpu")

    @staticmethod
    def cat(predictives: Sequence[Predictive]) -> Predictive:
        """One predictive of all examples from those of consecutive batches."""
        if not predictives:
            raise ValueError("Predictive.cat got an empty list: pass at least one predictive")
        first, *rest = predictives
        for other in rest:
            if first._signature() != other._signature():
                remedy = "give every batch the same likelihood, number of draws, weights and keep_draws"
                raise ValueError(f"cannot cat {first} and {other}: {remedy}")
        moments = first.moments.map(lambda *column: torch.cat(column), *(other.moments for other in rest))
        draws = None if first._draws is None else torch.cat([each.draws for each in predictives], dim=1)
        return type(first)(first.likelihood, moments, draws, first._weights)

    def _signature(self) -> tuple[object, ...]:
        weights = None if self._weights is None else tuple(self._weights.tolist())
        return type(self), repr(self.likelihood), self._count, self._draws is None, self.shape[1:], weights

    def _need(self, what: str) -> Tensor:
        if self._draws is None:
            raise ValueError(
                f"{what} of this {type(self).__name__} needs the draws, and only the moments of "
                f"{self.moments.count} draws were kept: predict with keep_draws=True"
            )
        return self._draws

    def _outputs(self, what: str) -> Tensor:
        """The draws; in their absence the mixture as a single draw, which is exact for one target a row."""
        if self._draws is None and self.expected_entropy.numel() == len(self):
            return self._mixture(what).unsqueeze(0)  # [1, B, ...]
        return self._need(what)

    def _chosen(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Outputs [n, B, ...] of a draw chosen by its weight for each sample of each row."""
        outputs = self._outputs("sample")
        where = outputs.device if generator is None else generator.device
        shape = n, len(self)
        if self._weights is None or self._draws is None:
            index = torch.randint(outputs.shape[0], shape, generator=generator, device=where)  # [n, B]
        else:
            u = torch.rand(shape, generator=generator, device=where, dtype=torch.float32)
            edges = self._weights.to(where, torch.float32).cumsum(0)
            # At the end rounding may leave the last edge below u; the last draw that has a weight takes it.
            last = int(self._weights.nonzero()[-1])
            index = torch.searchsorted(edges, u, right=True).clamp(max=last)
        return outputs[index.to(outputs.device), torch.arange(len(self), device=outputs.device)]


@final
class CategoricalPredictive(Predictive):
    """Of classes: ``mean``, ``variance`` and ``interval`` are per class, in the network's layout.

    Var[1(y=c)] = E_d[p_c(1 − p_c)] + Var_d[p_c];  H[y] = −Σ_c p̄_c log p̄_c;  ``interval``: of p_c over draws.

    >>> from slimbayes.core.likelihoods import Categorical
    >>> pred = Categorical().predictive(torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]]))
    >>> pred.mean, pred.log_prob(torch.tensor([0])).exp()
    (tensor([[0.6904, 0.3096]]), tensor([0.6904]))
    """

    likelihood: Categorical

    @property
    def entropy(self) -> Tensor:
        return entropy(self.moments.log_mean, self.likelihood.axis(self.mean.ndim))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return central(self.likelihood.log_probabilities(self._need("interval")).exp(), level, self._weights)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Class indices, [n, B, ...]."""
        log_p = self.likelihood.log_probabilities(self._chosen(n, generator))  # [n, B, ..., C]
        return _sample_class(log_p, self.likelihood.axis(self.mean.ndim), generator)

    def _mean_of_draws(self) -> Tensor:
        return self.likelihood.log_probabilities(self._need("mean")).exp_().mean(0)

    def _mixture(self, what: str) -> Tensor:
        return self.moments.log_mean * self.likelihood.temperature  # by which it will be divided


@final
class BernoulliPredictive(Predictive):
    """Of yes-or-no targets: everything is per output element; ``mean`` is the probability of 1.

    Var[y] = E_d[p(1 − p)] + Var_d[p];  H[y] = −p̄ log p̄ − (1 − p̄) log(1 − p̄);  ``interval``: of p over draws.

    >>> from slimbayes.core.likelihoods import Bernoulli
    >>> lower, upper = Bernoulli().predictive(torch.tensor([[-2.0], [0.0], [2.0]])).interval(0.5)
    >>> lower, upper
    (tensor([0.3096]), tensor([0.6904]))
    """

    likelihood: Bernoulli

    @property
    def entropy(self) -> Tensor:
        return entropy(self.moments.log_mean, -1)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        p = self.likelihood.log_probabilities(self._need("interval"))[..., 1].exp()
        return central(p, level, self._weights)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Zeros and ones, [n, B, ...]."""
        log_p = self.likelihood.log_probabilities(self._chosen(n, generator))  # [n, B, ..., 2]
        return _sample_class(log_p, -1, generator).to(self.mean.dtype)

    def _mean_of_draws(self) -> Tensor:
        return self.moments.mean

    def _mixture(self, what: str) -> Tensor:
        log_q, log_p = self.moments.log_mean.unbind(-1)
        return (log_p - log_q) * self.likelihood.temperature  # the log-odds, as divided later


@final
class GaussianPredictive(Predictive):
    """Of real targets: a mixture of Gaussians N(f_d, 1/τ_d), everything per output element.

    Var[y] = mean_d 1/τ_d + Var_d f_d;  ``interval`` inverts the mixture's distribution function
    (1/D) Σ_d Φ((y − f_d)√τ_d) by bisection; ``entropy`` integrates −p log p, at a cost of D² at worst.

    >>> from slimbayes.core.likelihoods import Gaussian
    >>> pred = Gaussian(precision=4.0).predictive(torch.tensor([[-1.0], [1.0]]))
    >>> pred.aleatoric, pred.epistemic, pred.entropy
    (tensor([0.2500]), tensor([1.]), tensor([1.3585]))
    >>> lower, upper = pred.interval(0.9)
    >>> upper
    tensor([1.6408])
    """

    likelihood: Gaussian

    @cached_property
    def entropy(self) -> Tensor:
        """H[y] = −∫ p log p dy, in bounded memory, to about 1e-7."""
        loc, scale = (each.flatten(1) for each in self._components("entropy"))  # [D, E]
        return mixture_entropy(loc, scale, self._weights).view(self.shape).to(self.mean.dtype)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central ``level`` of the mixture, to 1e-9 of the narrowest component; not differentiable."""
        loc, scale = self._components("interval")
        ends = [mixture_quantile(q, loc, scale, self._weights).to(self.mean.dtype) for q in tails(level)]
        return ends[0], ends[1]

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Targets with their noise, [n, B, ...]."""
        loc, log_precision = self.likelihood.components(self._chosen(n, generator))  # [n, B, ...]
        return loc + (-0.5 * log_precision).exp() * _noise(loc, generator, Tensor.normal_)

    def _mean_of_draws(self) -> Tensor:
        return self.moments.mean

    def _mixture(self, what: str) -> Tensor:
        return self._need(what)

    def _components(self, what: str) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if self.mean.device.type == "mps" else torch.float64  # MPS has no float64
        loc, log_precision = self.likelihood.components(self._need(what))
        return loc.to(wide), (-0.5 * log_precision.to(wide)).exp()


def entropy(log_p: Tensor, axis: int) -> Tensor:
    """−Σ p log p along ``axis`` of log-probabilities.

    >>> entropy(torch.tensor([0.5, 0.5]).log(), -1)
    tensor(0.6931)
    """
    log_p = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # 0 · −inf would be NaN
    return -(log_p.exp() * log_p).sum(axis)


def _noise(like: Tensor, generator: torch.Generator | None, fill: Callable[..., Tensor]) -> Tensor:
    where = like.device if generator is None else generator.device
    return fill(torch.empty_like(like, device=where), generator=generator).to(like.device)


def _sample_class(log_p: Tensor, axis: int, generator: torch.Generator | None) -> Tensor:
    exponential = _noise(log_p, generator, Tensor.exponential_)
    return (log_p - exponential.log()).argmax(axis)  # the Gumbel-max trick
