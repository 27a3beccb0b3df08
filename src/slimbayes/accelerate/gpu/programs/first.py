# mypy: ignore-errors
"""Gradients of a convolution of few channels and of the factor on its input in one sweep."""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl


@jit(do_not_specialize=["C", "OW", "P", "KH", "J", "splits", "items", "per", "blocks"])
def stem_gradients(
    g, x, w, s, line_sums, tap_sums, K, C, XR, down, next_line, along, OW, P, KH, J, splits, items, per, blocks,
    BP: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BT: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """For the rows of one program: G[k, t] = Σ_p g[p, k]·x[p, t], then Σ_k w∘G of every row, and Σ over rows of s∘G.

    g is [R, P, K]. x has its channels filled up to four and its borders with zeros: what the kernel covers at one
    position is KH lines of J numbers, ``down`` apart; the next position is ``along`` further, that in the next line of
    OW positions ``next_line``. w is [K, KH, J], four channels too; t counts lines of BJ numbers. A row is cut in
    ``splits`` pieces of ``per`` positions; line_sums is [R·splits, blocks, BT], tap_sums [programs, BK, BT].
    """
    pid = tl.program_id(0)
    workers = tl.num_programs(0) // blocks
    k = (pid % blocks) * BK + tl.arange(0, BK)
    t = tl.arange(0, BT)
    line = tl.where(t // BJ < KH, t // BJ, 0)
    valid = (t // BJ < KH) & (t % BJ < J)
    offset = tl.max_contiguous(tl.multiple_of(line * down + t % BJ, VEC), VEC)
    keep = (k < K)[:, None] & valid[None, :]
    weight = tl.load(w + k[:, None] * (KH * J) + (line * J + t % BJ)[None, :], mask=keep, other=0.0)
    weight = weight.to(tl.float32)
    total = tl.zeros((BK, BT), dtype=tl.float32)
    for item in range(pid // blocks, items, workers):
        row = item // splits
        begin = (item % splits) * per
        end = tl.minimum(begin + per, P)
        g_row = g + tl.cast(row, tl.int64) * P * K
        x_row = x + tl.cast(row, tl.int64) * XR
        taps = tl.zeros((BK, BT), dtype=tl.float32)
        for start in tl.range(begin, end, BP, num_stages=STAGES):
            p = start + tl.arange(0, BP)
            q = tl.minimum(p, P - 1)
            grad = tl.load(
                g_row + q[None, :] * K + k[:, None], mask=(p < end)[None, :] & (k < K)[:, None], other=0.0
            )
            at = tl.multiple_of((q // OW) * next_line + (q % OW) * along, VEC)
            value = tl.load(x_row + at[:, None] + offset[None, :])
            taps = tl.dot(grad, value, taps, input_precision="ieee")
        tl.store(line_sums + (item * blocks + pid % blocks) * BT + t, tl.sum(taps * weight, axis=0))
        factor = tl.load(s + row * C + t % 4, mask=t % 4 < C, other=0.0).to(tl.float32)
        total += taps * factor[None, :]
    where = (pid * BK + tl.arange(0, BK))[:, None] * BT + t[None, :]
    tl.store(tap_sums + where, total)
