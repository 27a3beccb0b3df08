"""torch.export programs and ONNX files of frozen models say what PyTorch says; int8 weights say nearly that."""

import functools
import json
import os
import sys

import pytest
import torch
from helpers_export import METHODS, inputs, make
from torch import nn

import slimbayes as sb
from slimbayes.verbs.exporting import ExportError, OnnxModel, onnx_file

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# Each takes seconds: one for every kind of rule here, all of them with this variable set.
ALL = bool(os.environ.get("SLIMBAYES_EXPORT_ALL"))
FEW = [
    ("images", "Rank1 normal"), ("images", "EMP"), ("images", "MCDropout"), ("images", "DeepEnsemble"),
    ("words", "Rank1 additive"), ("words", "MCDropout"), ("attended", "MeanField shared"),
]  # fmt: skip
MOST = [
    (kind, name) for kind in ("images", "words", "attended") for name in METHODS if (kind, name) not in FEW
]
WHOLE = pytest.mark.skipif(
    not ALL, reason="every method and network: set SLIMBAYES_EXPORT_ALL=1, about 5 minutes of one core"
)


@pytest.mark.uncounted(but=3)
@pytest.mark.parametrize(("kind", "name"), [*FEW, *[pytest.param(*pair, marks=WHOLE) for pair in MOST]])
def test_programs_and_files_say_what_pytorch_says(kind, name, tmp_path):
    model = make(kind, name)
    frozen = sb.freeze(model, draws=2, seed=5, example=inputs(kind))
    samples = 2 // frozen.metadata["components"]
    traced = sb.export.to_program(frozen, inputs(kind))
    path = sb.export.to_onnx(frozen, inputs(kind), tmp_path / "model.onnx", {"note": "σ"}, program=traced)
    file, program = OnnxModel(path), traced.module()
    for batch in (1, 4):  # neither is the example's
        x = inputs(kind, batch, seed=batch)
        with torch.no_grad():
            wanted = sb.draw(model, x, samples=samples, noise="shared", seed=5)
            for found in (frozen(x), program(x), file(x)):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert file.metadata == sb.export.read_metadata(path)
    assert file.metadata["seed"] == 5 and file.metadata["note"] == "σ" and file.metadata["draws"] == 2
    assert file.metadata["methods"][0]["name"] == type(METHODS[name]).__name__
    assert [one.name for one in file.session.get_inputs()] == [
        {"images": "image", "words": "tokens"}.get(kind, "x")
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x, pair, *, table, scale=1.0):
        y = self.a(x) + self.b(pair[0]) * scale
        return {"y": y @ table, "others": (pair[1], y)}


def test_several_inputs_and_outputs(tmp_path):
    torch.manual_seed(0)
    frozen = sb.freeze(sb.bayesianize(Several(), sb.MeanField()), 3, shared_inputs=["table"])

    def given(batch):
        pair = (torch.randn(batch, 2), torch.randn(batch, 1))
        return {"x": torch.randn(batch, 3), "pair": pair, "table": torch.eye(4)[:, :2], "scale": 2.0}

    made = sb.export.to_program(frozen, given(4))
    path = sb.export.to_onnx(frozen, given(4), tmp_path / "model.onnx", program=made)
    model, named, program = OnnxModel(path), given(7), made.module()
    wanted, traced = frozen(**named), program(**named)
    assert [one.name for one in model.session.get_inputs()] == ["x", "pair_0", "pair_1", "table"]
    found = model(named["x"], *named["pair"], named["table"])
    for i, leaf in enumerate((wanted["y"], *wanted["others"])):
        torch.testing.assert_close(found[i], leaf, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(traced["others"][1], wanted["others"][1])
    with pytest.raises(ValueError, match="takes 4 inputs, got 1"):
        model(named["x"])


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    return sb.freeze(sb.bayesianize(net, sb.Rank1(components=2)), 4)


def test_a_wrong_file_is_not_written(linear, tmp_path, monkeypatch):
    path, x = tmp_path / "model.onnx", torch.randn(3, 64)
    path.write_bytes(b"before")
    run, export = OnnxModel.run, functools.cache(torch.onnx.export)
    made = sb.export.to_program(linear, x)
    monkeypatch.setattr(torch.onnx, "export", lambda program, *rest, **options: export(program))
    for wrong, message in (
        (
            lambda value: value + 1e-3,
            "from PyTorch's for a batch of 3, more than tolerance=1e-05; nothing was written",
        ),
        (
            lambda value: value[:, :1],
            r"shape \[4, 1, 3\] for a batch of 3, PyTorch's \[4, 3, 3\]; nothing was written",
        ),
    ):
        monkeypatch.setattr(
            OnnxModel, "run", lambda *given, wrong=wrong: [wrong(value) for value in run(*given)]
        )
        with pytest.raises(ExportError, match=message):
            sb.export.to_onnx(linear, x, path, program=made)
    monkeypatch.setattr(onnx_file, "LARGEST", 100)
    with pytest.raises(ExportError, match="an ONNX file holds at most 2"):
        sb.export.to_onnx(linear, x, path, program=made)
    assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_files_that_are_no_models(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x00no model")
    with pytest.raises(ExportError, match="is no ONNX model that onnxruntime can read"):
        OnnxModel(path)
    with pytest.raises(ExportError, match="is no ONNX model"):
        sb.export.read_metadata(path)
    with pytest.raises(FileNotFoundError):
        sb.export.read_metadata(tmp_path / "none.onnx")
    for text in ("[1", "[]", '{"format": "other"}', '{"format": "slimbayes-export", "version": 2}'):
        with pytest.raises(ExportError, match="own description"):
            onnx_file._parsed(text)
    assert onnx_file._parsed(None) == {}


def test_saved_programs(linear, tmp_path):
    x = torch.randn(3, 64)
    program = sb.export.to_program(linear, x[:1])
    path = sb.export.save_program(program, tmp_path / "deep" / "model.pt2", {"classes": ["a"]})
    torch.testing.assert_close(torch.export.load(path).module()(x), linear(x))
    assert json.loads(path.with_name(f"{path.name}.json").read_text()) == {"classes": ["a"]}
    assert len(list(path.parent.iterdir())) == 2
    fixed = sb.export.to_program(linear, x, dynamic_batch=False).module()
    with pytest.raises(Exception, match=r"Guard|shape|Expected"):
        fixed(torch.randn(5, 64))


def test_lengths_may_change(tmp_path):
    frozen, example = sb.freeze(make("attended", "Rank1 normal"), 2), inputs("attended")
    dynamic = {"x": {1: "steps"}}
    made = sb.export.to_program(frozen, example, dynamic=dynamic)
    file = OnnxModel(
        sb.export.to_onnx(frozen, example, tmp_path / "model.onnx", dynamic=dynamic, program=made)
    )
    longer = torch.randn(5, 8, 4)
    with torch.no_grad():
        for found in (made.module()(longer), file(longer)):
            torch.testing.assert_close(found, frozen(longer), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="dynamic names 'words', which is no tensor among the inputs x"):
        sb.export.to_program(frozen, example, dynamic={"words": {1: "steps"}})


def test_masks_have_one_size():
    frozen = sb.freeze(make("words", "MCDropout"), 2)
    with pytest.raises(RuntimeError, match="is not made yet: call the frozen model once"):
        torch.export.export(frozen, (inputs("words"),), strict=False)
    frozen(inputs("words"))
    steps = {"inputs": ({1: torch.export.Dim("steps", min=2)},)}
    with pytest.raises(ValueError, match="fixed in a frozen model: export it with a dynamic batch only"):
        torch.export.export(frozen, (inputs("words"),), dynamic_shapes=steps, strict=False)


def test_int8_weights(linear):
    pytest.importorskip("torchao")
    x = torch.randn(200, 64)
    mean_field = sb.bayesianize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)), sb.MeanField())
    for frozen in (linear, sb.freeze(mean_field, 4, example=x)):
        before = frozen(x)
        light = sb.export.quantize(frozen)
        error = (light(x) - before).square().mean().sqrt() / before.std()
        assert 1e-4 < error < 0.01  # half a step of 1/127 of a row's largest weight, over many inputs
        assert torch.equal(frozen(x), before) and torch.equal(light(x), light(x))
        assert light.metadata["weights"] == "int8" and "weights" not in frozen.metadata
    with pytest.raises(ValueError, match="no Linear layer"):
        sb.export.quantize(sb.freeze(sb.bayesianize(nn.Sequential(nn.Conv1d(2, 2, 1)), sb.MeanField())))


def test_what_is_missing_is_named(linear, tmp_path, monkeypatch):
    packages = ("onnx", "onnxscript", "onnxruntime", "torchao")
    for name in [*packages, *(name for name in sys.modules if name.split(".")[0] in packages)]:
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        lambda: sb.export.to_onnx(linear, torch.randn(2, 64), tmp_path / "a"),
        lambda: OnnxModel(tmp_path),
    ):
        with pytest.raises(ImportError, match=r"pip install 'slimbayes\[export\]'"):
            call()
    with pytest.raises(ImportError, match=r"pip install 'slimbayes\[int8\]'"):
        sb.export.quantize(linear)
    for call in (sb.export.quantize, lambda other: sb.export.to_program(other, torch.randn(2, 64))):
        with pytest.raises(TypeError, match=r"what sb.freeze\(model\) returned, got Linear"):
            call(nn.Linear(1, 1))


def test_what_a_file_says_of_itself_is_not_overwritten(tmp_path):
    frozen = sb.freeze(sb.bayesianize(nn.Linear(3, 2), sb.Rank1()), draws=4)
    with pytest.raises(ValueError, match="'draws', 'version'"):
        sb.export.to_onnx(frozen, torch.zeros(2, 3), tmp_path / "a.onnx", metadata={"version": 2, "draws": 9})
    with pytest.raises(TypeError, match="kept as JSON"):
        sb.export.to_onnx(frozen, torch.zeros(2, 3), tmp_path / "a.onnx", metadata={"a": torch.ones(1)})
    with pytest.raises(TypeError, match="kept as JSON"):
        sb.export.save_program(None, tmp_path / "a.pt2", {"a": torch.ones(1)})
    assert not list(tmp_path.iterdir())
