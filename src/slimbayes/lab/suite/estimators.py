"""What trains by itself, on tables: the estimators of ``slimbayes.sklearn``, scikit-learn's own, and ``sb.fit``."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

import slimbayes as sb
from slimbayes.core.predictive import Predictive
from slimbayes.lab.suite.data import Task
from slimbayes.lab.suite.pairs import Pair
from slimbayes.lab.suite.training import Answer, answer_of, likelihood_of, start
from slimbayes.training import Training

NAMES = {True: ("MLPRegressor", "BayesianMLPRegressor"), False: ("MLPClassifier", "BayesianMLPClassifier")}


def theirs(pair: Pair, task: Task, seed: int) -> Answer:
    """scikit-learn's perceptron with its defaults; a regression's noise is the deviation of its residuals."""
    from sklearn import neural_network
    from sklearn.exceptions import ConvergenceWarning

    model = getattr(neural_network, NAMES[task.regression][0])(random_state=seed)
    X, y = _arrays(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
    likelihood: Any = sb.Categorical()
    if task.regression:
        likelihood = sb.Gaussian(precision=float(1 / np.square(y - model.predict(X)).mean()))

    def answer(inputs: Tensor, first: int) -> Predictive:
        rows = inputs.flatten(1).numpy()
        if task.regression:
            outputs = model.predict(rows).reshape(len(rows), -1)
        else:
            outputs = np.log(model.predict_proba(rows).clip(1e-12))
        return likelihood.predictive(torch.as_tensor(outputs, dtype=torch.float32).unsqueeze(0))  # type: ignore[no-any-return]

    return answer


def ours(pair: Pair, task: Task, seed: int, **options: Any) -> Answer:
    """Our estimator; targets are in units of their deviations already."""
    import slimbayes.sklearn

    own = {"standardize_targets": False, **options} if task.regression else options
    model = getattr(slimbayes.sklearn, NAMES[task.regression][1])(random_state=seed, **own)
    model.fit(*_arrays(task))
    return lambda inputs, first: model._predictive(inputs.flatten(1).numpy())


def _arrays(task: Task) -> tuple[Any, Any]:
    rows = task.train
    return rows.inputs.flatten(1).numpy(), (rows.targets[:, 0] if task.regression else rows.targets).numpy()


def fitted(pair: Pair, task: Task, seed: int) -> Answer:
    """``sb.fit`` with its defaults; of a regression a tenth of the rows is held out, as ``slimbayes train`` does it."""
    method = sb.Rank1()
    model = sb.bayesianize(start(pair, task, seed), method)
    likelihood = likelihood_of(task)
    held = 0.1 if task.regression else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the run says of itself is not measured here
        sb.fit(model, task.train, validation=held, likelihood=likelihood, seed=seed, progress=False)
    return answer_of(model, likelihood, method, seed)


def settings(name: str) -> str:
    """The defaults that this contender has."""
    if name == "sb.fit":
        return f"{sb.fit.__name__}, {sb.Rank1()!r}, {Training()!r}"
    if name == "slimbayes.sklearn":
        from slimbayes.sklearn import BayesianMLPRegressor

        return f"{name}, {BayesianMLPRegressor().get_params(deep=False)!r}"
    return name


ON_TABLES = {"scikit-learn's MLP": theirs, "slimbayes.sklearn": ours, "sb.fit": fitted}
