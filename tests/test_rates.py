"""Rates of what a method learns: groups of ``sb.parameter_groups`` whose decay per step is that of the others."""

import pytest
import torch
from torch import nn

import slimbayes as sb

pytestmark = pytest.mark.oldest


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def groups_of(method, **options):
    """What every group has: its names, learning rate and decay."""
    model = sb.bayesianize(network(), method)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = sb.parameter_groups(model, **{"lr": 0.1, "weight_decay": 1e-3, **options})
    assert sum(len(g["params"]) for g in groups) == sum(p.requires_grad for p in model.parameters())
    torch.optim.SGD(groups)  # no parameter twice
    return {g["name"]: ({names[id(p)] for p in g["params"]}, g["lr"], g["weight_decay"]) for g in groups}


SPREADS = {f"{i}.bayes.{side}.spread.rho" for i in (0, 3) for side in "rs"}
LOCATIONS = {f"{i}.bayes.{side}.loc" for i in (0, 3) for side in "rs"}
VERSIONS = {"1.weight", "1.bias", "3.weight", "3.bias"}


def test_spreads_of_factors_and_nothing_else():
    found = groups_of(sb.Rank1(spread_rate=10.0), factor_lr_multiplier=0.5)
    assert found["factors, 10 times as fast"] == (SPREADS, pytest.approx(0.5), 0.0)
    assert found["factors"] == (LOCATIONS, pytest.approx(0.05), 0.0)
    assert set(found) == {"decayed", "factors", "factors, 10 times as fast"}
    assert found["decayed"][1:] == (0.1, 1e-3)


@pytest.mark.parametrize("method", [sb.EMP, sb.ECMP])
def test_components_of_patches_and_nothing_else(method):
    found = groups_of(method(components=2, component_rate=4.0, learn_mixing=True, patch=("norm", "output")))
    assert found["decayed, 4 times as fast"] == (VERSIONS, pytest.approx(0.4), pytest.approx(0.25e-3))
    assert found["decayed"] == ({"0.weight", "0.bias"}, 0.1, 1e-3)
    assert found["undecayed"][1:] == (0.1, 0.0)
    assert {name.split(".")[-1] for name in found["undecayed"][0]} == {"logits"}


def test_norms_that_are_not_decayed_have_their_rate():
    found = groups_of(sb.EMP(components=2, component_rate=4.0), decay_norms=False)
    assert found["undecayed, 4 times as fast"] == ({"1.weight", "1.bias"}, pytest.approx(0.4), 0.0)
    assert found["decayed, 4 times as fast"][0] == {"3.weight", "3.bias"}


def test_a_rate_below_one():
    found = groups_of(sb.Rank1(spread_rate=0.125))
    assert found["factors, 0.125 times as fast"] == (SPREADS, pytest.approx(0.0125), 0.0)


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (sb.Rank1(spread_rate=1.0), {"decayed", "factors"}),
        (sb.EMP(component_rate=1.0), {"decayed"}),
        (sb.ECMP(component_rate=1.0), {"decayed"}),
        (sb.Rank1.paper(), {"decayed", "factors"}),
        (sb.EMP.paper(), {"decayed"}),
        (sb.ECMP.paper(), {"decayed"}),
        (sb.KTied(spread_rate=1.0), {"decayed", "undecayed"}),
        (sb.MeanField.paper(), {"decayed", "undecayed"}),
        (sb.Rank1(posterior="delta"), {"decayed", "factors"}),  # points have no scales
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rate_one_has_the_groups_of_no_rates(method, plain):
    found = groups_of(method)
    assert set(found) == plain
    assert all(lr == 0.1 for _, lr, _ in found.values())


def test_rates_belong_to_their_layers():
    """Two methods of one kind in one network, with rates of their own."""
    found = groups_of([("^0$", sb.Rank1(spread_rate=10.0)), ("^3$", sb.Rank1(spread_rate=3.0))])
    assert found["factors, 10 times as fast"][0] == {n for n in SPREADS if n[0] == "0"}
    assert found["factors, 3 times as fast"][0] == {n for n in SPREADS if n[0] == "3"}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_decays_what_is_quick_as_much_and_moves_it_further(optimizer):
    model = sb.bayesianize(network(), sb.EMP(components=2, component_rate=4.0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = optimizer(sb.parameter_groups(model, lr=0.1, weight_decay=0.01))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    made.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (1.0 - 0.1 * 0.01), msg=name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = torch.optim.SGD(sb.parameter_groups(model, lr=0.1, weight_decay=0.0))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made.step()
    for name, p in model.named_parameters():
        step = 0.4 if name in VERSIONS else 0.1
        torch.testing.assert_close(p.detach(), before[name] - step, msg=name)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), "fast"])
def test_a_rate_is_a_positive_number(bad):
    for make in (lambda: sb.Rank1(spread_rate=bad), lambda: sb.EMP(component_rate=bad)):
        with pytest.raises(ValueError, match="_rate must be positive"):
            make()


def test_a_copy_and_a_file_keep_the_rates(tmp_path):
    import copy

    model = sb.bayesianize(network(), sb.Rank1(spread_rate=7.0))
    sb.save(model, tmp_path / "net.safetensors")
    for one in (copy.deepcopy(model), sb.load(network(), tmp_path / "net.safetensors")):
        assert [g["lr"] for g in sb.parameter_groups(one, lr=1.0, weight_decay=0.0)] == [1.0, 1.0, 7.0]
