"""A Bayesian network in a scikit-learn pipeline: a grid over methods, error bars, a file that holds no code."""

import os
import tempfile

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline

import slimbayes.sklearn


def main(epochs: int = 100) -> dict[str, float]:
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    net = slimbayes.sklearn.BayesianMLPRegressor(epochs=epochs, random_state=0)
    pipeline = make_pipeline(SimpleImputer(), net)
    methods = ["Rank1(components=4, random_sign_init=0.5)", "DeepEnsemble(members=4)"]
    search = GridSearchCV(pipeline, {"bayesianmlpregressor__method": methods}, cv=2).fit(X_train, y_train)
    features, best = search.best_estimator_[:-1].transform(X_test), search.best_estimator_[-1]
    lower, upper = best.predict_interval(features, level=0.9)
    found = {
        "R2": search.score(X_test, y_test),
        "coverage": float(np.mean((lower <= y_test) & (y_test <= upper))),
    }
    print(f"{best.method}: R² {found['R2']:.2f}; {100 * found['coverage']:.0f} % in the 90 % interval")
    best.save(path := os.path.join(tempfile.mkdtemp(), "diabetes.safetensors"))
    again = slimbayes.sklearn.load(path)
    return found | {"changed": float(np.abs(again.predict(features) - best.predict(features)).max())}


if __name__ == "__main__":
    main()
