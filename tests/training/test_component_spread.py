"""How far rank-1 components are apart while they train: in every row of history, with one warning of a collapse."""

import warnings

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.objective import tempered_kl
from slimbayes.training import Training, predicted_spread
from slimbayes.training.monitor import spread_of, warn_of_collapse

DATA = (torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)


def fitted(method, callback=None, **options):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(3, 2), method)
    options = {
        "epochs": 4,
        "batch_size": 16,
        "log_every": 4,
        "progress": False,
        "callback": callback,
        **options,
    }
    return model, sb.fit(model, DATA, **options)


def test_every_row_has_the_spread_of_that_step():
    seen = []
    model, result = fitted(
        sb.Rank1.paper(components=3), lambda step, row: seen.append(row["component_spread"])
    )
    assert seen == [row["component_spread"] for row in result.history] and len(set(seen)) == 4
    spreads = sb.analysis.component_spread(model)[""]
    assert seen[-1] == pytest.approx((spreads["r"] + spreads["s"]) / 2)


@pytest.mark.parametrize("method", [sb.Deterministic(), sb.MeanField.paper(), sb.Rank1.paper(components=1)])
def test_networks_without_components_have_none(method):
    assert all("component_spread" not in row for row in fitted(method)[1].history)


def test_a_collapse_is_said_once():
    models = []

    def collapse(step, row):
        if step >= 8:  # seen from the next row on
            with torch.no_grad():
                for factor in (models[0].bayes.r, models[0].bayes.s):
                    factor.loc.copy_(factor.loc.mean(0, keepdim=True).expand_as(factor.loc))

    torch.manual_seed(0)
    models.append(sb.bayesianize(nn.Linear(3, 2), sb.Rank1.paper(components=3)))
    with pytest.warns(
        UserWarning, match=r"have become one: by step 12 their spread has fallen from 0\.\d+ to"
    ) as said:
        sb.fit(
            models[0], DATA, epochs=5, batch_size=16, log_every=4, lr=1e-6, progress=False, callback=collapse
        )
    assert sum("have become one" in str(each.message) for each in said) == 1
    assert "kl_annealing=0.8" in str(said[0].message) and "kl_reduction='mean'" in str(said[0].message)


@pytest.mark.parametrize(
    ("spreads", "warned"),
    [
        ([0.5, 0.4, 0.009], True),
        ([0.5, 0.009, 0.008], False),  # said before
        ([0.5, 0.4, 0.02], False),
        ([0.0, 0.0], False),  # never apart: as asked for
        ([0.005], False),
        ([], False),
    ],
)
def test_when_it_is_said(spreads, warned):
    rows = [{"step": 1.0}, *({"step": 2.0 + i, "component_spread": s} for i, s in enumerate(spreads))]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_collapse(rows, {}, sb.bayesianize(nn.Linear(3, 2), sb.Rank1(random_sign_init=1.0)))
    assert bool(said) == warned


def test_components_that_are_apart_in_one_factor_are_not_one():
    model = sb.bayesianize(nn.Sequential(nn.Linear(300, 4), nn.Linear(4, 4)), sb.Rank1(components=3))
    rows = [{"step": 1.0, "component_spread": spread} for spread in (0.5, 0.009)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_collapse(rows, {}, model)
    with torch.no_grad():
        model[0].bayes.s.loc.fill_(1.0)
    with pytest.warns(UserWarning, match="have become one"):
        warn_of_collapse(rows, {}, model)


def test_a_collapse_before_the_first_row():
    """A prior so narrow that all components are at 1 when the run is first looked at."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1.paper(components=3, prior=sb.Normal(1.0, 1e-3)))
    data = tuple(part.repeat(4, *[1] * (part.dim() - 1)) for part in DATA)
    with pytest.warns(UserWarning, match=r"have become one: by step 256 .* from 0\.[1-9]") as said:
        result = sb.fit(
            model, data, epochs=1, batch_size=1, log_every=256, lr=0.05, kl_annealing=0.0, progress=False
        )
    assert len(result.history) == 1
    assert said[0].filename == __file__, "where fit was called"


# What the KL alone does to components, against SGD on the KL alone.
FAST = {"factor_lr_multiplier": 20.0}
PULLED = {
    "summed": (sb.Rank1.paper(components=3, random_sign_init=-0.5), {}),
    "averaged": (sb.Rank1.paper(components=3, kl_reduction="mean"), {"kl_start": 0.4, "factor_lr_multiplier": 5.0}),
    "log-normal": (sb.Rank1.paper(components=3, posterior="lognormal", random_sign_init=-0.3), {"kl_annealing": 0.4}),
    "cauchy": (sb.Rank1.paper(components=3, posterior="cauchy", prior=sb.Cauchy(1.0, 0.3)), FAST),
    "wide": (sb.Rank1.paper(components=3, prior=sb.Normal(1.0, 0.5)), {"kl_annealing": 0.0, **FAST}),
    "colder": (sb.Rank1.paper(components=3, temperature=0.2), {"factor_lr_multiplier": 5.0}),
    "one a point": (sb.Rank1.paper(components=3, random="output"), {}),
    "points": (sb.BatchEnsemble(components=3), {}),
    "additive, by steps": (sb.Rank1.paper(components=3, perturbation="additive", prior=sb.Normal(0.0, 0.2)),
                           {"epochs": 1, "steps": 400, "factor_lr_multiplier": 4.0}),
    "a larger KL": (sb.Rank1.paper(components=3, kl_reduction="mean"), {"kl_weight": 4.0, "kl_coefficient": 5e-3}),
}  # fmt: skip


@pytest.mark.parametrize("case", PULLED)
def test_spread_by_the_kl_alone_is_that_of_sgd_without_a_likelihood(case):
    method, options = PULLED[case]
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(6, 40), method)
    for factor in (model.bayes.r, model.bayes.s):
        factor.spread.requires_grad_(False)  # scales stay where they are
    training = Training(
        **{"epochs": 4, **options}, batch_size=7, optimizer="sgd", schedule="steps", lr=0.1, warmup=1.0
    )
    predicted = predicted_spread(model, training, num_data=20_000, per_epoch=100)
    optimizer, seen = training.make_optimizer(model), [spread_of(model)["component_spread"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(400):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * training.multiplier(step, 400, 100)
        optimizer.zero_grad()
        loss = training.kl_factor(step, 400) * tempered_kl(model) / 20_000
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        if step % 100 == 99:
            seen.append(spread_of(model)["component_spread"])
    assert predicted == pytest.approx(seen, rel=0.04)
    assert case == "points" or predicted[-1] < 0.97 * predicted[0]


def test_frozen_factors_stay_and_an_epoch_is_that_of_the_batches():
    model = sb.bayesianize(nn.Linear(6, 40), sb.Rank1.paper(components=3))
    sgd = Training(optimizer="sgd", lr=0.1, epochs=2, batch_size=10)
    own = predicted_spread(model, sgd, num_data=1000)
    assert own == predicted_spread(model, sgd, num_data=1000, per_epoch=100) and own[-1] < own[0]
    assert own[-1] < predicted_spread(model, sgd, num_data=1000, per_epoch=10)[-1]
    for factor in (model.bayes.r, model.bayes.s):
        factor.loc.requires_grad_(False)
    assert len(set(predicted_spread(model, sgd, num_data=1000))) == 1


def test_spread_is_not_predicted_where_it_cannot_be():
    model, sgd = sb.bayesianize(nn.Linear(2, 3), sb.Rank1.paper()), Training(optimizer="sgd", epochs=1)
    with pytest.raises(ValueError, match="optimizer='sgd', not for 'adamw'"):
        predicted_spread(model, Training(), 100)
    with pytest.raises(ValueError, match="momentum=1"):
        predicted_spread(model, Training(optimizer="sgd", momentum=1.0), 100)
    for wrong in (0, None, 2.5):
        with pytest.raises(ValueError, match="num_data"):
            predicted_spread(model, sgd, wrong)
    with pytest.raises(ValueError, match="per_epoch"):
        predicted_spread(model, sgd, 100, 0)
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        predicted_spread(sb.bayesianize(nn.Linear(2, 3), sb.Rank1.paper()), sgd, 100)
    for method in (sb.Rank1.paper(components=1), sb.MeanField.paper()):
        with pytest.raises(ValueError, match="no rank-1 factors of several components"):
            predicted_spread(sb.bayesianize(nn.Linear(2, 3), method), sgd, 100)
    other = sb.bayesianize(nn.Linear(2, 3), sb.Rank1.paper(prior=sb.Cauchy(1.0, 0.1), dropout_rate=0.0099))
    with pytest.raises(ValueError, match="Normal to a Cauchy prior"):
        predicted_spread(other, sgd, 100)


@pytest.mark.parametrize("posterior", ["normal", "cauchy", "lognormal", "halfcauchy", "delta"])
def test_scale_of_factors(posterior):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found = sb.analysis.factor_scale(
        sb.bayesianize(net, sb.Rank1.paper(posterior=posterior, dropout_rate=0.5))
    )
    if posterior == "delta":
        assert found == {}
    else:  # p = 1/2 is a scale of 1; that of Normals starts around it
        assert {name: set(values) for name, values in found.items()} == {"0": {"r", "s"}, "1": {"r", "s"}}
        assert all(abs(v - 1) < 0.1 for values in found.values() for v in values.values())


def test_scale_of_one_random_factor():
    found = sb.analysis.factor_scale(sb.bayesianize(nn.Linear(3, 4), sb.Rank1.paper(random="input")))
    assert list(found[""]) == ["s"]
    assert sb.analysis.factor_scale(sb.bayesianize(nn.Linear(2, 2), sb.MeanField.paper())) == {}
