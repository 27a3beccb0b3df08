"""The examples run, in fewer steps than they take by default, and what they return makes sense."""

import doctest
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers_matrix import CASES, check_identity
from torch import nn

import slimbayes as sb
from slimbayes.methods import METHODS

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ("classification", "mixed_rules", "regression", "transformer")


def example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, "quickstart", "own_method"}
    for name in SHORT:
        lines = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line.strip()]
        assert len(lines) <= 40, f"{name}.py has {len(lines)} lines"


def test_classification(capsys):
    result = example("classification").main(steps=200)
    assert result["accuracy"] > 0.95
    assert result["far"] > 4 * result["near"] > 0
    assert f"accuracy {result['accuracy']:.3f}" in capsys.readouterr().out


def test_regression(capsys):
    result = example("regression").main(steps=400)
    assert 0.87 < result["coverage"] < 0.97
    assert 0.29 < result["noise"] < 0.36  # the truth is 0.3
    assert result["outside"] > 5 * result["inside"]
    assert f"{100 * result['coverage']:.1f} % of new points" in capsys.readouterr().out


def test_transformer(capsys):
    pytest.importorskip("transformers")
    result = example("transformer").main(steps=40)
    assert result["accuracy"] > 0.95
    assert result["draws"] == 16
    # 14 Linear layers: 2K(d_in + d_out) for the factors and K − 1 more biases each
    sides = [(32, 32)] * 9 + [(32, 64), (64, 32)] * 2 + [(32, 2)]
    extra = sum(8 * (m + n) + 3 * n for m, n in sides)
    assert f"{extra:,} more parameters" in capsys.readouterr().out


def test_mixed_rules(capsys):
    pytest.importorskip("sklearn")
    result = example("mixed_rules").main(steps=60)
    assert result["accuracy"] > 0.8
    assert result["draws"] == 4 * 8
    base = 160 + 32 + 4640 + 64 + 2890
    rank1 = 8 * (1 + 16) + 3 * 16 + 8 * (16 + 32) + 3 * 32
    emp, ktied = 3 * (32 + 64), 2 * (288 + 10) + 10
    assert result["overhead"] == pytest.approx((rank1 + emp + ktied) / base)
    printed = capsys.readouterr().out
    assert all(method in printed for method in ("Rank1", "EMP", "KTied"))


@pytest.fixture(scope="module")
def quickstart():
    pytest.importorskip("sklearn")
    return example("quickstart")


def test_quickstart(quickstart, capsys):
    results = quickstart.main(epochs=3, seed=0)
    printed = capsys.readouterr().out
    assert list(results) == ["Deterministic", "Rank1", "KTied", "EMP"]
    base = 64 * 128 + 128 * 128 + 128 * 10 + 266 + 4 * 128
    assert {name: r["parameters"] - base for name, r in results.items()} == {
        "Deterministic": 0,
        "Rank1": 8 * (64 + 128 + 128 + 128 + 128 + 10) + 3 * 266,
        "KTied": 2 * (64 + 128 + 128 + 128 + 128 + 10) + 266,
        "EMP": 4 * (4 * 128 + 128 * 10 + 10),
    }
    for name, r in results.items():
        assert r["accuracy"] > 0.9 and r["nll"] < 1.0, name
        assert r["shifted_accuracy"] < r["accuracy"] and r["shifted_nll"] > r["nll"], name
        assert 0 < r["ece"] < 1 and 0 < r["shifted_ece"] < 1 and r["seconds"] > 0, name
        assert f"{name:14} epoch   3/3" in printed
        row = next(line for line in printed.splitlines() if line.startswith(name) and "%" in line)
        values = (r["nll"], 100 * r["accuracy"], r["ece"], r["shifted_nll"], 100 * r["shifted_accuracy"])
        assert [float(cell) for cell in row.split()[1:6]] == pytest.approx(values, abs=0.051)
        assert row.split()[-3:-1] == [f"{r['parameters']:,}", f"{100 * r['overhead']:+.1f}%"]


def test_quickstart_repeats_itself(quickstart, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "RECIPES", {"KTied": quickstart.RECIPES["KTied"]})
    first, second, other = (quickstart.main(epochs=1, seed=seed)["KTied"]["nll"] for seed in (1, 1, 2))
    assert first == second != other


def test_quickstart_data(quickstart):
    (x, y), (x_test, y_test), shifted = quickstart.digits()
    assert x.shape == (1200, 64) and x_test.shape == shifted.shape == (597, 64)
    assert x.min() >= 0 and x.max() == 1 and y.bincount().min() > 100 and len(y_test.unique()) == 10
    inner = (shifted > 0) & (shifted < 1) & (x_test > 0.3) & (x_test < 0.7)
    assert 0.22 < (shifted - x_test)[inner].std() < 0.27  # N(0, 0.3²), cut to [0, 1]
    # No training digit is in the test set, up to the few that scikit-learn holds twice.
    assert (torch.cdist(x_test, x).min(1).values == 0).float().mean() < 0.01


def test_quickstart_ece(quickstart):
    # Bins of fifteenths (not of twentieths): 0.94 and 0.99 share one, where half are right; 0.65 is alone.
    probabilities = torch.tensor([[0.94, 0.06], [0.01, 0.99], [0.35, 0.65]])
    targets = torch.tensor([0, 0, 1])
    expected = 2 / 3 * abs(0.5 - 0.965) + 1 / 3 * abs(1.0 - 0.65)
    assert quickstart.ece(probabilities, targets) == pytest.approx(expected, abs=1e-6)
    assert quickstart.ece(torch.eye(2), torch.tensor([0, 1])) == 0.0


def test_quickstart_without_rich(quickstart, monkeypatch, capsys):
    row = ["Rank1", "0.077", "98.2", "0.020", "0.414", "87.3", "0.047", "32,120", "+20.6%", "4.1"]
    quickstart.show([row])
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich", None)
    quickstart.show([row])
    without = capsys.readouterr().out
    for printed in (with_rich, without):
        assert max(map(len, printed.splitlines())) <= 80
        assert printed.splitlines()[1].split() == " ".join(quickstart.HEAD).split()
        assert printed.splitlines()[-1].split() == row
    assert without.isascii()


def test_quickstart_help(quickstart, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--epochs" in printed and "--seed" in printed


@pytest.fixture(scope="module")
def own_method():
    before = dict(METHODS)
    yield example("own_method")
    METHODS.clear()
    METHODS.update(before)


def test_own_method_has_the_right_moments(own_method):
    assert doctest.testmod(own_method) == (0, 1)
    result = own_method.main()
    assert result["ratio"] == pytest.approx(1.0, abs=0.02)
    assert result["mean_gap"] < 0.02


@pytest.mark.parametrize("kind", ["Linear", "Conv2d", "ConvTranspose1d", "Bilinear"])
def test_own_method_is_torchs_layer_without_noise(own_method, kind):
    for case in CASES[kind]:
        check_identity(case, own_method.GaussianDropout(), True, torch.float64, tolerance=(1e-12, 1e-12))


def test_own_method_follows_the_rules_of_draws(own_method, tmp_path):
    torch.manual_seed(0)
    method = own_method.GaussianDropout(alpha=0.5)

    def network():
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    model = sb.bayesianize(network(), method)
    x = torch.randn(1, 3).expand(6, 3)
    whole = sb.draw(model, x, samples=4, seed=1)
    piece = sb.draw(model, x[2:], samples=2, seed=1, first_example=2, first_sample=2)
    assert torch.allclose(whole[2:, 2:], piece, atol=1e-6)
    assert not torch.allclose(whole[:, 0], whole[:, 1])
    shared = sb.draw(model, x, samples=4, noise="shared")
    assert torch.allclose(shared[:, 0], shared[:, 1]) and not torch.allclose(shared[0], shared[1])
    assert sb.kl(model) == 0
    mixed = sb.bayesianize(network(), [("0", sb.Rank1(components=3)), ("2", method)])
    draws = sb.draw(mixed, x, samples=2)
    assert draws.shape == (6, 6, 2) and draws.isfinite().all()
    sb.save(model, tmp_path / "own.safetensors")
    again = sb.load(network(), tmp_path / "own.safetensors")
    assert torch.equal(sb.draw(again, x, seed=1), sb.draw(model, x, seed=1))


def test_own_method_refuses(own_method):
    with pytest.raises(ValueError, match="alpha must be positive"):
        own_method.GaussianDropout(alpha=-1.0)
    with pytest.raises(TypeError, match=r"GaussianDropout cannot convert layer '0' of type LayerNorm"):
        sb.bayesianize(nn.Sequential(nn.LayerNorm(3)), own_method.GaussianDropout(), include="0")
