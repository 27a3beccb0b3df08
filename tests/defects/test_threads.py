"""Several threads run one network: nobody's mode, members or switches are another's."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import switches


def in_threads(work, count: int) -> list[BaseException]:
    """Run the work in so many threads; the errors."""
    errors: list[BaseException] = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    return errors


def normalised() -> nn.Module:
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)]
    return sb.bayesianize(nn.Sequential(*layers), sb.Rank1(components=2)).train()


def test_predictions_of_a_model_in_train_mode():
    """84 of 100 were wrong, and the running statistics moved."""
    torch.manual_seed(0)
    model, x, wrong = normalised(), torch.randn(16, 8), []
    before = copy.deepcopy(model.state_dict())
    expected = sb.predict(model, x, samples=2, seed=3).mean

    def work():
        for _ in range(40):
            found = sb.predict(model, x, samples=2, seed=3).mean
            wrong.append(not torch.allclose(found, expected, atol=1e-6))

    assert not in_threads(work, 3)
    assert len(wrong) == 120 and not any(wrong)
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_training_waits_for_predictions_and_they_for_it():
    """A step beside predictions is one in train mode, and each has the network for itself."""
    torch.manual_seed(0)
    model, x, modes = normalised(), torch.randn(8, 8), []
    expected = sb.predict(model, x, seed=3).mean
    model[1].register_forward_hook(
        lambda module, *_: modes.append((torch.is_grad_enabled(), module.training))
    )
    model[1].momentum = 0.0  # so that predictions stay what they are
    done = threading.Event()

    def predicting():
        while not done.is_set():
            torch.testing.assert_close(sb.predict(model, x, seed=3).mean, expected)

    def training():
        for _ in range(30):
            draws = sb.draw(model, x, samples=2)
            assert draws.shape[0] == 4
            sb.elbo(draws, torch.zeros(8, dtype=torch.long), model, num_data=8).loss.backward()

    other = threading.Thread(target=lambda: errors.extend(in_threads(predicting, 1)))
    errors: list[BaseException] = []
    other.start()
    errors += in_threads(training, 1)
    done.set()
    other.join(60)
    assert not errors and not other.is_alive()
    assert {grads for grads, _ in modes} == {True, False}
    assert all(training is grads for grads, training in modes)


def test_a_prediction_inside_a_pass_does_not_wait_for_it():
    """A network that predicts with itself while it is trained would wait for its own end."""
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)), sb.MeanField()).train()
    inside = []

    def predict_once(*_):
        if not inside:
            inside.append(True)
            sb.predict(model, torch.zeros(2, 3))

    model[0].register_forward_hook(predict_once)
    assert not in_threads(lambda: sb.draw(model, torch.zeros(4, 3)), 1)
    assert inside and model[1].training


class Last(nn.Module):
    """Sequences to the last output of an LSTM, which keeps a list of the tensors of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.out = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.steps(x.unflatten(1, (1, -1)))[0][:, -1])


def mixed() -> nn.Module:
    """Tied weights, statistics, and a layer that computes its weight before every call."""
    first = nn.utils.weight_norm(nn.Linear(8, 6))
    net = nn.Sequential(
        first, nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    net[4].weight = net[2].weight
    return net


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 3)
    ),
    "lstm": Last,
    "mixed": mixed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("members", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_members_of_an_ensemble(name, members):
    """750 of 1,200 predictions raised, for a thread found another's member in the modules."""
    torch.manual_seed(0)
    method = sb.DeepEnsemble(3, reinitialize=lambda net: [nn.init.normal_(p) for p in net.parameters()])
    model = sb.bayesianize(NETWORKS[name](), method).eval()
    x, saved = torch.randn(6, 8), copy.deepcopy(model.state_dict())
    expected = sb.draw(model, x)
    assert not torch.allclose(expected[0], expected[1])

    def work():
        for _ in range(25):
            with torch.no_grad():
                torch.testing.assert_close(sb.draw(model, x), expected)
            for key, value in model.state_dict().items():  # what is saved meanwhile is the stack
                assert value.shape == saved[key].shape, key

    with sb.fast_paths(members=members):
        assert not in_threads(work, 4)


def test_members_have_gradients_and_copies():
    """Two threads' passes before their backward passes, and a copy that is nobody's."""
    torch.manual_seed(0)
    model = sb.bayesianize(NETWORKS["mlp"](), sb.DeepEnsemble(3))
    x = torch.randn(6, 8)
    sb.draw(model, x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    def work():
        outputs = sb.draw(model, x)
        found = torch.autograd.grad(outputs.square().sum(), list(model.parameters()))
        torch.testing.assert_close(list(found), expected)

    assert not in_threads(work, 4)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert sb.draw(again, x).abs().max() == 0 and sb.draw(model, x).abs().max() > 0


def test_switches_are_put_back_whoever_ends_first():
    """A block that ended after one that began later left that one's switches for good."""
    before = switches.paths.late
    entered, ended = threading.Event(), threading.Event()

    def other():
        with sb.fast_paths(late=not before):
            entered.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    with sb.fast_paths(rows=False):
        ended.set()
        thread.join(10)
        time.sleep(0.01)
        assert switches.paths.late == before and not switches.paths.rows
    assert switches.paths.late == before and switches.paths.rows
