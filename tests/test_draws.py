"""Folding and unfolding: shapes, order, tiling, the rows that layers must see, and seeds."""

import itertools

import pytest
import torch
from helpers_networks import (
    METHODS,
    NOISELESS,
    PER_EXAMPLE,
    convert,
    features,
    images,
    mlp,
    residual_net,
    unit_factors,
)
from torch import nn

import slimbayes as sb
from slimbayes.core.context import Draw, activate, current_draw

pytestmark = pytest.mark.oldest


def close(actual, expected, tolerance=1e-6):
    """To ``tolerance`` of the largest number: sums of another length round in another order."""
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


# Shapes and order


@pytest.mark.parametrize("method", METHODS)
def test_shape_counts_components_times_samples(method):
    model = convert(residual_net, METHODS[method]()).eval()
    components = METHODS[method]().traits.components
    assert components == {"rank1": 3, "batch_ensemble": 3, "deep_ensemble": 3}.get(
        method, 2 if method in ("cauchy", "lognormal", "additive", "random_output") else 1
    )
    for samples, noise in itertools.product((1, 3), ("example", "shared", "mean")):
        assert sb.draw(model, images(), samples=samples, noise=noise).shape == (components * samples, 4, 3)
    assert current_draw() is None


@pytest.mark.parametrize("samples", [1, 2])
def test_component_major_order(samples):
    """Draw k·S + s belongs to component k: against a loop over the components' own factors."""
    model = convert(lambda: nn.Linear(3, 2), sb.BatchEnsemble(components=4))
    x = features(5)
    draws = sb.draw(model, x, samples=samples)
    for k in range(4):
        expected = ((x * model.bayes.s.loc[k]) @ model.weight.t()) * model.bayes.r.loc[k] + model.bias[k]
        for s in range(samples):
            close(draws[k * samples + s], expected)


@pytest.mark.parametrize("method", ["batch_ensemble", "deep_ensemble"])
def test_plain_call_takes_tiled_rows(method):
    model = convert(mlp, METHODS[method]()).eval()
    x = features(4)
    draws = sb.draw(model, x, noise="mean")
    close(model(x.repeat(3, 1)).unflatten(0, (3, 4)), draws)
    if method == "batch_ensemble":  # other rows are another batch of the same components
        close(model(x[:2].repeat(3, 1)).unflatten(0, (3, 2)), draws[:, :2])


def test_plain_call_of_a_random_model_is_one_sample_around_the_mean():
    model = convert(lambda: nn.Linear(3, 2), sb.Rank1(components=2, dropout_rate=1e-4))
    x = features(2000)
    mean = sb.draw(model, x, noise="mean")
    noisy = model(x.repeat(2, 1)).unflatten(0, (2, 2000))
    assert (noisy - mean).abs().max() > 1e-3
    close((noisy - mean).mean(1), torch.zeros(2, 2), 2e-3)


@pytest.mark.parametrize("method", ["rank1", "batch_ensemble", "deep_ensemble"])
def test_plain_call_on_rows_that_do_not_divide_raises(method):
    model = convert(mlp, METHODS[method]()).eval()
    with pytest.raises(
        sb.RowError, match=r"got 4 rows, which its 3 components do not divide.*sb\.draw\(model"
    ):
        model(features(4))


def test_the_draw_ends_with_an_exception_too():
    class Fails(nn.Linear):
        def forward(self, x):
            assert current_draw() is not None
            raise RuntimeError("inside")

    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 3), Fails(3, 3)), sb.Rank1())
    with pytest.raises(RuntimeError, match="inside"):
        sb.draw(model, features())
    assert current_draw() is None


def test_draws_nest_and_threads_do_not_see_each_other():
    import threading

    outer, inner = Draw(2, 1, 3), Draw(1, 1, 5)
    seen = []
    with activate(outer):
        with activate(inner):
            assert current_draw() is inner
        assert current_draw() is outer
        thread = threading.Thread(target=lambda: seen.append(current_draw()))
        thread.start()
        thread.join()
    assert seen == [None]


# Tiling


class Inputs(nn.Module):
    """Shows which inputs were tiled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = {}

    def forward(self, x, y=None, table=None, extras=None, flag=None):
        self.seen = {"x": x, "y": y, "table": table, "extras": extras, "flag": flag}
        return self.layer(x)


@pytest.fixture
def inputs_model():
    model = sb.bayesianize(Inputs(), sb.BatchEnsemble(components=2))
    sb.draw(model, features(4))  # the probe of the rows runs once, here
    return model


def test_tensors_of_the_batchs_length_are_tiled_and_others_pass_through(inputs_model):
    token = object()
    x, y = features(4), torch.arange(4)
    nested = {
        "a": torch.arange(4.0),
        "b": [torch.zeros(4, 2), torch.zeros(7), torch.tensor(1.0)],
        "c": "text",
    }
    sb.draw(inputs_model, x, y, table=torch.zeros(5, 2), extras=nested, flag=token, samples=3)
    seen = inputs_model.seen
    assert torch.equal(seen["x"], x.repeat(6, 1))
    assert torch.equal(seen["y"], y.repeat(6))
    assert seen["table"].shape == (5, 2)
    assert torch.equal(seen["extras"]["a"], torch.arange(4.0).repeat(6))
    assert [t.shape for t in seen["extras"]["b"]] == [(24, 2), (7,), ()]
    assert seen["extras"]["c"] == "text"
    assert seen["flag"] is token


@pytest.mark.parametrize(
    ("shared", "positional"), [(("table",), False), ("table", False), ((1,), True), (("y",), True), (1, True)]
)
def test_shared_inputs_are_not_tiled(inputs_model, shared, positional):
    table = torch.zeros(4, 2)
    if positional:
        sb.draw(inputs_model, features(4), table, shared_inputs=shared)
        assert inputs_model.seen["y"].shape == (4, 2)
    else:
        sb.draw(inputs_model, features(4), table=table, shared_inputs=shared)
        assert inputs_model.seen["table"].shape == (4, 2)
    assert inputs_model.seen["x"].shape == (8, 3)


def test_shared_inputs_cover_all_leaves_of_a_structure(inputs_model):
    extras = (torch.zeros(4), {"deep": torch.zeros(4, 1)})
    sb.draw(inputs_model, features(4), extras=extras, y=torch.zeros(4), shared_inputs=("extras",))
    assert [t.shape for t in (inputs_model.seen["extras"][0], inputs_model.seen["extras"][1]["deep"])] == [
        (4,),
        (4, 1),
    ]
    assert inputs_model.seen["y"].shape == (8,)


def test_the_batch_is_the_first_input_that_is_not_shared():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, table, x):
            return self.layer(x) + table.sum()

    model = sb.bayesianize(Late(), sb.BatchEnsemble(components=2))
    assert sb.draw(model, torch.zeros(5, 3), features(4), shared_inputs=("table",)).shape == (2, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": features(), "shared_inputs": ("tabel",)}, "shared_inputs names 'tabel', but no such input"),
        ({"x": features(), "shared_inputs": (3,)}, "shared_inputs names 3, but no such input"),
        ({"x": torch.zeros(())}, "scalar"),
        ({"x": torch.zeros(0, 3)}, r"batch is empty.*\(0, 3\)"),
        ({"x": "text"}, "no tensor input"),
        ({"x": features(), "samples": 0}, "samples must be an integer of at least 1, got 0"),
        ({"x": features(), "samples": True}, "samples must be an integer"),
        ({"x": features(), "samples": 2.0}, "samples must be an integer of at least 1, got 2.0"),
        ({"x": features(), "noise": "none"}, "unknown noise 'none'; use 'example', 'shared' or 'mean'"),
        ({"x": features(), "seed": 0.5}, "seed must be an integer or None, got 0.5"),
    ],
)
def test_bad_arguments(inputs_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        sb.draw(inputs_model, **arguments)


def test_outputs_without_rows_raise():
    class Mean(nn.Linear):
        def forward(self, x):
            return x.mean()

    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 2), Mean(1, 1)), sb.BatchEnsemble())
    with pytest.raises(sb.RowError, match=r"no output of the model has the 16 rows.*\[\(\)\]"):
        sb.draw(model, features(4))


# The rows that layers must see


class Table(nn.Module):
    """Adds a table, shared by the batch, that goes through a layer which a method converts."""

    def __init__(self, rows, order="table first"):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 3)
        self.order = order
        self.register_buffer("table", torch.randn(rows, 3))

    def forward(self, x):
        x = self.body(x)
        if self.order == "table first":
            return self.layer(self.table).mean(0) + self.layer(x)
        if self.order == "table last":
            return self.layer(x) + self.layer(self.table).mean(0)
        return x + self.layer(self.table).mean(0)


@pytest.mark.parametrize("order", ["table first", "table last", "table only"])
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("method", ["rank1", "meanfield", "emp_linear", "mc_dropout"])
def test_tables_raise_whatever_their_length(method, rows, order):
    """8 and 16 are multiples of the 8 rows (1 × 2 × 4, or 2 × 1 × 4): only the probe can tell."""
    chosen = {
        "rank1": sb.Rank1(components=2),
        "meanfield": sb.MeanField(),
        "emp_linear": sb.EMP(patch=(nn.Linear,)),
        "mc_dropout": sb.MCDropout(),
    }[method]
    model = sb.bayesianize(Table(rows, order), chosen)
    samples = 1 if method == "rank1" else 2
    for _ in range(2):  # a failed probe is not taken for a success
        with pytest.raises(
            sb.RowError, match=rf"'layer' got an input .* is {rows}, .*= 8 rows.*exclude='layer'"
        ):
            sb.draw(model, features(4), samples=samples)
    excluded = sb.bayesianize(Table(rows, order), chosen, exclude="^layer$")
    assert sb.draw(excluded, features(4), samples=samples).shape == (2, 4, 3)


def test_one_row_in_all_cannot_hide_a_table():
    model = sb.bayesianize(Table(1), sb.MeanField())
    with pytest.raises(sb.RowError, match="layer 'layer'"):
        sb.draw(model, features(1))


def test_the_probe_runs_once_and_changes_nothing():
    calls = []
    model = convert(residual_net, sb.Rank1(components=2))
    model[0].register_forward_hook(lambda m, a, y: calls.append(y.shape[0]))
    model.train()
    modes = [m.training for m in model.modules()]
    sb.draw(model, images(4))
    assert calls == [2, 6, 6, 8]  # two examples alone, and three copies of them twice; then 2 × 4 rows
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    assert int(statistics["1.0.norm.num_batches_tracked"]) == 1
    assert [m.training for m in model.modules()] == modes
    sb.draw(model, images(4))
    assert calls == [2, 6, 6, 8, 8]
    state = torch.get_rng_state()
    fresh = convert(residual_net, sb.Rank1(components=2)).eval()
    torch.set_rng_state(state)
    sb.draw(fresh, images(4), seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_that_refuses_the_probe_still_draws():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            assert x.shape[0] == 8
            return self.layer(x)

    assert sb.draw(sb.bayesianize(Fixed(), sb.BatchEnsemble(2)), features(4)).shape == (2, 4, 2)


# Seeds


def pieces(model, x, samples, noise, batch_cuts, sample_cuts, seed=7):
    """The draws of x computed in pieces, put together again."""
    rows = []
    for start, stop in itertools.pairwise(batch_cuts):
        parts = []
        for first, last in itertools.pairwise(sample_cuts):
            part = sb.draw(
                model, x[start:stop], samples=last - first, noise=noise, seed=seed, first_example=start,
                first_sample=first,
            )  # fmt: skip
            parts.append(part.unflatten(0, (-1, last - first)))
        rows.append(torch.cat(parts, 1).flatten(0, 1))
    return torch.cat(rows, 1)


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", METHODS)
def test_seeded_draws_do_not_depend_on_the_split(method, noise):
    model = convert(residual_net, METHODS[method]()).eval()
    x = images(5)
    state = torch.get_rng_state()
    with torch.no_grad():
        whole = sb.draw(model, x, samples=3, noise=noise, seed=7)
        for batch_cuts, sample_cuts in (((0, 2, 5), (0, 3)), ((0, 5), (0, 1, 3)), (range(6), range(4))):
            close(pieces(model, x, 3, noise, batch_cuts, sample_cuts), whole)
        for chunk in (1, 4, 7, 100):
            close(sb.predict(model, x, samples=3, noise=noise, seed=7, chunk=chunk).draws, whole)
        again = sb.draw(model, x, samples=3, noise=noise, seed=7)
        other = sb.draw(model, x, samples=3, noise=noise, seed=8)
    assert torch.equal(whole, again)
    assert torch.equal(torch.get_rng_state(), state)
    by_sample = whole.unflatten(0, (-1, 3))
    if method in NOISELESS:
        assert torch.equal(whole, other)
        assert torch.equal(by_sample[:, 0], by_sample[:, 1])
    else:
        assert (whole - other).abs().max() > 1e-3
        assert (by_sample[:, 0] - by_sample[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_shared_noise_is_one_function_of_the_batch(method):
    """Equal examples get equal outputs; under "example" only the methods without per-example noise do."""
    model = convert(residual_net, METHODS[method]()).eval()
    x = images(1).expand(3, -1, -1, -1)
    for seed in (None, 3):
        shared = sb.draw(model, x, samples=2, noise="shared", seed=seed)
        close(shared, shared[:, :1].expand_as(shared), 1e-5)
        example = sb.draw(model, x, samples=2, noise="example", seed=seed)
        if method in PER_EXAMPLE:
            assert (example[:, 0] - example[:, 1]).abs().max() > 1e-4
        else:
            close(example, example[:, :1].expand_as(example), 1e-5)
    components = METHODS[method]().traits.components
    mean = sb.draw(model, x, samples=2, noise="mean")
    assert torch.equal(mean.unflatten(0, (components, 2))[:, 0], mean.unflatten(0, (components, 2))[:, 1])


@pytest.mark.parametrize("method", sorted(set(METHODS) - NOISELESS))
def test_layers_and_components_have_noise_of_their_own(method):
    """Two equal layers, same input: their outputs differ; so do two components with equal factors."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.load_state_dict(self.a.state_dict())
            self.norm = nn.LayerNorm(4)
            self.output = nn.Linear(4, 4)

        def forward(self, x):
            return torch.stack([self.a(x), self.b(x)], 1)

    chosen = METHODS[method]()
    if isinstance(chosen, sb.EMP | sb.ECMP):
        chosen = type(chosen)(components=7, patch=(nn.Linear,), init_noise=0.3)
    model = unit_factors(convert(Two, chosen))
    if isinstance(chosen, sb.EMP | sb.ECMP):
        with torch.no_grad():
            model.b.weight.copy_(model.a.weight)
            model.b.bias.copy_(model.a.bias)
    for noise in ("example", "shared"):
        draws = sb.draw(model, features(2, 4), samples=3, noise=noise, seed=2)  # [D, 2, 2 layers, 4]
        assert (draws[:, :, 0] - draws[:, :, 1]).abs().max() > 1e-3
        if chosen.traits.components > 1:
            components = draws.unflatten(0, (-1, 3))
            assert (components[0] - components[1]).abs().max() > 1e-3


@pytest.mark.parametrize("method", ["local", "mc_dropout"])
def test_seed_or_not_a_layer_used_twice_has_fresh_activation_noise(method):
    """Noise on activations is drawn at every use, with a seed as without one."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.stack([self.layer(x), self.layer(x)], 1)

    model = convert(Twice, METHODS[method]())
    for seed in (None, 1):
        draws = sb.draw(model, features(2, 4), samples=4, seed=seed)
        assert (draws[:, :, 0] - draws[:, :, 1]).abs().max() > 1e-3
    whole = sb.draw(model, features(2, 4), samples=4, seed=1)
    halves = [sb.draw(model, features(2, 4), samples=2, seed=1, first_sample=i) for i in (0, 2)]
    close(torch.cat(halves), whole)


def test_any_integer_is_a_seed():
    model = convert(mlp, METHODS["rank1"]()).eval()
    seeds = (0, -1, 1, 2**31, 2**63, 10**40)
    draws = [sb.draw(model, features(), seed=seed) for seed in seeds]
    for first, second in itertools.combinations(draws, 2):
        assert not torch.equal(first, second)


@pytest.mark.uncounted(but=3)
@pytest.mark.parametrize("method", ["rank1", "meanfield", "mc_dropout"])
def test_compiled_draws_of_a_seed_equal_eager_ones(method):
    model = convert(lambda: nn.Linear(3, 2), METHODS[method]())
    x = features(4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for seed in (11, 12):
            close(sb.draw(compiled, x, samples=2, seed=seed), sb.draw(model, x, samples=2, seed=seed), 2e-6)


def test_the_draw_itself_can_be_compiled():
    model = convert(lambda: nn.Linear(3, 2), METHODS["batch_ensemble"]())
    x = features(4)
    eager = sb.draw(model, x, samples=2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: sb.draw(model, x, samples=2), backend="eager", fullgraph=True)
    close(compiled(x), eager, 2e-6)


@pytest.mark.parametrize("method", ["rank1", "meanfield", "mc_dropout", "norms"])
def test_channels_last_images_stay_so_and_give_the_same_draws(method):
    chosen = sb.EMP(patch=("norm",), init_noise=0.3) if method == "norms" else METHODS[method]()
    model = convert(residual_net, chosen).eval()
    x = images(4)
    expected = sb.draw(model, x, samples=2, seed=1)
    formats = []
    model[0].register_forward_pre_hook(
        lambda m, a: formats.append(a[0].is_contiguous(memory_format=torch.channels_last))
    )
    model.to(memory_format=torch.channels_last)
    permuted = sb.draw(model, x.to(memory_format=torch.channels_last), samples=2, seed=1)
    close(permuted, expected, 1e-5)
    assert formats == [True]


def test_a_draw_is_made_again_by_its_number():
    """Of tensors and of structured outputs; the keys are those of the whole, wherever it began."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return {"y": self.linear(x), "scale": 3.0}

    model, x = sb.bayesianize(Two(), sb.Rank1(components=2)).eval(), torch.randn(4, 3)
    options = {"samples": 3, "seed": 5, "first_sample": 7, "first_example": 2}
    whole = sb.draw(model, x, **options)
    again = sb.draw(model, x, draws=[4, 0, 4], **options)
    assert again["scale"] == 3.0 and torch.allclose(again["y"], whole["y"][[4, 0, 4]], atol=1e-6)
    assert torch.allclose(sb.draw(model, x, draws=5, **options)["y"], whole["y"][5:], atol=1e-6)


def test_what_cannot_be_made_again_is_an_error():
    model, x = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=2)), torch.randn(4, 3)
    with pytest.raises(ValueError, match="give the seed they were made with"):
        sb.draw(model, x, samples=3, draws=[1])
    for draws in ([6], [-1], [], [1.0], True):
        with pytest.raises(ValueError, match="give numbers from 0 to 5, for samples=3 of 2 components"):
            sb.draw(model, x, samples=3, seed=0, draws=draws)
