"""Parameter counts of the papers' tables, to the last digit. Networks live on the meta device: no memory."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes import models

MLP = dict(mean_field=956_820, ktied=(481_614, 484_008, 486_402))
TFP = dict(mean_field=9_814_026, ktied=(4_929_711, 4_946_964, 4_964_217))
LENET = dict(mean_field=4_405_320, ktied=(2_262_188, 2_267_408, 2_272_628))


def counted(build, method):
    with torch.device("meta"):
        model = sb.bayesianize(build(), method)
    result = sb.summary(model)
    assert result.parameters == result.trainable == sum(p.numel() for p in model.parameters())
    rows = sum(row.parameters - row.base_parameters for row in result.rows)
    assert result.parameters == result.base_parameters + rows
    return result, model


@pytest.mark.uncounted(but=3)
@pytest.mark.parametrize(
    ("build", "base", "batch_ensemble", "rank1"),
    [
        (lambda: models.wrn28_10(10), 36_479_194, 36_557_548, 36_635_872),
        (lambda: models.wrn28_10(100), 36_536_884, 36_615_868, 36_694_552),
        (models.resnet50, 25_557_032, 25_768_588, 25_977_144),
    ],
    ids=["wrn-28-10/10", "wrn-28-10/100", "resnet-50"],
)
def test_rank1_and_batch_ensemble(build, base, batch_ensemble, rank1):
    """base + K·S + (K − 1)·C for point factors, base + 2K·S + (K − 1)·C for Normal ones."""
    for method, expected in (
        (sb.Deterministic(), base),
        (sb.BatchEnsemble(components=4), batch_ensemble),
        (sb.Rank1(components=4), rank1),
        (sb.Rank1(components=4, posterior="cauchy"), rank1),
    ):
        result, _ = counted(build, method)
        assert (result.base_parameters, result.parameters) == (base, expected)
        assert result.overhead == pytest.approx(expected / base - 1, abs=1e-12)


def test_rank1_options_change_the_count():
    """S of the MLP is 784 + 400 + 400 + 400 + 400 + 10; biases get K versions."""
    base, inputs, outputs = 478_410, 784 + 400 + 400, 400 + 400 + 10
    biases = 3 * outputs
    for method, expected in (
        (sb.Rank1(4), base + 8 * (inputs + outputs) + biases),
        (sb.Rank1(4, factors="input"), base + 8 * inputs + biases),
        (sb.Rank1(4, factors="output"), base + 8 * outputs + biases),
        (sb.Rank1(4, random="input"), base + 8 * inputs + 4 * outputs + biases),
        (sb.Rank1(4, random="output"), base + 4 * inputs + 8 * outputs + biases),
        (sb.Rank1(4, factors="input", random="input"), base + 8 * inputs + biases),
        (sb.Rank1(4, posterior="halfcauchy", random="input"), base + 4 * (inputs + outputs) + biases),
        (sb.Rank1(4, posterior="delta"), base + 4 * (inputs + outputs) + biases),
        (sb.Rank1(4, posterior="halfcauchy"), base + 4 * (inputs + outputs) + biases),
    ):
        assert counted(models.MLP, method)[0].parameters == expected, method


@pytest.mark.parametrize("kind", [sb.EMP, sb.ECMP])
def test_patching(kind):
    assert counted(models.resnet18, kind(components=5))[0].parameters == 13_779_912
    norms, _ = counted(models.resnet18, kind(components=5, patch=("norm",)))
    assert norms.parameters == 11_689_512 + 38_400
    assert norms.overhead == pytest.approx(0.003285, abs=5e-7)
    pyramid, _ = counted(models.PyramidNet, kind(components=5))
    assert (pyramid.base_parameters, pyramid.parameters) == (28_511_307, 28_825_299)
    assert pyramid.overhead == pytest.approx(0.011013, abs=5e-7)


def test_patched_deep_mlp():
    """The paper's base leaves the 99 norms out and its overhead patches them: 1,009,900 + 119,200."""
    plain, _ = counted(models.DeepMLP, sb.Deterministic())
    patched, _ = counted(lambda: models.DeepMLP(normalization=True), sb.EMP(components=5))
    overhead = patched.parameters - patched.base_parameters
    assert plain.parameters == 1_009_900
    assert overhead == 119_200
    assert plain.parameters + overhead == 1_129_100


def test_learned_mixing_adds_one_logit_per_component_and_layer():
    uniform, _ = counted(models.resnet18, sb.EMP(components=5))
    learned, _ = counted(models.resnet18, sb.EMP(components=5, learn_mixing=True))
    assert learned.parameters - uniform.parameters == 21 * 5  # 20 norms and the output layer


def test_mean_field_and_ktied_mlp():
    assert counted(models.MLP, sb.MeanField.paper())[0].parameters == MLP["mean_field"]
    for rank, expected in enumerate(MLP["ktied"], start=1):
        assert counted(models.MLP, sb.KTied.paper(rank=rank))[0].parameters == expected


def test_mean_field_and_ktied_tfp_resnet():
    """Kernels alone are random; the paper counts moving means and variances too."""
    methods = [sb.MeanField(biases=False), *(sb.KTied(rank=k, biases=False) for k in (1, 2, 3))]
    for method, expected in zip(methods, (TFP["mean_field"], *TFP["ktied"]), strict=True):
        result, model = counted(models.TFPResNet, method)
        moving = sum(b.numel() for name, b in model.named_buffers() if "running" in name)
        assert moving == 7_936 // 2
        assert result.parameters + moving == expected


def test_mean_field_and_ktied_lenet():
    """Dense layers are tied, convolutions mean-field."""
    assert counted(models.LeNet, sb.MeanField.paper())[0].parameters == LENET["mean_field"]
    for rank, expected in enumerate(LENET["ktied"], start=1):
        rules = [(nn.Conv2d, sb.MeanField.paper()), (nn.Linear, sb.KTied.paper(rank=rank))]
        assert counted(models.LeNet, rules)[0].parameters == expected


def test_baselines():
    base = 478_410
    assert counted(models.MLP, sb.DeepEnsemble(members=5))[0].parameters == 5 * base
    for method in (sb.MCDropout(), sb.DropConnect(), sb.Deterministic()):
        result, _ = counted(models.MLP, method)
        assert (result.parameters, result.overhead) == (base, 0.0)


def test_frozen_base_is_counted_but_not_trained():
    with torch.device("meta"):
        result = sb.summary(sb.bayesianize(models.MLP(), sb.Rank1(components=4, train_base=False)))
    factors = 8 * (784 + 400 + 400 + 400 + 400 + 10)
    assert result.trainable == factors
    assert result.parameters == 478_410 + factors + 3 * 810


def test_summary_prints_a_table():
    with torch.device("meta"):
        result = sb.summary(sb.bayesianize(models.LeNet(), sb.Rank1(components=4), exclude="conv1"))
    lines = str(result).splitlines()
    assert lines[0].split() == ["layer", "type", "method", "before", "after"]
    assert any("conv1" in line and "left alone: excluded" in line for line in lines)
    assert any("Linear" in line and "Rank1" in line and "2,097,664" in line for line in lines)
    assert f"{result.parameters:,} parameters" in lines[-1]
    assert "2,202,660 before" in lines[-1]
