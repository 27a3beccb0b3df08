"""Late tiling agrees with early tiling wherever it is taken, and is not taken where it cannot be."""

import copy

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, quiet, residual_net
from torch import nn
from torch.utils import _pytree as pytree

import slimbayes as sb
from slimbayes.accelerate.late_tiling import LATE_TILING
from slimbayes.lab.models import LeNet, WideResNet


@pytest.fixture(autouse=True)
def without_gradients():
    """Late tiling is for predictions: with gradients rows are always repeated first."""
    with torch.no_grad():
        yield


class ReadsBatchEarly(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(4, 2)

    def forward(self, x):
        rows = x.shape[0]
        return self.b(self.a(x).view(rows, 2, 4)).mean(1)


class LongSkip(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return x + self.body(x)


class PicksRows(nn.Module):
    """Would take the first draw's rows for all draws, and not fail."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        rows = torch.arange(x.shape[0])
        return self.b(self.a(x)[rows])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)
        self.both, self.out = nn.Bilinear(4, 4, 5), nn.Linear(5, 2)

    def forward(self, x, other, scale=1.0):
        return self.out(self.both(self.a(x), self.b(other)).relu() * scale)


class Dense(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = nn.Linear(3, 4) if first else nn.Tanh()
        width = 4 if first else 3
        self.a, self.b = nn.Linear(width, 4), nn.Linear(width + 4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.b(torch.cat([x, self.a(x).relu()], 1))


class FromDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch):
        hidden = self.a(batch["x"] * batch["mask"]).relu()
        return {"logits": self.b(hidden), "hidden": hidden, "seen": batch["x"].abs(), "layers": 2}


class Tokens(nn.Module):
    """Time is folded into the rows before the first random layer of a head."""

    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, index):
        tokens = torch.tanh(self.table(index)).flatten(0, 1)
        return self.b(self.a(tokens).relu()).unflatten(0, (-1, index.shape[1])).mean(1)


class Recurrent(nn.Module):
    """One layer that meets the batch first, and repeated rows after it."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.cell(torch.tanh(self.cell(x)))))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 2))


def sequences(batch=5):
    return torch.randn(batch, 4, 3, generator=torch.Generator().manual_seed(3))


def tokens(batch=5):
    return torch.randint(7, (batch, 6), generator=torch.Generator().manual_seed(3))


def pair(batch):
    return features(batch), features(batch, 2)


def named(batch):
    return ({"x": features(batch), "mask": features(batch) > 0},)


NETWORKS = {
    "mlp": (mlp, lambda b: (features(b),)),
    "lenet": (lambda: LeNet(3, channels=1, image_size=8), lambda b: (torch.randn(b, 1, 8, 8),)),
    "residual": (residual_net, lambda b: (images(b),)),
    "reads_batch_early": (ReadsBatchEarly, lambda b: (features(b),)),
    "long_skip": (LongSkip, lambda b: (features(b),)),
    "picks_rows": (PicksRows, lambda b: (features(b),)),
    "two_inputs": (TwoInputs, pair),
    "dense": (lambda: Dense(True), lambda b: (features(b),)),
    "dense_skip": (lambda: Dense(False), lambda b: (features(b),)),
    "dict": (FromDict, named),
    "tokens": (Tokens, lambda b: (tokens(b),)),
    "recurrent": (Recurrent, lambda b: (features(b),)),
    "encoder": (encoder, lambda b: (sequences(b),)),
}
NEVER = ("reads_batch_early", "long_skip", "picks_rows", "dense_skip", "recurrent")


def plans(model):
    return list(LATE_TILING.plans.get(model, {}).values())


def both_ways(model, inputs, **options):
    with sb.fast_paths(late=False):
        early = sb.draw(model, *inputs, **options)
    return early, sb.draw(model, *inputs, **options)


def doubled(inputs):
    return pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, inputs)


def same(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.uncounted(but=8)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_late_equals_early(method, network):
    build, make = NETWORKS[network]
    with quiet():
        try:
            model = convert(build, METHODS[method]()).double().eval()
        except ValueError as refused:
            pytest.skip(str(refused))
    sizes, turn = ((5, 3), (1, 4), (4, 2)), list(METHODS).index(method) + list(NETWORKS).index(network)
    with torch.no_grad():
        for number, noise in enumerate(("example", "shared", "mean")):
            batch, samples = sizes[(number + turn) % 3]  # every size here, with every noise in other cases
            torch.manual_seed(0)
            inputs = doubled(make(batch))
            early, late = both_ways(model, inputs, samples=samples, noise=noise, seed=1)
            same(late, early, 1e-10)
            if noise == "mean":  # a seed is nothing to it
                continue
            torch.manual_seed(4)
            with sb.fast_paths(late=False):
                early = sb.draw(model, *inputs, samples=samples, noise=noise)
            torch.manual_seed(4)
            same(sb.draw(model, *inputs, samples=samples, noise=noise), early, 1e-10)
    assert plans(model), "no pass was large enough to probe"
    if network not in NEVER and method != "emp" and method != "ecmp":
        assert all(plan is not None for plan in plans(model))


@pytest.mark.parametrize("network", NEVER)
def test_networks_that_mix_rows_from_before_and_after_are_left_alone(network):
    build, make = NETWORKS[network]
    model = convert(build, METHODS["rank1"]()).eval()
    sb.draw(model, *make(5), samples=2)
    assert plans(model) == [None]


def test_equal_draws_do_not_hide_a_mix_of_rows():
    """Components that start equal would pass any comparison of outputs."""
    model = convert(PicksRows, sb.BatchEnsemble(components=2, random_sign_init=0.0)).eval()
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    early, late = both_ways(model, (features(3),), samples=2)
    assert plans(model) == [None]
    same(late, early)


def test_a_deterministic_prefix_runs_once_per_example():
    model = convert(residual_net, sb.Rank1(components=2), include="2.3").eval()
    rows = {}
    for name in ("0", "2.1", "2.3"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: rows.setdefault(name, []).append(len(y))
        )
    sb.predict(model, images(4), samples=5)
    rows.clear()
    sb.predict(model, images(4), samples=5)
    assert rows == {"0": [4], "2.1": [4], "2.3": [40]}
    with sb.fast_paths(late=False):
        sb.predict(model, images(4), samples=5)
    assert rows["0"] == [4, 40]


def test_training_draws_are_tiled_early():
    model = convert(mlp, METHODS["rank1"]()).train()
    sb.draw(model, features(4), samples=2)
    model.eval()[1].train()  # one module in training mode is enough
    sb.draw(model, features(4), samples=2)
    assert plans(model) == []


def test_with_gradients_rows_are_repeated_first():
    model = convert(mlp, METHODS["meanfield"](), include="3").double().eval()
    with torch.enable_grad():
        sb.draw(model, features(4).double(), samples=3, seed=2).square().sum().backward()
    assert not LATE_TILING.plans.get(model)
    sb.draw(model, features(4).double(), samples=3, seed=2)
    assert plans(model)[0] is not None


def test_the_probe_leaves_nothing_behind():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            self.seen += 1
            return self.linear(x)

    model = convert(Counting, METHODS["rank1"]()).eval()
    state = torch.random.get_rng_state()
    sb.draw(model, features(4), samples=2, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert float(model.seen) == 1
    assert plans(model)[0] is not None


def test_own_randomness_of_the_network_is_not_shared_among_draws():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x + torch.randn_like(x))

    model = convert(Noisy, METHODS["rank1"]()).eval()
    sb.draw(model, features(4), samples=2)
    assert plans(model) == [None]


def test_a_network_that_changes_its_mind_falls_back():
    """Control flow that depends on the data: the plain pass runs in its place."""

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            y = self.a(x)
            return y + x if x.sum() > 100 else y

    model = convert(Moody, METHODS["rank1"]()).eval()
    sb.draw(model, features(4), samples=2)
    assert plans(model)[0] is not None
    early, late = both_ways(model, (features(4) + 100,), samples=2, seed=3)
    same(late, early)
    assert plans(model) == [None]


def test_shared_inputs_are_not_repeated():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, scale):
            return self.linear(x * scale)

    for method in ("rank1", "deep_ensemble", "meanfield"):
        model = convert(Scaled, METHODS[method]()).eval()
        options = {"samples": 2, "seed": 1, "shared_inputs": [1]}
        early, late = both_ways(model, (features(3), torch.rand(3)), **options)
        same(late, early)
        assert plans(model)[0] is not None


def test_verdicts_are_not_copied():
    model = convert(mlp, METHODS["rank1"]()).eval()
    sb.draw(model, features(4), samples=2)
    assert plans(model) and not plans(copy.deepcopy(model))


def test_tables_shared_by_the_batch_still_raise():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(8, 3), nn.Linear(3, 3)

        def forward(self, x):
            return x + self.linear(self.table(torch.arange(8))).mean(0)

    model = convert(Positions, sb.Rank1(components=2)).eval()
    with pytest.raises(sb.RowError, match="linear"):
        sb.draw(model, features(4), samples=1)


def test_wide_resnet_head():
    torch.manual_seed(0)
    net = WideResNet(10, 1, classes=3)
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    model = sb.bayesianize(net, sb.MeanField(stddev_init=0.1), include=names[-1]).eval()
    early, late = both_ways(model, (torch.randn(3, 3, 32, 32),), samples=4, seed=0)
    same(late, early, 1e-5)
    assert plans(model)[0].layers == {names[-1]}


def test_a_table_that_the_rows_divide_is_found_by_the_probe():
    """Eight rows of a table look like two draws of four examples: the plain pass must be the one to speak."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.first, self.linear = nn.Embedding(16, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) + self.first(self.table(torch.arange(16))).mean(0)

    model = convert(Positions, sb.Rank1(components=2)).eval()
    with pytest.raises(sb.RowError, match="first"):
        sb.draw(model, features(4), samples=2)
    assert not plans(model)
