"""The rank-1 paper's Figure 1: the distribution of a weight w' = w r for w ~ N(0, 1) and a random factor r.

    p(w') = ∫ N(w'; 0, r²) p(r) dr,      P(|w'| > x) = ∫ erfc(x / (√2 |r|)) p(r) dr

by the trapezoidal rule in u = log |r|, where the integrands are smooth and vanish at both ends. Of three priors the
density is known: K₀(|w'|) / π for r ~ N(0, 1), exp(z) E₁(z) / √(2π³) with z = w'² / 2 for r ~ Cauchy(0, 1), and
Student's t of ν degrees of freedom for r² ~ InverseGamma(ν/2, ν/2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from slimbayes.core import priors
from slimbayes.lab.experiments.outcome import Outcome, Table, check, curve
from slimbayes.lab.experiments.rank1_settings import cauchy, gaussian
from slimbayes.lab.experiments.session import Session
from slimbayes.verbs.method_text import parse_stored

DEGREES = 3.0  # of freedom: the fewest whole ones with a finite variance
_SAMPLES = {"smoke": 20_000, "desk": 1_000_000, "gpu": 1_000_000, "paper": 4_000_000}
_STEP, _END = 0.02, 40.0  # of u = log |r|
_REACH, _HALVINGS = 20.0, 45  # of log |w'| where quantiles are looked for
_KOLMOGOROV = 1.95  # √n D exceeds it with probability 0.001
_LEVELS = 31  # probabilities at which samples are counted


@dataclass(frozen=True)
class InverseGamma:
    """r² ~ InverseGamma(ν/2, ν/2), r > 0: w r is Student's t of ν degrees of freedom.

    >>> InverseGamma(3.0)
    InverseGamma(degrees=3.0)
    """

    degrees: float

    def log_density(self, u: Tensor) -> Tensor:
        """Of u = log r: that of r² by the inverse gamma, times dr²/du = 2 r²."""
        half, square = self.degrees / 2, (2 * u).exp()
        constant = half * math.log(half) - math.lgamma(half) + math.log(2.0)
        return constant - 2 * half * u - half / square

    def sample(self, number: int) -> Tensor:
        """r, [number]."""
        half = torch.tensor(self.degrees / 2, dtype=torch.float64)
        return td.Gamma(half, half).sample((number,)).rsqrt()


Prior = priors.Normal | priors.Cauchy | InverseGamma | None  # None: r = 1
NORMAL, CAUCHY, STUDENT, PLAIN = "Normal r", "Cauchy r", "Inverse-gamma r²", "r = 1"
SHOWN: dict[str, Prior] = {
    PLAIN: None, NORMAL: priors.Normal(0.0, 1.0), CAUCHY: priors.Cauchy(0.0, 1.0), STUDENT: InverseGamma(DEGREES),
}  # fmt: skip


def trained() -> dict[str, Prior]:
    """The priors of Table 5's CIFAR-10 networks.

    >>> list(trained().values())
    [Normal(loc=1, scale=0.1), Cauchy(loc=1, scale=0.1)]
    """
    texts = {"Normal r around 1, as trained": gaussian(), "Cauchy r around 1, as trained": cauchy()}
    methods: dict[str, Any] = {label: parse_stored(text) for label, text in texts.items()}
    return {label: method.prior for label, method in methods.items()}


def grid() -> Tensor:
    """u = log |r|, where integrands are evaluated."""
    return torch.arange(-_END, _END + _STEP / 2, _STEP, dtype=torch.float64)


def log_density(prior: Prior, u: Tensor) -> Tensor:
    """log of the density of u = log |r|: log[(p(eᵘ) + p(−eᵘ)) eᵘ].

    >>> total = log_density(priors.Cauchy(1.0, 0.1), grid()).exp().sum() * 0.02
    >>> abs(float(total) - 1) < 1e-12
    True
    """
    if isinstance(prior, InverseGamma):
        return prior.log_density(u)
    assert prior is not None
    r = u.exp()
    q: Any = prior.distribution(u)
    return torch.logaddexp(q.log_prob(r), q.log_prob(-r)) + u


def density(prior: Prior, x: Tensor) -> Tensor:
    """p(w' = x), [n], for x other than 0.

    >>> x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    >>> torch.allclose(density(priors.Normal(0.0, 1.0), x), torch.special.modified_bessel_k0(x) / math.pi)
    True
    """
    if prior is None:
        return (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
    u = grid()
    exponent = log_density(prior, u) - u - 0.5 * (x.abs().log().unsqueeze(-1) - u).mul(2).exp()  # [n, points]
    return exponent.exp().sum(-1) * (_STEP / math.sqrt(2 * math.pi))


def tail(prior: Prior, x: Tensor) -> Tensor:
    """P(|w'| > x), [n].

    >>> x = torch.tensor([1.0, 10.0], dtype=torch.float64)
    >>> [f"{float(p):.4f}" for p in tail(InverseGamma(1.0), x)]  # of one degree of freedom: Cauchy, 1 − 2/π atan(x)
    ['0.5000', '0.0635']
    """
    if prior is None:
        return torch.erfc(x / math.sqrt(2))
    u = grid()
    beyond = torch.erfc((x.log().unsqueeze(-1) - u).exp() / math.sqrt(2))  # [n, points]
    return (beyond * log_density(prior, u).exp()).sum(-1) * _STEP


def quantiles(prior: Prior, probabilities: Tensor) -> Tensor:
    """The x with P(|w'| ≤ x) = probability, [n], by bisection of log x.

    >>> [round(x, 4) for x in quantiles(None, torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()]
    [0.6745, 1.96]
    """
    low, high = torch.full_like(probabilities, -_REACH), torch.full_like(probabilities, _REACH)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = tail(prior, middle.exp()) > 1 - probabilities
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).exp()


def bessel(x: Tensor) -> Tensor:
    """The density of a product of two standard normals, K₀(|x|) / π.

    >>> round(float(bessel(torch.tensor(1.0, dtype=torch.float64))), 6)
    0.134016
    """
    k0: Tensor = torch.special.modified_bessel_k0(x.abs())
    return k0 / math.pi


def horseshoe(x: Tensor) -> Tensor:
    """exp(z) E₁(z) / √(2π³), z = x²/2, with exp(z) E₁(z) = ∫₀^∞ exp(−t) / (z + t) dt over v = log t.

    >>> round(float(horseshoe(torch.tensor([1.0], dtype=torch.float64))), 6)
    0.117198
    """
    v = grid().mul(2)  # [points]; small t matter down to z
    t = v.exp()
    inner = (v - t - torch.log(0.5 * x.square().unsqueeze(-1) + t)).exp()  # [n, points]
    return inner.sum(-1) * (2 * _STEP / math.sqrt(2 * math.pi**3))


def student(x: Tensor) -> Tensor:
    """The density of Student's t of DEGREES degrees of freedom.

    >>> round(float(student(torch.tensor(0.0, dtype=torch.float64))), 6)
    0.367553
    """
    found: Tensor = td.StudentT(torch.tensor(DEGREES, dtype=torch.float64)).log_prob(x)
    return found.exp()


CLOSED: dict[str, Callable[[Tensor], Tensor]] = {NORMAL: bessel, CAUCHY: horseshoe, STUDENT: student}


def sampled(prior: Prior, number: int, seed: int = 0) -> Tensor:
    """|w r|, [number], in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        w = torch.randn(number, dtype=torch.float64)
        if prior is None:
            return w.abs()
        r = (
            prior.sample(number)
            if isinstance(prior, InverseGamma)
            else prior.distribution(w).sample((number,))
        )
        return (w * r).abs()


def distance(prior: Prior, samples: Tensor) -> float:
    """√n max |F_n − F| over 31 probabilities: at most Kolmogorov's statistic.

    >>> distance(None, sampled(None, 20_000)) < 1.95 < distance(priors.Normal(0.0, 1.0), sampled(None, 20_000))
    True
    """
    probabilities = torch.arange(1, _LEVELS + 1, dtype=torch.float64) / (_LEVELS + 1)
    below = torch.searchsorted(samples.sort().values, quantiles(prior, probabilities))
    gap = (below.double() / len(samples) - probabilities).abs().max()
    return float(gap) * math.sqrt(len(samples))


COLUMNS = (
    "interquartile range",
    "P(|w'| < 0.1 IQR)",
    "P(|w'| > 5 IQR)",
    "P(|w'| < 0.1)",
    "P(|w'| > 10)",
    "√n D",
)


def described(prior: Prior, number: int) -> dict[str, float]:
    """A row of the table: the interquartile range is 2 × the median of |w'|, as w' is symmetric.

    >>> round(described(None, 1_000)["interquartile range"], 4)
    1.349
    """
    width = 2 * float(quantiles(prior, torch.tensor([0.5], dtype=torch.float64)))
    at = torch.tensor([0.1 * width, 5 * width, 0.1, 10.0], dtype=torch.float64)
    near, far, close, beyond = tail(prior, at).tolist()
    values = (width, 1 - near, far, 1 - close, beyond, distance(prior, sampled(prior, number)))
    return dict(zip(COLUMNS, values, strict=True))


def figure1(session: Session, setting: str) -> Outcome:
    """Figure 1: the densities, their mass near 0 and in the tails, and both against samples."""
    number = _SAMPLES[session.scale]
    table = Table("priors", f"w' = w r with w ~ N(0, 1); D of {number:,} samples", COLUMNS)
    for label, prior in (SHOWN | trained()).items():
        table.add(label, described(prior, number), {})
    near, far = torch.linspace(-4.0, 4.0, 160, dtype=torch.float64), _logspace(-2, 2, 81)
    lines = [(label, near.tolist(), [density(prior, near).tolist()]) for label, prior in SHOWN.items()]
    tails = [(label, far.tolist(), [tail(prior, far).tolist()]) for label, prior in SHOWN.items() if prior]
    curves = [
        curve("density", "Induced priors of a weight", "w'", "p(w')", lines),
        curve("tails", "Their tails", "x", "P(|w'| > x)", tails, log_x=True, log_y=True),
    ]
    checks = [*_closed_checks(), *_sample_checks(table), *_sparse_checks(table), *_tail_checks(table)]
    return Outcome([table], curves, checks=checks, deviations=[
        f"The paper gives no parameters: w ~ N(0, 1), r ~ N(0, 1), r ~ Cauchy(0, 1), "
        f"r² ~ InverseGamma({DEGREES / 2:g}, {DEGREES / 2:g}), and s = 1.",
        "Two more rows have the priors with which Table 5's CIFAR-10 networks are trained, around 1 with scale 0.1: "
        "with these a weight is hardly sparser than a Normal one, and the Cauchy's heavy tails stay.",
    ])  # fmt: skip


def _logspace(low: float, high: float, number: int) -> Tensor:
    return torch.logspace(low, high, number, dtype=torch.float64)


def _closed_checks() -> list[dict[str, Any]]:
    x, found = _logspace(-2, math.log10(20), 60), []
    for label, closed in CLOSED.items():
        gap = float((density(SHOWN[label], x) / closed(x) - 1).abs().max())
        words = f"{label}: the integral is the closed form on 0.01 to 20; largest relative difference"
        found.append(check(words, gap < 1e-9, gap, "< 1e-9"))
    return found


def _sample_checks(table: Table) -> list[dict[str, Any]]:
    words = "samples of w r have the distribution; √n times the largest difference"
    gaps = {label: table.mean(label, "√n D") for label in table.rows}
    bound = f"< {_KOLMOGOROV}"
    return [check(f"{label}: {words}", gap < _KOLMOGOROV, gap, bound) for label, gap in gaps.items()]


def _sparse_checks(table: Table) -> list[dict[str, Any]]:
    """More mass near 0 than a Normal of the same interquartile range, and a density without bound at 0."""
    found, column = [], "P(|w'| < 0.1 IQR)"
    at = torch.tensor([1e-7, 1e-6], dtype=torch.float64)
    for label in (NORMAL, CAUCHY):
        ratio = table.mean(label, column) / table.mean(PLAIN, column)
        words = f"{label}: mass within 0.1 IQR of 0 over that of a Normal of the same IQR"
        found.append(check(words, ratio > 1, ratio, "> 1"))
        prior: Any = SHOWN[label]
        origin = prior.distribution(at).log_prob(torch.zeros((), dtype=torch.float64)).exp() / math.sqrt(
            2 * math.pi
        )
        first, second = density(prior, at)
        slope = float((first - second) / (2 * origin * math.log(10)))
        words = f"{label}: the density grows like 2 p_w(0) p_r(0) log(1 / |w'|) at 0; ratio"
        found.append(check(words, abs(slope - 1) < 1e-6, slope, "1"))
    ratio = table.mean(CAUCHY, "P(|w'| < 0.1)") / table.mean(NORMAL, "P(|w'| < 0.1)")
    found.append(
        check("Mass within 0.1 of 0, Cauchy r over Normal r of the same scale", ratio < 1, ratio, "< 1")
    )
    return found


def _tail_checks(table: Table) -> list[dict[str, Any]]:
    masses = {label: table.mean(label, "P(|w'| > 5 IQR)") for label in SHOWN}
    found = []
    for heavy, light in ((CAUCHY, NORMAL), (NORMAL, PLAIN), (STUDENT, PLAIN)):
        words = f"{heavy}: mass beyond 5 IQR above that of {light}"
        found.append(check(words, masses[heavy] > masses[light], masses[heavy], f"> {masses[light]:.3g}"))
    x = torch.tensor([1e4, 2e4], dtype=torch.float64)
    for label, power in ((CAUCHY, 1.0), (STUDENT, DEGREES)):
        first, second = tail(SHOWN[label], x)
        slope = float((first / second).log() / math.log(2))
        words = f"{label}: P(|w'| > x) falls like x to the power −{power:g}; the power at 10⁴"
        found.append(check(words, abs(slope - power) < 1e-3, slope, f"{power:g}"))
    return found
