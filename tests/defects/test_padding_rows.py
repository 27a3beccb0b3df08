"""What a table keeps for padding is never random: it pays no KL and has no gradient from it, and a KL is of now."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slimbayes as sb

METHODS = {
    "meanfield": sb.MeanField.paper(),
    "capped": sb.MeanField.paper(stddev_max=1.0),
    "tied mean": sb.MeanField.paper(tied_mean=True),
    "monte carlo": sb.MeanField.paper(prior=sb.Cauchy(0.0, 1.0)),
    "ktied": sb.KTied.paper(),
    "emp": sb.EMP.paper(components=3, prior_precision=1.0),
    "ecmp": sb.ECMP.paper(components=3, prior_precision=1.0),
}
PAD = 1


class Words(nn.Module):
    """Words to classes; ``bag``: torch adds the words up."""

    def __init__(self, bag: bool, padding: int | None = PAD) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(5, 4, padding_idx=padding)
        self.out = nn.Linear(4, 2)

    def forward(self, words):
        y = self.table(words)
        return self.out(y if y.dim() == 2 else y.mean(1))


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the table that has a row for each word."""
    return [p for p in model.table.parameters() if p.dim() > 1 and p.shape[-2] == 5]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_the_padding_row_pays_no_kl(name, bag, fast):
    torch.manual_seed(0)
    model = sb.bayesianize(Words(bag), METHODS[name], include="^table$")
    words, targets = torch.tensor([[0, 1, 2], [3, 1, 4]]), torch.tensor([0, 1])
    tables = tables_of(model)
    assert tables
    with torch.no_grad():
        for table in tables:
            table[..., PAD, :] += 1.0  # away from where a prior would have no pull
    with sb.fast_paths(fast):
        result = sb.elbo(sb.draw(model, words, samples=2), targets, model, num_data=2)
        result.loss.backward()
        for table in tables:
            assert table.grad[..., PAD, :].abs().max() == 0, "a step moves the row"
            assert table.grad.abs().max() > 0
        torch.manual_seed(1)
        before = sb.kl(model)
        with torch.no_grad():
            for table in tables:
                table[..., PAD, :] = 30.0 if name != "ktied" else 3.0
        torch.manual_seed(1)
        torch.testing.assert_close(sb.kl(model), before)
        if name != "monte carlo":
            torch.testing.assert_close(result.kl, before)


@pytest.mark.parametrize("name", ["meanfield", "ktied"])
def test_the_kl_is_that_of_a_table_without_the_row(name):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Embedding(5, 4, padding_idx=4)), METHODS[name], include="0")
    short = sb.bayesianize(nn.Sequential(nn.Embedding(4, 4)), METHODS[name], include="0")
    saved = {k: v[:4] if v.shape[0] == 5 else v for k, v in model.state_dict().items()}
    if name == "ktied":
        saved["0.bayes.weight.log_v"] = model[0].bayes.weight.log_v.detach()
    short.load_state_dict(saved)
    torch.testing.assert_close(sb.kl(model), sb.kl(short))
    assert sb.kl(model) != sb.kl(
        sb.bayesianize(nn.Sequential(nn.Embedding(5, 4)), METHODS[name], include="0")
    )


def test_a_row_that_another_layer_reads_is_random():
    """The output layer has the table too, and a logit for the padding word: its weights are random, and pay."""
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=PAD), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    sb.bayesianize(model, sb.MeanField.paper(), include=".")
    sb.kl(model).backward()
    assert model[0].bayes.weight.rho.grad[PAD].abs().min() > 0


def test_a_shared_prior_leaves_the_row_alone():
    """EMP's prior is on every parameter, also on a table that is not converted."""
    model = sb.bayesianize(Words(False), sb.EMP.paper(components=2, prior_precision=1.0), include="out")
    with torch.no_grad():
        model.table.weight[PAD] = 3.0
    sb.kl(model).backward()
    assert model.table.weight.grad[PAD].abs().max() == 0
    assert model.table.weight.grad[0].abs().max() > 0


@pytest.mark.parametrize(
    "method",
    [
        sb.MeanField.paper(),
        sb.KTied.paper(),
        sb.Rank1.paper(),
        sb.EMP.paper(components=2, prior_precision=1.0),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_a_kl_is_of_the_parameters_as_they_are(method, fast):
    """Written to through .data, which no counter sees, after a draw that left its KL."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), method, include=".")
    x, targets = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    with sb.fast_paths(fast):
        sb.draw(model, x)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        after = sb.kl(model)
        torch.testing.assert_close(after, sb.kl(model))
        torch.testing.assert_close(after, sb.elbo(sb.draw(model, x), targets, model, num_data=9).kl)
