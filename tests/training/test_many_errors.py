"""What ``fit_many`` refuses, and what it says."""

import copy
import math

import pytest
import torch
from torch import nn
from training.helpers_many import SETTINGS, network, networks, table

import slimbayes as sb
from slimbayes.accelerate import switches
from slimbayes.training import TrainingError
from slimbayes.training.many import group, stack


def attempt(models, data, **options):
    return sb.fit_many(models, data, **{"likelihood": sb.Gaussian(), **SETTINGS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping": 3}, "early_stopping=3: fit_many validates nothing"),
        ({"devices": 2}, "one device"),
        ({"precision": "bf16-mixed"}, "precision='bf16-mixed'"),
        ({"capture": True}, "capture=True records steps on a GPU"),
        ({"accelerator": "tpu"}, "accelerator='tpu'"),
        ({"seeds": [1]}, "seeds has 1 entries for 2 models"),
        ({"likelihood": [sb.Gaussian()]}, "likelihood has 1 entries for 2 models"),
        ({"likelihood": sb.Gaussian(learn="global")}, "2 networks cannot share them"),
        ({"epoch": 3}, "unknown training setting 'epoch'"),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        attempt(networks(sb.Deterministic(), 2), table(0), **options)


def test_models_and_data_that_do_not_go_together():
    two = networks(sb.Deterministic(), 2)
    with pytest.raises(ValueError, match="data has 3 entries for 2 models"):
        attempt(two, [table(i) for i in range(3)])
    with pytest.raises(ValueError, match="no models"):
        attempt([], table(0))
    with pytest.raises(TypeError, match=r"models\[0\] is a int"):
        attempt([3], table(0))
    with pytest.raises(ValueError, match=r"models\[1\] is the same object"):
        attempt([two[0], two[0]], table(0))
    with pytest.raises(TypeError, match=r"loaders and streams are for sb.fit"):
        attempt(two, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*table(0))))
    with pytest.raises(TypeError, match=r"data\[1\] is a str"):
        attempt(two, [table(0), "digits"])
    with pytest.raises(TypeError, match="settings is a"):
        sb.fit_many(two, table(0), {"epochs": 3})
    with pytest.raises(ValueError, match=r"targets of data\[0\] hold NaN"):
        attempt(two, (table(0)[0], table(0)[1] * math.nan))
    with pytest.raises(
        ValueError, match=r"models\[0\] has parameters of torch.float64, and precision='32-true'"
    ):
        attempt(two, table(0), precision="32-true")
    with pytest.raises(ValueError, match=r"models\[1\] has no parameter to train"):
        attempt([two[0], copy.deepcopy(two[1]).requires_grad_(False)], table(0))
    with pytest.raises(ValueError, match="holds no examples"):
        attempt(two, (torch.zeros(0, 3), torch.zeros(0, 1)))


def test_labels_out_of_range_are_found_before_training():
    models = networks(sb.Deterministic(), 2, lambda: nn.Linear(3, 2).double())
    x, labels = table(0)[0], torch.zeros(23, dtype=torch.long)
    labels[20] = 2
    before = copy.deepcopy(models[0])
    with pytest.raises(ValueError, match="target 2 is out of range for 2 classes"):
        attempt(models, [(x, torch.zeros_like(labels)), (x, labels)], likelihood=sb.Categorical())
    assert torch.equal(before.weight, models[0].weight)


def test_augmented_data_are_refused_until_told_otherwise():
    data = sb.data.load("digits")
    data = type(data)(**{**vars(data), "augment": ("flip",)})
    models = [nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.shape), 10))]
    options = {**SETTINGS, "precision": "32-true", "steps": 2}
    with pytest.raises(ValueError, match="augment=False"):
        sb.fit_many(models, data, **options)
    assert sb.fit_many(models, data, augment=False, **options).steps == [2]


def test_a_loss_that_is_not_finite_names_the_network_and_the_step():
    models = networks(sb.Deterministic(), 3)
    data = [table(i) for i in range(3)]
    data[1] = (data[1][0], data[1][1] * 1e200)
    with pytest.raises(TrainingError, match=r"network 1 is not finite at step 1: lower lr=0.003"):
        attempt(models, data, log_every=50)
    late = networks(sb.Deterministic(), 2)
    order = sb.data.files.permutation(23, 0, "batches.order", 0)
    x, y = table(0)
    y = y.clone()
    y[order[13]] = 1e200  # in the third batch of six
    with pytest.raises(TrainingError, match="network 1 is not finite at step 3"):
        attempt(late, [table(0), (x, y)], seeds=[0, 0])


class Looks(nn.Module):
    """Takes a way that depends on its values."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Random(nn.Module):
    """Draws from torch's generator."""

    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (Looks, r"network 0 cannot be trained beside others.*module '1' \(Looks\).*Train it with sb.fit"),
        (Random, r"network 0 draws random numbers.*module '1' \(Random\).*train it with sb.fit"),
    ],
)
def test_a_network_that_vmap_cannot_take_is_named_with_its_module(inside, message):
    make = lambda: nn.Sequential(nn.Linear(3, 2), inside(), nn.Linear(2, 1)).double()  # noqa: E731
    models = networks(sb.Deterministic(), 2, make)
    with pytest.raises(TrainingError, match=message):
        attempt(models, table(0))


def test_a_kl_that_draws_for_itself_is_refused():
    models = networks(sb.Rank1(components=2, kl_reduction="monte_carlo"), 2)
    with pytest.raises(TrainingError, match=r"network 0 draws random numbers.*its loss"):
        attempt(models, table(0))


class Forgetful(nn.Module):
    """Asks for more noise from its third call in training on: a first look at the network is in eval mode."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += self.training
        return self.dropout(self.dropout(x)) if self.calls[0] > 2 else self.dropout(x)


def test_noise_that_was_not_asked_for_at_first_is_refused():
    with pytest.raises(Exception, match="did not ask for in the first pass"):
        attempt([nn.Sequential(nn.Linear(3, 1), Forgetful()).double()], table(0))


class Growing(nn.Module):
    """Scales its input by a number that grows from call to call."""

    def __init__(self):
        super().__init__()
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += 1
        return x * min(1.0, self.calls[0] / 300)


def test_a_schedule_in_the_networks_own_code_is_refused_where_steps_are_traced():
    make = lambda: [nn.Sequential(nn.Linear(3, 1), Growing()).double() for _ in range(2)]  # noqa: E731
    attempt(make(), table(0), epochs=1, steps=2)  # plain steps call it every time
    with pytest.raises(TrainingError, match=r"network 0 computes something else from call to call.*sb.fit"):
        attempt(make(), table(0), epochs=200, steps=400)


class Averaging(nn.Module):
    """Keeps a running mean of its input, in a new tensor each time or in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return x - mean


def test_a_buffer_that_is_assigned_anew_is_refused():
    make = lambda kept: [nn.Sequential(nn.Linear(3, 2), Averaging(kept), nn.Linear(2, 1)).double()]  # noqa: E731
    with pytest.raises(TrainingError, match=r"network 0 assigns its buffer '1.mean' anew.*in place.*sb.fit"):
        attempt(make(False), table(0))
    models = make(True)
    attempt(models, table(0))
    assert models[0][1].mean.abs().min() > 0


def test_too_little_memory_is_no_fault_of_vmap(monkeypatch):
    def full(*rest):
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(group.Group, "plainly", full)
    with pytest.raises(TrainingError, match="memory of cpu is too small for 1 networks at a time: give"):
        attempt(networks(sb.Deterministic(), 1), table(0))


def test_the_switches_are_put_back_after_an_error():
    models = [nn.Sequential(nn.Linear(3, 2), Looks(), nn.Linear(2, 1)).double()]
    with pytest.raises(TrainingError):
        attempt(models, table(0))
    assert switches.paths.rows and not stack.INSIDE.vmap
    model = sb.bayesianize(network(), sb.DeepEnsemble(members=2))
    assert sb.draw(model, table(0)[0]).shape == (2, 23, 1)
