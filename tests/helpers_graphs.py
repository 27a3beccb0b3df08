"""Graphs that the passes of ``sb.compile`` have been over, on small images and factors in double precision."""

from __future__ import annotations

import torch

from slimbayes.accelerate.compile import norm_fusion
from slimbayes.accelerate.row_factors import row_product

LAST = torch.channels_last
R, C, SIZE = 6, 4, 5


def image(seed: int, rows: int = R, channels: int = C) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, channels, SIZE, SIZE, dtype=torch.float64, generator=generator)
    return made.contiguous(memory_format=LAST)


def factor(seed: int, rows: int = R, channels: int = C) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1 + torch.rand(rows, channels, dtype=torch.float64, generator=generator)


def compiled(function, counts: list[int], fuse=norm_fusion.fuse_norms, **options):
    """The function compiled to a graph that was fused and then taken through torch's autograd compiler."""
    torch._dynamo.reset()
    torch.compiler.allow_in_graph(row_product)

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        counts.append(fuse(module.graph, ("cpu",)))
        module.recompile()
        return aot_eager(module, inputs)

    return torch.compile(function, backend=backend, fullgraph=True, **options)
