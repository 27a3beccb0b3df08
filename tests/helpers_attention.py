"""Attention layers inside networks that keep the batch outermost, and every kind of mask."""

import torch
from torch import nn

SIZE, HEADS, BATCH, TARGETS, KEYS = 4, 2, 3, 3, 4
SEPARATE = {"kdim": 3, "vdim": 5}


class Attended(nn.Module):
    """One attention layer; ``form``: "self", "memory" (key is value), "three", or "single" (no batch)."""

    def __init__(self, form="three", **options):
        super().__init__()
        self.form = form
        self.attention = nn.MultiheadAttention(SIZE, HEADS, **options)

    def forward(self, query, key, value, **masks):
        if self.form == "self":
            key = value = query
        elif self.form == "memory":
            value = key
        given = [query, key, value]
        turn = not self.attention.batch_first
        if self.form == "single":
            given = [x.squeeze(0) for x in given]
            if masks.get("key_padding_mask") is not None:
                masks["key_padding_mask"] = masks["key_padding_mask"].squeeze(0)
        elif turn:
            query = query.transpose(0, 1)
            key = query if self.form == "self" else key.transpose(0, 1)
            value = key if self.form in ("self", "memory") else value.transpose(0, 1)
            given = [query, key, value]
        y, weights = self.attention(*given, **masks)
        if self.form == "single":
            return y.unsqueeze(0), None if weights is None else weights.unsqueeze(0)
        return y.transpose(0, 1) if turn else y, weights


def inputs(form="three", dtype=torch.float64, batch=None, kdim=SIZE, vdim=SIZE):
    """Query, key and value with the batch first."""
    torch.manual_seed(3)
    batch = (1 if form == "single" else BATCH) if batch is None else batch
    return tuple(
        torch.randn(batch, steps, size, dtype=dtype)
        for steps, size in ((TARGETS, SIZE), (KEYS, kdim), (KEYS, vdim))
    )


def masks(batch, targets, keys, dtype=torch.float64):
    """Masks by name; no row is forbidden every key."""
    torch.manual_seed(4)
    padding = torch.rand(batch, keys) < 0.4
    table = torch.rand(targets, keys) < 0.4
    tables = torch.rand(batch * HEADS, targets, keys) < 0.4
    for mask in (padding, table, tables):
        mask[..., 0] = False
    causal = torch.ones(targets, keys, dtype=torch.bool).triu(1)

    def number(mask):
        return torch.randn(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)

    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": number(padding)},
        "table": {"attn_mask": table},
        "float table": {"attn_mask": number(table)},
        "tables": {"attn_mask": tables},
        "float tables, float padding": {"attn_mask": number(tables), "key_padding_mask": number(padding)},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal, padding": {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding},
    }
