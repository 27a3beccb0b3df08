"""Noise under control and statistical comparisons, shared by the tests of the mathematics."""

import math

import numpy as np
import torch
from scipy import stats
from torch.func import functional_call

from slimbayes.core.context import Frame

F64 = torch.float64
Z = 5.5  # standard errors allowed to one comparison: the chance of a false alarm is 4e-8


def force_noise(monkeypatch, make):
    """Let ``make(kind, source, size)`` be the noise of every layer; sizes are [components, samples, ...]."""

    def noise_like(frame, kind, source, shape, dtype, device, per_example):
        size = (frame.components, frame.samples, frame.batch if per_example else 1, *shape)
        return make(kind, source, size).to(dtype).expand(size)

    monkeypatch.setattr(Frame, "noise_like", noise_like)
    monkeypatch.setattr("slimbayes.core.draws.prepare", lambda *_: None)  # layers ask for noise one by one


@torch.no_grad()
def set_sigma(posterior, sigma):
    """Give a posterior with ρ the scale σ = softplus(ρ) + 1e-7 exactly."""
    sigma = torch.as_tensor(sigma, dtype=posterior.rho.dtype).expand_as(posterior.rho)
    posterior.rho.copy_(torch.log(torch.expm1(sigma - 1e-7)))


@torch.no_grad()
def scatter(model, low=0.1, high=0.5):
    """Scales in [low, high] for every ρ of a model; log u and log v such that U Vᵀ is of that order."""
    for name, parameter in model.named_parameters():
        if name.endswith("rho"):
            sigma = torch.empty_like(parameter).uniform_(low, high)
            parameter.copy_(torch.log(torch.expm1(sigma)))
        elif name.endswith(("log_u", "log_v")):
            parameter.uniform_(0.5 * math.log(low), 0.5 * math.log(high)).sub_(
                0.5 * math.log(parameter.shape[1])
            )
    return model


def assert_mean(sample, expected, z=Z):
    """The mean over the first axis agrees with ``expected`` within z standard errors."""
    error = (sample.mean(0) - expected).abs()
    bound = z * sample.std(0) / math.sqrt(sample.shape[0]) + 1e-12
    assert (error <= bound).all(), (error / bound).max() * z


def assert_covariance(sample, expected, z=Z, resolution=0.03):
    """The covariance [d, d] over the first axis agrees with ``expected`` within z standard errors.

    The standard errors come from the sample's own fourth moments; that of a variance must stay below
    ``resolution`` of it, so that a wrong factor could not hide in the noise.
    """
    n = sample.shape[0]
    centred = (sample - sample.mean(0)).to(F64)
    found = centred.T @ centred / n
    fourth = centred.square().T @ centred.square() / n
    error = ((fourth - found.square()).clamp_min(0.0) / n).sqrt()
    assert (error.diagonal() <= resolution * expected.diagonal() + 1e-12).all()
    excess = (found - expected).abs() / (z * error + 1e-12)
    assert excess.max() <= 1, (excess.max() * z, found, expected)


def assert_law(sample, law, level=1e-6):
    """Numbers follow a scipy law: Kolmogorov and Smirnov's test, at the given level."""
    found = stats.kstest(np.asarray(sample.detach().flatten()), law.cdf)
    assert found.pvalue > level, found


def weight_jacobian(layer, name, inputs):
    """d(all outputs of a plain torch layer)/d(all elements of one of its tensors), [outputs, elements]."""

    def run(value):
        return functional_call(layer, {name: value}, inputs)

    value = getattr(layer, name).detach()
    jacobian = torch.autograd.functional.jacobian(run, value)
    return jacobian.reshape(-1, value.numel())


def output_covariance(layer, inputs, weight_sigma, bias_sigma, estimator):
    """Covariance of all outputs [B·..., B·...] of a layer linear in independent Normal weights and biases.

    "shared": y = J w, so J diag(σ²) Jᵀ. "flipout": the same within an example and 0 between examples.
    "local": the weights' part keeps its diagonal alone; a bias is one number per example and channel.
    """
    jacobian = weight_jacobian(layer, "weight", inputs)
    weights = (jacobian * weight_sigma.flatten().square()) @ jacobian.T
    biases = torch.zeros_like(weights)
    if layer.bias is not None:
        jacobian = weight_jacobian(layer, "bias", inputs)
        biases = (jacobian * bias_sigma.flatten().square()) @ jacobian.T
    batch = inputs[0].shape[0]
    example = torch.arange(batch).repeat_interleave(len(weights) // batch)
    same = (example[:, None] == example[None, :]).to(weights.dtype)
    if estimator == "shared":
        return weights + biases
    if estimator == "flipout":
        return (weights + biases) * same
    return torch.diag(weights.diagonal()) + biases * same
