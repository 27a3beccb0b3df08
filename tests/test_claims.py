"""What a file names is held against what it holds, and nothing large is made before."""

import json
import os

import pytest
import torch
from torch import nn

import slimbayes as sb
from reliability.readers import signed
from slimbayes import files
from slimbayes.lab.config import CompareConfig, ConfigError, RunConfig, read_config
from slimbayes.lab.data import DataError, read_inputs, stream
from slimbayes.lab.predictions import write_table
from slimbayes.verbs import checkpoint, untrusted_files
from slimbayes.verbs.checkpoint import CheckpointError
from slimbayes.verbs.method_text import SpecError, parse_method


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("DeepEnsemble", "members", 3), ("DeepEnsemble", "members", 10**9), ("Rank1", "components", 3),
        ("Rank1", "components", 10**9), ("Rank1", "components", 10**30), ("KTied", "rank", 10**9),
        ("EMP", "components", 10**8), ("Rank1", "components", 1e300), ("Rank1", "prior", {"family": "os.system"}),
    ],
)  # fmt: skip
def test_methods_that_name_more_than_the_file_holds(name, option, value, tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(signed({"methods": [{"name": name, "options": {option: value}}]}, getattr(sb, name)()))
    plain = network()
    message = f"{value} members are named" if name == "DeepEnsemble" else r"net\.safetensors"
    with pytest.raises(CheckpointError, match=message):
        sb.load(plain, path)
    assert type(plain[0]) is nn.Linear  # as it was


def test_a_large_number_of_components_that_is_there_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_SMALL", 0)  # so that it is tried without memory first
    path = tmp_path / "net.safetensors"
    for method in (
        sb.Rank1(components=64),
        sb.KTied(rank=3),
        sb.DeepEnsemble(members=20),
        sb.EMP(components=90),
    ):
        model = sb.bayesianize(network(), method)
        sb.save(model, path)
        again = sb.load(network(), path)
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": [["0", [0]]]}, {"layers": {"0": True}}, {"methods": "Rank1"}, {"methods": {}},
        {"aliases": {"a": "b"}}, {"dropouts": [[1]]}, {"base": {"0.weight": 7}, "frozen": []},
        {"layers": {"nowhere": 0}}, {"format": [1]},
    ],
)  # fmt: skip
def test_headers_of_another_kind(changes, tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(signed(changes))
    with pytest.raises(CheckpointError, match=r"net\.safetensors"):
        sb.load(network(), path)


def test_brackets_without_end_in_a_header(tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(checkpoint.serialize({"a": torch.ones(1)}, metadata={checkpoint.HEADER: "[" * 100_000}))
    with pytest.raises(CheckpointError, match="nested too deeply"):
        sb.load(network(), path)


def test_too_many_tensors(tmp_path, monkeypatch):
    sb.save(sb.bayesianize(network(), sb.Rank1()), tmp_path / "net")
    monkeypatch.setattr(checkpoint, "MOST_TENSORS", 5)
    with pytest.raises(CheckpointError, match="more than 5"):
        sb.load(network(), tmp_path / "net")


def test_networks_are_compared_before_they_are_made(tmp_path):
    sb.save(sb.bayesianize(nn.Linear(3, 2), sb.Rank1()), tmp_path / "net")
    shapes = untrusted_files.shapes_of(tmp_path / "net")
    untrusted_files.check_network(lambda: nn.Linear(3, 2), "linear", shapes)
    for build in (
        lambda: nn.Linear(10**9, 10**9),
        lambda: nn.Linear(2, 3),
        lambda: nn.Sequential(nn.Linear(3, 2)),
    ):
        with pytest.raises(ValueError, match="the weights have"):
            untrusted_files.check_network(build, "linear", shapes)
    with pytest.raises(ValueError, match="100 layers"):
        untrusted_files.check_network(lambda: nn.Linear(3, 2), "wrn(depth=100)", shapes)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}, "larger than the file"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 10**6]}, "outside of the file"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "outside of the file"),
        ({"shape": [1]}, "damaged"), ([], "damaged"),
    ],
)  # fmt: skip
def test_shapes_that_a_file_has_no_room_for(entry, message, tmp_path):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "net").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=message):
        untrusted_files.shapes_of(tmp_path / "net")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "contenders:\n- &a {x1: 1, x2: 2}\n" + "".join(
    f"- &{b} {{<<: [{', '.join([f'*{a}'] * 90)}]}}\n" for a, b in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{LAUGHS}training: *j\n", "without end"), (MERGES, "entries"), ("training: &a {b: *a}\n", "without end"),
        (f"draws: {'59:' * 2000}1\n", "at most 1000"), (f"draws: {'1:' * 400}1.5\n", "YAML"),
        ("data: !!timestamp x\n", "YAML"), ("data: !!bool x\n", "YAML"), ("draws: !!int ''\n", "YAML"),
        ("data: !!python/object/apply:os.system [x]\n", "YAML"), (f"{'[' * 400}", "YAML"),
        (f"contenders: [{{<<: [{'{a: 1}, ' * 101}]}}]\n", "at most 100"), ("# " + "x" * (2 << 20), "the most"),
        (f"method: {'a' * 20_000}\n", "at most 10,000"),
    ],
)  # fmt: skip
def test_hostile_configurations(text, message, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text(text)
    for kind in (RunConfig, CompareConfig):
        with pytest.raises(ConfigError, match=r"c\.yaml") as caught:
            read_config(kind, tmp_path / "c.yaml")
        assert len(str(caught.value)) < 3000
    if message != "at most 10,000":  # a comparison has no method
        assert message in str(caught.value)
    else:
        with pytest.raises(SpecError, match=message):
            parse_method("a" * 20_000)


def test_aliases_and_merges_of_a_sane_size_are_read(tmp_path):
    pytest.importorskip("yaml")
    text = "contenders:\n- {label: a, method: Rank1, training: &t {kl_weight: 0.5}}\n"
    (tmp_path / "c.yaml").write_text(text + "- {label: b, method: EMP, training: {<<: *t, lr: 0.1}}\n")
    found = read_config(CompareConfig, tmp_path / "c.yaml")
    assert found.contenders[1].training == {"kl_weight": 0.5, "lr": 0.1}


def test_only_ordinary_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe")):
        with pytest.raises(OSError, match=what):
            files.read_whole(path)
    (tmp_path / "a").write_bytes(bytes(10))
    with pytest.raises(OSError, match="9 are the most"):
        files.read_whole(tmp_path / "a", 9)
    with pytest.raises(DataError, match="a pipe"):
        read_inputs(tmp_path / "pipe", {"kind": "table", "shape": [1], "features": ["x"]})


def test_images_of_other_formats_start_no_program(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EOF\n")
    with pytest.raises(DataError, match=r"a\.png: damaged or not an image \(cannot identify"):
        read_inputs(tmp_path / "a.png", {"kind": "image", "shape": [3, 4, 5]})


def test_formulas_in_predictions(tmp_path):
    table = {
        "row": ["=1+1.png", "-5", "b"],
        "prediction": ["@SUM(A1)", "+1", "c"],
        "p(=x)": [0.5, -0.25, 1.0],
    }
    write_table(table, tmp_path / "p.csv")
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines == ["row,prediction,p(=x)", "'=1+1.png,'@SUM(A1),0.5", "-5,+1,-0.25", "b,c,1"]


def test_class_names_that_are_no_text(tmp_path):
    from reliability.attacks import tar
    from reliability.readers import picture

    pytest.importorskip("PIL")
    for part in ("train", "val"):
        (tmp_path / f"{part}-0.tar").write_bytes(tar(("k.png", picture(), {}), ("k.cls", b"0", {})))
    assert len(stream(tmp_path, size=4).train) == 1
    (tmp_path / "classes.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"classes\.txt: cannot be read"):
        stream(tmp_path, size=4)
