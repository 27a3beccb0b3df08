"""MultiheadAttention: its projections are kernels, and what is drawn is the same at all positions of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.context import Frame, RowError, repeat_rows
from slimbayes.core.rules.base import Rule
from slimbayes.core.rules.dropout import dropped
from slimbayes.core.rules.kernel_map import Mapped, expand_groups
from slimbayes.sequences.kernels import Kernel, KernelNames, Several, on_its_way
from slimbayes.sequences.projection import project, rows_of
from slimbayes.sequences.scores import additive, attend_by_weights, join_masks

_PARTS = ("q", "k", "v")
Three = tuple[Tensor, Tensor, Tensor]


class _Share:
    """A kernel with its part of the bias that three have in common."""

    def __init__(self, kernel: Kernel, bias: Tensor) -> None:
        self.kernel = kernel
        self.bias = bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


class BayesMultiheadAttention(Several, nn.MultiheadAttention):
    """Kernels "qkv" [3E, E] of queries, keys and values, or "q", "k" and "v" where their sizes differ; and "out".

    y = W_out softmax(Q Kᵀ/√d + mask) V, every product as its rule has it: r ∘ (W (s ∘ x)) + b. The three parts of
    "qkv" share s. "q" holds the bias of all three, one parameter in torch's layer. ``bias_k`` and ``bias_v`` are a key
    and a value, not weights, and stay as they are. Inside, rows come first: x [R, T, in].
    """

    title = "MultiheadAttention"
    recurrent = False

    def kernel_names(self) -> Iterator[KernelNames]:
        """Two, or four with projections of their own."""
        bias = None if self.in_proj_bias is None else "in_proj_bias"
        if self._packed():
            yield KernelNames("qkv", "in_proj_weight", bias)
        else:
            for part in _PARTS:
                yield KernelNames(part, f"{part}_proj_weight", bias if part == "q" else None)
        yield KernelNames("out", "weight", None if self.out_proj.bias is None else "bias", child="out_proj")

    def attach(self, source: str, make: Callable[[Kernel, str], Rule]) -> None:
        """As for all layers with several kernels."""
        super().attach(source, make)
        self._qkv_same_embed_dim = (
            False  # what a fused path of torch asks before it reads the weights by itself
        )

    def _packed(self) -> bool:
        return bool(self.kdim == self.embed_dim == self.vdim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs and weights in the forms of torch's own layer; always by its plain path."""
        if is_causal and attn_mask is None:
            raise ValueError(
                f"{self._me()}: is_causal=True is a hint about attn_mask and needs it: hand it over too"
            )
        single = self._check_inputs(query, key, value)
        frame = self._framed(1 if single else query.shape[0 if self.batch_first else 1])
        sources = self._rows_first(query, key, value, single)
        size = sources[0].shape[1], sources[1].shape[1]  # [L, S]
        causal = is_causal and key_padding_mask is None and not need_weights
        attention = None if causal else self._attention_mask(attn_mask, query.dtype, size, frame)
        padding = self._padding_mask(key_padding_mask, query.dtype, size[1], single, frame)
        maps = self._mapped(frame)
        q, k, v = self._extended(self._projected(sources, maps, frame))
        mask = join_masks(attention, padding, k.shape[1] - size[1])
        mixed, weights = self._attended(
            self._heads(q), self._heads(k), self._heads(v), mask, causal, need_weights, frame
        )
        output = project(maps["out"], mixed.transpose(1, 2).flatten(2))  # [R, L, E]
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if single and output.shape[0] == 1:
            output, weights = output.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        made: tuple[Tensor, Tensor | None] = on_its_way((output, weights))
        return made

    def _me(self) -> str:
        return f"layer {self.source!r} ({self.title})"

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether they are one example without a batch."""
        given = (query, key, value)
        if any([x.is_nested for x in given]):
            raise TypeError(
                f"{self._me()} takes no nested tensors: pad them and hand over a key_padding_mask"
            )
        shapes = [tuple(x.shape) for x in given]
        if query.dim() not in (2, 3) or any([x.dim() != query.dim() for x in given]):
            raise ValueError(
                f"{self._me()} takes query, key and value of 2 or 3 dimensions, alike, got {shapes}"
            )
        if [shape[-1] for shape in shapes] != [self.embed_dim, self.kdim, self.vdim]:
            raise ValueError(
                f"{self._me()} takes query, key and value of {self.embed_dim}, {self.kdim} and {self.vdim} features, "
                f"got {shapes}"
            )
        time = 1 if self.batch_first and query.dim() == 3 else 0
        if key.shape[time] != value.shape[time]:
            raise ValueError(f"{self._me()}: there are as many keys as values, got {shapes}")
        return query.dim() == 2

    def _framed(self, rows: int) -> Frame:
        try:
            return self._frame(rows)
        except RowError as error:
            if self.batch_first:
                raise
            raise RowError(
                f"{error} This one has batch_first=False, which makes the batch the second dimension of its inputs; in "
                f"a draw the network's own inputs and outputs still need it outermost."
            ) from None

    def _rows_first(self, query: Tensor, key: Tensor, value: Tensor, single: bool) -> Three:
        """[R, T, ·]; what was one tensor stays one."""
        if self.batch_first and not single:
            return query, key, value

        def turned(x: Tensor) -> Tensor:
            return x.unsqueeze(0) if single else x.transpose(0, 1)

        q = turned(query)
        k = q if key is query else turned(key)
        return q, k, q if value is query else k if value is key else turned(value)

    def _times(self, what: str, rows: int, frame: Frame) -> int:
        """How often these rows are repeated: they are those of all draws, or those of one and stand for all."""
        whole = frame.draws * frame.batch * frame.extra
        if rows == whole:
            return 1
        if frame.draw is not None and rows * frame.draws == whole:
            return frame.draws
        raise ValueError(f"{self._me()}: {what} has {rows} rows of the batch, the query {whole}")

    def _attention_mask(
        self, mask: Tensor | None, dtype: torch.dtype, size: tuple[int, int], frame: Frame
    ) -> Tensor | None:
        """[1, 1, L, S] or [R, H, L, S]."""
        if mask is None:
            return None
        if (
            mask.dim() not in (2, 3)
            or tuple(mask.shape[-2:]) != size
            or (mask.dim() == 3 and mask.shape[0] % self.num_heads)
        ):
            raise RowError(
                f"{self._me()}: attn_mask must be {list(size)} or [batch·{self.num_heads}, {size[0]}, {size[1]}], got "
                f"{list(mask.shape)}. sb.draw repeats a table that is as long as the batch: name it in shared_inputs"
            )
        mask = additive(mask, "attn_mask", dtype)
        if mask.dim() == 2:
            return mask[None, None]
        mask = mask.unflatten(0, (-1, self.num_heads))
        return repeat_rows(mask, self._times("attn_mask", mask.shape[0], frame))

    def _padding_mask(
        self, mask: Tensor | None, dtype: torch.dtype, keys: int, single: bool, frame: Frame
    ) -> Tensor | None:
        """[R, 1, 1, S]."""
        if mask is None:
            return None
        if mask.dim() != (1 if single else 2) or mask.shape[-1] != keys:
            wanted = f"[{keys}]" if single else f"[batch, {keys}]"
            raise ValueError(f"{self._me()}: key_padding_mask must be {wanted}, got {list(mask.shape)}")
        mask = additive(mask, "key_padding_mask", dtype).view(-1, 1, 1, keys)
        return repeat_rows(mask, self._times("key_padding_mask", mask.shape[0], frame))

    def _projected(self, sources: Three, maps: dict[str, Mapped], frame: Frame) -> Three:
        """Queries, keys and values [R, T, E], by as few products as there are inputs."""
        size, (q, k, v) = self.embed_dim, sources
        q_times, k_times, v_times = (
            self._times(what, x.shape[0], frame)
            for what, x in zip(("query", "key", "value"), sources, strict=True)
        )
        if not self._packed():
            own = [self._part(maps, i) for i in range(3)]
        elif q is k and k is v:
            one, two, three = project(maps["qkv"], q, q_times).chunk(3, -1)
            return one, two, three
        else:
            own = [rows_of(maps["qkv"], i * size, (i + 1) * size) for i in range(3)]
            if k is v:
                two, three = project(rows_of(maps["qkv"], size, 3 * size), k, k_times).chunk(2, -1)
                return project(own[0], q, q_times), two, three
        return project(own[0], q, q_times), project(own[1], k, k_times), project(own[2], v, v_times)

    def _part(self, maps: dict[str, Mapped], place: int) -> Mapped:
        """A projection of its own with its third of the bias, which "q" holds: sampled as a bias or as a shift.

        What the rule of "k" or "v" adds for all rows of a draw alike stands in the place of a bias there.
        """
        one, first, size = maps[_PARTS[place]], maps["q"], self.embed_dim
        if self.in_proj_bias is None:
            return one
        own = slice(place * size, (place + 1) * size)
        if one.whole is not None:
            kernel: Any = _Share(self.kernels[place], self.in_proj_bias[own])
            run = one.whole
            return replace(one, whole=lambda x: run(x, kernel))
        bias = None if first.bias is None else first.bias[:, own]
        if place and one.bias is not None:
            groups = max(len(one.bias), 1 if bias is None else len(bias))
            added = expand_groups(one.bias, groups)
            bias = added if bias is None else added + expand_groups(bias, groups)
        if first.shift is not None and first.shift.shape[-1] != size:
            return replace(one, bias=bias, shift=first.shift[:, own])
        return replace(one, bias=bias)

    def _extended(self, three: Three) -> Three:
        """With the key and value that the layer has learned, and those of zeros."""
        q, k, v = three
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)  # [R, H, T, d]

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        need_weights: bool,
        frame: Frame,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixed values [R, H, L, d], and the weights [R, H, L, S] if they are needed; dropout as the method has it."""
        drops = self.kernels[0].bayes.drops  # the layer's own dropout follows the draw, and not the mode
        rate = self.dropout if (frame.noise != "mean" if drops else self.training) else 0.0

        def drop(weights: Tensor) -> Tensor:
            if not drops:
                return F.dropout(weights, rate)
            return dropped(weights, frame, f"{self.source}.weights", rate, None)

        if not need_weights and not (drops and rate > 0):
            return F.scaled_dot_product_attention(q, k, v, mask, rate, causal), None
        mixed, weights = attend_by_weights(q, k, v, mask, drop if rate > 0 else None, causal)
        return mixed, weights if need_weights else None
