"""What the estimators share: parameters, fitting by the loop, draws for prediction, nested parameters of methods."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.core.convert import bayesianize
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Likelihood
from slimbayes.core.methods import Method
from slimbayes.core.predict import predict, scored
from slimbayes.core.predictive import Predictive
from slimbayes.core.probes import evaluating
from slimbayes.sklearn.loop import BATCH, Outcome, Plan, Rows, make_optimizer, train, train_noise
from slimbayes.sklearn.parameters import check_parameters, chosen_device, dtype_of, place_of, resolve
from slimbayes.sklearn.saving import read, write
from slimbayes.sklearn.scaling import Standardization

NESTED = "method__"
# Random signs set the components apart, and this prior holds both signs to be as likely. The mean over components
# bounds the KL of their mixture, so that a weight of 1 is an ELBO; the sum, K times as much, underfits tables of a few
# hundred rows.
METHOD = "Rank1()"


def _shared(values: Any) -> Tensor:
    """An array as a tensor; read-only ones, which torch does not take, are copied."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


@dataclass(eq=False, repr=False, kw_only=True)
class Estimator(BaseEstimator, ABC):  # type: ignore[misc]
    """An sb model behind scikit-learn's interface.

    Constructor arguments are stored as they are given and checked by fit, as scikit-learn wants it; the classes are
    dataclasses to have them in one place.
    """

    method: Any = METHOD
    epochs: int = 100
    batch_size: Any = "auto"
    lr: float = 5e-3
    weight_decay: float = 0.5
    kl_weight: float = 1.0
    kl_annealing: float = 0.5
    num_data: float | None = None
    train_samples: int = 1
    samples: int = 16
    noise: str = "auto"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    random_state: Any = None
    device: Any = "cpu"
    verbose: bool = False
    standardize: bool = True

    _given = False  # whether the network is the user's own: its rows may have any number of axes
    _stratified = False  # whether held-out rows are to have the classes of the others

    @abstractmethod
    def _targets(self, y: Any, weights: Any, first: bool) -> Any:
        """Targets as numbers for the likelihood; ``first`` sets what is learned from them: classes, scaling."""

    @abstractmethod
    def _target_options(self) -> dict[str, Any]:
        """What scikit-learn's validation is told of the targets."""

    @abstractmethod
    def _likelihood(self) -> tuple[Likelihood, int]:
        """The likelihood of these targets, and the outputs that it wants of the network."""

    @abstractmethod
    def _network(self, shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
        """The plain network for rows of this shape."""

    @abstractmethod
    def _calibrate(self, data: Any, validation: Rows | None, generator: Any) -> None:
        """Fit what the likelihood learns to rows that were not trained on; ``data``: those that were."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train a new network on rows ``X`` and targets ``y``; returns the estimator.

        The loss is −Σ_i (w_i/W) E_q[log p(y_i|x_i, θ)] + kl_weight · β_t · KL(q‖p)/W with W = Σ_i w_i, the weighted
        ELBO per unit of weight: a row of weight 2 counts as the same row twice, one of weight 0 as absent.
        """
        with self._anew():
            X, y, weights = self._begin(X, y, sample_weight, first=True)
            with self._randomness() as generator:
                data, held_out = (X, y, weights), None
                if self.early_stopping:
                    data, held_out = self._hold_out(X, y, weights, generator)
                rows = self._start(*data)
                validation = None if held_out is None else self._rows(*held_out)
                plan = self._plan(rows.total, len(rows))
                optimizer = make_optimizer(self.model_, self.likelihood_, plan)
                outcome = train(self.model_, self.likelihood_, rows, plan, optimizer, validation)
                self._calibrate(data, validation, generator)
            self._finish(outcome, rows, first=True)
        return self

    @contextmanager
    def _anew(self) -> Iterator[None]:
        """Not fitted until this ends well: an old network, or half a new one, does not fit the new scaling."""
        self._forget()
        try:
            yield
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        for name in ("model_", "_optimizer"):
            self.__dict__.pop(name, None)

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """One epoch over these rows, from where the last call ended."""
        first = not hasattr(self, "model_")
        with self._anew() if first else nullcontext():
            X, y, weights = self._begin(X, y, sample_weight, first)
            with self._randomness(advance=not first):
                rows = self._start(X, y, weights) if first else self._rows(X, y, weights)
                seen = 0.0 if first else self.weight_seen_
                plan = self._plan(seen + rows.total, len(rows), continued=True)
                if "_optimizer" not in self.__dict__:
                    self._optimizer = make_optimizer(self.model_, self.likelihood_, plan)
                outcome = train(self.model_, self.likelihood_, rows, plan, self._optimizer)
            self._finish(outcome, rows, first)
        return self

    def _check_input(self, X: Any, **options: Any) -> Any:
        dtypes = (np.float64, np.float32)
        return validate_data(self, X, dtype=dtypes, allow_nd=self._given, **options)

    def _begin(self, X: Any, y: Any, sample_weight: Any, first: bool) -> tuple[Any, Any, Any]:
        """Checked rows, targets and weights, without the rows that count nothing."""
        check_parameters(self)
        X, y = self._check_input(X, y=y, reset=first, **self._target_options())
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        y = self._targets(y, weights, first)
        if weights is not None and not weights.all():
            counted = weights > 0
            X, y, weights = X[counted], y[counted], weights[counted]
        return X, y, weights

    def _start(self, X: Any, y: Any, weights: Any) -> Rows:
        """A new model for these rows."""
        device = chosen_device(self.device)
        dtype = torch.float64 if X.dtype == np.float64 and device.type != "mps" else torch.float32
        self.scaling_ = Standardization.of(X, weights, self.standardize)
        self._row_shape = X.shape[1:]
        self._build(lambda network: bayesianize(network, resolve(self.method)), dtype)
        rows = self._rows(X, y, weights)
        if self._given:
            self._check_outputs(rows.inputs[:2])
        return rows

    def _check_outputs(self, inputs: Tensor) -> None:
        """Raise unless a network of the user's own has as many outputs as the targets need."""
        with torch.no_grad(), evaluating(self.model_):
            shape = list(scored(draw(self.model_, inputs, noise="mean")).shape[1:])
        wanted = [len(inputs), self._likelihood()[1]]
        if shape != wanted:
            kind = type(self.model_).__name__
            raise ValueError(
                f"the network ({kind}) gives outputs {shape} for {len(inputs)} rows, and these targets need {wanted}: "
                f"one for each class, or for each real target (two with heteroscedastic=True)"
            )

    def _build(self, convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype) -> None:
        device = chosen_device(self.device)
        likelihood, outputs = self._likelihood()
        model = convert(self._network(self._row_shape, outputs, dtype))
        self.model_ = model.to(device)
        self.likelihood_ = likelihood.to(device=device, dtype=dtype_of(model))

    def _rows(self, X: Any, y: Any, weights: Any) -> Rows:
        dtype, device = dtype_of(self.model_), place_of(self.model_)
        targets = _shared(y).to(device)
        if targets.is_floating_point():
            targets = targets.to(dtype)
        total, relative = float(len(X)), None
        if weights is not None:
            total = float(weights.sum())
            if weights.min() < weights.max():
                relative = torch.as_tensor(weights * (len(X) / total)).to(device, dtype)
        return Rows(self._tensor(X), targets, relative, total)

    def _tensor(self, X: Any) -> Tensor:
        values = _shared(self.scaling_.apply(X))
        return values.to(dtype_of(self.model_)).to(place_of(self.model_))

    def _plan(self, total: float, rows: int, continued: bool = False) -> Plan:
        size = BATCH if self.batch_size == "auto" else int(self.batch_size)
        return Plan(
            epochs=1 if continued else int(self.epochs),  # NumPy's integers are no int to torch
            batch_size=min(size, rows),
            lr=self.lr,
            weight_decay=self.weight_decay,
            kl_weight=self.kl_weight,
            kl_annealing=0.0 if continued else self.kl_annealing,
            samples=int(self.train_samples),
            noise=train_noise(self.noise, self.model_),
            num_data=total if self.num_data is None else float(self.num_data),
            patience=int(self.n_iter_no_change) if self.early_stopping and not continued else None,
            decay_lr=not continued,
            say=print if self.verbose else None,
        )

    def _finish(self, outcome: Outcome, rows: Rows, first: bool) -> None:
        before = (0, 0.0, []) if first else (self.n_iter_, self.weight_seen_, self.loss_curve_)
        self.n_iter_: int = before[0] + outcome.epochs
        self.weight_seen_: float = before[1] + rows.total
        self.loss_curve_: list[float] = [*before[2], *outcome.losses]
        self.validation_curve_ = outcome.held_out or None

    def _hold_out(self, X: Any, y: Any, weights: Any, generator: Any) -> tuple[Any, Any]:
        """Rows to train on, and rows that early stopping looks at."""
        index = np.arange(len(X))
        try:
            inner, outer = train_test_split(
                index,
                test_size=self.validation_fraction,
                random_state=generator,
                stratify=y if self._stratified else None,
            )
        except ValueError as error:
            raise ValueError(
                f"early_stopping cannot hold out validation_fraction={self.validation_fraction!r} of {len(X)} rows: "
                f"{error}. Give more rows, another fraction, or early_stopping=False"
            ) from error
        parts = [(X[i], y[i], None if weights is None else weights[i]) for i in (inner, outer)]
        return parts[0], parts[1]

    @contextmanager
    def _randomness(self, advance: bool = False) -> Iterator[Any]:
        """Torch's generators seeded by random_state, and as they were afterwards."""
        generator = check_random_state(self.random_state)
        seed = int(generator.randint(np.iinfo(np.int32).max))
        if not advance:
            self._seed = int(generator.randint(np.iinfo(np.int32).max))  # of predictions
        device = chosen_device(self.device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed + self.n_iter_ if advance else seed)
            yield generator

    def _predictive(self, X: Any) -> Predictive:
        """The predictive distribution of the targets that the likelihood sees, one function per draw."""
        check_is_fitted(self, "model_")
        return self._predicted(self._tensor(self._check_input(X, reset=False))).cpu()

    def _predicted(self, inputs: Tensor) -> Predictive:
        noisy = any(method.traits.noisy for method in find_record(self.model_).methods)
        return predict(
            self.model_,
            inputs,
            samples=int(self.samples) if noisy else 1,
            noise="shared",
            seed=self._seed,
            likelihood=self.likelihood_,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one safetensors file, which ``load`` reads without executing code.

        The state of the optimizer is not kept: ``partial_fit`` goes on with a new one. A ``network`` of one's own is
        code, and given to ``load`` again.
        """
        check_is_fitted(self, "model_")
        write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], network: Any = None, device: Any = None) -> Any:
        """The estimator that ``save`` wrote; ``device`` in the place of the one that it was fitted on."""
        return read(path, {cls.__name__: cls}, network, device)

    def _restore(
        self, convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype, learned: dict[str, Tensor]
    ) -> None:
        """The model as it was saved."""
        self._build(convert, dtype)
        self.model_.eval()
        self.likelihood_.load_state_dict(learned)
        self.likelihood_.requires_grad_(False)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; with ``deep`` also the method's own, as ``method__components``."""
        params: dict[str, Any] = super().get_params(deep=deep)
        if deep:
            try:
                method = resolve(self.method)
            except (TypeError, ValueError):  # fit says what is wrong with it
                return params
            if isinstance(method, Method):
                fields = dataclasses.fields(method)  # type: ignore[arg-type]
                params.update({NESTED + item.name: getattr(method, item.name) for item in fields})
        return params

    def set_params(self, **params: Any) -> Any:
        """Set parameters; ``method__components=8`` changes one of the method's own."""
        nested = {name.removeprefix(NESTED): params[name] for name in params if name.startswith(NESTED)}
        super().set_params(**{name: value for name, value in params.items() if not name.startswith(NESTED)})
        if nested:
            method = resolve(self.method)
            known = [item.name for item in dataclasses.fields(method)] if isinstance(method, Method) else []  # type: ignore[arg-type]
            unknown = sorted(set(nested) - set(known))
            if unknown:
                raise ValueError(f"Invalid parameter {NESTED + unknown[0]!r}: {method!r} has {known}")
            self.method = dataclasses.replace(method, **nested)  # type: ignore[type-var]
        return self
