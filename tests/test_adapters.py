"""Adapters: the base stays frozen, the file holds the rest, and loads onto the base it was trained on alone."""

import json

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, residual_net, trained_step
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import slimbayes as sb
from slimbayes.verbs import checkpoint


def pretrained(build=mlp, seed=7):
    torch.manual_seed(seed)
    return build()


def stored(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys()), json.loads(file.metadata()["slimbayes"])


def same_state(first, second):
    a, b = first.state_dict(), second.state_dict()
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# What is trained


@pytest.mark.parametrize("method", METHODS)
def test_only_what_the_method_adds_is_trained(method):
    model = sb.adapt(pretrained(residual_net), METHODS[method]()).train()
    base = {name: value.clone() for name, value in pretrained(residual_net).named_parameters()}
    added = {name for name, _ in model.named_parameters() if ".bayes." in name}
    if method in ("emp", "ecmp"):  # the norms and the last layer have versions
        added |= {
            f"{name}.{kind}" for name in ("1.0.norm", "1.1.0.norm", "2.3") for kind in ("weight", "bias")
        }
    if method == "deep_ensemble":
        added = set(base)
    assert trainable(model) == added
    if added:
        changed, _ = trained_step(model, (images(),), torch.tensor([0, 1, 2, 0]))
        assert changed and changed <= added
    for name in set(base) - added:  # biases have a component axis under Rank1, and are copies
        now = dict(model.named_parameters())[name]
        assert torch.equal(now, base[name].expand_as(now)), name


def test_train_selects_modules():
    rules = [("3", sb.KTied()), (None, sb.EMP(components=2, patch=("norm",)))]
    head = {"3.weight", "3.bias"}
    model = sb.adapt(mlp(), rules, train="^3$")
    assert trainable(model) == {n for n, _ in model.named_parameters() if not n.startswith("0.")}
    assert head & trainable(sb.adapt(mlp(), rules)) == set()
    assert head <= trainable(sb.adapt(mlp(), sb.Rank1(train_base=False), train=["3"]))
    assert trainable(sb.adapt(mlp(), sb.Deterministic(), train=nn.BatchNorm1d)) == {"1.weight", "1.bias"}
    network = mlp()
    with pytest.raises(
        ValueError, match=r"train='\^9' matches no module with parameters; the modules are: 0 "
    ):
        sb.adapt(network, sb.Rank1(), train="^9")
    assert type(network[0]) is nn.Linear and all(p.requires_grad for p in network.parameters())
    with pytest.raises(TypeError, match=r"adapt takes a pretrained torch\.nn\.Module, got int"):
        sb.adapt(3, sb.Rank1())


@pytest.mark.parametrize("method", ["rank1", "meanfield", "ktied", "emp"])
def test_bayesianize_leaves_frozen_what_was_frozen(method):
    network = pretrained()
    network[0].requires_grad_(False)
    model = sb.bayesianize(network, METHODS[method]() if method != "emp" else sb.EMP(patch=(nn.Linear,)))
    assert not model[0].weight.requires_grad and not model[0].bias.requires_grad
    assert model[3].weight.requires_grad and model[3].bias.requires_grad
    assert all(parameter.requires_grad for parameter in model[0].bayes.parameters())


@pytest.mark.parametrize("method", [sb.MeanField(), sb.MeanField.paper(tied_mean=True), sb.KTied()])
def test_means_start_at_the_pretrained_weights(method):
    """And with tied_mean the KL does not draw them away: its gradient for the means is zero."""
    base = pretrained(residual_net).state_dict()
    model = sb.bayesianize(pretrained(residual_net), method)
    for name, value in base.items():
        assert torch.equal(model.state_dict()[name], value), name
    expected = pretrained(residual_net).eval()(images())
    assert torch.equal(sb.draw(model.eval(), images(), noise="mean")[0], expected)
    sb.kl(model).backward()
    pulled = model[2][3].weight.grad
    if getattr(method, "tied_mean", False):
        assert pulled is None or not pulled.any()
    else:
        assert pulled.any()


# The file


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_round_trips(method, tmp_path):
    path = tmp_path / "adapter.safetensors"
    model = sb.adapt(pretrained(residual_net), METHODS[method](), train=r"^2\.3$").train()
    trained_step(model, (images(),), torch.tensor([0, 1, 2, 0]))  # moves BatchNorm's statistics too
    sb.save(model, path, adapter_only=True)
    keys, header = stored(path)
    frozen = set(dict(pretrained(residual_net).named_parameters())) - trainable(model)
    assert set(header["base"]) == frozen and not keys & frozen
    again = sb.load(pretrained(residual_net), path)
    same_state(again, model)
    assert trainable(again) == trainable(model)
    drawn = [sb.draw(network.eval(), images(), seed=3) for network in (model, again)]
    assert torch.equal(*drawn)
    same_state(sb.load(again, path), model)  # into one converted in the same way, too
    sb.save(again, tmp_path / "again.safetensors", adapter_only=True)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_an_adapter_is_small_and_holds_what_moved(tmp_path):
    def large():
        return nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)
        )

    model = sb.adapt(pretrained(large), sb.Rank1(components=2), train="4").train()
    sb.draw(model, torch.randn(8, 64))
    path = tmp_path / "adapter.safetensors"
    sb.save(model, path, adapter_only=True)
    keys, header = stored(path)
    assert set(header["base"]) == {f"{i}.{kind}" for i in (0, 2, 3) for kind in ("weight", "bias")}
    assert {key for key in keys if ".bayes." not in key} == {
        "4.weight", "4.bias", "3.running_mean", "3.running_var", "3.num_batches_tracked",
    }  # fmt: skip
    sb.save(model, tmp_path / "whole.safetensors")
    assert path.stat().st_size < 0.2 * (tmp_path / "whole.safetensors").stat().st_size
    model[0].bayes.r.loc.requires_grad_(False)  # new, not trained: written, and frozen again
    with torch.no_grad():
        model[2].bias[1] += 1.0  # no copies any more, so no part of the base
    sb.save(model, path, adapter_only=True)
    again = sb.load(pretrained(large), path)
    same_state(again, model)
    assert not again[0].bayes.r.loc.requires_grad and not again[2].bias.requires_grad


def test_another_base_is_refused(tmp_path):
    path = tmp_path / "adapter.safetensors"
    sb.save(sb.adapt(pretrained(), sb.Rank1(components=2), train="3"), path, adapter_only=True)

    def refused(network, match):
        before = {name: value.clone() for name, value in network.state_dict().items()}
        flags = [parameter.requires_grad for parameter in network.parameters()]
        kinds = [type(module) for module in network.modules()]
        with pytest.raises(sb.CheckpointError, match=match):
            sb.load(network, path)
        assert kinds == [type(module) for module in network.modules()]
        assert flags == [parameter.requires_grad for parameter in network.parameters()]
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())

    refused(
        pretrained(seed=8),
        r"adapter for another base than the given Sequential: 2 of its 4 frozen tensors differ",
    )
    one = pretrained()
    with torch.no_grad():
        one[0].weight[3, 1] += 1e-6
    refused(one, r"1 of its 4 frozen tensors differ in numbers, type or shape \(0\.weight\)")
    refused(pretrained().double(), r"4 of its 4 frozen tensors differ")
    refused(pretrained(lambda: mlp(width=9)), "another architecture")
    refused(nn.Sequential(nn.Linear(3, 8)), r"another architecture.*layers \['3'\] are not in the network")
    refused(
        nn.Sequential(*pretrained(), nn.Linear(2, 2)),
        r"tensors \['4.weight', '4.bias'\] are not in the ch",
    )
    other = sb.bayesianize(pretrained(seed=8), sb.Rank1(components=2))
    refused(other, "adapter for another base")
    head = pretrained()
    nn.init.zeros_(head[3].weight)  # trained, so it is in the file and may be anything before
    sb.load(head, path)


def test_an_adapter_of_nothing_new(tmp_path):
    path = tmp_path / "adapter.safetensors"
    model = convert(lambda: nn.Sequential(nn.Linear(3, 2)), sb.DropConnect(), seed=7).requires_grad_(False)
    sb.save(model, path, adapter_only=True)
    assert stored(path)[0] == set()
    torch.manual_seed(7)
    again = sb.load(nn.Sequential(nn.Linear(3, 2)), path)
    assert torch.equal(sb.draw(again, features(), seed=1), sb.draw(model, features(), seed=1))


def test_tied_tensors(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)
            self.first = nn.Linear(4, 4)
            self.head = nn.Linear(4, 6)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.first(self.table(ids)))

    for method in (
        sb.Rank1(components=2),
        sb.KTied(),
        sb.EMP(components=2, patch=("output",), init_noise=0.1),
    ):
        model = sb.adapt(pretrained(Tied), method)
        path = tmp_path / "adapter.safetensors"
        sb.save(model, path, adapter_only=True)
        again = sb.load(pretrained(Tied), path)
        same_state(again, model)
        assert again.head.weight is again.table.weight
        assert ("head.weight" in stored(path)[1]["base"]) is not isinstance(method, sb.EMP)


@pytest.mark.parametrize("damage", [{"base": 3}, {"frozen": None}, {"frozen": [[]]}])
def test_damaged_headers(damage, tmp_path):
    path = tmp_path / "adapter.safetensors"
    sb.save(sb.adapt(pretrained(), sb.Rank1(components=2)), path, adapter_only=True)
    tensors, header = load_file(path), stored(path)[1]
    header.update(damage)
    header["sha256"] = checkpoint._digest(header, tensors)
    save_file(tensors, path, metadata={"slimbayes": json.dumps(header)})
    with pytest.raises(sb.CheckpointError, match=r"header of .* is damaged"):
        sb.load(pretrained(), path)
