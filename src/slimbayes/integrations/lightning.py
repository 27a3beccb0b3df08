"""Lightning: ``BayesianModule`` trains a converted network, ``KLAnnealing`` raises the weight of its KL.

For ``lightning.pytorch`` (the package ``lightning``); the older ``pytorch_lightning`` has classes of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes import extras
from slimbayes.core.conversion import find_record
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Categorical, Likelihood
from slimbayes.core.objective import LinearAnnealing, StepAnnealing, elbo, parameter_groups
from slimbayes.core.predict import predict, scored
from slimbayes.core.predictive import Predictive
from slimbayes.integrations.steps import Schedule, check_shares, schedule_of, size_of, unpack
from slimbayes.metrics import Evaluation
from slimbayes.training.monitor import spread_of
from slimbayes.verbs.evaluation import arguments

pl = extras.need("lightning.pytorch", "slimbayes.integrations.lightning", "lightning")

METRICS = ("nll", "accuracy", "ece", "rmse", "log_predictive_density")  # those of them that the task has
Batch = Any
_LIKELIHOOD = "slimbayes_likelihood"  # its key in a checkpoint


class BayesianModule(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A LightningModule whose loss is nll + kl_weight · KL / num_data of the converted ``network``.

    - ``num_data``: the number of training examples; by default that of the trainer's data module (its ``num_data``)
      or training data.
    - ``samples`` per component in training, ``predict_samples`` in validation, test and prediction.
    - ``optimizer``: a function of parameter groups, which gives what ``configure_optimizers`` may; AdamW by default.
    - ``metrics``: names of ``sb.evaluate``, or "all"; they are of the whole epoch, never averaged over batches.
    - ``unpack``: (inputs, targets) of a batch. By default a pair, or a mapping with "labels" or "targets".
    - ``select``: which tensor of a structured output is scored. ``shared_inputs`` as in ``sb.draw``.

    >>> import slimbayes as sb
    >>> module = BayesianModule(sb.bayesianize(nn.Linear(3, 2), sb.Rank1()), num_data=100, lr=1e-2)
    >>> round(module.training_step((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)), 0).item(), 1) > 0
    True
    """

    def __init__(
        self,
        network: nn.Module,
        num_data: int | None = None,
        likelihood: Likelihood | None = None,
        *,
        reduction: str = "average",
        samples: int = 1,
        predict_samples: int = 8,
        noise: str = "example",
        seed: int | None = 0,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        optimizer: Callable[[list[dict[str, Any]]], Any] = torch.optim.AdamW,
        kl_weight: float = 1.0,
        metrics: str | Sequence[str] = METRICS,
        unpack: Callable[[Batch], tuple[Any, Tensor | None]] = unpack,
        select: Callable[[Any], Tensor] | None = None,
        shared_inputs: Sequence[str | int] = (),
    ) -> None:
        super().__init__()
        find_record(network)
        self.network = network
        self.likelihood = Categorical() if likelihood is None else likelihood
        self._given_num_data = num_data
        self._found_num_data: int | None = None
        self.kl_weight, self.reduction = kl_weight, reduction
        self.samples, self.predict_samples, self.noise, self.seed = samples, predict_samples, noise, seed
        self.lr, self.weight_decay, self.optimizer = lr, weight_decay, optimizer
        self.metrics = metrics
        self.unpack, self.select, self.shared_inputs = unpack, select, tuple(shared_inputs)
        self.save_hyperparameters(ignore=["network", "likelihood", "optimizer", "unpack", "select"])
        self._evaluations: dict[int, Evaluation] = {}
        self._seen: Counter[int] = Counter()  # examples, by loader: what their noise is keyed by

    @property
    def num_data(self) -> int | None:
        """The number of training examples: what was given, else what the last fit found."""
        return self._found_num_data if self._given_num_data is None else self._given_num_data

    @num_data.setter
    def num_data(self, value: int | None) -> None:
        self._given_num_data = value

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The network's outputs, [components × samples, batch, ...]."""
        return draw(
            self.network,
            *inputs,
            samples=self.samples,
            noise=self.noise,
            shared_inputs=self.shared_inputs,
            **named,
        )

    def configure_optimizers(self) -> Any:
        """What the ``optimizer`` makes of ``sb.parameter_groups`` and of the likelihood's own parameters."""
        groups = parameter_groups(self.network, self.lr, self.weight_decay)
        learned = [parameter for parameter in self.likelihood.parameters() if parameter.requires_grad]
        if learned:
            groups.append({"name": "likelihood", "params": learned, "lr": self.lr, "weight_decay": 0.0})
        return self.optimizer(groups)

    def on_train_start(self) -> None:
        """Find the number of training examples where it was not given, anew in every fit."""
        if self._given_num_data is None:
            self._found_num_data = _num_data(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note the likelihood: one without parameters leaves no trace in the state."""
        checkpoint[_LIKELIHOOD] = {"kind": type(self.likelihood).__name__, "options": repr(self.likelihood)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise if the checkpoint is of another kind of likelihood."""
        saved, kind = checkpoint.get(_LIKELIHOOD), type(self.likelihood).__name__
        if saved is not None and saved["kind"] != kind:
            raise ValueError(
                f"the checkpoint was trained with {saved['options']}, and this module has {self.likelihood!r}: pass "
                f"likelihood=sb.{saved['kind']}(...), which checkpoints do not hold"
            )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch; logs train_loss, train_nll, train_kl and kl_weight."""
        inputs, targets = self._pair(batch)
        args, named = arguments(inputs)
        draws = scored(self(*args, **named), self.select)
        found = elbo(
            draws,
            targets,
            self.network,
            self.num_data,
            self.likelihood,
            self.reduction,
            kl_weight=self.kl_weight,
        )
        if self._attached:
            size = len(targets)
            self.log("train_loss", found.loss.detach(), prog_bar=True, batch_size=size)
            values = {
                "train_nll": found.nll.detach(),
                "train_kl": found.kl.detach(),
                "kl_weight": self.kl_weight,
            }
            self.log_dict(values, batch_size=size)
        return found.loss

    def on_train_epoch_end(self) -> None:
        """Log component_spread where there are components: near 0 they are copies of one network."""
        self.log_dict(spread_of(self.network))

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics of the epoch."""
        self._assess(batch, dataloader_idx)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics of the epoch."""
        self._assess(batch, dataloader_idx)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Predictive:
        """The predictive of a batch; ``sb.Predictive.cat(trainer.predict(...))`` is that of all."""
        return self._predict(self.unpack(batch)[0], dataloader_idx)

    def on_validation_epoch_start(self) -> None:
        """Begin anew."""
        self._begin()

    def on_test_epoch_start(self) -> None:
        """Begin anew."""
        self._begin()

    def on_predict_epoch_start(self) -> None:
        """Begin anew."""
        self._begin()

    def on_validation_epoch_end(self) -> None:
        """Log val_nll, val_accuracy, val_ece, or val_nll, val_rmse, val_log_predictive_density."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log the same as test_nll and so on."""
        self._log_metrics("test")

    @property
    def _attached(self) -> bool:
        return self._trainer is not None

    def _pair(self, batch: Batch) -> tuple[Any, Tensor]:
        inputs, targets = self.unpack(batch)
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"the batch, a {type(batch).__name__}, has no targets: give pairs (inputs, targets), a mapping with "
                "'labels', or unpack=, a function that gives (inputs, targets)"
            )
        return inputs, targets

    def _begin(self) -> None:
        self._evaluations, self._seen = {}, Counter()

    def _predict(self, inputs: Any, loader: int) -> Predictive:
        args, named = arguments(inputs)
        seed = self.seed
        if seed is not None and self._attached:
            seed += self.global_rank << 32  # examples are counted by each process for itself
        # What is kept from one prediction to the next must not be an inference tensor: training uses it too.
        with torch.inference_mode(False):
            found = predict(
                self.network,
                *args,
                samples=self.predict_samples,
                noise=self.noise,
                seed=seed,
                likelihood=self.likelihood,
                shared_inputs=self.shared_inputs,
                select=self.select,
                first_example=self._seen[loader],
                **named,
            )
        if self._attached:
            self._seen[loader] += len(found)
        return found

    def _assess(self, batch: Batch, loader: int) -> None:
        inputs, targets = self._pair(batch)
        if loader not in self._evaluations:
            self._evaluations[loader] = Evaluation(find_record(self.network).components)
        self._evaluations[loader].update(self._predict(inputs, loader), targets)

    def _log_metrics(self, stage: str) -> None:
        for loader, evaluation in self._evaluations.items():
            found = evaluation.gather().compute()
            del found["examples"]
            names = found if self.metrics == "all" else [name for name in self.metrics if name in found]
            tail = f"/dataloader_idx_{loader}" if len(self._evaluations) > 1 else ""
            # All processes have the same value: their mean is that value.
            self.log_dict(
                {f"{stage}_{name}{tail}": found[name] for name in names},
                sync_dist=True,
                add_dataloader_idx=False,
            )
        self._evaluations = {}


class KLAnnealing(pl.Callback):  # type: ignore[misc, name-defined]
    """Sets ``kl_weight`` of a ``BayesianModule`` before every batch, by the number of optimizer steps so far.

    ``schedule`` is the share of the run's steps by which the weight has grown linearly to 1 (0 before the share
    ``start``), or a function of the step: ``sb.LinearAnnealing(steps)``, ``sb.StepAnnealing(coefficient, every)`` or
    your own. Batches whose gradients are accumulated have one weight. Checkpoints keep the schedule in steps, so that a
    resumed run goes on with it even if its length is another.

    >>> import slimbayes as sb
    >>> KLAnnealing(0.5), KLAnnealing(sb.LinearAnnealing(100))
    (KLAnnealing(0.5), KLAnnealing(LinearAnnealing(steps=100, start=0)))
    """

    def __init__(self, schedule: float | Schedule = 0.8, start: float = 0.0) -> None:
        if not callable(schedule):
            check_shares(schedule, start)
        elif start:
            raise ValueError(
                f"start={start!r} goes with a share of the run; {schedule!r} is a schedule of its own"
            )
        self.schedule, self.start = schedule, start
        self._loaded: Schedule | None = None  # of a checkpoint, for the next start alone
        self._resolved: Schedule | None = None  # of the run, kept after its end for checkpoints written then
        self._full: float | None = None  # the module's own weight, while it trains

    def __repr__(self) -> str:
        tail = f", start={self.start}" if self.start else ""
        return f"KLAnnealing({self.schedule!r}{tail})"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Turn a share into steps of this run, or go on with the schedule of a checkpoint."""
        if not hasattr(pl_module, "kl_weight"):
            raise TypeError(
                f"KLAnnealing sets kl_weight, which {type(pl_module).__name__} does not have: train a BayesianModule, "
                "or give your module that attribute and use it in its loss"
            )
        self._full = pl_module.kl_weight
        self._resolved, self._loaded = self._loaded, None
        if self._resolved is None:
            self._resolved = schedule_of(self.schedule, trainer.estimated_stepping_batches, self.start)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the weight."""
        assert self._resolved is not None and self._full is not None
        pl_module.kl_weight = self._full * self._resolved(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module its own weight back."""
        self._give_back(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the module its own weight back."""
        self._give_back(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget a schedule that a test or a validation loaded with its checkpoint: no run goes on with it."""
        self._loaded = None

    def _give_back(self, pl_module: Any) -> None:
        if self._full is not None:
            pl_module.kl_weight, self._full = self._full, None

    def state_dict(self) -> dict[str, Any]:
        """The schedule as numbers; one of your own is not kept."""
        known = self._resolved if self._loaded is None else self._loaded
        if type(known) in (LinearAnnealing, StepAnnealing):
            return {"kind": type(known).__name__, "values": dict(vars(known))}
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the saved schedule, unless this one has another given in steps."""
        if state_dict and not callable(self.schedule):
            kinds: dict[str, Any] = {"LinearAnnealing": LinearAnnealing, "StepAnnealing": StepAnnealing}
            self._loaded = kinds[state_dict["kind"]](**state_dict["values"])


def _num_data(trainer: Any) -> int:
    known = getattr(trainer.datamodule, "num_data", None)
    found = known if isinstance(known, int) else size_of(trainer.train_dataloader)
    if not found:
        raise ValueError(
            "the number of training examples is unknown, because the training data do not say how long they are or "
            "their loader has batch_size=None, by which an item may be a whole batch: pass "
            "BayesianModule(network, num_data=...), which scales the KL"
        )
    return found
