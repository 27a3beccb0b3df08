"""Converted attention layers against torch's own, in every form that theirs have."""

import copy
import itertools

import pytest
import torch
from helpers_attention import BATCH, HEADS, KEYS, SEPARATE, SIZE, TARGETS, Attended, inputs, masks
from torch import nn
from torch.func import functional_call

import slimbayes as sb
from slimbayes.core.context import Draw, activate
from slimbayes.core.rules.rank1 import Rank1Rule

pytestmark = pytest.mark.oldest

ONES = {"random_sign_init": 1.0}  # all factors at 1
METHODS = {
    "meanfield": lambda: sb.MeanField.paper(),
    "ktied": lambda: sb.KTied.paper(),
    "flipout": lambda: sb.MeanField.paper(estimator="flipout"),
    "local": lambda: sb.MeanField.paper(estimator="local"),
    "ktied_local": lambda: sb.KTied.paper(estimator="local"),
    "rank1": lambda: sb.Rank1.paper(components=2, **ONES),
    "additive": lambda: sb.Rank1.paper(components=2, perturbation="additive", random_sign_init=0.0),
    "batch_ensemble": lambda: sb.BatchEnsemble(components=2, **ONES),
    "dropout": lambda: sb.MCDropout(),
    "channel_dropout": lambda: sb.MCDropout(granularity="channel"),
    "drop_connect": lambda: sb.DropConnect(),
    "emp": lambda: sb.EMP.paper(patch=(nn.MultiheadAttention,)),
    "ecmp": lambda: sb.ECMP.paper(patch=(nn.MultiheadAttention,)),
}
LAYERS = [
    {"bias": bias, "batch_first": first, "add_bias_kv": learned, "add_zero_attn": zero, **(SEPARATE if apart else {})}
    for apart, bias, first, learned, zero in itertools.product((False, True), repeat=5)
]  # fmt: skip
RETURNED = (
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
)


def pair(form, options, method, dtype=torch.float64):
    torch.manual_seed(1)
    plain = Attended(form, **options).to(dtype)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(0, 0.5)
    return plain, sb.bayesianize(copy.deepcopy(plain), method)


def gradients(outputs, tensors):
    total = sum(
        (y * torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y[0].shape)).sum() for y in outputs
    )
    return torch.autograd.grad(total, tensors, allow_unused=True)


def check_mean(plain, model, given, call, tolerance):
    given = [x.requires_grad_() for x in given]
    names = [name for name, _ in plain.named_parameters()]
    torch.manual_seed(7)
    expected = [y for y in plain(*given, **call) if y is not None]
    wanted = gradients(expected, [*given, *plain.parameters()])
    torch.manual_seed(7)
    if model.form == "single":  # of which no network consists that has a batch
        with activate(Draw(1, 1, 1, "mean")):
            made = model(*given, **call)
        found = [y.unsqueeze(0) for y in made if y is not None]
    else:
        found = [y for y in sb.draw(model, *given, noise="mean", **call) if y is not None]
    held = dict(model.named_parameters())
    own = gradients([y.mean(0) for y in found], [*given, *[held[name] for name in names]])
    assert len(expected) == len(found)
    for y, z in zip(expected, found, strict=True):
        torch.testing.assert_close(z, y.expand_as(z), rtol=tolerance, atol=tolerance)
    for a, b in zip(wanted, own, strict=True):
        if a is not None:
            b = b.sum(0) if b.dim() > a.dim() else b
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.uncounted(but=8)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_at_the_mean_it_is_torchs_own_layer(options):
    sizes = {key: options[key] for key in ("kdim", "vdim") if key in options}
    forms = ("three", "single") if sizes else ("self", "memory", "three", "single")
    pairs = {form: (*pair(form, options, sb.MeanField.paper()), inputs(form, **sizes)) for form in forms}
    every = {
        form: masks(len(given[0]), TARGETS, TARGETS if form == "self" else KEYS)
        for form, (*_, given) in pairs.items()
    }
    for i, kind in enumerate(every["single"]):
        for j, returned in enumerate(RETURNED):
            form = forms[(i + j) % len(forms)]
            check_mean(*pairs[form], {**every[form][kind], **returned}, 1e-12)


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [{}, SEPARATE], ids=["packed", "separate"])
def test_every_method_at_the_mean(method, sizes):
    for form, dtype, tolerance in (("memory", torch.float32, 1e-5), ("three", torch.float64, 1e-12)):
        if sizes and form == "memory":
            continue
        options = {**sizes, "batch_first": True, "add_bias_kv": True}
        plain, model = pair(form, options, METHODS[method](), dtype)
        given = inputs(form, dtype, **sizes)
        every = masks(BATCH, TARGETS, KEYS, dtype)
        for kind in ("tables", "float tables, float padding", "causal"):
            check_mean(plain, model, given, {**every[kind], "need_weights": kind == "tables"}, tolerance)


@pytest.mark.parametrize("method", ["ktied", "flipout", "local", "ktied_local", "rank1", "additive", "emp"])
@pytest.mark.parametrize(
    ("form", "sizes"), [("self", {}), ("memory", {}), ("three", {}), ("three", SEPARATE)], ids=str
)
def test_without_spread_its_draws_are_torchs_own_layer(form, sizes, method):
    """σ of 1e-7, the least there is: what the noise adds is below the tolerance."""
    plain, model = pair(form, sizes, METHODS[method]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("rho", "log_u", "log_v")):
                parameter.fill_(-60.0)
    given = inputs(form, **sizes)
    expected = plain(*given)[0]
    for noise in ("example", "shared"):
        found = sb.draw(model, *given, samples=2, noise=noise)[0]
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=1e-5)


def test_own_dropout_is_torchs():
    """In training, with torch's generator in the same state."""
    for returned in RETURNED:
        plain, model = pair("memory", {"dropout": 0.4, "batch_first": True}, sb.MeanField.paper())
        check_mean(plain, model, inputs("memory"), returned, 1e-12)
        given = inputs("memory")
        a, b = (sb.draw(model, *given, noise="mean", **returned)[0] for _ in range(2))
        assert not torch.allclose(a, b)


@pytest.mark.parametrize(
    ("form", "sizes"), [("self", {}), ("memory", {}), ("three", {}), ("three", SEPARATE)], ids=str
)
def test_every_row_has_the_weights_of_its_factors(monkeypatch, form, sizes):
    """Outputs and gradients of per-example factors, against torch's layer on each row with r sᵀ in its weights."""
    plain, model = pair(form, sizes, sb.Rank1.paper(components=2, dropout_rate=0.2))
    made = {}
    mapped = Rank1Rule.mapped

    def kept(rule, op, frame):
        one = mapped(rule, op, frame)
        if one.inner is not None:  # not the pass that looks at the rows
            made[op.key] = one
        return one

    monkeypatch.setattr(Rank1Rule, "mapped", kept)
    given = inputs(form, **sizes)
    padding = masks(BATCH, TARGETS, TARGETS if form == "self" else KEYS)["padding"]["key_padding_mask"]
    found, _ = sb.draw(model, *given, samples=2, seed=3, key_padding_mask=padding)
    found = found.flatten(0, 1)
    rows = []
    for row in range(len(found)):
        own = {}
        for kernel in model.attention.kernels:
            one = made[kernel.key]
            name = f"attention.{kernel.prefix}"
            factors = torch.outer(one.outer[row], one.inner[row])
            own[name + kernel.names["weight"]] = kernel.weight * factors
            if kernel.bias is not None:
                own[name + kernel.names["bias"]] = kernel.bias[row // (2 * BATCH)]
        example = slice(row % BATCH, row % BATCH + 1)
        call = {"key_padding_mask": padding[example]}
        rows.append(functional_call(plain, own, tuple(g[example] for g in given), call)[0])
    expected = torch.cat(rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    held = [p for name, p in model.named_parameters() if ".bayes" not in name]
    held += [t for one in made.values() for t in (one.inner, one.outer)]
    found_grads, grads = (
        torch.autograd.grad(y.square().sum(), held, retain_graph=True) for y in (found, expected)
    )
    for a, b in zip(found_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [{}, SEPARATE], ids=["packed", "separate"])
def test_what_is_added_by_draw_is_what_is_added_by_row(sizes, bias):
    """W (x + s) + r + b with points for s and r: noise by example takes one way, all others another."""
    options = {**sizes, "bias": bias, "batch_first": True}
    method = sb.Rank1.paper(components=2, perturbation="additive", dropout_rate=0.1)
    plain, model = pair("three", options, method)
    given = inputs("three", **sizes)
    found = sb.draw(model, *given, noise="mean")[0]
    for component in range(2):
        layer, thirds = plain.attention, []
        for kernel in model.attention.kernels:
            s, r = (getattr(kernel.bayes, which).loc[component].detach() for which in ("s", "r"))
            shift = kernel.weight.detach() @ s + r
            if kernel.key == "out":
                last = shift
            else:
                thirds.append(shift)
        held = {"attention.in_proj_bias": torch.cat(thirds), "attention.out_proj.bias": last}
        if bias:
            held["attention.in_proj_bias"] = held["attention.in_proj_bias"] + layer.in_proj_bias
            held["attention.out_proj.bias"] = held["attention.out_proj.bias"] + layer.out_proj.bias
        both = Attended("three", **{**options, "bias": True}).double()
        both.load_state_dict(plain.state_dict(), strict=False)
        expected = functional_call(both, held, given)[0]
        torch.testing.assert_close(found[component], expected, rtol=1e-10, atol=1e-12)


def test_state_dict_and_copies():
    plain, model = pair("three", SEPARATE, sb.Rank1.paper(components=2))
    assert set(plain.state_dict()) <= set(model.state_dict())
    for twin in (copy.deepcopy(model), model):
        twin.load_state_dict(plain.state_dict(), strict=False)
        assert twin.attention.out_proj.bias.shape == (2, SIZE)
        assert torch.equal(twin.attention.out_proj.bias[1], plain.attention.out_proj.bias)
        assert twin.attention.kernels[-1].weight is twin.attention.out_proj.weight
        assert twin.attention.kernels[0].store is twin.attention._parameters


def test_a_mask_of_one_draw_serves_all():
    """[N·H, L, S] is no tensor that a draw repeats; a table of the batch's length has to be named."""
    plain, model = pair("three", {"batch_first": True}, sb.BatchEnsemble(components=2, **ONES))
    given, mask = inputs(), masks(BATCH, TARGETS, KEYS)["tables"]
    found = sb.draw(model, *given, samples=2, **mask)[0]
    torch.testing.assert_close(found, plain(*given, **mask)[0].expand_as(found))
    table = torch.zeros(TARGETS, KEYS, dtype=torch.float64)
    assert TARGETS == BATCH
    with pytest.raises(ValueError, match=r"'attention'.*attn_mask.*shared_inputs"):
        sb.draw(model, *given, attn_mask=table)
    assert sb.draw(model, *given, attn_mask=table, shared_inputs=["attn_mask"])[0].shape[0] == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_errors_say_what_is_wrong():
    _, model = pair("three", {"batch_first": True}, sb.MeanField.paper())
    q, k, v = inputs()
    layer = model.attention
    for call, match in (
        (lambda: layer(q, k, v, is_causal=True), "is_causal=True.*attn_mask"),
        (lambda: layer(q, k[:, 1:], v), "as many keys as values"),
        (lambda: layer(q, k[..., 1:], v), "features"),
        (lambda: layer(q, k[0], v), "2 or 3 dimensions"),
        (lambda: layer(q[:2], k, v), "key has 3 rows.*the query 2"),
        (lambda: layer(q, k, v, key_padding_mask=torch.zeros(BATCH, 2).bool()), r"must be \[batch, 4\]"),
        (lambda: layer(q, k, v, key_padding_mask=torch.zeros(2, KEYS).bool()), "key_padding_mask has 2 rows"),
        (lambda: layer(q, k, v, key_padding_mask=torch.zeros(BATCH, KEYS).int()), "boolean or floating point"),
        (lambda: layer(q, k, v, attn_mask=torch.zeros(2, 2)), "attn_mask must be"),
        (lambda: layer(q, k, v, attn_mask=torch.zeros(HEADS, TARGETS, KEYS)), "attn_mask has 1 rows"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"'attention'.*{match}|{match}"):
            call()
    with pytest.raises(TypeError, match=r"'attention'.*nested.*key_padding_mask"):
        layer(torch.nested.nested_tensor([q[0], q[1]]), k, v)
    _, model = pair("three", {}, sb.MeanField.paper())
    turned = [x.transpose(0, 1) for x in inputs(batch=2)]
    with pytest.raises(ValueError, match=r"'attention'.*batch_first=False"), sb.fast_paths(late=False):
        sb.draw(Turned(model), *turned, samples=3)


class Turned(nn.Module):
    """A network whose inputs have the batch in their second axis."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *given):
        return self.model.attention(*given)[0]


def test_what_is_refused_says_so():
    with pytest.raises(TypeError, match=r"DeepEnsemble cannot convert layer 'attention'.*batch_first=True"):
        sb.bayesianize(Attended(), sb.DeepEnsemble(), include="attention$")
    net = Attended()
    nn.utils.parametrizations.weight_norm(net.attention.out_proj)
    with pytest.raises(ValueError, match=r"layer 'attention' computes its 'weight'.*exclude='attention'"):
        sb.bayesianize(net, sb.MeanField.paper())
    assert type(net.attention) is nn.MultiheadAttention
