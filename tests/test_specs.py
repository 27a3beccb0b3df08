"""Texts of methods and networks: what repr writes is read back, and nothing in a text is ever run."""

import sys

import pytest
import torch
from hypothesis import given, settings, strategies

import slimbayes as sb
from slimbayes.core import priors
from slimbayes.core.methods import METHODS
from slimbayes.lab.models.text import network_builder
from slimbayes.verbs.method_text import SpecError, parse_method

OTHERS = (
    sb.Rank1(
        components=3, posterior="cauchy", prior=priors.Cauchy(1.0, 0.2), clip=None, components_per_step=2
    ),
    sb.Rank1(posterior="lognormal", factors="input", kl_reduction="mean", train_base=False),
    sb.Rank1(perturbation="additive", random_sign_init=-0.1, prior=priors.Normal(0.0, 0.5)),
    sb.Rank1(posterior="halfcauchy", prior=priors.HalfCauchy(1.0, 0.1)),
    sb.Rank1(random="output", posterior="cauchy"),
    sb.BatchEnsemble(components=2, random_sign_init=0.5),
    sb.MeanField(prior=priors.HeNormal(), estimator="flipout", tied_mean=True, stddev_max=0.2, biases=False),
    sb.KTied(rank=3, prior=priors.Normal(-1.5e-3, 0.2), stddev_init=0.05, estimator="local"),
    sb.EMP(components=3, patch=("norm",), learn_mixing=True, init_noise=0.1, prior_precision=2.0),
    sb.ECMP(components=2, patch=("output",)),
    sb.MCDropout(rate=0.25, granularity="channel"),
    sb.DropConnect(rate=0.3),
    sb.DeepEnsemble(members=2, reinitialize=False),
    sb.Deterministic(),
)


@pytest.mark.parametrize("method", OTHERS, ids=lambda method: type(method).__name__)
def test_what_repr_writes_is_read_back(method):
    assert parse_method(repr(method)) == method


@pytest.mark.parametrize("name", METHODS)
def test_every_method_by_its_name(name):
    assert parse_method(name) == parse_method(f" {name}()\n") == METHODS[name]()
    assert parse_method(repr(METHODS[name]())) == METHODS[name]()


def test_others_cover_every_method():
    assert {type(method).__name__ for method in OTHERS} == set(METHODS)


def test_positions_and_nested_priors():
    assert parse_method("KTied(3, Normal(0, scale=0.5))") == sb.KTied(3, priors.Normal(0, 0.5))


MALICIOUS = (
    "__import__('os').system('touch broken')",
    "Rank1(components=().__class__)",
    "Rank1(components=__import__('os').getpid())",
    "Rank1(prior=eval('1'))",
    "Rank1(prior=Normal(loc=exec('1')))",
    "Rank1(components=[x for x in (4,)][0])",
    "Rank1(components=4 if 1 else 2)",
    "Rank1(components=(lambda: 4)())",
    "Rank1(**{'components': 2})",
    "KTied(prior=Normal(**{'loc': 1}))",
    "Rank1(*[2])",
    "Rank1(components=10**9)",
    "Rank1(f'{1}')",
    "Rank1; import os",
    "(Rank1)(2)()",
    "Rank1(2)(3)",
    "sb.Rank1(2)",
    "print(1)",
    "Normal(0, 1)",
    "",
    "   ",
    "\0",
    "4",
    "Rank1(components=" + "9" * 5000 + ")",
    "Rank1(components=9" + "0" * 400 + ".5e999)",
    "(" * 5000 + "Rank1" + ")" * 5000,
    "Rank1(prior=" + "Normal(" * 500 + ")" * 500 + ")",
    "Rank1(" + "[" * 2000 + "]" * 2000 + ")",
    "Rank1(" + "-" * 20000 + "1)",
    "Rank1({[]: 1})",
)


@pytest.mark.parametrize("text", MALICIOUS, ids=lambda text: text[:30])
def test_malicious_texts_are_refused_and_not_run(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    for read in (parse_method, network_builder):
        with pytest.raises(SpecError) as caught:
            read(text)
        assert 0 < len(str(caught.value)) < 600
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Rank2", "unknown method 'Rank2'; did you mean 'Rank1'"),
        ("ktied", "unknown method 'ktied'; did you mean 'KTied'"),
        ("Rank1(component=4)", "component"),
        ("Rank1(components=0)", "components must be an integer of at least 1, got 0"),
        ("Rank1(components='4')", "components must be an integer"),
        ("Rank1(components=1, components=2)", "cannot be read"),
        ("Rank1(prior=5)", r"Rank1\(prior=5\)"),
        ("MeanField(prior='x')", "MeanField"),
        ("KTied(prior=Normal('a'))", "cannot be read"),
        ("KTied(prior=Normal(mu=1))", "cannot be read"),
        ("KTied(prior=Normal(0, -1))", "scale must be positive"),
        ("KTied(prior=Gamma(1))", "neither a literal nor a prior"),
        ("MCDropout(rate='x')", "MCDropout"),
        ("MCDropout(rate=1.5)", "rate must be at least 0 and below 1"),
        (5, "a method is a text"),
        (None, "a method is a text"),
        (["Rank1"], "a method is a text"),
    ],
)
def test_errors_of_methods(text, message):
    with pytest.raises(SpecError, match=message):
        parse_method(text)


@settings(max_examples=200, deadline=None)
@given(strategies.text(alphabet="Rank1KTiedNormal(),=[]{}'\"\\0.9eE+-*:; \n#@", max_size=40))
def test_any_text_is_read_or_refused(text):
    for read in (parse_method, lambda text: network_builder(text, allow_code=False)):
        try:
            read(text)
        except SpecError as error:
            assert str(error)


def test_networks_by_text():
    network = network_builder("dense(hidden=[16, 8], activation='tanh', norm=False)")((4,), 2)
    assert [layer.out_features for layer in network.hidden if isinstance(layer, torch.nn.Linear)] == [16, 8]
    assert type(network_builder("auto")((1, 8, 8), 10)).__name__ == "DenseNet"
    assert type(network_builder("lenet")((1, 28, 28), 10)).__name__ == "LeNet"
    small = network_builder("wrn(depth=10, width=1)")((3, 32, 32), 10)
    assert sum(p.numel() for p in small.parameters()) == 77_850


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrm", "unknown network 'wrm'; did you mean 'wrn'.*auto, or package.module:function"),
        ("wrn(16, 4)", "give options by name, as in"),
        ("dense(hidden=[x])", "neither a literal"),
        (7, "a network is a text"),
        (None, "a network is a text"),
    ],
)
def test_errors_of_networks(text, message):
    with pytest.raises(SpecError, match=message):
        network_builder(text)


CODE = """
from torch import nn
ran = True
def make(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], outputs))
def number(shape, outputs):
    return 5
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_networks_of_a_test.py").write_text(CODE)
    (tmp_path / "broken_networks_of_a_test.py").write_text("import module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_networks_of_a_test"
    sys.modules.pop("own_networks_of_a_test", None)


def test_own_code_runs_only_where_allowed(own_module):
    with pytest.raises(SpecError, match="does not start code by itself: if you trust it, give --network"):
        network_builder(f"{own_module}:make", allow_code=False)
    assert own_module not in sys.modules
    network = network_builder(f"{own_module}:make")((4,), 2)
    assert network(torch.zeros(3, 4)).shape == (3, 2)
    with pytest.raises(SpecError, match="returned int, not a torch module"):
        network_builder(f"{own_module}:number")((4,), 2)


@pytest.mark.parametrize("text", ["{}:absent", "absent_module_of_a_test:f", ":f", "{}:", ".relative:f", "a b:c",
                                  "broken_networks_of_a_test:f"])  # fmt: skip
def test_own_code_that_is_not_there(own_module, text):
    with pytest.raises(SpecError, match="cannot be imported"):
        network_builder(text.format(own_module))
