"""Components, patches and members that have become one, and layers that have none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slimbayes.analysis.factors import rank1_factors
from slimbayes.analysis.layers import root_of
from slimbayes.core import distributions as d
from slimbayes.core.conversion import converted_layers, find_record, unwrap
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.methods import ECMP, EMP
from slimbayes.core.selection import EXCLUDED
from slimbayes.verbs.diagnosis import limits
from slimbayes.verbs.diagnosis.findings import Finding

_ONE = "Their mixture is no better than one of them: it costs K times as much for nothing"


def components(model: nn.Module) -> Iterator[Finding]:
    """Components of rank-1 factors that are copies, or hidden by their own noise: where they are so in every factor.

    A single factor in which they are apart makes them different networks, and by default they begin apart in one.
    """
    found: list[Finding] = []
    for name, which, factor, _ in rank1_factors(model):
        q = factor()
        if len(factor.loc) < 2 or isinstance(
            q, d.HalfCauchy
        ):  # whose location is the prior's, for all of them
            continue
        spread = float(factor.loc.double().std(0).mean())
        scale = 0.0 if isinstance(q, d.Delta) else float(q.scale.double().mean())
        limit = max(limits.COLLAPSED, limits.OVERLAP * scale)
        if spread >= limit:
            return
        beside = f", their own scale {scale:.2g}" if scale else ""
        found.append(Finding(
            "components-collapsed", "warning", name,
            f"the components of factor {which} are {spread:.2g} apart on average{beside}",
            _ONE,
            "Anneal the KL later or more slowly, use kl_reduction='mean', or widen the prior (docs/collapse.md)",
            spread, limit,
        ))  # fmt: skip
    yield from found


def patches(model: nn.Module) -> Iterator[Finding]:
    """Patches (EMP, ECMP) and members (DeepEnsemble) that are equal; mixing that has chosen one."""
    root = root_of(model)
    mixings = set()
    for name, layer in converted_layers(root):
        law = layer.bayes.mixing_law()
        if law is None or layer.weight.shape[0] < 2:
            continue
        yield from _equal("patches", name, [t for t in (layer.weight, layer.bias) if t is not None])
        if law.logits is not None and law not in mixings:
            mixings.add(law)
            top = float(law.logits.double().softmax(0).max())
            if top > limits.MIXING_TOP:
                yield Finding(
                    "mixing-collapsed", "warning", name, f"one patch has the probability {top:.3f}",
                    "Nearly all draws take the same patch, so that there is hardly an ensemble",
                    "Fix the mixing (learn_mixing=False), learn it later or at a lower rate, or give it a prior "
                    "(prior_precision), which holds it near uniform",
                    top, limits.MIXING_TOP,
                )  # fmt: skip
    for name, module in root.named_modules():
        if isinstance(module, Ensembled):
            yield from _equal("members", name, list(module.parameters()))


def _equal(kind: str, name: str, tensors: list[Tensor]) -> Iterator[Finding]:
    wide = [tensor.double().flatten(1) for tensor in tensors]  # [K, ...]
    spread = torch.cat([tensor.std(0) for tensor in wide]).square().mean().sqrt()
    size = torch.cat([tensor.flatten() for tensor in wide]).square().mean().sqrt()
    ratio = float(spread / size.clamp_min(1e-30))
    if ratio < limits.EQUAL:
        remedy = "Train them (each draw its own), or set them apart at the start (init_noise=0.01)"
        if kind == "members":
            remedy = "Re-initialise them: DeepEnsemble(reinitialize=True)"
        yield Finding(
            "components-collapsed", "warning", name, f"the {kind} differ by {ratio:.1g} of their size",
            _ONE, remedy, ratio, limits.EQUAL,
        )  # fmt: skip


def unconverted(model: nn.Module) -> Iterator[Finding]:
    """Layers without a posterior: of types that nothing converts, or so many that most of the network is a point."""
    record, root = find_record(model), root_of(model)
    if not record.layers:
        return  # sb.Deterministic: on purpose
    modules = dict(root.named_modules())
    total = max(1, sum(p.numel() for p in root.parameters()))
    weighted = 0
    for name, kind, reason in record.left_alone:
        own = sum(p.numel() for p in modules[name].parameters())
        if "no converted class" in reason:
            yield Finding(
                "left-unconverted", "notice" if own < 0.01 * total else "warning", name,
                f"{kind} with {own:,} parameters was left alone: {reason}", "It stays a point estimate",
                "Write it with torch's own layers, or leave it: what is uncertain about it is not in the predictions",
                own / total, 0.01,
            )  # fmt: skip
        elif reason != EXCLUDED and not re.search("Norm|Embedding", kind):
            weighted += own
    patching = any(isinstance(method, EMP | ECMP) for method in record.methods)
    if weighted > limits.LEFT_SHARE * total and not patching:
        yield Finding(
            "left-unconverted", "notice", "",
            f"{100 * weighted / total:.0f} % of the parameters are in layers left alone",
            "Their weights are point estimates, as include or the rules say",
            "Leave include out to convert every layer, or keep it: a Bayesian head on a plain network is a choice",
            weighted / total, limits.LEFT_SHARE,
        )  # fmt: skip


def norms(model: nn.Module) -> Iterator[Finding]:
    """BatchNorm that predicts in training mode, or that has never seen a batch."""
    for name, module in unwrap(model).named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.training:
            yield Finding(
                "batchnorm-in-training", "warning", name, "this BatchNorm is in training mode",
                "An example's output depends on its batch, and the running averages change with every pass",
                "Call model.eval() before sb.draw or model(x); sb.predict and sb.evaluate do so themselves", 1, 0,
            )  # fmt: skip
        elif module.num_batches_tracked is not None and not bool(module.num_batches_tracked.any()):
            yield Finding(
                "batchnorm-unused", "warning", name, "this BatchNorm has seen no batch",
                "In eval mode it uses mean 0 and variance 1, which no data gave",
                "Train the model, or load a checkpoint with running statistics", 0, 1,
            )  # fmt: skip
