"""Files that released versions wrote load with today's code and give what they gave then; newer ones say so."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers_released import INPUTS, NETWORKS, outputs, table, trained, trained_many, values
from safetensors.torch import load_file

import slimbayes as sb

HERE = Path(__file__).parent / "fixtures"
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/manifest.json"))
ENTRIES = [
    pytest.param(version, entry, id=f"{version}-{entry['file']}")
    for version in VERSIONS
    for entry in json.loads((HERE / version / "manifest.json").read_text())["files"]
]
# What reading a kind needs beyond the core; without it the test is skipped, and says so.
NEEDS = {
    "training": ["lightning"],
    "run": ["sklearn", "lightning", "yaml"],
    "served": ["onnxruntime", "lightning", "yaml"],
    "estimator": ["sklearn"],
    "onnx": ["onnxruntime"],
    "hub": ["huggingface_hub"],
    "experiment": ["yaml", "lightning"],
    "compare": ["matplotlib"],
    "bench": ["rich"],
}  # fmt: skip


def model(folder, entry, place):
    return outputs(sb.load(NETWORKS[entry["network"]](), folder / entry["file"]), entry["network"])


def adapter(folder, entry, place):
    base = NETWORKS[entry["network"]]()
    base.load_state_dict(load_file(folder / entry["base"]))
    return outputs(sb.load(base, folder / entry["file"]), entry["network"])


def training(folder, entry, place):
    """Stopped by the old version, ended by this one."""
    return trained(shutil.copytree(folder / entry["file"], place / "run"))


def many(folder, entry, place):
    return trained_many(shutil.copytree(folder / entry["file"], place / "run"))


def run(folder, entry, place):
    from slimbayes.lab.runs import load_run

    return {"mean": load_run(folder / entry["file"], device="cpu").predictive(10 * values(5, 13)).mean}


def served(folder, entry, place):
    from slimbayes.lab.exported_runs import load_served

    return {"mean": load_served(folder / entry["file"]).predictive(10 * values(5, 13)).mean}


def estimator(folder, entry, place):
    import slimbayes.sklearn

    found = slimbayes.sklearn.load(folder / entry["file"])
    predict = getattr(found, "predict_proba", None) or found.predict
    return {"prediction": torch.as_tensor(predict(table()[0].numpy()))}


def onnx(folder, entry, place):
    return {"draws": sb.export.OnnxModel(folder / entry["file"])(INPUTS["rows"])}


def hub(folder, entry, place):
    from slimbayes.integrations.hub import from_pretrained

    return outputs(from_pretrained(NETWORKS[entry["network"]](), folder / entry["file"]), entry["network"])


def compare(folder, entry, place):
    from slimbayes.lab.report.results import read_results
    from slimbayes.lab.report.tables import summary_rows

    rows = summary_rows(read_results(folder / entry["file"]))
    assert {row["name"] for row in rows} == {"Deterministic", "EMP"}
    return {}


def experiment(folder, entry, place):
    from slimbayes.lab.experiments.results import read_result

    found = read_result(folder / entry["file"])
    assert found["experiment"] == "ktied/table4" and found["tables"][0]["rows"]
    return {}


def bench(folder, entry, place):
    from slimbayes.lab.bench.results import read_results
    from slimbayes.lab.bench.table import blocks, rows

    found = read_results(folder / entry["file"])
    assert len([row for block in blocks(found) for row in rows(found, block)]) == 10
    return {}


READERS = {one.__name__: one for one in (model, adapter, training, many, run, served, estimator, onnx, hub,
                                         compare, experiment, bench)}  # fmt: skip


def skip_without(kind):
    for name in NEEDS.get(kind, ()):
        pytest.importorskip(name)


@pytest.mark.oldest
@pytest.mark.usefixtures("on_cpu_if_trained")
@pytest.mark.parametrize("version, entry", ENTRIES)
def test_a_released_file_gives_what_it_gave(version, entry, tmp_path):
    skip_without(entry["kind"])
    found = READERS[entry["kind"]](HERE / version, entry, tmp_path)
    prefix = f"{entry['file']}/"
    recorded = load_file(HERE / version / "recorded.safetensors")
    expected = {k.removeprefix(prefix): v for k, v in recorded.items() if k.startswith(prefix)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def on_cpu_if_trained(request):
    """A run of ``fit`` needs the CPU that the recorded one had; without Lightning there is none."""
    if importlib.util.find_spec("lightning"):
        request.getfixturevalue("on_cpu")


def test_every_release_has_its_files():
    """The version in pyproject.toml has files, unless it is one that is yet to be released."""
    changes = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    released = [line[4:].partition("]")[0] for line in changes.splitlines() if line.startswith("## [")]
    assert set(released) - {"Unreleased"} <= set(VERSIONS), "python tests/fixtures/write.py writes them"
    assert "0.1.0" in VERSIONS


# Newer files


def newer_safetensors(path, header, field="format"):
    """The same file with the next number of the format, whole in every other way."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    front = json.loads(content[8 : 8 + size])
    words = json.loads(front["__metadata__"][header])
    words[field] += 1
    front["__metadata__"][header] = json.dumps(words)
    text = json.dumps(front).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def newer_json(path, header=None):
    words = json.loads(path.read_text())
    words["version"] = 99
    path.write_text(json.dumps(words))


def newer_onnx(path, header):
    package = pytest.importorskip("onnx")
    proto = package.load(path)
    entry = next(one for one in proto.metadata_props if one.key == header)
    entry.value = json.dumps({**json.loads(entry.value), "version": 2})
    package.save(proto, path)


NEWER = {
    "model": ("images-rank1.safetensors", newer_safetensors, "slimbayes"),
    "adapter": ("adapter.safetensors", newer_safetensors, "slimbayes"),
    "training": ("training/training.safetensors", newer_safetensors, "slimbayes-training"),
    "many": ("many/many.safetensors", newer_safetensors, "slimbayes-training"),
    "estimator": ("classifier.safetensors", newer_safetensors, "slimbayes.sklearn"),
    "run": ("run/run.json", newer_json, None),
    "onnx": ("frozen.onnx", newer_onnx, "slimbayes"),
    "compare": ("compare.json", newer_json, None),
    "experiment": ("experiment.json", newer_json, None),
    "bench": ("bench.json", newer_json, None),
}


@pytest.mark.oldest
@pytest.mark.parametrize("kind", NEWER)
def test_a_file_of_a_newer_format_says_that_it_is_newer(kind, tmp_path):
    skip_without(kind)
    name, change, header = NEWER[kind]
    folder = shutil.copytree(HERE / "0.1.0", tmp_path / "files")
    manifest = json.loads((folder / "manifest.json").read_text())["files"]
    entry = next(one for one in manifest if name.startswith(one["file"]))
    change(folder / name, header)
    with pytest.raises((ValueError, RuntimeError), match="update slimbayes"):
        READERS[kind](folder, entry, tmp_path)
