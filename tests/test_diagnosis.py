"""``sb.diagnose``: every finding appears in a model made sick on purpose, and none in a healthy one."""

import copy
import math

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.objective import tempered_kl
from slimbayes.verbs.diagnosis import limits


def network(norm=False):
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 3))


METHODS = {
    "MeanField": sb.MeanField(prior=sb.Normal(0.0, 0.5), stddev_init=0.03, stddev_max=0.4),
    "KTied": sb.KTied(rank=1, prior=sb.Normal(0.0, 0.5), stddev_init=0.03),
    "Rank1": sb.Rank1(components=3, prior=sb.Normal(1.0, 0.5), random_sign_init=0.5, kl_reduction="mean"),
    "Cauchy": sb.Rank1(components=3, posterior="cauchy", random_sign_init=0.5, kl_reduction="mean"),
    "BatchEnsemble": sb.BatchEnsemble(components=3, random_sign_init=0.5),
    "EMP": sb.EMP(components=3, init_noise=0.1, learn_mixing=True),
    "DeepEnsemble": sb.DeepEnsemble(members=2),
    "MCDropout": sb.MCDropout(),
    "Deterministic": sb.Deterministic(),
}


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    return x, (x[:, :3] + 0.3 * torch.randn(400, 3)).argmax(1)


@pytest.fixture(scope="module")
def healthy(data):
    """Every method, trained."""
    x, y = data
    found = {}
    for name, method in METHODS.items():
        torch.manual_seed(1)
        model = sb.bayesianize(network(norm=True), method)
        groups = sb.parameter_groups(model, lr=2e-2, weight_decay=0.0)
        optimizer = torch.optim.Adam(groups)
        for _ in range(60):
            draws = sb.draw(model, x[:200], samples=2)
            loss = sb.elbo(draws, y[:200], model, num_data=400).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found[name] = model.eval()
    return found


@pytest.fixture
def sick(healthy):
    """A copy of a healthy model."""
    return lambda name: copy.deepcopy(healthy[name])


@pytest.mark.parametrize("name", METHODS)
def test_healthy_models_have_no_findings(healthy, data, name):
    x, y = data
    before = copy.deepcopy(healthy[name].state_dict())
    history = [{"kl_weight": 0.5}, {"kl_weight": 1.0}]
    found = sb.diagnose(healthy[name], x, y, num_data=400, history=history)
    assert found.ok and not found.findings, str(found)
    assert str(found).startswith("Nothing looks wrong. Looked at: parameters, spreads")
    assert found.looked_at[-3:] == ("annealing", "draws", "KL against nll")
    for key, value in healthy[name].state_dict().items():
        assert torch.equal(value, before[key])


def only(found, kind, layer=None, severity="warning"):
    """The findings are all of this kind; the first one."""
    assert found.kinds == {kind}, str(found)
    assert layer is None or [f.layer for f in found] == (layer if isinstance(layer, list) else [layer])
    first = found.findings[0]
    assert first.severity == severity and found.ok is (severity == "notice")
    assert first.what in str(first) and kind in str(found) and first.remedy.split()[0] in str(found)
    return first


@torch.no_grad()
def test_not_finite(sick, data):
    model = sick("MeanField")
    model[0].weight[2, 3] = math.nan
    found = sb.diagnose(model)
    assert only(found, "not-finite", "0.weight", "error").value == 1
    assert {"not-finite", "outputs-not-finite"} == sb.diagnose(model, data[0]).kinds


@torch.no_grad()
@pytest.mark.parametrize("name", ["Rank1", "Cauchy", "BatchEnsemble"])
def test_collapsed_components(sick, name):
    model = sick(name)
    model[0].bayes.r.loc[:] = model[0].bayes.r.loc[0] + 1e-3 * torch.randn(3, 16)
    first = only(sb.diagnose(model), "components-collapsed", "0")
    assert first.value == pytest.approx(1e-3, rel=0.5) and "factor r" in first.what


@torch.no_grad()
def test_components_hidden_by_their_own_noise(sick):
    model = sick("Rank1")
    spread = model[0].bayes.s
    spread.loc[:] = 1 + 0.02 * torch.randn(3, 8)
    assert sb.diagnose(model).ok
    spread.spread.rho.fill_(0.5)  # a scale of about 1
    assert "components-collapsed" in sb.diagnose(model).kinds


@torch.no_grad()
def test_equal_patches_and_members(sick):
    model = sick("EMP")
    for tensor in (model[3].weight, model[3].bias):
        tensor[:] = tensor[0].clone()
    only(sb.diagnose(model), "components-collapsed", "3")
    fresh = sb.bayesianize(network(), sb.DeepEnsemble(members=3, reinitialize=False))
    assert "Re-initialise" in only(sb.diagnose(fresh), "components-collapsed").remedy


@torch.no_grad()
def test_mixing(sick):
    model = sick("EMP")
    model[3].bayes.mixing.logits[:] = torch.tensor([9.0, 0.0, 0.0])
    assert only(sb.diagnose(model), "mixing-collapsed", "3").value > 0.99


@torch.no_grad()
def test_sigma_at_its_cap(sick):
    model = sick("MeanField")
    model[0].bayes.weight.rho[:6] = 1.0
    assert only(sb.diagnose(model), "sigma-at-cap", "0").value == pytest.approx(6 / 16, abs=0.05)
    model = sick("Cauchy")
    model[0].bayes.r.spread.rho.fill_(3.0)
    found = sb.diagnose(model)
    assert "clip=10" in next(f.what for f in found if f.kind == "sigma-at-cap")


@pytest.mark.parametrize("name", ["MeanField", "KTied", "Rank1", "Cauchy"])
def test_sigma_at_its_start(name):
    torch.manual_seed(2)
    model = sb.bayesianize(nn.Linear(64, 40), METHODS[name])
    assert "sigma-at-start" in sb.diagnose(model).kinds
    with torch.no_grad():
        for parameter in model.bayes.parameters():
            if parameter is not getattr(getattr(model.bayes, "r", None), "loc", None):
                parameter.add_(0.3 * torch.randn_like(parameter))
    assert "sigma-at-start" not in sb.diagnose(model).kinds


@torch.no_grad()
def test_sigma_without_meaning(sick):
    model = sick("MeanField")
    model[3].bayes.weight.rho.fill_(-12.0)
    assert only(sb.diagnose(model), "sigma-negligible", "3").value < limits.NEGLIGIBLE
    model = sick("KTied")
    model[3].bayes.weight.log_u.add_(5.0)
    assert only(sb.diagnose(model), "sigma-dominates", "3").value > limits.DOMINANT


@torch.no_grad()
def test_factors_far_off(sick):
    for name in ("Rank1", "BatchEnsemble"):
        model = sick(name)
        model[3].bayes.s.loc.mul_(30.0)
        assert "beyond ±10" in only(sb.diagnose(model), "factors-exploded", "3", "error").what
        model[3].bayes.s.loc.mul_(7 / 30 / model[3].bayes.s.loc.abs().mean() * 30)
        assert "factors-exploded" in sb.diagnose(model).kinds
    model = sick("BatchEnsemble")
    model[0].bayes.r.loc.mul_(0.02)
    assert {"factors-vanished"} <= sb.diagnose(model).kinds
    log = sb.bayesianize(nn.Linear(8, 4), sb.Rank1(posterior="lognormal"))
    log.bayes.r.loc.fill_(3.0)  # e³ = 20
    assert "factors-exploded" in sb.diagnose(log).kinds


@torch.no_grad()
def test_posterior_equal_to_the_prior(sick):
    model = sick("MeanField")
    nn.init.zeros_(model[0].weight)
    model[0].bayes.weight.maximum = None
    model[0].bayes.weight.rho.fill_(math.log(math.expm1(0.5)))
    found = sb.diagnose(model)
    assert found.kinds == {"posterior-is-prior", "sigma-dominates"}
    assert next(f for f in found if f.kind == "posterior-is-prior").value < 1e-6
    model = sick("Rank1")
    nn.init.ones_(model[0].bayes.r.loc)
    model[0].bayes.r.spread.rho.fill_(math.log(math.expm1(0.5)))
    found = sb.diagnose(model)
    assert "factor r" in next(f.what for f in found if f.kind == "posterior-is-prior")
    tied = sb.bayesianize(nn.Linear(3, 2), sb.MeanField(prior=sb.Normal(0.0, 0.01), tied_mean=True))
    assert sb.diagnose(tied).ok  # σ is the prior's on purpose


def test_annealing(healthy):
    model = healthy["MeanField"]
    rows = [{"kl_weight": 0.2, "step": 1}, {"kl_weight": 0.4, "step": 2}]
    assert only(sb.diagnose(model, history=rows), "kl-annealing").value == 0.4
    schedule = sb.LinearAnnealing(100)
    only(sb.diagnose(model, annealing=schedule, step=50), "kl-annealing")
    assert sb.diagnose(model, annealing=schedule, step=100).ok
    assert sb.diagnose(model, annealing=lambda step: 0.1, step=5).ok
    only(sb.diagnose(model, history=[{"kl_weight": 0.1}] * 2), "kl-tempered", severity="notice")
    with pytest.raises(ValueError, match="annealing without step"):
        sb.diagnose(model, annealing=schedule)
    with pytest.raises(TypeError, match="history is int"):
        sb.diagnose(model, history=3)


@pytest.mark.parametrize("annealing", [0.5, 4.0])
def test_what_fit_returned(healthy, annealing):
    settings = sb.Training(kl_annealing=min(1.0, annealing), kl_coefficient=None if annealing < 1 else 1e-3)
    rows = [{"step": float(step), "kl_weight": settings.kl_factor(step, 400)} for step in (99, 199, 399)]
    result = sb.FitResult(rows, step=400, epoch=4, seconds=1.0)
    found = sb.diagnose(healthy["MeanField"], history=result)
    assert found.kinds == (set() if annealing < 1 else {"kl-annealing"})


def test_a_kl_that_outweighs_the_data(healthy, data):
    x, y = data
    first = only(sb.diagnose(healthy["MeanField"], x, y, num_data=2), "kl-dominates")
    with torch.no_grad():
        share = tempered_kl(healthy["MeanField"]).item() / 2
    assert f"{share:.3g} nats" in first.what
    light = sb.diagnose(healthy["MeanField"], x, y, num_data=2, annealing=lambda step: 1e-3, step=1)
    assert light.ok
    with pytest.raises(ValueError, match="num_data=0"):
        sb.diagnose(healthy["MeanField"], x, y, num_data=0)


@torch.no_grad()
def test_identical_draws(sick, data):
    model = sick("BatchEnsemble")
    for layer in (model[0], model[3]):
        for tensor in (layer.bayes.r.loc, layer.bayes.s.loc, layer.bias):
            tensor[:] = tensor[0].clone()
    found = sb.diagnose(model, data[0])
    assert found.kinds == {"components-collapsed", "draws-identical"}
    assert found.findings[0].kind == "draws-identical"  # errors first
    assert "draws-identical" not in sb.diagnose(model).kinds  # no inputs were given


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(20, 20))
        self.head = nn.Linear(20, 2)

    def forward(self, x):
        return self.head(x @ self.matrix)


def test_layers_left_alone():
    model = sb.bayesianize(Scaled(), sb.BatchEnsemble(components=2))
    first = only(sb.diagnose(model), "left-unconverted", "")
    assert "Scaled with" in first.what
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 2)), sb.BatchEnsemble(), include="1"
    )
    only(sb.diagnose(model), "left-unconverted", "", "notice")
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 2)), sb.BatchEnsemble(), exclude="0"
    )
    assert not sb.diagnose(model).findings  # excluded by name: on purpose


def test_batchnorm(sick):
    model = sick("BatchEnsemble")
    model[1].train()
    only(sb.diagnose(model), "batchnorm-in-training", "1")
    model = sick("EMP")
    model[1].train()
    only(sb.diagnose(model), "batchnorm-in-training", "1")
    fresh = sb.bayesianize(network(norm=True), METHODS["BatchEnsemble"]).eval()
    only(sb.diagnose(fresh), "batchnorm-unused", "1")


def test_other_layers_and_many_findings():
    """Kernels of recurrent layers, convolutions; findings of one kind are printed together."""
    torch.manual_seed(3)
    net = nn.ModuleDict({"lstm": nn.LSTM(8, 16, num_layers=3), "conv": nn.Conv1d(8, 8, 3)})
    found = sb.diagnose(sb.bayesianize(net, sb.MeanField()))
    assert found.kinds == {"sigma-at-start"} and len(found) == len(list(found)) > 4
    assert f"and {len(found) - 4} more layers alike" in str(found)
    with pytest.raises(ValueError, match="has not been converted"):
        sb.diagnose(nn.Linear(2, 2))
