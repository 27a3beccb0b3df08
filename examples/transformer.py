"""A Hugging Face transformer made Bayesian: a tiny BERT with random weights learns to spot one token."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import slimbayes as sb


def sentences(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(10, 100, (n, 12))
    labels = torch.randint(2, (n,))
    place = torch.randint(12, (n,))
    tokens[torch.arange(n), place] = torch.where(labels == 1, 7, 8)  # 7 means yes, 8 means no
    return tokens, labels


def main(steps: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = sb.bayesianize(BertForSequenceClassification(config), sb.Rank1(components=4))
    cost = sb.summary(model)
    print(f"{cost.parameters - cost.base_parameters:,} more parameters, {100 * cost.overhead:+.1f} %")
    optimizer = torch.optim.AdamW(sb.parameter_groups(model, lr=3e-3, weight_decay=1e-2))
    annealing = sb.LinearAnnealing(steps)
    model.train()
    for step in range(steps):
        tokens, labels = sentences(32)
        draws = sb.draw(model, input_ids=tokens).logits  # [4, 32, 2]
        loss = sb.elbo(draws, labels, model, num_data=10_000, kl_weight=annealing(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens, labels = sentences(256)
    prediction = sb.predict(model, input_ids=tokens, samples=4, seed=0)
    accuracy = (prediction.mean.argmax(-1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.3f} from {len(prediction.draws)} draws")
    return {"accuracy": accuracy, "draws": len(prediction.draws), "overhead": cost.overhead}


if __name__ == "__main__":
    main()
