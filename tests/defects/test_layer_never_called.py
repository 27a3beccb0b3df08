"""A converted layer whose weight the network reads by hand: no draw of it is random, though its KL is charged."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slimbayes as sb

X = torch.randn(6, 4)
METHODS = {
    "Rank1": sb.Rank1(components=2),
    "MeanField": sb.MeanField(),
    "KTied": sb.KTied(),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class ByHand(Net):
    def forward(self, x):
        return F.linear(torch.relu(self.a(x)), self.b.weight, self.b.bias)


class Deep(ByHand):
    """The output is a softmax, whose sum has no gradient; the first layer is checkpointed."""

    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=False)
        return F.linear(h, self.b.weight).softmax(-1)


class Convolved(nn.Module):
    """Mamba's way with its convolution and its step sizes."""

    def __init__(self):
        super().__init__()
        self.conv1d, self.dt_proj, self.last = nn.Conv1d(4, 4, 3, groups=4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = F.conv1d(x.unsqueeze(-1).expand(-1, -1, 5), self.conv1d.weight, groups=4).sum(-1)
        return self.last(F.softplus(self.dt_proj.weight @ h.T).T)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [ByHand, Deep])
@pytest.mark.parametrize("method", METHODS)
def test_a_weight_that_is_read_by_hand_is_an_error(method, kind, frozen):
    model = sb.bayesianize(kind(), METHODS[method])
    if frozen:
        model.b.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    for layout in ("auto", "rows", "passes"):
        with pytest.raises(ValueError, match=r"layer 'b' \(Linear\).*self\.b\(x\).*exclude='b'"):
            sb.draw(model, X, layout=layout)
    with pytest.raises(ValueError, match="layer 'b'"), torch.inference_mode():
        sb.predict(model, X, samples=2)
    assert [p.requires_grad for p in model.parameters()] == before
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    excluded = sb.bayesianize(kind(), METHODS[method], exclude="b")
    assert sb.draw(excluded, X, samples=2).shape[1:] == (6, 3)


def test_all_are_named():
    model = sb.bayesianize(Convolved(), sb.MeanField())
    says = r"layers 'conv1d' \(Conv1d\), 'dt_proj' \(Linear\) are.*exclude='\(conv1d\|dt_proj\)\$'"
    with pytest.raises(ValueError, match=says):
        sb.draw(model, X)
    left = sb.bayesianize(Convolved(), sb.MeanField(), exclude="(conv1d|dt_proj)$")
    assert sb.draw(left, X).shape == (1, 6, 2)
    model = sb.bayesianize(Convolved(), sb.MeanField(), exclude="conv1d")
    with pytest.raises(ValueError, match="layer 'dt_proj'"):
        sb.draw(model, X)


def test_a_weight_that_is_computed_from_others_is_found():
    net = ByHand()
    nn.utils.parametrizations.weight_norm(net.b)
    model = sb.bayesianize(net, sb.MeanField(), include="^a$")
    assert sb.draw(model, X).shape == (1, 6, 3)


# Layers that merely did not run


class Expert(Net):
    """One of two runs; the other is kept in the graph by nothing, or by zero times its weight."""

    def __init__(self, kept=False):
        super().__init__()
        self.other, self.kept = nn.Linear(4, 3), kept

    def forward(self, x):
        y = super().forward(x)
        return y + 0 * self.other.weight.sum() if self.kept else y


class Tied(Net):
    """The head multiplies by the weight of a layer that runs, as language models do."""

    def __init__(self):
        super().__init__()
        self.b = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.b.weight

    def forward(self, x):
        return self.b(self.a(x)) @ self.head.weight.T


class Dropped(Net):
    def forward(self, x):
        return self.b(self.a(x) if self.training else x)


@pytest.mark.parametrize(
    "make",
    [
        Net,
        Expert,
        lambda: Expert(kept=True),
        Tied,
        Dropped,
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda: nn.LSTM(4, 3, batch_first=True),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_did_not_run_are_no_error(make, method):
    net = make()
    x = X if isinstance(net, Net) else X.unsqueeze(1)
    inputs = (x, x, x) if isinstance(net, nn.MultiheadAttention) else (x,)
    model = sb.bayesianize(net, METHODS[method])
    sb.draw(model, *inputs, samples=2)
    sb.draw(copy.deepcopy(model).eval(), *inputs, samples=2)


def test_gradients_are_taken_only_where_a_layer_was_not_called(monkeypatch):
    taken = []
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: taken.append(1) or plain(*a, **k))
    sb.draw(sb.bayesianize(Net(), sb.MeanField()), X)
    assert not taken
    model = sb.bayesianize(Expert(), sb.MeanField())
    for _ in range(3):
        sb.draw(model, X)
    assert len(taken) == 1
