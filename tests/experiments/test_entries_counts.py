"""The experiments' networks can be built, and the library counts the parameters that the papers print."""

import functools
import re

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.experiments import ENTRIES
from slimbayes.lab.models.text import network_builder
from slimbayes.verbs.method_text import parse_stored

SHAPES = {
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "imagenet": ((3, 224, 224), 1000),
    "imdb": ((80,), 2),
    "mimic3": ((5000, 600, 20), 2),  # codes, levels and columns of the context
}


def shape_of(data):
    return ((13,), 1) if data.startswith("uci/") else SHAPES[data]


@functools.cache
def count(network, data, *methods):
    """Parameters after the conversion, on the meta device; with two methods, of convolutions and of dense layers."""
    parsed = [parse_stored(text) for text in methods]
    rules = parsed[0] if len(parsed) == 1 else list(zip((nn.Conv2d, nn.Linear), parsed, strict=True))
    with torch.device("meta"):
        model = network_builder(network)(*shape_of(data))
        return sb.summary(sb.bayesianize(model, rules)).parameters


def test_networks_can_be_built():
    pairs = {(setting.network, setting.data) for entry in ENTRIES.values() for setting in entry.settings}
    for network, data in sorted(pairs):
        with torch.device("meta"):
            network_builder(network)(*shape_of(data))


def test_parameters_of_variational_families():
    counts = ENTRIES["ktied/table1"].table("counts")
    for label, method in (
        ("Mean-field", sb.MeanField()),
        *((f"{k}-tied", sb.KTied(rank=k)) for k in (1, 2, 3)),
    ):
        model = sb.bayesianize(nn.Linear(784, 400, bias=False), method)
        assert sb.summary(model).parameters == counts.value(label, "parameters")
    assert counts.value("Multivariate Normal", "parameters") == 313_600 + 313_600 * 313_601 // 2
    assert counts.value("Matrix Normal", "parameters") == 313_600 + 784 * 785 // 2 + 400 * 401 // 2
    assert counts.value("Matrix Normal, diagonal", "parameters") == counts.value("1-tied", "parameters")


def test_parameters_of_tied_networks():
    entry = ENTRIES["ktied/figure6"]
    mnist, cifar = entry.settings[:2]
    for label, text in mnist.methods.items():
        counted = count(mnist.network, mnist.data, text)
        assert round(counted / 1000) == entry.table("mnist").value(label, "parameters_k")
    for label, text in cifar.methods.items():
        counted = count(cifar.network, cifar.data, cifar.methods["Mean-field"], text)
        printed = entry.table("cifar100").value(label, "parameters_k")
        if label == "2-tied":  # printed one too high, which the errata say
            assert printed == 2268 and counted == 2_267_408
            assert any(f"{counted:,}" in sentence for sentence in entry.errata)
        else:
            assert round(counted / 1000) == printed


def test_parameters_of_the_residual_network():
    entry = ENTRIES["ktied/table5"]
    (setting,) = entry.settings
    table = entry.table("resnet")
    moving = 7_936 // 2  # the paper counts moving means and variances, which are buffers here
    methods = {"Mean-field": setting.methods["Mean-field"]}
    methods |= {f"{k}-tied": f"KTied(rank={k}, biases=False)" for k in (1, 2, 3)}
    for label, text in methods.items():
        counted = count(setting.network, setting.data, text) + moving
        assert counted == table.value(label, "parameters")
        assert 100 * counted / 9_814_026 == pytest.approx(table.value(label, "parameters_percent"), abs=0.05)


@pytest.mark.parametrize("name", ["rank1/table1", "rank1/table2", "rank1/table3"])
def test_parameters_of_rank1_networks(name):
    """In millions, as printed; where the print is wrong, the errata have the count."""
    entry = ENTRIES[name]
    table = entry.printed[0]
    wrong = []
    for setting in entry.settings:
        for label, text in setting.methods.items():
            counted = count(setting.network, setting.data, text) / 1e6
            printed = table.value(label, "parameters_m")
            digit = 0.5 if printed > 50 else 0.005 if printed == 36.68 else 0.05  # 146M, 36.68M, 36.6M
            if abs(counted - printed) > digit:
                wrong.append((label, counted))
    expected = {
        "rank1/table1": ["Ensemble 4×ResNet-50"],
        "rank1/table2": ["Ensemble 4×WRN-28-5"],
        "rank1/table3": ["Rank-1 Gaussian", "Rank-1 Cauchy", "Ensemble 4×WRN-28-5"],
    }
    assert [label for label, _ in wrong] == expected[name]
    stated = [float(n) for sentence in entry.errata for n in re.findall(r"(\d+\.\d+)M", sentence)]
    for label, counted in wrong:
        assert any(counted == pytest.approx(n, abs=0.05 if n > 50 else 0.005) for n in stated), label


def test_parameters_of_patched_networks():
    entry = ENTRIES["emp/table3"]
    table = entry.table("parameters")
    overheads = {"imagenet": ENTRIES["emp/table4"], "cifar100": ENTRIES["emp/table6"]}
    for setting, column in zip(entry.settings, ("ResNet-18", "PyramidNet"), strict=True):
        base = table.value("Dropout", column)
        for label, text in setting.methods.items():
            alone = label == "Explicit ensemble"  # five whole networks: test_counts.py converts one
            counted = 5 * base if alone else count(setting.network, setting.data, text)
            assert counted == table.value(label, column), label
        main = overheads[setting.name]
        printed = main.table(setting.name)
        (trained,) = main.settings
        for label, text in trained.methods.items():
            overhead = 100 * (count(trained.network, trained.data, text) / base - 1)
            assert overhead == pytest.approx(printed.value(label, "overhead_percent"), rel=2e-3), label
        first = ENTRIES["emp/table1"].table("overhead")
        for label, row in (("Dropout", "Dropout"), ("EMP", "EMP")):
            assert table.value(label, column) / 1e6 == pytest.approx(first.value(row, column), abs=0.05)
        assert 2 * base / 1e6 == pytest.approx(first.value("Mean-field Gaussian", column), abs=0.05)
