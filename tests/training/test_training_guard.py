"""Steps that are not finite: caught in the step, named, left out; weights, statistics and optimizers unharmed."""

import math
import warnings

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.training import Training, TrainingError
from slimbayes.training.guard import Guard, Kept, choose, heed, not_finite_flag
from slimbayes.verbs.finiteness import Culprit, culprits, first_output, kl_culprits, listed

QUIET = {"progress": False, "accelerator": "cpu"}


class Trap(nn.Module):
    """The identity, whose gradient (or output) is not finite in the calls that are named."""

    def __init__(self, calls, forward=False):
        super().__init__()
        self.calls, self.bad, self.at_once = 0, calls, forward

    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            self.calls += 1
            if self.calls in self.bad:
                if self.at_once:
                    return x * math.nan
                x = x + 0
                x.register_hook(lambda grad: grad * math.inf)
        return x


def build(calls=(), forward=False, method=None, norm=True):
    torch.manual_seed(1)
    trap = Trap(calls, forward)
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6) if norm else nn.Identity(), nn.Tanh(), trap, nn.Linear(6, 2)]
    return sb.bayesianize(nn.Sequential(*layers), method or sb.Rank1(components=2))


def data():
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    return x, (x[:, 0] > 0).long()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def fit(model, **options):
    options = {"epochs": 2, "batch_size": 10, "schedule": "constant", "kl_annealing": 0.0, **QUIET, **options}
    return sb.fit(model, data(), **options)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_gradients_that_are_not_finite_stop_the_run_before_the_step(optimizer, clip):
    """The loss is finite: the gradients alone tell. The diagnosis is the second call of the trap in that step."""
    model, short = build(calls=(3, 4)), build()
    with pytest.raises(TrainingError) as caught:
        fit(model, optimizer=optimizer, clip_norm=clip)
    text = str(caught.value)
    assert text.startswith("gradients are not finite at step 3 (loss ")
    assert "the gradients of '0.weight' (18 of 18), '0.bias'" in text and "'4.weight'" not in text
    assert (
        "the last finite step is 2" in text and "nothing was saved" in text and "on_nonfinite='skip'" in text
    )
    fit(short, optimizer=optimizer, clip_norm=clip, steps=2)
    assert all(torch.equal(value, state(short)[name]) for name, value in state(model).items())


def test_an_output_that_is_not_finite_names_its_layer():
    model = build(calls=(2, 3), forward=True)
    with pytest.raises(
        TrainingError, match=r"at step 2 .*first in the nll, the output of '3' \(120 of 120\)"
    ):
        fit(model)
    assert all(torch.isfinite(value).all() for value in state(model).values())


def test_a_kl_that_is_not_finite_names_its_tensor():
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), sb.MeanField(biases=True)
    )
    with torch.no_grad():
        model[2].bayes.bias.rho.fill_(1e30)
    with pytest.raises(
        TrainingError, match=r"at step 1 .*first in the KL, the KL of '2.bias'.*no step was finite"
    ):
        fit(model, noise="mean")


def test_the_first_step_may_be_the_bad_one():
    model, fresh = build(calls=(1, 2)), build()
    with pytest.raises(TrainingError, match=r"not finite at step 1 .*no step was finite"):
        fit(model, optimizer="sgd")
    assert all(torch.equal(value, state(fresh)[name]) for name, value in state(model).items())


@pytest.mark.parametrize("forward", [False, True])
def test_steps_are_skipped_and_counted(forward, tmp_path):
    # Calls of the trap: step 3 and its diagnosis, of which there is one in a run, then step 6 (the seventh call).
    model = build(calls=(3, 4, 7), forward=forward)
    with pytest.warns(UserWarning, match=r"left out: .*not finite at step 3"):
        result = fit(model, on_nonfinite="skip", log_every=2, folder=tmp_path)
    assert result.skipped == 2 and result.step == 8
    assert [(row["step"], row["skipped"]) for row in result.history] == [(2, 0), (4, 1), (6, 1), (8, 0)]
    assert all(math.isfinite(row["loss"]) for row in result.history)
    assert all(torch.isfinite(value).all() for value in state(model).values())
    assert "skipped" in (tmp_path / "history.csv").read_text().splitlines()[0]


def test_a_skipped_step_leaves_no_trace():
    """Skipping the third step is the run in which it had the weight zero: the same weights afterwards."""
    model = build(calls=(3, 4), norm=False, method=sb.Deterministic())
    with pytest.warns(UserWarning, match="left out"):
        fit(model, on_nonfinite="skip", optimizer="adam", steps=3)
    short = build(norm=False, method=sb.Deterministic())
    fit(short, optimizer="adam", steps=2)
    assert all(torch.equal(value, state(short)[name]) for name, value in state(model).items())


def test_too_many_skips_in_a_row_end_the_run():
    model = build(calls=range(3, 100))
    with (
        pytest.warns(UserWarning),
        pytest.raises(TrainingError, match=r"3 steps in a row were left out.* made is 2"),
    ):
        fit(model, on_nonfinite="skip", max_skips=3)


def test_a_run_that_stopped_is_resumed_with_skip(tmp_path):
    x, y = data()
    batches = [(x[i : i + 10].clone(), y[i : i + 10]) for i in range(0, 40, 10)]
    batches[2][0][4] = math.inf
    options = dict(num_data=40, epochs=2, checkpoint_every=1, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = build()
        sb.fit(whole, batches, on_nonfinite="skip", **options)
        model = build()
        with pytest.raises(TrainingError, match=r"at step 3 .*the last state in .* is whole"):
            sb.fit(model, batches, folder=tmp_path, **options)
        model = build()
        result = sb.fit(model, batches, folder=tmp_path, resume=True, on_nonfinite="skip", **options)
    assert result.skipped == 2
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(model).items())


def test_a_learned_mixing_keeps_its_baseline():
    model = build(calls=(2, 3), forward=True, method=sb.EMP(components=2, learn_mixing=True))
    with pytest.raises(TrainingError):
        fit(model)
    from slimbayes.core.conversion import find_record

    assert torch.isfinite(find_record(model).baseline).all()


def test_gradients_too_large_to_square_are_finite():
    """1e25 squared is beyond float32: the norm is infinite, the gradients are not."""
    model = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic())
    batch = (torch.full((4, 1), 1e12), torch.full((4, 1), 1e13))
    result = sb.fit(model, [batch], num_data=4, steps=1, lr=1e-30, likelihood=sb.Gaussian(), **QUIET)
    assert result.step == 1


class FakeFabric:
    device, world_size = torch.device("cpu"), 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_flag_on_the_device_leaves_steps_out(optimizer):
    """The way of a GPU, by torch's fused optimizers on the CPU: no step, no statistics, and sticky if it is to stop."""

    def run(bad, sticky):
        torch.manual_seed(0)
        net = sb.bayesianize(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), sb.Deterministic()
        )
        stepper = Training(optimizer=optimizer, lr=0.1).make_optimizer(net, (), True)
        guard = Guard(net, net, stepper, FakeFabric, True, sticky)
        made, seen = [], []
        for i in range(5):
            guard.before()
            stepper.zero_grad()
            x = torch.full((4, 3), math.nan) if i in bad else torch.randn(4, 3)
            loss = net(x).square().mean()
            loss.backward()
            made.append(float(guard.step(loss, None, stepper.step)))
            seen.append(state(net))
        return made, seen

    made, seen = run({0, 2}, sticky=False)
    assert made == [0, 1, 0, 1, 1]
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert not torch.equal(seen[2]["0.weight"], seen[3]["0.weight"])
    assert all(torch.isfinite(value).all() for value in seen[-1].values())
    made, seen = run({2}, sticky=True)
    assert made == [1, 1, 0, 0, 0] and all(torch.equal(seen[1][name], seen[4][name]) for name in seen[1])


def test_flags_and_choices():
    assert float(not_finite_flag([torch.tensor([3e38]), torch.tensor([], dtype=torch.float32)])) == 0
    assert float(not_finite_flag([torch.ones(2), torch.tensor([-math.inf], dtype=torch.float64)])) == 1
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    heed(sgd, torch.ones(()))
    weight.grad = torch.ones(2)
    sgd.step()
    assert torch.equal(weight, torch.ones(2)) and torch.equal(
        sgd.state[weight]["momentum_buffer"], torch.zeros(2)
    )
    number = torch.tensor(5)
    choose([number], [torch.tensor(3)], torch.zeros(()))
    assert number == 5


def test_a_network_may_have_no_buffer_that_changes():
    module = nn.Module()
    module.register_buffer("table", torch.ones(2))
    kept = Kept(module)
    for _ in range(4):
        kept.remember()
    kept.put_back()
    assert kept.chosen == [] and torch.equal(module.table, torch.ones(2))


def test_buffers_that_never_change_are_not_copied():
    net = nn.Sequential(nn.BatchNorm1d(3))
    net.register_buffer("table", torch.zeros(1000))
    kept = Kept(net)
    kept.remember()
    assert len(kept.copies) == 4
    net(torch.randn(4, 3))
    kept.remember()
    assert sorted(copy.numel() for copy in kept.copies) == [1, 3, 3]
    net.table.add_(1)
    kept.remember()
    assert len(kept.copies) == 4


def test_settings_are_checked():
    with pytest.raises(ValueError, match="on_nonfinite='go on' is unknown; use one of 'stop', 'skip'"):
        Training(on_nonfinite="go on")
    with pytest.raises(ValueError, match="max_skips must be a whole number of at least 1"):
        Training(max_skips=0)
    with pytest.raises(ValueError, match="fit_many steps all networks by one optimizer"):
        sb.fit_many([nn.Linear(3, 2)], data(), on_nonfinite="skip", **QUIET)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_many_networks_stop_before_the_step(optimizer):
    """All networks have the weights of the step before, the bad one's gradients are named."""
    x, y = data()
    inputs = x.clone()
    order = sb.data.files.permutation(40, 0, "batches.order", 0)
    inputs[order[25]] = math.inf  # in the third batch of ten
    make = lambda: [build(norm=True, method=sb.MCDropout(rate=0.1)) for _ in range(2)]  # noqa: E731
    options = dict(
        batch_size=10, optimizer=optimizer, schedule="constant", kl_annealing=0.0, log_every=50, **QUIET
    )
    models, short = make(), make()
    with pytest.raises(TrainingError) as caught:
        sb.fit_many(models, [(x, y), (inputs, y)], seeds=[0, 0], epochs=2, **options)
    text = str(caught.value)
    assert "network 1 is not finite at step 3" in text and "'0.weight' (18 of 18)" in text
    assert "the last finite step is 2" in text
    sb.fit_many(short, [(x, y), (inputs, y)], seeds=[0, 0], steps=2, **options)
    for ours, theirs in zip(models, short, strict=True):
        assert all(torch.equal(value, state(theirs)[name]) for name, value in state(ours).items())


def test_check_finite_names_what_is_wrong():
    model = build(method=sb.MeanField())
    x, y = data()
    result = sb.elbo(sb.draw(model, x), y, model, num_data=40)
    result.loss.backward()
    sb.check_finite(model, result)
    sb.check_finite(model, result.loss)
    model[0].weight.grad[0, 0] = math.nan
    with pytest.raises(sb.NotFiniteError, match=r"not finite: the gradient of '0.weight' \(1 of 18\)"):
        sb.check_finite(model, result)
    with torch.no_grad():
        model[1].running_mean[2] = math.inf
        model[4].bayes.weight.rho.fill_(1e30)
    broken = sb.ELBO(torch.tensor(math.nan), torch.tensor(1.0), sb.kl(model))
    with pytest.raises(sb.NotFiniteError) as caught:
        sb.check_finite(model, broken)
    for part in ("loss nan", "KL inf", "the buffer of '1.running_mean' (1 of 6)", "the KL of '4.weight'"):
        assert part in str(caught.value)
    assert [each.name for each in kl_culprits(model)] == ["4.weight"]
    assert {each.what for each in culprits(model)} == {"buffer", "gradient"}


def test_the_first_output_is_that_of_a_layer_with_finite_inputs():
    model, found = build(calls=(1,), forward=True).train(), []
    with first_output(model, found):
        sb.draw(model, data()[0])
    assert [(each.what, each.name) for each in found] == [("output", "3")]
    assert listed(found) == str(found[0]) and isinstance(found[0], Culprit)
