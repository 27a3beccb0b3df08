"""The estimators of slimbayes.sklearn beside scikit-learn's own perceptrons, on scikit-learn's small tables.

Five folds, shuffled with seed 0, and the mean over them. Every model standardises inputs and real targets.
A plain regressor gets the deviation of its training residuals as noise. Run: python bench/sklearn_tables.py
"""

import argparse
import ast
import functools
import time
import warnings

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine, make_friedman1
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import slimbayes as sb
from slimbayes.sklearn import BayesianMLPClassifier, BayesianMLPRegressor


def friedman1(return_X_y):
    return make_friedman1(600, noise=1.0, random_state=0)


CLASSES = {"breast_cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}
REALS = {"diabetes": load_diabetes, "friedman1": friedman1}


def plain_classifier():
    return make_pipeline(StandardScaler(), MLPClassifier(random_state=0))


def plain_regressor():
    inner = make_pipeline(StandardScaler(), MLPRegressor(random_state=0))
    return TransformedTargetRegressor(inner, transformer=StandardScaler())


def classify(make, X, y):
    found = []
    for train, test in StratifiedKFold(5, shuffle=True, random_state=0).split(X, y):
        start = time.process_time()
        model = make().fit(X[train], y[train])
        seconds = time.process_time() - start
        p, target = torch.as_tensor(model.predict_proba(X[test])), torch.as_tensor(y[test])
        p = p.clamp_min(1e-12)
        scores = (sb.metrics.accuracy(p, target), sb.metrics.nll(p, target), sb.metrics.ece(p, target))
        found.append([*map(float, scores), seconds])
    return dict(zip(("accuracy", "nll", "ece", "seconds"), np.mean(found, 0), strict=True))


def regress(make, X, y):
    found = []
    for train, test in KFold(5, shuffle=True, random_state=0).split(X):
        start = time.process_time()
        model = make().fit(X[train], y[train])
        seconds = time.process_time() - start
        if hasattr(model, "predict_interval"):
            mean, nll = model.predict(X[test]), -model.log_prob(X[test], y[test]).mean()
            lower, upper = model.predict_interval(X[test], 0.9)
        else:
            mean, noise = model.predict(X[test]), np.std(y[train] - model.predict(X[train]))
            z = (y[test] - mean) / noise
            nll = np.mean(0.5 * z**2 + np.log(noise) + 0.5 * np.log(2 * np.pi))
            lower, upper = mean - 1.645 * noise, mean + 1.645 * noise
        inside = np.mean((lower <= y[test]) & (y[test] <= upper))
        found.append([r2_score(y[test], mean), nll, inside, seconds])
    return dict(zip(("R2", "nll", "coverage of 90 %", "seconds"), np.mean(found, 0), strict=True))


def main(methods, options):
    warnings.simplefilter("ignore", ConvergenceWarning)
    torch.set_num_threads(1)
    for name, load in (CLASSES | REALS).items():
        X, y = load(return_X_y=True)
        real = name in REALS
        score, kind = (regress, BayesianMLPRegressor) if real else (classify, BayesianMLPClassifier)
        contenders = {"scikit-learn's MLP": plain_regressor if real else plain_classifier}
        for method in methods:
            own = {} if method == "default" else {"method": method}
            contenders[method] = functools.partial(kind, random_state=0, **options, **own)
        for label, make in contenders.items():
            found = score(make, X, y)
            print(
                f"{name:13} {label[:30]:30}", "  ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["default"])
    parser.add_argument("--options", default="{}", help="a dict of the estimators' parameters")
    arguments = parser.parse_args()
    main(arguments.methods, ast.literal_eval(arguments.options))
