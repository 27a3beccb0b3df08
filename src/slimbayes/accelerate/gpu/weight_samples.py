"""Weight samples by one GPU kernel: W = M + σ∘ε in the type the layer computes in, the sums of the KL beside it.

The sums belong to the sample's own node, so that a KL made of them shares its backward pass. They are used only
inside one call of a function compiled by ``sb.compile``, which opens a scope: there draw and KL are one graph anyhow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.gpu.launch import available
from slimbayes.accelerate.gpu.weights import ktied_weight, meanfield_weight
from slimbayes.accelerate.weight_kl import RawPrior
from slimbayes.core.context import Frame
from slimbayes.core.noise import transformed
from slimbayes.core.posteriors import KTiedPosterior, NormalPosterior, Posterior

_SMALLEST = 1 << 14  # elements below which a kernel of its own does not pay


@dataclass
class Scope:
    """One call of a function compiled by ``sb.compile``, and the sums made in it."""

    open: bool = False
    made: list[Sums] = field(default_factory=list)


SCOPE = Scope()


@dataclass
class Sums:
    """Σ(M − μ_p)², Σσ² and Σ log σ of one draw's weights, and whose they are."""

    values: Tensor
    parameters: tuple[Tensor, ...]
    prior: RawPrior
    names: list[str]

    def valid(self, layers: Sequence[object]) -> bool:
        """Whether they were made in this call of a compiled function."""
        return torch.compiler.is_compiling() and any([one is self for one in SCOPE.made])

    def kl(self) -> Tensor:
        """Σ log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½."""
        distance, spread, logs = self.values.unbind()
        if self.prior.loc is not None:
            spread = spread + distance
        constant = self.parameters[0].numel() * (math.log(self.prior.scale) - 0.5)
        return 0.5 * self.prior.precision * spread - logs + constant


def usable(posterior: Posterior | None, mean: Tensor, frame: Frame) -> bool:
    """Whether the kernel makes this sample: one draw without a seed, of a large enough weight on a GPU."""
    seeded = frame.draw is not None and frame.draw.seed is not None
    return frame.draws == 1 and not seeded and _suits(posterior, mean)


def sums_mean(posterior: Posterior | None, mean: Tensor, prior: RawPrior | None) -> bool:
    """Whether the kernel casts a weight that is not sampled, because the sums of its KL then come with it."""
    return lends_sums(prior) and compute_dtype(mean) != mean.dtype and _suits(posterior, mean)


def _suits(posterior: Posterior | None, mean: Tensor) -> bool:
    if not (switches.paths.weights and switches.paths.triton and available(mean.device)):
        return False
    if not torch.compiler.is_compiling() and transformed():
        return False
    if mean.numel() < _SMALLEST or mean.dtype != torch.float32:
        return False
    if type(mean) is not nn.Parameter and type(mean) is not Tensor:
        return False
    return type(posterior) is NormalPosterior or type(posterior) is KTiedPosterior


def makes_noise(weight: Tensor, frame: Frame) -> bool:
    """Whether the kernel of local noise is used with this weight: on a GPU, without a seed, rows repeated."""
    if not (switches.paths.weights and switches.paths.triton and available(weight.device)) or not frame.tiled:
        return False
    if not torch.compiler.is_compiling() and transformed():
        return False
    return weight.dtype != torch.float64 and (frame.draw is None or frame.draw.seed is None)


def packs_signs(device: torch.device, frame: Frame) -> bool:
    """Whether signs are made as bits, which compiled code unpacks where it uses them: on a GPU, without a seed."""
    if not (
        switches.paths.noise and switches.paths.triton and available(device) and torch.compiler.is_compiling()
    ):
        return False
    return frame.draw is None or frame.draw.seed is None


def seed_of(frame: Frame, device: torch.device) -> tuple[Tensor, int]:
    """A seed and a stream for one kernel: in compiled code one seed for the whole draw, and a stream for each.

    In eager code a seed each, for a layer that is run again by checkpointing is not run again by its draw.
    """
    draw = frame.draw
    if draw is None or not torch.compiler.is_compiling():
        return torch.randint(0, 2**62, (1,), device=device), 0
    key = "kernels"
    if key not in draw.cache:
        draw.cache[key] = torch.randint(0, 2**62, (1,), device=device)
    stream = draw.calls.get(key, 0)
    draw.calls[key] = stream + 1
    return draw.cache[key], stream


def lends_sums(prior: RawPrior | None) -> bool:
    """Whether a KL may use the sums of a weight with this prior: inside one call of a compiled function."""
    return (
        prior is not None and torch.compiler.is_compiling() and SCOPE.open and torch.is_grad_enabled()
    )  # fmt: skip


def compute_dtype(mean: Tensor) -> torch.dtype:
    """The type that a layer with this weight computes in."""
    kind = mean.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else mean.dtype


def sample(
    posterior: Posterior, mean: Tensor, prior: RawPrior | None, form: str, frame: Frame, name: str
) -> tuple[Tensor, Tensor, Sums | None]:
    """What ``form`` says (see ``gpu.weights``), each [1, *shape], and the sums for the KL of a Normal prior."""
    dtype = compute_dtype(mean)
    # The mean alone has no noise, and any tensor will do.
    seed, stream = (mean, 0) if form == "mean" else seed_of(frame, mean.device)
    centre = 0.0 if prior is None or prior.loc is None else prior.loc
    parameters: tuple[Tensor, ...]
    if isinstance(posterior, KTiedPosterior):
        parameters = (mean, posterior.log_u, posterior.log_v)
        value, noise, sums = ktied_weight(*parameters, seed, dtype, centre, stream, form)
    else:
        assert isinstance(posterior, NormalPosterior)
        parameters = (mean, posterior.rho)
        value, noise, sums = meanfield_weight(
            mean, posterior.rho, seed, dtype, centre, posterior.maximum, stream, form
        )
    known = None
    if lends_sums(prior):
        assert prior is not None
        known = Sums(sums, parameters, prior, [name])
        SCOPE.made = [*SCOPE.made, known]
    return value.unsqueeze(0), noise.unsqueeze(0), known
