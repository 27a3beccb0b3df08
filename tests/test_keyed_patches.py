"""Seeded draws of EMP and ECMP: the noise of all layers by one evaluation is that which each would have made."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize, prune

import slimbayes as sb
import slimbayes.core.keyed_noise as keys
from slimbayes.accelerate import patch_lookahead, patch_versions
from slimbayes.accelerate.patch_lookahead import places_of
from slimbayes.core.conversion import converted_layers
from slimbayes.core.keyed_noise import keyed_noise, keyed_uniforms, layer_key
from slimbayes.lab.models import WideResNet

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("components", [1, 3])
def test_joint_noise_is_every_layers_own_bit_for_bit(components, dtype):
    sources, samples = (("a", 1), ("b", 7), ("a b", 4), ("c", 130)), torch.arange(5) + 11
    joint = keyed_uniforms(-3, sources, components, samples, dtype)
    assert joint.shape == (components * 5, 142) and joint.dtype == dtype
    start = 0
    for name, count in sources:
        key = layer_key(-3, name)
        alone = keyed_noise("uniform", key, 0, torch.arange(components), samples, None, (count,), dtype, CPU)
        assert torch.equal(joint[:, start : start + count], alone.reshape(components * 5, count))
        start += count


def test_more_than_should_be_held_is_left_to_the_layers(monkeypatch):
    monkeypatch.setattr(keys, "_DEVICE_PIECE", 9)
    assert keyed_uniforms(0, (("a", 8),), 1, torch.arange(5), torch.float32) is None
    assert keyed_uniforms(0, (("a", 8),), 1, torch.arange(4), torch.float32) is not None


class Tied(nn.Module):
    """A norm that is used twice, a weight with two owners, and a large layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm, self.output = nn.LayerNorm(6), nn.Linear(6, 3000)

    def forward(self, x):
        return self.output(self.norm(self.second(self.norm(self.first(x)))))


EVERY = ("norm", "output", "first", "second")
METHODS = {
    "EMP": sb.EMP(3, EVERY, init_noise=0.5),
    "ECMP": sb.ECMP(3, EVERY, init_noise=0.5),
    "learned": sb.EMP(3, EVERY, learn_mixing=True, init_noise=0.5),
    "several K": [("norm", sb.EMP(3, "norm", init_noise=0.5)), (None, sb.ECMP(300, EVERY, init_noise=0.5))],
    "norms, Rank1 elsewhere": [("norm", sb.ECMP(3, "norm", init_noise=0.5)), (None, sb.Rank1(components=2))],
}


@pytest.mark.parametrize("name", METHODS)
def test_a_seeded_draw_is_the_same_without_the_fast_path(name):
    torch.manual_seed(0)
    model, x = sb.bayesianize(Tied(), METHODS[name]), torch.randn(4, 6)
    other = copy.deepcopy(model)
    for samples, first in ((1, 0), (3, 0), (2, 5)):
        results = []
        for net, fast in ((model, True), (other, False)):
            net.zero_grad()
            with sb.fast_paths(factors=fast):
                y = sb.draw(net, x, samples=samples, seed=9, first_sample=first)
                y.square().mean().backward()
            results.append((y, [p.grad for p in net.parameters()]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_a_network_with_norms(own):
    torch.manual_seed(0)
    model = sb.bayesianize(WideResNet(10, 1, 4, channels=1), sb.EMP(3, init_noise=0.5, own_statistics=own))
    x = torch.randn(5, 1, 8, 8)
    for samples in (1, 4):
        ours = sb.predict(model, x, samples=samples, seed=1).mean
        with sb.fast_paths(factors=False):
            torch.testing.assert_close(ours, sb.predict(model, x, samples=samples, seed=1).mean)
        torch.testing.assert_close(ours, sb.predict(model, x, samples=samples, seed=1, chunk=5).mean)


def test_the_generator_runs_once_for_all_layers(monkeypatch):
    model = sb.bayesianize(WideResNet(10, 1, 4, channels=1), sb.ECMP(3))
    calls = []
    philox = keys.philox
    monkeypatch.setattr(keys, "philox", lambda counter, key: calls.append(1) or philox(counter, key))
    sb.draw(model.eval(), torch.randn(5, 1, 8, 8), seed=0)
    model.train()
    calls.clear()
    sb.draw(model, torch.randn(5, 1, 8, 8), seed=0)
    assert len(calls) == 1
    calls.clear()
    with sb.fast_paths(factors=False):
        sb.draw(model, torch.randn(5, 1, 8, 8), seed=0)
    assert len(calls) == 16, "a weight and a bias of seven norms and of the output"


@pytest.mark.parametrize("limit", [1 << 20, 100, 0])
@pytest.mark.parametrize("name", METHODS)
def test_passes_of_a_prediction_have_the_draws_of_the_whole(name, limit, monkeypatch):
    """Whatever is chosen ahead, in passes of one sample or of several, the last one shorter, for blocks of rows."""
    monkeypatch.setattr(patch_versions, "_LARGEST", limit)
    monkeypatch.setattr(patch_versions, "_SMALL", min(limit, patch_versions._SMALL))
    torch.manual_seed(0)
    model, x = sb.bayesianize(Tied(), METHODS[name]).eval(), torch.randn(4, 6)
    components = 2 if "Rank1" in name else 1
    with sb.fast_paths(factors=False):
        whole = sb.predict(model, x, samples=7, seed=9, noise="shared").draws
    torch.testing.assert_close(sb.predict(model, x, samples=7, seed=9, noise="shared").draws, whole)
    for rows in (4, 8, 12, 2):
        cut = sb.predict(model, x, samples=7, seed=9, noise="shared", chunk=rows * components)
        torch.testing.assert_close(cut.draws, whole)
        few = sb.predict(
            model, x, samples=7, seed=9, noise="shared", chunk=rows * components, keep_draws=False
        )
        torch.testing.assert_close(few.mean, cut.mean)
        torch.testing.assert_close(few.epistemic, cut.epistemic)


def test_the_generator_runs_once_for_many_passes(monkeypatch):
    model, x = sb.bayesianize(WideResNet(10, 1, 4, channels=1), sb.ECMP(3)).eval(), torch.randn(5, 1, 8, 8)
    sb.predict(model, x, samples=2, seed=0, chunk=5)
    calls = []
    made = patch_versions.keyed_uniforms
    monkeypatch.setattr(
        patch_versions, "keyed_uniforms", lambda *rest: calls.append(len(rest[3])) or made(*rest)
    )
    sb.predict(model, x, samples=20, seed=0, chunk=5)
    assert calls == [20]
    numbers = sum(t[0].numel() for n, t in model.named_parameters() if t.shape[0] == 3 and "conv" not in n)
    monkeypatch.setattr(patch_lookahead, "FEW", 8 * numbers)
    sb.predict(model, x, samples=20, seed=0, chunk=5)
    assert calls[1:] == [8, 8, 4], "no more than should be held at a time"


def layers_asked(model, monkeypatch):
    """The names of layers whose rule is asked, from now on."""
    asked = []
    for _, layer in converted_layers(model):
        forward = layer.bayes.forward
        monkeypatch.setattr(
            layer.bayes, "forward", lambda op, x, f=forward, n=layer.bayes.name: asked.append(n) or f(op, x)
        )
    return asked


@pytest.mark.parametrize(("name", "others"), [("EMP", set()), ("ECMP", set()), ("learned", set(EVERY))])
def test_layers_of_one_draw_take_what_is_chosen_without_asking(name, others, monkeypatch):
    model, x = sb.bayesianize(Tied(), METHODS[name]).eval(), torch.randn(4, 6)
    whole = sb.predict(model, x, samples=5, seed=9, noise="shared").draws
    asked = layers_asked(model, monkeypatch)
    cut = sb.predict(model, x, samples=5, seed=9, noise="shared", chunk=4).draws
    assert set(asked) == others
    torch.testing.assert_close(cut, whole)
    with torch.no_grad():
        torch.testing.assert_close(sb.draw(model, x, seed=9, first_sample=2)[0], whole[2])
    assert set(asked) == others | {"output"}, "for one pass the large layer's versions are not copied"
    asked.clear()
    sb.draw(model, x, seed=9)
    assert set(asked) == set(EVERY), "gradients need the versions themselves"


def test_the_first_pass_looks_at_the_rows_and_later_ones_where_they_do_not_fit():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.more = nn.LayerNorm(6), None

        def forward(self, x):
            return self.norm(x) if self.more is None else self.norm(x) + self.norm(self.more).sum(0)

    model, x = sb.bayesianize(Table(), sb.EMP(3)).eval(), torch.randn(4, 6)
    model.more = torch.randn(3, 6)
    with pytest.raises(ValueError, match="'norm' got an input whose first dimension is 3"):
        sb.predict(model, x, samples=3, seed=0, chunk=4)
    model.more = torch.randn(8, 6)  # twice as many, but not those of the batch: seen by the first pass alone
    with pytest.raises(ValueError, match="'norm' got an input whose first dimension is 8"):
        sb.predict(model, x, samples=3, seed=0, chunk=4)
    model.more = None
    sb.predict(model, x, samples=3, seed=0, chunk=4)
    for rows in (3, 0):
        model.more = torch.randn(rows, 6)
        with pytest.raises(ValueError, match=f"'norm' got an input whose first dimension is {rows}"):
            sb.predict(model, x, samples=3, seed=0, chunk=4)


def fast_and_plain(make, samples=5):
    """Predictions in passes, with and without the fast path, of a network that ``make`` makes anew."""
    found = []
    for paths in ({}, {"factors": False}):
        torch.manual_seed(0)
        model, x = make()
        with sb.fast_paths(**paths):
            found.append(
                sb.predict(model.eval(), x, samples=samples, seed=9, noise="shared", chunk=len(x)).draws
            )
    return found


WIDTHS = (6, 200)  # chosen side by side, and from where they lie


@pytest.mark.parametrize("width", WIDTHS)
def test_a_network_inside_may_have_layers_of_the_same_names(width):
    def make():
        inside = sb.bayesianize(nn.Sequential(nn.Linear(width, width)), sb.MeanField(stddev_init=0.3))
        model = sb.bayesianize(nn.Sequential(nn.Linear(width, width)), sb.EMP(3, "output", init_noise=0.5))
        model[0].register_forward_hook(lambda module, inputs, y: y + 0.1 * inside[0](inputs[0]))
        return model, torch.randn(4, width)

    torch.testing.assert_close(*fast_and_plain(make))


def test_a_norm_with_statistics_of_its_own_may_share_its_weight():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.bn = nn.LayerNorm(6), nn.BatchNorm1d(6)
            self.bn.weight, self.bn.bias = self.a.weight, self.a.bias

        def forward(self, x):
            return self.bn(self.a(x))

    def make():
        model = sb.bayesianize(Shared(), sb.EMP(3, ("a", "bn"), own_statistics=True, init_noise=0.5))
        return model, torch.randn(4, 6)

    torch.testing.assert_close(*fast_and_plain(make))


def replaced(layer):
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def written(layer):
    with torch.no_grad():
        layer.weight.mul_(1.5)


def pruned(layer):
    with torch.no_grad():
        layer.weight_orig.mul_(1.5)


def reparametrized(layer):
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(1.5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("method", [sb.EMP, sb.ECMP])
@pytest.mark.parametrize("change", [replaced, written, pruned, reparametrized])
def test_weights_that_are_others_in_the_next_pass(change, method, width):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    def make():
        net = nn.Sequential(nn.ReLU(), nn.Linear(width, width))
        model = sb.bayesianize(net, method(3, "output", init_noise=0.5))
        if change is pruned:
            prune.identity(model[1], "weight")
        if change is reparametrized:
            parametrize.register_parametrization(model[1], "weight", Half())
        model[1].register_forward_hook(lambda *call: change(model[1]))
        return model, torch.randn(4, width)

    fast, plain = fast_and_plain(make)
    torch.testing.assert_close(fast, plain)
    assert not torch.allclose(fast[0], fast[4], rtol=0.5), "the weights do change"


@pytest.mark.parametrize("name", METHODS)
def test_passes_of_a_compiled_network_are_one_graph(name):
    torch.manual_seed(0)
    model, x = sb.bayesianize(Tied(), METHODS[name]).eval(), torch.randn(4, 6)
    components = 2 if "Rank1" in name else 1
    alone = name in ("EMP", "ECMP")
    samples = 7 if alone else 3  # others compile for every pass
    whole = sb.predict(model, x, samples=samples, seed=9, noise="shared").draws
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for seed in (9, 11, 9) if alone else (9,):
        found = sb.predict(compiled, x, samples=samples, seed=seed, noise="shared", chunk=4 * components)
    torch.testing.assert_close(found.draws, whole)
    if alone:
        assert counter.frame_count == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["EMP", "ECMP"])
def test_a_prediction_inside_of_another_of_the_same_network(method, compiled):
    """One of them has the place of what passes choose; the other does without."""
    torch.manual_seed(0)
    model, x = sb.bayesianize(Tied(), METHODS[method]).eval(), torch.randn(4, 6)
    whole = {seed: sb.predict(model, x, samples=5, seed=seed).draws for seed in (1, 2)}
    counter = CompileCounter()
    torch._dynamo.reset()
    run = torch.compile(model, backend=counter) if compiled else model
    inside = []

    class Outer(sb.Categorical):  # looks at the first pass, and when all are done
        def check(self, draws, targets=None):
            inside.append(sb.predict(run, x, samples=5, seed=2, chunk=4).draws)

    for _ in range(2):
        found = sb.predict(run, x, samples=5, seed=1, chunk=4, likelihood=Outer()).draws
        torch.testing.assert_close(found, whole[1])
    assert len(inside) >= 4
    for each in inside:
        torch.testing.assert_close(each, whole[2])
    assert counter.frame_count <= 2


def large(method):
    """A layer whose versions are too large to lie side by side, and a small one."""
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4)), method(3, nn.Linear)
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    return model.eval()


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def halved(model):
    parametrize.register_parametrization(model[0], "weight", Halved())


@pytest.mark.parametrize("change", [None, halved])
@pytest.mark.parametrize("method", [sb.EMP, sb.ECMP])
def test_a_compiled_layer_that_chooses_for_itself_finds_nothing_of_earlier_passes(method, change):
    model, x = large(method), torch.randn(4, 64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for samples, seed in ((5, 1), (8, 1), (1, 2), (5, 3)):
        found = sb.predict(compiled, x, samples=samples, seed=seed, chunk=4).draws
        torch.testing.assert_close(found, sb.predict(model, x, samples=samples, seed=seed).draws)
        if change is not None and samples == 8:
            change(model)


def test_the_last_pass_is_as_those_before_it(monkeypatch):
    """Seven passes are made ahead, and one is left over."""
    model, x = large(sb.ECMP), torch.randn(4, 64)
    monkeypatch.setattr(
        patch_lookahead, "FEW", 7 * sum(parameter[0].numel() for parameter in model.parameters())
    )
    whole, made, take = sb.predict(model, x, samples=8, seed=1).draws, [], patch_lookahead.Ahead.take

    def counted(self, draw, passes, members, layers):
        made.append(passes)
        take(self, draw, passes, members, layers)

    monkeypatch.setattr(patch_lookahead.Ahead, "take", counted)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    torch.testing.assert_close(sb.predict(compiled, x, samples=8, seed=1, chunk=4).draws, whole)
    assert made == [7, 1]
    assert counter.frame_count == 1


@pytest.mark.parametrize("method", ["EMP", "ECMP"])
def test_draws_of_a_compiled_network_are_one_graph(method):
    model, x = sb.bayesianize(Tied(), METHODS[method]).eval(), torch.randn(4, 6)
    wanted = [sb.draw(model, x, seed=seed) for seed in range(6)]
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for seed, each in enumerate(wanted):
            torch.testing.assert_close(sb.draw(compiled, x, seed=seed), each)
    assert counter.frame_count == 1


class Popping(nn.Module):
    """Changes the container that it is handed."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 4)

    def forward(self, batch):
        mask = batch.pop("mask")
        return self.out(batch["x"] * mask)


def test_every_pass_has_a_container_of_its_own():
    model = sb.bayesianize(Popping(), sb.EMP(3, "output")).eval()
    batch = {"x": torch.randn(4, 6), "mask": torch.ones(4, 6)}
    whole = sb.predict(model, batch, samples=5, seed=1).draws
    torch.testing.assert_close(sb.predict(model, batch, samples=5, seed=1, chunk=4).draws, whole)
    assert set(batch) == {"x", "mask"}


def test_a_network_that_is_one_layer_goes_when_it_is_let_go():
    model = sb.bayesianize(nn.Linear(6, 4), sb.EMP(3, "output")).eval()
    sb.predict(model, torch.randn(4, 6), samples=5, seed=1, chunk=4)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_copies_have_nothing_of_what_passes_chose():
    model, x = sb.bayesianize(Tied(), METHODS["EMP"]).eval(), torch.randn(4, 6)
    sb.predict(model, x, samples=5, seed=1, chunk=4)
    assert any("settled_token" in vars(module) for module in model.modules())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(key.startswith("settled_") for module in other.modules() for key in vars(module))
        found = sb.predict(other, x, samples=5, seed=1, chunk=4).draws
        torch.testing.assert_close(found, sb.predict(model, x, samples=5, seed=1, chunk=4).draws)


@pytest.mark.parametrize("largest", [0, 1 << 22])
def test_a_large_place_is_given_up(largest, monkeypatch):
    monkeypatch.setattr(patch_lookahead, "_LARGEST", largest)
    model, x = sb.bayesianize(Tied(), METHODS["EMP"]).eval(), torch.randn(4, 6)
    counter = CompileCounter()
    torch._dynamo.reset()
    whole = sb.predict(model, x, samples=5, seed=1).draws
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        torch.testing.assert_close(sb.predict(compiled, x, samples=5, seed=1, chunk=4).draws, whole)
        kept = places_of(model).kept
        assert [one is None for one in kept] == [not largest]
        assert any("settled_token" in vars(module) for module in model.modules()) == bool(largest)
    assert counter.frame_count == 1


def test_no_memory_for_a_place_is_an_error_that_leaves_room_for_the_next(monkeypatch):
    model, x = sb.bayesianize(Tied(), METHODS["EMP"]).eval(), torch.randn(4, 6)
    whole = sb.predict(model, x, samples=5, seed=1).draws
    monkeypatch.setattr(patch_versions.Beside, "place", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sb.predict(model, x, samples=5, seed=1, chunk=4)
    monkeypatch.undo()
    torch.testing.assert_close(sb.predict(model, x, samples=5, seed=1, chunk=4).draws, whole)
    assert [one is not None for one in places_of(model).kept] == [True]


@pytest.mark.parametrize("failing", [2, 4])
def test_a_prediction_that_fails_leaves_the_place(failing):
    model, x = sb.bayesianize(Tied(), METHODS["EMP"]).eval(), torch.randn(4, 6)
    calls = []

    def fail(module, inputs, output):
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("stop")

    sb.predict(model, x, samples=2, seed=1, chunk=4)
    with model.register_forward_hook(fail), pytest.raises(RuntimeError, match="stop"):
        sb.predict(model, x, samples=5, seed=1, chunk=4)
    assert len(places_of(model).kept) == 1


def test_a_prediction_in_inference_mode_leaves_gradients_to_others():
    model, x = sb.bayesianize(Tied(), METHODS["EMP"]), torch.randn(4, 6)
    with torch.inference_mode():
        sb.predict(model, x, samples=3, seed=0, chunk=4)
        sb.draw(model, x, seed=0)
    sb.draw(model, x, seed=0).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_large_layer_of_one_index_leaves_room(monkeypatch):
    net = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.Linear(512, 1000))
    model, calls = sb.bayesianize(net, sb.EMP(5)).eval(), []
    made = patch_versions.keyed_uniforms
    monkeypatch.setattr(
        patch_versions, "keyed_uniforms", lambda *rest: calls.append(len(rest[3])) or made(*rest)
    )
    sb.predict(model, torch.randn(64, 64), samples=12, seed=0, chunk=64)
    assert calls == [12]


def test_no_memory_to_choose_ahead_is_one_pass_at_a_time(monkeypatch):
    torch.manual_seed(0)
    model, x = sb.bayesianize(Tied(), METHODS["EMP"]).eval(), torch.randn(4, 6)
    whole = sb.predict(model, x, samples=6, seed=9, noise="shared").draws
    made, calls = patch_versions.keyed_uniforms, []

    def short(*rest):
        calls.append(len(rest[3]))
        if len(rest[3]) > 2:
            raise torch.OutOfMemoryError("no memory left")
        return made(*rest)

    monkeypatch.setattr(patch_versions, "keyed_uniforms", short)
    cut = sb.predict(model, x, samples=6, seed=9, noise="shared", chunk=8)
    assert calls.count(6) == 1 and calls[0] == 6 and set(calls[1:]) == {2}, "tried once"
    torch.testing.assert_close(cut.draws, whole)


def test_weights_that_change_between_passes_are_chosen_from_anew():
    def predicted(**paths):
        torch.manual_seed(0)
        model = sb.bayesianize(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), sb.EMP(3, init_noise=0.5)
        ).eval()

        def change(module, inputs, output):
            with torch.no_grad():
                model[1].weight.mul_(1.5)

        model[1].register_forward_hook(change)
        with sb.fast_paths(**paths):
            return sb.predict(model, torch.ones(4, 6), samples=5, seed=9, chunk=4).draws

    torch.testing.assert_close(predicted(), predicted(factors=False))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("way", ["wrapped", "in place", "inside"])
def test_networks_that_write_their_outputs_to_the_same_place(way, keep):
    """As compiled to CUDA graphs they do; the outputs are few, so that those of several passes are held."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model, x = sb.bayesianize(net, sb.ECMP(3, init_noise=0.5)).eval(), torch.randn(4, 256)
    whole = sb.predict(model, x, samples=6, seed=9).mean

    def backend(graph, inputs):
        places = []

        def run(*args):
            outputs = graph(*args)
            places[:] = places or [torch.empty_like(output) for output in outputs]
            return [place.copy_(output) for place, output in zip(places, outputs, strict=True)]

        return run

    if way == "wrapped":
        model = torch.compile(model, backend=backend)
    elif way == "in place":
        model.compile(backend=backend)
    else:
        model[2].compile(backend=backend)
    with sb.fast_paths(late=False):
        found = sb.predict(model, x, samples=6, seed=9, chunk=4, keep_draws=keep)
    torch.testing.assert_close(found.mean, whole)


def test_memory_that_ends_in_the_middle_leaves_the_draws_as_they_are(monkeypatch):
    torch.manual_seed(0)
    model, x = sb.bayesianize(Tied(), METHODS["ECMP"]).eval(), torch.randn(4, 6)
    whole = sb.predict(model, x, samples=6, seed=9, noise="shared").draws
    output, rows = model.output.forward, []

    def short(inputs):
        rows.append(len(inputs))
        if len(inputs) > 8 and len(rows) > 1:
            raise torch.OutOfMemoryError("no memory left")
        return output(inputs)

    monkeypatch.setattr(model.output, "forward", short)
    cut = sb.predict(model, x, samples=6, seed=9, noise="shared", chunk=12)
    assert rows[0] == 12 and set(rows[2:]) <= {4, 8}
    torch.testing.assert_close(cut.draws, whole)


def test_draws_without_a_seed_are_left_alone(monkeypatch):
    monkeypatch.setattr(patch_versions, "keyed_uniforms", lambda *rest: pytest.fail("no seed"))
    model = sb.bayesianize(Tied(), METHODS["ECMP"])
    for options in ({}, {"noise": "mean", "seed": 1}):
        sb.draw(model, torch.randn(4, 6), **options)
