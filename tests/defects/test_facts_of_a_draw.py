"""A loss uses the facts of the draw that it scores, not of the latest one."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import slimbayes as sb

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def learner(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    options = {"components": 3, "init_noise": 0.5, "learn_mixing": True, "patch": ("output",), **options}
    return sb.bayesianize(net, sb.EMP.paper(**options))


def mixing_gradient(loss, model):
    logits = [p for n, p in model.named_parameters() if n.endswith("mixing.logits")]
    return torch.cat(torch.autograd.grad(loss, logits, retain_graph=True))


def loss_of(draws, model, **named):
    return sb.elbo(draws, Y, model, 60, **named).loss


CUTS = {
    "itself": lambda draws: draws,
    "cast": lambda draws: draws.double(),
    "sliced": lambda draws: draws[:, :, :3].clone(),
    "worked on": lambda draws: (draws.transpose(0, 1).contiguous() / 1.0).transpose(0, 1).float() + 0.0,
    "in place": lambda draws: draws.mul_(1.0),
    "of a dict": lambda draws: {"logits": draws}["logits"],
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_draw_a_draw_and_the_loss_of_the_first(cut):
    model = learner()
    first = sb.draw(model, X, samples=4, seed=1)
    expected = mixing_gradient(loss_of(first, model), model)
    again = sb.draw(model, X, samples=4, seed=1)
    other = sb.draw(model, X, samples=4, seed=2)
    assert not torch.allclose(mixing_gradient(loss_of(other, model), model), expected)
    torch.testing.assert_close(mixing_gradient(loss_of(CUTS[cut](again), model), model), expected)
    with torch.no_grad():
        sb.draw(model, X, samples=4, seed=3)
    torch.testing.assert_close(mixing_gradient(loss_of(first, model), model), expected)


def test_outputs_that_do_not_lead_to_their_draw_are_named():
    model = learner()
    draws = sb.draw(model, X, samples=4, seed=1)
    expected = mixing_gradient(loss_of(draws, model), model)
    cut = draws.detach()
    for lost in (cut, cut.clone().requires_grad_()):
        with pytest.raises(ValueError, match="of=outputs"):
            loss_of(lost, model)
        torch.testing.assert_close(mixing_gradient(loss_of(lost, model, of=draws), model), expected)
        torch.testing.assert_close(
            mixing_gradient(loss_of(lost, model, of={"logits": draws}), model), expected
        )
    with pytest.raises(ValueError, match=r"what sb.draw\(model, ...\) returned"):
        loss_of(draws, model, of=cut)
    with torch.no_grad():
        assert loss_of(cut, model).isfinite()


def test_two_draws_in_one_tensor_are_named_in_their_order():
    model = learner()
    first, second = (sb.draw(model, X, samples=2, seed=seed) for seed in (1, 2))
    both = torch.cat([first, second])
    with pytest.raises(ValueError, match=r"2 draws.*of="):
        loss_of(both, model)
    whole = sb.draw(model, X, samples=4, seed=5)
    assert mixing_gradient(loss_of(whole, model), model).shape == (3,)
    found = mixing_gradient(loss_of(both, model, of=[first, second]), model)
    turned = mixing_gradient(loss_of(torch.cat([second, first]), model, of=[second, first]), model)
    torch.testing.assert_close(found, turned)


def test_the_draw_of_another_model_is_not_this_ones():
    model = learner()
    other = copy.deepcopy(model)
    sb.draw(model, X)
    with pytest.raises(ValueError, match="of="):
        loss_of(sb.draw(other, X, samples=4), model)
    first, second = (sb.draw(each, X, samples=4, seed=1) for each in (model, other))
    mean = (first + second) / 2
    torch.testing.assert_close(
        mixing_gradient(loss_of(mean, model), model), mixing_gradient(loss_of(mean, other), other)
    )


def test_all_that_is_learned_may_be_the_mixing():
    model = learner()
    expected = mixing_gradient(loss_of(sb.draw(model, X, samples=4, seed=1), model), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("mixing.logits"))
    draws = sb.draw(model, X, samples=4, seed=1)
    torch.testing.assert_close(mixing_gradient(loss_of(draws, model), model), expected)


def test_frozen_mixing_needs_nothing():
    model = learner()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("mixing.logits"))
    assert loss_of(sb.draw(model, X).detach(), model).isfinite()
    sb.elbo(sb.draw(learner(learn_mixing=False), X).detach(), Y, learner(learn_mixing=False), 60)


def test_several_outputs_and_no_rows():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return {"a": self.a(x), "b": (self.b(x), len(x)), "x": x, "scale": self.a.weight.square().sum()}

    torch.manual_seed(0)
    model = sb.bayesianize(
        Two(), sb.EMP.paper(components=2, patch=(nn.Linear,), init_noise=0.5, learn_mixing=True)
    )
    outputs = sb.draw(model, X, samples=16)
    assert outputs["b"][1] == 96
    found = [mixing_gradient(loss_of(one, model), model) for one in (outputs["a"], outputs["b"][0])]
    assert all(grad.abs().sum() > 0 for grad in found)
    outputs["a"].sum().backward()  # each has its own backward pass
    outputs["b"][0].sum().backward()


def test_two_threads():
    model = learner()
    expected = [
        mixing_gradient(loss_of(sb.draw(model, X, samples=4, seed=seed), model), model) for seed in range(4)
    ]
    found, errors, gate = {}, [], threading.Barrier(4)

    def work(seed):
        try:
            for _ in range(5):
                draws = sb.draw(model, X, samples=4, seed=seed)
                gate.wait()
                found[seed] = mixing_gradient(loss_of(draws, model), model)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed in range(4):
        torch.testing.assert_close(found[seed], expected[seed])


@pytest.mark.parametrize(
    "method",
    [sb.MeanField.paper(), sb.KTied.paper(), sb.MeanField.paper(estimator="flipout"), sb.Rank1.paper()],
    ids=str,
)
def test_the_kl_of_two_draws_is_charged_once_each(method):
    """Whichever draw is scored, the KL and its gradient are the plain ones, and so after a change of the weights."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), method)
    first, second = (sb.draw(model, X, samples=2) for _ in range(2))
    expected = torch.autograd.grad(sb.kl(model), list(model.parameters()), allow_unused=True)
    for scored in (first, second, first, first + second):
        result = sb.elbo(scored, Y, model, 60)
        torch.testing.assert_close(result.kl, sb.kl(model), rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(result.kl, list(model.parameters()), allow_unused=True, retain_graph=True)
        for one, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-5)
    draws = sb.draw(model, X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(sb.elbo(draws, Y, model, 60).kl, sb.kl(model), rtol=1e-5, atol=1e-5)


def test_outputs_do_not_keep_the_model():
    model = learner()
    draws = sb.draw(model, X)
    with torch.no_grad():
        kept = sb.draw(model, X), draws.detach()
    gone = weakref.ref(model)
    del model, draws
    gc.collect()
    assert gone() is None and len(kept) == 2


def compiled(function, whole=False):
    """By torch.compile, or as ``sb.compile`` wraps a function, without the compiler's long last part."""
    torch._dynamo.reset()
    if whole:
        from slimbayes.accelerate.compile.entry import _scoped

        function = _scoped(function)
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.accelerate
@pytest.mark.parametrize("scored", ["first", "second", "named"])
def test_compiled_steps_score_their_own_draw(scored):
    model = learner()

    def step(x, y):
        first, second = (sb.draw(model, x, samples=4, seed=seed) for seed in (1, 2))
        of = first if scored == "named" else None
        return sb.elbo(
            second if scored == "second" else first * 1.0 if of is not None else first, y, model, 60, of=of
        ).loss

    expected = mixing_gradient(step(X, Y), model)
    torch.testing.assert_close(mixing_gradient(compiled(step, whole=True)(X, Y), model), expected)
    torch._dynamo.reset()


@pytest.mark.accelerate
def test_compiled_draws_and_compiled_losses():
    model = learner()
    expected = mixing_gradient(loss_of(sb.draw(model, X, samples=4, seed=1), model), model)

    def step(x):
        return loss_of(sb.draw(model, x, samples=4, seed=1), model)

    def draw(x):
        return sb.draw(model, x, samples=4, seed=1)

    def cut(x):
        return loss_of(sb.draw(model, x, samples=4, seed=1) * 1.0, model)

    torch.testing.assert_close(mixing_gradient(compiled(step)(X), model), expected)
    first = compiled(draw)(X)
    torch.testing.assert_close(mixing_gradient(loss_of(first, model), model), expected)
    compiled(draw)(X)
    with pytest.raises(ValueError, match="of="):
        loss_of(first, model)
    for whole in (False, True):
        with pytest.raises(Exception, match="of="):
            compiled(cut, whole)(X)
    torch._dynamo.reset()
