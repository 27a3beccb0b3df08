"""The scikit-learn estimators: scikit-learn's own checks, training with weights, uncertainty, parameters."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import slimbayes as sb

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_wine, make_moons  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import MinMaxScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from slimbayes.sklearn import (  # noqa: E402
    BayesianMLPClassifier,
    BayesianMLPRegressor,
    BayesianNetClassifier,
    BayesianNetRegressor,
)
from slimbayes.sklearn.loop import train_noise  # noqa: E402
from slimbayes.sklearn.scaling import Standardization  # noqa: E402

# What scikit-learn's checks need to learn in a fraction of the default steps.
QUICK = {"epochs": 15, "lr": 0.03, "hidden_layer_sizes": (16,)}
SHORT = {**QUICK, "epochs": 3, "random_state": 0}


@pytest.mark.uncounted(but=12)
@parametrize_with_checks([BayesianMLPClassifier(**QUICK), BayesianMLPRegressor(**QUICK)])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def wine():
    return load_wine(return_X_y=True, as_frame=True)


@pytest.fixture(scope="module")
def wave():
    """Rows of sin(3x) with noise 0.2 between −1 and 1, and new rows of it."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (900, 1))
    y = 50 + 10 * (np.sin(3 * x[:, 0]) + 0.2 * generator.standard_normal(900))
    return (x[:300], y[:300]), (x[300:], y[300:])


@pytest.fixture(scope="module")
def fitted_wave(wave):
    return BayesianMLPRegressor(epochs=60, lr=0.02, random_state=0).fit(*wave[0])


def test_intervals_hold_what_they_say(fitted_wave, wave):
    x, y = wave[1]
    assert fitted_wave.score(x, y) > 0.85
    for level, tolerance in ((0.5, 0.08), (0.9, 0.05)):
        lower, upper = fitted_wave.predict_interval(x, level)
        assert np.mean((lower <= y) & (y <= upper)) == pytest.approx(level, abs=tolerance)
    parts = fitted_wave.predict_uncertainty(x)
    assert np.allclose(parts.std**2, parts.aleatoric**2 + parts.epistemic**2)
    assert 2.0 * 0.8 < parts.aleatoric.mean() < 2.0 * 1.35  # 10 · 0.2, and what each draw is off by
    far = fitted_wave.predict_uncertainty(x + 5)
    assert far.epistemic.mean() > 3 * parts.epistemic.mean()


def test_densities_and_samples_are_in_units_of_the_targets(fitted_wave, wave):
    x, y = wave[1][0][:200], wave[1][1][:200]
    mean, std = fitted_wave.predict(x, return_std=True)
    normal = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    assert fitted_wave.log_prob(x, y).mean() == pytest.approx(normal.mean(), abs=0.05)
    drawn = fitted_wave.sample_y(x, n_samples=400, random_state=1)
    assert drawn.shape == (200, 400) and np.array_equal(drawn, fitted_wave.sample_y(x, 400, random_state=1))
    assert np.allclose(drawn.mean(1), mean, atol=0.6) and np.allclose(drawn.std(1), std, rtol=0.25)


def test_several_targets_have_noise_of_their_own(wave):
    x, _ = wave[0]
    generator = np.random.default_rng(1)
    y = np.stack([x[:, 0], x[:, 0]], 1) + generator.standard_normal((300, 2)) * [0.05, 0.5]
    model = BayesianMLPRegressor(epochs=40, lr=0.03, hidden_layer_sizes=(16,), random_state=0).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == (300, 2) and model.n_outputs_ == 2
    assert std[:, 1].mean() == pytest.approx(0.5, rel=0.2) and std[:, 0].mean() < 0.2
    assert model.log_prob(x, y).shape == (300,) and model.sample_y(x, 3).shape == (300, 2, 3)
    assert model.predict_interval(x)[0].shape == (300, 2)


def test_noise_that_depends_on_x():
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 1, (400, 1))
    y = x[:, 0] * generator.standard_normal(400)
    model = BayesianMLPRegressor(heteroscedastic=True, epochs=30, lr=0.02, random_state=0).fit(x, y)
    low, high = model.predict_uncertainty([[0.1], [0.9]]).aleatoric
    assert high > 2.5 * low


def test_classes_are_any_labels_and_uncertainty_grows_away_from_the_data():
    X, y = make_moons(200, noise=0.1, random_state=0)
    names = np.array(["left", "right"])[y]
    model = BayesianMLPClassifier(hidden_layer_sizes=(64, 64), epochs=40, lr=0.02, random_state=0).fit(
        X, names
    )
    assert model.score(X, names) > 0.95 and set(model.predict(X)) == {"left", "right"}
    p = model.predict_proba(X)
    assert np.allclose(np.exp(model.predict_log_proba(X)), p)
    near, far = model.predict_uncertainty(X), model.predict_uncertainty(X + 6)
    assert np.allclose(near.entropy, near.aleatoric + near.epistemic, atol=1e-6)
    assert far.epistemic.mean() > 4 * near.epistemic.mean()
    sets = model.predict_set(X, level=0.9)
    assert np.array_equal(sets.sum(1), np.where(p.max(1) >= 0.9, 1, 2))
    assert sets[np.arange(len(X)), p.argmax(1)].all()
    with pytest.raises(ValueError, match=r"level=1.5: give a number between 0 and 1"):
        model.predict_set(X, level=1.5)


def test_weights_count_rows_in_batches_too(wine):
    """Unlike scikit-learn's check this has several batches, where equality holds on average alone."""
    X, y = (part.to_numpy() for part in wine)
    weights = np.where(y == 2, 0.0, 2.0)
    model = BayesianMLPClassifier(**{**QUICK, "random_state": 0}).fit(X, y, sample_weight=weights)
    twice = BayesianMLPClassifier(**{**QUICK, "random_state": 0}).fit(X[y < 2], y[y < 2])
    assert model.weight_seen_ == 2 * twice.weight_seen_ == 2 * (y < 2).sum()
    assert model.classes_.tolist() == [0, 1, 2]
    assert (model.predict_proba(X)[y < 2, 2] < 0.2).all()
    assert np.allclose(model.scaling_.mean, twice.scaling_.mean)
    with pytest.raises(ValueError, match="at least one non-zero"):
        model.fit(X, y, sample_weight=0 * weights)


def test_same_seed_same_predictions_and_torchs_generator_is_left_alone(wine):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, again, other = (
        BayesianMLPClassifier(**{**SHORT, "random_state": seed}).fit(*wine).predict_proba(wine[0])
        for seed in (3, 3, 4)
    )
    assert np.array_equal(first, again) and not np.allclose(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_grid_over_methods_and_their_options(wine):
    model = make_pipeline(MinMaxScaler(), BayesianMLPClassifier(**SHORT))
    grid = [
        {"bayesianmlpclassifier__method": [sb.MeanField(), "DeepEnsemble(members=2)"]},
        {"bayesianmlpclassifier__method__components": [2]},
    ]
    search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(*wine)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all() and len(search.cv_results_["params"]) == 3
    assert cross_val_score(model, *wine, cv=2).shape == (2,)


def test_parameters_of_the_method():
    model = BayesianMLPClassifier(method="Rank1(components=2)")
    assert model.get_params()["method__components"] == 2
    assert model.get_params(deep=False)["method"] == "Rank1(components=2)"
    changed = clone(model).set_params(method__components=8, epochs=7)
    assert changed.method == sb.Rank1(components=8) and changed.epochs == 7
    assert clone(changed).method == changed.method
    with pytest.raises(ValueError, match=r"Invalid parameter 'method__rank'"):
        model.set_params(method__rank=2)
    assert "method__components" not in BayesianMLPClassifier(method="Rank9").get_params()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "Rank9"}, "unknown method 'Rank9'"),
        ({"method": 4}, "method=4: give a method"),
        ({"epochs": 0}, "epochs=0: give a whole number"),
        ({"batch_size": 1.5}, "batch_size=1.5: .* or 'auto'"),
        ({"lr": float("nan")}, "lr=nan: give a finite number"),
        ({"num_data": 0}, "num_data=0"),
        ({"noise": "none"}, "noise='none' is unknown"),
        ({"validation_fraction": 1}, "validation_fraction=1"),
        ({"hidden_layer_sizes": (4, 0)}, r"hidden_layer_sizes=\(4, 0\)"),
        ({"hidden_layer_sizes": "wide"}, "hidden_layer_sizes='wide'"),
        ({"hidden_layer_sizes": "64"}, "hidden_layer_sizes='64'"),
        ({"hidden_layer_sizes": (8.7,)}, r"hidden_layer_sizes=\(8.7,\)"),
        ({"activation": "step"}, "activation='step' is unknown"),
        ({"device": "abacus"}, "device='abacus' is no device"),
    ],
)
def test_fit_says_what_is_wrong_with_a_parameter(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        BayesianMLPRegressor(**options).fit([[0.0], [1.0]], [0.0, 1.0])


def test_columns_of_a_table_have_names(wine):
    X, y = wine
    model = BayesianMLPClassifier(**SHORT).fit(X, y)
    assert model.feature_names_in_.tolist() == list(X.columns)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(X.rename(columns={"ash": "ashes"}))


def test_partial_fit_goes_on(wine):
    X, y = (part.to_numpy() for part in wine)
    model = BayesianMLPClassifier(lr=0.02, num_data=len(X), random_state=0)
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        model.partial_fit(X, y)
    for _ in range(12):
        model.partial_fit(X, y, classes=[2, 1, 0])
    assert model.score(X, y) > 0.9 and model.n_iter_ == 12 == len(model.loss_curve_)
    assert model.weight_seen_ == 12 * len(X)
    with pytest.raises(ValueError, match="are not those of the first call"):
        model.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"y has the classes \[7\]"):
        model.partial_fit(X[:2], [7, 7])
    again = pickle.loads(pickle.dumps(model))  # the optimizer's state goes with it
    assert np.array_equal(*(m.partial_fit(X, y).predict_proba(X) for m in (model, again)))


def test_partial_fit_of_a_regressor_keeps_the_shape_of_targets(wave):
    x, y = wave[0]
    model = BayesianMLPRegressor(random_state=0)
    first = model.partial_fit(x, y).loss_curve_[0]
    for _ in range(9):
        model.partial_fit(x, y)
    assert model.loss_curve_[-1] < first
    with pytest.raises(ValueError, match="y has rows of shape"):
        model.partial_fit(x, np.stack([y, y], 1))


def test_early_stopping_keeps_the_best_weights(wine, capsys):
    X, y = wine
    weights = np.linspace(0.5, 1.5, len(y))
    model = BayesianMLPClassifier(
        method="DeepEnsemble(members=2)", early_stopping=True, n_iter_no_change=3, lr=0.1, random_state=0, verbose=True
    ).fit(X, y, sample_weight=weights)  # fmt: skip
    best = int(np.argmin(model.validation_curve_))
    assert model.n_iter_ == best + 1 + 3 < 100 and len(model.validation_curve_) == model.n_iter_
    printed = capsys.readouterr().out
    assert f"epoch {model.n_iter_}: loss {model.loss_curve_[-1]:.4f}, held-out negative" in printed
    with pytest.raises(ValueError, match=r"early_stopping cannot hold out validation_fraction=0.1 of 4 rows"):
        model.fit(X[:4], [0, 0, 1, 1])


def test_networks_of_ones_own():
    """Images, a module that is copied, a function that makes one, outputs that do not fit."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(60, 1, 6, 6)).astype(np.float32)
    y = (images[:, 0, :3].mean((1, 2)) > images[:, 0, 3:].mean((1, 2))).astype(int)
    given = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    before = given[4].weight.detach().clone()
    model = BayesianNetClassifier(network=given, epochs=20, lr=0.02, batch_size=59, random_state=0)
    assert model.fit(images, y).score(images, y) > 0.9
    assert torch.equal(given[4].weight, before) and model.model_ is not given
    asked = []

    def make(features, outputs):
        asked.append((features, outputs))
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(features)), outputs))

    BayesianNetClassifier(network=make, epochs=1).fit(images, y)
    real = BayesianNetRegressor(network=make, epochs=1, heteroscedastic=True).fit(images[:, 0, 0], y)
    assert asked == [((1, 6, 6), 2), (6, 2)] and real.predict(images[:, 0, 0]).shape == (60,)
    with pytest.raises(
        ValueError, match=r"gives outputs \[2, 2\] for 2 rows, and these targets need \[2, 3\]"
    ):
        model.fit(images, np.arange(60) % 3)
    with pytest.raises(TypeError, match="network=None: give a torch module, or a function"):
        BayesianNetRegressor().fit([[0.0], [1.0]], [0.0, 1.0])
    with pytest.raises(TypeError, match="returned int, not a torch module"):
        BayesianNetRegressor(network=lambda features, outputs: 3).fit([[0.0], [1.0]], [0.0, 1.0])


@pytest.mark.parametrize(
    "method, noise",
    [
        ("Rank1", "shared"),
        ("MCDropout", "example"),
        ("MeanField(estimator='local')", "example"),
        ([("output", "KTied"), (None, sb.BatchEnsemble())], "shared"),
    ],
)
def test_every_kind_of_method_trains(wave, method, noise):
    x, y = wave[0]
    options = {"hidden_layer_sizes": 8, "epochs": 2, "kl_annealing": 0.0, "random_state": 0}
    model = BayesianMLPRegressor(method=method, **options).fit(x, y)
    assert train_noise("auto", model.model_) == noise and train_noise("mean", model.model_) == "mean"
    assert np.isfinite(model.predict(x)).all()
    assert model.loss_curve_[1] < model.loss_curve_[0]


def test_without_scikit_learn_the_error_names_the_extra():
    script = "import sys; sys.modules['sklearn'] = None; import slimbayes.sklearn"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install -U 'slimbayes[sklearn]'" in run.stderr and "ImportError" in run.stderr


def test_what_is_not_fitted_says_so(tmp_path):
    for model in (BayesianMLPRegressor(), BayesianMLPClassifier()):
        with pytest.raises(NotFittedError):
            model.predict_uncertainty([[0.0]])
        with pytest.raises(NotFittedError):
            model.save(tmp_path / "a")


@pytest.mark.parametrize("weights", [None, np.where(np.arange(1000) == 0, 0.0, 0.3)])
def test_a_constant_column_among_others_has_scale_one(weights):
    Z = np.random.default_rng(0).normal(size=(1000, 3))
    Z[:, 2] = 0.1
    if weights is not None:
        Z[0, 2] = 5.0  # counts nothing
    found = Standardization.of(Z, weights)
    assert found.mean[2] == 0.1 and found.scale[2] == 1.0
    assert np.allclose(found.scale[:2], np.sqrt(np.cov(Z[:, :2].T, aweights=weights, ddof=0).diagonal()))


def test_a_small_spread_far_from_zero_is_kept():
    column = 1e6 + 1e-3 * np.random.default_rng(0).normal(size=(1000, 1))
    assert Standardization.of(column).scale == pytest.approx(1e-3, rel=0.1)


def test_constant_targets_are_predicted():
    X = np.random.default_rng(0).normal(size=(1000, 2))
    y = np.stack([X[:, 0], np.full(1000, 0.1)], 1)
    model = BayesianMLPRegressor(**{**SHORT, "epochs": 1}).fit(X, y)
    assert model.target_scaling_.scale[1] == 1.0 and model.target_scaling_.mean[1] == 0.1


def test_a_fit_that_fails_leaves_nothing_to_predict_with(wave):
    x, y = wave[0]
    model = BayesianMLPRegressor(**SHORT).partial_fit(x, y)
    with pytest.raises(ValueError, match="activation='nope'"):
        model.set_params(activation="nope").fit(x, 100 * y)
    with pytest.raises(NotFittedError):
        model.predict(x)
    model.set_params(activation="relu").partial_fit(x, y)  # anew, with an optimizer of its own
    assert model.n_iter_ == 1 and np.isfinite(model.predict(x)).all()
    narrow = BayesianNetRegressor(network=nn.Linear(1, 1), epochs=1).fit(x, y)
    with pytest.raises(ValueError, match="these targets need"):  # after the network was built
        narrow.fit(x, np.stack([y, y], 1))
    with pytest.raises(NotFittedError):
        narrow.predict(x)


def test_classes_of_a_partial_fit_that_failed_are_forgotten():
    model = BayesianMLPClassifier(**SHORT)
    with pytest.raises(ValueError, match="NaN"):
        model.partial_fit([[np.nan], [1.0]], [0, 1], classes=[0, 1, 2])
    assert model.fit([[0.0], [1.0]], [0, 1]).classes_.tolist() == [0, 1]


def test_integers_of_numpy_are_whole_numbers(wave):
    x, y = wave[0]
    two = np.int64(2)
    options = {
        "samples": two,
        "train_samples": two,
        "epochs": two,
        "batch_size": 32 * two,
    }
    for sizes in (4 * two, (4 * two,), np.array([8])):
        model = BayesianMLPRegressor(hidden_layer_sizes=sizes, **options).fit(x, y)
        assert np.isfinite(model.predict(x)).all() and model.sample_y(x, two).shape == (300, 2)


def test_arrays_that_are_read_only_need_no_standardisation(wave):
    x, y = (part.copy() for part in wave[0])
    x.flags.writeable = y.flags.writeable = False
    model = BayesianMLPRegressor(**SHORT, standardize=False, standardize_targets=False).fit(x, y)
    assert np.isfinite(model.predict(x)).all()


def test_a_regressor_stops_early_without_a_warning():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 2))
    model = BayesianMLPRegressor(epochs=4, early_stopping=True, n_iter_no_change=np.int64(2), random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, X[:, 0])
    assert 1 <= model.n_iter_ <= 4 and len(model.validation_curve_) == model.n_iter_


def overfitted(rows, **options):
    """A long run on few rows, and how many of a thousand new targets are in its 90 % intervals."""
    random = np.random.RandomState(0)
    X, noise = random.randn(rows + 1000, 8), random.randn(rows + 1000)
    y = X[:, 0] + noise
    options = {"method": "Deterministic()", "weight_decay": 0.0, "epochs": 60, "random_state": 0, **options}
    model = BayesianMLPRegressor(**options).fit(X[:rows], y[:rows])
    lower, upper = model.predict_interval(X[rows:], 0.9)
    return model, float(((lower <= y[rows:]) & (y[rows:] <= upper)).mean())


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_noise_is_that_of_rows_that_were_not_trained_on(heteroscedastic):
    options = {"heteroscedastic": heteroscedastic}
    (plain, narrow), (model, right) = (overfitted(200, calibrate=c, **options) for c in (False, True))
    assert narrow < 0.7 and 0.84 < right < 0.96
    x = np.random.RandomState(1).randn(5, 8)
    assert np.array_equal(plain.predict(x), model.predict(x))  # all rows train the network
    _, share = overfitted(400, early_stopping=True, validation_fraction=0.25, **options)
    assert 0.82 < share < 0.97


def test_noise_of_a_network_that_passes_through_its_rows_is_right():
    (_, narrow), (_, right) = (
        overfitted(200, calibrate=c, hidden_layer_sizes=(64, 64)) for c in (False, True)
    )
    assert narrow < 0.3 and 0.84 < right < 0.96  # scaled like a second network's, 1.0 of them were inside


def test_noise_counts_rows_by_their_weights():
    x = np.random.RandomState(0).randn(400, 1)
    y = np.where(np.arange(400) % 2, 0.1, 3.0) * np.random.RandomState(1).randn(400)
    weights = np.where(np.arange(400) % 2, 1.0, 1e-9)
    for calibrate in (False, True):
        options = {"method": "Deterministic()", "epochs": 30, "random_state": 0, "calibrate": calibrate}
        model = BayesianMLPRegressor(hidden_layer_sizes=4, **options).fit(x, y, sample_weight=weights)
        found = model.predict_uncertainty(x).aleatoric
        assert found == pytest.approx(np.full(400, 0.1), rel=0.25)
