"""A product between factors as one operation, and the factors of all layers at once: against plain operations."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_samples
from slimbayes.accelerate.factor_groups import FactorGroups
from slimbayes.accelerate.gpu.factors_kl import factors_kl
from slimbayes.core.conversion import converted_layers, find_record


@pytest.fixture(autouse=True)
def plain_kernels():
    """These are the torch operations; tests/native has the kernels in C that are their twins."""
    with sb.fast_paths(native=False):
        yield


F64 = torch.float64
NEAR = {"rtol": 1e-10, "atol": 1e-12}


def test_the_kl_of_normal_factors_at_once():
    torch.manual_seed(0)
    leaves = [torch.randn(2, w, dtype=F64, requires_grad=True) for w in (2, 4, 2, 4)]
    ours = factor_samples.normal_kl(leaves[:2], leaves[2:], 1.0, 0.1)
    wanted = factors_kl(leaves[:2], leaves[2:], "normal", 1.0, 0.1)
    torch.testing.assert_close(ours, wanted, **NEAR)
    for a, b in zip(*(torch.autograd.grad(kl, leaves) for kl in (ours, wanted)), strict=True):
        torch.testing.assert_close(a, b, **NEAR)
    run = lambda *p: factor_samples.normal_kl(p[:2], p[2:], 1.0, 0.1)  # noqa: E731
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("noise", ["example", "shared"])
def test_factors_drawn_before_the_network_have_the_layers_own_moments(noise):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), sb.Rank1(components=2))
    x = torch.randn(3, 3)
    draws = []
    for fast in (True, False):
        with sb.fast_paths(factors=fast), torch.no_grad():
            torch.manual_seed(3)
            draws.append(sb.draw(model, x, samples=4000, noise=noise).unflatten(0, (2, 4000)))
    a, b = draws
    error = (a.var(1) / 4000 + b.var(1) / 4000).sqrt()
    assert float(((a.mean(1) - b.mean(1)) / error).abs().max()) < 5
    assert float((a.var(1) / b.var(1)).log().abs().max()) < 0.2
    same = []
    for _ in range(2):
        torch.manual_seed(3)
        same.append(sb.draw(model, x, samples=3, noise=noise))
    assert torch.equal(*same)


def test_layers_are_looked_up_again_when_the_model_has_changed():
    path = FactorGroups()

    def factor_groups(model):
        return path.groups([(layer.bayes, layer) for _, layer in converted_layers(model)])

    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), sb.Rank1())
    assert [name for name, _ in converted_layers(model)] == ["0", "2"]
    assert converted_layers(model)[0][1] is model[0]
    assert [len(group.factors) for group in factor_groups(model)] == [4]
    assert factor_groups(model) is factor_groups(model)
    model.double()
    assert factor_groups(model)[0].factors[0].loc.dtype == F64
    model[0].bayes.clip = 3.0
    assert sorted(len(group.factors) for group in factor_groups(model)) == [2, 2]
    model[2] = nn.Linear(4, 2)
    assert [name for name, _ in converted_layers(model)] == ["0"]
    assert [len(group.factors) for group in factor_groups(model)] == [2]


def test_what_is_known_of_the_layers_does_not_outlive_them():
    import copy
    import gc
    import pickle
    import weakref

    gc.collect()
    gc.disable()
    try:
        layer = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
        sb.draw(layer, torch.randn(4, 3)).sum().backward()
        sb.kl(layer)  # torch 2.6 samples nothing ahead of a draw
        assert find_record(layer).survey is not None
        assert find_record(copy.deepcopy(layer)).survey is None
        assert find_record(pickle.loads(pickle.dumps(layer))).survey is None
        gone = weakref.ref(layer)
        del layer
        assert gone() is None  # by its count alone: no cycle
    finally:
        gc.enable()
