"""Saved estimators: one file without code, which gives the same predictions."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import slimbayes as sb

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from safetensors.torch import load as deserialize  # noqa: E402
from safetensors.torch import save as serialize  # noqa: E402

import slimbayes.sklearn  # noqa: E402
from slimbayes.sklearn import (  # noqa: E402
    BayesianMLPClassifier,
    BayesianMLPRegressor,
    BayesianNetClassifier,
    BayesianNetRegressor,
)
from slimbayes.sklearn.saving import HEADER, method_text  # noqa: E402
from slimbayes.verbs.checkpoint import read_tensors  # noqa: E402

SHORT = {"hidden_layer_sizes": (8,), "epochs": 2, "random_state": 0}


@pytest.fixture(scope="module")
def table():
    generator = np.random.default_rng(0)
    X = pd.DataFrame(generator.normal(size=(40, 3)), columns=["a", "b", "c"])
    return X, X["a"].to_numpy() - X["b"].to_numpy()


@pytest.fixture(scope="module")
def saved(table, tmp_path_factory):
    X, y = table
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    model = BayesianMLPRegressor(method=sb.DeepEnsemble(members=2), **SHORT)
    model.fit(X, np.stack([y, -y], 1)).save(path)
    return model, path


def test_a_regressor_comes_back(saved, table):
    model, path = saved
    again = slimbayes.sklearn.load(path)
    X = table[0]
    for ours, theirs in zip(
        model.predict(X, return_std=True), again.predict(X, return_std=True), strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert again.feature_names_in_.tolist() == ["a", "b", "c"] and again.n_outputs_ == 2
    assert again.method == "DeepEnsemble(members=2, reinitialize=True)" and again.hidden_layer_sizes == (8,)
    assert again.loss_curve_ == model.loss_curve_
    again.partial_fit(X, np.zeros((40, 2)))
    assert again.n_iter_ == 3
    assert path.read_bytes() and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "labels",
    [["no", "yes"], [3, 7], [False, True], [1.0, 2.0], pd.Series(["u", "v"], dtype=object).to_numpy()],
)
def test_labels_come_back_with_their_type(labels, table, tmp_path):
    X, y = table
    model = BayesianMLPClassifier(method="EMP(patch=('input',))", **SHORT).fit(
        X, np.asarray(labels)[(y > 0).astype(int)]
    )
    model.save(tmp_path / "model")
    again = BayesianMLPClassifier.load(tmp_path / "model")
    assert again.classes_.dtype == model.classes_.dtype and again.classes_.tolist() == list(labels)
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


def test_a_network_of_ones_own_is_given_again(table, tmp_path):
    X, y = table
    generator = np.random.RandomState(1)
    model = BayesianNetRegressor(
        network=nn.Linear, method="KTied", epochs=np.int64(2), random_state=generator
    )
    model.fit(X.to_numpy(np.float32), y).save(tmp_path / "model")
    with pytest.raises(ValueError, match="a network of your own, not its code: pass network= to load"):
        slimbayes.sklearn.load(tmp_path / "model")
    again = slimbayes.sklearn.load(tmp_path / "model", network=nn.Linear(3, 1), device="cpu")
    assert np.array_equal(*(m.predict(X.to_numpy()) for m in (model, again)))
    assert again.epochs == 2 and again.random_state is None
    with pytest.raises(sb.CheckpointError, match="another architecture"):
        slimbayes.sklearn.load(tmp_path / "model", network=nn.Linear(4, 1))


def test_files_that_are_damaged_or_of_another_kind(saved, tmp_path):
    _, path = saved
    with pytest.raises(sb.CheckpointError, match="holds a BayesianMLPRegressor, and BayesianMLPClassifier"):
        BayesianMLPClassifier.load(path)
    with pytest.raises(FileNotFoundError, match="no estimator at"):
        slimbayes.sklearn.load(tmp_path / "nothing")
    content = path.read_bytes()
    (tmp_path / "cut").write_bytes(content[:-9])
    with pytest.raises(sb.CheckpointError, match="is no whole file of a saved estimator"):
        slimbayes.sklearn.load(tmp_path / "cut")
    tensors, metadata = read_tensors(path)
    changed = {**tensors, "scaling_.mean": tensors["scaling_.mean"] + 1}
    for name, parts in {"mean": (changed, metadata), "format": (tensors, _with(metadata, format=9))}.items():
        (tmp_path / name).write_bytes(serialize(parts[0], metadata=parts[1]))
    with pytest.raises(sb.CheckpointError, match="does not match its checksum"):
        slimbayes.sklearn.load(tmp_path / "mean")
    with pytest.raises(sb.CheckpointError, match="has format 9, and this version reads 1"):
        slimbayes.sklearn.load(tmp_path / "format")
    assert deserialize(content)["scaling_.mean"].dtype == torch.float64


def _with(metadata, **changes):
    return {HEADER: json.dumps(json.loads(metadata[HEADER]) | changes)}


def test_what_has_no_text_cannot_be_saved(table, tmp_path):
    with pytest.raises(ValueError, match=r"files hold no code.*sb.save\(estimator.model_, path\)"):
        method_text(sb.EMP(patch=(nn.Linear,)))
    with pytest.raises(ValueError, match="files hold no code"):
        method_text([(nn.Linear, sb.Rank1())])
    X, y = table
    labels = pd.Series([(1, 2), (3, 4)])[(y > 0).astype(int)].to_numpy()
    model = BayesianMLPClassifier(**SHORT).fit(X, (y > 0).astype(int))
    model.classes_ = np.unique(labels)
    with pytest.raises(ValueError, match="neither texts nor numbers"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_of_half_precision_come_back(dtype, table, tmp_path):
    X, y = table[0].to_numpy(np.float32), (table[1] > 0).astype(int)
    network = nn.Linear(3, 2).to(dtype)
    model = BayesianNetClassifier(network=network, method="MeanField", epochs=1, random_state=0).fit(X, y)
    model.save(tmp_path / "model")
    again = slimbayes.sklearn.load(tmp_path / "model", network=network)
    assert next(again.model_.parameters()).dtype == dtype
    assert np.array_equal(model.predict_proba(X), again.predict_proba(X))


def test_other_types_of_numbers_are_not_saved(table, tmp_path):
    X, y = table
    model = BayesianMLPRegressor(**SHORT).fit(X, y)
    model.model_ = nn.Linear(3, 1).to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="float8_e5m2 numbers cannot be saved: use one of float64"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
