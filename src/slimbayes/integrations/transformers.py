"""Hugging Face Trainer: ``BayesianTrainer`` draws members in training and evaluation; ``elbo_loss`` is a plain loss."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor, nn

from slimbayes import extras
from slimbayes.core.conversion import find_record
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Likelihood
from slimbayes.core.objective import ELBO, elbo, parameter_groups
from slimbayes.core.predict import predict, scored
from slimbayes.files import write_whole
from slimbayes.integrations.scoring import aligned, base_of, likelihood_of, mean_logits, shaped, whole
from slimbayes.integrations.steps import Schedule, check_shares, schedule_of

transformers = extras.need("transformers", "slimbayes.integrations.transformers", "transformers")
extras.need("accelerate", "the Trainer of transformers", "transformers")

_LIKELIHOOD = "likelihood.safetensors"


def with_rates(optimizer: torch.optim.Optimizer, rates: Mapping[int, float]) -> None:
    """Move parameters whose rate, by id, is not 1 to groups of their own, at that part of their group's learning rate.

    Their decay per step stays what it was.
    """
    for group in list(optimizer.param_groups):
        by_rate: dict[float, list[nn.Parameter]] = {1.0: []}
        for parameter in group["params"]:
            by_rate.setdefault(rates.get(id(parameter), 1.0), []).append(parameter)
        group["params"] = by_rate.pop(1.0)
        for rate, own in by_rate.items():
            quick = {"lr": group["lr"] * rate, "weight_decay": group["weight_decay"] / rate}
            optimizer.add_param_group({**group, **quick, "params": own})


class BayesianTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    """``transformers.Trainer`` for a converted model: its loss is nll + β(t) · kl_weight · KL / num_data.

    Takes what Trainer takes, and by name:

    - ``num_data``: the number of training examples (rows, not tokens), by default ``len(train_dataset)``.
    - ``likelihood``: by default that of the model's ``config.problem_type``: classes, several labels, or real targets.
    - ``samples`` per component in training, ``predict_samples`` in evaluation and prediction.
    - ``kl_annealing``: the share of all steps by which β has grown linearly to 1, or a schedule of the optimizer step
      such as ``sb.LinearAnnealing(1000)``. A resumed run goes on where it was.

    With accumulated gradients every example of a step has one weight and the KL counts once, however the rows are
    divided. The loss is per row: token labels of a row are summed, those that are −100 left out. Predictions, and with
    them what ``compute_metrics`` gets, are log p̄ of the mean probability over all draws (log-odds for several labels,
    means for real targets), so that argmax and softmax mean what they should; eval_loss is −log p̄(y). Weight decay
    leaves alone what has a prior of its own, as ``sb.parameter_groups``.
    """

    loss_is_scaled_for_ga = (
        False  # Trainer divides what compute_loss gives by the number of batches of a step
    )

    def __init__(
        self,
        *args: Any,
        num_data: int | None = None,
        likelihood: Likelihood | None = None,
        samples: int = 1,
        predict_samples: int = 8,
        reduction: str = "average",
        noise: str = "example",
        seed: int | None = 0,
        kl_weight: float = 1.0,
        kl_annealing: float | Schedule = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        find_record(self.model)
        if options.get("compute_loss_func") is not None:
            raise ValueError(
                "BayesianTrainer has a loss of its own: use transformers.Trainer with compute_loss_func, such as "
                "elbo_loss(model, num_data), or leave it out"
            )
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} is no part of a likelihood: set it to 0; "
                "what it is for, predictions that are not too sure, the draws are for"
            )
        if not callable(kl_annealing):
            check_shares(kl_annealing, 0.0)
        if num_data is None and self.train_dataset is not None:
            if not hasattr(self.train_dataset, "__len__"):
                raise ValueError(
                    "the training data do not say how many they are: pass num_data=, which scales the KL"
                )
            num_data = len(self.train_dataset)
        self.num_data = num_data
        self.likelihood = likelihood_of(self.model) if likelihood is None else likelihood
        self.likelihood.to(self.args.device)
        self.samples, self.predict_samples, self.reduction = samples, predict_samples, reduction
        self.noise, self.seed = noise, seed
        self.kl_weight, self.kl_annealing = kl_weight, kl_annealing
        self.model_accepts_loss_kwargs = False  # the model never sees labels: its own loss is not asked for
        self._step_rows, self._step_batches = 0, 1
        self._evaluated = 0  # examples so far: what their noise is keyed by
        self._sums: list[Tensor] = []  # [nll, kl] of the batches since the last log
        self._last_weight = 0.0
        if any(True for _ in self.likelihood.parameters()):
            self.add_callback(_LearnLikelihood(self.likelihood))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Trainer's own; a likelihood that learns is resumed with the model, the best one included."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = transformers.trainer_utils.get_last_checkpoint(self.args.output_dir)
        if isinstance(folder, (str, os.PathLike)):
            _restore(self.likelihood, folder)
        found = super().train(resume_from_checkpoint, *args, **options)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            _restore(self.likelihood, self.state.best_model_checkpoint)
        return found

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *rest: Any) -> Any:
        """The batches of one step, whose rows are counted: all weigh the same."""
        found = super().get_batch_samples(epoch_iterator, num_batches, *rest)
        self._step_rows, self._step_batches = sum(map(_rows, found[0])), len(found[0])
        return found

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **options: Any
    ) -> Any:
        """The negative ELBO of a batch; ``return_outputs`` adds the draws."""
        inputs, labels = self._split(inputs)
        if labels is None:
            raise ValueError(
                f"the batch has no {self._label!r}, only {', '.join(inputs)}: the loss needs the targets"
            )
        weight = self._weight()

        def objective(network: nn.Module) -> tuple[Tensor, Tensor, Tensor, Any]:
            output = draw(network, samples=self.samples, noise=self.noise, **inputs)
            draws, targets = aligned(network, scored(output), shaped(labels, self.likelihood))
            found = elbo(
                draws, targets, network, self.num_data, self.likelihood, self.reduction, kl_weight=weight
            )
            return found.loss, found.nll, found.kl, output

        loss, nll, kl, output = whole(model, objective)
        if model.training:
            self._last_weight = weight
            self._sums.append(torch.stack((nll.detach(), kl.detach())))
            if self._step_rows:  # Trainer will divide by the number of batches: a batch counts by its rows
                loss = loss * (len(labels) * self._step_batches / self._step_rows)
        return (loss, output) if return_outputs else loss

    @torch.no_grad()  # of all of it: a likelihood that learns has gradients of its own, and results become numpy
    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(−log p̄(y) per row, log p̄, labels) of a batch, from ``predict_samples`` draws per component."""
        inputs, labels = self._split(self._prepare_inputs(inputs))
        seed = None if self.seed is None else self.seed + (self.args.process_index << 32)
        with self.compute_loss_context_manager():
            found = predict(
                model,
                samples=self.predict_samples,
                noise=self.noise,
                seed=seed,
                likelihood=self.likelihood,
                first_example=self._evaluated,
                **inputs,
            )
        self._evaluated += len(found)
        loss = None
        if labels is not None:
            draws, targets = aligned(model, found.draws, shaped(labels, self.likelihood))
            scored_at = found if draws is found.draws else self.likelihood.predictive(draws)
            loss = -scored_at.log_prob(targets).mean()
        return (loss, None, None) if prediction_loss_only else (loss, mean_logits(found), labels)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Trainer's own, with the noise of examples counted from the first."""
        self._evaluated = 0
        return super().evaluation_loop(*args, **options)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's own, without what has a prior: rank-1 factors, spreads, means of weights."""
        groups = parameter_groups(model, lr=1.0, weight_decay=1.0)
        decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
        ours = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
        return [name for name in super().get_decay_parameter_names(model) if name in ours]

    def create_optimizer(self, *args: Any) -> Any:
        """Trainer's own, with the rates of ``sb.parameter_groups``, and the parameters of a likelihood that learns."""
        given = self.optimizer is not None
        optimizer = super().create_optimizer(*args)
        if not given:
            groups = parameter_groups(self.model, lr=1.0, weight_decay=0.0)
            with_rates(optimizer, {id(p): group["lr"] for group in groups for p in group["params"]})
        learned = [parameter for parameter in self.likelihood.parameters() if parameter.requires_grad]
        if learned and not given:
            optimizer.add_param_group({"params": learned, "weight_decay": 0.0})
        return optimizer

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        """Trainer's own, with the mean nll and KL of the batches since the last log beside the loss."""
        if "loss" in logs and self._sums:
            nll, kl = torch.stack(self._sums).cpu().double().mean(0).tolist()
            logs = {**logs, "nll": nll, "kl": kl, "kl_weight": self._last_weight}
            self._sums = []
        super().log(logs, *rest)

    @property
    def _label(self) -> str:
        return str(self.label_names[0]) if self.label_names else "labels"

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        if len(self.label_names) > 1:
            raise ValueError(
                f"the model has several targets, {', '.join(self.label_names)}, and BayesianTrainer takes one: write "
                "your own compute_loss with sb.draw and sb.elbo"
            )
        rest = dict(inputs)
        labels = rest.pop(self._label, None)
        return rest, labels

    def _weight(self) -> float:
        steps = self.state.max_steps
        schedule = schedule_of(self.kl_annealing, steps if steps and steps > 0 else 1)
        return self.kl_weight * schedule(self.state.global_step)


class _LearnLikelihood(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """What Trainer does for the parameters of its model alone, done for those of a likelihood that learns."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Forget the gradients of the last step."""
        self.likelihood.zero_grad()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Average the gradients of all processes, and what each has found by its own residuals."""
        if args.world_size > 1:
            found = [value for value in self.likelihood.state_dict().values() if value.is_floating_point()]
            gradients = [p.grad for p in self.likelihood.parameters() if p.grad is not None]
            for value in (*found, *gradients):
                torch.distributed.all_reduce(value)
                value /= args.world_size

    def on_save(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Write them beside the model's checkpoint, in the first process."""
        if state.is_world_process_zero:
            folder = Path(
                args.output_dir, f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            )
            values = {name: value.detach().cpu() for name, value in self.likelihood.state_dict().items()}
            write_whole(folder / _LIKELIHOOD, serialize(values))


def _restore(likelihood: Likelihood, folder: str | os.PathLike[str]) -> None:
    path = Path(folder, _LIKELIHOOD)
    if path.is_file():
        likelihood.load_state_dict(deserialize(path.read_bytes()))


def elbo_loss(
    model: nn.Module,
    num_data: int,
    likelihood: Likelihood | None = None,
    kl_weight: float | Callable[[], float] = 1.0,
) -> Callable[..., Tensor]:
    """A ``compute_loss_func`` for the Trainer as it is: nll + kl_weight · KL / num_data, one draw of every example.

    Trainer calls ``model(**inputs)``, in which every example has one draw, and with K components one of them: batches
    must be multiples of K (``dataloader_drop_last=True``). The share of the KL is that of the batch in
    ``num_items_in_batch``, so that it counts once in a step of several batches. Evaluation by Trainer itself has one
    draw, too: ``BayesianTrainer`` takes all.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    >>> y = torch.tensor([0, 1, 1, 0])
    >>> loss = elbo_loss(net, num_data=100)({"logits": net(torch.ones(4, 3))}, y, num_items_in_batch=4)
    >>> bool(loss > sb.kl(net) / 100)
    True
    """
    find_record(model)
    scorer = likelihood_of(model) if likelihood is None else likelihood
    shifted = _counts_shifted(model)

    def compute_loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else scored(outputs)
        draws, targets = aligned(model, logits.unsqueeze(0), shaped(labels, scorer))
        weight = kl_weight() if callable(kl_weight) else kl_weight
        found: ELBO = elbo(draws, targets, model, num_data, scorer, kl_weight=weight)
        if num_items_in_batch is None:
            return found.loss
        # Trainer adds the losses of a step's batches up: what it counted is counted here, so that shares add up to 1.
        counted = labels[..., 1:] if shifted else labels
        share: Tensor = counted.ne(-100).sum() / num_items_in_batch
        return found.loss * share

    return compute_loss_func


def _counts_shifted(model: nn.Module) -> bool:
    """Whether Trainer leaves the first label of a row out of num_items_in_batch.

    Newer versions do, and for models of one loss type alone: LlamaForCausalLM is one, GPT2LMHeadModel is not.
    """
    if "_loss_shifts_labels" not in inspect.unwrap(transformers.Trainer.__init__).__code__.co_names:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    inner = base_of(model)
    decoder_alone = not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return decoder_alone and LOSS_MAPPING.get(getattr(inner, "loss_type", None) or "") is ForCausalLMLoss


def _rows(batch: Mapping[str, Any]) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
