# mypy: ignore-errors
"""Row factors: x∘f forward, and both gradients in one sweep backward.

"last" is memory [R, P, C] (channels last), "first" is memory [R, C, P]; P counts spatial positions. Offsets
inside one row are 32-bit, the row's own offset is 64-bit. ``repeats`` consecutive rows share one line of factors;
the gradient has a line for each row.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl


@jit
def scale_last(x, f, y, P, C, f_row, f_column, repeats, BP: tl.constexpr, BC: tl.constexpr):
    """Scale one tile of BP positions and BC channels of one row."""
    pid = tl.program_id(0)
    p_blocks = tl.cdiv(P, BP)
    c_blocks = tl.cdiv(C, BC)
    row = (pid // p_blocks) // c_blocks
    c = ((pid // p_blocks) % c_blocks) * BC + tl.arange(0, BC)
    p = (pid % p_blocks) * BP + tl.arange(0, BP)
    base = row.to(tl.int64) * P * C
    factor = tl.load(f + (row // repeats).to(tl.int64) * f_row + c * f_column, mask=c < C, other=0.0).to(
        tl.float32
    )
    at = p[:, None] * C + c[None, :]  # [BP, BC]
    inside = (p < P)[:, None] & (c < C)[None, :]
    value = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + base + at, (value * factor[None, :]).to(y.dtype.element_ty), mask=inside)


@jit
def grad_last(
    g, x, f, gx, gf, P, C, f_row, f_column, repeats, gf_split, splits, steps,
    BP: tl.constexpr, BC: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Both gradients for BC channels of one row: gx = g∘f, gf = Σ_p g∘x over ``steps`` tiles of this split."""
    pid = tl.program_id(0)
    c_blocks = tl.cdiv(C, BC)
    split = pid % splits
    row = (pid // splits) // c_blocks
    c = ((pid // splits) % c_blocks) * BC + tl.arange(0, BC)
    base = row.to(tl.int64) * P * C
    keep = c < C
    factor = tl.load(f + (row // repeats).to(tl.int64) * f_row + c * f_column, mask=keep, other=0.0).to(
        tl.float32
    )
    total = tl.zeros((BP, BC), dtype=tl.float32)
    for step in range(steps):
        p = (split * steps + step) * BP + tl.arange(0, BP)
        at = p[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & keep[None, :]
        grad = tl.load(g + base + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32)
        total += grad * value
        if WRITE:
            tl.store(gx + base + at, (grad * factor[None, :]).to(gx.dtype.element_ty), mask=inside)
    out = gf + split * gf_split + row.to(tl.int64) * C + c
    tl.store(out, tl.sum(total, axis=0).to(gf.dtype.element_ty), mask=keep)


@jit(do_not_specialize=["RC"])
def scale_first(x, f, y, RC, P, C, f_row, f_column, repeats, BR: tl.constexpr, BP: tl.constexpr):
    """Scale BR (row, channel) pairs by BP positions."""
    pid = tl.program_id(0)
    p_blocks = tl.cdiv(P, BP)
    pair = (pid // p_blocks) * BR + tl.arange(0, BR)
    p = (pid % p_blocks) * BP + tl.arange(0, BP)
    keep = pair < RC
    factor = tl.load(
        f + (pair // C // repeats).to(tl.int64) * f_row + (pair % C) * f_column, mask=keep, other=0.0
    ).to(tl.float32)  # fmt: skip
    base = ((pid // p_blocks) * BR).to(tl.int64) * P
    at = tl.arange(0, BR)[:, None] * P + p[None, :]  # [BR, BP]
    inside = keep[:, None] & (p < P)[None, :]
    value = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + base + at, (value * factor[:, None]).to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["RC"])
def grad_first(
    g, x, f, gx, gf, RC, P, C, f_row, f_column, repeats, gf_split, splits, steps,
    BR: tl.constexpr, BP: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Both gradients for BR (row, channel) pairs, over ``steps`` tiles of positions of this split."""
    pid = tl.program_id(0)
    split = pid % splits
    first = (pid // splits) * BR
    pair = first + tl.arange(0, BR)
    keep = pair < RC
    factor = tl.load(
        f + (pair // C // repeats).to(tl.int64) * f_row + (pair % C) * f_column, mask=keep, other=0.0
    ).to(tl.float32)  # fmt: skip
    base = first.to(tl.int64) * P
    total = tl.zeros((BR, BP), dtype=tl.float32)
    for step in range(steps):
        p = (split * steps + step) * BP + tl.arange(0, BP)
        at = tl.arange(0, BR)[:, None] * P + p[None, :]
        inside = keep[:, None] & (p < P)[None, :]
        grad = tl.load(g + base + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32)
        total += grad * value
        if WRITE:
            tl.store(gx + base + at, (grad * factor[:, None]).to(gx.dtype.element_ty), mask=inside)
    tl.store(gf + split * gf_split + pair, tl.sum(total, axis=1).to(gf.dtype.element_ty), mask=keep)
