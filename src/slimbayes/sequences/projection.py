"""One weight matrix of an attention layer on whole sequences: rows come first, x [R, T, in]."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.core.context import repeat_rows
from slimbayes.core.rules.kernel_map import Mapped, expand_groups
from slimbayes.core.rules.local import spoil_infinite


def project(one: Mapped, x: Tensor, draws: int = 1) -> Tensor:
    """The kernel's output [R, T, out] for x [R, T, in]; with ``draws`` x has the rows of one and stands for all."""
    if draws > 1 and not (one.before is None and one.by_group and one.groups in (1, draws)):
        x, draws = repeat_rows(x, draws), 1
    if one.before is not None:
        x = one.before(x)
    if one.whole is not None:
        return one.whole(x)
    groups = one.groups
    if one.by_group and groups == 1:
        y = F.linear(x, one.weight.squeeze(0), None if one.bias is None else one.bias.squeeze(0))
        return repeat_rows(y, draws)
    if one.by_group:
        y = _product(x, one.weight, draws)
        if one.bias is None:
            return y
        bias = expand_groups(one.bias, groups)[:, None, None]  # [G or 1, 1, 1, out]
        split: Tensor = y.unflatten(0, (groups, -1))
        return (split + bias).flatten(0, 1)
    y = _product(x if one.inner is None else x * one.inner.unsqueeze(1), one.weight)
    if one.outer is not None:
        y = y * one.outer.unsqueeze(1)
    if one.flips is not None:
        second = _product(x * one.flips.inner.unsqueeze(1), one.flips.delta)
        y = torch.addcmul(y, second, one.flips.outer.unsqueeze(1))
    if one.local is not None:
        stddev = one.local.stddev(x)
        y = torch.addcmul(spoil_infinite(y, stddev), stddev, one.local.noise(y))
    offset = one.offset(x.shape[0])  # [R or 1, out]
    return y if offset is None else y + offset.unsqueeze(1)


def rows_of(one: Mapped, start: int, stop: int) -> Mapped:
    """The kernel of some rows of the matrix alone."""

    def part(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[..., start:stop]

    flips, local, whole = one.flips, one.local, one.whole
    if whole is not None:
        return replace(one, whole=lambda x: whole(x)[..., start:stop])
    if flips is not None:
        flips = replace(flips, delta=flips.delta[:, start:stop], outer=flips.outer[:, start:stop])
    if local is not None:
        local = replace(local, squares=(*local.squares[:-1], local.squares[-1][start:stop]))
    return replace(
        one, weight=one.weight[:, start:stop], bias=part(one.bias), outer=part(one.outer), shift=part(one.shift),
        flips=flips, local=local,
    )  # fmt: skip


def _product(x: Tensor, weight: Tensor, draws: int = 1) -> Tensor:
    """x [R, T, in] in groups of rows times weight [G, out, in]; with ``draws`` every group has all rows."""
    groups = weight.shape[0]
    if groups == 1:
        return repeat_rows(F.linear(x, weight.squeeze(0)), draws)
    rows = x.reshape(1 if draws > 1 else groups, -1, x.shape[-1])  # [G or 1, R/G·T, in]
    y = torch.matmul(rows, weight.transpose(1, 2))
    return y.reshape(-1, x.shape[1], weight.shape[1])
