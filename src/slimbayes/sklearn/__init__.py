"""scikit-learn estimators whose predictions say how sure they are.

>>> from sklearn.datasets import load_wine
>>> from slimbayes.sklearn import BayesianMLPClassifier
>>> X, y = load_wine(return_X_y=True)
>>> model = BayesianMLPClassifier(epochs=10, random_state=0).fit(X, y)
>>> model.predict_proba(X).shape, sorted(model.predict_uncertainty(X))
((178, 3), ['aleatoric', 'entropy', 'epistemic'])
"""

from __future__ import annotations

import os
from typing import Any

try:
    from sklearn.utils.validation import validate_data as _  # noqa: F401 - new in 1.6
except ImportError as error:
    raise ImportError(
        "slimbayes.sklearn needs scikit-learn 1.6 or later: pip install -U 'slimbayes[sklearn]'"
    ) from error

from slimbayes.sklearn.classifier import BayesianMLPClassifier, BayesianNetClassifier
from slimbayes.sklearn.regressor import BayesianMLPRegressor, BayesianNetRegressor
from slimbayes.sklearn.saving import read

_KINDS = (BayesianMLPClassifier, BayesianMLPRegressor, BayesianNetClassifier, BayesianNetRegressor)


def load(path: str | os.PathLike[str], network: Any = None, device: Any = None) -> Any:
    """The estimator in a file that ``estimator.save(path)`` wrote, of whichever kind it is.

    ``network`` is the torch module, or the function that makes it, of a ``BayesianNet...``; ``device`` takes the place
    of the one that the estimator was fitted on. No code is executed.
    """
    return read(path, {kind.__name__: kind for kind in _KINDS}, network, device)


__all__ = [
    "BayesianMLPClassifier",
    "BayesianMLPRegressor",
    "BayesianNetClassifier",
    "BayesianNetRegressor",
    "load",
]
