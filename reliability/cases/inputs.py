"""Cases of inputs that are not what the network takes: shapes, types, devices, values, and arguments of a call."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import slimbayes as sb
from reliability.cases import methods, networks
from reliability.cases.draws import built, converted
from reliability.cases.judging import EQUAL, REFUSED, Outcome, Wrong, attempt, refusal_of, same_tree
from reliability.cases.replay import NoReference, Replay
from slimbayes.core.conversion import find_record

TYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


def _changed(data: Any, x: Tensor) -> tuple[str, Any]:
    """One input in another shape, of another type, with other values, or no tensor at all."""
    form = data.draw(
        st.sampled_from(
            ["features", "features less", "no batch", "extra axis", "trailing axis", "type", "type", "empty", "scalar",
             "meta", "nan", "infinite", "none", "list", "numpy", "text", "negative", "one example", "zero steps"]
        )
    )  # fmt: skip
    if form == "features":
        return form, torch.cat([x, x], -1)
    if form == "features less":
        return form, x[..., :-1] if x.dim() > 1 else x[:, None]
    if form == "no batch":
        return form, x[0]
    if form == "extra axis":
        return form, x.unsqueeze(1).repeat(1, 2, *[1] * (x.dim() - 1))
    if form == "trailing axis":
        return form, x.unsqueeze(-1)
    if form == "type":
        return form, x.to(data.draw(st.sampled_from(TYPES)))
    if form == "empty":
        return form, x[:0]
    if form == "scalar":
        return form, x.flatten()[0]
    if form == "meta":
        return form, x.to("meta")
    if form in ("nan", "infinite") and x.is_floating_point():
        value = float("nan") if form == "nan" else float("inf")
        x = x.clone()
        x.view(-1)[0] = value
        return form, x
    if form == "negative" and not x.is_floating_point():
        return form, x - data.draw(st.sampled_from([100, -100]))
    if form == "zero steps" and x.dim() > 2:
        return form, x[:, :0]
    if form in ("none", "list", "numpy", "text"):
        return form, {"none": None, "list": x.tolist(), "numpy": x.numpy(), "text": "x"}[form]
    return "one example", x[:1]


def changed(data: Any) -> Outcome:
    """What the plain network refuses is refused; what it takes gives its outputs, or a documented error."""
    done, net, method, model, who = built(data)
    if not done:
        return Outcome(REFUSED, *who)
    inputs = list(net.inputs(data.draw(st.integers(1, 3))))
    which = data.draw(st.integers(0, len(inputs) - 1))
    form, given = _changed(data, inputs[which])
    recurrent = net.kind.removesuffix("Cell") in ("LSTM", "GRU", "RNN")
    if recurrent and form == "meta":
        form, given = "one example", inputs[which][:1]  # torch's own recurrent layers crash on these
    inputs[which] = given
    states = which > (1 if net.lengths else 0)
    crashes = recurrent and states and isinstance(given, Tensor) and form not in ("type", "nan", "infinite")
    noise = data.draw(st.sampled_from(["mean", "example", "shared"]))
    samples = data.draw(st.integers(1, 2))
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in inputs]
    what = f"{method} on {net.kind} {net.module}, input {which} is {form}, {shapes}, noise={noise}, samples={samples}"
    allowed, expected = None, None
    with torch.set_grad_enabled(data.draw(st.booleans())):
        try:
            if crashes:  # torch's kernels read beyond states of another shape
                raise RuntimeError("states of another shape")
            expected = copy.deepcopy(net.module)(*inputs, **net.call)
        except Exception as error:
            allowed = error
        done, ours = attempt(
            lambda: sb.draw(model, *inputs, samples=samples, noise=noise, seed=3, **net.call),
            allowed,
            what=what,
            misfit=form in ("no batch", "scalar", "trailing axis"),
        )
    if not done:
        return Outcome(REFUSED, *who)
    draws = find_record(model).components * samples
    if allowed is not None:
        _lenient(model, net, inputs, ours, samples, noise, what, allowed)
    elif any(isinstance(x, Tensor) and x.device.type == "meta" for x in inputs):
        _shapes(ours, expected, draws, what)
    elif isinstance(inputs[0], Tensor) and all(isinstance(x, Tensor) for x in inputs):
        _equal(model, net, inputs, ours, samples, noise, what)
    return Outcome(EQUAL, *who)


def _equal(
    model: Any, net: networks.Net, inputs: list[Any], ours: Any, samples: int, noise: str, what: str
) -> None:
    if len({len(x) for x in inputs if x.dim()}) > 1:  # an input that all rows share: compare the shapes alone
        expected = copy.deepcopy(net.module)(*inputs, **net.call)
        _shapes(ours, expected, find_record(model).components * samples, what)
        return
    draws = find_record(model).components * samples
    expected = refusal_of(lambda: copy.deepcopy(net.module)(*(x[:1] for x in inputs), **net.call))
    if expected is not None:  # one example without a batch: as it is, where there is one draw
        whole = copy.deepcopy(net.module)(*inputs, **net.call)
        _shapes(ours, whole, draws, what)
        return
    try:
        with torch.no_grad():
            reference = Replay(net.module, model).draw(
                tuple(inputs), net.call, samples=samples, noise=noise, seed=3
            )
    except NoReference:
        return
    bad = any(x.is_floating_point() and not torch.isfinite(x).all() for x in inputs)
    if not bad:
        same_tree(what, ours, reference, 1e-9)
        return
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(reference), strict=True):
        if isinstance(b, Tensor):
            if a.shape != b.shape:
                raise Wrong(f"{what}: shape {list(a.shape)}, the reference has {list(b.shape)}")
            hidden = ~torch.isfinite(b) & torch.isfinite(a)
            if hidden.any():
                raise Wrong(f"{what}: {int(hidden.sum())} outputs are finite that are not in the reference")


def _shapes(ours: Any, expected: Any, draws: int, what: str) -> None:
    """Every output has the plain network's shape, with the draws in front."""
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True):
        if isinstance(b, Tensor) and a.shape != (draws, *b.shape):
            raise Wrong(
                f"{what}: shape {list(a.shape)}, plain outputs are {list(b.shape)} and there are {draws} draws"
            )


def _lenient(
    model: Any,
    net: networks.Net,
    inputs: list[Any],
    ours: Any,
    samples: int,
    noise: str,
    what: str,
    error: Exception,
) -> None:
    """Ours took what torch refuses: right where that was a matter of types and the values are those of floats."""
    wide = [
        x.double() if isinstance(x, Tensor) and not x.is_complex() and not (net.index and i == 0) else x
        for i, x in enumerate(inputs)
    ]
    try:
        copy.deepcopy(net.module)(*wide, **net.call)
    except Exception:
        raise Wrong(f"{what}: accepted, where torch says {type(error).__name__}: {error}") from error
    _equal(model, net, wide, ours, samples, noise, what)


_BAD_CALLS: dict[str, list[Any]] = {
    "samples": [0, -1, 2.5, "3", None, True, float("nan"), np.int64(2), [1]],
    "noise": ["", "Example", None, 3, True, ["mean"]],
    "seed": [1.5, "a", [1], torch.tensor(3), np.int64(3), float("nan"), None, True],
    "first_example": [-1, 2.5, "a", None, 2**40, True, np.int64(1)],
    "first_sample": [-1, 2.5, "a", None, 2**40, True, np.int64(1)],
    "shared_inputs": [["nothing"], [5], [-1], 3, "nothing", None, [None], [1.5]],
    "chunk": [0, -1, 2.5, "a", True, float("nan")],
    "likelihood": ["Categorical", 3, sb.Categorical],
    "select": [3, "logits", lambda output: None, lambda output: output[0, 0]],
    "keep_draws": ["yes", 2],
}


_OF_DRAW = ("samples", "noise", "seed", "first_example", "first_sample", "shared_inputs")


def arguments(data: Any) -> Outcome:
    """An argument of ``draw`` or ``predict`` that means nothing is named; numbers of other libraries are as good."""
    method = data.draw(methods.valid())
    net = data.draw(networks.nets(("linear", "network"), statistics=True))
    done, model = converted(data, net, method)
    who = methods.label(method), net.kind
    if not done:
        return Outcome(REFUSED, *who)
    model.eval()
    inputs = net.inputs(2)
    verb = data.draw(st.sampled_from(["draw", "predict"]))
    names = [name for name in _BAD_CALLS if verb == "predict" or name in _OF_DRAW]
    if verb == "predict":
        names.remove("first_sample")
    name = data.draw(st.sampled_from(names))
    value = data.draw(st.sampled_from(_BAD_CALLS[name]))
    what = f"sb.{verb}({name}={value!r}) of {method} on {net.kind}"
    base: dict[str, Any] = {"seed": 4, "samples": 2}
    if verb == "predict":
        base |= {"likelihood": sb.Gaussian(), "select": _first}

    def run(options: dict[str, Any]) -> Any:
        made = getattr(sb, verb)(model, *inputs, **options, **net.call)
        return _first(made) if verb == "draw" else made.mean

    tokens = (name, repr(value)) if name not in ("select", "likelihood") else ()
    done, ours = attempt(lambda: run({**base, name: value}), tokens=tokens, what=what)
    if not done:
        return Outcome(REFUSED, *who)
    same = {np.int64: int, bool: int}.get(type(value))
    if value is None or name in ("select", "likelihood", "keep_draws") or (name, value) in (("chunk", True),):
        return Outcome(EQUAL, *who) if _meant(name, value) else _silent(what)
    if same is None and not (name.startswith("first") and value == 2**40):
        return _silent(what)
    expected = run({**base, name: same(value) if same else value})
    same_tree(what, ours, expected)
    return Outcome(EQUAL, *who)


def _first(output: Any) -> Tensor:
    return next(y for y in pytree.tree_leaves(output) if isinstance(y, Tensor))


def _meant(name: str, value: Any) -> bool:
    """None is a value of these, and one example's outputs can be selected."""
    return (value is None and name in ("seed", "shared_inputs", "chunk")) or (
        name == "select" and callable(value)
    )


def _silent(what: str) -> Outcome:
    raise Wrong(f"{what}: accepted without a word")
