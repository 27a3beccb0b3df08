"""Rank1(random=...): one factor has a distribution, the other is a point as BatchEnsemble's."""

import copy
import json
import math
import os
import shutil

import pytest
import torch
from helpers_matrix import remove_spread
from helpers_networks import features, images, mlp
from helpers_statistics import F64, assert_mean, scatter
from safetensors.torch import save
from torch import distributions as td
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_groups
from slimbayes.core.conversion import converted_layers, find_record
from slimbayes.core.posteriors import DeltaPosterior
from slimbayes.core.rules.rank1 import Rank1Rule
from slimbayes.training.keeping import method_text
from slimbayes.verbs import checkpoint

RANDOM = {"input": "s", "output": "r"}
POSTERIORS = ("normal", "cauchy", "lognormal", "halfcauchy")
PATHS = {
    "fast": {},
    "no kernels": {"native": False},
    "no rows": {"rows": False},
    "not folded": {"folded": False},
    "plain": {"every": False},
}
sides = pytest.mark.parametrize("random", RANDOM)


def small():
    """Input [B, 2, 6, 6]."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, 2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


def made(random, build=small, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = sb.bayesianize(
        build().to(dtype), sb.Rank1.paper(**{"components": 2, "random": random, **options})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # one for each component: set them apart
                parameter.normal_()
    return model


def factors(model):
    """(which, factor) of every layer."""
    rules = [layer.bayes for _, layer in converted_layers(model)]
    assert rules and all(isinstance(rule, Rank1Rule) for rule in rules)
    return [(which, getattr(rule, which)) for rule in rules for which in ("r", "s")]


def as_batch_ensemble(model, build, dtype):
    """A BatchEnsemble with the points of the model: its locations, or what they are the logarithms of."""
    twin = sb.bayesianize(build().to(dtype), sb.BatchEnsemble(components=find_record(model).components))
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("rho")}
    twin.load_state_dict(state)
    with torch.no_grad():
        for (_, own), (_, other) in zip(factors(model), factors(twin), strict=True):
            other.loc.copy_(own().point())
    return twin


# What is made


@sides
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_one_factor_is_a_point(random, posterior):
    model = made(random, posterior=posterior)
    for which, factor in factors(model):
        noisy = which == RANDOM[random]
        assert isinstance(factor.spread, DeltaPosterior) != noisy
        assert hasattr(factor.spread, "rho") == noisy
        # A half-Cauchy has its edge at the prior's; a point is trained whatever the posterior.
        assert isinstance(factor.loc, nn.Parameter) == (not noisy or posterior != "halfcauchy")
    assert find_record(model).methods[0].traits.noisy


def test_points_start_where_random_sign_init_says():
    torch.manual_seed(0)
    signs = sb.bayesianize(nn.Linear(400, 400), sb.Rank1(random="input", random_sign_init=0.75))
    assert signs.bayes.r.loc.unique().tolist() == [-1.0, 1.0]
    assert float(signs.bayes.r.loc.detach().mean()) == pytest.approx(0.5, abs=0.1)
    for method, centre in (
        (sb.Rank1(random="input", random_sign_init=-0.2), 1.0),
        (sb.Rank1(random="input", random_sign_init=-0.2, perturbation="additive"), 0.0),
        (sb.Rank1(random="input", random_sign_init=-0.2, posterior="halfcauchy"), 1.0),
    ):
        loc = sb.bayesianize(nn.Linear(400, 400), method).bayes.r.loc.detach()
        assert float(loc.mean()) == pytest.approx(centre, abs=0.04)
        assert float(loc.std()) == pytest.approx(0.2, abs=0.02)


@sides
def test_the_only_factor_may_be_named_random(random):
    """With factors="input" there is s alone, and random="input" says what is so anyhow."""
    one, other = (made(side, factors=random, build=lambda: nn.Linear(3, 2)) for side in (random, "both"))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(sb.draw(one, features(), seed=1), sb.draw(other, features(), seed=1))


# Outputs


@sides
@pytest.mark.parametrize(
    ("posterior", "dtype"), [*((posterior, F64) for posterior in POSTERIORS), ("normal", torch.float32)]
)
def test_without_spread_it_is_batch_ensemble(random, posterior, dtype):
    """Outputs and gradients of locations, weights and biases, by every path and under every kind of noise."""
    far = "cauchy" in posterior  # σ is never below 1e-7, and ε can be large
    near = {"rtol": 1e-2, "atol": 1e-2} if far else {"rtol": 1e-4, "atol": 1e-5}
    model = remove_spread(made(random, dtype=dtype, posterior=posterior, random_sign_init=-0.2)).eval()
    twin, x = as_batch_ensemble(model, small, dtype).eval(), images().to(dtype)
    wanted, slopes = output_and_gradients(twin, x)
    for name, slope in slopes.items():
        if posterior == "lognormal" and name.endswith(f"{RANDOM[random]}.loc"):
            slope.mul_(twin.get_parameter(name).detach())  # with respect to the logarithm
    for paths in PATHS.values():
        for noise in ("example", "shared", "mean"):
            with sb.fast_paths(**paths):
                found, gradients = output_and_gradients(model, x, samples=2, noise=noise)
            torch.testing.assert_close(found, wanted.repeat_interleave(2, 0), **near)
            for name in slopes.keys() & gradients.keys():  # no edge of a half-Cauchy is trained
                torch.testing.assert_close(
                    gradients[name], slopes[name], **near, msg=f"{name}, {noise}, {paths}"
                )
        with torch.no_grad(), sb.fast_paths(**paths):
            torch.testing.assert_close(sb.draw(model, x, samples=2), wanted.repeat_interleave(2, 0), **near)


def output_and_gradients(model, x, **options):
    """Of a loss that is a mean over the samples of a component."""
    torch.manual_seed(1)
    y = sb.draw(model, x, **options)
    weights = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y[0].shape)
    model.zero_grad()
    loss = (torch.tanh(y / 3) * weights).sum() / options.get("samples", 1)
    loss.backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@sides
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize(
    ("posterior", "perturbation"),
    [("normal", "multiplicative"), ("lognormal", "multiplicative"), ("cauchy", "additive")],
)
def test_fast_paths_change_nothing(random, posterior, noise, perturbation):
    """Keyed noise, so that all paths see the same; outputs, the objective and all gradients."""
    model = scatter(
        made(random, dtype=F64, posterior=posterior, perturbation=perturbation, components=3)
    ).train()
    x, y = images().to(F64), torch.tensor([0, 1, 2, 0])
    state, found = copy.deepcopy(model.state_dict()), {}
    for name, paths in PATHS.items():
        model.load_state_dict(state)
        model.zero_grad()
        with sb.fast_paths(**paths):
            draws = sb.draw(model, x, samples=2, noise=noise, seed=3)
            result = sb.elbo(draws, y, model, num_data=50)
            result.loss.backward()
        found[name] = [draws.detach(), result.kl.detach(), *(p.grad for p in model.parameters())]
    for name in PATHS:
        torch.testing.assert_close(found[name], found["plain"], rtol=1e-8, atol=1e-9, msg=name)


@sides
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("paths", ["fast", "no kernels", "plain"])
def test_expected_output(random, noise, paths):
    """Against Monte Carlo by whichever path: E[y] = r ∘ W(s ∘ x) + b of the locations, as noise="mean" has it, and
    Var[y] = σ_r² ∘ (W(s ∘ x))² or Σ_i (r W_i x_i)² σ_si²."""
    model = scatter(made(random, lambda: nn.Linear(4, 3), clip=None), 0.1, 0.3)
    x, samples = features(2, 4), 4000
    with torch.no_grad(), sb.fast_paths(**PATHS[paths]):
        torch.manual_seed(2)
        y = sb.draw(model, x, samples=samples, noise=noise).unflatten(0, (2, samples))  # [K, S, B, C]
        mean = sb.draw(model, x, noise="mean")
    rule, w = model.bayes, model.weight.detach()
    r, s = rule.r.loc.detach(), rule.s.loc.detach()
    inner = torch.einsum("oi,ki,bi->kbo", w, s, x)
    torch.testing.assert_close(mean, r[:, None] * inner + model.bias.detach()[:, None])
    if random == "output":
        variance = rule.r().scale.square()[:, None] * inner.square()
    else:
        variance = torch.einsum("ko,oi,bi,ki->kbo", r**2, w**2, x**2, rule.s().scale.square())
    for k in range(2):
        assert_mean(y[k], mean[k])
        assert_mean((y[k] - mean[k]).square(), variance[k].detach())
    if noise == "shared":  # one factor for all rows of a draw
        again = sb.draw(model, x[:1].repeat(3, 1), samples=3, noise=noise)
        torch.testing.assert_close(again, again[:, :1].expand_as(again))


@sides
def test_seeded_draws_in_chunks(random):
    model, x = scatter(made(random)).eval(), images(5)
    with torch.no_grad():
        whole = sb.predict(model, x, samples=4, seed=7).draws
        for size in (1, 3):
            parts = [
                sb.predict(model, x[i : i + size], samples=4, seed=7, first_example=i).draws
                for i in range(0, 5, size)
            ]
            torch.testing.assert_close(torch.cat(parts, 1), whole)
        torch.testing.assert_close(sb.predict(model, x, samples=4, seed=7, chunk=2).draws, whole)


@sides
def test_components_per_step(random):
    model = made(random, mlp, F64, components=4, components_per_step=2)
    x, y = features(6).to(F64), torch.tensor([0, 1, 0, 1, 1, 0])
    draws = sb.draw(model, x)
    assert draws.shape == (2, 6, 2)
    sb.elbo(draws, y, model, num_data=50, kl_weight=0.0).loss.backward()
    for _, factor in factors(model):
        assert (factor.loc.grad.abs().amax(1) > 0).sum() == 2
    assert sb.draw(model.eval(), x).shape == (4, 6, 2)


@sides
def test_copies_have_points_of_their_own(random):
    model, x = scatter(made(random)), images()
    sb.draw(model, x).sum().backward()
    twin = copy.deepcopy(model)
    assert torch.equal(sb.draw(twin, x, seed=1), sb.draw(model, x, seed=1))
    with torch.no_grad():
        for _, factor in factors(twin):
            factor.loc.add_(1.0)
    assert not torch.equal(sb.draw(twin, x, seed=1), sb.draw(model, x, seed=1))


# The KL

PRIORS = {
    "normal": lambda q: td.kl_divergence(td.Normal(q.loc, q.scale), td.Normal(torch.ones_like(q.loc), 0.1)),
    "lognormal": lambda q: td.kl_divergence(
        td.LogNormal(q.loc, q.scale), td.LogNormal(torch.zeros_like(q.loc), 0.1)
    ),
    "cauchy": lambda q: td.kl_divergence(td.Cauchy(q.loc, q.scale), td.Cauchy(torch.ones_like(q.loc), 0.1)),
    # By symmetry that of the whole Cauchys.
    "halfcauchy": lambda q: td.kl_divergence(
        td.Cauchy(q.loc, q.scale), td.Cauchy(torch.ones_like(q.loc), 0.1)
    ),
}


@sides
@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_kl_of_the_random_factors_alone(random, posterior, reduction):
    model = scatter(made(random, dtype=F64, posterior=posterior, kl_reduction=reduction))
    expected = sum(PRIORS[posterior](f()).sum() for which, f in factors(model) if which == RANDOM[random])
    expected = expected / (2 if reduction == "mean" else 1)
    own = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(expected, own, allow_unused=True, retain_graph=True)
    for paths in ("fast", "plain"):
        with sb.fast_paths(**PATHS[paths]):
            found = sb.kl(model)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        for ours, other in zip(torch.autograd.grad(found, own, allow_unused=True), slopes, strict=True):
            assert (ours is None) == (other is None)  # a point has no part in it
            if ours is not None:
                torch.testing.assert_close(ours, other, rtol=1e-8, atol=1e-9)
    names = [name for _, layer in converted_layers(model) for name, *_ in layer.bayes.kl_terms(layer)]
    assert len(names) == len(converted_layers(model))
    assert all(name.endswith(f".{RANDOM[random]}") for name in names)


@sides
@pytest.mark.parametrize("posterior", ["normal", "cauchy"])
def test_monte_carlo_kl_of_the_joint_mixture(random, posterior):
    """Against the same mean of log q − log p over many samples, the points not among them."""
    model = scatter(
        made(random, lambda: nn.Linear(3, 2), F64, posterior=posterior, kl_reduction="monte_carlo")
    )
    with torch.no_grad():
        found = torch.stack([sb.kl(model) for _ in range(600)])
        q = getattr(model.bayes, RANDOM[random])()
        kind, size = (td.Normal, 0.1) if posterior == "normal" else (td.Cauchy, 0.1)
        x = kind(q.loc, q.scale).sample((20_000,))  # [n, K, d]
        log_q = kind(q.loc, q.scale).log_prob(x.unsqueeze(2)).sum(3).logsumexp(2) - math.log(2)  # [n, K]
        terms = (log_q - kind(torch.ones_like(q.loc), size).log_prob(x).sum(2)).mean(1)
    error = math.hypot(found.std().item() / math.sqrt(600), terms.std().item() / math.sqrt(20_000))
    assert error < 0.05 * terms.mean()
    assert found.mean().item() == pytest.approx(terms.mean().item(), abs=5.5 * error)
    gradients = torch.autograd.grad(sb.kl(model), list(model.bayes.parameters()), allow_unused=True)
    assert [g is not None for g in gradients] == [
        name.startswith(RANDOM[random]) for name, _ in model.bayes.named_parameters()
    ]


@sides
def test_groups_hold_the_random_factors(random):
    model = made(random)
    (group,) = factor_groups.find_groups([layer.bayes for _, layer in converted_layers(model)])
    assert len(group.sources) == len(converted_layers(model))
    assert all(source.endswith(f".{RANDOM[random]}") for source in group.sources)


# Compiled


@pytest.mark.uncounted
def test_aot_eager():
    """With next to no spread: compiled code takes its noise from another generator."""
    torch._dynamo.reset()
    model = remove_spread(
        made("output", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)))
    )
    x, y = images(), torch.tensor([0, 1, 2, 0])

    def loss(x, y):
        return sb.elbo(sb.draw(model, x, noise="shared"), y, model, num_data=50).loss

    results = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        value = run(x, y)
        value.backward()
        results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.uncounted
@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
@pytest.mark.skipif(
    os.environ.get("SLIMBAYES_COMPILE_ALL") != "1",
    reason="a quarter of a minute of inductor: set SLIMBAYES_COMPILE_ALL=1 (test_matrix.py has its case in every run)",
)
def test_inductor():
    """Without spread, by sb.compile: the step of a BatchEnsemble."""
    torch._dynamo.reset()
    build = lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))  # noqa: E731
    model = remove_spread(made("input", build))
    twin, x, y = as_batch_ensemble(model, build, torch.float32), images(), torch.tensor([0, 1, 2, 0])

    def loss(x, y):
        return sb.elbo(sb.draw(model, x, noise="shared"), y, model, num_data=50, kl_weight=0.0).loss

    with torch._inductor.config.patch(compile_threads=1):
        value = sb.compile(loss, fullgraph=True)(x, y)
        value.backward()
    wanted = sb.elbo(sb.draw(twin, x), y, twin, num_data=50).loss
    wanted.backward()
    torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name
        )


# What is written down


def test_equal_by_what_is_random():
    assert sb.Rank1() == sb.Rank1(random="both") != sb.Rank1(random="input") != sb.Rank1(random="output")
    assert ", train_base=True, random='input', " in repr(sb.Rank1(random="input"))
    assert hash(sb.Rank1(random="input")) == hash(sb.Rank1(random="input"))


def test_what_was_saved_without_the_option_loads(tmp_path):
    """Into a plain network and into a converted one; a run that was stopped then is still the same run."""
    model, path = made("both", mlp), tmp_path / "net.safetensors"
    sb.save(model, path)
    _, metadata = checkpoint.read_tensors(path)
    (entry,) = json.loads(metadata[checkpoint.HEADER])["methods"]
    assert list(entry["options"])[-1] == "train_base"  # as in files from before
    assert "random" not in entry["options"] and "random=" not in method_text(find_record(model))
    for network in (mlp(), made("both", mlp)):
        again = sb.load(network, path)
        assert find_record(again).methods == (sb.Rank1.paper(components=2),)
        assert torch.equal(
            sb.draw(again.eval(), features(), seed=1), sb.draw(model.eval(), features(), seed=1)
        )
    with pytest.raises(sb.CheckpointError, match="with other options"):
        sb.load(made("input", mlp), path)


@sides
def test_saved_with_the_option(random, tmp_path):
    model, path = scatter(made(random, mlp)), tmp_path / "net.safetensors"
    sb.save(model, path)
    assert f"random={random}" in method_text(find_record(model))
    again = sb.load(mlp(), path)
    assert find_record(again).methods == find_record(model).methods
    assert torch.equal(sb.draw(again.eval(), features(), seed=1), sb.draw(model.eval(), features(), seed=1))
    assert torch.equal(sb.kl(again), sb.kl(model))
    for network in (made("both", mlp), made("input" if random == "output" else "output", mlp)):
        with pytest.raises(sb.CheckpointError, match="with other options"):
            sb.load(network, path)


def test_unknown_value_in_a_file(tmp_path):
    path = tmp_path / "net.safetensors"
    sb.save(made("input", mlp), path)
    tensors, metadata = checkpoint.read_tensors(path)
    header = json.loads(metadata[checkpoint.HEADER])
    header["methods"][0]["options"]["random"] = "weights"
    header["sha256"] = checkpoint._digest(header, tensors)
    path.write_bytes(save(tensors, metadata={checkpoint.HEADER: json.dumps(header)}))
    with pytest.raises(sb.CheckpointError, match="names a method that this version does not know"):
        sb.load(mlp(), path)
