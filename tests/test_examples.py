"""The examples run, in fewer steps than they take by default, and what they return makes sense."""

import copy
import doctest
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from helpers_matrix import CASES, check_identity
from torch import nn

import slimbayes as sb
from slimbayes.core import paths
from slimbayes.core.layers.table import WEIGHTED
from slimbayes.core.methods import METHODS
from slimbayes.core.methods.rank1 import FAMILIES
from slimbayes.core.priors import PRIORS

pytestmark = pytest.mark.uncounted

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = (
    "classification", "decisions", "export", "fit", "hf_trainer", "hub", "lightning_module", "mixed_rules", "own_data",
    "regression", "reproduce_table", "sequences", "sklearn_pipeline", "transformer",
)  # fmt: skip
OWN = ("own_fast_path", "own_layer", "own_method", "own_posterior")


def example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, *OWN, "minilm"}
    for name in SHORT:
        lines = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line.strip()]
        most = 30 if name in ("hf_trainer", "hub", "lightning_module") else 40
        assert len(lines) <= most, f"{name}.py has {len(lines)} lines"


def test_classification(capsys):
    result = example("classification").main(steps=200)
    assert result["accuracy"] > 0.95
    assert result["far"] > 4 * result["near"] > 0
    assert f"accuracy {result['accuracy']:.3f}" in capsys.readouterr().out


def test_decisions(capsys):
    pytest.importorskip("sklearn")
    result = example("decisions").main(steps=150)
    assert result["after"] < 0.9 * result["before"]
    assert 0.92 < result["covered"] < 0.99
    assert result["risk"] < 0.05 and 0 < result["cost"] < 0.3
    assert capsys.readouterr().out.startswith("Nothing looks wrong.")


def test_regression(capsys):
    result = example("regression").main(steps=400)
    assert 0.87 < result["coverage"] < 0.97
    assert 0.29 < result["noise"] < 0.36  # the truth is 0.3
    assert result["outside"] > 5 * result["inside"]
    assert f"{100 * result['coverage']:.1f} % of new points" in capsys.readouterr().out


def test_sequences(capsys):
    result = example("sequences").main(steps=150)
    assert result["accuracy"] > 0.9
    assert result["close"] > 2 * result["clear"]
    assert f"accuracy {result['accuracy']:.3f}" in capsys.readouterr().out


def test_transformer(capsys):
    pytest.importorskip("transformers")
    result = example("transformer").main(steps=40)
    assert result["accuracy"] > 0.95
    assert result["draws"] == 16
    # 14 Linear layers: 2K(d_in + d_out) for the factors and K − 1 more biases each
    sides = [(32, 32)] * 9 + [(32, 64), (64, 32)] * 2 + [(32, 2)]
    extra = sum(8 * (m + n) + 3 * n for m, n in sides)
    assert f"{extra:,} more parameters" in capsys.readouterr().out


def test_export(capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = example("export").main(steps=60)
    assert result["difference"] < 1e-5 and result["accuracy"] > 0.9
    assert result["between"] > 4 * result["clear"] > 0
    assert "8 draws" in capsys.readouterr().out


def test_mixed_rules(capsys):
    pytest.importorskip("sklearn")
    result = example("mixed_rules").main(steps=60)
    assert result["accuracy"] > 0.8
    assert result["draws"] == 4 * 8
    base = 160 + 32 + 4640 + 64 + 2890
    rank1 = 8 * (1 + 16) + 3 * 16 + 8 * (16 + 32) + 3 * 32
    emp, ktied = 3 * (32 + 64), 2 * (288 + 10)
    assert result["overhead"] == pytest.approx((rank1 + emp + ktied) / base)
    printed = capsys.readouterr().out
    assert all(method in printed for method in ("Rank1", "EMP", "KTied"))


def test_fit(capsys):
    found = example("fit").main(epochs=5)
    assert set(found) == {"clean", "rotation 3", "noise 3", "blur 3", "contrast 3", "occlusion 3"}
    assert found["clean"] < 0.3 and found["rotation 3"] > 3 * found["clean"]
    assert "100 steps" in capsys.readouterr().out


def test_own_data(capsys):
    table = example("own_data").main(epochs=40)
    assert capsys.readouterr().out.startswith("row,mean,lower,upper,std,aleatoric_std,epistemic_std\n0,")
    seen, unseen = zip(table["mean"], table["lower"], table["upper"], table["epistemic_std"], strict=True)
    assert seen[1] < 1.5 < seen[2] and abs(seen[0] - 1.5) < 0.5  # 1.0² + 0.5
    assert unseen[3] > 4 * seen[3]


def test_reproduce_table(capsys):
    found = example("reproduce_table").main()
    assert found["ktied/table1, 2-tied, parameters"] == 784 * 400 + 2 * (784 + 400)
    # the same network, before and after the truncation: the spreads differ, and with them the KL
    whole, tied = (found[f"ktied/table2, {label}, neg_elbo"] for label in ("Mean-field", "1-tied"))
    assert whole != tied and whole == pytest.approx(tied, rel=0.05)
    printed = capsys.readouterr().out
    assert "| 2-tied | 315,968 | 315,968 |" in printed and "| 0.431 ± 0.0057 |" in printed
    assert "trained on digits, not on mnist" in printed


def test_sklearn_pipeline(capsys):
    pytest.importorskip("sklearn")
    found = example("sklearn_pipeline").main(epochs=25)
    assert found["R2"] > 0.2 and 0.85 < found["coverage"] < 1.0 and found["changed"] == 0
    assert f"R² {found['R2']:.2f}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:::lightning")
def test_lightning_module(capsys):
    pytest.importorskip("lightning")
    result = example("lightning_module").main(epochs=5)
    assert result["test_accuracy"] > 0.9 and result["draws"] == 32
    assert f"'test_nll': {result['test_nll']:.3f}" in capsys.readouterr().out


def test_hf_trainer():
    pytest.importorskip("accelerate")
    result = example("hf_trainer").main(epochs=2)
    assert result["eval_accuracy"] > 0.9 and result["eval_loss"] < 0.4


def test_hub(tmp_path, capsys):
    pytest.importorskip("huggingface_hub")
    assert example("hub").main(tmp_path) == {"gap": 0.0, "width": 32, "files": 3}
    assert "Classifier.from_pretrained" in capsys.readouterr().out


@pytest.fixture(scope="module")
def registries():
    """What examples add to the tables of slimbayes is theirs alone."""
    tables = METHODS, FAMILIES, PRIORS, WEIGHTED
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def own_method(registries):
    return example("own_method")


@pytest.fixture
def own_posterior(registries):
    return example("own_posterior")


@pytest.fixture
def own_layer(registries):
    return example("own_layer")


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


def through_every_verb(make, method, x, path):
    """What holds of every model, whatever is new in it: one seed is one draw, and no verb asks what it is made of."""
    torch.manual_seed(0)
    model = sb.bayesianize(make(), method)
    draws = sb.draw(model, x, samples=8, seed=0)
    targets, ask = torch.randn_like(draws[0]).detach(), {"samples": 4, "seed": 0, "likelihood": sb.Gaussian()}
    assert draws.std(0).max() > 0 or isinstance(method, sb.EMP)  # whose versions start as copies
    sb.elbo(sb.draw(model, x), targets, model, num_data=64, likelihood=sb.Gaussian()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    whole = sb.predict(model, x, **ask).mean
    torch.testing.assert_close(sb.predict(model, x, chunk=len(x), **ask).mean, whole, atol=1e-6, rtol=0)
    with sb.fast_paths(False):
        torch.testing.assert_close(sb.predict(model, x, **ask).mean, whole, atol=1e-6, rtol=0)
    sb.save(model, path)
    assert torch.equal(sb.draw(sb.load(make(), path), x, samples=8, seed=0), draws)
    frozen = sb.freeze(model, draws=len(draws), seed=0)
    torch.testing.assert_close(
        frozen(x), sb.draw(model, x, samples=8, noise="shared", seed=0), atol=1e-5, rtol=0
    )
    assert (
        copy.deepcopy(model) is not model and sb.summary(model).rows and sb.parameter_groups(model, 0.1, 0.1)
    )
    sb.diagnose(model), sb.check_finite(model)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"kl_reduction": "monte_carlo"}, {"perturbation": "additive"}], ids=str
)
def test_own_posterior(own_posterior, options, tmp_path):
    result = own_posterior.main()
    assert result["ratio"] == pytest.approx(1.0, abs=0.03) and result["kl"] > 0
    method = sb.Rank1(components=2, posterior="student", **options)
    nets = [
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(8, 4)),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten()), torch.randn(8, 2, 4, 4)),
    ]
    for make, x in nets:
        through_every_verb(make, method, x, tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"unknown posterior 'students'; use one of .*'student'"):
        sb.Rank1(posterior="students")


def test_own_posterior_has_its_density(own_posterior):
    torch.manual_seed(0)
    t = own_posterior.Student(torch.tensor(0.3), torch.tensor(0.7))
    u = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
    wanted = torch.distributions.StudentT(4.0, 0.3, 0.7)
    x = t.from_noise(u)
    torch.testing.assert_close(t.log_prob(x), wanted.log_prob(x).double(), atol=1e-6, rtol=0)
    slopes = (x[1:] - x[:-1]) / (u[1:] - u[:-1])  # of a quantile function: one over the density
    torch.testing.assert_close(
        slopes[20:-20], 1 / t.log_prob((x[1:] + x[:-1]) / 2).exp()[20:-20], atol=0, rtol=1e-3
    )


@pytest.mark.parametrize("method", ["MeanField", "KTied", "EMP", "MCDropout", "DropConnect"])
def test_own_layer(own_layer, method, tmp_path):
    assert own_layer.main()["gap"] == 0.0
    made = {"EMP": sb.EMP(components=3, patch="output")}.get(method) or METHODS[method]()

    def make():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), own_layer.Gate(6, 2))

    model = through_every_verb(make, made, torch.randn(8, 4), tmp_path / "own.safetensors")
    assert type(model[2]) is own_layer.BayesGate


def test_own_layer_is_refused_by_name(own_layer):
    with pytest.raises(
        TypeError, match=r"Rank1 cannot convert layer '' of type Gate: .* linear in their input"
    ):
        sb.bayesianize(own_layer.Gate(3, 2), sb.Rank1())


def test_own_fast_path():
    own = example("own_fast_path")
    before = paths.ASKED.noise
    result = own.main()
    assert abs(result["mean"]) < 0.01 and result["square"] == 1.0 and 0.4 < result["other"] < 0.6
    assert before == paths.ASKED.noise
