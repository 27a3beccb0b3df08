"""``compress``: a trained mean-field model made k-tied, by the nonnegative factorisation of σ that is closest in KL."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.analysis.layers import flat_stddev, posterior_of, root_of, stddev_of, tied_names
from slimbayes.analysis.spectra import stored
from slimbayes.core.conversion import converted_layers, find_record, require_whole, unwrap
from slimbayes.core.layers.base import Converted
from slimbayes.core.methods import KTied, MeanField
from slimbayes.core.methods.base import check_count
from slimbayes.core.methods.meanfield import NORMAL_PRIORS
from slimbayes.core.posteriors import KTiedPosterior, NormalPosterior
from slimbayes.core.selection import Selection
from slimbayes.sequences.kernels import Kernel

Network = TypeVar("Network", bound=nn.Module)

_SWEEPS = 1000  # of rank 1, at most: it converges in about ten
_SCALINGS = 10  # of all factors, before L-BFGS
_STEPS = 200  # of L-BFGS for each further rank, at most
_EXACT = 1e-13  # nats per weight below which a factorisation is as good as exact
_LEAST = 1e-100  # of an entry of U or V: its logarithm is stored
_SHIFTS = (0.9, 0.5, 0.25, 0.1, 0.03)


@torch.no_grad()
def compress(
    model: Network, rank: int, include: Selection | None = None, exclude: Selection | None = None
) -> Network:
    """A copy of a mean-field model whose weights are k-tied, σ = U Vᵀ with U, V > 0; the given model does not change.

    Of all k-tied posteriors with these means the copy has the one closest to the mean-field posterior,

        KL = Σ_ij ½(ρ_ij² − 1) − log ρ_ij,   ρ_ij = (U Vᵀ)_ij / σ_ij,

    found by descent: exact for rank 1, at a local minimum above, never worse for a larger rank. Means, biases, priors
    and estimators are kept, and the copy is what ``sb.KTied`` would have made: it trains on, saves and loads as such.
    Weights that are vectors (norms) stay mean-field. A ``stddev_max`` is dropped, since KTied has none, with a
    warning if a σ is now above it; ``tied_mean`` and priors that KTied lacks are errors. ``include`` and ``exclude``
    select layers as in ``sb.bayesianize``; tied weights are factorised once.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(20, 10), sb.MeanField())
    >>> sb.summary(net).parameters, sb.summary(sb.compress(net, rank=2)).parameters
    (410, 270)
    """
    check_count("rank", rank)
    names = _compressible(model, include, exclude)
    copied: Any = copy.deepcopy(unwrap(model))
    root = root_of(copied)
    layers = dict(converted_layers(root))
    tied: dict[NormalPosterior, KTiedPosterior] = {}
    over: list[str] = []
    for name in names:
        layer = layers[name]
        rule: Any = layer.bayes
        old = posterior_of(layer)
        assert isinstance(old, NormalPosterior)
        if old not in tied:
            tied[old] = _tied_posterior(old, layer, flat_stddev(name, layer), rank)
        rule.weight = tied[old]
        largest = float(stddev_of(layer).max())
        if old.maximum is not None and largest > 1.01 * old.maximum:
            over.append(f"{name!r} ({largest:.3g} over {old.maximum:.3g})")
        _uncap(rule.bias)
    _retell(root, [layer_name(name, layers[name]) for name in names], rank)
    if over:
        warnings.warn(
            f"k-tied layers have no stddev_max, and the largest σ is now above the cap in {', '.join(over)}; "
            f"a larger rank comes closer",
            stacklevel=3,
        )
    return copied  # type: ignore[no-any-return]


def _compressible(model: nn.Module, include: Selection | None, exclude: Selection | None) -> list[str]:
    """The names of the layers to change, each checked to have nothing that KTied lacks."""
    record = find_record(model)
    require_whole(model, "compress")
    names = tied_names(model, (NormalPosterior,), include, exclude)
    layers = dict(converted_layers(root_of(model)))
    _check_whole(names, layers)
    for name in names:
        method = record.methods[record.layers[layer_name(name, layers[name])]]
        remedy = f"leave the layer out with exclude={name!r}"
        if not isinstance(method, MeanField):
            raise TypeError(
                f"layer {name!r} was converted by {type(method).__name__}, and compress knows MeanField alone; {remedy}"
            )
        if method.tied_mean:
            raise ValueError(f"layer {name!r} has tied_mean=True, which KTied does not have; {remedy}")
        if not isinstance(method.prior, NORMAL_PRIORS):
            known = ", ".join(kind.__name__ for kind in NORMAL_PRIORS)
            raise ValueError(
                f"layer {name!r} has prior={method.prior!r}, and KTied needs one of {known}; {remedy}"
            )
    return names


def _check_whole(names: list[str], layers: dict[str, Converted]) -> None:
    """A layer with several kernels has one method, so that they change together."""
    chosen = set(names)
    for name in names:
        own = layer_name(name, layers[name])
        others = [n for n, layer in layers.items() if layer_name(n, layer) == own and n not in chosen]
        if others:
            raise ValueError(
                f"the kernels of layer {own!r} change together or not at all, and {others} are not selected; name the "
                f"layer as a whole"
            )


def layer_name(name: str, layer: Converted) -> str:
    """The name under which a layer was converted; that of a kernel is its layer's."""
    return name[: -len(layer.key)].removesuffix(".") if isinstance(layer, Kernel) else name


def _tied_posterior(old: NormalPosterior, layer: Converted, sigma: Tensor, rank: int) -> KTiedPosterior:
    m, n = sigma.shape
    with torch.random.fork_rng(devices=[]):  # its start is drawn and then written over
        new = KTiedPosterior((m, n), rank, 1.0, layer.weight.dtype)
    new = new.to(layer.weight.device)
    log_u, log_v = factorize(sigma, rank)
    new.log_u.copy_(log_u)
    new.log_v.copy_(log_v)
    return new.requires_grad_(old.rho.requires_grad).train(old.training)


def _uncap(posterior: nn.Module | None) -> None:
    """Store a bias's σ without its cap, as KTied has it."""
    if isinstance(posterior, NormalPosterior) and posterior.maximum is not None:
        most = stored(torch.tensor(posterior.maximum, dtype=torch.float64))
        posterior.rho.clamp_(max=float(most))
        posterior.maximum = None


def _retell(root: nn.Module, names: Iterable[str], rank: int) -> None:
    """Let the record say KTied of these layers; a rule whose layers have all changed is replaced."""
    record = find_record(root)
    methods = list(record.methods)
    chosen = set(names)
    for index, method in enumerate(record.methods):
        own = {name for name, rule in record.layers.items() if rule == index}
        if not own & chosen:
            continue
        assert isinstance(method, MeanField)
        same = ("prior", "stddev_init", "estimator", "biases", "temperature", "spread_rate")
        tied = KTied(rank, **{name: getattr(method, name) for name in same})
        if own <= chosen:
            methods[index] = tied
            continue
        methods.append(tied)
        record.layers.update(dict.fromkeys(own & chosen, len(methods) - 1))
    record.methods = tuple(methods)


def tied_kl(sigma: Tensor, log_u: Tensor, log_v: Tensor) -> Tensor:
    """Σ ½(ρ² − 1) − log ρ with ρ = (U Vᵀ)/σ: KL of the k-tied posterior from the mean-field one of equal means.

    >>> float(tied_kl(torch.full((2, 3), 0.5), torch.zeros(2, 1), torch.full((3, 1), 0.5).log()))
    0.0
    """
    ratio = (log_u.exp() @ log_v.exp().t()) / sigma
    return (0.5 * (ratio.square() - 1.0) - ratio.log()).sum()


@torch.no_grad()
def factorize(sigma: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """log U [m, rank] and log V [n, rank] with the least ``tied_kl`` found, in float64, without random numbers.

    Rank 1 is a convex problem. Each further rank splits one component of the solution before it into two,

        u vᵀ = ½u(1 + δa) (v(1 + δb))ᵀ + ½u(1 − δa) (v(1 − δb))ᵀ − δ²(u∘a)(v∘b)ᵀ,

    with a, b the leading singular pair of the KL's descent at second order, and goes down from there: some steps that
    cannot fail, then L-BFGS.

    >>> sigma = torch.outer(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.2, 0.3]))
    >>> log_u, log_v = factorize(sigma, 1)
    >>> bool(torch.allclose(log_u.exp() @ log_v.exp().t(), sigma.double()))
    True
    """
    sigma = sigma.to(torch.float64)
    log_u, log_v = _rank_one(sigma)
    for _ in range(1, rank):
        before = float(tied_kl(sigma, log_u, log_v))
        if before > _EXACT * sigma.numel():
            near = _scale(sigma, *_split(sigma, log_u, log_v))
            # Where σ spans many powers of ten a line search may overflow: the steps before it never do.
            found = [(float(tied_kl(sigma, *factors)), factors) for factors in (near, _descend(sigma, *near))]
            better = [one for one in found if one[0] < before]
            if better:
                log_u, log_v = min(better, key=lambda one: one[0])[1]
                continue
        log_u, log_v = _halve(log_u, log_v)
    shift = 0.5 * (log_v.mean(0) - log_u.mean(0))  # both sides of a component alike, as KTied starts
    return log_u + shift, log_v - shift


def _rank_one(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The closest σ = u vᵀ: with it the matrix ρ² has rows and columns of mean one (Sinkhorn scaling of 1/σ²)."""
    scale = sigma.log().mean().exp()
    inverse = (scale / sigma).square()
    v = torch.ones_like(sigma[0])  # squares of u and v, for now
    for _ in range(_SWEEPS):
        u = 1.0 / (inverse @ v / len(v))
        now = 1.0 / (inverse.t() @ u / len(u))
        change = float((now / v).log().abs().max())
        v = now
        if change < 1e-12:
            break
    return 0.5 * u.log().unsqueeze(1) + scale.log(), 0.5 * v.log().unsqueeze(1)


def _split(sigma: Tensor, log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """One component more, where and in the direction in which the KL falls most."""
    u, v = log_u.exp(), log_v.exp()
    ratio = (u @ v.t()) / sigma
    descent = (1.0 / ratio - ratio) / sigma  # −∂KL/∂(U Vᵀ)
    pairs = [_leading_pair(u[:, c, None] * descent * v[:, c]) for c in range(u.shape[1])]
    c = max(range(len(pairs)), key=lambda i: pairs[i][0])
    _, a, b = pairs[c]
    a, b = a / a.abs().max(), b / b.abs().max()
    starts = []
    for delta in _SHIFTS:
        start_u = torch.cat((log_u, log_u[:, [c]] + torch.log(0.5 - 0.5 * delta * a).unsqueeze(1)), 1)
        start_v = torch.cat((log_v, log_v[:, [c]] + torch.log1p(-delta * b).unsqueeze(1)), 1)
        start_u[:, c] += torch.log(0.5 + 0.5 * delta * a)
        start_v[:, c] += torch.log1p(delta * b)
        starts.append((float(tied_kl(sigma, start_u, start_v)), start_u, start_v))
    _, start_u, start_v = min(starts, key=lambda start: start[0])
    return start_u, start_v


def _leading_pair(matrix: Tensor) -> tuple[float, Tensor, Tensor]:
    """γ_1 and its singular vectors, roughly, by power iteration from the longest row."""
    b = matrix[matrix.square().sum(1).argmax()]
    for _ in range(30):
        b = b / b.norm()
        a = matrix @ b
        b = matrix.t() @ (a / a.norm())
    return float(b.norm()), a / a.norm(), b / b.norm()


def _halve(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """One component more and the same σ: the halves differ along u, so that further training can tell them apart."""
    wave = 0.1 * torch.cos(torch.arange(len(log_u), dtype=log_u.dtype, device=log_u.device))
    second = (log_u[:, -1] + torch.log(0.5 - 0.5 * wave)).unsqueeze(1)
    first = (log_u[:, -1] + torch.log(0.5 + 0.5 * wave)).unsqueeze(1)
    return torch.cat((log_u[:, :-1], first, second), 1), torch.cat((log_v, log_v[:, -1:]), 1)


def _scale(sigma: Tensor, log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplicative steps, each the minimum of a bound on the KL that touches it: u ← u·√((1/S)v / (S/σ²)v), S = U Vᵀ.

    The bound is Jensen's, for S² and −log S, with the shares of the components in S as weights.
    """
    u, v = log_u.exp(), log_v.exp()
    inverse = sigma.square().reciprocal()
    for _ in range(_SCALINGS):
        product = u @ v.t()
        u = u * ((product.reciprocal() @ v) / ((product * inverse) @ v)).sqrt()
        product = u @ v.t()
        v = v * ((product.reciprocal().t() @ u) / ((product * inverse).t() @ u)).sqrt()
    return u.clamp_min(_LEAST).log(), v.clamp_min(_LEAST).log()


def _descend(sigma: Tensor, log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """L-BFGS in log U·√n and log V·√m, in which the curvature of the two sides is alike."""
    m, n = sigma.shape
    x, y = log_u * math.sqrt(n), log_v * math.sqrt(m)
    inverse = 1.0 / sigma

    @torch.no_grad()  # torch's optimizer would switch gradients on
    def closure() -> Tensor:
        u, v = (x / math.sqrt(n)).exp(), (y / math.sqrt(m)).exp()
        ratio = (u @ v.t()).mul_(inverse)
        value = 0.5 * ratio.square().sum() - ratio.log().sum() - 0.5 * m * n
        slope = ratio.sub_(ratio.reciprocal()).mul_(inverse)  # ∂KL/∂(U Vᵀ)
        x.grad, y.grad = u * (slope @ v) / math.sqrt(n), v * (slope.t() @ u) / math.sqrt(m)
        return value

    optimizer = torch.optim.LBFGS(
        [x.requires_grad_(), y.requires_grad_()],
        max_iter=_STEPS,
        history_size=20,
        tolerance_grad=1e-9 * math.sqrt(m * n),
        tolerance_change=1e-11 * m * n,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    return x.detach() / math.sqrt(n), y.detach() / math.sqrt(m)
