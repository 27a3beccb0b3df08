"""The Trainer of Hugging Face trains a Bayesian BERT, with padding, and evaluates the mean of all its members."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import slimbayes as sb
from slimbayes.integrations.transformers import BayesianTrainer

ROWS = [
    [10 + (7 * i + j * j) % 80 for j in range(4 + i % 8)] + [7 + i % 2] for i in range(512)
]  # 7: no, 8: yes
ROWS = [{"input_ids": [*ids, *[0] * (12 - len(ids))], "attention_mask": [int(j < len(ids)) for j in range(12)],
         "labels": i % 2} for i, ids in enumerate(ROWS)]  # fmt: skip


def main(epochs: int = 6) -> dict[str, float]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = sb.bayesianize(BertForSequenceClassification(config), sb.Rank1(components=4, kl_reduction="mean"))
    arguments = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=epochs, per_device_train_batch_size=32,
                                  learning_rate=3e-3, weight_decay=0.01, report_to=[], use_cpu=True)  # fmt: skip
    trainer = BayesianTrainer(
        model, arguments, train_dataset=ROWS[:400], eval_dataset=ROWS[400:], kl_annealing=0.8, predict_samples=4,
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()},
    )  # fmt: skip
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main())
