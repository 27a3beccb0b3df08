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

from slimbayes.core.likelihoods import Categorical, Likelihood
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
                first = self.classes_.tolist()
                raise ValueError(
                    f"classes={given.tolist()} are not those of the first call, {first}: use fit for others"
                )
            self._given_classes = given  # for this call alone
        elif not hasattr(self, "model_"):
            raise ValueError(
                "classes must be passed on the first call to partial_fit: y may not hold all of them"
            )
        try:
            return self._partial_fit(X, y, sample_weight)
        finally:
            self.__dict__.pop("_given_classes", None)

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
            given = self.__dict__.get("_given_classes")
            self.classes_ = np.unique(y) if given is None else given
        index = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not np.array_equal(self.classes_[index], y):
            unknown = sorted(set(y.tolist()) - set(self.classes_.tolist()))
            raise ValueError(f"y has the classes {unknown}, and the classes are {self.classes_.tolist()}")
        return index.astype(np.int64)

    def _likelihood(self) -> tuple[Likelihood, int]:
        return Categorical(), len(self.classes_)

    def _calibrate(self, data: Any, validation: Any, generator: Any) -> None:
        """Classes have no noise of their own."""


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesianMLPClassifier(Classifier):
    """A Bayesian multi-layer perceptron for classes.

    - ``hidden_layer_sizes``, ``activation`` ("relu", "tanh", "gelu", "silu", "elu", "logistic", "identity").
    - ``method``: how the network is made Bayesian: an ``sb`` method, its text, or rules ``[(selector, method), ...]``.
      A grid may search over it, or over its options as ``method__components``.
    - ``epochs``, ``batch_size`` ("auto": 64), ``lr`` (AdamW, decayed to 0 along half a cosine), ``weight_decay`` (on
      weights that have no distribution).
    - ``kl_weight``, ``kl_annealing``, ``num_data``: the weight of the KL, the share of the steps over which it grows to
      that, and what it is divided by (None: the sum of the weights). A ``kl_weight`` of 1 is the ELBO.
    - ``train_samples``, ``samples``: draws of each component in a training step, and in a prediction.
    - ``noise``: "shared" (one function per training draw), "example" (noise for every row) or "auto": "example" for
      dropout and the estimators "flipout" and "local", else "shared".
    - ``early_stopping``: hold out ``validation_fraction`` of the rows, stop when their negative log-likelihood has not
      improved for ``n_iter_no_change`` epochs, and keep the best weights.
    - ``standardize``: inputs in units of their deviations from the (weighted) mean.
    - ``random_state``, ``device`` ("cpu", "cuda", "auto"), ``verbose``.

    Float64 inputs train a float64 network, float32 inputs a float32 one. After fit: ``model_`` (an ``sb`` model of
    standardised inputs), ``likelihood_``, ``scaling_``, ``classes_``, ``loss_curve_``, ``n_iter_``.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]] * 8), np.array(["low", "low", "high", "high"] * 8)
    >>> model = BayesianMLPClassifier(epochs=40, random_state=0).fit(X, y)
    >>> model.predict([[0.5], [2.5]]).tolist()
    ['low', 'high']
    """

    hidden_layer_sizes: Any = (64,)
    activation: str = "relu"

    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        return dense_network(shape[0], self.hidden_layer_sizes, outputs, self.activation, dtype)


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesianNetClassifier(Classifier):
    """Any torch network, made Bayesian, for classes.

    ``network`` is a module with one output per class, which is copied, its weights included, before each fit; or a
    function of (n_features, n_outputs) that makes one. Rows may have any number of axes: the function then gets their
    shape in the place of n_features. The network keeps its number type, and inputs are not standardised unless asked
    for. The other parameters are those of ``BayesianMLPClassifier``.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]] * 8), np.array([0, 0, 1, 1] * 8)
    >>> model = BayesianNetClassifier(network=nn.Linear, epochs=2, method="MeanField").fit(X, y)
    >>> model.model_.weight.shape
    torch.Size([2, 1])
    """

    network: Any = None
    standardize: bool = False

    _given = True

    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        return given_network(self.network, shape, outputs)
