"""From a network to a predictive distribution: chunks, kept draws, modes, likelihoods, outputs."""

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, residual_net
from torch import nn

import slimbayes as sb
from slimbayes.core import chunks
from slimbayes.core.predictive import Moments

pytestmark = pytest.mark.oldest

PARTS = ("mean", "variance", "aleatoric", "epistemic", "entropy", "expected_entropy", "mutual_information")
LIKELIHOODS = {
    "categorical": (lambda: sb.Categorical(), 3, torch.tensor([0, 2, 1, 0, 2])),
    "bernoulli": (lambda: sb.Bernoulli(), 2, torch.tensor([[0.0, 1.0]] * 5)),
    "gaussian": (lambda: sb.Gaussian(precision=4.0), 2, features(5, 2)),
    "gaussian_global": (lambda: sb.Gaussian(precision=2.0, learn="global"), 2, features(5, 2)),
    "gaussian_per_example": (lambda: sb.Gaussian(learn="per_example"), 4, features(5, 2)),
}


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("method", ["rank1", "meanfield", "deep_ensemble"])
def test_every_likelihood_from_training_to_prediction(method, kind):
    make, outputs, targets = LIKELIHOODS[kind]
    likelihood = make()
    model = convert(lambda: mlp(3, outputs), METHODS[method]())
    x = features(5)
    parameters = [*model.parameters(), *likelihood.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        draws = sb.draw(model, x, samples=2)
        result = sb.elbo(draws, targets, model, num_data=5, likelihood=likelihood, kl_weight=0.01)
        result.loss.backward()
        optimizer.step()
        losses.append(float(result.nll.detach()))
    assert losses[-1] < losses[0] - 0.1
    prediction = sb.predict(model, x, samples=4, seed=1, likelihood=likelihood)
    draws = sb.draw(model.eval(), x, samples=4, seed=1).detach()
    # Not bit for bit: without gradients a member runs on the batch as it is, not on a copy for every sample.
    torch.testing.assert_close(prediction.draws, draws, rtol=1e-5, atol=1e-6)
    # The mixture, from the draws by hand.
    log_prob = likelihood.log_prob(draws, targets)
    close(prediction.log_prob(targets), log_prob.exp().mean(0).log())
    close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    if kind == "categorical":
        means = draws.softmax(-1)
    elif kind == "bernoulli":
        means = draws.sigmoid()
    else:
        means = draws[..., :2]
    close(prediction.mean, means.mean(0))
    close(prediction.epistemic, means.var(0, correction=0))


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 6, 7, 1000])
def test_chunks_change_nothing(kind, chunk):
    make, outputs, targets = LIKELIHOODS[kind]
    likelihood = make()
    model = convert(lambda: mlp(3, outputs), METHODS["rank1"]())
    x = features(5)
    rows = []
    whole = sb.predict(model, x, samples=4, seed=2, likelihood=likelihood)
    model[0].register_forward_hook(lambda m, a, y: rows.append(y.shape[0]))
    cut = sb.predict(model, x, samples=4, seed=2, likelihood=likelihood, chunk=chunk)
    assert max(rows) <= max(chunk, 3)  # at least one example of each of the 3 components
    assert sum(rows) == 3 * 4 * 5
    close(cut.draws, whole.draws, 1e-6)
    moments = sb.predict(model, x, samples=4, seed=2, likelihood=likelihood, chunk=chunk, keep_draws=False)
    parts = [
        part for part in PARTS if "gaussian" not in kind or part not in ("entropy", "mutual_information")
    ]
    for part in parts:
        close(getattr(cut, part), getattr(whole, part), 1e-5)
        close(getattr(moments, part), getattr(whole, part), 1e-5)
    close(cut.log_prob(targets), whole.log_prob(targets))
    with pytest.raises(ValueError, match=r"only the moments of 12 draws were kept.*keep_draws=True"):
        _ = moments.draws


def test_moments_alone_give_log_probabilities_of_classes():
    model = convert(lambda: mlp(3, 3), METHODS["rank1"]())
    x, y = features(5), torch.tensor([0, 2, 1, 0, 2])
    whole = sb.predict(model, x, samples=4, seed=2)
    for chunk in (None, 4):
        moments = sb.predict(model, x, samples=4, seed=2, chunk=chunk, keep_draws=False)
        close(moments.log_prob(y), whole.log_prob(y))


def test_chunks_without_a_seed_are_one_set_of_functions():
    """Under "shared" noise a draw is one function: equal examples agree across chunks."""
    model = convert(mlp, METHODS["rank1"]())
    x = features(1).expand(6, -1)
    prediction = sb.predict(model, x, samples=2, noise="shared", chunk=6)
    close(prediction.draws, prediction.draws[:, :1].expand_as(prediction.draws), 1e-5)
    other = sb.predict(model, x, samples=2, noise="shared", chunk=6)
    assert (other.draws - prediction.draws).abs().max() > 1e-4


@pytest.mark.parametrize("chunk", [None, 4])
def test_modes_gradients_and_statistics_are_left_alone(chunk):
    model = convert(residual_net, METHODS["rank1"]()).train()
    model[1][0].eval()  # a part that the user froze
    modes = {name: m.training for name, m in model.named_modules()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    prediction = sb.predict(model, images(), samples=2, chunk=chunk)
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert not prediction.mean.requires_grad
    reference = sb.predict(model.eval(), images(), samples=2, seed=1, chunk=chunk)
    close(sb.predict(model.train(), images(), samples=2, seed=1, chunk=chunk).mean, reference.mean, 1e-6)


def test_modes_are_restored_after_an_error():
    model = convert(mlp, METHODS["rank1"]()).train()
    with pytest.raises(RuntimeError):
        sb.predict(model, torch.zeros(4, 7))
    assert all(m.training for m in model.modules())


class Structured(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x, scale=None, table=None):
        y = self.layer(x)
        if scale is not None:
            y = y * scale
        if table is not None:
            y = y + table.sum()
        return {"dict": {"scores": y, "other": x}, "tuple": (y, x.sum()), "tensor": y}[self.kind]


def test_structured_outputs_need_a_selection():
    for kind, select in (("dict", lambda o: o["scores"]), ("tuple", lambda o: o[0])):
        model = convert(lambda kind=kind: Structured(kind), METHODS["rank1"]())
        tensor = convert(lambda: Structured("tensor"), METHODS["rank1"]())
        expected = sb.predict(tensor, features(), seed=1, samples=2).mean
        for chunk in (None, 4):
            close(sb.predict(model, features(), seed=1, samples=2, select=select, chunk=chunk).mean, expected)
        with pytest.raises(TypeError, match=rf"returned {kind}; tell predict .*select=lambda"):
            sb.predict(model, features())


def test_logits_attribute_is_scored_by_default():
    from collections import namedtuple

    output = namedtuple("output", ["loss", "logits"])  # a pytree, as ModelOutput is

    class Named(Structured):
        def forward(self, x):
            return output(x.sum(), self.layer(x))

    model = convert(lambda: Named("tensor"), METHODS["rank1"]())
    tensor = convert(lambda: Structured("tensor"), METHODS["rank1"]())
    close(sb.predict(model, features(), seed=1).mean, sb.predict(tensor, features(), seed=1).mean)
    chosen = sb.predict(
        model, features(), seed=1, select=lambda o: o.logits[..., :1], likelihood=sb.Bernoulli()
    )
    assert chosen.mean.shape == (4, 1)


@pytest.mark.parametrize("named", [True, False])
def test_chunks_cut_the_batch_and_nothing_else(named):
    """Other inputs stay whole in every chunk, also those as long as a chunk, or named as shared."""
    model = convert(lambda: Structured("tensor"), METHODS["rank1"]())
    x, scale = features(5), features(5, 1)
    for table, shared in ((features(2, 2), ()), (features(5, 2), ("table",)), (features(5, 2), "table")):
        inputs = ((x,), {"scale": scale, "table": table}) if named else ((x, scale, table), {})
        whole = sb.predict(model, *inputs[0], **inputs[1], seed=1, samples=2, shared_inputs=shared)
        for chunk in (3, 6, 7):
            cut = sb.predict(
                model, *inputs[0], **inputs[1], seed=1, samples=2, shared_inputs=shared, chunk=chunk
            )
            close(cut.draws, whole.draws, 1e-6)
    by_position = sb.predict(model, x, scale, table, seed=1, samples=2, shared_inputs=(2,), chunk=6)
    close(by_position.draws, whole.draws, 1e-6)


def test_bad_chunks():
    model = convert(mlp, METHODS["rank1"]())
    for chunk in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"chunk must be a positive number of rows or None, got {chunk}"):
            sb.predict(model, features(), chunk=chunk)


def test_non_finite_outputs_are_refused():
    model = convert(mlp, sb.Deterministic())
    x = features()
    x[1, 1] = float("nan")
    for chunk in (None, 2):
        with pytest.raises(ValueError, match=r"2 of .* are NaN or infinite"):
            sb.predict(model, x, chunk=chunk)


def test_components_per_step_does_not_reach_prediction():
    model = convert(mlp, sb.Rank1(components=4, components_per_step=2)).train()
    assert sb.draw(model, features()).shape == (2, 4, 2)
    assert sb.predict(model, features()).draws.shape == (4, 4, 2)
    assert sb.predict(model, features(), chunk=4).draws.shape == (4, 4, 2)


def test_a_wrapper_in_training_mode_does_not_leave_components_out():
    class DistributedDataParallel(nn.Module):  # known by its name
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=4, components_per_step=2))
    wrapped = DistributedDataParallel(model).train()
    assert sb.predict(wrapped, torch.randn(5, 3), seed=0).draws.shape[0] == 4


class Unchecked(sb.Categorical):
    """A likelihood whose moments look at nothing."""

    def moments(self, draws):
        log_p = draws.log_softmax(-1)
        return Moments.of(log_p.exp(), log_p.exp(), draws.sum(-1), log_p)


@pytest.mark.parametrize("look", ["with the moments", "late", "with all draws"])
@pytest.mark.parametrize("likelihood", [sb.Categorical(), Unchecked()])
@pytest.mark.parametrize(("bad", "passes"), [(1, 1), (6, 8), (9, 9)])
def test_outputs_that_are_not_finite_are_found(bad, passes, likelihood, look, monkeypatch):
    """Those of the first pass at once, those of later ones with the moments of four, or when all passes are done."""
    calls = []

    def spoil(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) == bad else output

    model, x = sb.bayesianize(nn.Linear(16, 4), sb.EMP(3, "output")).eval(), torch.randn(4, 16)
    sb.predict(model, x, samples=2, seed=0, chunk=4)
    model.register_forward_hook(spoil)
    if look == "late":
        monkeypatch.setattr(chunks, "_LATE", {"cpu"})
    with pytest.raises(ValueError, match="are NaN or infinite") as found:
        keep = look == "with all draws"
        sb.predict(model, x, samples=9, seed=0, chunk=4, keep_draws=keep, likelihood=likelihood)
    if bad > 1 and (keep or (look == "late" and type(likelihood) is sb.Categorical)):
        passes = 9
        assert str(found.value).startswith("16 of 144 elements" if keep else "16 elements of 9 draws")
    assert len(calls) == passes


@pytest.mark.parametrize("likelihood", [sb.Categorical(), sb.Bernoulli(), sb.Gaussian()])
def test_a_late_look_leaves_the_moments_as_they_are(likelihood, monkeypatch):
    model, x = sb.bayesianize(nn.Linear(6, 4), sb.EMP(3, "output")).eval(), torch.randn(4, 6)
    found = []
    for late in ((), {"cpu"}):
        monkeypatch.setattr(chunks, "_LATE", late)
        kept = dict(samples=9, seed=0, chunk=4, keep_draws=False, likelihood=likelihood)
        found.append(sb.predict(model, x, **kept).moments)
    for one, other in zip(vars(found[0]).values(), vars(found[1]).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
