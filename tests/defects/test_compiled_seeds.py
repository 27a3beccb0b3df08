"""A compiled draw with a seed: a new seed is a new input of the graph, not a new graph."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import slimbayes as sb

METHODS = [
    sb.Rank1(components=2),
    sb.Rank1(components=4, components_per_step=2),
    sb.MeanField(estimator="flipout"),
    sb.EMP(components=3, patch="output"),
]


def compiled(method, backend="eager"):
    """A network, its draws, the same compiled as one graph, and the counter of graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = sb.bayesianize(nn.Linear(3, 2), method)
    x = torch.randn(4, 3)

    def eager(seed, **options):
        return sb.draw(net, x, samples=2, seed=seed, **options)

    eager.net = net
    counter = CompileCounterWithBackend(backend)
    return eager, torch.compile(eager, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_new_seed_compiles_nothing_anew(method):
    eager, fast, counter = compiled(method)
    for seed in (5, 0, 1, -1, 2**40, -(2**63), 2**63 - 1, *range(100, 105)):
        torch.testing.assert_close(fast(seed), eager(seed), rtol=0, atol=1e-6)
    assert counter.frame_count <= 2  # a fixed seed, and any


def test_a_new_place_compiles_nothing_anew():
    eager, fast, counter = compiled(METHODS[0])
    for place in range(3, 15):
        options = {"first_example": place, "first_sample": 2 * place}
        torch.testing.assert_close(fast(7, **options), eager(7, **options), rtol=0, atol=1e-6)
    assert counter.frame_count <= 2


def test_a_seed_of_more_than_64_bits_keeps_its_meaning():
    eager, fast, _ = compiled(METHODS[0])
    for seed in (3, 4, 2**70 + 3, -(2**63) - 1, 5):
        torch.testing.assert_close(fast(seed), eager(seed), rtol=0, atol=1e-6)


def test_gradients_of_a_compiled_seeded_draw_are_the_eager_ones():
    eager, fast, _ = compiled(METHODS[0], "aot_eager")
    for seed in (3, 4, 2**30):
        inputs = [p for p in eager.net.parameters() if p.requires_grad]
        ours, theirs = (torch.autograd.grad(drawn(seed).square().sum(), inputs) for drawn in (fast, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
