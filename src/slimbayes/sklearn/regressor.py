"""``BayesianMLPRegressor`` and ``BayesianNetRegressor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.base import RegressorMixin, clone
from sklearn.utils import Bunch, check_random_state
from torch import nn

from slimbayes.core.likelihoods import Gaussian, Likelihood
from slimbayes.sklearn.base import Estimator
from slimbayes.sklearn.loop import Rows
from slimbayes.sklearn.networks import dense_network, given_network
from slimbayes.sklearn.scaling import Standardization

_LEAST = 20  # rows that noise is fitted to
_CALIBRATED = 2000  # more rows than these are not trained on twice: they overfit little


@dataclass(eq=False, repr=False, kw_only=True)
class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """Real targets, one or several, by the Gaussian likelihood with learned noise."""

    weight_decay: float = (
        0.1  # a fifth of a classifier's: learned noise keeps a network from overfitting, too
    )
    heteroscedastic: bool = False
    standardize_targets: bool = True
    calibrate: bool = True

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """One epoch over these rows, from where the last call ended.

        The KL is divided by ``num_data``, or if that is None by the weight of all rows seen so far: right for a stream
        of new rows. Set ``num_data`` to go over the same rows several times. The standardisation is that of the first
        call's rows; the learning rate and the weight of the KL stay whole.
        """
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of every row, and with ``return_std`` the deviation of a new target, noise included."""
        found = self._predictive(X)
        mean = self._shaped(self.target_scaling_.restore(found.mean))
        if not return_std:
            return mean
        return mean, self._shaped(self.target_scaling_.scale * found.variance.double().sqrt().numpy())

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Any, Any]:
        """The lower and the upper end of the central interval that holds a new target with probability ``level``."""
        lower, upper = self._predictive(X).interval(level)
        return self._shaped(self.target_scaling_.restore(lower)), self._shaped(
            self.target_scaling_.restore(upper)
        )

    def predict_uncertainty(self, X: Any) -> Bunch:
        """``std`` of a new target, and its parts: std² = ``aleatoric``² + ``epistemic``², in units of the targets.

        The aleatoric part is noise; the epistemic part is the draws' disagreement, large where there were no data.
        """
        found = self._predictive(X)
        parts = {"std": found.variance, "aleatoric": found.aleatoric, "epistemic": found.epistemic}
        scale = self.target_scaling_.scale
        return Bunch(**{k: self._shaped(scale * v.double().sqrt().numpy()) for k, v in parts.items()})

    def log_prob(self, X: Any, y: Any) -> Any:
        """log p(y|x) of every row in units of the targets, [rows]: the joint density of several targets."""
        found = self._predictive(X)
        scaled = self.target_scaling_.apply(np.asarray(y, dtype=np.float64).reshape(found.mean.shape))
        density = found.log_prob(torch.from_numpy(scaled).to(found.mean.dtype))
        return density.double().numpy() - np.log(self.target_scaling_.scale).sum()

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Any:
        """Targets drawn from the predictive distribution, [rows, n_samples] or [rows, targets, n_samples]."""
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        values = self._predictive(X).sample(int(n_samples), generator)  # [n_samples, rows, targets]
        return np.moveaxis(np.stack([self._shaped(self.target_scaling_.restore(v)) for v in values]), 0, -1)

    def _target_options(self) -> dict[str, Any]:
        return {"multi_output": True, "y_numeric": True}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _shaped(self, values: Any) -> Any:
        """[rows, targets] in the shape that the targets had."""
        return values.reshape(len(values), *self._target_shape)

    def _targets(self, y: Any, weights: Any, first: bool) -> Any:
        if first:
            self._target_shape = y.shape[1:]
            self.n_outputs_ = y.shape[1] if y.ndim == 2 else 1
        if y.shape[1:] != self._target_shape:
            raise ValueError(f"y has rows of shape {y.shape[1:]}, and those before were {self._target_shape}")
        wide = y.reshape(len(y), self.n_outputs_)
        if first:
            self.target_scaling_ = Standardization.of(wide, weights, self.standardize_targets)
        return self.target_scaling_.apply(wide)

    def _likelihood(self) -> tuple[Likelihood, int]:
        if self.heteroscedastic:
            return Gaussian(learn="per_example"), 2 * self.n_outputs_
        return Gaussian(learn="global", outputs=self.n_outputs_), self.n_outputs_

    def _calibrate(self, data: Any, validation: Rows | None, generator: Any) -> None:
        """Fit the noise to rows that were not trained on: those of early stopping, or those of a second network.

        The second one sees all rows but a tenth, by which its noise is fitted. The first keeps what it has learned from
        all rows, and takes that noise: how far its own is off says nothing, once a network passes through its rows.
        """
        rows, held_out = len(data[0]), _held_out(len(data[0]))
        likelihood: Any = self.likelihood_
        if not self.calibrate or (validation is None and not 0 < held_out < rows <= _CALIBRATED):
            return
        if validation is not None:
            if len(validation) >= _LEAST:
                found = self._predicted(validation.inputs)
                likelihood.fit_noise(found, validation.targets, validation.weights)
            return
        order = generator.permutation(rows)
        inner, outer = (
            [None if v is None else v[i] for v in data] for i in (order[held_out:], order[:held_out])
        )
        seed = int(generator.randint(np.iinfo(np.int32).max))
        twin = clone(self).set_params(calibrate=False, verbose=False, random_state=seed).fit(*inner)
        X, y, weights = outer
        part = twin._rows(X, twin.target_scaling_.apply(y), weights)
        twin.likelihood_.fit_noise(twin._predicted(part.inputs), part.targets, part.weights)
        found = twin.likelihood_.log_precision.detach()
        if not self.heteroscedastic:  # of targets that were in units of their deviation once more
            found = found - 2.0 * torch.as_tensor(np.log(twin.target_scaling_.scale)).to(found)
        with torch.no_grad():
            likelihood.log_precision.copy_(found)


def _held_out(rows: int) -> int:
    """How many of so many rows the noise is fitted to: a tenth, of few a quarter, of very few none.

    >>> [_held_out(rows) for rows in (60, 100, 400, 1000)]
    [0, 25, 50, 100]
    """
    part = max(rows // 10, min(rows // 4, 50))
    return part if part >= _LEAST else 0


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesianMLPRegressor(Regressor):
    """A Bayesian multi-layer perceptron for real targets, one or several.

    - ``hidden_layer_sizes``, ``activation`` ("relu", "tanh", "gelu", "silu", "elu", "logistic", "identity").
    - ``heteroscedastic``: noise that depends on x, in the place of one level for each target.
    - ``standardize_targets``: targets in units of their deviations; predictions come in the targets' own units.
    - ``calibrate``: scale the noise to rows that were not trained on, those of ``early_stopping``. Without, and for 80
      to 2,000 rows, a second network is trained on nine tenths of them to find the scale, which takes as long again.
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
    standardised inputs), ``likelihood_``, ``scaling_``, ``target_scaling_``, ``loss_curve_``, ``n_iter_``.

    >>> X = np.linspace(-1, 1, 64)[:, None]
    >>> model = BayesianMLPRegressor(epochs=60, random_state=0).fit(X, X[:, 0])
    >>> mean, std = model.predict([[0.5]], return_std=True)
    >>> bool(abs(mean[0] - 0.5) < 2 * std[0])
    True
    """

    hidden_layer_sizes: Any = (64,)
    activation: str = "relu"

    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        return dense_network(shape[0], self.hidden_layer_sizes, outputs, self.activation, dtype)


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesianNetRegressor(Regressor):
    """Any torch network, made Bayesian, for real targets.

    ``network`` is a module with one output per target (two if ``heteroscedastic``), which is copied, its weights
    included, before each fit; or a function of (n_features, n_outputs) that makes one. Rows may have any number of
    axes: the function then gets their shape in the place of n_features. The network keeps its number type, and inputs
    are not standardised unless asked for; targets are. The other parameters are those of ``BayesianMLPRegressor``.

    >>> X = np.linspace(-1, 1, 64)[:, None]
    >>> model = BayesianNetRegressor(network=nn.Linear(1, 1), epochs=2, method="MeanField").fit(X, X[:, 0])
    >>> model.predict(X).shape
    (64,)
    """

    network: Any = None
    standardize: bool = False

    _given = True

    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        return given_network(self.network, shape, outputs)
