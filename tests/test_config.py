"""Configurations: through YAML and back, defaults and overrides, and every wrong entry a clear ConfigError."""

import dataclasses
import json

import pytest
from hypothesis import given, settings, strategies

from slimbayes.lab.config import (
    CONTENDERS,
    CompareConfig,
    ConfigError,
    Contender,
    RunConfig,
    from_dict,
    read_config,
    write_config,
)
from slimbayes.training import Training

RUN = RunConfig(
    data="größe [1]: a.csv",
    data_options={"target": "y", "ignore": ["a", "b"], "header": True},
    network="dense(hidden=[16, 8])",
    method="Rank1(components=2, prior=Normal(0.0, 1.0))",
    validation=0.1,
    draws=8,
    training=Training(
        lr=1e-5, milestones=(0.1, 0.2), optimizer="sgd", l2=1e-12, steps=3, clip_norm=0.5, seed=-3
    ),
)
COMPARE = CompareConfig(
    data="wine",
    contenders=(Contender("a: b", "KTied(rank=1)", {"kl_weight": 1e-7}), CONTENDERS[1]),
    seeds=(3, 0),
    shifts=("noise",),
    severities=(1, 5),
    max_test=10,
    validation=0.25,
    training=Training(epochs=2),
)


@pytest.mark.parametrize("config", [RUN, COMPARE, RunConfig(), CompareConfig()])
def test_through_yaml_and_back(tmp_path, config):
    path = tmp_path / "deep" / "config.yaml"
    write_config(config, path)
    again = read_config(type(config), path)
    assert again.to_dict() == config.to_dict()  # texts of methods name every option
    write_config(again, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == path.read_bytes()
    assert from_dict(type(config), json.loads(json.dumps(config.to_dict()))) == again
    assert "!!" not in path.read_text()  # no Python objects


def test_what_a_file_leaves_out_comes_from_the_base(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("draws: 3\ntraining: {lr: 1e-3, warmup: 2, epochs: 7, l2: 1.5E-4, optimizer: sgd}\n")
    config = read_config(RunConfig, path)
    assert (config.draws, config.data, config.training.epochs) == (3, "digits", 7)
    assert (config.training.lr, config.training.l2) == (
        0.001,
        0.00015,
    )  # 1e-3 is a number, as people write it
    over = read_config(RunConfig, path, RUN)
    assert over == dataclasses.replace(
        RUN, draws=3, training=dataclasses.replace(RUN.training, lr=1e-3, warmup=2, epochs=7, l2=1.5e-4)
    )
    path.write_text("")
    assert read_config(RunConfig, path) == RunConfig()


def test_contenders_as_text_mapping_and_preset():
    config = from_dict(
        CompareConfig,
        {
            "contenders": [
                "KTied",
                "Rank1(components=8)",
                {"label": "x", "method": "MeanField()"},
                {"label": "y", "method": "EMP", "training": {"lr": 0.5}},
                Contender("z", "Deterministic"),
            ]
        },
    )
    ktied, rank1, x, y, z = config.contenders
    assert ktied == next(contender for contender in CONTENDERS if contender.label == "KTied")
    assert rank1 == Contender("Rank1(components=8)", "Rank1(components=8)") and rank1.parsed.components == 8
    assert x == Contender("x", "MeanField()") and y.training == {"lr": 0.5} and z.label == "z"


def test_the_presets_are_sound():
    for contender in CONTENDERS:
        assert type(contender.parsed).__name__ == contender.label
        Training.from_dict(contender.training)


BAD_RUNS = [
    ({"dta": "x"}, "unknown entry 'dta'; did you mean 'data'"),
    ({"zzzzzz": 1}, "unknown entry 'zzzzzz'; known: data, data_options"),
    ({3: 1}, "unknown entry 3"),
    ({None: 1}, "unknown entry None"),
    ({"training": {"epoch": 3}}, "unknown training setting 'epoch'; did you mean 'epochs'"),
    ({"training": {"epochs": "3"}}, "epochs must be a whole number of at least 1, got '3'"),
    ({"training": {"lr": [0.1]}}, r"lr must be a finite number above 0, got \[0.1\]"),
    ({"training": {"milestones": 0.5}}, "milestones must be a list of numbers, got 0.5"),
    ({"training": None}, "training must be a mapping of settings, got None"),
    ({"training": "fast"}, "training must be a mapping of settings, got 'fast'"),
    ({"method": None}, "a method is a text"),
    ({"method": ["Rank1"]}, "a method is a text"),
    ({"method": "Rank3"}, "unknown method 'Rank3'"),
    ({"network": None}, "a network is a text"),
    ({"network": 5}, "a network is a text"),
    ({"network": "wrm"}, "unknown network 'wrm'; did you mean 'wrn'"),
    ({"data": None}, "data must be a name or a file, got None"),
    ({"data": ""}, "data must be a name"),
    ({"data": ["a"]}, "data must be a name"),
    ({"data_options": None}, "data_options must be a mapping"),
    ({"data_options": [1]}, "data_options must be a mapping"),
    ({"data_options": {1: 2}}, "data_options must be a mapping"),
    ({"draws": 0}, "draws must be a whole number of at least 1, got 0"),
    ({"draws": "8"}, "draws must be a whole number"),
    ({"draws": True}, "draws must be a whole number"),
    ({"validation": "0.1"}, "validation must be a fraction between 0 and 1, got '0.1'"),
    ({"validation": 1.0}, "validation must be a fraction"),
    ({"validation": float("nan")}, "validation must be a fraction"),
]
BAD_COMPARISONS = [
    ({"contenders": None}, "contenders must be a list of methods, got None"),
    ({"contenders": "Rank1"}, "contenders must be a list of methods, got 'Rank1'"),
    ({"contenders": {"label": "a"}}, "contenders must be a list of methods"),
    ({"contenders": []}, "at least one method and one seed"),
    ({"contenders": [5]}, "a method is a text or label, method and training; got 5"),
    ({"contenders": [None]}, "a method is a text or label"),
    ({"contenders": [["a", "Rank1"]]}, "a method is a text or label"),
    ({"contenders": [{"label": "a"}]}, "a method is a text or label"),
    ({"contenders": [{"label": "a", "method": "Rank1", "lr": 1}]}, "a method is a text or label"),
    ({"contenders": [{"label": "a", "method": 3}]}, "a method is a text"),
    ({"contenders": [{"label": [1], "method": "Rank1"}]}, "label"),
    ({"contenders": [{"label": "a", "method": "Rank1", "training": 3}]}, "training"),
    ({"contenders": [{"label": "a", "method": "Rank1", "training": {"lrr": 3}}]}, "did you mean 'lr'"),
    ({"contenders": ["Rank1", "Rank1"]}, "two methods have the label 'Rank1'"),
    ({"seeds": 3}, "seeds must be a list of whole numbers, got 3"),
    ({"seeds": "012"}, "seeds must be a list of whole numbers"),
    ({"seeds": [0.5]}, "seeds must be a list of whole numbers"),
    ({"seeds": []}, "at least one method and one seed"),
    ({"seeds": [1, 1]}, "two runs have the seed 1"),
    ({"shifts": "noise"}, "shifts must be a list of names, got 'noise'"),
    ({"shifts": [None]}, "shifts must be a list of names"),
    ({"severities": [0]}, "severities must be a list of numbers from 1 to 5"),
    ({"severities": [6]}, "severities must be"),
    ({"severities": None}, "severities must be"),
    ({"max_test": 0}, "max_test must be a whole number of at least 1, got 0"),
    ({"max_test": "5"}, "max_test must be a whole number"),
    ({"training": {"optimizer": "sgd"}}, "weight_decay=0.01 goes with optimizer='adamw'.*set weight_decay=0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [(RunConfig, *case) for case in BAD_RUNS] + [(CompareConfig, *case) for case in BAD_COMPARISONS],
)
def test_wrong_entries_are_named(kind, values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(kind, values)


@pytest.mark.parametrize("values", [None, 3, "a", [], [{"data": "x"}]])
def test_not_a_mapping(values):
    with pytest.raises(ConfigError, match="a configuration is a mapping of names to values"):
        from_dict(RunConfig, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "a configuration is a mapping"),
        ("a: [1, 2", "is no YAML"),
        ("a: !!python/object/apply:os.system ['touch broken']", "is no YAML"),
        ("\tdata: x", "is no YAML"),
        ("draws: 2017-99-99", "is no YAML|draws must be"),
        ("[" * 1000, "is no YAML"),  # deeper than Python goes
        ("training: {epochs: x}", "epochs must be a whole number"),
        ("method: Rnk1", "unknown method 'Rnk1'; did you mean 'Rank1'"),
    ],
)
def test_files_that_cannot_be_read_name_the_file(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(RunConfig, path)
    assert "my.yaml" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.yaml"]


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file at .*absent.yaml"):
        read_config(RunConfig, tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"binary.yaml' is no YAML"):
        read_config(RunConfig, tmp_path / "binary.yaml")


anything = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.sampled_from(["Rank1", "noise", "dense", "a:b", "0.1", "", "Normal(0, 1)", "x"]),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(["label", "method", "training", "lr", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@pytest.mark.uncounted
@pytest.mark.parametrize("kind", [RunConfig, CompareConfig])
@settings(max_examples=150, deadline=None)
@given(data=strategies.data())
def test_any_entries_work_or_are_a_value_error(kind, data):
    names = strategies.sampled_from([field.name for field in dataclasses.fields(kind)])
    values = data.draw(strategies.dictionaries(names, anything, max_size=3))
    try:
        config = from_dict(kind, values)
    except ValueError as error:
        assert str(error)
    else:
        assert from_dict(kind, config.to_dict()).to_dict() == config.to_dict()
