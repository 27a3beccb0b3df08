"""PEFT's LoRA models: Bayesian LoRA, noise on the base beside LoRA, adapters of both, and merging into one network."""

import pytest
import torch
from helpers_networks import trained_step
from torch import nn

import slimbayes as sb

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(1))
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
Y = torch.tensor([0, 1, 2, 0])


def bert():
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=10, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def lora(seed=1):
    network = bert()
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return peft.get_peft_model(network, config)


def draw(model, **options):
    return sb.draw(model, **INPUTS, **options).logits


BASE = r"(key|output\.dense)$"  # of the base, without LoRA
CASES = {
    "mean-field LoRA": (sb.MeanField.paper(stddev_init=0.05), "lora_"),
    "k-tied LoRA": (sb.KTied.paper(stddev_init=0.05), "lora_"),
    "rank-1 LoRA": (sb.Rank1(components=2), "lora_"),
    "rank-1 base": (sb.Rank1(components=2), BASE),
    "mean-field LoRA, rank-1 base": ([("lora_", sb.MeanField()), (BASE, sb.Rank1(components=2))], None),
}


@pytest.fixture(params=CASES)
def model(request):
    method, include = CASES[request.param]
    model = sb.bayesianize(lora(), method, include=include).train()
    for _ in range(2):  # LoRA's B starts at zero, so that A and what is on it move in the second step
        draws = draw(model)
        sb.elbo(draws, Y, model, num_data=100).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
    return model


def test_training_keeps_the_base(model, tmp_path):
    base = dict(bert().named_parameters())
    held = 0
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if plain in base and "classifier" not in name:
            assert not parameter.requires_grad
            assert torch.equal(parameter, base[plain].expand_as(parameter)), name
            held += 1
    assert held == len(base) - 2  # PEFT trains the classifier
    changed = trained_step(model, (), Y, **INPUTS)[0]
    assert {n for n, p in model.named_parameters() if p.requires_grad and "bias" not in n} <= changed


def test_adapter_predictions_and_another_base(model, tmp_path):
    path = tmp_path / "adapter.safetensors"
    sb.save(model, path, adapter_only=True)
    again = sb.load(lora(seed=9), path)  # LoRA's own start does not matter
    assert torch.equal(draw(again.eval(), seed=3), draw(model.eval(), seed=3))
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    prediction = sb.predict(again, **INPUTS, samples=4, seed=0)
    assert prediction.draws.shape[0] in (4, 8) and bool((prediction.mutual_information > 0).all())
    other = lora()
    with torch.no_grad():
        other.base_model.model.bert.embeddings.word_embeddings.weight[3] += 1e-3
    with pytest.raises(sb.CheckpointError, match=r"1 of its \d+ frozen tensors .*word_embeddings\.weight"):
        sb.load(other, path)


def test_merged_into_one_plain_network(model):
    """The posterior mean into LoRA, and LoRA into the base: transformers' network, without either library."""
    model.eval()
    expected = draw(model, noise="mean")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged = sb.merge(model, component=len(expected) - 1)
    torch.testing.assert_close(merged(**INPUTS).logits, expected[-1], rtol=0, atol=1e-6)
    sb.unmerge(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain = sb.merge(model, component=0, keep=False).merge_and_unload()
    torch.testing.assert_close(plain(**INPUTS).logits, expected[0], rtol=0, atol=1e-5)
    assert type(plain.bert.encoder.layer[0].attention.self.query) is nn.Linear
    bert().load_state_dict(plain.state_dict(), strict=True)
