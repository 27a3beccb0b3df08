"""Products between shared factors in compiled code: one opaque operation each, with the plain path's results."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_folding
from slimbayes.accelerate.compile import factor_operations
from slimbayes.accelerate.factor_folding import Choice

F64 = torch.float64
CHOICES = [Choice(False, False), Choice(True, False), Choice(True, True)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.uncounted
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("method", [sb.BatchEnsemble(components=2), sb.Rank1(components=2)])
def test_compiled_gradients_are_those_of_the_plain_path(method, choice, monkeypatch):
    monkeypatch.setattr(factor_folding, "choose", lambda *_: choice)
    model = sb.bayesianize(network().double(), method)
    x = torch.randn(7, 6, dtype=F64)
    sb.draw(model, x)  # the first draw also checks the rows
    results = []

    def loss(x):
        return sb.draw(model, x, noise="shared", seed=3).sin().sum()

    for fast in (True, False):
        torch._dynamo.reset()
        # The plain path makes no choice: compiled for one of them, it is compiled for all.
        compiled = fast or choice == CHOICES[0]
        run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        with sb.fast_paths(fast):
            model.zero_grad()
            value = run(x)
            value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("first", [True, False])
def test_the_operation_keeps_its_promises(first):
    x, bias = (torch.randn(*shape, requires_grad=True) for shape in ((8, 3, 5), (4, 4)))
    weight = torch.randn(4, 5) if first else torch.randn(5, 4)
    s, r = torch.randn(4, 5), torch.randn(4, 4)
    left, right = (r, s) if first else (s, r)
    given = (x, *[t.requires_grad_() for t in (weight, left, right)], bias, first, 4)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(factor_operations.folded.overload, given, test_utils=utilities)


@pytest.mark.uncounted
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("posterior", ["normal", "cauchy"])
def test_compiled_factors_of_all_layers_have_the_eager_moments(noise, posterior):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=2, posterior=posterior, dropout_rate=0.02))
    x = torch.randn(4, 3)
    sb.draw(model, x)
    torch._dynamo.reset()
    run = torch.compile(lambda x: sb.draw(model, x, noise=noise), fullgraph=True, backend="aot_eager")
    eager = torch.stack([sb.draw(model, x, noise=noise).detach() for _ in range(400)])
    compiled = torch.stack([run(x).detach() for _ in range(400)])
    for share in (0.25, 0.5, 0.75):  # quantiles: a Cauchy has no moments
        spread = eager.quantile(0.75, 0) - eager.quantile(0.25, 0)
        difference = (eager.quantile(share, 0) - compiled.quantile(share, 0)).abs() / spread
        assert float(difference.max()) < 0.5
    assert not torch.equal(compiled[0], compiled[1])


def test_a_compiled_kl_of_factors_is_the_eager_one():
    model = sb.bayesianize(network(), sb.Rank1(components=2)).double()
    torch._dynamo.reset()
    compiled = torch.compile(lambda: sb.kl(model), fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(compiled, sb.kl(model), rtol=1e-10, atol=1e-10)
