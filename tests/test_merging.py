"""Merged networks are plain, do what draws at noise="mean" do, and come apart again without loss."""

import copy

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, residual_net, trained_step
from torch import nn

import slimbayes as sb


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    assert list(first) == list(second)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def check_merging(build, method, inputs, tolerance=1e-6, out=lambda y: y, **options):
    """Merge and unmerge every component; returns the model."""
    torch.manual_seed(0)
    model = sb.bayesianize(build().double(), method, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    before, parameters = state_of(model), dict(model.named_parameters())
    kinds = [type(module) for module in model.modules()]
    plain = build().double()
    means = out(sb.draw(model, *inputs, noise="mean"))
    drawn = out(sb.draw(model, *inputs, seed=3))
    for component in range(len(means)):
        assert sb.merge(model, component=component) is model
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        plain.load_state_dict(model.state_dict(), strict=True)
        for network in (model, plain.eval()):
            torch.testing.assert_close(out(network(*inputs)), means[component], rtol=0, atol=tolerance)
        assert sb.unmerge(model) is model
    same(before, state_of(model))
    assert kinds == [type(module) for module in model.modules()]
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(out(sb.draw(model, *inputs, seed=3)), drawn)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method):
    build, inputs = (
        (mlp, (features().double(),)) if method == "additive" else (residual_net, (images().double(),))
    )
    check_merging(build, METHODS[method](), inputs)


LAYERS = {
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), (4, 5, 5)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, proj_size=2), (5, 3)),
    "cell": (lambda: nn.GRUCell(3, 4), (3,)),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), (3,)),
    "own statistics": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (3,)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", ["rank1", "meanfield", "emp"])
def test_layers(layer, method):
    build, shape = LAYERS[layer]
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = sb.EMP(
        3, patch=(lambda name, m: True,), init_noise=0.3, own_statistics=layer == "own statistics"
    )
    check_merging(
        build, chosen if method == "emp" else METHODS[method](), (x,),
        out=lambda y: y[0] if isinstance(y, tuple) else y,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [{}, {"kdim": 4, "vdim": 4}])
def test_attention_and_bilinear(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **sizes)
            self.both = nn.Bilinear(6, 4, 3)

        def forward(self, x, y):
            z = self.attention(x, y if sizes else x, y if sizes else x)[0]
            return self.both(z, y)

    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 3, size, dtype=torch.float64, generator=generator) for size in (6, 4)]
    check_merging(Net, sb.Rank1(components=2), inputs)
    check_merging(Net, sb.MeanField(), inputs, include="attention")


def test_which_component():
    model = convert(mlp, sb.Rank1(components=3))
    with pytest.raises(ValueError, match=r"has 3 components, .*name it, with component=0"):
        sb.merge(model)
    for wrong in (3, -1, True, 1.0):
        with pytest.raises(ValueError, match=r"component=.* is none of this model's: they are 0 to 2"):
            sb.merge(model, component=wrong)
    assert sb.draw(model, features()).shape[0] == 3  # nothing has changed
    sb.merge(convert(mlp, sb.Rank1(components=1)))  # one needs no name
    sb.merge(convert(mlp, sb.EMP(components=3)))  # nor do versions, which are averaged
    with pytest.raises(ValueError, match="has not been converted"):
        sb.merge(mlp())


def test_a_merged_network_can_be_forgotten_copied_and_converted_again():
    model = sb.merge(convert(mlp, sb.Rank1(components=2)), component=1, keep=False)
    with pytest.raises(ValueError, match=r"not merged, or was merged with keep=False"):
        sb.unmerge(model)
    model = sb.merge(convert(mlp, sb.MeanField(), seed=1))
    copied = copy.deepcopy(model)
    same(state_of(sb.unmerge(copied)), state_of(sb.unmerge(model)))
    assert copied[0].bayes is not model[0].bayes
    trained_step(copied, (features(),), torch.tensor([0, 1, 0, 1]))
    sb.bayesianize(sb.merge(model), sb.EMP(components=2))
    with pytest.raises(ValueError, match=r"converted again after sb\.merge"):
        sb.unmerge(model)
    model = sb.merge(convert(mlp, sb.Rank1(components=2)), component=0).double()
    with pytest.raises(ValueError, match=r"another dtype than before \(bias, weight\)"):
        sb.unmerge(model)
    sb.unmerge(model.float())


def test_a_part_of_a_model_and_its_mode():
    model = nn.Sequential(convert(mlp, sb.Rank1(components=2)), nn.Tanh())
    expected = sb.draw(model.eval(), features(), noise="mean")[1]
    sb.merge(model, component=1)
    torch.testing.assert_close(model(features()), expected, rtol=1e-6, atol=1e-6)
    sb.unmerge(model.train())
    assert all(module.training for module in model.modules())


def test_ties():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    ids = torch.tensor([[0, 1], [2, 5]])
    for method in (sb.MeanField(), sb.EMP(components=2, patch=("output",))):
        model = check_merging(Tied, method, (ids,))
        assert sb.merge(model).head.weight is model.table.weight
    with pytest.raises(ValueError, match=r"layer 'head' is tied to another layer's.*Untie the two"):
        sb.merge(convert(Tied, sb.Rank1(components=1), include="head"))
    two = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    two[1].weight = two[0].weight
    model = sb.bayesianize(two, sb.Rank1(components=1))
    with pytest.raises(ValueError, match=r"layers '0' and '1' share one tensor and have other factors on it"):
        sb.merge(model)
    assert sb.draw(model, torch.ones(1, 3)).shape == (1, 1, 3)  # whole after the refusal


def test_what_cannot_be_folded():
    with pytest.raises(TypeError, match=r"additive factors of layer '0' cannot be folded"):
        sb.merge(convert(lambda: nn.Sequential(nn.Conv1d(2, 2, 3)), sb.Rank1(1, perturbation="additive")))
    normed = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"layer '0' computes its weight"):
        sb.merge(sb.bayesianize(normed, sb.Rank1(components=1)))
