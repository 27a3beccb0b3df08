"""Files and texts keep their meaning when defaults change: what they leave out has the papers' values."""

import copy
import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as serialize
from torch import nn

import slimbayes as sb
from slimbayes.core.conversion import find_record
from slimbayes.files import read_json
from slimbayes.verbs import checkpoint
from slimbayes.verbs.method_text import SpecError, full_text, parse_method, parse_stored

RELEASED = Path(__file__).parent / "fixtures" / "0.1.0"
OTHERS = {
    sb.Rank1: {"dropout_rate": 0.05, "kl_reduction": "mean", "temperature": 0.1, "random": "input"},
    sb.KTied: {"stddev_init": 0.02, "prior": sb.EmpiricalNormal(), "temperature": 0.1},
    sb.MeanField: {"stddev_init": 0.02, "prior": sb.EmpiricalNormal(), "temperature": 0.1},
    sb.EMP: {"init_noise": 0.01},
}


@pytest.fixture(autouse=True)
def other_defaults(monkeypatch):
    """As in a later version."""
    for kind, changes in OTHERS.items():
        defaults = [
            p.default for name, p in inspect.signature(kind.__init__).parameters.items() if name != "self"
        ]
        names = [name for name in inspect.signature(kind).parameters]
        changed = tuple(changes.get(name, value) for name, value in zip(names, defaults, strict=True))
        monkeypatch.setattr(kind.__init__, "__defaults__", changed)


def network():
    return nn.Linear(3, 2)


def rewrite(path, change):
    """Change the methods of a file's header, as an older version would have written it."""
    tensors, metadata = checkpoint.read_tensors(path)
    header = json.loads(metadata[checkpoint.HEADER])
    for entry in header["methods"]:
        change(entry["options"])
    del header["sha256"]
    header["sha256"] = checkpoint._digest(header, tensors)
    path.write_bytes(serialize(tensors, metadata={checkpoint.HEADER: json.dumps(header)}))


def test_the_defaults_are_others():
    assert sb.KTied() != sb.KTied.paper() and sb.KTied().temperature == 0.1


@pytest.mark.oldest
@pytest.mark.parametrize("kind", OTHERS)
def test_a_header_that_names_nothing(kind, tmp_path):
    sb.save(sb.bayesianize(network(), kind.paper()), tmp_path / "net")
    rewrite(tmp_path / "net", dict.clear)
    assert find_record(sb.load(network(), tmp_path / "net")).methods == (kind.paper(),)


@pytest.mark.oldest
def test_headers_of_before_are_those_of_now():
    """Options that came later are written where they are not the papers', and read as those where they are left out."""
    for path in (RELEASED / "images-rank1.safetensors", RELEASED / "images-ktied.safetensors"):
        _, metadata = checkpoint.read_tensors(path)
        (entry,) = json.loads(metadata[checkpoint.HEADER])["methods"]
        method = checkpoint._method_from_json(entry, path)
        given = {k: v for k, v in entry["options"].items() if k in ("components", "rank")}
        assert method == type(method).paper(**given)
        record = find_record(sb.bayesianize(network(), method))
        assert json.loads(json.dumps(checkpoint.describe_methods(record))) == [entry]


@pytest.mark.parametrize("kind", OTHERS)
def test_todays_defaults_are_saved_as_they_are(kind, tmp_path):
    sb.save(sb.bayesianize(network(), kind()), tmp_path / "net")
    assert find_record(sb.load(network(), tmp_path / "net")).methods == (kind(),)


def test_pickles_of_before():
    model = sb.bayesianize(network(), sb.KTied.paper())
    method = find_record(model).methods[0]
    del method.__dict__["temperature"], model.bayes.__dict__["kl_temperature"]
    again = pickle.loads(pickle.dumps(model))
    assert find_record(again).methods == (sb.KTied.paper(),)
    found = sb.elbo(sb.draw(again, torch.ones(2, 3)), torch.zeros(2).long(), again, 10)
    torch.testing.assert_close(found.kl, sb.kl(again))
    assert copy.deepcopy(sb.KTied()) == sb.KTied()


def test_texts():
    assert parse_method("KTied(rank=3)") == sb.KTied(rank=3)
    assert parse_stored("KTied(3)") == parse_method("KTied.paper(3)") == sb.KTied.paper(rank=3)
    assert parse_stored("BatchEnsemble(2)") == sb.BatchEnsemble(2)
    for kind in OTHERS:
        assert parse_stored(full_text(kind())) == kind()
        assert parse_method(full_text(kind.paper())) == kind.paper()


@pytest.mark.parametrize(
    "text",
    [
        "BatchEnsemble.paper()",
        "KTied.paperback()",
        "KTied.paper.paper()",
        "KTied.paper(9, 9, 9, 9, 9, 9, 9, 9)",
    ],
)
def test_texts_that_name_nothing(text):
    with pytest.raises(SpecError, match=r"KTied\.paper, |too many positional"):
        parse_method(text)


def test_run_folders():
    from slimbayes.lab.config import RunConfig, from_dict

    stored = read_json(RELEASED / "run" / "run.json")["config"]
    assert stored["method"] == "Rank1(components=2)"
    assert parse_method(from_dict(RunConfig, stored).method) == sb.Rank1.paper(components=2)
    assert parse_method(from_dict(RunConfig, {"method": stored["method"]}).method) == sb.Rank1(components=2)
    now = RunConfig(method="Rank1(components=2)").to_dict()
    assert parse_stored(now["method"]) == sb.Rank1(components=2)
    assert from_dict(RunConfig, now).to_dict() == now


def test_configurations_in_yaml(tmp_path):
    yaml = pytest.importorskip("yaml")
    from slimbayes.lab.config import CompareConfig, ConfigError, RunConfig, read_config, write_config

    old = read_config(RunConfig, RELEASED / "run" / "config.yaml")
    assert parse_method(old.method) == sb.Rank1.paper(components=2)
    write_config(CompareConfig(), tmp_path / "now.yaml")
    again = read_config(CompareConfig, tmp_path / "now.yaml")
    assert [one.parsed for one in again.contenders] == [one.parsed for one in CompareConfig().contenders]
    values = CompareConfig().to_dict()
    (tmp_path / "later.yaml").write_text(yaml.safe_dump({**values, "format": 3}))
    with pytest.raises(ConfigError, match="format 3"):
        read_config(CompareConfig, tmp_path / "later.yaml")
    del values["format"]
    values["contenders"] = [{"label": "KTied", "method": "KTied(rank=2)", "training": {}}]
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(values))
    kinds = {one.label: one.parsed for one in read_config(CompareConfig, tmp_path / "old.yaml").contenders}
    assert kinds["KTied"] == sb.KTied.paper()


def test_cells_of_compare_are_of_their_defaults(monkeypatch):
    from slimbayes.lab.compare.bench import Bench
    from slimbayes.lab.config import CompareConfig, Contender
    from slimbayes.lab.data import load

    config = CompareConfig("wine", contenders=(Contender("a", "KTied()"), Contender("b", "BatchEnsemble()")))
    bench = Bench(config, load("wine"), None)
    before = [bench.key(one, 0) for one in config.contenders]
    monkeypatch.setattr(sb.KTied.__init__, "__defaults__", (3, *sb.KTied.__init__.__defaults__[1:]))
    after = [bench.key(one, 0) for one in config.contenders]
    assert after[0] != before[0] and after[1] == before[1]


def test_estimators():
    pytest.importorskip("sklearn")
    import slimbayes.sklearn
    from slimbayes.sklearn.parameters import resolve

    for name in ("classifier", "regressor"):
        found = slimbayes.sklearn.load(RELEASED / f"{name}.safetensors")
        assert (resolve(found.method),) == find_record(found.model_).methods


def test_experiments_have_the_papers_values():
    from slimbayes.lab.experiments.networks import Recipe
    from slimbayes.training import Training

    recipe = Recipe(
        "any", "any", "any", "dense(hidden=[4])", "wine", "KTied(rank=2)", Training(), "output", "MeanField()"
    )
    methods = find_record(recipe.build((3,), 2, 0)).methods
    assert methods == (sb.KTied.paper(), sb.MeanField.paper())
