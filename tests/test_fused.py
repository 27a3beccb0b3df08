"""Weight samples by one kernel: the same KL and gradients as the plain path, and never a stale sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import cpu
from slimbayes.accelerate.gpu import weight_samples
from slimbayes.core import context

METHODS = {
    "ktied": sb.KTied.paper(),
    "ktied rank 1": sb.KTied.paper(rank=1),
    "meanfield": sb.MeanField.paper(),
    "flipout": sb.MeanField.paper(estimator="flipout"),
    "he": sb.MeanField.paper(prior=sb.HeNormal()),
    "tied mean": sb.MeanField.paper(tied_mean=True),
    "capped": sb.MeanField.paper(stddev_max=0.0101),
}


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations run by their plain twins on the CPU, for weights of any size."""
    monkeypatch.setattr(weight_samples, "available", lambda device: True)
    monkeypatch.setattr(weight_samples, "_SMALLEST", 1)


def build(method: sb.methods.Method) -> nn.Module:
    torch.manual_seed(0)
    return sb.bayesianize(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), method)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])


def gradients(model: nn.Module, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_kl(model: nn.Module) -> torch.Tensor:
    with sb.fast_paths(False):
        return sb.kl(model)


def check(model: nn.Module, value: torch.Tensor) -> None:
    expected = plain_kl(model)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-4)
    found, wanted = gradients(model, value), gradients(model, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", METHODS)
def test_kl_after_a_draw_equals_the_plain_kl(name: str) -> None:
    model = build(METHODS[name])
    x, y = data()
    check(model, sb.elbo(sb.draw(model, x), y, model, num_data=50).kl)


@pytest.mark.parametrize("name", METHODS)
def test_likelihood_and_kl_can_be_differentiated_apart(name: str) -> None:
    model = build(METHODS[name])
    x, y = data()
    result = sb.elbo(sb.draw(model, x), y, model, num_data=50)
    result.nll.backward()
    first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    result.kl.backward()
    both = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert any(float(gradient.abs().sum()) > 0 for gradient in first.values())
    for key, gradient in gradients(model, plain_kl(model)).items():
        found = both[key] - first[key] if key in first else both[key]
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.uncounted
@pytest.mark.parametrize("name", ["ktied", "meanfield", "flipout"])
def test_compiled_in_one_function(name: str) -> None:
    torch._dynamo.reset()
    model = build(METHODS[name])
    seen = []

    def kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = sb.elbo(sb.draw(model, x), y, model, num_data=50).kl
        seen.append(len(weight_samples.SCOPE.made))
        return value

    check(model, sb.compile(kl, fullgraph=True)(*data()))
    # The sums were made, and in this call: by one operation for all tensors, or one for each of the two layers.
    together = name != "flipout" and cpu.library() is not None
    assert seen and seen[0] >= (1 if together else 2)
    assert not weight_samples.SCOPE.open and not weight_samples.SCOPE.made


@pytest.mark.uncounted
def test_sums_of_changed_parameters_are_not_used() -> None:
    torch._dynamo.reset()
    model = build(sb.KTied.paper())
    x, _ = data()
    for draw in (lambda: sb.draw(model, x), sb.compile(lambda: sb.draw(model, x), fullgraph=True)):
        draw()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        check(model, sb.kl(model))
        draw()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        check(model, sb.compile(lambda: sb.kl(model), fullgraph=True)())


def test_sample_has_the_moments_of_the_posterior() -> None:
    torch.manual_seed(1)
    layer = sb.bayesianize(nn.Linear(40, 30), sb.KTied.paper(stddev_init=0.3))
    rule, alone = layer.bayes, context.frame("", 1)
    samples = torch.stack(
        [
            weight_samples.sample(rule.weight, layer.weight, None, "sample", alone, "weight")[0][0].detach()
            for _ in range(400)
        ]
    )
    sigma = rule.weight(layer.weight).scale.detach()
    z = (samples - layer.weight.detach()) / sigma
    assert abs(float(z.mean())) < 0.01 and abs(float(z.var()) - 1) < 0.01


def test_local_noise_has_the_moments_of_the_plain_estimator() -> None:
    torch.manual_seed(1)
    layer = sb.bayesianize(nn.Linear(12, 7), sb.KTied.paper(estimator="local", stddev_init=0.3))
    x = torch.randn(3, 12)
    moments = []
    for fast in (True, False):
        with sb.fast_paths(fast):
            draws = sb.draw(layer, x.repeat(4000, 1)).detach().view(4000, 3, 7)
        moments.append((draws.mean(0), draws.std(0)))
    spread = moments[1][1]
    assert float(((moments[0][0] - moments[1][0]) / spread).abs().max()) < 0.1
    assert float((moments[0][1] / spread - 1).abs().max()) < 0.06


def test_tensors_tied_to_another_layer_keep_that_layers_prior() -> None:
    torch._dynamo.reset()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) + self.table(x[:, 0].long().clamp(0, 29)).sum(1, keepdim=True)

    model = sb.bayesianize(Tied(), sb.MeanField.paper(prior=sb.HeNormal()), include=".")
    step = sb.compile(lambda x: (sb.draw(model, x).sum(), sb.kl(model))[1], fullgraph=True)
    check(model, step(torch.rand(5, 8)))


def test_seeded_draws_and_several_draws_keep_their_own_path() -> None:
    model = build(sb.KTied.paper())
    x, _ = data()
    with sb.fast_paths(False):
        expected = sb.draw(model, x, samples=2, seed=3)
    torch.testing.assert_close(sb.draw(model, x, samples=2, seed=3), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sb.draw(model, x, seed=3), expected[:1], rtol=1e-5, atol=1e-6)
