"""The members of a small ensemble as one batched network: the numbers of one member after the other."""

import copy
import pickle

import pytest
import torch
from helpers_statistics import F64
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import members

X = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Written(nn.Module):
    """Functions between the layers, and two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x, *, shift=None):
        hidden = torch.tanh(self.norm(self.a(x)))
        return {"logits": self.b(hidden if shift is None else hidden + shift), "hidden": hidden}


NETWORKS = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
    "one layer": lambda: nn.Linear(4, 3),
    "written": Written,
}


def ensemble(build, members=3, reinitialize=True):
    torch.manual_seed(1)
    return sb.bayesianize(build().to(F64), sb.DeepEnsemble(members=members, reinitialize=reinitialize))


def logits(output):
    return output["logits"] if isinstance(output, dict) else output


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_member_after_the_other(name, training):
    found = ensemble(NETWORKS[name]).train(training)
    expected = copy.deepcopy(found)
    for _ in range(2):  # the second time nothing is tried out
        result = logits(sb.draw(found, X))
        with sb.fast_paths(members=False):
            plain = logits(sb.draw(expected, X))
        torch.testing.assert_close(result, plain, rtol=1e-12, atol=1e-12)
    assert found._batched and all(found._batched.values()) and not expected._batched
    sb.elbo(result, Y, found, num_data=20).loss.backward()
    sb.elbo(plain, Y, expected, num_data=20).loss.backward()
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)
    for a, b in zip(found.buffers(), expected.buffers(), strict=True):  # running statistics, counted once
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_samples_and_predictions():
    model = ensemble(NETWORKS["batch norm"]).eval()
    found = sb.predict(model, X, samples=2, seed=0)
    with sb.fast_paths(False):
        expected = sb.predict(model, X, samples=2, seed=0)
    assert model._batched and all(model._batched.values())
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.mutual_information, expected.mutual_information, rtol=1e-9, atol=1e-12)


def test_named_inputs_with_rows_are_split():
    model = ensemble(Written)
    shift = torch.randn(6, 5, dtype=F64)
    found = sb.draw(model, X, shift=shift)["logits"]
    with sb.fast_paths(members=False):
        torch.testing.assert_close(found, sb.draw(model, X, shift=shift)["logits"], rtol=1e-12, atol=1e-12)


def test_members_drop_units_of_their_own():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 400), nn.Dropout(0.5)).to(F64)
    model = sb.bayesianize(net, sb.DeepEnsemble(members=2, reinitialize=False)).train()
    first, second = sb.draw(model, X) == 0
    assert model._batched and all(model._batched.values())
    assert 0.4 < (first == second).double().mean() < 0.6


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last = None

    def forward(self, x):
        self.last = self.layer(x)
        return self.last


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def reset_parameters(self):
        nn.init.normal_(self.scale)

    def forward(self, x):
        return x * self.scale


REFUSED = {
    "looks at values": Asking,
    "keeps a tensor": Keeping,
    "parameters of its own": Own,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten()),
    "normalises its weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_member_by_member_where_one_call_will_not_do(name):
    model = ensemble(REFUSED[name], reinitialize=name != "normalises its weight")
    found = sb.draw(model, X)
    assert model._batched and not any(model._batched.values())
    with sb.fast_paths(members=False):
        torch.testing.assert_close(found, sb.draw(model, X), rtol=0, atol=0)


def test_hooks_see_every_member():
    model = ensemble(NETWORKS["plain"])
    sb.draw(model, X)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    sb.draw(model, X)
    assert seen == [torch.Size([6, 5])] * 3


def test_large_members_are_not_batched(monkeypatch):
    monkeypatch.setattr(members, "MOST", 10)
    model = ensemble(NETWORKS["plain"])
    sb.draw(model, X)
    assert model._batched and not any(model._batched.values())


def test_a_trial_changes_nothing():
    """Neither torch's generator nor the running statistics."""
    model = ensemble(NETWORKS["batch norm"]).train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sb.draw(model, X)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model[1].num_batches_tracked == 1).all()


def test_autocast_is_seen_by_every_member():
    model = ensemble(NETWORKS["plain"]).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert sb.draw(model, X.float()).dtype == torch.bfloat16


class Adapting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, adapt=False):
        y = self.layer(x)
        return y * 2 if adapt and y.abs().max() > 0 else y


def test_another_kind_of_call_is_tried_again():
    model = ensemble(Adapting)
    plain = sb.draw(model, X)
    torch.testing.assert_close(sb.draw(model, X, adapt=True), 2 * plain)
    assert sorted(model._batched.values())[0] is False and any(model._batched.values())


def test_the_mode_of_a_part_is_another_kind_of_call():
    model = ensemble(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))
    )
    model.train()
    model[1].eval()
    sb.draw(model, X)
    model[1].train()
    assert torch.isfinite(sb.draw(model, X)).all()


def test_backward_hooks_are_called_for_every_member():
    model = ensemble(NETWORKS["batch norm"])
    sb.draw(model, X)
    seen = []
    model[0].register_full_backward_hook(lambda module, given, gradients: seen.append(1))
    sb.draw(model, X.clone().requires_grad_()).sum().backward()
    assert len(seen) == 3


def test_an_ensemble_can_be_pickled_and_copied():
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), sb.DeepEnsemble(members=3)
    )
    x = torch.randn(5, 3)
    expected = sb.draw(model, x)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model) and torch.equal(sb.draw(again, x), expected)
        again[0].weight.data.zero_()
        assert not torch.equal(sb.draw(again, x), expected)
    assert torch.equal(sb.draw(model, x), expected)


class Twice(nn.Module):
    """A layer under two names, and a tensor in two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Linear(4, 4, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(torch.relu(self.a(x))))


@pytest.mark.parametrize("members", [True, False])
def test_a_layer_with_two_names_stays_what_it_is(members):
    torch.manual_seed(0)
    model, x = sb.bayesianize(Twice(), sb.DeepEnsemble(members=3)).eval(), torch.randn(5, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with sb.fast_paths(members=members):
        first, second = sb.draw(model, x), sb.draw(model, x)
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    w, b = model.a.weight, model.a.bias
    for k in range(3):
        hidden = nn.functional.linear(torch.relu(nn.functional.linear(x, w[k], b[k])), w[k], b[k])
        torch.testing.assert_close(first[k], nn.functional.linear(hidden, w[k]))
    copy.deepcopy(model)
    torch.testing.assert_close(sb.freeze(model, draws=3, example=x)(x), first)
