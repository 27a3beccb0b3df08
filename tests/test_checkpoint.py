"""Saved and loaded bit for bit, written whole or not at all, and nothing damaged ever loads."""

import copy
import json
import os
import pickle

import pytest
import torch
from helpers_networks import METHODS, convert, images, mlp, residual_net, trained_step
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import slimbayes as sb
from slimbayes.verbs import checkpoint


def same_state(first, second):
    a, b = first.state_dict(), second.state_dict()
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def rebuilt(model, build, path, **load):
    sb.save(model, path)
    again = sb.load(build(), path, **load)
    same_state(model, again)
    return again


# Round trips


@pytest.mark.oldest
@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_round_trips_bit_for_bit(method, tmp_path):
    model = convert(residual_net, METHODS[method]()).train()
    trained_step(model, (images(),), torch.tensor([0, 1, 2, 0]))  # moves BatchNorm's statistics too
    again = rebuilt(model, residual_net, tmp_path / "net.safetensors")
    assert sb.summary(again).rows == sb.summary(model).rows
    assert sb.summary(again).base_parameters == sb.summary(model).base_parameters
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    x = images()
    for noise in ("example", "shared", "mean"):
        expected = sb.draw(model.eval(), x, samples=2, noise=noise, seed=3)
        assert torch.equal(sb.draw(again.eval(), x, samples=2, noise=noise, seed=3), expected)
    assert torch.equal(sb.kl(again), sb.kl(model))
    sb.load(again, tmp_path / "net.safetensors")  # into a model converted in the same way, too
    same_state(model, again)
    rebuilt(again, residual_net, tmp_path / "again.safetensors")
    first, second = ((tmp_path / name).read_bytes() for name in ("net.safetensors", "again.safetensors"))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["rank1", "ktied", "emp", "deep_ensemble"])
def test_dtypes(method, dtype, tmp_path):
    model = sb.bayesianize(residual_net().to(dtype), METHODS[method]())
    rebuilt(model, lambda: residual_net().to(dtype), tmp_path / "net.safetensors")


OPTIONS = {
    "cauchy prior": sb.Rank1(
        2, posterior="cauchy", prior=sb.Cauchy(1.0, 0.005), kl_reduction="mean", clip=None
    ),
    "half-cauchy": sb.Rank1(2, posterior="halfcauchy", prior=sb.HalfCauchy(0.5, 0.1)),
    "lognormal": sb.Rank1(2, posterior="lognormal", prior=sb.LogNormal(0.0, 0.2), factors="input"),
    "random": sb.Rank1(2, posterior="cauchy", random="input"),
    "subset": sb.Rank1(4, components_per_step=2, train_base=False, random_sign_init=0.75),
    "he": sb.MeanField(
        prior=sb.HeNormal(), estimator="flipout", biases=False, tied_mean=True, stddev_max=0.2
    ),
    "ktied": sb.KTied(rank=3, prior=sb.Normal(0.0, 0.2), estimator="local"),
    "learned mixing": sb.EMP(3, patch=("norm", "input"), learn_mixing=True, prior_precision=0.5),
    "types": sb.ECMP(3, patch=(nn.Conv2d, "output"), init_noise=0.1),
    "callable": sb.EMP(3, patch=(lambda name, module: name.endswith("conv2"),)),
    "channel": sb.MCDropout(rate=0.05, granularity="channel"),
    "copies": sb.DeepEnsemble(members=2, reinitialize=False),
    "own start": sb.DeepEnsemble(members=2, reinitialize=lambda member: None),
}


@pytest.mark.oldest
@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_round_trip(name, tmp_path):
    model = convert(residual_net, OPTIONS[name])
    again = rebuilt(model, residual_net, tmp_path / "net.safetensors")
    assert [(r.name, r.method) for r in sb.summary(again).rows] == [
        (r.name, r.method) for r in sb.summary(model).rows
    ]
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    torch.manual_seed(1)
    expected = sb.draw(model.eval(), images(), seed=1)
    assert torch.equal(sb.draw(again.eval(), images(), seed=1), expected)
    torch.testing.assert_close(sb.kl(again), sb.kl(model), rtol=0, atol=0)
    if name != "callable":
        patches = {
            "types": ("0", "1.0.conv1", "1.0.conv2", "1.1.0.conv1", "1.1.0.conv2", "1.1.0.shortcut", "2.3")
        }
        method = again._slimbayes.methods[0]
        expected_method = OPTIONS[name]
        for field in vars(expected_method):
            value = getattr(expected_method, field)
            value = patches[name] if field == "patch" and name in patches else value
            value = True if callable(value) else value
            assert getattr(method, field) == value, field


def test_rules_partial_selections_and_parts(tmp_path):
    rules = [
        (nn.BatchNorm2d, sb.EMP(components=3, patch=(nn.BatchNorm2d,))),
        (r"shortcut", sb.Deterministic()),
        (nn.Conv2d, sb.Rank1(components=2)),
        (r"^2\.", sb.KTied()),
    ]
    for method, options in (
        (rules, {}),
        (sb.Rank1(components=2), {"include": "conv1"}),
        (sb.MeanField(), {"exclude": [nn.Linear]}),
        (sb.DeepEnsemble(members=2), {"include": r"^1\.0$"}),
        ([(r"^1\.0$", sb.DeepEnsemble(members=2)), (nn.Linear, sb.BatchEnsemble(2))], {}),
        ([(None, sb.Deterministic())], {}),
    ):
        model = convert(residual_net, method, **options)
        again = rebuilt(model, residual_net, tmp_path / "net.safetensors")
        assert torch.equal(sb.draw(again.eval(), images(), seed=1), sb.draw(model.eval(), images(), seed=1))
        same_state(sb.load(again, tmp_path / "net.safetensors"), model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.again(torch.relu(self.first(self.table(ids)))))


@pytest.mark.parametrize("method", ["rank1", "meanfield", "ktied", "emp", "drop_connect", "deep_ensemble"])
def test_tied_tensors_are_stored_once_and_stay_tied(method, tmp_path):
    path = tmp_path / "tied.safetensors"
    model = convert(Tied, METHODS[method]())
    again = rebuilt(model, Tied, path)
    assert again.head.weight is again.table.weight
    assert again.first is again.again
    with safe_open(path, framework="pt") as file:
        stored = [name for name in file.keys() if "bayes" not in name and "weight" in name]  # noqa: SIM118
    assert stored == ["first.weight", "table.weight"]
    ids = torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sb.draw(again, ids, seed=1), sb.draw(model, ids, seed=1))


def test_other_layouts_and_wrappers(tmp_path):
    path = tmp_path / "deep" / "er" / "net.safetensors"  # folders are made
    model = convert(residual_net, sb.Rank1(components=2)).to(memory_format=torch.channels_last)
    rebuilt(model, residual_net, path)
    compiled = torch.compile(model, backend="eager")
    sb.save(compiled, str(path))
    same_state(sb.load(residual_net(), str(path)), model)
    plain = residual_net()
    wrapped = torch.compile(plain, backend="eager")
    assert sb.load(wrapped, path) is wrapped
    same_state(plain, model)
    # A state_dict entry without elements, a scalar buffer and an integer one.
    odd = convert(mlp, sb.Rank1(components=2))
    odd.register_buffer("empty", torch.zeros(0, 3))
    odd.register_buffer("flag", torch.tensor(True))

    def build():
        network = mlp()
        network.register_buffer("empty", torch.zeros(0, 3))
        network.register_buffer("flag", torch.tensor(False))
        return network

    rebuilt(odd, build, path)


def test_loading_uses_no_global_randomness(tmp_path):
    for method in METHODS:
        path = tmp_path / "net.safetensors"
        sb.save(convert(mlp, METHODS[method]()), path)
        network = mlp()
        state = torch.get_rng_state()
        sb.load(network, path)
        assert torch.equal(torch.get_rng_state(), state), method


def test_loading_executes_no_code(tmp_path):
    """Names of methods and priors come from closed tables; the file is tensors and JSON."""
    path = tmp_path / "net.safetensors"
    sb.save(convert(mlp, sb.Rank1()), path)
    assert b"builtins" not in path.read_bytes()
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["slimbayes"])
    assert set(header) == {"format", "architecture", "methods", "layers", "dropouts", "aliases", "sha256"}


# Written whole or not at all


@pytest.mark.parametrize("stage", ["serialize", "replace", "fsync"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(stage, existing, tmp_path, monkeypatch):
    path = tmp_path / "net.safetensors"
    old = convert(mlp, sb.Rank1(components=2), seed=1)
    if existing:
        sb.save(old, path)
        before = path.read_bytes()

    def fails(*args, **kwargs):
        raise OSError("disk full")

    if stage == "serialize":
        monkeypatch.setattr(checkpoint, "serialize", fails)
    else:
        monkeypatch.setattr(os, stage, fails)
    with pytest.raises(OSError, match="disk full"):
        sb.save(convert(mlp, sb.Rank1(components=2), seed=2), path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["net.safetensors"] if existing else [])
    if existing:
        assert path.read_bytes() == before
        same_state(sb.load(mlp(), path), old)


def test_an_interrupt_leaves_no_partial_file(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sb.save(convert(mlp, sb.Rank1()), tmp_path / "net.safetensors")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_saved():
    with pytest.raises(ValueError, match=r"has not been converted; call sb\.bayesianize"):
        sb.save(mlp(), "never.safetensors")
    wrapper = nn.Sequential(convert(mlp, sb.Rank1()))
    with pytest.raises(sb.CheckpointError, match="only a part of this model was converted: save that part"):
        sb.save(wrapper, "never.safetensors")

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"python": object()}

        def set_extra_state(self, state):
            pass

    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 3), Extra(3, 2)), sb.Rank1())
    with pytest.raises(sb.CheckpointError, match=r"'1\._extra_state' is not a tensor \(dict\)"):
        sb.save(model, "never.safetensors")
    assert not os.path.exists("never.safetensors")


# Damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "net.safetensors"
    model = convert(mlp, sb.Rank1(components=2, posterior="cauchy"))
    sb.save(model, path)
    return path, path.read_bytes(), model


def refuses(path, match=None):
    network = mlp()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(sb.CheckpointError, match=match) as caught:
        sb.load(network, path)
    assert str(path) in str(caught.value)
    assert not hasattr(network, "_slimbayes")
    assert type(network[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_truncated_files(saved, tmp_path):
    _, data, _ = saved
    path = tmp_path / "cut.safetensors"
    lengths = {0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, *range(0, len(data), len(data) // 60)} - {
        len(data)
    }
    for length in lengths:
        path.write_bytes(data[:length])
        refuses(path, "not a whole safetensors file|damaged")
    path.write_bytes(data + b"\0")
    refuses(path)


def test_flipped_bits_anywhere(saved, tmp_path):
    """Every byte of the length and header has one bit flipped, and every seventh of the tensors."""
    _, data, _ = saved
    path = tmp_path / "flipped.safetensors"
    end = 8 + int.from_bytes(data[:8], "little")
    network = mlp()
    for position in (*range(0, end, 3), *range(end, len(data), 7), len(data) - 1):
        for bit in (0, 5) if position % 2 else (2, 7):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(sb.CheckpointError):
                sb.load(network, path)
    assert type(network[0]) is nn.Linear


def tampered(path, target, change, sign=True):
    """Write a copy whose JSON header was changed, with a checksum that fits it when ``sign``."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["slimbayes"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = change(header) or header
    if sign and isinstance(header, dict):
        header["sha256"] = checkpoint._digest(header, tensors)
    save_file(
        tensors, target, metadata={"slimbayes": header if isinstance(header, str) else json.dumps(header)}
    )


CHANGES = {
    "rate": lambda h: h["methods"][0]["options"].update(dropout_rate=0.5),
    "layers": lambda h: h["layers"].pop("0"),
    "architecture": lambda h: h.update(architecture="Other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_headers_do_not_match_their_checksum(saved, tmp_path, change):
    path = tmp_path / "changed.safetensors"
    tampered(saved[0], path, CHANGES[change], sign=False)
    refuses(path, "do not match their checksum.*earlier checkpoint")


FORGERIES = {
    "no methods": (lambda h: h.pop("methods") and None, "header .* is damaged"),
    "no layers": (lambda h: h.pop("layers") and None, "header .* is damaged"),
    "no aliases": (lambda h: h.pop("aliases") or None, "header .* is damaged"),
    "layers of another type": (lambda h: h.update(layers=["0", "3"]), "header .* is damaged"),
    "rule out of range": (lambda h: h.update(layers={"0": 9}), "header .* is damaged"),
    "alias of nothing": (lambda h: h.update(aliases={"a": "b"}), "header .* is damaged"),
    "not JSON": (lambda h: "{", "header .* is damaged"),
    "a list": (lambda h: "[1, 2]", "header .* is damaged"),
    "a number": (lambda h: "7", "header .* is damaged"),
    "later format": (
        lambda h: h.update(format=2, methods=None),
        "has format 2, and this version reads 1: update",
    ),
    "unknown method": (
        lambda h: h["methods"][0].update(name="os.system"),
        "names a method that this version does not know.*os.system",
    ),
    "unknown option": (lambda h: h["methods"][0]["options"].update(rm=1), "does not know"),
    "wrong option": (lambda h: h["methods"][0]["options"].update(components="two"), "does not know"),
    "unknown prior": (
        lambda h: h["methods"][0]["options"].update(prior={"family": "Uniform"}),
        "does not know",
    ),
    "a layer fewer": (lambda h: h["layers"].pop("3") and None, "does not fit this network"),
    "another layer": (lambda h: h["layers"].update({"9": 0}), r"layers \['9'\] are not in the network"),
    "more components": (
        lambda h: h["methods"][0]["options"].update(components=3),
        "does not fit this network.*of another shape",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_headers_with_a_fitting_checksum(saved, tmp_path, forgery):
    change, match = FORGERIES[forgery]
    path = tmp_path / "forged.safetensors"
    tampered(saved[0], path, change)
    refuses(path, match)


def test_other_kinds_of_files(saved, tmp_path):
    path = tmp_path / "other"
    save_file(mlp().state_dict(), path)
    refuses(path, "was not written by sb.save; load plain weights with load_state_dict")
    torch.save(mlp().state_dict(), path)
    refuses(path, "not a whole safetensors file")
    path.write_bytes(pickle.dumps({"a": 1}))
    refuses(path, "not a whole safetensors file")
    path.write_text("{}")
    refuses(path, "not a whole safetensors file")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*missing"):
        sb.load(mlp(), tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        sb.load(mlp(), tmp_path)
    with pytest.raises(TypeError, match="load takes the plain network and a path, got "):
        sb.load(saved[0], mlp())


# Another network or method


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: mlp(inputs=5), r"another architecture \(Sequential\).*shapes differ: 0.weight \(8, 5\)"),
        (lambda: nn.Linear(3, 2), r"than the given Linear: layers \['0', '3'\] are not in the network"),
        (
            lambda: nn.Sequential(*mlp(), nn.Linear(2, 2)),
            r"tensors \['4.weight', '4.bias'\] are not in the ch",
        ),
        (lambda: mlp()[:1], "layers .'3'. are not in the network"),
    ],
)
def test_another_architecture(saved, build, match):
    network = build()
    state = copy.deepcopy(network.state_dict())
    with pytest.raises(sb.CheckpointError, match=match):
        sb.load(network, saved[0])
    assert not hasattr(network, "_slimbayes")
    assert all(torch.equal(network.state_dict()[name], value) for name, value in state.items())


def test_a_larger_checkpoint_leaves_the_network_plain(tmp_path):
    path = tmp_path / "large.safetensors"
    sb.save(convert(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), sb.Rank1(), include="^0"), path)
    network = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(sb.CheckpointError, match=r"not in the network \['1.bias', '1.weight'\]"):
        sb.load(network, path)
    assert type(network[0]) is nn.Linear
    assert not hasattr(network, "_slimbayes")


@pytest.mark.parametrize("method", [sb.Rank1(2), sb.BatchEnsemble(2), sb.MeanField(), sb.Deterministic()])
def test_another_method(saved, method):
    network = convert(mlp, method)
    state = copy.deepcopy(network.state_dict())
    with pytest.raises(
        sb.CheckpointError, match=rf"converted by Rank1.*already converted by {type(method).__name__}"
    ):
        sb.load(network, saved[0])
    assert all(torch.equal(network.state_dict()[name], value) for name, value in state.items())
    fewer = convert(mlp, sb.Rank1(components=2, posterior="cauchy"), include="^0")
    with pytest.raises(sb.CheckpointError, match="with other options or layers; pass the plain network"):
        sb.load(fewer, saved[0])


def test_a_network_without_memory_is_refused(saved):
    with torch.device("meta"):
        network = mlp()
    with pytest.raises(sb.CheckpointError, match=r"meta device.*to_empty"):
        sb.load(network, saved[0])


def test_old_plain_weights_load_with_load_state_dict():
    """From before the conversion: every component starts from them, and no key is unexpected."""
    plain = residual_net()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1)
    for method in METHODS:
        model = convert(residual_net, METHODS[method]())
        result = model.load_state_dict(plain.state_dict(), strict=False)
        assert not result.unexpected_keys, method
        for name, value in plain.state_dict().items():
            now = model.state_dict()[name]
            assert torch.equal(now, value.expand_as(now)), (method, name)
