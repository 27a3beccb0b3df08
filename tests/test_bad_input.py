"""What generated cases found: inputs and options that were taken without a word, or ended in somebody else's error."""

import json
import re

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes import decisions, metrics


class Masked(nn.Module):
    """Attention with a mask of padding."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, padding=None, table=None):
        return self.attention(x, x, x, key_padding_mask=padding, attn_mask=table)[0]


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def test_a_mask_of_other_rows_is_not_split_among_draws():
    """One example beside a mask of two rows is an error of the network's; two draws make two rows."""
    model = sb.bayesianize(Masked(), sb.BatchEnsemble(components=2))
    mask = torch.tensor([[False, True], [False, False]])
    with pytest.raises(sb.RowError, match=re.escape("input 1 of shape (2, 2) was not repeated")):
        sb.draw(model, torch.zeros(1, 2, 4), mask)
    with torch.no_grad(), pytest.raises(sb.RowError, match="split it among the 2 draws"):
        sb.draw(model.eval(), torch.zeros(1, 2, 4), mask)
    assert sb.draw(model, torch.zeros(2, 2, 4), mask).shape == (2, 2, 2, 4)


def test_a_table_for_all_rows_may_be_as_long_as_all_draws():
    """[batch·heads, L, S] serves every draw, and has as many rows as all of them: two heads, two draws."""
    model = sb.bayesianize(Masked(), sb.BatchEnsemble(components=2))
    x, table = torch.randn(3, 2, 4), torch.rand(6, 2, 2) < 0.3
    table[..., 0] = False
    draws = sb.draw(model, x, table=table)
    one = [sb.draw(model, x[i : i + 1], table=table[2 * i : 2 * i + 2])[:, 0] for i in range(3)]
    assert torch.allclose(draws, torch.stack(one, 1), atol=1e-6)


@pytest.mark.parametrize("method", [sb.Deterministic(), sb.DeepEnsemble(2, reinitialize=False)])
def test_one_sequence_without_a_batch_is_not_continued_from_draw_to_draw(method):
    """[T, ·] is a sequence to torch's layer: repeated for two samples it would be one of twice the length."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Recurrent()

        def forward(self, x):
            return self.inner(x)

    model = sb.bayesianize(Head(), method)
    with pytest.raises(sb.RowError, match="one sequence without a batch"):
        sb.draw(model, torch.randn(5, 3), samples=2)
    assert sb.draw(model, torch.randn(1, 5, 3), samples=2).shape[1:] == (1, 5, 4)


def test_rows_that_a_network_hands_over_one_by_one_are_no_single_sequence():
    class Looped(Recurrent):
        def forward(self, x):
            return torch.stack([self.rnn(row)[0] for row in x])

    model = sb.bayesianize(Looped(), sb.Deterministic())
    x = torch.randn(2, 4, 3)  # four rows in all, as many as steps
    assert torch.allclose(sb.draw(model, x, samples=2)[1], sb.draw(model, x)[0], atol=1e-6)


def test_an_error_of_the_network_says_what_it_was_handed():
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    with pytest.raises(RuntimeError) as caught:
        sb.draw(model, torch.zeros(4, 5), samples=2)
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "1 components x 2 samples of 4 examples" in said and "(4, 5) float32 as 8 rows" in said


def test_a_tensor_without_values_is_refused():
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    with pytest.raises(ValueError, match=r"input 0 of shape \(4, 3\) is on the meta device"):
        sb.draw(model, torch.zeros(4, 3, device="meta"))


@pytest.mark.parametrize("given", ["text", [[1.0, 2.0]], None])
def test_a_layer_says_that_it_takes_a_tensor(given):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, other):
            return self.layer(x) + self.layer(other)

    model = sb.bayesianize(Two(), sb.MeanField())
    with pytest.raises(TypeError, match=f"takes a tensor, got {type(given).__name__}"):
        sb.draw(model, torch.zeros(1, 2), given)
    pair = sb.bayesianize(nn.Bilinear(2, 2, 2), sb.MeanField())
    with pytest.raises(TypeError, match=f"takes two tensors, got {type(given).__name__}"):
        pair(torch.zeros(1, 2), given)


@pytest.mark.parametrize(
    "name, value",
    [
        ("first_example", -1),
        ("first_example", 2.5),
        ("first_sample", True),
        ("first_example", 2**40),
        ("noise", ["mean"]),
    ],
)
def test_places_of_a_draw_are_counts(name, value):
    model = sb.bayesianize(nn.Linear(2, 2), sb.EMP())
    with pytest.raises(ValueError, match=f"{name}|noise"):
        sb.draw(model, torch.zeros(1, 2), seed=0, **{name: value})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"likelihood": "gaussian"}, "likelihood must be one such as"),
        ({"likelihood": sb.Categorical}, "likelihood must be one such as"),
        ({"select": "logits"}, "select must be a function"),
        ({"keep_draws": "no"}, "keep_draws must be True or False"),
    ],
)
def test_arguments_of_predict_are_looked_at(options, words):
    model = sb.bayesianize(nn.Linear(2, 2), sb.Rank1())
    with pytest.raises((TypeError, ValueError), match=words):
        sb.predict(model, torch.zeros(1, 2), **options)


@pytest.mark.parametrize("num_data", ["many", True, float("nan"), [10]])
def test_the_number_of_data_is_a_number(num_data):
    model = sb.bayesianize(nn.Linear(2, 2), sb.Rank1())
    draws, targets = torch.zeros(1, 3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="num_data must be the number of training examples"):
        sb.elbo(draws, targets, model, num_data)
    with pytest.raises(ValueError, match="kl_weight must be a number"):
        sb.elbo(draws, targets, model, 10, kl_weight="half")
    with pytest.raises(TypeError, match="targets are a tensor, got list"):
        sb.elbo(draws, [0, 0, 0], model, 10)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: sb.Rank1(prior="normal"), "prior must be a prior such as"),
        (lambda: sb.Rank1(prior=sb.Normal), "prior must be a prior such as"),
        (lambda: sb.MeanField(prior=None), "prior must be a prior such as"),
        (lambda: sb.Rank1(train_base="no"), "train_base must be True or False, got 'no'"),
        (lambda: sb.MeanField(biases=0), "biases must be True or False"),
        (lambda: sb.EMP(own_statistics=1), "own_statistics must be True or False"),
        (lambda: sb.ECMP(learn_mixing="yes"), "learn_mixing must be True or False"),
        (lambda: sb.Rank1(clip="1"), "clip must be positive and finite, got '1'"),
        (lambda: sb.Rank1(clip=True), "clip must be positive and finite, got True"),
        (lambda: sb.KTied(stddev_init=None), "stddev_init must be positive and finite, got None"),
        (lambda: sb.Rank1(random_sign_init="a"), "random_sign_init must be"),
        (lambda: sb.Rank1(dropout_rate="a"), "dropout_rate must lie strictly between 0 and 1, got 'a'"),
        (lambda: sb.MCDropout(rate="0.1"), "rate must be at least 0 and below 1, got '0.1'"),
        (lambda: sb.DeepEnsemble(reinitialize="yes"), "reinitialize must be True, False or a function"),
        (lambda: sb.Normal("a", 1.0), "loc must be finite, got 'a'"),
        (lambda: sb.Cauchy(0.0, None), "scale must be positive and finite, got None"),
        (lambda: sb.Categorical(class_axis="a"), "class_axis='a': pass an integer"),
        (lambda: sb.Categorical(ignore_index=1.5), "ignore_index=1.5: pass an integer"),
        (lambda: sb.Bernoulli(temperature="1"), "temperature='1'"),
        (lambda: sb.Gaussian(precision=[1.0]), "precision=[1.0]"),
        (lambda: sb.LinearAnnealing("a"), "LinearAnnealing needs at least 1 step, got 'a'"),
        (lambda: sb.StepAnnealing(0.1, None), "StepAnnealing needs a positive coefficient"),
    ],
)
def test_options_of_other_types_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


@pytest.mark.parametrize(
    "selection, words",
    [
        ("(", "is no regular expression"),
        (["0", "["], "is no regular expression"),
        (int, "is no type of modules"),
        (3, "is not understood"),
        ([None], "is not understood"),
        (torch.float32, "is not understood"),
        (lambda name: True, "must be a function of (name, module)"),
    ],
)
def test_selections_that_select_nothing_ever(selection, words):
    for options in ({"include": selection}, {"exclude": selection}):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), sb.Rank1(), **options)


@pytest.mark.parametrize(
    "verb", [sb.kl, sb.summary, sb.merge, sb.unmerge, sb.freeze, lambda m: sb.draw(m, torch.zeros(1, 2))]
)
@pytest.mark.parametrize("thing", [None, "model", 3])
def test_what_is_no_network_is_said_to_be_none(verb, thing):
    with pytest.raises(TypeError, match=f"a converted torch.nn.Module is needed, got {type(thing).__name__}"):
        verb(thing)


def test_one_component_with_statistics_of_its_own_is_saved(tmp_path):
    """A single element may have any stride, of which no bytes can be seen."""
    model = sb.bayesianize(nn.BatchNorm1d(2), sb.EMP(components=1, patch="norm", own_statistics=True))
    sb.save(model, tmp_path / "model")
    assert sb.load(nn.BatchNorm1d(2), tmp_path / "model").num_batches_tracked.shape == (1,)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_a_cell_without_biases_is_frozen(cell):
    model = sb.bayesianize(nn.Sequential(cell(2, 3, bias=False)), sb.MeanField())
    x = torch.randn(4, 2)
    first = sb.freeze(model, draws=2, seed=1)(x)
    expected = sb.draw(model.eval(), x, samples=2, noise="shared", seed=1)
    for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (first, expected)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_numbers_of_metrics_and_decisions_are_numbers():
    p = [[0.5, 0.5]]
    for run in (
        lambda: metrics.nll("text", [0]),
        lambda: metrics.nll(p, "text"),
        lambda: metrics.rmse([[1.0], [1.0, 2.0]], [1.0]),
    ):
        with pytest.raises(TypeError, match="metrics take numbers"):
            run()
    with pytest.raises(ValueError, match="coverage='a'"):
        metrics.selective_risk(p, [0], coverage="a")
    with pytest.raises(ValueError, match="coverage=None"):
        decisions.Abstention.for_coverage(p, None)


def test_options_are_what_a_file_can_hold():
    """Python's own numbers: a tensor's would fail when the model is saved."""
    with pytest.raises(ValueError, match="rate must be at least 0"):
        sb.MCDropout(rate=torch.tensor(0.1))
    assert json.dumps(sb.MCDropout(rate=0.1).rate) == "0.1"


def test_learned_mixing_reaches_the_statistics_of_its_components():
    """The mean of the components' statistics has a gradient, which torch's own kernel refuses."""
    torch.manual_seed(0)
    method = sb.EMP(components=3, patch="norm", learn_mixing=True, init_noise=0.5, own_statistics=True)
    model = sb.bayesianize(nn.Sequential(nn.BatchNorm2d(2)), method).double().eval()
    model[0].running_mean.normal_()
    model[0].running_var.uniform_(0.5, 2.0)
    logits = next(p for name, p in model.named_parameters() if name.endswith("logits"))
    logits.data.normal_()
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        expected = sb.draw(model, x, noise="mean")
    found = sb.draw(model, x, noise="mean")
    assert torch.allclose(found, expected, atol=1e-12)

    def loss(values):
        return (
            torch.func.functional_call(_Mean(model), {f"model.{_name(model)}": values}, (x,)).square().sum()
        )

    assert torch.autograd.gradcheck(loss, (logits.detach().clone().requires_grad_(),))


class _Mean(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return sb.draw(self.model, x, noise="mean")


def _name(model):
    return next(name for name, _ in model.named_parameters() if name.endswith("logits"))
