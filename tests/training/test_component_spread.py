"""How far rank-1 components are apart while they train: in every row of history, with one warning of a collapse."""

import warnings

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.training.monitor import warn_of_collapse

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
    model, result = fitted(sb.Rank1(components=3), lambda step, row: seen.append(row["component_spread"]))
    assert seen == [row["component_spread"] for row in result.history] and len(set(seen)) == 4
    spreads = sb.analysis.component_spread(model)[""]
    assert seen[-1] == pytest.approx((spreads["r"] + spreads["s"]) / 2)


@pytest.mark.parametrize("method", [sb.Deterministic(), sb.MeanField(), sb.Rank1(components=1)])
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
    models.append(sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=3)))
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
        warn_of_collapse(rows, {})
    assert bool(said) == warned


def test_a_collapse_before_the_first_row():
    """A prior so narrow that all components are at 1 when the run is first looked at."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=3, prior=sb.Normal(1.0, 1e-3)))
    data = tuple(part.repeat(4, *[1] * (part.dim() - 1)) for part in DATA)
    with pytest.warns(UserWarning, match=r"have become one: by step 256 .* from 0\.[1-9]") as said:
        result = sb.fit(
            model, data, epochs=1, batch_size=1, log_every=256, lr=0.05, kl_annealing=0.0, progress=False
        )
    assert len(result.history) == 1
    assert said[0].filename == __file__, "where fit was called"
