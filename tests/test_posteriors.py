"""Posteriors: how they start, and that what layers sample by their own path follows the law they name."""

import math

import pytest
import torch
from helpers_statistics import F64, assert_covariance, assert_law, assert_mean, set_sigma
from scipy import stats
from torch import nn

import slimbayes as sb
from slimbayes.core import distributions as d
from slimbayes.core.posteriors import NormalPosterior, positive

TRUNCATED_SD = 0.1 * math.sqrt(1 - 4 * stats.norm.pdf(2) / (2 * stats.norm.cdf(2) - 1))  # 0.0880


# ---------------------------------------------------------------------------------------------------------
# How they start


def rank1(**options):
    torch.manual_seed(0)
    return sb.bayesianize(nn.Linear(2000, 1500), sb.Rank1.paper(components=4, **options)).bayes


@pytest.mark.parametrize(("rate", "rho"), [(1e-3, -3.4375), (1e-6, -6.9073), (5e-7, -7.2540)])
@pytest.mark.parametrize("posterior", ["normal", "lognormal", "cauchy", "halfcauchy"])
def test_rank1_scale_start(rate, rho, posterior):
    rule = rank1(posterior=posterior, dropout_rate=rate)
    assert math.log(math.expm1(math.sqrt(rate / (1 - rate)))) == pytest.approx(rho, abs=1e-4)
    for factor, width in ((rule.r, 1500), (rule.s, 2000)):
        start = factor.spread.rho.detach()
        assert start.shape == (4, width)
        if posterior in ("cauchy", "halfcauchy"):
            torch.testing.assert_close(start, torch.full_like(start, rho), rtol=0.0, atol=1e-4)
            assert start.std() < 1e-5
            continue
        assert (start - rho).abs().max() <= 0.2 + 2e-4
        assert (start - rho).abs().max() > 0.19
        assert start.mean().item() == pytest.approx(
            rho, abs=5 * TRUNCATED_SD / math.sqrt(start.numel()) + 1e-4
        )
        assert start.std().item() == pytest.approx(TRUNCATED_SD, rel=0.04)


@pytest.mark.parametrize("posterior", ["normal", "cauchy", "lognormal", "delta"])
@pytest.mark.parametrize("spread", [-0.5, -1.0, -0.75])
def test_rank1_location_start_normal(posterior, spread):
    rule = rank1(posterior=posterior, random_sign_init=spread)
    for factor in (rule.r, rule.s):
        assert_law(factor.loc, stats.norm(1.0, abs(spread)))


def test_rank1_additive_locations_start_around_zero():
    assert_law(rank1(perturbation="additive").r.loc, stats.norm(0.0, 0.5))


@pytest.mark.parametrize("probability", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("method", [sb.Rank1, sb.BatchEnsemble])
def test_rank1_location_start_signs(probability, method):
    torch.manual_seed(1)
    rule = sb.bayesianize(nn.Linear(2000, 1500), method(4, random_sign_init=probability)).bayes
    for factor in (rule.r, rule.s):
        assert set(factor.loc.unique().tolist()) <= {-1.0, 1.0}
        error = math.sqrt(probability * (1 - probability) / factor.loc.numel())
        assert (factor.loc > 0).double().mean().item() == pytest.approx(probability, abs=5 * error)


def test_halfcauchy_keeps_the_priors_location():
    rule = rank1(posterior="halfcauchy", prior=sb.HalfCauchy(0.5, 0.2))
    assert torch.equal(rule.r.loc, torch.full((4, 1500), 0.5))
    assert "loc" not in dict(rule.r.named_parameters())


@pytest.mark.parametrize(("rank", "start"), [(1, -2.303), (2, -2.649), (3, -2.852)])
def test_ktied_start(rank, start):
    torch.manual_seed(2)
    model = sb.bayesianize(nn.Linear(3000, 2000), sb.KTied.paper(rank=rank))
    posterior = model.bayes.weight
    assert 0.5 * (math.log(0.01) - math.log(rank)) == pytest.approx(start, abs=5e-4)
    assert posterior.log_u.shape == (2000, rank)
    assert posterior.log_v.shape == (3000, rank)
    for value in (posterior.log_u, posterior.log_v):
        assert_law(value, stats.norm(0.5 * (math.log(0.01) - math.log(rank)), 0.1))
    scale = posterior(model.weight).scale
    assert scale.mean().item() == pytest.approx(0.01 * math.exp(0.01), rel=0.01)  # E e^noise twice, sd 0.1


@pytest.mark.parametrize(
    "method", [sb.MeanField.paper(), sb.MeanField.paper(stddev_init=0.3), sb.KTied.paper(stddev_init=0.02)]
)
def test_meanfield_start(method):
    torch.manual_seed(3)
    model = sb.bayesianize(nn.Linear(20, 20_000).double(), method)
    rule, start = model.bayes, method.stddev_init
    sigma = rule.bias(model.bias).scale
    assert_law(sigma, stats.norm(start, 0.1 * start))
    if isinstance(method, sb.MeanField):
        assert_law(rule.weight(model.weight).scale, stats.norm(start, 0.1 * start))


def test_scale_is_softplus_plus_epsilon():
    rho = torch.linspace(-30, 20, 51, dtype=F64)  # torch's softplus is linear above 20
    torch.testing.assert_close(positive(rho), torch.log1p(rho.exp()) + 1e-7, rtol=1e-12, atol=0.0)
    for posterior in ("normal", "cauchy", "lognormal", "halfcauchy"):
        factor = rank1(posterior=posterior).r
        nn.init.constant_(factor.spread.rho, -40.0)
        assert factor().scale.min().item() == pytest.approx(1e-7, rel=1e-3)


def test_cap_holds_and_lets_sigma_come_back():
    posterior = NormalPosterior(torch.tensor([0.1, 0.5, 0.5], dtype=F64), maximum=0.2)
    scale = posterior(torch.zeros(3, dtype=F64)).scale
    assert scale.tolist() == [pytest.approx(0.1, abs=2e-7), 0.2, 0.2]
    # A loss that grows with σ shrinks it, over the cap too; one that falls must not push it further.
    (scale * torch.tensor([2.0, 3.0, -3.0], dtype=F64)).sum().backward()
    slope = torch.sigmoid(posterior.rho.detach())
    expected = torch.stack([2 * slope[0], 3 * slope[1], 0 * slope[2]])
    torch.testing.assert_close(posterior.rho.grad, expected, rtol=1e-12, atol=0.0)


def test_cap_through_training():
    """A KL that wants σ = 1 stops at the cap; one that wants 0.05 comes back from above it."""
    model = sb.bayesianize(nn.Linear(3, 2).double(), sb.MeanField.paper(stddev_max=0.2))
    set_sigma(model.bayes.weight, 0.19)
    adam = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(50):
        adam.zero_grad()
        sb.kl(model).backward()
        adam.step()
    scale = model.bayes.weight(model.weight).scale
    assert torch.equal(scale, torch.full_like(scale, 0.2))
    down = sb.bayesianize(
        nn.Linear(3, 2).double(), sb.MeanField.paper(prior=sb.Normal(0.0, 0.05), stddev_max=0.2)
    )
    set_sigma(down.bayes.weight, 0.6)
    adam = torch.optim.Adam(down.parameters(), 0.1)
    for _ in range(200):
        adam.zero_grad()
        sb.kl(down).backward()
        adam.step()
    scale = down.bayes.weight(down.weight).scale
    torch.testing.assert_close(scale, torch.full_like(scale, 0.05), rtol=0.02, atol=0.0)


# ---------------------------------------------------------------------------------------------------------
# What layers sample

LAWS = {
    "normal": lambda m, s: stats.norm(m, s),
    "cauchy": lambda m, s: stats.cauchy(m, s),
    "lognormal": lambda m, s: stats.lognorm(s=s, scale=math.exp(m)),
    "halfcauchy": lambda m, s: stats.halfcauchy(m, s),
}
LOCS = torch.tensor([[1.0, -0.5, 0.3], [2.0, 1.0, 0.0]], dtype=F64)
SCALES = torch.tensor([[0.1, 0.5, 0.2], [1.0, 0.03, 0.4]], dtype=F64)


def factor_model(posterior, which="input", clip=None):
    """An identity layer: its output is the factor itself, [2 components, 3 channels]."""
    layer = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(layer.weight)
    model = sb.bayesianize(layer, sb.Rank1.paper(components=2, posterior=posterior, factors=which, clip=clip))
    factor = model.bayes.s if which == "input" else model.bayes.r
    with torch.no_grad():
        factor.loc.copy_(LOCS)
    set_sigma(factor.spread, SCALES)
    return model


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("posterior", LAWS)
def test_rank1_factors_follow_their_law(posterior, noise, seed):
    torch.manual_seed(4)
    which = "input" if noise == "example" else "output"
    batch, samples = (100, 400) if noise == "example" else (1, 40_000)
    x = torch.ones(batch, 3, dtype=F64)
    with torch.no_grad():
        y = sb.draw(factor_model(posterior, which), x, samples=samples, noise=noise, seed=seed)
    y = y.unflatten(0, (2, samples)).flatten(1, 2)  # [2, 40000, 3]
    for k in range(2):
        for i in range(3):
            law = LAWS[posterior](LOCS[k, i].item(), SCALES[k, i].item())
            assert_law(y[k, :, i], law)
            if posterior in ("cauchy", "halfcauchy"):
                quartiles = torch.quantile(y[k, :, i], torch.tensor([0.25, 0.5, 0.75], dtype=F64))
                # A quantile's standard error is sqrt(q(1 − q)/n)/density.
                for q, found in zip((0.25, 0.5, 0.75), quartiles.tolist(), strict=True):
                    exact = law.ppf(q)
                    error = math.sqrt(q * (1 - q) / 40_000) / law.pdf(exact)
                    assert found == pytest.approx(exact, abs=5.5 * error)
    if posterior in ("normal", "lognormal"):
        logs = y if posterior == "normal" else y.log()
        for k in range(2):
            assert_mean(logs[k], LOCS[k])
        # Components and channels are independent of each other.
        joint = logs.permute(1, 0, 2).flatten(1)  # [40000, 6]
        assert_covariance(joint, torch.diag(SCALES.flatten().square()))


@pytest.mark.parametrize("posterior", LAWS)
@pytest.mark.parametrize("clip", [None, 0.8])
def test_mean_noise_is_the_point(posterior, clip):
    """Samples are clipped, means are not."""
    y = sb.draw(factor_model(posterior, clip=clip), torch.ones(4, 3, dtype=F64), samples=2, noise="mean")
    point = LOCS.exp() if posterior == "lognormal" else LOCS  # the median of a log-normal
    torch.testing.assert_close(y, point[:, None, None].expand(2, 2, 4, 3).flatten(0, 1), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("clip", [1.5, 10.0])
@pytest.mark.parametrize("seed", [None, 3])
def test_clip_bounds_samples_and_stops_their_gradient(clip, seed):
    torch.manual_seed(5)
    model = factor_model("cauchy", clip=clip)
    set_sigma(model.bayes.s.spread, 1.0)
    y = sb.draw(model, torch.ones(1, 3, dtype=F64), samples=20_000, seed=seed)
    assert y.max() == clip
    assert y.min() == -clip
    law = stats.cauchy(LOCS[0, 0].item(), 1.0)
    outside = (y[:20_000, 0, 0].abs() == clip).double().mean().item()
    share = law.sf(clip) + law.cdf(-clip)
    assert outside == pytest.approx(share, abs=5.5 * math.sqrt(share * (1 - share) / 20_000))
    y.sum().backward()
    inside = (y.detach().abs() < clip).unflatten(0, (2, 20_000)).sum((1, 2))  # [2, 3]
    torch.testing.assert_close(model.bayes.s.loc.grad, inside.to(F64))


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize(
    "method",
    [sb.MeanField.paper(), sb.KTied.paper(rank=2), sb.MeanField.paper(biases=False)],
    ids=["MeanField", "KTied", "weights"],
)
def test_weight_samples_follow_their_law(method, noise, seed):
    torch.manual_seed(6)
    model = sb.bayesianize(nn.Linear(3, 2).double(), method)
    with torch.no_grad():
        for name, parameter in model.bayes.named_parameters():
            parameter.add_(torch.rand_like(parameter) + (2.0 if "rho" in name else 1.0))
        rows = torch.cat([torch.zeros(1, 3, dtype=F64), torch.eye(3, dtype=F64)])
        y = sb.draw(model, rows, samples=30_000, noise=noise, seed=seed)  # [n, 4, 2]
        bias, weight = y[:, 0], y[:, 1:] - y[:, :1]  # one sample per draw, in every row
        weight = weight.transpose(1, 2).flatten(1)  # [n, 6]
        q = model.bayes.weight(model.weight)
    for i in range(6):
        assert_law(weight[:, i], stats.norm(q.loc.flatten()[i].item(), q.scale.flatten()[i].item()))
    if not method.biases:
        assert torch.equal(bias, model.bias.detach().expand_as(bias))
        return
    b = model.bayes.bias(model.bias)
    joint = torch.cat([weight, bias], 1)
    assert_mean(joint, torch.cat([q.loc.flatten(), b.loc]).detach())
    assert_covariance(joint, torch.diag(torch.cat([q.scale.flatten(), b.scale]).detach().square()))


@pytest.mark.parametrize("seed", [None, 12])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropconnect_moments(rate, seed):
    torch.manual_seed(7)
    model = sb.bayesianize(nn.Linear(3, 2).double(), sb.DropConnect(rate))
    with torch.no_grad():
        y = sb.draw(model, torch.eye(3, dtype=F64), samples=40_000, seed=seed) - model.bias
    factor = (y.transpose(1, 2) / model.weight.detach()).flatten(1)  # [n, 6]
    kept = factor > 0.5
    torch.testing.assert_close(factor, kept.to(F64) / (1 - rate), rtol=1e-9, atol=1e-9)
    assert_mean(factor, 1.0)
    assert_covariance(factor, torch.eye(6, dtype=F64) * rate / (1 - rate))


@pytest.mark.parametrize("seed", [None, 13])
@pytest.mark.parametrize("granularity", ["element", "channel"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_mcdropout_moments(rate, granularity, seed):
    """A 1×1 convolution by the identity shows the mask: an element's or a whole channel's."""
    torch.manual_seed(8)
    layer = nn.Conv1d(2, 2, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2).unsqueeze(-1))
        model = sb.bayesianize(layer, sb.MCDropout(rate, granularity))
        y = sb.draw(model, torch.ones(2, 2, 2, dtype=F64), samples=30_000, seed=seed)  # [n, B, C, L]
    assert set(y.unique().tolist()) == {0.0, 1 / (1 - rate)}
    assert_mean(y.flatten(1), 1.0)
    block = torch.ones(2, 2, dtype=F64) if granularity == "channel" else torch.eye(2, dtype=F64)
    covariance = torch.block_diag(*[block] * 4) * rate / (1 - rate)
    assert_covariance(y.flatten(1), covariance)


@pytest.mark.parametrize("seed", [None, 14])
def test_own_dropout_modules_follow_the_draw(seed):
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Dropout(0.25)).double().eval()
    nn.init.eye_(net[0].weight)
    model = sb.bayesianize(net, sb.MCDropout(0.2))
    with torch.no_grad():
        y = sb.draw(model, torch.ones(1, 2, dtype=F64), samples=30_000, seed=seed)[:, 0]
    assert_mean(y, 1.0)
    variance = (1 / 0.8) * (1 / 0.75) - 1  # of a product of two masks of mean one
    assert_covariance(y, torch.eye(2, dtype=F64) * variance)
    assert torch.equal(
        sb.draw(model, torch.ones(1, 2, dtype=F64), noise="mean"), torch.ones(1, 1, 2, dtype=F64)
    )


class OneDropout(nn.Module):
    """The same dropout module after two layers of different widths, as many networks have it."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.drop = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 3, 1), kind(0.5)

    def forward(self, x):
        hidden = self.drop(self.first(x))
        return self.drop(self.second(hidden)), hidden


@pytest.mark.parametrize("seed", [None, 16])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_dropout_used_twice_draws_twice(kind, seed):
    torch.manual_seed(11)
    net = OneDropout(kind)
    for layer in (net.first, net.second):
        nn.init.zeros_(layer.weight)
        nn.init.ones_(layer.bias)  # both outputs show their masks alone
    model = sb.bayesianize(net, sb.MCDropout(0.0))
    with torch.no_grad():
        second, first = sb.draw(model, torch.ones(1, 1, 1, 1), samples=20_000, seed=seed)
    masks = torch.cat([first.flatten(1), second.flatten(1)], 1)  # [n, 5]
    assert_covariance(masks, torch.eye(5, dtype=F64))


@pytest.mark.parametrize("components", [3, 5])
@pytest.mark.parametrize("seed", [None, 15])
@pytest.mark.parametrize("probs", [None, [0.5, 0.1, 0.3, 0.07, 0.03]])
def test_indices_follow_the_mixing_law(components, seed, probs):
    torch.manual_seed(10)
    learn = probs is not None
    model = sb.bayesianize(
        nn.Linear(2, 1).double(), sb.ECMP.paper(components=components, patch=("output",), learn_mixing=learn)
    )
    law = torch.full((components,), 1 / components, dtype=F64)
    with torch.no_grad():
        if learn:
            law = torch.tensor(probs[:components], dtype=F64) / sum(probs[:components])
            model.bayes.mixing.logits.copy_(law.log() + 1.7)
        model.weight.copy_(torch.arange(components, dtype=F64)[:, None, None].expand(-1, 1, 2))
        model.bias.copy_(torch.arange(components, dtype=F64)[:, None])
        rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=F64)
        y = sb.draw(model, rows, samples=30_000, seed=seed)[..., 0]  # [n, 3]
    index = torch.stack([y[:, 0], y[:, 1] - y[:, 0], y[:, 2] - y[:, 0]], 1).round().long()
    for i in range(3):
        counts = torch.bincount(index[:, i], minlength=components)
        assert stats.chisquare(counts, law.numpy() * 30_000).pvalue > 1e-6
    values = torch.arange(components, dtype=F64)
    variance = (law * values.square()).sum() - (law * values).sum().square()
    assert_covariance(index.to(F64), torch.eye(3, dtype=F64) * variance)


def test_delta_maps_any_noise_to_its_location():
    loc = torch.tensor([1.0, 2.0])
    assert torch.equal(d.Delta(loc).from_noise(torch.randn(4, 2)), loc.expand(4, 2))
    assert torch.equal(d.Delta(loc).point(), loc)
