"""``sb.diagnose``: every finding appears in a model made sick on purpose, and none in a healthy one."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.objective import tempered_kl
from slimbayes.verbs.diagnosis import behaviour, limits


def network(norm=False):
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 3))


METHODS = {
    "MeanField": sb.MeanField.paper(prior=sb.Normal(0.0, 0.5), stddev_init=0.03, stddev_max=0.4),
    "KTied": sb.KTied.paper(rank=1, prior=sb.Normal(0.0, 0.5), stddev_init=0.03),
    "Rank1": sb.Rank1.paper(
        components=3, prior=sb.Normal(1.0, 0.5), random_sign_init=0.5, kl_reduction="mean"
    ),
    "Cauchy": sb.Rank1.paper(components=3, posterior="cauchy", random_sign_init=0.5, kl_reduction="mean"),
    "BatchEnsemble": sb.BatchEnsemble(components=3, random_sign_init=0.5),
    "EMP": sb.EMP(components=3, init_noise=0.1, learn_mixing=True),
    "DeepEnsemble": sb.DeepEnsemble(members=2),
    "MCDropout": sb.MCDropout(rate=0.02),
    "Deterministic": sb.Deterministic(),
}


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    x = torch.randn(2000, 8)
    return x, (x[:, :3] + 0.3 * torch.randn(2000, 3)).argmax(1)


@pytest.fixture(scope="module")
def healthy(data):
    """Every method, trained on the first half of the data."""
    x, y = (each[:1000] for each in data)
    found = {}
    for name, method in METHODS.items():
        torch.manual_seed(1)
        model = sb.bayesianize(network(norm=True), method)
        groups = sb.parameter_groups(model, lr=2e-2, weight_decay=2e-3)
        optimizer = torch.optim.Adam(groups)
        for _ in range(60):
            draws = sb.draw(model, x, samples=2)
            loss = sb.elbo(draws, y, model, num_data=1000).loss
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
    found = sb.diagnose(
        healthy[name], x[:1000], y[:1000], validation=(x[1000:], y[1000:]), num_data=1000, history=history
    )
    assert found.ok and not found.findings, str(found)
    assert str(found).startswith("Nothing looks wrong. Looked at: parameters, spreads")
    assert found.looked_at[-5:] == (
        "annealing", "draws", "noise against signal", "KL against nll", "calibration"
    )  # fmt: skip
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
    factors = [factor for layer in (model[0], model[3]) for factor in (layer.bayes.r, layer.bayes.s)]
    for factor in factors[1:]:
        factor.loc[:] = factor.loc[0] + 1e-3 * torch.randn_like(factor.loc)
    assert sb.diagnose(model).ok  # apart in one factor, they are different networks
    factors[0].loc[:] = factors[0].loc[0] + 1e-3 * torch.randn_like(factors[0].loc)
    found = sb.diagnose(model).findings
    assert [(one.kind, one.layer) for one in found] == [("components-collapsed", name) for name in "0033"]
    assert found[0].value == pytest.approx(1e-3, rel=0.5) and "factor r" in found[0].what


def test_components_that_begin_apart_in_one_layer_are_not_collapsed():
    assert "components-collapsed" not in sb.diagnose(sb.bayesianize(network(), sb.Rank1())).kinds


@torch.no_grad()
def test_components_hidden_by_their_own_noise(sick):
    model = sick("Rank1")
    factors = [factor for layer in (model[0], model[3]) for factor in (layer.bayes.r, layer.bayes.s)]
    for factor in factors:
        factor.loc[:] = 1 + 0.02 * torch.randn_like(factor.loc)
    assert sb.diagnose(model).ok
    for factor in factors:
        factor.spread.rho.fill_(0.5)  # a scale of about 1
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


@pytest.mark.parametrize(
    "method",
    [*map(METHODS.get, ("MeanField", "KTied", "Rank1", "Cauchy")), sb.MeanField(), sb.KTied(), sb.Rank1()],
)
def test_sigma_at_its_start(method):
    torch.manual_seed(2)
    model = sb.bayesianize(nn.Linear(64, 40), method)
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
    """From the KL's half of the loss on, by hand; weighted, it may be many times as large."""
    x, y = data
    model = healthy["MeanField"]
    found = sb.diagnose(model, x, y, num_data=2)
    first = only(found, "kl-dominates")
    with torch.no_grad():
        share = tempered_kl(model).item()
        draws = sb.draw(model, x, samples=4, seed=0)
        nll = float(sb.Categorical().mean_nll(draws, y))
    assert f"{share / 2:.3g} nats" in first.what and first.value == pytest.approx(share / 2 / nll, rel=1e-4)
    even = share / nll
    assert "kl-dominates" in sb.diagnose(model, x, y, num_data=int(0.9 * even)).kinds
    assert sb.diagnose(model, x, y, num_data=int(1.1 * even)).ok
    light = sb.diagnose(model, x, y, num_data=2, annealing=lambda step: 1e-4, step=1)
    assert light.ok
    with pytest.raises(ValueError, match="num_data=0"):
        sb.diagnose(model, x, y, num_data=0)


def test_the_share_of_the_kl_is_that_of_the_loss(healthy, data, monkeypatch):
    """As elbo gives it, tempered where the method says so, and not as sb.kl does."""
    x, y = data
    honest = behaviour.elbo

    def tempered(*arguments):
        found = honest(*arguments)
        return dataclasses.replace(found, kl=0.01 * found.kl)

    assert "kl-dominates" in sb.diagnose(healthy["MeanField"], x, y, num_data=50).kinds
    monkeypatch.setattr(behaviour, "elbo", tempered)
    assert sb.diagnose(healthy["MeanField"], x, y, num_data=50).ok


def test_a_nearly_perfect_fit_is_not_dominated():
    """Beside an nll of 0.09 any KL is large, and does no harm; a density's nll goes through 0."""
    assert not list(behaviour.outweighed(0.09, 500.0, 1000, sb.Categorical()))
    assert not list(behaviour.outweighed(0.11, 100.0, 1000, sb.Categorical()))
    assert list(behaviour.outweighed(0.11, 120.0, 1000, sb.Categorical()))
    assert not list(behaviour.outweighed(-0.01, 900.0, 1000, sb.Gaussian()))
    assert list(behaviour.outweighed(-0.01, 1100.0, 1000, sb.Gaussian()))


@torch.no_grad()
def test_noise_that_drowns_the_signal(sick, data):
    x, y = data
    model = sick("MeanField")
    model[3].bayes.weight.maximum = None
    model[3].bayes.weight.rho.fill_(math.log(math.expm1(1.5)))
    first = only(sb.diagnose(model, x, y), "noise-drowns")
    silent = float(sb.Categorical().mean_nll(sb.draw(model, x, noise="mean"), y))
    assert f"without noise (noise='mean') it is {silent:.3g}" in first.what and first.value > 0.3
    assert sb.diagnose(sick("BatchEnsemble"), x, y).ok  # has none


def test_a_kl_that_was_never_used(healthy):
    model = healthy["MeanField"]
    first = only(sb.diagnose(model, history=[{"kl_weight": 0.0, "step": 70}] * 3), "kl-unused")
    assert "all 70 steps" in first.what
    late = sb.LinearAnnealing(1000, start=600)
    only(sb.diagnose(model, annealing=late, step=500), "kl-unused")
    assert sb.diagnose(healthy["BatchEnsemble"], history=[{"kl_weight": 0.0}] * 3).kinds == {
        "kl-tempered"
    }  # no KL


@pytest.mark.parametrize("how", ["no KL", "optimizer from before", "elbo"])
def test_own_loops_without_the_kl(data, how):
    """The plain loss on draws, or an optimizer made before the conversion, leave σ where it started."""
    x, y = (each[:1000] for each in data)
    torch.manual_seed(1)
    net = network()
    parameters = list(net.parameters())
    model = sb.bayesianize(net, sb.MeanField.paper(prior=sb.Normal(0.0, 0.3)))
    if how != "optimizer from before":
        parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=5e-3 if how == "no KL" else 3e-2)
    for _ in range(100):
        found = sb.elbo(sb.draw(model, x), y, model, num_data=1000)
        optimizer.zero_grad()
        (found.nll if how == "no KL" else found.loss).backward()
        optimizer.step()
    kinds = sb.diagnose(model, x, y, num_data=1000).kinds
    assert kinds == (set() if how == "elbo" else {"sigma-at-start", "kl-unused"})


class Confident(nn.Module):
    """Logits whose class is right with a probability of 0.8, whatever they say."""

    def __init__(self, logit):
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(logit))

    def forward(self, x):
        return torch.stack([self.logit * x, 0 * x], 1)


@pytest.mark.parametrize(
    ("confidence", "count", "kind"),
    [
        (0.9, 2000, "overconfident"),
        (0.68, 2000, "underconfident"),
        (0.82, 2000, None),
        (0.87, 60, None),  # 7 points off, which is chance in 60 examples
        (0.98, 60, "overconfident"),
    ],
)
def test_probabilities_that_cannot_be_believed(confidence, count, kind):
    model = sb.bayesianize(Confident(math.log(confidence / (1 - confidence))), sb.Deterministic())
    y = (torch.arange(count) % 5 == 0).long()  # a fifth is of the other class
    found = sb.diagnose(model, validation=(torch.ones(count), y))
    if kind is None:
        assert found.ok, str(found)
        return
    first = only(found, kind)
    assert (
        first.value == pytest.approx(abs(confidence - 0.8), abs=1e-4) and f"{count} validation" in first.what
    )
    assert ("above" if kind == "overconfident" else "below") + " accuracy" in first.what


@pytest.mark.parametrize("seed", range(20))
def test_calibrated_models_raise_no_alarm(seed):
    """Labels drawn from the stated probabilities themselves, in samples small and large."""
    generator = torch.Generator().manual_seed(seed)
    for count in (50, 400, 3000):
        logits = 1.5 * torch.randn(count, 4, generator=generator)
        y = torch.distributions.Categorical(logits=logits)
        y = torch.multinomial(y.probs, 1, generator=generator)[:, 0]
        model = sb.bayesianize(nn.Identity(), sb.Deterministic())
        assert sb.diagnose(model, validation=[(logits, y)]).ok
        spread = torch.randn(count, generator=generator)
        real = sb.diagnose(
            model, validation=(torch.zeros(count, 1), spread[:, None]), likelihood=sb.Gaussian(precision=1.0)
        )
        assert real.ok, str(real)


@pytest.mark.parametrize(("scale", "kind"), [(2.0, "overconfident"), (0.4, "underconfident"), (1.05, None)])
def test_intervals_that_do_not_hold(scale, kind):
    """Of Normal targets ``scale`` times as wide as the intervals say: 59 % and 100 % lie inside."""
    count = 999
    y = scale * torch.special.ndtri((torch.arange(count) + 0.5) / count)[:, None]
    model = sb.bayesianize(nn.Identity(), sb.Deterministic())
    validation = (torch.zeros(count, 1), y)
    found = sb.diagnose(model, validation=validation, likelihood=sb.Gaussian(precision=1.0))
    if kind is None:
        assert found.ok
        return
    assert "of 999 validation targets" in only(found, kind).what
    assert found.findings[0].value == pytest.approx(math.erf(1.645 / scale / math.sqrt(2)), abs=2e-3)


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
    found = sb.diagnose(sb.bayesianize(net, sb.MeanField.paper()))
    assert found.kinds == {"sigma-at-start"} and len(found) == len(list(found)) > 4
    assert f"and {len(found) - 4} more layers alike" in str(found)
    with pytest.raises(ValueError, match="has not been converted"):
        sb.diagnose(nn.Linear(2, 2))
