"""Cases of ``sb.draw``: any method on any layer or network, against the replay and against plain networks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import slimbayes as sb
from reliability.cases import methods, networks
from reliability.cases.judging import EQUAL, REFUSED, Outcome, attempt, refusal_of, same_tree
from reliability.cases.replay import NoReference, Replay
from slimbayes.core.conversion import find_record
from slimbayes.core.posteriors import LogNormalPosterior
from slimbayes.core.rules.rank1 import Rank1Rule

SEEDS = st.sampled_from([0, 1, 7, -3, 2**70])
DTYPES = [torch.float64] * 6 + [torch.float32] * 3 + [torch.bfloat16, torch.float16]


def converted(data: Any, net: networks.Net, method: Any) -> tuple[bool, Any]:
    """The network converted, every parameter away from its start; or the refusal."""
    default = not isinstance(method, sb.DeepEnsemble) and data.draw(st.sampled_from([False, False, True]))
    how = methods.convert_default if default else methods.convert
    done, model = attempt(lambda: how(copy.deepcopy(net.module), method), what=f"{method} on {net.kind}")
    if done:
        scatter(model)
    return done, model


def built(data: Any) -> tuple[bool, networks.Net, Any, Any, tuple[str, str]]:
    """Any method on any network: whether it was taken, both, the model in eval mode, and what an outcome is of."""
    net, method = data.draw(networks.nets(statistics=True)), data.draw(methods.valid())
    done, model = converted(data, net, method)
    if done:
        model.eval()
    return done, net, method, model, (methods.label(method), net.kind)


def scatter(model: nn.Module) -> None:
    """Give mixing logits other values than their start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mixing.logits"):
                parameter.normal_()


def layout(data: Any, x: Tensor) -> Tensor:
    """The same values in another layout, or with a gradient."""
    form = data.draw(
        st.sampled_from(["plain", "plain", "strided", "turned", "expanded", "last", "grad", "sliced"])
    )
    if form == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if form == "turned" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "expanded":
        return x[:1].expand(x.shape)
    if form == "last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if form == "grad" and x.is_floating_point():
        return x.clone().requires_grad_()
    if form == "sliced":
        return torch.cat([x, x])[: len(x)]
    return x


def inputs_of(data: Any, net: networks.Net, batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs of so many examples, the first in a layout of its own."""
    x, *rest = net.inputs(batch, dtype)
    return (layout(data, x), *rest)


def replayed(data: Any) -> Outcome:
    """A seeded draw equals every example of every draw by itself."""
    done, net, method, model, who = built(data)
    if not done:
        return Outcome(REFUSED, *who)
    dtype = data.draw(st.sampled_from(DTYPES))
    if getattr(method, "posterior", "") not in ("", "normal", "delta") and dtype.itemsize == 2:
        dtype = torch.float32  # tails are beyond 16 bits
    model.to(dtype)
    options = {
        "samples": data.draw(st.integers(1, 2)),
        "noise": data.draw(st.sampled_from(["example", "example", "shared", "mean"])),
        "seed": data.draw(SEEDS), "first_example": data.draw(st.sampled_from([0, 0, 5])),
        "first_sample": data.draw(st.sampled_from([0, 0, 3])),
    }  # fmt: skip
    training = not net.norms and not net.dropout and data.draw(st.booleans())
    model.train(training)
    inputs = inputs_of(data, net, data.draw(st.integers(1, 3)), dtype)
    step = getattr(method, "components_per_step", None) if training else None
    plain = copy.deepcopy(net.module).to(dtype).train(training)
    shapes = [tuple(x.shape) for x in inputs]
    what = f"{method} on {net.kind} {net.module}, {options}, {dtype}, train={training}, inputs {shapes}"
    with torch.set_grad_enabled(data.draw(st.booleans())):
        allowed = refusal_of(lambda: plain(*inputs, **net.call))
        done, ours = attempt(lambda: sb.draw(model, *inputs, **options, **net.call), allowed, what=what)
    if not done:
        return Outcome(REFUSED, *who)
    with torch.no_grad():
        try:
            wide = copy.deepcopy(net.module).to(dtype)
            reference = Replay(wide, model).draw(inputs, net.call, **options, step=step, dtype=dtype)
        except NoReference:
            return _alone(model, net, inputs, options, ours, what, who)
    same_tree(what, ours, reference)
    _same_gradient(inputs[0], ours, net, training, what)
    return Outcome(EQUAL, *who)


def _same_gradient(x: Tensor, ours: Any, net: networks.Net, training: bool, what: str) -> None:
    """The gradient of the input: that of one example's outputs is zero at all others, and finite."""
    leaves = [y for y in pytree.tree_leaves(ours) if isinstance(y, Tensor) and y.requires_grad]
    if not (x.requires_grad and x.is_leaf and leaves) or len(x) < 2 or (net.norms and training):
        return
    own = [y[:, :1] for y in leaves if y.dim() > 1 and y.shape[1] == len(x)]
    if not own:
        return
    (gradient,) = torch.autograd.grad(sum(y.float().sum() for y in own), x, allow_unused=True)
    if gradient is None:
        return
    same_tree(f"{what}: gradient at other examples", gradient[1:], torch.zeros_like(gradient[1:]))


def _alone(
    model: nn.Module, net: networks.Net, inputs: tuple[Tensor, ...], options: dict[str, Any], ours: Any, what: str,
    who: tuple[str, str],
) -> Outcome:  # fmt: skip
    """Where there is no replay: every example by itself, and every sample by itself, give the same draws."""
    whole = pytree.tree_leaves(ours)
    components = find_record(model).components
    if model.training and find_record(model).step_components is not None:
        components = find_record(model).step_components
    samples = options["samples"]
    for i in range(len(inputs[0])):
        for s in range(samples):
            place = {
                "first_example": options["first_example"] + i,
                "first_sample": options["first_sample"] + s,
            }
            own = {**options, **place, "samples": 1}
            one = sb.draw(model, *(x[i : i + 1].detach().clone() for x in inputs), **own, **net.call)
            parts = [
                y.unflatten(0, (components, samples))[:, s, i : i + 1] if isinstance(y, Tensor) else y
                for y in whole
            ]
            same_tree(f"{what}: example {i}, sample {s} alone", pytree.tree_leaves(one), parts)
    return Outcome(EQUAL, *who)


def neutralize(model: nn.Module) -> None:
    """Factors that change nothing, and spreads as small as they get."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Rank1Rule):
                for factor in (module.r, module.s):
                    if factor is not None:
                        log_space = isinstance(factor.spread, LogNormalPosterior)
                        factor.loc.fill_(0.0 if module.additive or log_space else 1.0)
        for name, parameter in model.named_parameters():
            if name.split(".")[-1] in ("rho", "log_u", "log_v"):
                parameter.fill_(-60.0)


@st.composite
def _neutral(draw: Any) -> Any:
    """Methods whose components all start as the given network."""
    method = draw(methods.valid())
    if isinstance(method, sb.EMP | sb.ECMP):
        return type(method)(components=method.components, learn_mixing=method.learn_mixing)
    if isinstance(method, sb.DeepEnsemble):
        return sb.DeepEnsemble(method.members, reinitialize=False)
    return method


def plain(data: Any) -> Outcome:
    """Neutral factors and no spread: every draw is the plain network, with noise off, and with noise of 1e-7."""
    net, method = data.draw(networks.nets()), data.draw(_neutral())
    done, model = converted(data, net, method)
    who = methods.label(method), net.kind
    if not done:
        return Outcome(REFUSED, *who)
    neutralize(model)
    dropped = isinstance(method, sb.MCDropout | sb.DropConnect)
    noise = data.draw(st.sampled_from(["mean"] if dropped else ["mean", "mean", "example", "shared"]))
    samples, seed = data.draw(st.integers(1, 3)), data.draw(st.one_of(st.none(), SEEDS))
    training = not net.dropout and noise == "mean" and data.draw(st.booleans())
    reference, batch = copy.deepcopy(net.module).train(training), data.draw(st.integers(1, 3))
    model.train(training)
    inputs = inputs_of(data, net, batch, torch.float64)
    what = f"neutral {method} on {net.kind} {net.module}, {noise}, samples={samples}, seed={seed}, train={training}"
    gradients = data.draw(st.booleans())
    step = getattr(method, "components_per_step", None) if training else None
    draws = (step or find_record(model).components) * samples
    with torch.set_grad_enabled(gradients):
        allowed, expected = None, None
        try:  # on the same rows: statistics of a batch are those of all of them
            expected = reference(*(torch.cat([x] * draws) for x in inputs), **net.call)
        except Exception as error:
            allowed = error
        done, ours = attempt(
            lambda: sb.draw(model, *inputs, samples=samples, noise=noise, seed=seed, **net.call),
            allowed,
            what=what,
        )
    if not done:
        return Outcome(REFUSED, *who)
    folded = pytree.tree_map(lambda y: y.unflatten(0, (draws, -1)) if isinstance(y, Tensor) else y, expected)
    if noise == "mean":
        same_tree(what, ours, folded, 1e-9)
    elif "cauchy" not in getattr(method, "posterior", ""):  # whose tails reach anywhere, be the scale 1e-7
        same_tree(what, ours, folded, 1e-4, least=1.0)
    else:
        same_tree(what, ours, folded, 1e-1, least=1.0)
    return Outcome(EQUAL, *who)


def split(data: Any) -> Outcome:
    """With a seed the batch may be cut anywhere, and so may the samples: chunks of ``sb.predict`` included."""
    done, net, method, model, who = built(data)
    if not done:
        return Outcome(REFUSED, *who)
    batch, samples = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    cut, seed = data.draw(st.integers(1, batch - 1)), data.draw(SEEDS)
    noise = data.draw(st.sampled_from(["example", "shared", "mean"]))
    inputs = net.inputs(batch)
    what = f"{method} on {net.kind} {net.module}, {cut} of {batch}, samples={samples}, noise={noise}, seed={seed}"
    with torch.set_grad_enabled(data.draw(st.booleans())):
        allowed = refusal_of(lambda: copy.deepcopy(net.module)(*inputs, **net.call))
        done, whole = attempt(
            lambda: sb.draw(model, *inputs, samples=samples, noise=noise, seed=seed, **net.call),
            allowed,
            what=what,
        )
        if not done:
            return Outcome(REFUSED, *who)
        parts = [
            sb.draw(
                model,
                *(x[a:b] for x in inputs),
                samples=samples,
                noise=noise,
                seed=seed,
                first_example=a,
                **net.call,
            )
            for a, b in ((0, cut), (cut, batch))
        ]
    joined = [
        torch.cat(column, 1) if isinstance(column[0], Tensor) else column[0]
        for column in zip(*map(pytree.tree_leaves, parts), strict=True)
    ]
    same_tree(what, pytree.tree_leaves(whole), joined, 1e-8)
    first = next(y for y in pytree.tree_leaves(whole) if isinstance(y, Tensor))
    chunk = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    predictive = sb.predict(
        model, *inputs, samples=samples, noise=noise, seed=seed, chunk=chunk, likelihood=sb.Gaussian(),
        select=lambda output: next(y for y in pytree.tree_leaves(output) if isinstance(y, Tensor)), **net.call,
    )  # fmt: skip
    same_tree(f"{what}, chunk={chunk}", predictive.draws, first.detach(), 1e-8)
    return Outcome(EQUAL, *who)
