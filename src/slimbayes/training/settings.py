"""Everything that shapes a training run, as one frozen dataclass that a YAML file can hold."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slimbayes.core.objective import REDUCTIONS, StepAnnealing, parameter_groups

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "steps")
ON_NONFINITE = ("stop", "skip")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
LEAST_STEPS = 1000  # of a run whose length nobody chose: 30 epochs of 800 rows are 200 steps, too few
_EPOCHS = 30


def whole_number(value: object) -> bool:
    """Whether a value from a file is an integer; true and false are none.

    >>> whole_number(3), whole_number(True), whole_number(3.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def real_number(value: object) -> bool:
    """Whether a value from a file is a finite number that a float can hold.

    >>> real_number(0.5), real_number("0.5"), real_number(float("nan")), real_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**1000


@dataclass(frozen=True)
class Training:
    """Settings of ``sb.fit``. Times are in epochs, or in fractions of the whole run where said.

    lr(t) = lr · warmup(t) · schedule(t); loss(t) = nll + kl_weight · β(t) · KL / num_data, with
    β(t) growing linearly from 0 at kl_start · steps to 1 at kl_annealing · steps. Schedules in fractions of the run
    keep their proportions when a run is shortened, as the rank-1 paper scales its own.

    >>> Training(epochs=2, lr=0.1, schedule="cosine").multiplier(step=5, steps=10, per_epoch=5)
    0.5
    """

    epochs: int | None = None  # None: 30, or as many more as small data need for ``LEAST_STEPS``
    steps: int | None = None  # stop after so many steps, whatever the epochs
    batch_size: int = 128  # over all processes
    optimizer: str = "adamw"
    lr: float = 1e-3
    momentum: float = 0.9  # of SGD, with Nesterov's step
    weight_decay: float = 0.0  # AdamW only: decoupled
    l2: float = 0.0  # SGD and Adam: l2 · Σw² in the loss, as the papers write it (torch's weight_decay / 2)
    decay_norms: bool = True  # whether l2 and weight_decay touch what belongs to norms
    factor_lr_multiplier: float = 1.0  # of rank-1 factors
    schedule: str = "cosine"
    milestones: tuple[float, ...] = (
        0.4,
        0.8,
        0.9,
    )  # "steps": fractions of the run, here 100, 200, 225 of 250
    decay: float = 0.2  # "steps": the factor at each milestone
    warmup: float = 0.0  # epochs of linear warm-up from 0
    kl_weight: float = 1.0
    kl_annealing: float = (
        0.8  # fraction of the run by which the KL's weight has grown linearly; 0: from the first step
    )
    kl_start: float = 0.0  # fraction of the run before which it is 0
    kl_coefficient: float | None = (
        None  # instead: the weight grows by this per step, as the k-tied paper's does,
    )
    kl_every: int = 100  # and is raised once in so many steps
    samples: int = 1  # per component and step
    split_batch: bool = (
        False  # whether components share the images of a step instead of each seeing all of them
    )
    noise: str = "example"
    reduction: str = "average"
    averaging: float = (
        0.0  # the last part of the run whose mean of all weights is the result; 0: the last step's
    )
    clip_norm: float | None = None
    on_nonfinite: str = "stop"  # or "skip": what becomes of a step whose loss or gradients are not finite
    max_skips: int = 10  # steps left out in a row before the run stops all the same
    precision: str = "32-true"
    compile: bool = False
    capture: bool = False  # record the step as a CUDA graph and replay it: one GPU, batches of one shape
    channels_last: bool = True  # networks with 2-d convolutions
    augment: bool = True  # crops and flips, where the data set allows them
    early_stopping: int | None = None  # validations without a better NLL before the run stops
    validate_every: int = 1  # epochs
    validation_samples: int = 1
    checkpoint_every: int | None = None  # steps; None: at the end of every epoch
    log_every: int = 50  # steps
    workers: int = 4  # processes that read and decode streamed images
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("reduction", REDUCTIONS),
            ("noise", ("example", "shared", "mean")),
            ("on_nonfinite", ON_NONFINITE),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}")
        self._check_numbers()
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"weight_decay={self.weight_decay} goes with optimizer='adamw'; for {self.optimizer!r} set "
                f"weight_decay=0 and give l2, the papers' coefficient of Σw² (l2={self.weight_decay / 2:g})"
            )
        if self.split_batch and (self.samples > 1 or self.reduction != "average"):
            raise ValueError(
                f"split_batch=True gives every example one draw, which leaves nothing to average: "
                f"samples={self.samples} and reduction={self.reduction!r} need it off"
            )
        if self.l2 and self.optimizer == "adamw":
            raise ValueError(f"l2={self.l2} goes with 'sgd' and 'adam'; for 'adamw' give weight_decay")

    def _check_types(self) -> None:
        """A file may hold anything: text, lists and nothing where numbers belong."""
        for name in ("compile", "capture", "channels_last", "augment", "decay_norms", "split_batch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.accelerator, str):
            raise ValueError(f"accelerator must be a name such as 'auto' or 'cpu', got {self.accelerator!r}")
        if not (whole_number(self.seed) and abs(self.seed) < 2**63):
            raise ValueError(f"seed must be a whole number of at most 63 bits, got {self.seed!r}")
        if not isinstance(self.milestones, (list, tuple)) or not all(map(real_number, self.milestones)):
            raise ValueError(f"milestones must be a list of numbers, got {self.milestones!r}")

    def _check_numbers(self) -> None:
        whole = (
            "epochs", "batch_size", "samples", "validate_every", "validation_samples", "log_every", "kl_every",
            "max_skips",
        )  # fmt: skip
        for name in (*whole, "devices", "num_nodes", "steps", "checkpoint_every", "early_stopping"):
            value = getattr(self, name)
            may_miss = name in ("epochs", "steps", "checkpoint_every", "early_stopping")
            if not (may_miss and value is None) and not (whole_number(value) and value >= 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not (whole_number(self.workers) and self.workers >= 0):
            raise ValueError(f"workers must be a whole number of at least 0, got {self.workers!r}")
        numbers = (
            "momentum",
            "weight_decay",
            "l2",
            "factor_lr_multiplier",
            "decay",
            "warmup",
            "kl_weight",
            "averaging",
        )
        optional = [name for name in ("clip_norm", "kl_coefficient") if getattr(self, name) is not None]
        for name in ("lr", *numbers, "kl_annealing", "kl_start", *optional):
            value = getattr(self, name)
            least = "above 0" if name in ("lr", "clip_norm", "kl_coefficient") else "of at least 0"
            if not real_number(value) or value < 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"{name} must be a finite number {least}, got {value!r}")
        if self.averaging > 1:
            raise ValueError(f"averaging={self.averaging} is a part of the run, between 0 and 1, say 0.1")
        if max(self.kl_annealing, self.kl_start) > 1 or not all(0 <= m <= 1 for m in self.milestones):
            raise ValueError(
                f"kl_annealing={self.kl_annealing}, kl_start={self.kl_start} and milestones={self.milestones} are "
                f"fractions of the run, between 0 and 1: epoch 100 of 250 is 0.4"
            )
        if self.kl_start and (self.kl_coefficient is not None or self.kl_start >= self.kl_annealing):
            other = f"kl_annealing={self.kl_annealing}" if self.kl_coefficient is None else "a kl_coefficient"
            raise ValueError(
                f"kl_start={self.kl_start} goes with a later kl_annealing, by which the KL's weight is whole, and not "
                f"with {other}"
            )

    def length(self, per_epoch: int) -> int:
        """The steps of a run over data of so many steps an epoch.

        >>> Training().length(2), Training().length(500), Training(epochs=3).length(2), Training(steps=7).length(2)
        (1000, 15000, 6, 7)
        """
        if self.steps is not None:
            return self.steps
        epochs = max(_EPOCHS, -(-LEAST_STEPS // per_epoch)) if self.epochs is None else self.epochs
        return epochs * per_epoch

    def multiplier(self, step: int, steps: int, per_epoch: int) -> float:
        """The learning rate at a step, as a fraction of ``lr``."""
        progress = step / max(1, steps)
        factor = 1.0
        if self.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * progress))
        elif self.schedule == "steps":
            factor = self.decay ** sum(progress >= milestone for milestone in self.milestones)
        ramp = self.warmup * per_epoch
        return factor * min(1.0, (step + 1) / ramp) if ramp > 0 else factor

    def kl_factor(self, step: int, steps: int) -> float:
        """The weight of the KL at a step: kl_weight · (step + 1 − a) / (b − a), of at least 0 and at most kl_weight.

        a = kl_start · steps and b = kl_annealing · steps; with a = 0 it is the rank-1 paper's (``sb.LinearAnnealing``).
        With a ``kl_coefficient`` c it is kl_weight · min(1, c · kl_every · ⌊step / kl_every⌋) (``sb.StepAnnealing``).

        >>> [Training(kl_annealing=0.5).kl_factor(step, 8) for step in (0, 3, 7)]
        [0.25, 1.0, 1.0]
        >>> [Training(kl_start=0.5, kl_annealing=1.0).kl_factor(step, 8) for step in (3, 4, 7)]
        [0.0, 0.25, 1.0]
        >>> [Training(kl_coefficient=5e-4).kl_factor(step, 5000) for step in (99, 150, 4000)]
        [0.0, 0.05, 1.0]
        """
        if self.kl_coefficient is not None:
            return self.kl_weight * StepAnnealing(self.kl_coefficient, self.kl_every)(step)
        start = self.kl_start * steps
        ramp, done = self.kl_annealing * steps - start, step + 1 - start
        return self.kl_weight * (min(1.0, max(0.0, done) / ramp) if ramp >= 1 else float(done > 0))

    def make_optimizer(
        self, model: nn.Module, others: Iterable[nn.Parameter] = (), fused: bool = False
    ) -> torch.optim.Optimizer:
        """The optimizer over ``sb.parameter_groups`` and, undecayed, other parameters (a learned precision).

        ``fused``: torch's fused kernels, which leave a step out where a tensor on the device says so.
        """
        groups = self.optimizer_groups(model, others)
        if self.capture:  # a recorded step reads the rates from the device, where a schedule can change them
            device = next(model.parameters()).device
            groups = [{**group, "lr": torch.tensor(group["lr"], device=device)} for group in groups]
            return self.optimizer_over(groups, fused=True)
        return self.optimizer_over(groups, fused=True) if fused else self.optimizer_over(groups)

    def optimizer_groups(self, model: nn.Module, others: Iterable[nn.Parameter] = ()) -> list[dict[str, Any]]:
        """``sb.parameter_groups`` with these settings' rates and decay and, undecayed, other parameters."""
        decay = self.weight_decay if self.optimizer == "adamw" else 2 * self.l2
        groups = parameter_groups(model, self.lr, decay, self.factor_lr_multiplier, self.decay_norms)
        rest = list(others)
        if rest:
            groups.append({"name": "likelihood", "params": rest, "lr": self.lr, "weight_decay": 0.0})
        return groups

    def optimizer_over(self, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        """The optimizer over these groups of parameters."""
        options = {"lr": self.lr, **options}
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.momentum > 0, **options)
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, capturable=self.capture, **options)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Training:
        """Settings from a mapping, for example of a YAML file; an unknown name is an error.

        >>> Training.from_dict({"epoch": 3})
        Traceback (most recent call last):
            ...
        ValueError: unknown training setting 'epoch'; did you mean 'epochs'?
        """
        names = [item.name for item in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
                raise ValueError(f"unknown training setting {key!r}; {hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {**dataclasses.asdict(self), "milestones": list(self.milestones)}
