"""A pass over a traced graph: the first convolution and the factor on its input become one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from slimbayes.accelerate.compile.graph_patterns import disturbed, example, is_product, suits
from slimbayes.accelerate.gpu.first_convolution import CHANNELS, scaled_conv


def fuse_first(graph: fx.Graph, devices: tuple[str, ...] = ("cuda",)) -> int:
    """Replace conv2d(x∘s, W) by ``scaled_conv`` where x has few channels and needs no gradient; return how often."""
    count = 0
    for conv in list(graph.nodes):
        if (
            conv.op != "call_function"
            or conv.target is not torch.conv2d
            or conv.kwargs
            or len(conv.args) != 7
        ):
            continue
        product, weight, bias, stride, padding, dilation, groups = conv.args
        if not is_product(product) or len(product.users) > 1 or bias is not None:
            continue
        if not (_pair(stride) and _pair(padding) and _pair(dilation)):
            continue
        x, s = product.args
        image = example(x)
        plain = tuple(dilation) == (1, 1) and groups == 1
        if image is None or image.requires_grad or not plain or not suits(product, devices):
            continue
        if image.shape[1] > CHANNELS:
            continue
        if disturbed([product, conv], {node: at for at, node in enumerate(graph.nodes)}):
            continue
        with graph.inserting_before(conv):
            made = graph.call_function(scaled_conv, (x, s, weight, stride, padding))
        made.meta = dict(conv.meta)
        conv.replace_all_uses_with(made)
        graph.erase_node(conv)
        graph.erase_node(product)
        count += 1
    return count


def _pair(value: Any) -> bool:
    """Whether a setting of a convolution is two numbers."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(type(each) is int for each in value)
