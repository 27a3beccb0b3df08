"""Selection, rules, retyping in place, what is left alone, ensembles, and failures that leave no trace."""

import copy
import warnings

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, quiet, residual_net, trained_step
from torch import nn

import slimbayes as sb
from slimbayes.core.layers.base import Converted
from slimbayes.sequences.kernels import Several


def net():
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.LayerNorm(4),
        nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        nn.Linear(4, 2),
    )


def converted_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, Converted | Several)]


# Selection


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, ["0", "2.1", "2.2", "3"]),
        ("^2", None, ["2.1", "2.2"]),
        (r"\.", None, ["2.1", "2.2"]),
        (["0", "^3$"], None, ["0", "3"]),
        (nn.Linear, None, ["0", "2.1", "2.2", "3"]),
        (nn.Linear, r"^2\.", ["0", "3"]),
        (None, r"^2\.", ["0", "3"]),
        (None, ["0", lambda name, m: m.bias is None], ["2.1", "3"]),
        (lambda name, module: getattr(module, "out_features", 0) == 2, None, ["3"]),
        ((nn.Linear, "nothing"), (nn.LayerNorm, "3"), ["0", "2.1", "2.2"]),
        (["2.1", nn.Linear], None, ["0", "2.1", "2.2", "3"]),
    ],
)
def test_include_and_exclude(include, exclude, expected):
    model = sb.bayesianize(net(), sb.Rank1(), include=include, exclude=exclude)
    assert converted_names(model) == expected
    assert [row.name for row in sb.summary(model).rows] == expected
    left = {name for name, _, _ in sb.summary(model).left_alone}
    assert left == {"0", "1", "2.1", "2.2", "3"} - set(expected)


@pytest.mark.parametrize("selection", ["generator", "set"])
def test_selections_may_be_any_iterable(selection):
    made = (s for s in ["^0", "^3"]) if selection == "generator" else {"^0", "^3"}
    assert converted_names(sb.bayesianize(net(), sb.Rank1(), include=made)) == ["0", "3"]


def test_default_selection_by_method():
    """Layers with a weight matrix; EMP and ECMP their patch; norms and embeddings only when included."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.conv = nn.Conv1d(4, 4, 1)
            self.norm = nn.GroupNorm(2, 4)
            self.affineless = nn.LayerNorm(4, elementwise_affine=False)
            self.out = nn.Linear(4, 2)
            self.act = nn.PReLU()

        def forward(self, ids):
            x = self.norm(self.conv(self.table(ids).transpose(1, 2))).mean(2)
            return self.out(self.act(self.affineless(x)))

    for name, method in METHODS.items():
        expected = {
            "emp": ["norm", "out"],
            "ecmp": ["norm", "out"],
            "deep_ensemble": [],
            "deterministic": [],
        }.get(name, ["conv", "out"])
        assert converted_names(sb.bayesianize(Mixed(), method())) == expected, name
    model = sb.bayesianize(Mixed(), sb.MeanField(), include=[nn.Embedding, nn.GroupNorm, "conv"])
    assert converted_names(model) == ["table", "conv", "norm"]
    for patch, expected in (
        (("input",), ["table"]),
        (("output",), ["out"]),
        (("norm",), ["norm"]),
        (("conv", nn.Linear), ["conv", "out"]),
        ((lambda name, m: "n" in name and hasattr(m, "weight"),), ["conv", "norm", "affineless"]),
    ):
        emp = sb.EMP(patch=patch)
        if "affineless" in expected:
            with pytest.raises(ValueError, match=r"'affineless' .LayerNorm. has no affine parameters"):
                sb.bayesianize(Mixed(), emp)
        else:
            assert converted_names(sb.bayesianize(Mixed(), emp)) == expected


def test_root_module_can_be_the_layer():
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=2))
    assert sb.draw(model, features()).shape == (2, 4, 2)
    assert sb.summary(model).rows[0].name == ""
    assert "(root)" in str(sb.summary(model))


# Retyping in place


@pytest.mark.parametrize("method", METHODS)
def test_conversion_in_place_keeps_identity_keys_and_hooks(method):
    model = residual_net()
    keys = list(model.state_dict())
    modules = {name: id(m) for name, m in model.named_modules()}
    calls = []
    model[0].register_forward_hook(lambda m, a, y: calls.append("hook"))
    model[0].register_forward_pre_hook(lambda m, a: calls.append("pre"))
    model.marker = "kept"
    same = sb.bayesianize(model, METHODS[method]())
    assert same is model
    assert set(keys) <= set(model.state_dict())
    kept = {name: id(m) for name, m in model.named_modules() if name in modules}
    assert kept == modules
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], nn.Conv2d)
    assert model.marker == "kept"
    with torch.no_grad():
        sb.draw(model.eval(), images())
    assert calls.count("hook") == calls.count("pre") > 0


def test_weights_are_kept_and_new_parameters_follow_dtype():
    for dtype in (torch.float64, torch.bfloat16):
        plain = residual_net().to(dtype)
        for name, method in METHODS.items():
            model = sb.bayesianize(copy.deepcopy(plain), method())
            assert {p.dtype for p in model.parameters()} == {dtype}, name
            assert sb.draw(model, images().to(dtype)).dtype == dtype, name
    plain = net()
    model = sb.bayesianize(copy.deepcopy(plain), sb.MeanField())
    assert all(torch.equal(model.get_parameter(n), p) for n, p in plain.named_parameters())


def test_subclasses_are_left_alone():
    class Mine(nn.Linear):
        pass

    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 3), Mine(3, 2)), sb.Rank1(components=2))
    assert converted_names(model) == ["0"]
    assert type(model[1]) is Mine
    assert sb.draw(model, features()).shape == (2, 4, 2)


# Rules


def test_rules_mix_methods_in_one_network():
    rules = [
        (nn.BatchNorm2d, sb.EMP(components=3, patch=(nn.BatchNorm2d,), init_noise=0.1)),
        (nn.Conv2d, sb.Rank1(components=2)),
        (r"^2\.", sb.KTied(rank=2)),
    ]
    model = convert(residual_net, rules)
    by_method = {}
    for row in sb.summary(model).rows:
        by_method.setdefault(row.method, set()).add(row.layer)
    assert by_method == {"EMP": {"BatchNorm2d"}, "Rank1": {"Conv2d"}, "KTied": {"Linear"}}
    assert sb.draw(model, images(), samples=3).shape == (6, 4, 3)
    assert sb.kl(model) > 0
    changed, _ = trained_step(model, (images(),), torch.tensor([0, 1, 2, 0]), samples=4)
    assert changed == {name for name, _ in model.named_parameters()}
    sb.predict(model, images(), samples=2, chunk=4)


def test_the_first_matching_rule_wins():
    rules = [("^3", sb.MeanField()), (nn.Linear, sb.Rank1(components=2)), (nn.LayerNorm, sb.MeanField())]
    model = sb.bayesianize(net(), rules, exclude=r"2\.1")
    methods = {row.name: row.method for row in sb.summary(model).rows}
    assert methods == {"0": "Rank1", "1": "MeanField", "2.2": "Rank1", "3": "MeanField"}
    deterministic = sb.bayesianize(net(), [("^3", sb.Deterministic()), (None, sb.Rank1(components=2))])
    assert converted_names(deterministic) == ["0", "2.1", "2.2"]
    assert ("3", "Linear", "deterministic") in sb.summary(deterministic).left_alone


def test_components_of_rules_must_agree():
    rules = [("^0", sb.Rank1(components=2)), ("^3", sb.BatchEnsemble(components=3))]
    with pytest.raises(ValueError, match=r"different numbers of components \(2, 3\).*same number"):
        sb.bayesianize(net(), rules)
    agreeing = [
        ("^0", sb.Rank1(components=3)),
        ("^2", sb.DeepEnsemble(members=3)),
        ("^3", sb.EMP(components=5)),
    ]
    model = sb.bayesianize(net(), agreeing)
    assert sb.draw(model, features(), samples=2).shape == (6, 4, 2)
    mixed = [("^0", sb.Rank1(components=3, components_per_step=2)), ("^2", sb.DeepEnsemble(members=3))]
    with pytest.raises(ValueError, match=r"components_per_step .* cannot be mixed with DeepEnsemble"):
        sb.bayesianize(net(), mixed)
    steps = [("^0", sb.Rank1(3, components_per_step=2)), ("^3", sb.Rank1(3, components_per_step=1))]
    with pytest.raises(ValueError, match="components_per_step must be the same in all rules"):
        sb.bayesianize(net(), steps)


# Frozen bases and subsets of components


def test_train_base_false_freezes_everything_but_the_factors():
    model = convert(residual_net, sb.Rank1(components=2, train_base=False))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert all(name.endswith((".loc", ".rho")) for name in trainable)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if n not in trainable}
    changed, _ = trained_step(model, (images(),), torch.tensor([0, 1, 2, 0]))
    assert changed == trainable
    assert all(torch.equal(model.get_parameter(n), p) for n, p in frozen.items())
    assert sb.summary(model).trainable == sum(model.get_parameter(n).numel() for n in trainable)


def test_components_per_step():
    method = sb.Rank1(components=4, components_per_step=2)
    model = convert(mlp, method).train()
    whole = convert(mlp, sb.Rank1(components=4)).train()
    x, y = features(), torch.tensor([0, 1, 0, 1])
    assert sb.draw(model, x, samples=3).shape == (6, 4, 2)
    torch.testing.assert_close(sb.kl(model), sb.kl(whole))
    # One step of the likelihood alone touches two components, and over steps all of them.
    touched = torch.zeros(4, dtype=torch.bool)
    torch.manual_seed(0)
    for _ in range(12):
        model.zero_grad()
        sb.elbo(sb.draw(model, x), y, model, num_data=4, kl_weight=0.0).loss.backward()
        now = model[0].bayes.r.loc.grad.abs().sum(1) > 0
        assert int(now.sum()) == 2
        assert torch.equal(model[3].bias.grad.abs().sum(1) > 0, now)
        touched |= now
    assert touched.all()
    # The chosen components are the model's own: outputs match those of the full draw, component by component.
    model.eval()
    full = sb.draw(model, x, seed=5)
    assert full.shape == (4, 4, 2)
    model.train()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.eval()
    state = torch.get_rng_state()
    subset = sb.draw(model, x, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    matches = [[k for k in range(4) if torch.allclose(draw, full[k], atol=1e-6)] for draw in subset]
    assert [len(m) for m in matches] == [1, 1]
    assert matches[0] != matches[1]
    chosen = set()
    for seed in range(12):
        part = sb.draw(model, x, seed=seed, noise="mean")
        assert torch.equal(part, sb.draw(model, x, seed=seed, noise="mean"))
        chosen.add(round(float(part.detach().sum()), 4))
    assert len(chosen) > 2


# Layers without a converted class


class OwnLSTM(nn.LSTM):
    """A class of the user's, whose forward pass may be anything."""


class OwnAttention(nn.MultiheadAttention):
    """Likewise."""


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = OwnLSTM(3, 4, batch_first=True)
        self.attention = OwnAttention(4, 2, batch_first=True)
        self.cell = nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.head(self.cell(x[:, -1]))


@pytest.mark.parametrize("method", ["rank1", "meanfield", "mc_dropout", "drop_connect"])
def test_derived_layers_are_left_alone_with_a_warning(method):
    with pytest.warns(
        UserWarning, match=r"left alone: lstm \(OwnLSTM\), attention \(OwnAttention\)"
    ) as caught:
        model = sb.bayesianize(Sequence(), METHODS[method]())
    assert caught[0].filename == __file__
    assert converted_names(model) == ["cell", "head"]
    left = {name: (kind, why) for name, kind, why in sb.summary(model).left_alone}
    assert set(left) == {"lstm", "attention"}
    assert left["lstm"][0] == "OwnLSTM"
    assert "no converted class yet" in left["lstm"][1]
    assert "left alone" in str(sb.summary(model))
    assert sb.draw(model, torch.randn(4, 5, 3), samples=2).shape[1:] == (4, 2)


@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_derived_layers_that_are_included_raise(name):
    kind = type(getattr(Sequence(), name)).__name__
    with pytest.raises(
        TypeError, match=rf"Rank1 cannot convert layer '{name}' of type {kind}.*exclude='{name}'"
    ):
        sb.bayesianize(Sequence(), sb.Rank1(), include=name)


def test_excluding_them_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.bayesianize(Sequence(), sb.Rank1(), exclude="lstm|attention|cell")
        sb.bayesianize(Sequence(), sb.EMP())
        sb.bayesianize(Sequence(), sb.DeepEnsemble())


# MCDropout and the network's own dropout modules


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (4, 6)),
        (nn.Dropout1d, (4, 6, 5)),
        (nn.Dropout2d, (4, 6, 5, 5)),
        (nn.Dropout3d, (4, 6, 3, 3, 3)),
    ],
)
def test_own_dropout_is_active_in_draws_and_silent_at_the_mean(kind, shape):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = kind(0.5)
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return self.drop(x)

    model = sb.bayesianize(Net(), sb.MCDropout(rate=0.0))
    x = torch.ones(shape)
    for mode in ("train", "eval"):
        getattr(model, mode)()
        draws = sb.draw(model, x, samples=50, seed=1)
        assert set(draws.unique().tolist()) == {0.0, 2.0}
        assert abs(float(draws.mean()) - 1.0) < 0.1
        if kind is not nn.Dropout:  # whole channels
            flat = draws.flatten(3)
            assert torch.equal(flat, flat[..., :1].expand_as(flat))
        assert torch.equal(sb.draw(model, x, noise="mean")[0], x)
        shared = sb.draw(model, x, noise="shared")
        assert torch.equal(shared, shared[:, :1].expand_as(shared))
    assert "p=0.5" in repr(model.drop)


def test_without_mc_dropout_own_dropout_keeps_torchs_meaning():
    model = convert(residual_net, sb.BatchEnsemble(components=2)).eval()
    assert torch.equal(sb.draw(model, images()), sb.draw(model, images()))
    assert type(model[2][2]) is nn.Dropout


# DeepEnsemble


def test_members_are_independent_networks():
    plain = residual_net()
    with torch.no_grad():
        plain[1][0].norm.running_mean.fill_(0.5)
    model = sb.bayesianize(copy.deepcopy(plain), sb.DeepEnsemble(members=3))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[0], plain.get_parameter(name))
    weights = model[0].weight
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    statistics = model[1][0].norm.running_mean
    assert statistics.shape == (3, 4)
    assert torch.equal(statistics[0], plain[1][0].norm.running_mean)
    assert torch.equal(statistics[1], torch.zeros(4))  # re-initialised too
    # In train mode every member normalises by its own rows and keeps its own statistics.
    members = []
    for k in range(3):
        member = residual_net()
        member.load_state_dict({name: value[k] for name, value in model.state_dict().items()})
        members.append(member.train())
    model.train()
    for module in [model[2][2], *(m[2][2] for m in members)]:
        module.p = 0.0
    for _ in range(2):
        draws = sb.draw(model, images())
        expected = torch.stack([member(images()) for member in members])
    torch.testing.assert_close(draws, expected, rtol=1e-6, atol=1e-6)
    for k, member in enumerate(members):
        for name, buffer in member.named_buffers():
            torch.testing.assert_close(model.get_buffer(name)[k], buffer, rtol=1e-6, atol=1e-6)
    draws.sum().backward()
    torch.stack([member(images()) for member in members]).sum()
    assert all(p.grad is not None for p in model.parameters())


def test_custom_reinitialisation_and_copies():
    def constant(member):
        for parameter in member.parameters():
            nn.init.constant_(parameter, 0.25)

    model = sb.bayesianize(net(), sb.DeepEnsemble(members=3, reinitialize=constant))
    for parameter in model.parameters():
        assert not (parameter[0] == 0.25).all()
        assert (parameter[1:] == 0.25).all()
    copies = sb.bayesianize(net(), sb.DeepEnsemble(members=2, reinitialize=False))
    assert all(torch.equal(p[0], p[1]) for p in copies.parameters())


class Parametric(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale


def test_modules_that_cannot_be_reset_raise():
    model = nn.Sequential(Parametric(), nn.Linear(3, 2))
    with pytest.raises(
        ValueError, match=r"Parametric holds parameters but no reset_parameters.*reinitialize="
    ):
        sb.bayesianize(model, sb.DeepEnsemble())
    assert type(model) is nn.Sequential
    assert model[1].weight.shape == (2, 3)
    sb.bayesianize(model, sb.DeepEnsemble(members=2, reinitialize=False))
    assert sb.draw(model, features()).shape == (2, 4, 2)


def test_modules_that_cannot_be_copied_raise():
    model = nn.Sequential(nn.Linear(3, 2))
    model.handle = (i for i in range(3))  # generators cannot be copied
    with pytest.raises(TypeError, match="generator"):
        sb.bayesianize(model, sb.DeepEnsemble(members=2))
    assert model[0].weight.shape == (2, 3)


def test_reset_reaches_children_that_a_modules_own_reset_forgets():
    """nn.MultiheadAttention's reset leaves out_proj.weight as it is; members must still differ."""
    with quiet():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = sb.bayesianize(layer, sb.DeepEnsemble(members=2))
    for name, parameter in model.named_parameters():
        if parameter[0].dim() > 1:
            assert not torch.equal(parameter[0], parameter[1]), name

    class Own(nn.Module):
        """Resets the whole tree by a rule of its own."""

        def __init__(self):
            super().__init__()
            self.part = Parametric()
            self.layer = nn.Linear(3, 3)

        def reset_parameters(self):
            nn.init.constant_(self.part.scale, 7.0)
            nn.init.constant_(self.layer.weight, 3.0)

        def forward(self, x):
            return self.layer(self.part(x))

    model = sb.bayesianize(Own(), sb.DeepEnsemble(members=2))
    assert (model.part.scale[1] == 7.0).all()
    assert (model.layer.weight[1] == 3.0).all()


def test_ensemble_of_a_part():
    model = convert(net, sb.DeepEnsemble(members=2), include="^2$")
    assert [row.name for row in sb.summary(model).rows] == ["2"]
    assert model[0].weight.shape == (4, 3)
    assert model[2][1].weight.shape == (2, 4, 4)
    x = features()
    hidden = model[1](model[0](x))
    members = []
    for k in range(2):
        h = torch.relu(hidden) @ model[2][1].weight[k].t() + model[2][1].bias[k]
        members.append(model[3](h @ model[2][2].weight[k].t()))
    torch.testing.assert_close(sb.draw(model, x), torch.stack(members), rtol=1e-5, atol=1e-6)
    several = convert(net, sb.DeepEnsemble(members=2), include=[nn.Linear], exclude="^0")
    assert [row.name for row in sb.summary(several).rows] == ["2.1", "2.2", "3"]
    with pytest.raises(ValueError, match="exclude needs include"):
        sb.bayesianize(net(), sb.DeepEnsemble(), exclude="0")


def test_ensemble_of_a_part_cannot_break_a_tie():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    with pytest.raises(ValueError, match=r"'weight' of module 'b' is tied to 'weight' of module 'a'.*untie"):
        sb.bayesianize(Tied(), sb.DeepEnsemble(members=2), include="^b$")
    whole = sb.bayesianize(Tied(), sb.DeepEnsemble(members=2))
    assert whole.a.weight is whole.b.weight
    assert sb.draw(whole, features()).shape == (2, 4, 3)


# Failures leave no trace


def snapshot(model):
    return (
        [(name, type(m), id(m), sorted(vars(m))) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad, tuple(p.shape)) for name, p in model.named_parameters()],
        {name: value.clone() for name, value in model.state_dict().items()},
    )


@pytest.mark.parametrize(
    "failure",
    ["no match", "unsupported", "tie", "second part cannot be reset", "later rule", "warning", "no affine"],
)
def test_a_failed_conversion_leaves_the_model_as_it_was(failure):
    model, arguments = net(), {}
    if failure == "no match":
        method, arguments = sb.Rank1(train_base=False), {"include": "nothing"}
    elif failure == "unsupported":
        model, method, arguments = Sequence(), sb.Rank1(), {"include": [nn.Linear, OwnLSTM]}
    elif failure == "tie":
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        method = sb.MeanField(estimator="local")
    elif failure == "second part cannot be reset":
        model = nn.Sequential(nn.Linear(3, 3), Parametric(), nn.Linear(3, 3))
        method = [(["0", "1"], sb.DeepEnsemble(members=2)), ("2", sb.Rank1(components=2, train_base=False))]
    elif failure == "later rule":

        def fails(member):
            raise KeyError("user code")

        method = [("0", sb.DeepEnsemble(members=2)), ("3", sb.DeepEnsemble(members=2, reinitialize=fails))]
    elif failure == "warning":
        model, method = Sequence(), sb.Rank1(train_base=False)
    else:
        model[1] = nn.LayerNorm(4, elementwise_affine=False)
        method, arguments = sb.MeanField(), {"include": [nn.Linear, nn.LayerNorm]}
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, TypeError, KeyError, UserWarning)):
            sb.bayesianize(model, method, **arguments)
    after = snapshot(model)
    assert after[:2] == before[:2]
    assert all(torch.equal(after[2][name], value) for name, value in before[2].items())
    with quiet():
        sb.bayesianize(model, sb.EMP(patch=(nn.Linear,)))  # and it can still be converted
