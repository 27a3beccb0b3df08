"""The vision transformer: torch's own attention, errors, and every kind of method on it."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.models.vit import Attention, TransformerBlock, VisionTransformer


def small():
    return VisionTransformer(5, image_size=16, patch=8, depth=2, width=16, heads=4)


def test_attention_is_torchs():
    torch.manual_seed(0)
    ours, theirs = Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.inputs.weight)
        theirs.in_proj_bias.copy_(ours.inputs.bias)
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_block_is_residual():
    block = TransformerBlock(16, 4)
    nn.init.zeros_(block.attention.output.weight)
    nn.init.zeros_(block.attention.output.bias)
    nn.init.zeros_(block.narrow.weight)
    nn.init.zeros_(block.narrow.bias)
    x = torch.randn(2, 5, 16)
    assert torch.equal(block(x), x)


def test_positions_and_patches_matter():
    torch.manual_seed(0)
    net = small().eval()
    x = torch.randn(1, 3, 16, 16)
    assert not torch.allclose(net(x), net(x.roll(8, -1)))
    before = net.output.weight.clone()
    net.reset_parameters()
    assert not torch.equal(before, net.output.weight)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="heads"):
        Attention(10, 4)
    with pytest.raises(ValueError, match="patches"):
        VisionTransformer(image_size=30, patch=16)


@pytest.mark.parametrize("method", [sb.Rank1(2), sb.KTied(), sb.MeanField(estimator="flipout"), sb.EMP()])
@pytest.mark.parametrize("training", [True, False])
def test_methods(method, training):
    torch.manual_seed(0)
    plain = small().train(training)
    x, y = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    model = sb.bayesianize(plain, method)
    draws = sb.draw(model, x, samples=2)
    assert draws.shape == (2 * method.traits.components, 4, 5)
    sb.elbo(draws, y, model, num_data=100).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
