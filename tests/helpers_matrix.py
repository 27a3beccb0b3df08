"""Every layer type in several configurations, every method, and torch's own layer to compare them with."""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.conversion import find_record
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.table import converted_class
from slimbayes.core.posteriors import LogNormalPosterior
from slimbayes.core.rules.rank1 import Rank1Rule

try:
    from transformers.pytorch_utils import Conv1D
except ImportError:  # the row is then left out
    Conv1D = None

BATCH = 4
ENTRIES = 6  # of every embedding table
NEARLY_NONE = -60.0  # ρ or log u at which a spread is as small as it gets


@dataclass(frozen=True)
class Case:
    """One configuration of a layer type: how to make it, and the shape of one example of each input."""

    kind: str
    label: str
    build: type
    args: tuple
    options: dict
    shapes: tuple
    call: dict = field(default_factory=dict)  # keyword arguments of the call
    index: bool = False  # the first input is an index

    def make(self, dtype=torch.float32):
        """The layer, all its parameters random: the neutral start of a norm would hide mistakes."""
        layer = self.build(*self.args, **self.options).to(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
            for name, buffer in layer.named_buffers():
                if name.startswith("running"):
                    buffer.uniform_(0.5, 1.5)
        return layer

    def inputs(self, batch=BATCH, dtype=torch.float32):
        """Random inputs with a batch axis."""
        made = [torch.randn(batch, *shape, dtype=dtype) for shape in self.shapes]
        if self.index:
            made[0] = torch.randint(ENTRIES, made[0].shape)
        if self.kind == "EmbeddingBag" and len(made) > 1:
            made.insert(1, None)  # offsets
        return tuple(made)

    def __str__(self):
        return f"{self.kind} {self.label}"


def _cases():
    def add(kind, label, build, args, shapes, call=None, index=False, **options):
        cases.setdefault(kind, []).append(Case(kind, label, build, args, options, shapes, call or {}, index))

    cases = {}
    add("Linear", "plain", nn.Linear, (3, 2), ((3,),))
    add("Linear", "no bias", nn.Linear, (3, 2), ((3,),), bias=False)
    add("Linear", "leading dims", nn.Linear, (3, 2), ((2, 5, 3),))
    if Conv1D is not None:
        add("Conv1D (transformers)", "plain", Conv1D, (2, 3), ((3,),))
        add("Conv1D (transformers)", "leading dims", Conv1D, (2, 3), ((5, 3),))
    for d in (1, 2, 3):
        size, kind, build = (5, 6, 4)[:d], f"Conv{d}d", getattr(nn, f"Conv{d}d")
        add(kind, "plain", build, (3, 2, 2), ((3, *size),))
        add(kind, "stride, groups", build, (4, 6, 3), ((4, *size),), stride=2, padding=1, groups=2)
        add(kind, "dilation, no bias", build, (2, 3, 2), ((2, *size),), dilation=2, bias=False)
        add(kind, "circular", build, (2, 3, 3), ((2, *size),), padding=2, padding_mode="circular")
        add(kind, "replicate", build, (2, 3, 3), ((2, *size),), padding=1, padding_mode="replicate", stride=2)
        add(kind, "same", build, (3, 3, 3), ((3, *size),), padding="same", groups=3)
        kind, build = f"ConvTranspose{d}d", getattr(nn, f"ConvTranspose{d}d")
        size = (3, 4, 2)[:d]
        add(kind, "plain", build, (3, 2, 2), ((3, *size),))
        add(kind, "stride", build, (2, 3, 3), ((2, *size),), stride=2, padding=1, output_padding=1)
        add(
            kind,
            "dilation, groups",
            build,
            (4, 6, 2),
            ((4, *size),),
            stride=2,
            dilation=2,
            groups=2,
            bias=False,
        )
        target = [2 * n for n in size]  # without output_size it would be 2n − 1
        add(
            kind, "output_size", build, (2, 3, 3), ((2, *size),), {"output_size": target}, stride=2, padding=1
        )
    add("Conv2d", "two-sided", nn.Conv2d, (2, 3, (3, 2)), ((2, 6, 5),), stride=(2, 1), padding=(1, 0))
    add("Conv2d", "reflect", nn.Conv2d, (2, 3, 3), ((2, 5, 4),), padding=(1, 2), padding_mode="reflect")
    for d in (1, 2, 3):
        size, kind, build = (5, 2, 3)[:d], f"BatchNorm{d}d", getattr(nn, f"BatchNorm{d}d")
        add(kind, "plain", build, (3,), ((3, *size),))
        add(kind, "cumulative", build, (3,), ((3, *size),), momentum=None, eps=1e-3)
        add(kind, "no statistics", build, (3,), ((3, *size),), track_running_stats=False)
        add(kind, "momentum", build, (3,), ((3, *size),), momentum=0.7)
        add(kind, "no affine", build, (3,), ((3, *size),), affine=False)
    add("BatchNorm1d", "vectors", nn.BatchNorm1d, (3,), ((3,),))
    add("LayerNorm", "plain", nn.LayerNorm, (4,), ((4,),))
    add("LayerNorm", "leading dims", nn.LayerNorm, (4,), ((2, 3, 4),), eps=1e-3)
    add("LayerNorm", "several axes", nn.LayerNorm, ((3, 4),), ((2, 3, 4),))
    add("LayerNorm", "no bias", nn.LayerNorm, (4,), ((3, 4),), bias=False)
    add("LayerNorm", "no affine", nn.LayerNorm, (4,), ((4,),), elementwise_affine=False)
    add("GroupNorm", "plain", nn.GroupNorm, (2, 4), ((4, 3),))
    add("GroupNorm", "vectors", nn.GroupNorm, (2, 4), ((4,),), eps=1e-3)
    add("GroupNorm", "images", nn.GroupNorm, (4, 4), ((4, 2, 3),))
    add("RMSNorm", "plain", nn.RMSNorm, (4,), ((4,),))
    add("RMSNorm", "several axes", nn.RMSNorm, ((3, 4),), ((2, 3, 4),), eps=1e-3)
    add("Embedding", "plain", nn.Embedding, (ENTRIES, 3), ((5,),), index=True)
    add("Embedding", "one index", nn.Embedding, (ENTRIES, 3), ((),), index=True)
    add("Embedding", "leading dims", nn.Embedding, (ENTRIES, 3), ((2, 5),), index=True)
    add("Embedding", "padding", nn.Embedding, (ENTRIES, 3), ((7,),), index=True, padding_idx=1)
    add("Embedding", "frequency", nn.Embedding, (ENTRIES, 3), ((5,),), index=True, scale_grad_by_freq=True)
    for mode in ("mean", "sum", "max"):
        add("EmbeddingBag", mode, nn.EmbeddingBag, (ENTRIES, 3), ((5,),), index=True, mode=mode)
    weighted = ((5,), (5,))
    add("EmbeddingBag", "weighted", nn.EmbeddingBag, (ENTRIES, 3), weighted, index=True, mode="sum")
    add("EmbeddingBag", "padding", nn.EmbeddingBag, (ENTRIES, 3), ((5,),), index=True, padding_idx=1)
    add("Bilinear", "plain", nn.Bilinear, (3, 2, 4), ((3,), (2,)))
    add("Bilinear", "no bias", nn.Bilinear, (3, 2, 4), ((3,), (2,)), bias=False)
    add("Bilinear", "leading dims", nn.Bilinear, (3, 2, 4), ((5, 3), (5, 2)))
    return cases


CASES = _cases()
METHODS = {
    "Rank1": sb.Rank1.paper(components=3),
    "BatchEnsemble": sb.BatchEnsemble(components=3),
    "MeanField shared": sb.MeanField.paper(),
    "MeanField flipout": sb.MeanField.paper(estimator="flipout"),
    "MeanField local": sb.MeanField.paper(estimator="local"),
    "KTied shared": sb.KTied.paper(),
    "KTied flipout": sb.KTied.paper(estimator="flipout"),
    "KTied local": sb.KTied.paper(estimator="local"),
    "EMP": sb.EMP.paper(components=4),  # a power of two: the mean of equal components is then exact
    "ECMP": sb.ECMP.paper(components=4),
    "MCDropout": sb.MCDropout(rate=0.3),
    "DropConnect": sb.DropConnect(rate=0.3),
    "DeepEnsemble": sb.DeepEnsemble(members=2, reinitialize=False),
    "Deterministic": sb.Deterministic(),
}
# Options by which a rule goes other ways: on a few layer types.
VARIANTS = {
    "Rank1 input": sb.Rank1.paper(components=3, random="input"),
    "Rank1 output": sb.Rank1.paper(components=3, random="output"),
    "KTied empirical": sb.KTied.paper(prior=sb.EmpiricalNormal(), temperature=0.1),
}


def supports(method, kind):
    """Whether the code says that the method converts this layer type."""
    return method.refuses(converted_class(CASES[kind][0].make())) is None


PAIRS = [(m, kind) for m, method in METHODS.items() for kind in CASES if supports(method, kind)]
REFUSED = [(m, kind) for m in METHODS for kind in CASES if (m, kind) not in PAIRS]
EVERY = {**METHODS, **VARIANTS}
EVERY_PAIR = PAIRS + [(m, kind) for m in VARIANTS for kind in ("Linear", "Conv2d", "Bilinear")]


def cases_of(kind, method, trained=False):
    """The configurations of a layer type that have what the method makes random (or trains)."""
    affine = trained or method.traits.randomizes_weight
    return [case for case in CASES[kind] if not (affine and case.label == "no affine")]


class Nested(nn.Module):
    """The layer deep inside a network."""

    def __init__(self, layer):
        super().__init__()
        self.body = nn.ModuleDict({"inner": nn.ModuleDict({"layer": layer})})

    def forward(self, *inputs, **options):
        return self.body["inner"]["layer"](*inputs, **options)


def convert(module, method):
    """Convert every layer of the module that the method does not refuse by default."""
    return sb.bayesianize(module, method, include=None if isinstance(method, sb.DeepEnsemble) else _known)


def _known(name, module):
    return converted_class(module) is not None


def layer_of(model):
    """The one converted layer, or the model itself."""
    return next((m for m in model.modules() if isinstance(m, Converted)), model)


def neutralize(model):
    """Give every rank-1 factor the location that changes nothing."""
    for module in model.modules():
        if isinstance(module, Rank1Rule):
            for factor in (module.r, module.s):
                if factor is not None:
                    log_space = isinstance(factor.spread, LogNormalPosterior)
                    factor.loc.data.fill_(0.0 if module.additive or log_space else 1.0)
    return model


def remove_spread(model):
    """Make every spread as small as it can be: 1e-7 for σ, 0 for U Vᵀ."""
    for name, parameter in model.named_parameters():
        if name.split(".")[-1] in ("rho", "log_u", "log_v"):
            parameter.data.fill_(NEARLY_NONE)
    return model


def tiled(inputs, draws):
    """The rows that a draw makes of the inputs, with gradients of their own."""
    return [
        None if x is None else leaf(x.detach().expand(draws, *x.shape).flatten(0, 1).clone()) for x in inputs
    ]


def leaf(x):
    """The tensor, with a gradient if it can have one."""
    return x.requires_grad_() if x is not None and x.is_floating_point() else x


def compare(what, ours, torchs, tolerance):
    """Equal bit for bit when the tolerance is 0, else relative to the largest element."""
    assert ours.shape == torchs.shape, f"{what}: {tuple(ours.shape)} against {tuple(torchs.shape)}"
    if tolerance == 0:
        assert torch.equal(ours, torchs), f"{what}: not bit for bit, {(ours - torchs).abs().max():.2e} apart"
        return
    error, scale = (ours - torchs).abs().max().item(), torchs.abs().max().item()
    assert error <= tolerance * scale, f"{what}: {error:.2e} apart, at a scale of {scale:.2e}"


def check_identity(case, method, training, dtype, *, samples=1, noise="mean", tolerance, nested=False):
    """Outputs, gradients and running statistics equal those of torch's own layer on the same rows.

    ``tolerance`` is a pair, for the outputs and for the gradients.
    """
    label = f"{case}, {'train' if training else 'eval'}, {dtype}, samples={samples}, noise={noise!r}"
    torch.manual_seed(0)
    plain = case.make(dtype)
    members = method.members if isinstance(method, sb.DeepEnsemble) else 1
    theirs = [copy.deepcopy(plain).train(training) for _ in range(members)]
    model = remove_spread(neutralize(convert(Nested(plain) if nested else plain, method))).train(training)
    inputs = [leaf(x) for x in case.inputs(dtype=dtype)]
    if members > 1:
        separate(plain, theirs)
    draws = find_record(model).components * samples
    ours = sb.draw(model, *inputs, samples=samples, noise=noise, **case.call)
    rows = tiled(inputs, draws)
    # Frequencies are counted within a draw where every draw has a table of its own.
    apart = case.label == "frequency" and method.traits.randomizes_weight and noise != "mean"
    runs = theirs * draws if apart else theirs
    parts = zip(*(x.chunk(len(runs)) if x is not None else [None] * len(runs) for x in rows), strict=True)
    torchs = torch.cat([t(*part, **case.call) for t, part in zip(runs, parts, strict=True)])
    torchs = torchs.unflatten(0, (draws, BATCH))
    compare(f"{label}: output", ours, torchs, tolerance[0])
    gradient = torch.randn_like(torchs)
    ours.backward(gradient)
    torchs.backward(gradient)
    near = tolerance[1] if draws == 1 else max(tolerance[1], torch.finfo(dtype).eps * 10)  # a sum over draws
    for i, (x, row) in enumerate(zip(inputs, rows, strict=True)):
        if x is not None and x.is_floating_point():
            expected = row.grad.unflatten(0, (draws, BATCH)).sum(0)
            compare(f"{label}: gradient of input {i}", x.grad, expected, near)
    named = dict(plain.named_parameters())
    for name, _ in theirs[0].named_parameters():
        expected = torch.stack([dict(t.named_parameters())[name].grad for t in theirs])
        got = named[name].grad
        if members == 1:
            expected = expected[0]
            if isinstance(method, sb.EMP | sb.ECMP) and noise == "mean":
                compare(
                    f"{label}: components' {name}", got, (expected / len(got)).expand_as(got), tolerance[1]
                )
            got = got.sum(0) if got.dim() > expected.dim() else got
        compare(f"{label}: gradient of {name}", got, expected, tolerance[1])
    buffers = dict(plain.named_buffers())
    for name, _ in theirs[0].named_buffers():
        expected = torch.stack([dict(t.named_buffers())[name] for t in theirs])
        compare(f"{label}: {name}", buffers[name], expected if members > 1 else expected[0], tolerance[0])


def separate(stacked, members):
    """Draw the members of an ensemble apart, and give the plain copies the same values."""
    with torch.no_grad():
        for name, parameter in stacked.named_parameters():
            parameter.normal_()
            for k, member in enumerate(members):
                dict(member.named_parameters())[name].copy_(parameter[k])


def rank1_weight(layer, weight, r, s):
    """W ∘ r sᵀ as a weight of torch's own layer, for factors over channels."""
    if isinstance(layer, nn.Bilinear):
        s1, s2 = s.split((layer.in1_features, layer.in2_features))
        return weight * r[:, None, None] * s1[:, None] * s2
    if isinstance(layer, nn.Linear):
        return weight * r[:, None] * s
    if Conv1D is not None and isinstance(layer, Conv1D):
        return weight * s[:, None] * r
    groups, taps = layer.groups, [1] * len(layer.kernel_size)
    own_in, own_out = layer.in_channels // groups, layer.out_channels // groups
    group_s, group_r = s.reshape(groups, own_in), r.reshape(groups, own_out)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # [in, out of its group, ...]
        outer = group_s[:, :, None] * group_r[:, None, :]  # [groups, in, out]
    else:  # [out, in of its group, ...]
        outer = group_r[:, :, None] * group_s[:, None, :]  # [groups, out, in]
    return weight * outer.flatten(0, 1).reshape(*weight.shape[:2], *taps)


def loss_of(model, inputs, targets, *, call=None, **options):
    """elbo of a draw, as in a training step, with a Gaussian likelihood (any shape of output)."""
    draws = sb.draw(model, *inputs, **options, **(call or {}))
    return sb.elbo(draws, targets, model, num_data=50, likelihood=sb.Gaussian()).loss


def snapshot(model):
    """The state_dict, copied."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(first, second):
    """Whether two state_dicts have the same keys and the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Everything(nn.Module):
    """One network of many layers side by side, each with its own inputs."""

    def __init__(self, cases):
        super().__init__()
        self.cases = cases
        self.layers = nn.ModuleList([case.make() for case in cases])

    def forward(self, *inputs):
        outputs, start = [], 0
        for case, layer in zip(self.cases, self.layers, strict=True):
            own = inputs[start : start + len(case.shapes)]
            outputs.append(layer(*own, **case.call).flatten(1))
            start += len(own)
        return torch.cat(outputs, 1)

    def inputs(self, batch=BATCH):
        """Fresh inputs for all layers."""
        return [x for case in self.cases for x in case.inputs(batch)]
