"""Networks that are trained at once end where they end when they are trained one by one."""

import copy
import random

import pytest
import torch
from torch import nn
from training.helpers_many import METHODS, SETTINGS, by_fit, by_many, distance, network, networks, table

import slimbayes as sb
from slimbayes.training.many import group
from slimbayes.training.many.inputs import structure

SEEDS = [4, 5, 6]


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("name", METHODS)
def test_every_network_is_as_if_alone(name, monkeypatch):
    """Beside others, alone, and by a traced step: the same weights, statistics and history."""
    models, data = networks(METHODS[name]), [table(i) for i in range(3)]
    together, result = by_many(models, data, SEEDS)
    assert result.groups == [[0, 1, 2]] and result.steps == [11] * 3
    for i in (0, 2):
        alone, single = by_many([models[i]], [data[i]], [SEEDS[i]])
        assert distance(alone, [together[i]]) < 1e-9
        for row, other in zip(result.histories[i], single.histories[0], strict=True):
            assert row == pytest.approx(other, rel=1e-9, abs=1e-10)
    monkeypatch.setattr(group, "TRACED_FROM", 0)
    traced, _ = by_many(models, data, SEEDS)
    assert distance(traced, together) < 1e-9
    assert all(distance([a], [b]) > 1e-4 for a, b in zip(together, models, strict=True))
    assert not any(module.training for model in together for module in model.modules())


# Which components take part in a step is random without noise too.
@pytest.mark.uncounted(but=2)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "Rank1 by steps"])
def test_the_mean_of_every_method_trains_as_by_fit(name):
    """Without noise both are functions of the seed alone: objective, KL and optimizer are those of ``sb.fit``."""
    # 16 rows: in 64-true the loop of fit divides the KL by their number in float32.
    models, data = networks(METHODS[name]), [table(i, rows=16) for i in range(3)]
    settings = {"noise": "mean", "l2": 0.01, "factor_lr_multiplier": 2.0, "kl_annealing": 0.0}
    together, _ = by_many(models, data, SEEDS, **settings)
    assert distance(together, by_fit(models, data, SEEDS, **settings)) < 1e-10


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "l2": 0.01, "schedule": "steps", "milestones": (0.3, 0.6)},
        {"optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "clip_norm": 0.1},
        {"optimizer": "adam", "l2": 0.01, "warmup": 1.0, "clip_norm": 0.5},
        {"optimizer": "adamw", "weight_decay": 0.1, "kl_annealing": 0.0},
        {"steps": None, "epochs": 4, "batch_size": 100},
    ],
)
def test_deterministic_networks_train_as_by_fit(settings):
    models, data = networks(sb.Deterministic()), [table(i) for i in range(3)]
    together, result = by_many(models, data, SEEDS, **settings)
    assert distance(together, by_fit(models, data, SEEDS, **settings)) < 1e-9
    assert [int(model[0].num_batches_tracked) for model in together] == result.steps
    plain = [network() for _ in models]
    for model, converted in zip(plain, models, strict=True):
        model.load_state_dict(converted.state_dict())
    sb.fit_many(plain, data, seeds=SEEDS, likelihood=sb.Gaussian(), **{**SETTINGS, **settings})
    assert distance(plain, together) < 1e-12
    assert "_slimbayes" not in vars(plain[0])


def test_convolutions_and_classes_train_as_by_fit():
    def small():
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))

    torch.manual_seed(0)
    models = networks(sb.Deterministic(), 2, lambda: small().double())
    data = [(torch.randn(20, 1, 4, 4).double(), torch.randint(3, (20,))) for _ in models]
    together, _ = by_many(models, data, [0, 1], sb.Categorical())
    assert distance(together, by_fit(models, data, [0, 1], sb.Categorical())) < 1e-9


def test_the_noise_of_a_network_depends_on_its_seed():
    models = networks(METHODS["MCDropout"], 1) * 3
    models = [copy.deepcopy(model) for model in models]
    trained, _ = by_many(models, table(0), [1, 1, 2])
    assert distance([trained[0]], [trained[1]]) < 1e-12
    assert distance([trained[0]], [trained[2]]) > 1e-4
    default, _ = by_many(models, table(0), None, seed=2)
    assert distance(default, [trained[2]] * 3) < 1e-12


def test_dropout_masks_follow_the_formula():
    """A step of SGD by hand, with the masks that Philox gives for (seed, layer, step)."""
    from slimbayes.core.keyed_noise import keyed_noise, layer_key

    x, y = table(0, rows=8)
    model = sb.bayesianize(nn.Linear(3, 1).double(), sb.MCDropout(rate=0.4))
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    options = {
        "steps": 1,
        "batch_size": 8,
        "optimizer": "sgd",
        "momentum": 0.0,
        "schedule": "constant",
        "lr": 0.5,
    }
    sb.fit_many([model], (x, y), likelihood=sb.Gaussian(), seeds=[7], **{**SETTINGS, **options})
    order = sb.data.files.permutation(8, 7, "batches.order", 0)
    key = layer_key(7, "many Linear.mask0")
    uniform = keyed_noise("uniform", key, 0, None, None, None, (24,), torch.float64, torch.device("cpu"))
    inputs = x[order] * (uniform.view(8, 3) >= 0.4) / 0.6
    error = inputs @ weight.T + bias - y[order]
    assert torch.allclose(model.weight, weight - 0.5 * (error * inputs).mean(0), rtol=0, atol=1e-12)
    assert torch.allclose(model.bias, bias - 0.5 * error.mean(0), rtol=0, atol=1e-12)


def test_noise_has_its_moments_and_depends_on_everything_that_it_is_for():
    from slimbayes.core.context import Request
    from slimbayes.training.many.noise import NoisePlan

    size, count = (1, 2, 5, 1000), 10_000
    requests = [
        Request("normal", "a", 0, size, torch.float64),
        Request("uniform", "b", 0, size, torch.float64),
    ]
    requests += [
        Request("normal", "a", 1, size, torch.float64),
        Request("normal", "b", 1, size, torch.float64),
    ]
    made = NoisePlan(requests, [3, 4], torch.device("cpu")).make(torch.tensor([0, 1]))
    assert all(value.shape == (2, 2, *size) for value in made.values())
    normals = torch.cat(
        [value.reshape(4, count) for name, value in made.items() if name != "b 0"]
    )  # [12, count]
    assert normals.mean(1).abs().max() < 5 / count**0.5
    assert (normals.var(1) - 1).abs().max() < 5 * (2 / count) ** 0.5
    between = normals @ normals.T / count - torch.diag(normals.square().mean(1))
    assert between.abs().max() < 5 / count**0.5  # of other seeds, steps, uses and layers
    uniform = made["b 0"].reshape(4, count)
    assert (uniform.mean(1) - 0.5).abs().max() < 5 * (1 / 12 / count) ** 0.5
    assert uniform.min() > 0 and uniform.max() < 1


def test_what_differs_is_trained_apart_and_what_is_alike_together():
    models = [
        sb.bayesianize(network(5), sb.EMP(components=2, patch=("norm",))),
        sb.bayesianize(network(5), sb.ECMP(components=2, patch=("norm",))),
        sb.bayesianize(network(7), sb.EMP(components=2, patch=("norm",))),
        sb.bayesianize(network(5), sb.EMP(components=2, patch=("norm",))),
        sb.bayesianize(network(5), sb.EMP(components=2, patch=("norm",))),
        sb.bayesianize(network(5), sb.DeepEnsemble(members=2)),
        sb.bayesianize(network(5), sb.DeepEnsemble(members=2)),
    ]
    data = [table(i, rows=31 if i == 4 else 23) for i in range(7)]
    trained, result = by_many(models, data, list(range(7)), steps=None, epochs=3)
    assert result.groups == [[0, 3], [1], [2], [4], [5, 6]]
    assert result.steps == [9, 9, 9, 9, 15, 9, 9]
    assert [len(rows) for rows in result.histories] == [3, 3, 3, 3, 4, 3, 3]
    for i in (0, 4):
        alone, _ = by_many([models[i]], [data[i]], [i], steps=None, epochs=3)
        assert distance(alone, [trained[i]]) < 1e-9


class Scaled(nn.Module):
    """A network with a number of its own, which no repr shows."""

    def __init__(self, scale, hidden=4, table=None):
        super().__init__()
        self.linear, self.scale, self.table = nn.Linear(3, 1).double(), scale, table

    def forward(self, x):
        return self.scale * self.linear(x)


def test_attributes_of_a_network_are_its_own():
    models = [Scaled(1.0), Scaled(2.0), Scaled(1.0), Scaled(1.0, table=torch.ones(2))]
    _, result = by_many(models, table(0), [0, 1, 2, 3])
    assert result.groups == [[0, 2], [1], [3]]
    assert structure(nn.Linear(2, 1)) != structure(nn.Linear(2, 1).requires_grad_(False))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    apart = structure(tied)
    tied[1].weight = tied[0].weight
    assert structure(tied) != apart


def test_likelihoods_are_one_each_or_one_for_all():
    models, data = networks(sb.Deterministic()), [table(i) for i in range(3)]
    fixed = [sb.Gaussian(precision=p) for p in (0.5, 2.0, 8.0)]
    together, result = by_many(models, data, SEEDS, fixed)
    assert result.groups == [[0, 1, 2]]
    for i in range(3):
        assert distance(by_fit([models[i]], [data[i]], [SEEDS[i]], fixed[i]), [together[i]]) < 1e-9
    learned = [sb.Gaussian(precision=p, learn="global") for p in (0.5, 2.0, 8.0)]
    apart = copy.deepcopy(learned)
    by_many(models, data, SEEDS, learned)
    for i in range(3):
        sb.fit(copy.deepcopy(models[i]), data[i], seed=SEEDS[i], likelihood=apart[i], **SETTINGS)
        assert float(learned[i].log_precision.detach()) == pytest.approx(
            float(apart[i].log_precision.detach()), abs=1e-9
        )
        assert abs(float(learned[i].log_precision.detach().exp()) - (0.5, 2.0, 8.0)[i]) > 1e-3


def test_data_sets_are_scaled_as_by_fit():
    data = sb.data.load("diabetes")
    assert data.task == "regression" and data.target_scaling is not None
    make = lambda: nn.Sequential(nn.Linear(data.shape[0], 4), nn.Tanh(), nn.Linear(4, data.num_outputs))  # noqa: E731
    models = networks(sb.Deterministic(), 2, make)
    options = {**SETTINGS, "precision": "32-true", "batch_size": 50}
    trained, single = copy.deepcopy(models), copy.deepcopy(models)
    sb.fit_many(trained, data, **options)
    for model in single:
        sb.fit(model, data, **options)
    assert distance(trained, single) < 1e-5


def test_frozen_tied_and_unused_parameters():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.spare = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.second.bias.requires_grad_(False)
            self.last = nn.Linear(3, 1)

        def forward(self, x):
            return self.last(self.second(self.first(x).tanh()))

    models, data = networks(sb.Deterministic(), 2, lambda: Odd().double()), [table(i) for i in range(2)]
    options = {"optimizer": "adamw", "weight_decay": 0.1}
    together, _ = by_many(models, data, [1, 2], **options)
    assert distance(together, by_fit(models, data, [1, 2], **options)) < 1e-9
    assert distance([together[0].spare], [models[0].spare]) == 0
    assert torch.equal(together[0].second.bias, models[0].second.bias)
    assert together[0].second.weight is together[0].first.weight


def test_the_networks_own_dropout_is_keyed():
    def dropping():
        return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1)).double()

    for method in (sb.Deterministic(), sb.MeanField()):
        models, data = networks(method, 2, dropping), [table(i) for i in range(2)]
        together, _ = by_many(models, data, [1, 2])
        alone, _ = by_many(models[1:], data[1:], [2])
        assert distance(alone, together[1:]) < 1e-9
        silent = copy.deepcopy(models[1:])
        silent[0][2].p = 0.0
        assert distance(by_many(silent, data[1:], [2])[0], alone) > 1e-4
        assert type(models[0][2]) is nn.Dropout


def random_network(source):
    """Layers, widths, norms and activations at random."""
    layers, width = [], 3
    for _ in range(source.randint(1, 3)):
        new = source.randint(2, 6)
        layers.append(nn.Linear(width, new, bias=source.random() < 0.7))
        norm = source.choice([None, nn.BatchNorm1d, nn.LayerNorm])
        layers += [] if norm is None else [norm(new)]
        layers.append(source.choice([nn.ReLU, nn.Tanh, nn.GELU])())
        width = new
    return nn.Sequential(*layers, nn.Linear(width, 1)).double()


@pytest.mark.parametrize("case", range(8))
def test_any_mixture_of_structures_methods_and_settings(case):
    source = random.Random(case)
    torch.manual_seed(case)
    methods = [
        METHODS[name]
        for name in ("Deterministic", "MCDropout", "Rank1", "KTied local", "DeepEnsemble", "MeanField")
    ]
    shapes = [random_network(source) for _ in range(2)]
    models = [sb.bayesianize(copy.deepcopy(source.choice(shapes)), source.choice(methods)) for _ in range(5)]
    data = [table(i, rows=source.choice([17, 23])) for i in range(5)]
    settings = {
        "batch_size": source.choice([4, 7, 50]), "optimizer": source.choice(["adam", "sgd", "adamw"]), "samples": 2,
        "clip_norm": source.choice([None, 0.3]), "schedule": source.choice(["cosine", "constant"]), "steps": None,
        "epochs": 3, "reduction": source.choice(["average", "mixture"]), "log_every": source.choice([1, 5]),
    }  # fmt: skip
    together, result = by_many(models, data, range(5), **settings)
    assert sorted(i for group in result.groups for i in group) == list(range(5))
    for i in range(5):
        alone, single = by_many([models[i]], [data[i]], [i], **settings)
        assert distance(alone, [together[i]]) < 1e-8
        assert [row["step"] for row in single.histories[0]] == [row["step"] for row in result.histories[i]]
    plain = [copy.deepcopy(shapes[0]) for _ in range(2)]
    converted = [sb.bayesianize(copy.deepcopy(model), sb.Deterministic()) for model in plain]
    trained, _ = by_many(plain, data[:2], [0, 1], **settings)
    assert distance(trained, by_fit(converted, data[:2], [0, 1], **settings)) < 1e-8


def test_parameters_with_one_gradient_are_clipped_once():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1).double()), nn.Parameter(torch.ones(1).double())

        def forward(self, x):
            return x[:, :1] + (self.a + self.b)

    models, data = networks(sb.Deterministic(), 2, Sum), [table(i) for i in range(2)]
    together, _ = by_many(models, data, [1, 2], clip_norm=0.01)
    assert distance(together, by_fit(models, data, [1, 2], clip_norm=0.01)) < 1e-12


@pytest.mark.parametrize("name", ["ECMP", "Rank1", "DeepEnsemble", "MCDropout"])
def test_afterwards_each_is_an_ordinary_model(name, tmp_path):
    """It predicts, is saved and read, and goes on by ``sb.fit``; nothing ties it to the others."""
    models, _ = by_many(networks(METHODS[name], 2), table(0), [1, 2])
    x = table(0)[0]
    before = sb.predict(models[1], x, samples=2, seed=0, likelihood=sb.Gaussian()).mean
    sb.save(models[0], tmp_path / "model.safetensors")
    again = sb.load(network(), tmp_path / "model.safetensors")
    assert distance([again], models[:1]) == 0
    sb.fit(models[0], table(0), likelihood=sb.Gaussian(), **{**SETTINGS, "steps": 2})
    assert distance([again], models[:1]) > 0
    assert torch.equal(sb.predict(models[1], x, samples=2, seed=0, likelihood=sb.Gaussian()).mean, before)
    assert all(p.is_leaf and p.untyped_storage().nbytes() == p.nbytes for p in models[1].parameters())


def test_torch_s_generator_is_left_alone():
    models = networks(METHODS["MeanField"], 2)
    state = torch.random.get_rng_state()
    by_many(models, table(0), [0, 1])
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_bench_measures_both_ways(tmp_path):
    import importlib.util
    import json
    from pathlib import Path

    path = Path(__file__).parents[2] / "bench" / "many.py"
    spec = importlib.util.spec_from_file_location("bench_many", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = [
        "--networks",
        "2",
        "--rows",
        "12",
        "--batch",
        "6",
        "--hidden",
        "3",
        "--epochs",
        "40",
        "--warm",
        "1",
    ]
    out = tmp_path / "many.json"
    module.main([*sizes, "--rounds", "1", "--methods", "EMP", "--device", "cpu", "--output", str(out)])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["steps"] == 80 and run["method"] == "EMP" and "error" not in run
    assert run["microseconds_per_step"] == pytest.approx(1e6 * run["seconds_at_once"][0] / 80)


def test_history_holds_means_over_steps():
    models = networks(sb.Deterministic(), 2)
    seen = []
    result = sb.fit_many(
        copy.deepcopy(models),
        table(0),
        likelihood=sb.Gaussian(),
        **SETTINGS,
        callback=lambda s, rows: seen.append((s, rows)),
    )
    fine = sb.fit_many(
        copy.deepcopy(models), table(0), likelihood=sb.Gaussian(), **{**SETTINGS, "log_every": 1}
    )
    assert [row["step"] for row in result.histories[0]] == [4, 8, 11]
    assert [step for step, _ in seen] == [4, 8, 11] and list(seen[0][1]) == [0, 1]
    assert seen[1][1][1] == result.histories[1][1]
    each = [row["loss"] for row in fine.histories[1]]
    assert len(each) == 11
    for row, (first, last) in zip(result.histories[1], [(0, 4), (4, 8), (8, 11)], strict=True):
        assert row["loss"] == pytest.approx(sum(each[first:last]) / (last - first), rel=1e-12)
        assert row["epoch"] == pytest.approx(row["step"] / 3, abs=1e-4)
    assert result.seconds > 0
