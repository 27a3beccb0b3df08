# mypy: ignore-errors
"""Σ over positions of x∘(gradient of a convolution's input), without that gradient ever in memory."""

from __future__ import annotations

from slimbayes.kernels.programs.language import jit, tl


@jit(do_not_specialize=["H", "W", "OW", "P", "T", "KW", "stride_h", "stride_w", "pad_h", "pad_w", "blocks"])
def factor_sums(
    g, x, w, out, K, C, H, W, OW, P, T, KW, stride_h, stride_w, pad_h, pad_w, blocks,
    BP: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """For BP output positions of one row and every input channel: Σ_p Σ_t x[p, t]·(Σ_k g[p, k]·w[k, t]).

    g is [R, P, K], x is [R, H, W, C], w is [C, K, T] with T taps; out is [R, blocks, C].
    """
    pid = tl.program_id(0)
    row = pid // blocks
    p = (pid % blocks) * BP + tl.arange(0, BP)
    t = tl.arange(0, BT)
    y_at = ((p // OW) * stride_h - pad_h)[:, None] + (t // KW)[None, :]
    x_at = ((p % OW) * stride_w - pad_w)[:, None] + (t % KW)[None, :]
    inside = (p < P)[:, None] & (t < T)[None, :]
    inside = inside & (y_at >= 0) & (y_at < H) & (x_at >= 0) & (x_at < W)
    where = (y_at * W + x_at) * C
    g_row = g + row.to(tl.int64) * P * K
    x_row = x + row.to(tl.int64) * H * W * C
    for c in range(C):
        back = tl.zeros((BP, BT), dtype=tl.float32)
        for first in range(0, K, BK):
            k = first + tl.arange(0, BK)
            keep = (p < P)[:, None] & (k < K)[None, :]
            grad = tl.load(g_row + p[:, None] * K + k[None, :], mask=keep, other=0.0)
            taps = (k < K)[:, None] & (t < T)[None, :]
            weight = tl.load(w + (c * K + k[:, None]) * T + t[None, :], mask=taps, other=0.0)
            back = tl.dot(grad, weight, back, input_precision="ieee")
        value = tl.load(x_row + where + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + pid * C + c, tl.sum(tl.sum(back * value, axis=1), axis=0))
