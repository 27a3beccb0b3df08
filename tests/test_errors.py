"""Every error names what was given and what to do."""

import math

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, residual_net
from torch import nn

import slimbayes as sb

NAN, INF = math.nan, math.inf
LABELS = torch.tensor([0, 1, 0, 1])


def says(*parts, kind=ValueError):
    """Expect an error of this kind whose message holds every part."""

    class Check:
        def __enter__(self):
            self.context = pytest.raises(kind)
            self.caught = self.context.__enter__()
            return self

        def __exit__(self, *error):
            result = self.context.__exit__(*error)
            message = str(self.caught.value)
            for part in parts:
                assert part in message, f"{part!r} is not in: {message}"
            return result

    return Check()


# Options of methods


@pytest.mark.parametrize("bad", ["gaussian", "Normal", "", None])
@pytest.mark.parametrize(
    ("method", "option", "choices"),
    [
        (sb.Rank1, "posterior", ("normal", "cauchy", "lognormal", "halfcauchy", "delta")),
        (sb.Rank1, "factors", ("both", "input", "output")),
        (sb.Rank1, "random", ("both", "input", "output")),
        (sb.Rank1, "perturbation", ("multiplicative", "additive")),
        (sb.Rank1, "kl_reduction", ("sum", "mean", "monte_carlo")),
        (sb.MeanField, "estimator", ("shared", "flipout", "local")),
        (sb.KTied, "estimator", ("shared", "flipout", "local")),
        (sb.MCDropout, "granularity", ("element", "channel")),
    ],
)
def test_unknown_choices_name_the_known_ones(method, option, choices, bad):
    with says(f"unknown {option} {bad!r}; use one of", *map(repr, choices)):
        method(**{option: bad})


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, NAN, INF])
@pytest.mark.parametrize("method", [sb.MCDropout, sb.DropConnect])
def test_rates_of_dropout(method, rate):
    with says(f"rate must be at least 0 and below 1, got {rate!r}"):
        method(rate=rate)
    assert method(rate=0.0).rate == 0.0


@pytest.mark.parametrize("rate", [-1e-3, 0.0, 1.0, 2.0, NAN])
def test_dropout_rate_of_rank1(rate):
    with says(f"dropout_rate must lie strictly between 0 and 1, got {rate}"):
        sb.Rank1(dropout_rate=rate)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "4", None])
@pytest.mark.parametrize(
    ("method", "option"),
    [
        (sb.Rank1, "components"),
        (sb.BatchEnsemble, "components"),
        (sb.EMP, "components"),
        (sb.ECMP, "components"),
        (sb.KTied, "rank"),
        (sb.DeepEnsemble, "members"),
    ],
)
def test_counts(method, option, bad):
    with says(f"{option} must be an integer of at least 1, got {bad!r}"):
        method(**{option: bad})


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF])
@pytest.mark.parametrize(
    ("method", "option"),
    [
        (sb.MeanField, "stddev_init"),
        (sb.MeanField, "stddev_max"),
        (sb.KTied, "stddev_init"),
        (sb.Rank1, "clip"),
        (sb.EMP, "prior_precision"),
        (sb.ECMP, "prior_precision"),
    ],
)
def test_positive_options(method, option, bad):
    with says(f"{option} must be positive and finite, got {bad!r}"):
        method(**{option: bad})


def test_options_that_contradict_each_other():
    with says("random_sign_init=0.5 draws ±1", "additive", "use a value ≤ 0"):
        sb.Rank1(perturbation="additive", random_sign_init=0.5)
    with says("additive", "lognormal", "use posterior='normal'"):
        sb.Rank1(perturbation="additive", posterior="lognormal")
    with says("random_sign_init must be a probability in (0, 1] or minus a standard deviation, got 1.5"):
        sb.BatchEnsemble(random_sign_init=1.5)
    with says("random_sign_init must be", "got nan"):
        sb.Rank1(random_sign_init=NAN)
    with says(
        "random='input' with factors='output' leaves nothing random", "factors='both' or random='output'"
    ):
        sb.Rank1(factors="output", random="input")
    with says(
        "random='output' with factors='input' leaves nothing random", "factors='both' or random='input'"
    ):
        sb.Rank1(factors="input", random="output")
    with says("random='input' has no meaning with posterior='delta'", "random='both'", "another posterior"):
        sb.Rank1(posterior="delta", random="input")
    with says("components_per_step=5 exceeds components=4"):
        sb.Rank1(components_per_step=5)
    with says("components_per_step must be an integer of at least 1, got 0"):
        sb.Rank1(components_per_step=0)
    with says("stddev_max=0.001 is below stddev_init=0.01"):
        sb.MeanField.paper(stddev_max=0.001)
    with says("tied_mean needs a Normal, HeNormal or RelativeNormal prior, got Cauchy(loc=0.0, scale=1.0)"):
        sb.MeanField(tied_mean=True, prior=sb.Cauchy())
    with says("patch is empty", 'patch=("norm", "output")'):
        sb.EMP(patch=())
    with says("patch entry 3 is not understood", "'norm', 'input', 'output'"):
        sb.ECMP(patch=("norm", 3))
    with says("init_noise must be finite and at least 0, got -1.0"):
        sb.EMP(init_noise=-1.0)


# Priors


@pytest.mark.parametrize("family", [sb.Normal, sb.Cauchy, sb.LogNormal, sb.HalfCauchy])
def test_bad_priors(family):
    for scale in (0.0, -0.1, NAN, INF):
        with says(f"{family.__name__} prior: scale must be positive and finite, got {scale}"):
            family(1.0, scale)
    for loc in (NAN, INF):
        with says(f"{family.__name__} prior: loc must be finite, got {loc}"):
            family(loc, 1.0)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: sb.Rank1(posterior="cauchy", prior=sb.Normal(1.0, 0.1)),
            ("Cauchy posterior", "Normal prior", "use prior=sb.Cauchy(loc, scale)"),
        ),
        (
            lambda: sb.Rank1(posterior="lognormal", prior=sb.Normal(1.0, 0.1)),
            ("LogNormal posterior", "Normal prior", "sb.LogNormal(loc, scale)"),
        ),
        (
            lambda: sb.Rank1(posterior="normal", prior=sb.HalfCauchy(1.0, 0.1)),
            ("Normal posterior", "HalfCauchy prior", "sb.Normal(loc, scale)"),
        ),
        (
            lambda: sb.Rank1(posterior="halfcauchy", prior=sb.Cauchy(1.0, 0.1)),
            ("HalfCauchy posterior", "Cauchy prior", "sb.HalfCauchy(loc, scale)"),
        ),
        (lambda: sb.MeanField(prior=sb.LogNormal()), ("Normal posterior", "LogNormal prior", "sb.Normal")),
        (
            lambda: sb.KTied(prior=sb.Cauchy()),
            ("KTied needs a prior of Normal, HeNormal, EmpiricalNormal, RelativeNormal", "Cauchy(loc=0.0"),
        ),
    ],
)
def test_priors_that_do_not_fit_the_posterior(make, parts):
    with says(*parts):
        make()


# Conversion


@pytest.mark.parametrize("selection", ["decoder", nn.Conv2d, [nn.Conv1d, "x"], lambda name, module: False])
@pytest.mark.parametrize("method", ["rank1", "meanfield", "emp", "mc_dropout", "deterministic"])
def test_selection_that_matches_nothing(method, selection):
    with says("matches no layer", "0 (Linear), 1 (BatchNorm1d), 3 (Linear)"):
        sb.bayesianize(mlp(), METHODS[method](), include=selection)
    with says("matches no layer"):
        sb.bayesianize(mlp(), [(nn.Linear, METHODS[method]()), (selection, METHODS[method]())])


def test_selection_that_matches_nothing_in_an_ensemble_and_by_default():
    with says("the selection 'decoder' matches no layer"):
        sb.bayesianize(mlp(), sb.DeepEnsemble(), include="decoder")
    with says("the default of Rank1(", "matches no layer", "are: none"):
        sb.bayesianize(nn.Sequential(nn.ReLU()), sb.Rank1())
    with says("the default of EMP(", "matches no layer", "are: 0 (Linear)"):
        sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), sb.EMP(patch=("norm",)))
    with says("and 92 more"):
        sb.bayesianize(nn.Sequential(*(nn.Linear(1, 1) for _ in range(100))), sb.Rank1(), include="a")


@pytest.mark.parametrize("method", METHODS)
def test_converting_twice(method):
    model = convert(mlp, METHODS[method]())
    with says("Sequential cannot be converted: it is converted already", "fresh network", "rules"):
        sb.bayesianize(model, sb.Rank1())
    with says("its module '0' is converted already"):
        sb.bayesianize(nn.Sequential(model), sb.MeanField())
    if method not in ("deep_ensemble", "deterministic", "emp", "ecmp"):
        with says("its module '0' is converted already"):
            sb.bayesianize(nn.Sequential(model[0]), sb.MeanField())


@pytest.mark.parametrize("kind", [sb.Rank1, sb.MeanField, sb.EMP, sb.DeepEnsemble, sb.Deterministic])
def test_passing_the_class(kind):
    with says(f"pass an instance, sb.{kind.__name__}(), not the class {kind.__name__}", kind=TypeError):
        sb.bayesianize(mlp(), kind)


@pytest.mark.parametrize("bad", ["rank1", None, 3, [], "abc", {"a": 1}])
def test_methods_of_another_kind(bad):
    with says(f"got {bad!r}", "sb.Rank1()", "list of (selector, method)", kind=TypeError):
        sb.bayesianize(mlp(), bad)


def test_rules_of_another_kind():
    for rule in (sb.Rank1(), ("0", sb.Rank1), ("0", sb.Rank1(), 1), ["0", sb.Rank1()]):
        with says("every rule must be a pair (selector, method), got", repr(rule), kind=TypeError):
            sb.bayesianize(mlp(), [rule])
    with says("include cannot be given beside a list of rules"):
        sb.bayesianize(mlp(), [("0", sb.Rank1())], include="0")
    with says("bayesianize converts a torch.nn.Module, got function", kind=TypeError):
        sb.bayesianize(lambda x: x, sb.Rank1())


@pytest.mark.parametrize(
    ("method", "include", "parts"),
    [
        (sb.Rank1(), nn.BatchNorm1d, ("Rank1", "'1' of type BatchNorm1d", "linear in their input")),
        (sb.BatchEnsemble(), nn.BatchNorm1d, ("BatchEnsemble", "BatchNorm1d", "linear in their input")),
        (sb.KTied(), nn.BatchNorm1d, ("KTied", "BatchNorm1d", "weight is a vector")),
        (sb.DropConnect(), nn.BatchNorm1d, ("DropConnect", "BatchNorm1d", "weight is a vector")),
        (sb.MeanField(estimator="local"), nn.BatchNorm1d, ("estimator='local'", "BatchNorm1d")),
        (sb.MCDropout(), nn.Embedding, ("MCDropout", "Embedding", "input is an index")),
        (sb.Rank1(), nn.Embedding, ("Rank1", "'4' of type Embedding")),
    ],
)
def test_pairs_of_method_and_layer_that_do_not_fit(method, include, parts):
    network = nn.Sequential(*mlp(), nn.Embedding(3, 3))
    with says(*parts, "exclude=", "list of rules", kind=TypeError):
        sb.bayesianize(network, method, include=[include])


def test_embeddings_that_renormalise_cannot_be_random():
    with says("embedding '0'", "max_norm=1.0", "max_norm=None"):
        sb.bayesianize(nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), sb.MeanField(), include="0")


# Verbs


VERBS = {
    "draw": lambda m: sb.draw(m, features()),
    "predict": lambda m: sb.predict(m, features()),
    "kl": sb.kl,
    "elbo": lambda m: sb.elbo(torch.zeros(1, 4, 2), LABELS, m, num_data=10),
    "summary": sb.summary,
    "parameter_groups": lambda m: sb.parameter_groups(m, 0.1, 0.0),
    "save": lambda m: sb.save(m, "never"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_on_an_unconverted_model(verb):
    with says(
        "this Sequential has not been converted", "sb.bayesianize(model, method)", "sb.Deterministic()"
    ):
        VERBS[verb](mlp())


@pytest.mark.parametrize("method", ["rank1", "batch_ensemble", "deep_ensemble"])
def test_batch_that_does_not_divide(method):
    model = convert(residual_net, METHODS[method]()).eval()
    with says("got 4 rows, which its 3 components do not divide", "sb.draw(model, x)", kind=sb.RowError):
        model(images(4))


def test_data_parallel_cuts_rows():
    model = nn.DataParallel(convert(mlp, sb.Rank1()))
    with says("DataParallel", "use DistributedDataParallel", kind=TypeError):
        sb.draw(model, features())


def elbo(draws=None, targets=LABELS, num_data=10, **options):
    model = convert(mlp, sb.Rank1())
    return sb.elbo(torch.zeros(4, 4, 2) if draws is None else draws, targets, model, num_data, **options)


def test_num_data():
    with says("num_data is missing", "number of training examples"):
        elbo(num_data=None)
    with says("num_data=3 is smaller than the batch of 4", "size of the training set"):
        elbo(num_data=3)
    with says("num_data=0 is smaller"):
        elbo(num_data=0)
    assert torch.isfinite(elbo(num_data=4).loss)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_inputs_to_the_loss(bad):
    draws = torch.zeros(4, 4, 2)
    draws[1, 2, 0] = bad
    for likelihood, targets in (
        (sb.Categorical(), LABELS),
        (sb.Bernoulli(), torch.ones(4, 2)),
        (sb.Gaussian(), torch.ones(4, 2)),
    ):
        with says("1 of 32 elements of draws [4, 4, 2] are NaN or infinite", "learning rate"):
            elbo(draws, targets, likelihood=likelihood)
    targets = torch.zeros(4, 2)
    targets[0, 0] = bad
    with says("Gaussian targets [4, 2] hold NaN or infinity", "drop those rows"):
        elbo(targets=targets, likelihood=sb.Gaussian())
    with says("Bernoulli targets lie in [0, 1]"):
        elbo(targets=targets, likelihood=sb.Bernoulli())


def test_other_inputs_to_the_loss():
    with says("unknown reduction 'sum'; use one of 'average', 'mixture', 'logits'"):
        elbo(reduction="sum")
    for weight in (-1.0, NAN, INF):
        with says(f"kl_weight must be finite and at least 0, got {weight!r}"):
            elbo(kl_weight=weight)
    with says("draws as a tensor [draws, batch, ...], got dict", "draws.logits", kind=TypeError):
        elbo({"logits": torch.zeros(4, 4, 2)})
    with says("targets [5] do not fit draws [4, 4, 2]", "take targets [4]"):
        elbo(targets=torch.zeros(5, dtype=torch.long))
    with says("target 2 is out of range for 2 classes", "label from 0 to 1"):
        elbo(targets=torch.tensor([0, 1, 2, 0]))
    with says("integer class indices, got torch.float32", "targets.long()", kind=TypeError):
        elbo(targets=LABELS.float())
    with says("at least 3 axes", "got [4, 2]", "sb.draw(model, x)"):
        elbo(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))


def test_learned_mixing_needs_all_draws():
    model = convert(mlp, sb.EMP(components=3, learn_mixing=True))
    draws = sb.draw(model, features(), samples=3)
    with says("scores the 3 draws that were made together, but elbo got 2", "call elbo on all of them"):
        sb.elbo(draws[1:], LABELS, model, num_data=10)


def test_schedules_and_groups():
    with says("LinearAnnealing needs at least 1 step, got 0"):
        sb.LinearAnnealing(0)
    for start in (5, -1, 2.5, True):
        with says(f"start={start!r} must be a whole number of at least 0 and below steps=5"):
            sb.LinearAnnealing(5, start=start)
    for arguments in ((0.0, 100), (-1.0, 100), (0.1, 0)):
        with says("StepAnnealing needs a positive coefficient and every ≥ 1", repr(arguments[0])):
            sb.StepAnnealing(*arguments)
    model = convert(mlp, sb.Rank1())
    for option in ("lr", "weight_decay", "factor_lr_multiplier"):
        for bad in (-0.1, NAN, INF):
            with says(f"{option} must be finite and at least 0, got {bad!r}"):
                sb.parameter_groups(model, **{"lr": 0.1, "weight_decay": 0.0, option: bad})
