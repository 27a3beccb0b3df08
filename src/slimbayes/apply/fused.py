"""Weight samples by one GPU kernel: W = M + σ∘ε in the type the layer computes in, the sums of the KL beside it.

The sums belong to the sample's own node, so that a KL made of them shares its backward pass. They are used only
inside one call of a function compiled by ``sb.compile``, which opens a scope: there draw and KL are one graph anyhow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slimbayes import fast
from slimbayes.context import Frame
from slimbayes.kernels.launch import available
from slimbayes.kernels.weights import ktied_weight, meanfield_weight
from slimbayes.noise import transformed
from slimbayes.posteriors import KTiedPosterior, NormalPosterior, Posterior
from slimbayes.weightkl import RawPrior

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

    def valid(self) -> bool:
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
    if not (fast.paths.weights and fast.paths.triton and available(mean.device)):
        return False
    if not torch.compiler.is_compiling() and transformed():
        return False
    if frame.draws != 1 or mean.numel() < _SMALLEST or mean.dtype != torch.float32:
        return False
    if type(mean) is not nn.Parameter and type(mean) is not Tensor:
        return False
    if frame.draw is not None and frame.draw.seed is not None:
        return False
    return type(posterior) is NormalPosterior or type(posterior) is KTiedPosterior


def makes_noise(y: Tensor, frame: Frame) -> bool:
    """Whether the kernel of local noise is used for these outputs: on a GPU, without a seed, rows repeated."""
    if not (fast.paths.weights and fast.paths.triton and available(y.device)) or not frame.tiled:
        return False
    if not torch.compiler.is_compiling() and transformed():
        return False
    return y.dtype != torch.float64 and (frame.draw is None or frame.draw.seed is None)


def sample(
    posterior: Posterior, mean: Tensor, prior: RawPrior | None, centred: bool
) -> tuple[Tensor, Sums | None]:
    """M + σ∘ε, or σ∘ε when ``centred``, [1, *shape], and the sums for the KL where its prior is Normal."""
    kind = mean.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else mean.dtype
    seed = torch.randint(0, 2**62, (1,), device=mean.device)
    centre = 0.0 if prior is None or prior.loc is None else prior.loc
    parameters: tuple[Tensor, ...]
    if isinstance(posterior, KTiedPosterior):
        parameters = (mean, posterior.log_u, posterior.log_v)
        value, sums = ktied_weight(*parameters, seed, dtype, centre, noise_only=centred)
    else:
        assert isinstance(posterior, NormalPosterior)
        parameters = (mean, posterior.rho)
        value, sums = meanfield_weight(
            mean, posterior.rho, seed, dtype, centre, posterior.maximum, noise_only=centred
        )
    if prior is None or not (torch.compiler.is_compiling() and SCOPE.open and torch.is_grad_enabled()):
        return value.unsqueeze(0), None
    known = Sums(sums, parameters, prior)
    SCOPE.made = [*SCOPE.made, known]
    return value.unsqueeze(0), known
