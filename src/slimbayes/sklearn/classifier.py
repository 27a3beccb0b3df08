"""``BayesianMLPClassifier`` and ``BayesianNetClassifier``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import Bunch
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import nn

from slimbayes.likelihoods import Categorical, Likelihood
from slimbayes.sklearn.base import Estimator
from slimbayes.sklearn.networks import dense_network, given_network


@dataclass(eq=False, repr=False, kw_only=True)
class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """Classes of any label type, by the categorical likelihood."""

    _stratified = True

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """One epoch over these rows, from where the last call ended; the first call names all ``classes``.

        The KL is divided by ``num_data``, or if that is None by the weight of all rows seen so far: right for a stream
        of new rows. Set ``num_data`` to go over the same rows several times. The standardisation is that of the first
        call's rows; the learning rate and the weight of the KL stay whole.
        """
        if classes is not None:
            given = np.unique(column_or_1d(np.asarray(classes)))
            if hasattr(self, "model_") and not np.array_equal(given, self.classes_):
                raise ValueError(
                    f"classes={list(given)} are not those of the first call, {list(self.classes_)}; a new set needs fit"
                )
            self._given_classes = given
        elif not hasattr(self, "model_"):
            raise ValueError("classes must be passed on the first call to partial_fit: y may not hold all of them")
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """The most probable class of every row."""
        index = self.predict_proba(X).argmax(1)
        return self.classes_[index]

    def predict_proba(self, X: Any) -> Any:
        """p(c|x) = (1/D) Σ_d softmax(f_d(x))_c of every class, [rows, classes]."""
        return self._predictive(X).mean.double().numpy()

    def predict_log_proba(self, X: Any) -> Any:
        """log p(c|x), [rows, classes]."""
        return self._predictive(X).moments.log_mean.double().numpy()

    def predict_set(self, X: Any, level: float = 0.9) -> Any:
        """The smallest sets of classes that together have probability ``level``: a mask [rows, classes].

        They hold the true class that often if the probabilities are calibrated.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level={level!r}: give a number between 0 and 1, such as 0.9")
        p = self.predict_proba(X)
        order = np.argsort(-p, axis=1, kind="stable")
        ordered = np.take_along_axis(p, order, axis=1)
        chosen = ordered.cumsum(1) - ordered < level  # what came before is not enough
        found = np.empty_like(chosen)
        np.put_along_axis(found, order, chosen, axis=1)
        return found

    def predict_uncertainty(self, X: Any) -> Bunch:
        """``entropy`` H[y], and its parts ``aleatoric`` E_d H[y|d] and ``epistemic`` I[y; d], in nats, [rows] each.

        Epistemic uncertainty is the disagreement of the draws: large where there were no data.
        """
        found = self._predictive(X)
        parts = (found.entropy, found.expected_entropy, found.mutual_information)
        names = ("entropy", "aleatoric", "epistemic")
        return Bunch(**{name: part.double().numpy() for name, part in zip(names, parts, strict=True)})

    def _target_options(self) -> dict[str, Any]:
        return {}

    def _targets(self, y: Any, weights: Any, first: bool) -> Any:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if first:
            given = self.__dict__.pop("_given_classes", None)
            self.classes_ = np.unique(y) if given is None else given
        index = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not np.array_equal(self.classes_[index], y):
            unknown = sorted(set(np.unique(y)) - set(self.classes_))
            raise ValueError(f"y has the classes {unknown}, and the classes are {list(self.classes_)}")
        return index.astype(np.int64)

    def _likelihood(self) -> tuple[Likelihood, int]:
        return Categorical(), len(self.classes_)


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesianMLPClassifier(Classifier):
    """A Bayesian multi-layer perceptron for classes."""

    hidden_layer_sizes: Any = (64, 64)
    activation: str = "relu"

    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        return dense_network(shape[0], self.hidden_layer_sizes, outputs, self.activation, dtype)


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesianNetClassifier(Classifier):
    """Any torch network, made Bayesian, for classes."""

    network: Any = None
    standardize: bool = False

    _nd = True

    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        return given_network(self.network, shape, outputs)
