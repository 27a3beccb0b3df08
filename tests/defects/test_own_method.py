"""A method of one's own works with every verb: the example of CONTRIBUTING, and one with a learned spread."""

import copy
import importlib.util
import io
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.layers.table import is_weighted
from slimbayes.core.methods import METHODS, Method
from slimbayes.core.methods.base import Traits, needs_linear
from slimbayes.core.rules.base import Rule, rowwise, sample
from slimbayes.core.rules.fixed import Fixed
from slimbayes.verbs.freezing.layers import Factored

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"


class ScaleRule(Rule):
    """y = ε ∘ op(x, W) with ε ~ N(1, σ²), one learned σ per output channel."""

    def __init__(self, name, rho):
        super().__init__()
        self.name, self.rho = name, nn.Parameter(rho)

    def spread(self):
        return d.Normal(torch.ones_like(self.rho), self.rho.exp())

    def forward(self, op, inputs):
        frame = context.frame(self.name, inputs[0].shape[0])
        source, per_example = f"{self.name}.outer", frame.noise == "example"
        epsilon = frame.once(source, lambda: sample(self.spread(), frame, source, per_example, False))
        y = op.compute(inputs, op.weight, op.bias)
        return rowwise(y, epsilon, op.output_axis, frame, torch.mul)

    def kl_terms(self, op) -> Iterator:
        q = self.spread()
        yield f"{self.name}.outer", q, d.Normal(q.loc, torch.full_like(q.loc, 0.3)), "sum"


@dataclass(frozen=True)
class Scaled(Method):
    """Noise on outputs, its size learned."""

    stddev: float = 0.2

    @property
    def traits(self):
        return Traits()

    def selects(self, name, module, outline):
        return is_weighted(module)

    def refuses(self, layer):
        return needs_linear("Scaled", layer)

    def attach(self, layer, name, shared):
        return ScaleRule(name, layer.weight.new_full((layer.output_size,), self.stddev).log())


class Shifting(ScaleRule):
    """Twice the layer: what no weight and bias of its own does."""

    def forward(self, op, inputs):
        return 2 * super().forward(op, inputs)


class Doubled(Shifting):
    """The same, which says what it is in a draw."""

    def fixed(self, op, frame):
        epsilon = sample(self.spread(), frame, f"{self.name}.outer", False, False)
        outer = 2 * epsilon.expand(1, frame.draws, 1, -1).flatten(0, 2)
        return Fixed(op.weight.unsqueeze(0), None if op.bias is None else outer * op.bias, outer=outer)


class Network(nn.Module):
    """Convolution, LSTM, GRU cell, attention, a norm that stays as it is, Linear."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.lstm = nn.LSTM(9, 8, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mixed = nn.MultiheadAttention(8, 2, kdim=16, vdim=16, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h, _ = self.lstm(self.conv(x).transpose(1, 2).flatten(2))  # [R, 3, 16]
        state, states = None, []
        for step in h.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        q = torch.stack(states, 1)
        q = q + self.attention(q, q, q)[0] + self.mixed(q, h, h, need_weights=False)[0]
        return self.head(self.norm(q).mean(1))


class Compact(nn.Module):
    """What compiles as one graph: recurrent layers are kept from the compiler, whatever the method."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 3))

    def forward(self, x):
        h = self.conv(x).flatten(2)  # [R, 4, 9]
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


@pytest.fixture(scope="module", autouse=True)
def names():
    """Both methods by name; the example's file gives it its own."""
    before = dict(METHODS)
    spec = importlib.util.spec_from_file_location("own_method", EXAMPLE)
    sys.modules["own_method"] = module = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    spec.loader.exec_module(module)
    METHODS["Scaled"] = Scaled
    yield
    METHODS.clear()
    METHODS.update(before)
    del sys.modules["own_method"]


@pytest.fixture(params=["GaussianDropout", "Scaled"])
def method(request):
    return METHODS[request.param]()


def made(method, network=Network):
    torch.manual_seed(0)
    return sb.bayesianize(network(), method).eval()


def batch(rows=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, 5, 5, generator=generator), torch.randint(3, (rows,), generator=generator)


def test_draws(method):
    """One mean for all modes, plain at the mean, and seeds that hold in every piece of the work."""
    model, plain, (x, _) = made(method), Network().eval(), batch()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "bayes" not in k})
    assert torch.allclose(sb.draw(model, x, samples=2, noise="mean"), plain(x).expand(2, -1, -1), atol=1e-5)
    same = x[:1].expand(4, -1, -1, -1)
    shared, example = (
        sb.draw(model, same, samples=3, noise=noise, seed=3) for noise in ("shared", "example")
    )
    assert torch.allclose(shared[:, 0], shared[:, 1], atol=1e-6) and not torch.allclose(shared[0], shared[1])
    assert not torch.allclose(example[:, 0], example[:, 1])
    whole = sb.draw(model, x, samples=4, seed=1)
    piece = sb.draw(model, x[2:], samples=2, seed=1, first_example=2, first_sample=2)
    assert torch.allclose(whole[2:, 2:], piece, atol=1e-5)
    assert torch.equal(whole, sb.draw(model, x, samples=4, seed=1))
    assert not torch.allclose(whole, sb.draw(model, x, samples=4, seed=2))
    assert model(x).shape == (4, 3)  # a plain call is a sample of its own


def test_noise_is_the_same_at_every_step(method):
    """As the formula has it on an LSTM of one's own: one factor for a sequence, whatever its steps."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.LSTM(2, 3, batch_first=True), method)
    x = torch.randn(2, 5, 2)
    for noise in ("shared", "example"):
        long = sb.draw(model, x, samples=2, noise=noise, seed=0)[0]
        short = sb.draw(model, x[:, :2], samples=2, noise=noise, seed=0)[0]
        assert torch.allclose(long[:, :, :2], short, atol=1e-6)
        assert not torch.allclose(long[0], long[1])


def test_training(method):
    (x, y), model = batch(), made(method)
    objective = sb.elbo(sb.draw(model, x, samples=2), y, model, num_data=40)
    objective.loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    rules = sum(rule.rho.numel() for rule in model.modules() if isinstance(rule, ScaleRule))
    by_hand = rules * (math.log(0.3 / 0.2) + 0.2**2 / (2 * 0.3**2) - 0.5)
    assert sb.kl(model).item() == pytest.approx(by_hand, rel=1e-4)
    groups = {
        group["name"]: group["params"] for group in sb.parameter_groups(model, lr=0.1, weight_decay=0.1)
    }
    assert sum(p.numel() for p in groups.get("undecayed", [])) == rules and "factors" not in groups
    before = copy.deepcopy(model.state_dict())
    sb.fit(model, batch(8), steps=2, batch_size=4, progress=False)
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])


def test_predictions_and_looks(method):
    (x, y), model = batch(), made(method)
    found = sb.predict(model, x, samples=4, chunk=3, seed=0)
    assert torch.allclose(found.mean, sb.predict(model, x, samples=4, seed=0).mean, atol=1e-6)
    assert set(sb.evaluate(model, [(x, y)], samples=2, seed=0)) >= {"nll", "accuracy"}
    assert "lstm" in str(sb.summary(model))
    sb.diagnose(model, x, y)
    compared = sb.analysis.compare_with_prior(model)
    assert compared.kl == pytest.approx(sb.kl(model).item(), rel=1e-4)


def test_copies_and_files(method, tmp_path):
    (x, _), model = batch(), made(method)
    expected = sb.draw(model, x, samples=2, seed=0)
    assert torch.equal(sb.draw(copy.deepcopy(model), x, samples=2, seed=0), expected)
    sb.save(model, tmp_path / "model.safetensors")
    again = sb.load(Network(), tmp_path / "model.safetensors").eval()
    assert torch.equal(sb.draw(again, x, samples=2, seed=0), expected)


@pytest.mark.parametrize("example", [False, True])
def test_freeze(method, example):
    """Its draws are those of sb.draw with the seed, whatever the batch."""
    model, (x, _) = made(method), batch(6)
    frozen = sb.freeze(model, draws=3, seed=5, example=x if example else None)
    for rows in (6, 2):
        expected = sb.draw(model, x[:rows], samples=3, noise="shared", seed=5)
        assert torch.allclose(frozen(x[:rows]), expected, atol=1e-5)
        assert torch.equal(frozen(x[:rows]), frozen(x[:rows]))
    stored = io.BytesIO()
    torch.save(frozen, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(x), frozen(x))


def test_freeze_of_a_module_used_twice(method):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3)

        def forward(self, x):
            return self.one(self.one(x).tanh())

    torch.manual_seed(0)
    model, x = sb.bayesianize(Twice(), method), torch.randn(4, 3)
    expected = sb.draw(model, x, samples=3, noise="shared", seed=5)
    assert torch.allclose(sb.freeze(model, draws=3, seed=5)(x), expected, atol=1e-6)


def test_export(method):
    model, (x, _) = made(method), batch(6)
    frozen = sb.freeze(model, draws=3, seed=5, example=x)
    program = sb.export.to_program(frozen, x)
    for rows in (6, 3):
        assert torch.allclose(program.module()(x[:rows]), frozen(x[:rows]), atol=1e-5)


def test_merge(method):
    model, (x, _) = made(method), batch()
    expected, drawn = sb.draw(model, x, noise="mean")[0], sb.draw(model, x, samples=2, seed=0)
    merged = sb.merge(model)
    assert type(merged.lstm) is nn.LSTM and torch.allclose(merged(x), expected, atol=1e-5)
    assert torch.equal(sb.draw(sb.unmerge(merged), x, samples=2, seed=0), drawn)


def retyped(model, kind):
    """The model with other rules."""
    for rule in [module for module in model.modules() if type(module) is ScaleRule]:
        rule.__class__ = kind
    return model


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv2d(3, 2, 3), nn.Bilinear(3, 2, 4), nn.GRU(3, 2)])
def test_merge_says_what_it_cannot(layer):
    """A mean that is not the layer's own weight is an error and never another network."""
    model = retyped(sb.bayesianize(nn.Sequential(layer), Scaled()), Shifting)
    with pytest.raises(
        TypeError, match=r"'0.*' has a rule of its own .Shifting., which at noise='mean' does more"
    ):
        sb.merge(model)


def test_a_rule_that_says_what_it_is():
    model, (x, _) = retyped(made(Scaled(), Compact), Doubled), batch()
    expected = sb.draw(model, x, samples=3, noise="shared", seed=5)
    frozen = sb.freeze(model, draws=3, seed=5)
    assert torch.allclose(frozen(x), expected, atol=1e-5)
    assert isinstance(frozen.network.conv, Factored)
    expected = sb.draw(model, x, noise="mean")[0]
    assert torch.allclose(sb.merge(model)(x), expected, atol=1e-5)


def test_adapt(method, tmp_path):
    model = sb.adapt(Network(), method, train="head")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "bayes" not in name} == {"head.weight", "head.bias"}
    sb.save(model, tmp_path / "adapter.safetensors", adapter_only=True)


def test_compiled(method):
    """One graph, and what it draws is what the code draws."""
    model, (x, _) = made(method, Compact), batch()

    def draws(x):
        return sb.draw(model, x, samples=2, seed=0)

    with torch.no_grad():
        compiled = torch.compile(draws, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x), draws(x), atol=1e-5)


def test_a_draw_that_is_no_function(method):
    """Noise for every example where a draw is to be one function is an error that names the layer."""
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 2)), Scaled())

    class Always(ScaleRule):
        def forward(self, op, inputs):
            frame = context.frame(self.name, inputs[0].shape[0])
            return op.compute(inputs, op.weight, op.bias) + sample(
                self.spread(), frame, self.name, True, False
            ).flatten(0, 2)

    retyped(model, Always)
    with pytest.raises(ValueError, match="the noise '0' is drawn for every example"):
        sb.freeze(model, draws=2)(torch.randn(4, 3))
