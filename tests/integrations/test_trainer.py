"""``slimbayes.integrations.transformers``: the Trainer of Hugging Face on made-up token ids, against the verbs."""

import numpy as np
import pytest
import torch

import slimbayes as sb

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from slimbayes.integrations.scoring import aligned  # noqa: E402
from slimbayes.integrations.transformers import BayesianTrainer, elbo_loss  # noqa: E402

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def sentences(count, seed=0):
    """Ids of 4 to 9 tokens, among them 7 or 8, which is the label."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids, label = random.integers(10, 60, random.integers(4, 10)), int(random.integers(2))
        ids[random.integers(len(ids))] = 7 + label
        rows.append({"input_ids": ids.tolist(), "labels": label})
    return rows


def collate(rows, more=0):
    """Padded to the longest, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows) + more
    mask = torch.tensor([[int(i < len(row["input_ids"])) for i in range(longest)] for row in rows])
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def bert(method=None, **config):
    torch.manual_seed(0)
    plain = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **STILL, **config))
    return sb.bayesianize(plain, sb.Rank1(components=2, kl_reduction="mean") if method is None else method)


def options(folder, **more):
    given = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
    }
    return transformers.TrainingArguments(
        str(folder), **{**given, "per_device_train_batch_size": 8, "logging_steps": 1, **more}
    )


def trainer(model, folder, data=None, options_=None, **more):
    rows = sentences(12) if data is None else data
    return BayesianTrainer(
        model, options(folder, **(options_ or {})), train_dataset=rows, data_collator=collate, **more
    )


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def test_the_loss_is_elbo(tmp_path):
    model, batch = bert(), collate(sentences(12))
    loop = trainer(model, tmp_path, samples=2, reduction="mixture", kl_weight=0.5)
    torch.manual_seed(3)
    loss, output = loop.compute_loss(model.eval(), dict(batch), return_outputs=True)
    torch.manual_seed(3)
    draws = sb.draw(model, samples=2, **inputs_of(batch)).logits
    expected = sb.elbo(draws, batch["labels"], model, num_data=12, reduction="mixture", kl_weight=0.5).loss
    assert torch.equal(loss, expected) and torch.equal(output.logits, draws)
    with pytest.raises(ValueError, match="the batch has no 'labels', only input_ids, attention_mask"):
        loop.compute_loss(model, inputs_of(batch))


def plain_step(model, batch, num_data, rate=0.1):
    """One step of gradient descent on the whole batch."""
    draws = sb.draw(model.train(), noise="mean", **inputs_of(batch)).logits
    loss = sb.elbo(draws, batch["labels"], model, num_data).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return loss


@pytest.mark.parametrize("kind", ["trainer", "function"])
def test_accumulated_gradients_are_those_of_one_batch(tmp_path, kind):
    """12 rows in batches of 8 and 4: each row weighs the same, and the KL counts once."""
    rows, model, whole = sentences(12), bert(sb.MeanField()), bert(sb.MeanField())
    loss = plain_step(whole, collate(rows), 12)
    more = {"max_steps": 1, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "trainer":
        loop = trainer(model, tmp_path, rows, more, noise="mean", optimizers=(optimizer, None))
    else:
        loop = transformers.Trainer(
            Mean(model), options(tmp_path, **more), train_dataset=rows, data_collator=collate,
            compute_loss_func=elbo_loss(model, num_data=12), optimizers=(optimizer, None),
        )  # fmt: skip
    loop.train()
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name
    assert loop.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


class Mean(torch.nn.Module):
    """A forward pass without noise, which a plain Trainer calls."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels=None):
        output = sb.draw(self.model, noise="mean", input_ids=input_ids, attention_mask=attention_mask)
        return {"logits": output.logits[0]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def accuracy(found):
        return {
            "accuracy": (found.predictions.argmax(-1) == found.label_ids).mean(),
            "found": found.predictions,
        }

    torch.manual_seed(0)
    more = {"max_steps": 6, "learning_rate": 3e-3, "weight_decay": 0.1, "per_device_eval_batch_size": 7}
    loop = trainer(
        bert(), tmp_path_factory.mktemp("run"), sentences(48), more, eval_dataset=sentences(30, 1), predict_samples=3,
        compute_metrics=accuracy, kl_annealing=0.5,
    )  # fmt: skip
    loop.train()
    return loop, loop.evaluate()


def test_evaluation_is_of_the_mean_probability(run):
    loop, found = run
    batch = collate(sentences(30, 1))
    expected = sb.evaluate(loop.model, [(inputs_of(batch), batch["labels"])], samples=3, seed=0)
    assert found["eval_loss"] == pytest.approx(expected["nll"], abs=1e-5)  # batches of 7 with other padding
    assert found["eval_accuracy"] == expected["accuracy"]
    mean = sb.predict(loop.model, samples=3, seed=0, **inputs_of(batch)).mean
    assert np.allclose(np.exp(found["eval_found"]), mean, atol=1e-5)
    without_labels = [{"input_ids": row["input_ids"], "labels": 0} for row in sentences(5, 1)]
    assert loop.predict(without_labels).predictions.shape == (5, 2)


def test_padding_changes_nothing(run):
    model, rows = run[0].model, sentences(6, 2)
    short, long = (sb.predict(model, noise="mean", **inputs_of(collate(rows, more))).mean for more in (0, 5))
    assert torch.allclose(short, long, atol=1e-6)


def test_logs_and_annealing(run):
    logs = [row for row in run[0].state.log_history if "nll" in row]
    assert [row["kl_weight"] for row in logs] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    for row in logs:
        assert row["loss"] == pytest.approx(row["nll"] + row["kl_weight"] * row["kl"] / 48, rel=1e-4)


def test_weight_decay_leaves_priors_alone(run):
    loop = run[0]
    decayed = loop.get_decay_parameter_names(loop.model)
    assert "bert.encoder.layer.0.attention.self.query.weight" in decayed
    assert not [name for name in decayed if ".bayes." in name or "bias" in name]
    sizes = {group["weight_decay"]: len(group["params"]) for group in loop.optimizer.param_groups}
    assert sizes[0.1] == len(decayed) < sizes[0.0]


@pytest.mark.parametrize(
    "bound", [sb.Rank1(components=2, spread_rate=8.0), sb.EMP(components=2, component_rate=4.0)]
)
def test_rates_are_those_of_the_groups(tmp_path, bound):
    """From the first step to the last: what is quick has its part of the others' rate, and as much decay per step."""
    model = bert(bound)
    rates = {id(p): group["lr"] for group in sb.parameter_groups(model, 1.0, 0.0) for p in group["params"]}
    more = {"max_steps": 3, "learning_rate": 1e-3, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    loop, seen = trainer(model, tmp_path, None, more), []

    class Rates(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            seen.append([group["lr"] for group in loop.optimizer.param_groups])

    loop.add_callback(Rates())
    decayed = {id(p) for n, p in model.named_parameters() if n in loop.get_decay_parameter_names(model)}
    loop.train()
    assert len(seen) == 3
    for i, group in enumerate(loop.optimizer.param_groups):
        for p in group["params"]:
            rate = rates.pop(id(p))
            assert [lrs[i] for lrs in seen] == pytest.approx([1e-3 * rate, 2e-3 / 3 * rate, 1e-3 / 3 * rate])
            assert group["weight_decay"] == pytest.approx(0.1 / rate if id(p) in decayed else 0.0)
    assert not rates  # each in one group
    assert len({lrs for lrs in map(tuple, seen)}) == 3 and len(set(seen[0])) == 2


def test_an_optimizer_of_ones_own_keeps_its_rates(tmp_path):
    model = bert(sb.Rank1(components=2, spread_rate=8.0))
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer(model, tmp_path, None, {"max_steps": 1}, optimizers=(own, None)).train()
    assert len(own.param_groups) == 1


def test_a_resumed_run_goes_on(tmp_path):
    """KL weight, network and the learned noise of real targets."""
    rows = [{**row, "labels": float(row["labels"])} for row in sentences(16)]
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}

    def make():
        return trainer(bert(num_labels=1), tmp_path, rows, more, kl_annealing=sb.LinearAnnealing(4))

    first = make()
    first.train()
    again = make()
    assert isinstance(again.likelihood, sb.Gaussian) and again.likelihood.log_precision == 0.0
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    weights = [row["kl_weight"] for row in again.state.log_history if "nll" in row]
    assert weights == [0.25, 0.5, 0.75, 1.0]  # the first two from the checkpoint
    noise = again.likelihood.log_precision
    assert noise != 0.0 and torch.equal(noise, first.likelihood.log_precision)
    ours, theirs = (loop.model.state_dict() for loop in (again, first))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert sorted(path.name for path in (tmp_path / "checkpoint-4").glob("*.safetensors")) == [
        "likelihood.safetensors", "model.safetensors",
    ]  # fmt: skip


def test_half_precision_and_several_labels(tmp_path):
    rows = [{**row, "labels": [float(row["labels"]), 1.0, 0.0]} for row in sentences(16)]
    model = bert(problem_type="multi_label_classification", num_labels=3)
    loop = trainer(model, tmp_path, rows, {"max_steps": 2, "bf16": True}, eval_dataset=rows)
    loop.train()
    found = loop.predict(rows)
    mean = sb.predict(model, samples=8, seed=0, likelihood=sb.Bernoulli(), **inputs_of(collate(rows))).mean
    assert np.allclose(torch.from_numpy(found.predictions).sigmoid(), mean, atol=0.02)
    assert 0 < found.metrics["test_loss"] < 5


def test_real_targets_are_evaluated(tmp_path):
    """The learned noise has a gradient, which must not reach what becomes numpy."""
    rows, model = [{**row, "labels": float(row["labels"])} for row in sentences(9)], bert(num_labels=1)
    loop = trainer(model, tmp_path, rows, eval_dataset=rows, predict_samples=2)
    batch = collate(rows)
    found = sb.predict(model, samples=2, seed=0, likelihood=loop.likelihood, **inputs_of(batch))
    nll = -found.log_prob(batch["labels"]).mean().item()
    assert loop.evaluate()["eval_loss"] == pytest.approx(nll, abs=1e-5)
    assert np.allclose(loop.predict(rows).predictions, found.mean.detach(), atol=1e-5)


def test_a_subclass_of_a_causal_model_is_causal():
    class Ours(transformers.GPT2LMHeadModel):
        pass

    config = transformers.GPT2Config(vocab_size=60, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    draws, labels = torch.zeros(1, 2, 6, 60), torch.arange(12).reshape(2, 6)
    ours, targets = aligned(Ours(config), draws, labels)
    assert ours.shape == (1, 2, 5, 60) and torch.equal(targets, labels[:, 1:])
    assert aligned(bert(), draws, labels)[1] is labels


def test_a_causal_model_is_scored_at_the_next_token(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = sb.bayesianize(transformers.LlamaForCausalLM(config), sb.KTied.paper(), include="lm_head")
    ids = torch.randint(60, (4, 6))
    labels = ids.masked_fill(torch.arange(6) > 4, -100)
    loop = BayesianTrainer(model, options(tmp_path), num_data=100, predict_samples=2)
    torch.manual_seed(1)
    loss = loop.compute_loss(model.eval(), {"input_ids": ids, "labels": labels})
    torch.manual_seed(1)
    log_p = sb.draw(model, input_ids=ids).logits[0].log_softmax(-1)
    nll = -log_p[:, :4].gather(-1, ids[:, 1:5, None]).sum() / 4  # per row
    assert loss.item() == pytest.approx((nll + sb.kl(model) / 100).item(), rel=1e-5)
    evaluated, logits, kept = loop.prediction_step(model, {"input_ids": ids, "labels": labels}, False)
    assert logits.shape == (4, 6, 60) and torch.equal(kept, labels) and evaluated.isfinite()


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_shares_of_a_causal_step_add_up(tmp_path, kind):
    """Trainer counts the first label of a row for one and not for the other."""
    model = sb.bayesianize(causal(kind), sb.KTied.paper(), include="lm_head")
    batches = [{"input_ids": ids, "labels": ids.clone()} for ids in torch.randint(60, (2, 3, 6))]
    batches[1]["labels"][:, 2:] = -100
    losses = [elbo_loss(model, num_data=6, kl_weight=weight) for weight in (0.0, 1.0)]
    loop = transformers.Trainer(model, options(tmp_path), compute_loss_func=losses[0])
    _, count = loop.get_batch_samples(iter(batches), 2, torch.device("cpu"))
    outputs = {"logits": torch.zeros(3, 6, 60)}
    without, with_kl = (sum(loss(outputs, batch["labels"], count) for batch in batches) for loss in losses)
    assert (with_kl - without).item() == pytest.approx(sb.kl(model).item() / 6, rel=1e-4)


def causal(kind):
    if kind == "LlamaForCausalLM":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    config = transformers.GPT2Config(vocab_size=60, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def test_distributed_training_sees_the_kl(tmp_path):
    """Spreads are in the KL alone where there is no noise: outside of the forward pass they would pass for unused."""
    model, batch = bert(sb.MeanField()).train(), collate(sentences(8))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        loop = trainer(model, tmp_path, noise="mean")
        loop.compute_loss(wrapped, dict(batch)).backward()
    finally:
        torch.distributed.destroy_process_group()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    alone = bert(sb.MeanField()).train()
    trainer(alone, tmp_path, noise="mean").compute_loss(alone, dict(batch)).backward()
    for name, parameter in alone.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name
    assert "forward" not in vars(model)


def test_refusals(tmp_path):
    plain = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    with pytest.raises(ValueError, match=r"call sb\.bayesianize"):
        trainer(plain, tmp_path)
    with pytest.raises(ValueError, match="BayesianTrainer has a loss of its own"):
        trainer(bert(), tmp_path, compute_loss_func=lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1 is no part of a likelihood"):
        trainer(bert(), tmp_path, options_={"label_smoothing_factor": 0.1})
    with pytest.raises(ValueError, match="pass num_data="):
        trainer(bert(), tmp_path, (row for row in sentences(3)), {"max_steps": 1})
    with pytest.raises(ValueError, match="share=2"):
        trainer(bert(), tmp_path, kl_annealing=2)
