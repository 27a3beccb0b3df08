"""What is measured while the k-tied paper's networks train: −ELBO, gradient SNR and standard deviations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import converted_layers
from slimbayes.core.draws import draw
from slimbayes.core.objective import elbo
from slimbayes.core.posteriors import KTiedPosterior
from slimbayes.lab.experiments.networks import Prepared
from slimbayes.lab.experiments.session import Probe, Session
from slimbayes.metrics import gradient_snr
from slimbayes.training import mixed_seed

BATCHES = 10


def snr(model: nn.Module, prepared: Prepared, layer: str, batch_size: int, seed: int) -> dict[str, float]:
    """E[g²]/Var[g] of a layer's log-scales over ten batches, each with a weight sample of its own.

    The parameters are ρ of a mean-field layer and log U, log V of a tied one. The loss is nll + KL/N, unannealed.
    "snr" is the median over parameters, "snr_mean" the mean, "snr_pooled" ΣE[g²]/ΣVar[g]. Units that are dead, or
    nearly so, get hardly more than the KL's gradient, which is the same for every batch: where the ratio is infinite
    the parameter is left out ("constant" is their share), and the mean is that of the largest that are left.
    """
    spread: Any = dict(converted_layers(model))[layer].bayes.weight
    tied = isinstance(spread, KTiedPosterior)
    parameters: list[Tensor] = [spread.log_u, spread.log_v] if tied else [spread.rho]
    device = parameters[0].device
    train, scaling = prepared.data.train, prepared.data.scaling
    generator = torch.Generator().manual_seed(mixed_seed(seed, 6))
    found = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(mixed_seed(seed, 7))
        for _ in range(BATCHES):
            rows = torch.randint(len(train), (batch_size,), generator=generator).to(train.inputs.device)
            x, y = scaling(train.inputs[rows].to(device)), train.targets[rows].to(device)
            loss = elbo(draw(model, x), y, model, prepared.num_train).loss
            gradients = torch.autograd.grad(loss, parameters)
            found.append(torch.cat([g.flatten() for g in gradients]))
    g = torch.stack(found).double()  # [batches, parameters]
    random = (g != g[0]).any(0)
    squares, variances = g.square().mean(0)[random], g.var(0, correction=0)[random]
    return {
        "snr": float((squares / variances).median()),
        "snr_mean": gradient_snr(g[:, random]),
        "snr_pooled": float(squares.sum() / variances.sum()),
        "constant": float((~random).double().mean()),
    }


def convergence(session: Session, layer: str, batch_size: int, snr_steps: tuple[int, ...]) -> Probe:
    """−ELBO on validation data at every probe, and the SNR of a layer at some steps."""

    samples, rows = (1, 16) if session.scale == "smoke" else (8, batch_size)

    def probe(model: nn.Module, prepared: Prepared, step: int) -> dict[str, Any]:
        figures, _ = session.measure(model, prepared, samples, "validation")
        found: dict[str, Any] = {"neg_elbo": figures["neg_elbo"]}
        if step in snr_steps:
            found |= snr(model, prepared, layer, min(rows, prepared.num_train), seed=step)
        return found

    return probe


def spreads(model: nn.Module, prepared: Prepared, step: int) -> dict[str, Any]:
    """The mean standard deviation of every layer's weight."""
    from slimbayes.analysis import stddevs

    return {"stddev": stddevs(model)}
