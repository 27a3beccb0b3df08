"""Every supported pair of method and layer type, against torch's own layer."""

import copy
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_matrix import (
    CASES,
    EVERY,
    EVERY_PAIR,
    METHODS,
    PAIRS,
    REFUSED,
    Conv1D,
    Everything,
    Nested,
    cases_of,
    check_identity,
    compare,
    convert,
    layer_of,
    leaf,
    loss_of,
    neutralize,
    rank1_weight,
    remove_spread,
    same_state,
    snapshot,
)
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import slimbayes as sb
from slimbayes.core.context import Draw, activate
from slimbayes.core.conversion import ATTRIBUTE, find_record
from slimbayes.core.layers.linear import TransposedLinear
from slimbayes.core.layers.table import RECURRENT, UNSUPPORTED, layer_class, layer_classes
from slimbayes.core.methods.rank1 import FAMILIES

DOUBLE, SINGLE = 1e-12, 1e-5  # relative, in float64 and float32
# The bias is added apart from the kernel, so bits may differ.
FACTORED = ("Rank1", "Rank1 input", "Rank1 output", "BatchEnsemble")
MIXING = {"components": 3, "learn_mixing": True, "init_noise": 0.5}
TRAINED = {**EVERY, "EMP": sb.EMP(**MIXING), "ECMP": sb.ECMP(**MIXING)}


def each(pairs):
    return pytest.mark.parametrize(
        ("name", "kind"), pairs, ids=[f"{m}-{k}".replace(" ", "_") for m, k in pairs]
    )


@pytest.mark.oldest
@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_identity(name, kind):
    method = EVERY[name]
    if name == "DeepEnsemble":  # one batched product rounds otherwise than one for each member
        with sb.fast_paths(members=False):
            _check_identities(kind, method, exact=True)
    _check_identities(kind, method, exact=name not in FACTORED and name != "DeepEnsemble")


def _check_identities(kind, method, exact):
    for case in cases_of(kind, method):
        for training, dtype, near in (
            (True, torch.float64, DOUBLE),
            (True, torch.float32, SINGLE),
            (False, torch.float64, DOUBLE),
        ):
            check_identity(case, method, training, dtype, tolerance=(0, 0) if exact else (near, near))
        near = (0 if exact else SINGLE, SINGLE)
        check_identity(case, method, False, torch.float32, samples=2, tolerance=near, nested=True)


@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_identity_without_spread(name, kind):
    """The kernels that draw noise, with next to none of it: several samples, shared and per example."""
    method = EVERY[name]
    near = DOUBLE
    if name in ("EMP", "ECMP"):
        method = replace(method, components=3)
    elif name in ("MCDropout", "DropConnect"):
        method = replace(method, rate=0.0)
    elif name.startswith(("Rank1", "MeanField", "KTied")):
        near = 1e-5  # σ is never below 1e-7
    for case in cases_of(kind, method):
        for training, noise, samples in ((True, "example", 1), (True, "shared", 3), (False, "example", 2)):
            check_identity(
                case, method, training, torch.float64, samples=samples, noise=noise, tolerance=(near, near)
            )


SIDES = [
    ("factors", "both"),
    *((option, side) for option in ("factors", "random") for side in ("input", "output")),
]


@pytest.mark.parametrize(
    ("posterior", "perturbation", "option", "side"),
    [
        (posterior, perturbation, *sides)
        for posterior in FAMILIES
        for perturbation in ("multiplicative", "additive")
        for sides in SIDES
        if (posterior, perturbation) != ("lognormal", "additive")  # it is never 0
        and (posterior, sides[0]) != ("delta", "random")  # nothing is random in it
    ],
)
def test_rank1_variants(posterior, perturbation, option, side):
    method = sb.Rank1(components=2, posterior=posterior, perturbation=perturbation, **{option: side})
    for case in (*CASES["Linear"], *CASES["Conv2d"], CASES["ConvTranspose1d"][1], CASES["Bilinear"][0]):
        check_identity(case, method, True, torch.float64, tolerance=(DOUBLE, DOUBLE))
    for case, noise in ((CASES["Linear"][2], "example"), (CASES["Conv2d"][1], "shared")):
        check_identity(case, method, False, torch.float32, tolerance=(SINGLE, SINGLE))
        check_identity(case, method, True, torch.float64, samples=2, noise=noise, tolerance=(1e-4, 1e-4))


@each([pair for pair in EVERY_PAIR if pair[0] in FACTORED])
def test_rank1_is_a_factored_weight(name, kind):
    """Component k is torch's own layer with the weight W ∘ r_k s_kᵀ and the bias b_k, gradients included."""
    for case in CASES[kind]:
        torch.manual_seed(0)
        plain = case.make(torch.float64)
        model = convert(copy.deepcopy(plain), EVERY[name])
        if model.bias is not None:
            model.bias.data.normal_()
        inputs = case.inputs(dtype=torch.float64)
        draws = sb.draw(model, *inputs, noise="mean", **case.call)
        weight, bias = leaf(plain.weight.detach().clone()), model.bias
        bias = None if bias is None else leaf(bias.detach().clone())
        r, s = (leaf(factor.loc.detach().clone()) for factor in (model.bayes.r, model.bayes.s))
        expected = []
        for k in range(3):
            own = {"weight": rank1_weight(plain, weight, r[k], s[k])}
            if bias is not None:
                own["bias"] = bias[k]
            expected.append(torch.func.functional_call(plain, own, inputs, case.call))
        expected = torch.stack(expected)
        compare(f"{case}: output", draws, expected, DOUBLE)
        gradient = torch.randn_like(expected)
        draws.backward(gradient)
        expected.backward(gradient)
        pairs = [(model.weight, weight), (model.bayes.r.loc, r), (model.bayes.s.loc, s)]
        for ours, torchs in pairs + ([] if bias is None else [(model.bias, bias)]):
            compare(f"{case}: gradient", ours.grad, torchs.grad, DOUBLE)


@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_old_checkpoint(name, kind):
    method = EVERY[name]
    for case in cases_of(kind, method):
        torch.manual_seed(0)
        model = neutralize(convert(Nested(case.make()), method)).eval()
        trained = Nested(case.make()).eval()
        saved = trained.state_dict()
        inputs = case.inputs()
        sb.draw(model, *inputs, noise="mean", **case.call)
        result = model.load_state_dict(snapshot(trained), strict=False)
        assert result.unexpected_keys == []
        assert all(".bayes." in key for key in result.missing_keys), result.missing_keys
        state = model.state_dict()
        for key, value in saved.items():
            assert torch.equal(state[key], value.expand_as(state[key])), f"{case}: {key}"
        draws = sb.draw(model, *inputs, noise="mean", **case.call)
        plain = trained(*inputs, **case.call)
        compare(f"{case}: output", draws, plain.expand_as(draws), SINGLE)


@pytest.mark.oldest
@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_every_parameter_gets_a_gradient(name, kind):
    method = TRAINED[name]
    for case in cases_of(kind, method, trained=True):
        torch.manual_seed(0)
        model = convert(Nested(case.make()), method)
        layer, inputs = layer_of(model), case.inputs()
        targets = torch.randn_like(sb.draw(model, *inputs, noise="mean", **case.call)[0])
        samples = 24 if name in ("EMP", "ECMP") else 2  # enough to draw every component
        loss_of(model, inputs, targets, call=case.call, samples=samples).backward()
        componentwise = getattr(layer, "component_tensors", ())
        for key, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None and torch.isfinite(gradient).all(), f"{case}: {key}"
            whole = not isinstance(method, sb.DeepEnsemble) and key.split(".")[-1] not in (
                "loc",
                *componentwise,
            )
            for part in [gradient] if whole else gradient:
                assert part.abs().max() > 0, f"{case}: {key} gets no gradient"


@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_finite_differences(name, kind):
    """Several draws before one backward, with keyed and with fresh noise: no sample may lose its noise."""
    method = EVERY[name]
    both = name.startswith("Rank1") or name.endswith(("flipout", "local"))
    modes = ("example", "shared") if both else ("example",)
    for case, noise in zip(cases_of(kind, method, trained=True), modes, strict=False):
        torch.manual_seed(0)
        model = convert(case.make(torch.float64), method)
        if name in ("EMP", "ECMP", "DeepEnsemble"):
            for parameter in model.parameters():  # set components apart
                parameter.data.normal_()
        inputs = case.inputs(dtype=torch.float64)
        targets = torch.randn_like(sb.draw(model, *inputs, noise="mean", **case.call)[0])

        def loss(model=model, inputs=inputs, targets=targets, call=case.call, noise=noise):
            torch.manual_seed(1)
            options = {"call": call, "samples": 2, "noise": noise}
            return sum(loss_of(model, inputs, targets, seed=seed, **options) for seed in (None, 2))

        loss().backward()
        for key, parameter in model.named_parameters():
            torch.manual_seed(3)
            start, direction = parameter.detach().clone(), 1e-4 * torch.randn_like(parameter)
            ahead, behind = (_loss_at(loss, parameter, start + sign * direction) for sign in (1, -1))
            _loss_at(loss, parameter, start)
            terms = parameter.grad * direction
            error = (ahead - behind) / 2 - terms.sum()
            assert error.abs() < 1e-6 * terms.abs().max(), f"{case}, {noise}: {key}"


@torch.no_grad()
def _loss_at(loss, parameter, value):
    parameter.copy_(value)
    return loss()


@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_copies(name, kind, tmp_path):
    """deepcopy after a forward pass, state_dict, save and load: the same bits for the same seed."""
    method = TRAINED[name]
    for case in cases_of(kind, method, trained=True)[:2]:
        torch.manual_seed(0)
        model, inputs = convert(Nested(case.make()), method), case.inputs()

        def outputs(model, inputs=inputs, call=case.call):
            return sb.draw(model.eval(), *inputs, samples=2, seed=5, **call)

        used = sb.draw(model.train(), *inputs, samples=2, **case.call)
        before, expected = snapshot(model), outputs(model)
        twin = copy.deepcopy(model)
        assert same_state(twin.state_dict(), before)
        assert torch.equal(outputs(twin), expected), f"{case}: deepcopy"
        second = convert(Nested(case.make()), method)
        second.load_state_dict(model.state_dict())
        assert same_state(second.state_dict(), before)
        assert torch.equal(outputs(second), expected), f"{case}: state_dict"
        path = tmp_path / f"{case.label}.safetensors"
        sb.save(model, path)
        third = sb.load(Nested(case.make()), path)
        assert same_state(third.state_dict(), before)
        assert torch.equal(outputs(third), expected), f"{case}: save and load"
        assert find_record(third).methods == find_record(model).methods
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        assert same_state(model.state_dict(), before)
        assert torch.equal(outputs(model), expected), f"{case}: the copy shares parameters"
        used.sum().backward()


@pytest.mark.parametrize("name", [name for name, kind in PAIRS if kind == "Embedding"])
def test_padding_row_is_not_random(name):
    torch.manual_seed(0)
    layer = nn.Embedding(6, 3, padding_idx=1)
    row = layer.weight.data[1].normal_().clone()
    model, index = convert(layer, TRAINED[name]), torch.tensor([[0, 1, 1], [1, 2, 5]])
    for noise in ("example", "shared", "mean"):
        draws = sb.draw(model, index, samples=3, noise=noise)
        assert (draws[:, index == 1] == row).all(), noise


@pytest.mark.uncounted(but=4)
@each(EVERY_PAIR)
def test_bfloat16(name, kind):
    method = EVERY[name]
    for case in cases_of(kind, method, trained=True):
        torch.manual_seed(0)
        plain = case.make()
        inputs = case.inputs()
        model = neutralize(convert(Nested(copy.deepcopy(plain)), method))
        with torch.autocast("cpu", torch.bfloat16):
            torchs = plain(*inputs, **case.call)
            mean = sb.draw(model, *inputs, noise="mean", **case.call)
            loss = loss_of(model, inputs, torch.zeros_like(torchs), call=case.call, samples=2)
        assert mean.dtype == torchs.dtype, f"{case}: {mean.dtype} under autocast"
        compare(f"{case}: autocast", mean.double(), torchs.double().expand_as(mean), 2e-2)
        _check_backward(f"{case}: autocast", model, loss)
        plain = plain.bfloat16()
        low = [x.bfloat16() if x is not None and x.is_floating_point() else x for x in inputs]
        try:
            torchs = plain(*low, **case.call)
            torchs.sum().backward()
        except RuntimeError:  # torch itself has no such kernel
            continue
        for made in (convert(copy.deepcopy(plain), method), model.bfloat16()):
            made.zero_grad()
            draws = sb.draw(made, *low, samples=2, **case.call)
            assert draws.dtype == torchs.dtype, f"{case}: {draws.dtype} in bfloat16"
            loss = sb.elbo(draws, torch.zeros_like(torchs), made, num_data=50, likelihood=sb.Gaussian()).loss
            _check_backward(f"{case}: bfloat16", made, loss)


def _check_backward(what, model, loss):
    assert torch.isfinite(loss), what
    assert loss.dtype == torch.float32, what
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), f"{what}: {key}"


UNBATCHED = {
    "Linear", "Bilinear", "LayerNorm", "RMSNorm", "Embedding",
    *(kind for kind in CASES if kind.startswith("Conv")),
}  # fmt: skip


@each([pair for pair in EVERY_PAIR if pair[1] in UNBATCHED])
def test_unbatched(name, kind):
    """One example without a row axis, with one draw, as torch's own layer takes it."""
    ones = {
        **{name: {"components": 1} for name in FACTORED}, "DeepEnsemble": {"members": 1},
        "MCDropout": {"rate": 0.0}, "DropConnect": {"rate": 0.0},
    }  # fmt: skip
    method = replace(EVERY[name], **ones.get(name, {}))
    for case in cases_of(kind, method):
        torch.manual_seed(0)
        plain = case.make(torch.float64)
        model = remove_spread(neutralize(convert(copy.deepcopy(plain), method)))
        inputs = [x[0] for x in case.inputs(dtype=torch.float64)]
        if name == "DeepEnsemble" and inputs[0].dim() == 0:
            continue  # it may stand before any module, so it needs a row axis
        torchs = plain(*inputs, **case.call)
        compare(f"{case}: outside a draw", model(*inputs, **case.call), torchs, 1e-5)
        with activate(Draw(1, 1, 1, noise="mean")):
            compare(f"{case}: noise='mean'", model(*inputs, **case.call), torchs, DOUBLE)


@each(REFUSED)
def test_refused(name, kind):
    method, case = EVERY[name], CASES[kind][0]
    model = nn.Sequential(nn.Linear(2, 2), Nested(case.make()))
    before, types = snapshot(model), [type(module) for module in model.modules()]
    with pytest.raises(TypeError) as error:
        convert(model, method)
    assert type(method).__name__ in str(error.value)
    assert type(case.make()).__name__ in str(error.value)
    assert "1.body.inner.layer" in str(error.value)
    assert [type(module) for module in model.modules()] == types
    assert same_state(model.state_dict(), before)
    assert ATTRIBUTE not in vars(model)
    convert(model, sb.EMP())


class OwnAttention(nn.MultiheadAttention):
    """A class of the user's, whose forward pass may be anything."""


@pytest.mark.parametrize("kind", [OwnAttention])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("DeepEnsemble", "Deterministic")])
def test_unsupported_layers(name, kind):
    assert issubclass(kind, UNSUPPORTED)
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 2))
    with pytest.raises(TypeError) as error:
        sb.bayesianize(model, EVERY[name], include=["0", kind])
    assert type(EVERY[name]).__name__ in str(error.value) and kind.__name__ in str(error.value)
    assert type(model[0]) is nn.Linear


OUTSIDE = ("Conv1d", "ConvTranspose1d", "BatchNorm1d")  # compiled without the draw; all others with it


def compilable(name, kinds):
    """One network with a layer of each of these types that the method supports."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return convert(
        Everything([CASES[kind][0] for kind in kinds if (name, kind) in EVERY_PAIR]), TRAINED[name]
    )


@pytest.mark.uncounted
@pytest.mark.parametrize("name", [*METHODS, "Rank1 input"])
def test_step_compiles_once(name):
    """draw and elbo are one graph, whatever the data."""
    model = compilable(name, [kind for kind in CASES if kind not in OUTSIDE])
    counter, likelihood = CompileCounter(), sb.Gaussian()

    @torch.compile(backend=counter, fullgraph=True)
    def step(*inputs):
        draws = sb.draw(model, *inputs, samples=2)
        targets = torch.zeros_like(draws[0])
        return sb.elbo(draws, targets, model, num_data=50, likelihood=likelihood).loss

    for _ in range(3):
        model.zero_grad()
        step(*model.inputs()).backward()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
                parameter.sub_(1e-3 * parameter.grad)
    inputs = model.inputs()
    noisy = name not in ("BatchEnsemble", "DeepEnsemble", "Deterministic")
    assert (step(*inputs) != step(*inputs)) == noisy  # noise is drawn anew, not traced as a constant
    assert counter.frame_count == 1


@pytest.mark.oldest
@pytest.mark.uncounted
@pytest.mark.parametrize("name", [*METHODS, "Rank1 output"])
def test_model_compiles_once(name):
    """The draw is outside the compiled model, and what the model leaves there for elbo still arrives."""
    model = compilable(name, ["Linear", *OUTSIDE])
    samples = 8 if name == "EMP" else 2  # draws of the same component teach its logits nothing
    # Compiled rank-1 layers take their noise from torch's generator, the C kernels of eager ones from their own.
    with sb.fast_paths(native=False):
        check_compiled(model, model.inputs, CompileCounter(), samples=samples)


@pytest.mark.uncounted
def test_compiled_gradients():
    """Keyed noise, and a backend that traces the backward pass too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Linear(2, 2))
    rules = [
        ("0", sb.Rank1(components=2, posterior="cauchy")),
        ("1", sb.EMP(**MIXING)),
        ("2", sb.KTied(estimator="flipout")),
        ("3", sb.MCDropout()),
    ]
    sb.bayesianize(model, rules)
    backend = CompileCounterWithBackend("aot_eager")
    check_compiled(model, lambda: [torch.randn(5, 3)], backend, samples=2, seed=7)


def check_compiled(model, make_inputs, counter, **options):
    compiled, likelihood = torch.compile(model, backend=counter, fullgraph=True), sb.Gaussian()
    for _ in range(3):
        inputs, results = make_inputs(), []
        for run in (model, compiled):
            torch.manual_seed(1)
            model.zero_grad()
            draws = sb.draw(run, *inputs, **options)
            targets = torch.zeros_like(draws[0])
            sb.elbo(draws, targets, run, num_data=50, likelihood=likelihood).loss.backward()
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            results.append({"draws": draws, **gradients})
        for key, eager in results[0].items():
            assert eager.any(), key
            compare(key, results[1][key], eager, SINGLE)
    assert counter.frame_count == 1


BRANCHES = {
    "rank1": sb.Rank1(components=2),
    "mean_field": sb.MeanField(estimator="local"),
    "k_tied": sb.KTied(estimator="local"),
    "patched": sb.EMP(components=3, init_noise=0.5),
    "members": sb.DeepEnsemble(members=2),
    "dropped": sb.MCDropout(),
}


class Branches(nn.Module):
    """A convolution and a Linear layer for each of several methods, side by side."""

    def __init__(self):
        super().__init__()
        for name in BRANCHES:
            self.add_module(name, nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2)))

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.children()], 1)


@pytest.fixture
def branches():
    torch._dynamo.reset()
    torch.manual_seed(0)
    rules = [(f"^{name}$" if name == "members" else rf"^{name}\.", m) for name, m in BRANCHES.items()]
    model = sb.bayesianize(Branches(), rules)
    assert len(find_record(model).layers) == 11
    likelihood = sb.Gaussian()

    def loss(x, y):
        draws = sb.draw(model, x, noise="mean")
        return sb.elbo(draws, y, model, num_data=50, likelihood=likelihood).loss

    return loss, (torch.randn(4, 1, 3, 3), torch.randn(4, 12))


@pytest.mark.uncounted
@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
def test_inductor(branches):
    loss, data = branches
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
        compare("loss", torch.compile(loss, fullgraph=True)(*data), loss(*data), SINGLE)


def test_the_matrix_is_whole():
    titles = {layer.title for layer in layer_classes().values()}
    # Which tests/layers holds against torch's.
    sequences = {layer_class(kind).title for kind in (*RECURRENT, nn.MultiheadAttention)}
    generate = _generator()
    assert set(generate.methods()) == set(METHODS)
    assert set(generate.layers()) == titles | {TransposedLinear.title}
    assert set(CASES) == titles - sequences | ({TransposedLinear.title} if Conv1D is not None else set())
    assert len(PAIRS) + len(REFUSED) == len(METHODS) * len(CASES)
    page = generate.support()
    for name, kind in PAIRS + REFUSED:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{kind}`"))
        cell = row.strip("| ").split(" | ")[1 + list(generate.methods()).index(name)]
        assert (cell == "✓") == ((name, kind) in PAIRS), (name, kind, cell)


def test_published_table_is_current(monkeypatch, tmp_path, capsys):
    generate = _generator()
    assert generate.main(["--check"]) == 0
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "support.md is stale" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    (tmp_path / "support.md").write_text("old")
    assert generate.main(["--check"]) == 1


def _generator():
    path = Path(__file__).parents[1] / "docs" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
