"""``slimbayes.integrations.lightning``: what the Trainer does with a converted network, against the verbs."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import slimbayes as sb

pl = pytest.importorskip("lightning.pytorch")
from slimbayes.integrations.lightning import BayesianModule, KLAnnealing  # noqa: E402
from slimbayes.integrations.steps import size_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")
X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + 0.3 * X[:, 1] > 0).long()


def network(method=None, outputs=2):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))
    return sb.bayesianize(plain, sb.Rank1(components=2) if method is None else method)


def loader(targets=Y, batch_size=25, **options):
    return DataLoader(TensorDataset(X, targets), batch_size=batch_size, **options)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader without worker processes
        return pl.Trainer(**given)


class Weights(pl.Callback):
    """Notes the KL weight of every batch, by optimizer step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(float(trainer.callback_metrics["kl_weight"]))


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(0)
    module, weights = BayesianModule(network(), lr=3e-2, predict_samples=4), Weights()
    loop = trainer(max_epochs=4, accumulate_grad_batches=2, callbacks=[KLAnnealing(0.5, start=0.25), weights])
    loop.fit(module, loader(shuffle=True, batch_size=15), loader())
    return module, loop, weights.seen


def test_metrics_are_of_the_whole_epoch(run):
    module, loop, _ = run
    assert module.num_data == 90  # found in the loader
    found, expected = loop.callback_metrics, sb.evaluate(module.network, loader(), samples=4, seed=0)
    for name in ("nll", "accuracy", "ece"):
        assert float(found[f"val_{name}"]) == pytest.approx(expected[name], abs=1e-6)
    assert expected["accuracy"] > 0.7
    assert float(found["component_spread"]) == pytest.approx(
        sb.training.monitor.spread_of(module.network)["component_spread"]
    )
    assert float(found["train_loss"]) == pytest.approx(
        float(found["train_nll"] + found["kl_weight"] * found["train_kl"] / 90), rel=1e-5
    )


def test_the_kl_weight_follows_optimizer_steps(run):
    module, _, weights = run
    # 12 steps of 2 batches: 0 for 3, then linear until the sixth
    assert weights == pytest.approx([w for w in (0, 0, 0, 1 / 3, 2 / 3, *[1] * 7) for _ in range(2)])
    assert module.kl_weight == 1.0


def test_predictions_of_batches_are_those_of_the_whole(run):
    module, loop, _ = run
    whole = sb.predict(module.network, X, samples=4, seed=0)
    for data in (loader(), DataLoader(TensorDataset(X), batch_size=40)):  # with targets and without
        found = sb.Predictive.cat(loop.predict(module, data))
        assert torch.allclose(found.mean, whole.mean, atol=1e-6)
        assert found.draws.shape == whole.draws.shape and not found.mean.is_inference()


def test_the_loss_is_elbo():
    module = BayesianModule(network(), num_data=90, reduction="mixture", samples=2, kl_weight=0.3)
    torch.manual_seed(5)
    loss = module.training_step((X, Y), 0)
    torch.manual_seed(5)
    draws = sb.draw(module.network, X, samples=2)
    expected = sb.elbo(draws, Y, module.network, 90, reduction="mixture", kl_weight=0.3).loss
    assert torch.equal(loss, expected)


def test_accumulated_gradients_are_those_of_one_batch():
    whole, parts = network(), network()
    for net, size, count in ((whole, 90, 1), (parts, 30, 3)):
        module = BayesianModule(
            net, noise="mean", lr=0.1, optimizer=torch.optim.SGD, unpack=lambda batch: (batch[0], batch[1])
        )
        trainer(max_steps=1, accumulate_grad_batches=count).fit(module, loader(batch_size=size))
    before = network()
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, parts.state_dict()[name], atol=1e-5), name
    assert not torch.allclose(whole[0].bayes.r.loc, before[0].bayes.r.loc)


def test_a_resumed_run_keeps_its_schedule(tmp_path):
    data = loader(batch_size=45)
    first = trainer(max_epochs=2, callbacks=[KLAnnealing(1.0)])  # 4 steps
    module = BayesianModule(network(), lr=1e-2)
    first.fit(module, data)
    path = tmp_path / "state.ckpt"
    first.save_checkpoint(path)
    weights = Weights()
    again = trainer(max_epochs=4, callbacks=[annealing := KLAnnealing(1.0), weights])
    resumed = BayesianModule(network(), lr=1e-2)
    again.fit(resumed, data, ckpt_path=path)
    assert again.global_step == 8 and weights.seen == [1.0] * 4  # of 8 steps it would be 5/8 to 1
    assert annealing.state_dict() == {"kind": "LinearAnnealing", "values": {"steps": 4, "start": 0}}
    loaded = BayesianModule.load_from_checkpoint(path, network=network())
    assert loaded.lr == 1e-2
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in module.state_dict().items())
    sb.save(loaded.network, tmp_path / "weights.safetensors")
    plain = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    kept = sb.load(plain, tmp_path / "weights.safetensors")
    assert torch.equal(sb.predict(kept, X, seed=0).mean, sb.predict(module.network, X, seed=0).mean)


def test_a_schedule_in_steps_is_taken_as_it_is():
    weights = Weights()
    callback = KLAnnealing(sb.StepAnnealing(0.25, every=2))
    trainer(max_steps=5, callbacks=[callback, weights]).fit(BayesianModule(network()), loader())
    assert weights.seen == [0.0, 0.0, 0.5, 0.5, 1.0]
    assert callback.state_dict()["values"] == {"coefficient": 0.25, "every": 2}
    other = KLAnnealing(sb.LinearAnnealing(7))
    other.load_state_dict(callback.state_dict())  # what is given in steps stays
    assert other._loaded is None


def test_a_reused_callback_takes_the_length_of_each_run(tmp_path):
    callback, data, module = KLAnnealing(1.0), loader(batch_size=45), BayesianModule(network())
    for epochs, steps in ((1, 2), (2, 4)):
        weights = Weights()
        loop = trainer(max_epochs=epochs, callbacks=[callback, weights])
        loop.fit(module, data)
        assert weights.seen == [(step + 1) / steps for step in range(steps)]
    loop.save_checkpoint(tmp_path / "state.ckpt")  # of 4 steps
    loop.test(module, data, ckpt_path=tmp_path / "state.ckpt", verbose=False)
    weights = Weights()
    trainer(max_epochs=1, callbacks=[callback, weights]).fit(module, data)
    assert weights.seen == [0.5, 1.0]
    module.kl_weight = 0.5  # what goes wrong outside of training leaves the weight alone
    callback.on_exception(loop, module, RuntimeError())
    assert module.kl_weight == 0.5


@pytest.mark.parametrize("saved", [sb.Gaussian(precision=4.0), sb.Bernoulli()])
def test_a_checkpoint_is_not_loaded_with_another_likelihood(tmp_path, saved):
    module, path = BayesianModule(network(outputs=1), 90, saved), tmp_path / "state.ckpt"
    loop = trainer(max_steps=1)
    loop.fit(module, loader(Y.float().unsqueeze(1)))
    loop.save_checkpoint(path)
    name = type(saved).__name__
    with pytest.raises(ValueError, match=rf"trained with {name}\(.*has Categorical.*likelihood=sb\.{name}\("):
        BayesianModule.load_from_checkpoint(path, network=network(outputs=1))
    loaded = BayesianModule.load_from_checkpoint(path, network=network(outputs=1), likelihood=saved)
    assert loaded.likelihood is saved and loaded.num_data == 90


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(precision):
    net = network(sb.MeanField())
    module = BayesianModule(net, metrics="all")
    loop = trainer(precision=precision, max_epochs=1)
    loop.fit(module, loader(), loader())
    assert {"val_brier", "val_auroc", "val_mutual_information"} <= loop.callback_metrics.keys()
    kl = loop.callback_metrics["train_kl"]
    assert kl.dtype == torch.float32 and torch.isfinite(loop.callback_metrics["train_loss"])
    assert net[0].weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


def test_real_targets_with_a_learned_noise():
    noise = sb.Gaussian(learn="global")
    data = loader((X[:, 0] * 2).unsqueeze(1))
    module = BayesianModule(
        network(sb.EMP(patch=("output",)), 1), likelihood=noise, lr=1e-2, weight_decay=0.1
    )
    loop = trainer(fast_dev_run=True)
    loop.fit(module, data, [data, loader(torch.zeros(90, 1))])
    assert noise.log_precision != 0.0  # it was stepped
    found = loop.callback_metrics
    assert {f"val_{name}/dataloader_idx_{i}" for name in ("nll", "rmse") for i in (0, 1)} <= found.keys()
    assert "val_accuracy/dataloader_idx_0" not in found
    (first,) = loop.test(module, data, verbose=False)
    assert first["test_log_predictive_density"] == -first["test_nll"]
    groups = {group["name"]: group["weight_decay"] for group in module.configure_optimizers().param_groups}
    assert groups == {"decayed": 0.1, "decayed, 2 times as fast": 0.05, "likelihood": 0.0}


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(X, Y)])


def test_the_number_of_examples():
    net = network()
    subset = loader(sampler=SubsetRandomSampler(range(50)), batch_size=50)
    module = BayesianModule(net)
    trainer(max_steps=1).fit(module, subset)
    assert module.num_data == 50
    trainer(max_steps=1).fit(module, loader())  # looked up anew
    assert module.num_data == 90
    module.num_data = 70  # what is given stays
    trainer(max_steps=1).fit(module, loader())
    assert module.num_data == 70
    batches = BatchSampler(SubsetRandomSampler(range(40)), 20, False)
    assert size_of(DataLoader(TensorDataset(X, Y), batch_sampler=batches)) == 40
    whole = DataLoader([(X, Y)], batch_size=None)  # one item of 90 examples
    with pytest.raises(ValueError, match="batch_size=None"):
        trainer(max_steps=1).fit(BayesianModule(net), whole)

    class Data(pl.LightningDataModule):
        num_data = 1000

        def train_dataloader(self):
            return loader()

    module = BayesianModule(net)
    trainer(max_steps=1).fit(module, Data())
    assert module.num_data == 1000
    with pytest.raises(ValueError, match=r"BayesianModule\(network, num_data=\.\.\.\)"):
        trainer(max_steps=1).fit(BayesianModule(net), DataLoader(Endless(), batch_size=None))
    module = BayesianModule(net, num_data=90)
    callback = KLAnnealing(0.5)
    with pytest.raises(ValueError, match="needs a run with an end"):
        trainer(max_epochs=-1, callbacks=[callback]).fit(module, DataLoader(Endless(), batch_size=None))
    assert module.kl_weight == 1.0


def test_refusals():
    with pytest.raises(ValueError, match=r"call sb\.bayesianize"):
        BayesianModule(nn.Linear(2, 2))
    module = BayesianModule(network(), num_data=90)
    with pytest.raises(TypeError, match="has no targets"):
        module.training_step([X], 0)
    with pytest.raises(TypeError, match="list of 3: batches are pairs"):
        module.training_step([X, X, Y], 0)
    with pytest.raises(ValueError, match="several targets"):
        module.training_step({"x": X, "label": Y, "labels": Y}, 0)
    with pytest.raises(ValueError, match=r"share=1\.5"):
        KLAnnealing(1.5)
    with pytest.raises(ValueError, match="a schedule of its own"):
        KLAnnealing(sb.LinearAnnealing(3), start=0.1)

    class Plain(pl.LightningModule):
        pass

    with pytest.raises(TypeError, match="kl_weight, which Plain does not have"):
        KLAnnealing().on_train_start(None, Plain())
