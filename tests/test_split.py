"""``split``: the components share a batch instead of each seeing all of it."""

import itertools

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.training import Training

METHODS = {
    "Rank1": sb.Rank1(components=4),
    "BatchEnsemble": sb.BatchEnsemble(components=4),
    "DeepEnsemble": sb.DeepEnsemble(members=4),
    "KTied": sb.KTied(),
    "EMP": sb.EMP(components=3),
}


def network(norm=True):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.ReLU(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("name", METHODS)
def test_every_example_has_the_output_of_its_component(name):
    model = sb.bayesianize(network(), METHODS[name]).eval()
    x = torch.randn(12, 5, dtype=torch.float64)
    every = sb.draw(model, x, noise="mean")  # [K, 12, 3]
    shared = sb.draw(model, x, noise="mean", split=True)
    assert shared.shape == (1, 12, 3)
    component = torch.arange(12) * len(every) // 12
    torch.testing.assert_close(shared[0], every[component, torch.arange(12)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Rank1", "BatchEnsemble", "DeepEnsemble"])
def test_the_gradient_is_that_of_the_average_when_components_take_turns(name):
    """Over the K rotations of the batch every component sees every example: the mean of the K losses is the average."""
    model = sb.bayesianize(network(norm=False), METHODS[name])
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(loss):
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    whole = sb.elbo(sb.draw(model, x, noise="mean"), y, model, num_data=100)
    wanted = gradients(whole.loss)
    total, turned = [torch.zeros_like(p) for p in parameters], []
    for turn in range(4):
        xs, ys = x.roll(2 * turn, 0), y.roll(2 * turn, 0)
        part = sb.elbo(sb.draw(model, xs, noise="mean", split=True), ys, model, num_data=100)
        turned.append(part.nll.detach())
        total = [t + g / 4 for t, g in zip(total, gradients(part.loss), strict=True)]
    torch.testing.assert_close(torch.stack(turned).mean(), whole.nll.detach())
    for mine, theirs in zip(total, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_noise_is_that_of_a_draw():
    """Per example and of the same scale as in a draw of all components; shared within a component where asked."""
    method = sb.Rank1(components=2, dropout_rate=0.2)
    model = sb.bayesianize(nn.Linear(1, 1, bias=False).double(), method).eval()
    x = torch.ones(40_000, 1, dtype=torch.float64)
    one, every = sb.draw(model, x, split=True)[0, :, 0], sb.draw(model, x)[:, :, 0]
    for k, half in enumerate(one.chunk(2)):
        assert abs(half.std() / every[k].std() - 1) < 0.05
        assert len(half.unique()) == 20_000
    shared = sb.draw(model, x, split=True, noise="shared")[0, :, 0]
    assert len(shared.unique()) == 2


def test_a_subset_of_components_shares_the_batch():
    model = sb.bayesianize(network(), sb.Rank1(components=4, components_per_step=2)).train()
    assert sb.draw(model, torch.randn(6, 5, dtype=torch.float64), split=True).shape == (1, 6, 3)
    with pytest.raises(ValueError, match="shares 7 examples among 2 components"):
        sb.draw(model, torch.randn(7, 5, dtype=torch.float64), split=True)


@pytest.mark.parametrize("options", [{"samples": 2}, {"seed": 0}, {"draws": [0]}])
def test_options_that_mean_nothing_are_refused(options):
    model = sb.bayesianize(network(), METHODS["Rank1"])
    with pytest.raises(ValueError, match="split=True gives every example one draw"):
        sb.draw(model, torch.randn(8, 5, dtype=torch.float64), split=True, **options)


def test_settings_that_contradict_it_are_refused():
    with pytest.raises(ValueError, match="split_batch=True gives every example one draw"):
        Training(split_batch=True, samples=2)
    with pytest.raises(ValueError, match="reduction='mixture'"):
        Training(split_batch=True, reduction="mixture")
    with pytest.raises(ValueError, match="split_batch must be true or false"):
        Training(split_batch=1)
    models = [sb.bayesianize(network(), sb.Rank1(components=2))]
    with pytest.raises(ValueError, match="split_batch=True: every network of fit_many"):
        sb.fit_many(models, (torch.randn(8, 5), torch.zeros(8, dtype=torch.long)), split_batch=True)


@pytest.mark.parametrize("compile", [False, True])
def test_training_with_a_shared_batch_learns_and_resumes(tmp_path, compile):
    torch.manual_seed(1)
    x = torch.randn(256, 5)
    y = x[:, :3].argmax(-1)
    settings = Training(epochs=12, batch_size=32, lr=0.02, split_batch=True, compile=compile, kl_weight=0.1)

    def train(folder, **options):
        model = sb.bayesianize(network().float(), sb.Rank1(components=4))
        result = sb.fit(model, (x, y), settings, folder=folder, progress=False, **options)
        return model, result

    model, result = train(tmp_path / "whole")
    assert sb.evaluate(model, [(x, y)], samples=4, seed=0)["accuracy"] > 0.85
    if compile:
        return
    calls = itertools.count()

    def stop(step, row):
        if next(calls) == 3:
            raise sb.training.StopTraining("enough")

    with pytest.raises(sb.training.StopTraining):
        train(tmp_path / "part", callback=stop)
    again, resumed = train(tmp_path / "part", resume=True)
    assert resumed.step == result.step
    for mine, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
