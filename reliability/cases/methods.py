"""Methods with generated options: valid ones in combination, and values that mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import slimbayes as sb
from slimbayes.core.layers.table import converted_class

Draw = Callable[..., Any]
_SCALES = st.sampled_from([1e-3, 0.05, 0.3, 1.0])
_TEMPERATURES = st.sampled_from([1.0, 0.3, 0.0])
_TIMES = st.sampled_from([1.0, 4.0, 0.5])  # a rate of learning


@st.composite
def rank1(draw: Draw) -> sb.Rank1:
    """Every posterior, prior, factor and perturbation."""
    posterior = draw(st.sampled_from(["normal", "normal", "cauchy", "lognormal", "halfcauchy", "delta"]))
    factors = draw(st.sampled_from(["both", "both", "input", "output"]))
    additive = posterior != "lognormal" and draw(st.sampled_from([False, False, True]))
    components = draw(st.integers(1, 7))
    own = {"normal": sb.Normal, "cauchy": sb.Cauchy, "lognormal": sb.LogNormal, "halfcauchy": sb.HalfCauchy}
    prior = None
    if posterior in own and draw(st.booleans()):
        prior = own[posterior](draw(st.sampled_from([0.0, 1.0, -0.5])), draw(_SCALES))
    random = "both"
    if posterior != "delta" and draw(st.booleans()):
        random = draw(
            st.sampled_from(["both", factors] if factors != "both" else ["both", "input", "output"])
        )
    return sb.Rank1(
        components=components, posterior=posterior, prior=prior, factors=factors, random=random,
        perturbation="additive" if additive else "multiplicative",
        random_sign_init=draw(st.sampled_from([-0.5, 0.0] if additive else [-0.5, 0.0, 0.5, 1.0])),
        dropout_rate=draw(st.sampled_from([1e-6, 1e-3, 0.2, None])),
        kl_reduction=draw(st.sampled_from(["sum", "mean", "monte_carlo"])),
        clip=draw(st.sampled_from([10.0, 1.0, None])),
        components_per_step=draw(st.sampled_from([None, None, 1, components])),
        train_base=draw(st.sampled_from([True, True, False])),
        temperature=draw(_TEMPERATURES), spread_rate=draw(_TIMES),
    )  # fmt: skip


@st.composite
def sampled(draw: Draw, kind: str) -> sb.MeanField | sb.KTied:
    """MeanField or KTied; ranks may be above the matrix's."""
    relative = sb.RelativeNormal(), sb.RelativeNormal(0.2, 0.0)
    prior = draw(st.sampled_from([sb.Normal(0.0, 1.0), sb.Normal(0.5, 0.3), sb.HeNormal(), *relative]))
    options: dict[str, Any] = {
        "prior": prior, "stddev_init": draw(st.sampled_from([0.01, 0.3])), "biases": draw(st.booleans()),
        "estimator": draw(st.sampled_from(["shared", "shared", "flipout", "local"])),
        "temperature": draw(_TEMPERATURES), "spread_rate": draw(_TIMES),
    }  # fmt: skip
    if kind == "KTied":
        return sb.KTied(rank=draw(st.integers(1, 9)), **options)
    cap = draw(st.sampled_from([None, None, 0.3]))
    return sb.MeanField(tied_mean=draw(st.booleans()), stddev_max=cap, **options)


@st.composite
def patching(draw: Draw, kind: str) -> sb.EMP | sb.ECMP:
    """EMP or ECMP, with learned and uniform mixing."""
    options: dict[str, Any] = {
        "components": draw(st.integers(1, 7)), "learn_mixing": draw(st.booleans()),
        "prior_precision": draw(st.sampled_from([None, 0.5, 4.0])),
        "init_noise": draw(st.sampled_from([0.5, 0.5, 0.0])), "component_rate": draw(_TIMES),
    }  # fmt: skip
    if kind == "ECMP":
        return sb.ECMP(**options)
    return sb.EMP(own_statistics=draw(st.booleans()), **options)


@st.composite
def others(draw: Draw) -> Any:
    """The baselines."""
    rate = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return sb.MCDropout(rate, draw(st.sampled_from(["element", "channel"])))
    if kind == 1:
        return sb.DropConnect(rate)
    if kind == 2:
        return sb.DeepEnsemble(draw(st.integers(1, 5)), draw(st.sampled_from([True, False, scramble])))
    if kind == 3:
        return sb.BatchEnsemble(draw(st.integers(1, 7)), draw(st.sampled_from([-0.5, 0.5, 1.0])))
    return sb.Deterministic()


def scramble(member: nn.Module) -> None:
    """Other values in every tensor of a member."""
    with torch.no_grad():
        for parameter in member.parameters():
            parameter.normal_(0.0, 0.7)


def valid() -> st.SearchStrategy[Any]:
    """Any method with options that go together."""
    return st.one_of(
        rank1(), rank1(), sampled("MeanField"), sampled("KTied"), patching("EMP"), patching("ECMP"), others(), others()
    )  # fmt: skip


def label(method: Any) -> str:
    """A method's name, with its estimator where it has one."""
    estimator = getattr(method, "estimator", None)
    return type(method).__name__ + (f" {estimator}" if estimator else "")


def convert(net: nn.Module, method: Any) -> nn.Module:
    """Convert every layer of a type that is known; an ensemble takes all of the network."""
    include = None if isinstance(method, sb.DeepEnsemble) else _known
    return sb.bayesianize(net, method, include=include)


def convert_default(net: nn.Module, method: Any) -> nn.Module:
    """Convert what the method selects by itself."""
    return sb.bayesianize(net, method)


def _known(name: str, module: nn.Module) -> bool:
    affine = getattr(module, "weight", module) is not None  # else there is nothing to be random
    return converted_class(module) is not None and affine and not name.endswith("out_proj")


_COUNT = [0, -1, 2.5, "3", None, True, float("nan"), [2]]
_FLAG = ["yes", 2, None, 0.5, [True]]
_CHOICE = ["", "both ", "Normal", 3, None, True, ["shared"]]
_POSITIVE = [0.0, -1.0, float("nan"), float("inf"), "1", [1.0], True]
_RATE = [-0.1, 1.0, 1.5, float("nan"), "0.1", None, [0.1]]
_PRIOR = ["normal", 1.0, sb.Normal, [sb.Normal(0.0, 1.0)]]
# What an option of a method cannot be.
INVALID: dict[str, dict[str, list[Any]]] = {
    "Rank1": {
        "components": _COUNT, "posterior": _CHOICE, "prior": _PRIOR, "factors": _CHOICE[1:],
        "perturbation": _CHOICE, "random_sign_init": [1.5, float("nan"), float("inf"), "a", None, [1]],
        "dropout_rate": [0.0, 1.0, -1.0, float("nan"), "a", True], "kl_reduction": _CHOICE, "random": _CHOICE[1:],
        "clip": _POSITIVE, "components_per_step": [0, -1, 9, 2.5, "1", True], "train_base": _FLAG,
    },
    "BatchEnsemble": {"components": _COUNT, "random_sign_init": [1.5, float("nan"), "a", None]},
    "MeanField": {
        "prior": [*_PRIOR, None, sb.LogNormal(0.0, 1.0)], "stddev_init": [*_POSITIVE, None], "estimator": _CHOICE,
        "biases": _FLAG, "tied_mean": _FLAG, "stddev_max": [*_POSITIVE, 1e-9],
    },
    "KTied": {
        "rank": _COUNT, "prior": [*_PRIOR, None, sb.Cauchy(0.0, 1.0)], "stddev_init": [*_POSITIVE, None],
        "estimator": _CHOICE, "biases": _FLAG,
    },
    "EMP": {
        "components": _COUNT, "patch": [(), 3, None, (1,), ("nothing of that name",), [None]], "learn_mixing": _FLAG,
        "prior_precision": _POSITIVE, "init_noise": [-1.0, float("nan"), float("inf"), "a", None],
        "own_statistics": _FLAG,
    },
    "ECMP": {"components": _COUNT, "prior_precision": _POSITIVE, "init_noise": [-1.0, float("nan"), "a"]},
    "MCDropout": {"rate": _RATE, "granularity": _CHOICE},
    "DropConnect": {"rate": _RATE},
    "DeepEnsemble": {"members": _COUNT, "reinitialize": ["yes", None, 3]},
    "Normal": {"loc": [float("nan"), float("inf"), "a", None], "scale": [*_POSITIVE, None]},
    "Cauchy": {"loc": [float("nan"), "a"], "scale": [*_POSITIVE, None]},
    "LogNormal": {"scale": [*_POSITIVE, None]},
    "HalfCauchy": {"loc": ["a", None], "scale": _POSITIVE},
    "Categorical": {"class_axis": [0, "a", 1.5, None], "temperature": _POSITIVE, "ignore_index": ["a", 1.5]},
    "Bernoulli": {"temperature": [*_POSITIVE, None]},
    "Gaussian": {"precision": [*_POSITIVE, "a"], "learn": _CHOICE, "outputs": [0, 2, -1]},
    "LinearAnnealing": {"steps": [0, -1, "a", None, float("nan")], "start": [-1, 10, 2.5, True, "a"]},
    "StepAnnealing": {"coefficient": [0.0, -1.0, float("nan"), "a", None], "every": [0, -1, "a", None]},
}  # fmt: skip
# What the other arguments are, where there is no default.
NEEDED: dict[str, dict[str, Any]] = {
    "LinearAnnealing": {"steps": 10}, "StepAnnealing": {"coefficient": 0.1},
}  # fmt: skip
# Numbers as other libraries have them: right in value, of another type.
FOREIGN = [np.float64(0.25), np.float32(0.25), np.int64(2), torch.tensor(0.25), torch.tensor(2)]
