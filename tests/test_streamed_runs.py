"""Images that are read as they are used: trained, resumed, evaluated under corruption and predicted."""

import io
import tarfile

import numpy as np
import pytest
import torch

from slimbayes.lab.compare import evaluate_run
from slimbayes.lab.config import RunConfig
from slimbayes.lab.data import read_inputs
from slimbayes.lab.predictions import predict_table
from slimbayes.lab.runs import load_run, train_run
from slimbayes.training import Training, loop

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("on_cpu")
TRAINING = Training(epochs=6, batch_size=8, lr=2e-2, workers=0, weight_decay=0.0)


def picture(label, number):
    """Dark or bright noise: easy to tell apart, of a size of its own."""
    generator = np.random.default_rng([label, number])
    high = (90, 255)[label]
    shape = (40 + number % 5, 48, 3)
    return Image.fromarray(generator.integers(high - 80, high, shape, dtype=np.uint8))


def tree(folder):
    for part, count in (("train", 16), ("val", 6)):
        for label, name in enumerate(("dark", "bright")):
            place = folder / part / f"{label}-{name}"
            place.mkdir(parents=True)
            for number in range(count):
                picture(label, number + 100 * (part == "val")).save(place / f"{number}.png")
    return folder


def shards(folder):
    folder.mkdir()
    (folder / "classes.txt").write_text("0-dark\n1-bright\n")
    for part, count in (("train", 16), ("val", 6)):
        with tarfile.open(folder / f"{part}-000000.tar", "w") as tar:
            for number in range(count):
                for label in (0, 1):
                    buffer = io.BytesIO()
                    picture(label, number + 100 * (part == "val")).save(buffer, "png")
                    for suffix, content in (("png", buffer.getvalue()), ("cls", str(label).encode())):
                        entry = tarfile.TarInfo(f"{number}-{label}.{suffix}")
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))
    return folder


@pytest.mark.parametrize("layout", [tree, shards])
def test_from_files_to_predictions(tmp_path, layout):
    files = layout(tmp_path / "files")
    config = RunConfig(
        str(files),
        {"stream": True, "size": 32},
        "dense(hidden=[16])",
        "BatchEnsemble(components=2)",
        training=TRAINING,
    )
    run, result = train_run(config, tmp_path / "run", progress=False)
    assert result.step == 24 and run.facts.num_train == 32 and run.facts.crop
    assert run.facts.classes == ("0-dark", "1-bright") and run.facts.shape == (3, 32, 32)
    found = evaluate_run(
        load_run(tmp_path / "run"), tmp_path / "run", shifts=("brightness", "fog"), max_test=10
    )
    metrics = found["methods"][0]["runs"][0]
    assert metrics["clean"]["examples"] == 10 and metrics["clean"]["accuracy"] == 1.0
    levels = [metrics["shifted"][shift]["5"]["nll"] for shift in ("brightness", "fog")]
    assert len({*levels, metrics["clean"]["nll"]}) == 3  # the images did change
    assert "10, evenly spaced" in found["dataset"]["source"]
    assert {example["target"] for example in metrics["examples"]["most"]} <= set(run.facts.classes)
    picture(1, 7).resize((70, 50)).save(tmp_path / "new.png")
    raw, names = read_inputs(tmp_path / "new.png", run.facts.to_dict())
    assert raw.shape == (1, 3, 32, 32) and names == ("new.png",)
    table = predict_table(load_run(tmp_path / "run"), raw, names=list(names))
    assert table["prediction"] == ["1-bright"] and table["row"] == ["new.png"]


class Interrupted(Exception):
    pass


def test_a_stream_resumes_bit_for_bit(tmp_path, monkeypatch):
    files = tree(tmp_path / "files")
    training = Training(epochs=2, batch_size=8, workers=0, checkpoint_every=1)
    options = {"stream": True, "size": 16}
    config = RunConfig(str(files), options, "dense(hidden=[8])", "Rank1(components=2)", training=training)
    whole, _ = train_run(config, tmp_path / "whole", progress=False)
    kept = loop.keep

    def interrupted(run):
        kept(run)
        if run.step == 5:  # the second batch of the second epoch is next
            raise Interrupted

    monkeypatch.setattr(loop, "keep", interrupted)
    with pytest.raises(Interrupted):
        train_run(config, tmp_path / "parts", progress=False)
    monkeypatch.undo()
    again, result = train_run(config, tmp_path / "parts", resume=True, progress=False)
    assert result.step == 8
    first, second = whole.model.state_dict(), again.model.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
