"""Frozen models are the draws of the model they were made of, and nothing else."""

import copy
import io
import os

import helpers_attention as attention
import helpers_sequences as sequences
import pytest
import torch
from helpers_export import METHODS, inputs, make
from helpers_matrix import EVERY, PAIRS, Nested, cases_of, convert
from torch import nn
from torch.utils import _pytree as pytree

import slimbayes as sb
from slimbayes.core.conversion import find_record
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.sequences.kernels import Several
from slimbayes.verbs.freezing.layers import Factored, FrozenLayer, Members

EXACT = {"rtol": 1e-11, "atol": 1e-11}
# Without it one configuration of every layer type and one method of every kind.
ALL = bool(os.environ.get("SLIMBAYES_EXPORT_ALL"))
SAME = (
    "flipout",
    "local",
    "cauchy",
    "lognormal",
    "delta",
    "input",
    "output",
    "Deterministic",
)  # ways taken by others


def chosen(methods):
    return [name for name in methods if ALL or not name.endswith(SAME)]


def drawn(model, *given, draws, seed=0, **named):
    samples = draws // find_record(model).components
    with torch.no_grad():
        return sb.draw(model, *given, samples=samples, noise="shared", seed=seed, **named)


def check(model, *given, seed=3, shared_inputs=(), label="", **named):
    draws = 2 * find_record(model).components
    wanted = drawn(model, *given, draws=draws, seed=seed, shared_inputs=shared_inputs, **named)
    frozen = sb.freeze(model, draws, seed, shared_inputs=shared_inputs)
    with torch.no_grad():
        found = frozen(*given, **named)
    pairs = zip(pytree.tree_leaves(wanted), pytree.tree_leaves(found), strict=True)
    for a, b in pairs:
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape, label
            torch.testing.assert_close(b, a, **EXACT, msg=lambda text: f"{label}: {text}")
    return frozen


@pytest.mark.uncounted(but=3)
@pytest.mark.parametrize("name", chosen(EVERY))
def test_every_layer_type(name):
    method = EVERY[name]
    kinds = [kind for m, kind in PAIRS if m == name] or ["Linear", "Conv2d", "Bilinear"]
    for kind in kinds:
        cases = cases_of(kind, method)
        for case in cases if ALL else cases[-1:]:
            torch.manual_seed(0)
            model = convert(Nested(case.make(torch.float64)), method).eval()
            check(model, *case.inputs(dtype=torch.float64), label=str(case), **case.call)


LAYERS = {
    "two layers, both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "own dropout": {"num_layers": 2, "dropout": 0.4, "bias": False},
}


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("name", chosen(METHODS))
def test_recurrent_layers(name):
    if name.endswith("local"):
        pytest.skip("sampled outputs and a state of its own do not go together")
    for kind, (label, options) in zip(("lstm", "gru"), LAYERS.items(), strict=True):
        torch.manual_seed(0)
        model = sb.bayesianize(sequences.Sequences(kind, True, **options).double(), METHODS[name]).eval()
        x = sequences.inputs()
        check(model, x, label=f"{kind}, {label}")
        states = 2 if kind == "lstm" else 1
        hx = torch.randn(states, 4, 4 if kind == "lstm" else 2, sequences.HIDDEN, dtype=torch.float64)
        check(model, x, None, *hx, label=f"{kind}, {label}, states")
        check(model, x, sequences.LENGTHS, label=f"{kind}, {label}, packed")
        cell = sb.bayesianize(sequences.Looped(kind).double(), METHODS[name]).eval()
        check(cell, x, label=f"{kind} cell")


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("name", chosen(METHODS))
def test_attention(name):
    plain, wide = {"batch_first": True, "dropout": 0.3}, {"add_bias_kv": True, "add_zero_attn": True}
    forms = (("self", plain), ("memory", wide), ("three", attention.SEPARATE))
    for (form, options), masks in zip(
        forms, ("padding", "float tables, float padding", "causal"), strict=True
    ):
        torch.manual_seed(0)
        model = sb.bayesianize(attention.Attended(form, **options).double(), METHODS[name]).eval()
        if masks.startswith("float tables") and name in ("DeepEnsemble", "Deterministic"):
            masks = "none"  # torch's own layer cannot know whose rows [batch x heads] are
        keys = attention.TARGETS if form == "self" else attention.KEYS
        named = attention.masks(attention.BATCH, attention.TARGETS, keys)[masks]
        given = attention.inputs(form, kdim=options.get("kdim", 4), vdim=options.get("vdim", 4))
        tables = [n for n, mask in named.items() if n == "attn_mask" and mask.dim() == 2]
        check(model, *given, shared_inputs=tables, label=form, **named)


@pytest.mark.parametrize("kind", ["images", "words", "attended"])
@pytest.mark.parametrize(
    "name", ["Rank1 normal", "MeanField flipout", "ECMP", "MCDropout", "DeepEnsemble", "Deterministic"]
)
def test_whole_networks_in_single_precision(kind, name):
    model, x = make(kind, name), inputs(kind, 5)
    wanted = drawn(model, x, draws=4)
    for example in (None, x[:1]):
        frozen = sb.freeze(model, 4, example=example)
        with torch.no_grad():
            torch.testing.assert_close(frozen(x), wanted, rtol=1e-5, atol=1e-5)
            assert torch.equal(frozen(x), frozen(x))  # the same each time
            torch.testing.assert_close(
                frozen(x[2:3]), wanted[:, 2:3], rtol=1e-5, atol=1e-5
            )  # whatever the batch
        ours = (Converted, Several, Ensembled)
        layers = [
            m for m in frozen.modules() if isinstance(m, ours) and not type(m).__name__.endswith("Attention")
        ]
        assert not layers and not any(p.requires_grad for p in frozen.parameters())


def test_the_model_stays_as_it_is():
    model = make("images", "MCDropout").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    frozen = sb.freeze(model, 4, example=inputs("images"))
    frozen.train()
    assert not any(module.training for module in frozen.modules()) and all(
        m.training for m in model.modules()
    )
    assert torch.equal(random, torch.get_rng_state())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        moved = frozen(inputs("images"))
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(moved, drawn(model.eval(), inputs("images"), draws=4))  # no memory is shared


def test_seeds_and_draws():
    model, x = make("images", "Rank1 normal"), inputs("images")
    with torch.no_grad():
        first, second = sb.freeze(model, 4, 0)(x), sb.freeze(model, 4, 1)(x)
        assert not torch.allclose(first, second)
        assert not torch.allclose(first[0], first[1])  # two samples of one component
        torch.testing.assert_close(sb.freeze(model, 2, 0)(x), first[[0, 2]])  # component-major
    with pytest.raises(
        ValueError, match=r"draws=7 is not a multiple of this model's 2 components.*use draws=8"
    ):
        sb.freeze(model, 7)
    for bad in (0, True, 2.0):
        with pytest.raises(ValueError, match="at least 1"):
            sb.freeze(model, bad)
    with pytest.raises(ValueError, match="seed must be an integer"):
        sb.freeze(model, seed=None)
    with pytest.raises(ValueError, match="not been converted"):
        sb.freeze(nn.Linear(1, 1))


def test_copies_are_computed_once():
    model, x = make("images", "DeepEnsemble"), inputs("images")
    frozen = sb.freeze(model, 6)
    assert isinstance(frozen.network, Members) and len(frozen.network.members) == 2 and frozen.distinct == 2
    with torch.no_grad():
        found = frozen(x)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[2], found[3]) and len(found) == 6


def test_rank_one_keeps_one_weight():
    def size(name, draws):
        frozen = sb.freeze(make("images", name), draws)
        return sum(t.numel() for t in (*frozen.parameters(), *frozen.buffers()))

    assert isinstance(sb.freeze(make("images", "Rank1 normal"), 2).network.head, Factored)
    assert size("Rank1 normal", 8) - size("Rank1 normal", 4) == 4 * (
        2 + 2 * 4 + 36 + 2 * 3
    )  # s, r and b of each draw
    assert size("MeanField shared", 8) - size("MeanField shared", 4) == 4 * (4 * 2 * 9 + 4 + 36 * 3 + 3)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.rows = []

    def forward(self, x):
        y = self.body(x)
        self.rows.append(len(y))
        return self.head(y), y


def test_what_no_draw_touches_runs_once():
    model = sb.bayesianize(Counting(), sb.KTied(), include="head").eval()
    x = torch.randn(5, 3)
    late, early = sb.freeze(model, 4, example=x), sb.freeze(model, 4)
    late.network.rows.clear(), early.network.rows.clear()
    with torch.no_grad():
        wanted = drawn(model, x, draws=4)
        for frozen in (late, early):
            for a, b in zip(frozen(x), wanted, strict=True):
                torch.testing.assert_close(a, b)
        assert late(x[:1])[1].shape == (4, 1, 4)
    assert late.network.rows[0] == 5 and early.network.rows[0] == 20


class Tied(nn.Module):
    """A layer used twice, a name of its own for the same layer, inputs by name, outputs by name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, table, scale=1.0):
        y = self.drop(self.first(self.drop(x)))
        return {"y": self.again(y) * scale, "table": x @ table, "more": [y, None]}


@pytest.mark.parametrize(
    "method", [sb.MeanField(), sb.MCDropout(0.4), sb.Rank1(components=2)], ids=lambda m: type(m).__name__
)
def test_shared_layers_inputs_and_structures(method):
    torch.manual_seed(0)
    model = sb.bayesianize(Tied().double(), method).eval()
    x, table = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    frozen = check(model, x, table=table, scale=2.0, shared_inputs=["table"])
    assert frozen.network.first is frozen.network.again


def test_patches_with_statistics_of_their_own_and_mixed_rules():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    patch = sb.EMP(components=3, patch=("norm",), own_statistics=True, init_noise=0.3, learn_mixing=True)
    model = sb.bayesianize(net, [(nn.BatchNorm1d, patch), (nn.Linear, sb.Rank1(components=2))])
    x = torch.randn(6, 3, dtype=torch.float64)
    for _ in range(5):
        sb.draw(model, x, samples=2)  # in training mode: the statistics of the components part
    check(model.eval(), x)


def test_hooks_of_torch_are_followed():
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 1).double())
    model = sb.bayesianize(
        nn.Sequential(norm, nn.Conv1d(3, 2, 1).double()), sb.Rank1(components=2), include="1"
    )
    check(model.eval(), torch.randn(3, 2, 4, dtype=torch.float64))


def test_copies_and_files_of_the_module():
    frozen, x = sb.freeze(make("words", "MCDropout"), 4, example=inputs("words")), inputs("words", 6)
    buffer = io.BytesIO()
    torch.save(frozen, buffer)
    buffer.seek(0)
    with torch.no_grad():
        for other in (copy.deepcopy(frozen), torch.load(buffer, weights_only=False)):
            assert torch.equal(other(x), frozen(x))
            other.load_state_dict(frozen.state_dict())
        assert torch.equal(frozen.double()(x), frozen(x)) and frozen(x).dtype == torch.float64


def test_errors():
    additive = sb.Rank1(components=2, perturbation="additive")
    with pytest.raises(ValueError, match="adds to its projected state"):
        sb.freeze(sb.bayesianize(nn.LSTM(3, 4, proj_size=2), additive))
    frozen = sb.freeze(sb.bayesianize(attention.Attended("self", batch_first=True), sb.MeanField()))
    assert isinstance(frozen.network.attention, FrozenLayer) and frozen.network.attention.batch_first
    with pytest.raises(AttributeError, match="nothing"):
        _ = frozen.network.attention.nothing
    for given, message in (((torch.tensor(1.0),), "scalar"), ((2,), "no tensor input")):
        with pytest.raises(ValueError, match=message):
            frozen(*given)

    class Lost(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(0)

    lost = sb.freeze(
        sb.bayesianize(nn.Sequential(nn.Linear(2, 2), Lost(2, 3)), sb.MeanField(), include="^0"), 4
    )
    with pytest.raises(sb.RowError, match="keep the batch outermost"):
        lost(torch.randn(5, 2))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.steps = [self.a, self.b]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("method", [sb.MeanField(), sb.Rank1(), sb.MCDropout()])
def test_a_layer_that_is_reached_through_a_list_is_an_error_and_never_random(method):
    model, x = sb.bayesianize(Listed(), method), torch.randn(4, 3)
    with pytest.raises(RuntimeError, match=r"layer 'a' .* nn\.ModuleList"):
        sb.freeze(model, draws=4)(x)
    with pytest.raises((RuntimeError, sb.RowError)):
        sb.freeze(model, draws=4, example=x)
    assert sb.draw(model, x, samples=2).shape[1:] == (4, 2)  # the model itself is as it was


def test_hooks_are_not_lost_in_silence():
    net = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    model = sb.bayesianize(net, sb.MeanField())
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(ValueError, match="layer '0' has forward hooks"):
        sb.freeze(model, draws=4)
    handle.remove()
    x = torch.randn(5, 3)
    wanted = sb.draw(model.eval(), x, samples=4, noise="shared", seed=0)
    torch.testing.assert_close(sb.freeze(model, draws=4)(x), wanted)
