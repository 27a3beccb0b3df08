"""Shared factors folded into the weights: against factors on rows, and which of the two is chosen."""

import itertools

import pytest
import torch
from helpers_matrix import CASES
from test_rows import F64, NEAR, compare_runs
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_folding
from slimbayes.accelerate.factor_folding import ROWS, Choice
from slimbayes.core.context import Frame


@pytest.fixture(autouse=True)
def plain_kernels():
    """These are the torch operations; tests/native has the kernels in C that are their twins."""
    with sb.fast_paths(native=False):
        yield


MATRICES = [kind for kind in CASES if kind.startswith("Linear") or kind == "Conv1D (transformers)"]
CONVOLUTIONS = [kind for kind in CASES if kind.startswith(("Conv1d", "Conv2d", "Conv3d", "ConvT"))]
CHOICES = [Choice(True, True), Choice(True, False), Choice(False, True)]


@pytest.fixture
def choose(monkeypatch):
    """Make every layer that can fold take one choice."""

    def force(choice):
        def chosen(op, inputs, r, s, frame):
            if any(f is not None and f.shape[2] != 1 for f in (r, s)):
                return ROWS
            inner = choice.inner and s is not None
            return Choice(
                inner, choice.outer and r is not None and (inner or s is None)
            )  # r never goes alone

        monkeypatch.setattr(factor_folding, "choose", chosen)

    return force


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", MATRICES)
def test_matrices_agree_with_the_plain_path(kind, choice, choose):
    choose(choice)
    for case, samples, per_step in itertools.product(CASES[kind], (1, 2), (None, 2)):
        for factors in ("both", "input", "output"):
            method = sb.Rank1(components=3, components_per_step=per_step, factors=factors)
            compare_runs(case, method, {}, noise="shared", samples=samples)
        compare_runs(case, sb.BatchEnsemble(components=3), {}, noise="example", samples=samples)


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_agree_with_the_plain_path(kind, choose):
    choose(Choice(True, True))
    for case, samples in itertools.product(CASES[kind], (1, 2)):
        for factors in ("both", "input", "output"):
            method = sb.Rank1(components=2, factors=factors)
            compare_runs(case, method, {}, noise="shared", samples=samples, last=factors == "both")
        compare_runs(case, sb.Rank1(components=1), {}, noise="shared", samples=1)


def test_the_rule_of_a_folded_matrix():
    """dW = Σ_d G_d ∘ r_d s_dᵀ, dr_d = (G_d ∘ W) s_d, ds_d = (G_d ∘ W)ᵀ r_d."""
    layer = sb.bayesianize(nn.Linear(3, 2).double(), sb.BatchEnsemble(components=2))
    x, g = torch.randn(4, 3, dtype=F64), torch.randn(2, 4, 2, dtype=F64)
    sb.draw(layer, x).backward(g)
    r, s, weight = layer.bayes.r.loc, layer.bayes.s.loc, layer.weight
    own = g.transpose(1, 2) @ x  # [2, out, in]
    torch.testing.assert_close(weight.grad, (own * r[:, :, None] * s[:, None]).sum(0), **NEAR)
    torch.testing.assert_close(r.grad, ((own * weight) @ s[:, :, None]).squeeze(2), **NEAR)
    torch.testing.assert_close(s.grad, ((own * weight).transpose(1, 2) @ r[:, :, None]).squeeze(2), **NEAR)


def factors_of(layer, frame, examples=1):
    sizes = (layer.output_size, sum(slot.size for slot in layer.input_slots))
    return [torch.ones(frame.components, frame.samples, examples, size) for size in sizes]


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "draws", "gradient", "expected"),
    [
        (1024, 784, 400, 4, False, Choice(True, False)),  # the input needs no gradient: save its product
        (1024, 400, 400, 4, True, ROWS),
        (1024, 400, 10, 4, True, Choice(True, True)),  # a small weight
        (64, 2048, 2048, 4, True, ROWS),  # few rows
        (4, 400, 10, 4, True, ROWS),
        (65536, 400, 400, 4, True, Choice(True, True)),  # many rows
    ],
)
def test_choice_by_shape(rows, inputs, outputs, draws, gradient, expected):
    layer = sb.bayesianize(nn.Linear(inputs, outputs), sb.Rank1(components=draws))
    frame = Frame(draws, 1, rows // draws, 1, "shared", None)
    x = torch.empty(rows, inputs, requires_grad=gradient)
    r, s = factors_of(layer, frame)
    assert factor_folding.choose(layer, (x,), r, s, frame) == expected
    with sb.fast_paths(folded=False):
        assert factor_folding.choose(layer, (x,), r, s, frame) == ROWS
    r, s = factors_of(layer, frame, examples=2)
    assert factor_folding.choose(layer, (x,), r, s, frame) == ROWS


def test_choice_of_convolutions():
    layer = sb.bayesianize(nn.Conv2d(8, 8, 3, padding=1), sb.Rank1(components=4))
    x = torch.empty(256, 8, 16, 16)
    for components, batch, expected in (
        (4, 64, Choice(True, True)),
        (128, 2, ROWS),
        (1, 2, Choice(True, True)),
    ):
        frame = Frame(components, 1, batch, 1, "shared", None)
        rows = x[: components * batch]
        assert factor_folding.choose(layer, (rows,), *factors_of(layer, frame), frame) == expected
    bilinear = sb.bayesianize(nn.Bilinear(3, 2, 4), sb.Rank1(components=1))
    frame = Frame(1, 1, 2, 1, "shared", None)
    assert factor_folding.choose(bilinear, (torch.ones(2, 3),), *factors_of(bilinear, frame), frame) == ROWS


def test_channels_last_is_kept():
    net = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
    layer = sb.bayesianize(net, sb.BatchEnsemble(components=2))
    x = torch.randn(64, 8, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    frame = Frame(2, 1, 32, 1, "shared", None)
    assert factor_folding.choose(layer, (x,), *factors_of(layer, frame), frame) == Choice(True, True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_tied_modules_and_extra_rows():
    """One layer called twice in a draw, the second time on windows that the network folded into its rows."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            windows = self.layer(x).reshape(-1, 2, 3).flatten(0, 1)  # [2·R, 3]
            return self.layer(torch.cat([windows, windows.tanh()], 1)).reshape(x.shape[0], 12)

    results = []
    for fast in (True, False):
        torch.manual_seed(0)
        model = sb.bayesianize(Twice().double(), sb.Rank1(components=3))
        x = torch.randn(5, 6, dtype=F64)
        with sb.fast_paths(fast):
            y = sb.draw(model, x, samples=2, noise="shared", seed=3)
        y.sin().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **NEAR)


@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_autocast(kind, choose):
    choose(Choice(True, True))
    options = {"noise": "shared", "samples": 2, "dtype": torch.float32, "autocast": True}
    compare_runs(CASES[kind][0], sb.Rank1(components=2), {}, near={"rtol": 5e-2, "atol": 0.1}, **options)


@pytest.mark.uncounted
@pytest.mark.parametrize("choice", CHOICES[:2])
@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_compiled(kind, choice, choose):
    if kind == "Conv2d" and not choice.outer:
        pytest.skip("a convolution folds both")
    choose(choice)
    case = CASES[kind][0]
    torch.manual_seed(0)
    layer = sb.bayesianize(case.make(F64), sb.Rank1(components=2))
    (x,) = case.inputs(dtype=F64)
    results = []
    for compiled in (False, True):
        layer.zero_grad()
        torch._dynamo.reset()
        work = lambda x: sb.draw(layer, x, noise="shared", samples=2, seed=5).sin().sum()  # noqa: E731
        run = torch.compile(work, fullgraph=True, backend="aot_eager") if compiled else work
        loss = run(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **NEAR)


@pytest.mark.uncounted
def test_the_choice_is_made_under_the_compiler():
    """A network whose layers take different choices compiles whole."""
    net = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    net = sb.bayesianize(net, sb.Rank1(components=2))
    x = torch.randn(512, 64, dtype=F64)
    work = lambda x: sb.draw(net, x, noise="shared", seed=5).sin().sum()  # noqa: E731
    results = []
    for run in (work, torch.compile(work, fullgraph=True, backend="aot_eager")):
        net.zero_grad()
        loss = run(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **NEAR)
