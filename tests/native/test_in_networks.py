"""The C kernels inside networks: one noise to a draw, gradients of the value that came out, no state left behind."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.accelerate import cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the C kernels are not compiled")


def spread_out(model, rho=0.0):
    """The model with wide spreads, so that another noise shows."""
    for name, parameter in model.named_parameters():
        if name.endswith("rho"):
            parameter.data.fill_(rho)
    return model


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_of_convolutions_in_both_layouts(last, kernel):
    """Of the bias too, where the gradient's own memory is written over."""
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    net = nn.Sequential(nn.Conv2d(4, 6, kernel), nn.Tanh(), nn.Conv2d(6, 6, 1)).to(memory_format=layout)
    model = sb.bayesianize(net, sb.BatchEnsemble(components=2))
    x = torch.randn(8, 4, 6, 6).contiguous(memory_format=layout)
    found = []
    for switch in (True, False):
        model.zero_grad()
        with sb.fast_paths(native=switch):
            out = sb.draw(model, x)
            (torch.tanh(out / 3) * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(64, 64, 1, bias=False)

    def forward(self, x):
        whole, corner = self.layer(x), self.layer(x[..., :1, :1].contiguous())
        return torch.stack([whole[:, :, 0, 0], corner[:, :, 0, 0]], 1)


def test_one_factor_for_all_calls_of_a_draw():
    """Whether a call is folded into the weight or swept over the rows depends on its size; its noise does not."""
    model = spread_out(sb.bayesianize(Twice(), sb.Rank1.paper(components=2)))
    with torch.no_grad():
        out = sb.draw(model, torch.randn(64, 64, 8, 8), noise="shared")
    torch.testing.assert_close(out[:, :, 0], out[:, :, 1], rtol=1e-4, atol=1e-4)


class Checkpointed(nn.Module):
    def __init__(self, first, second, reentrant):
        super().__init__()
        self.a, self.b, self.reentrant = first, second, reentrant

    def forward(self, x):
        return checkpoint(self.b, self.a(x).relu(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("estimator", ["shared", "flipout"])
def test_checkpointed_weights_from_the_first_step_on(estimator, reentrant):
    """The loss is linear in W = M + σε of the last layer: Σ M dM + σ dσ is the loss."""
    torch.manual_seed(1)
    net = Checkpointed(nn.Linear(5, 8), nn.Linear(8, 8), reentrant)
    model = spread_out(sb.bayesianize(net, sb.MeanField.paper(estimator=estimator)))
    x, w = torch.randn(64, 5), torch.randn(1, 64, 8)
    for _ in range(2):
        model.zero_grad()
        loss = (sb.draw(model, x) * w).sum()
        loss.backward()
        total = torch.zeros(())
        for mean, spread in ((model.b.weight, model.b.bayes.weight), (model.b.bias, model.b.bayes.bias)):
            slope = spread.rho.grad / torch.sigmoid(spread.rho)
            total = total + (mean * mean.grad).sum() + (spread(mean).scale * slope).sum()
        torch.testing.assert_close(total, loss, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("noise", ["shared", "example"])
def test_checkpointed_factors(noise, reentrant):
    torch.manual_seed(1)
    net = Checkpointed(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), reentrant)
    model = spread_out(sb.bayesianize(net, sb.Rank1.paper(components=2)))
    x, w = torch.randn(64, 3, 8, 8), torch.randn(2, 64, 8)
    loss = (sb.draw(model, x, noise=noise).mean((3, 4)) * w).sum()
    loss.backward()
    layer = model.b
    total = (layer.weight * layer.weight.grad).sum() + (layer.bias * layer.bias.grad).sum()
    torch.testing.assert_close(total, loss, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "method", [sb.MeanField.paper(), sb.KTied.paper(), sb.MeanField.paper(estimator="flipout")]
)
def test_a_part_without_gradients_has_its_kl(method):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            with torch.no_grad():
                h = self.a(x).relu()
            return self.b(h)

    model = sb.bayesianize(Frozen(), method)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    for _ in range(2):
        model.zero_grad()
        result = sb.elbo(sb.draw(model, x), y, model, num_data=50)
        result.loss.backward()
        with sb.fast_paths(False):
            plain = sb.kl(model)
        torch.testing.assert_close(result.kl, plain.to(result.kl), rtol=1e-5, atol=1e-4)
        assert model.a.weight.grad is not None  # of the KL alone


@pytest.mark.filterwarnings("ignore")
def test_traced_code_keeps_no_memory_that_c_has_filled():
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)), sb.MeanField.paper()
    ).eval()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return sb.draw(self.model, x, samples=2)

    x = torch.randn(8, 6)
    with torch.no_grad():
        traced = torch.jit.trace(Wrapped(), x, check_trace=False)
        kept = [torch.full((2, 64, 6), 1e6) for _ in range(50)]
        del kept
        assert traced(x).abs().max() < 100 and not torch.equal(traced(x), traced(x))


def test_what_is_not_a_number_shows():
    model = sb.bayesianize(nn.Linear(4, 3), sb.Rank1.paper())
    spread_out(model, float("nan"))
    assert sb.draw(model, torch.randn(8, 4)).isnan().any()
    assert sb.kl(model).isnan()


def test_exported_code_has_no_operation_of_the_kernels():
    model = sb.bayesianize(nn.Linear(4, 3), sb.MeanField.paper()).eval()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return sb.draw(self.model, x)

    program = torch.export.export(Wrapped(), (torch.randn(8, 4),))
    assert "sampled_weights" not in str(program.graph)
