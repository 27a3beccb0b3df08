"""Networks, methods and small tools shared by the tests of whole networks."""

import contextlib
import warnings

import torch
from torch import nn

import slimbayes as sb

# Every method, with components set apart from one another and noise large enough to see.
METHODS = {
    "rank1": lambda: sb.Rank1(components=3, dropout_rate=0.1),
    "cauchy": lambda: sb.Rank1(components=2, posterior="cauchy", dropout_rate=0.01),
    "lognormal": lambda: sb.Rank1(components=2, posterior="lognormal", random_sign_init=-0.2),
    "additive": lambda: sb.Rank1(components=2, perturbation="additive", dropout_rate=0.1),
    "random_output": lambda: sb.Rank1(components=2, dropout_rate=0.1, random="output"),
    "batch_ensemble": lambda: sb.BatchEnsemble(components=3),
    "meanfield": lambda: sb.MeanField(stddev_init=0.1),
    "flipout": lambda: sb.MeanField(stddev_init=0.1, estimator="flipout"),
    "local": lambda: sb.MeanField(stddev_init=0.1, estimator="local"),
    "ktied": lambda: sb.KTied(stddev_init=0.1),
    "ktied_local": lambda: sb.KTied(stddev_init=0.1, estimator="local"),
    "emp": lambda: sb.EMP(components=3, init_noise=0.3),
    "ecmp": lambda: sb.ECMP(components=3, init_noise=0.3),
    "mc_dropout": lambda: sb.MCDropout(rate=0.3),
    "mc_dropout_channel": lambda: sb.MCDropout(rate=0.3, granularity="channel"),
    "drop_connect": lambda: sb.DropConnect(rate=0.3),
    "deep_ensemble": lambda: sb.DeepEnsemble(members=3),
    "deterministic": lambda: sb.Deterministic(),
}
# Draws of these differ from example to example under noise="example".
PER_EXAMPLE = {
    "rank1", "cauchy", "lognormal", "additive", "random_output", "flipout", "local", "ktied_local", "mc_dropout",
    "mc_dropout_channel",
}  # fmt: skip
NOISELESS = {"batch_ensemble", "deep_ensemble", "deterministic"}


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return self.shortcut(x) + self.conv2(torch.relu(self.conv1(torch.relu(self.norm(x)))))


def residual_net():
    """Convolutions, BatchNorm, nested Sequentials, skip connections, a dropout; input [B, 2, 6, 6]."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Sequential(ResidualBlock(4, 4), nn.Sequential(ResidualBlock(4, 6, stride=2))),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(6, 3)),
    )


def mlp(inputs=3, outputs=2, width=8):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs)
    )


def images(batch=4):
    return torch.randn(batch, 2, 6, 6, generator=torch.Generator().manual_seed(5))


def features(batch=4, inputs=3):
    return torch.randn(batch, inputs, generator=torch.Generator().manual_seed(6))


def convert(build, method, seed=0, **options):
    """A converted network whose weights and new parameters depend on ``seed`` alone."""
    torch.manual_seed(seed)
    return sb.bayesianize(build(), method, **options)


def unit_factors(model):
    """Set every rank-1 factor to one, so that at noise="mean" the model is the plain network."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".r.loc", ".s.loc")):
                parameter.fill_(1.0)
    return model


def trained_step(model, inputs, targets, lr=0.05, **draw_options):
    """One SGD step on the ELBO: which parameters changed, and the loss before."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    draws = sb.draw(model, *inputs, **draw_options)
    loss = sb.elbo(getattr(draws, "logits", draws), targets, model, num_data=100).loss
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
    changed = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    return changed, float(loss.detach())


@contextlib.contextmanager
def quiet():
    """Silence torch's own warnings about nested tensors and ours about layers left alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
