"""``draw``: the one place where components and samples are folded into the batch axis and unfolded again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from slimbayes.accelerate import switches
from slimbayes.accelerate.factor_groups import DEVICES, prefill
from slimbayes.accelerate.late_tiling import signature
from slimbayes.accelerate.patch_indices import prefill_patches
from slimbayes.accelerate.patch_lookahead import Ahead, may_choose, prefill_keyed
from slimbayes.accelerate.point_factors import prefill_points
from slimbayes.accelerate.weight_groups import prefill_weights
from slimbayes.core.context import NOISE_MODES, SEES_CHECKPOINTS, Draw, Supply, activate, choose_components
from slimbayes.core.conversion import Record, every_module, find_record, layers_and_groups, unwrap
from slimbayes.core.memory import out_of_memory
from slimbayes.core.options import check_count, is_count
from slimbayes.core.probes import plan_for, verify_rows, verify_unsplit
from slimbayes.core.rows import FlatInputs, flatten_inputs, may_be_split, run, unfold
from slimbayes.core.rules.patching import IndexedRule
from slimbayes.core.rules.rank1 import Rank1Rule

_PLACES = 2**32  # of examples and of samples, as keyed noise counts them


def draw(
    model: nn.Module,
    *inputs: Any,
    samples: int = 1,
    noise: str = "example",
    seed: int | Supply | None = None,
    shared_inputs: Sequence[str | int] = (),
    first_example: int = 0,
    first_sample: int = 0,
    draws: int | Sequence[int] | None = None,
    split: bool = False,
    **named_inputs: Any,
) -> Any:
    """Run the model on every component and sample at once: outputs ``[components × samples, batch, ...]``.

    ``noise``: "example" (fresh factors per example), "shared" (one function per draw) or "mean" (no noise).
    Tensors whose first dimension equals the first input's are tiled, except those named in ``shared_inputs``
    (argument names or positions). With a ``seed`` noise is a function of (seed, layer, draw, example index);
    ``first_example`` and ``first_sample`` give the indices at which this call starts, so that a batch cut in
    pieces has the same draws as the whole. ``draws``: the numbers, on the draws axis, of those that are wanted; they
    are made again by their keys, without the other samples, and are those of the whole.

    With ``split`` the components share the batch instead: example i is seen by component ⌊iK/B⌋ alone, and the
    output is one draw of every example, ``[1, batch, ...]``. The nll of that draw has the expectation of the average
    over all components, at the cost of one network: a way to train, not to predict.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=4))
    >>> sb.draw(net, torch.zeros(5, 3), samples=2).shape
    torch.Size([8, 5, 2])
    >>> sb.draw(net, torch.zeros(5, 3), samples=2, seed=0, noise="shared", draws=[7]).shape
    torch.Size([1, 5, 2])
    >>> sb.draw(net, torch.zeros(8, 3), split=True).shape
    torch.Size([1, 8, 2])
    """
    record = find_record(model)
    if split and (samples != 1 or seed is not None or draws is not None):
        raise ValueError(
            f"split=True gives every example one draw without a key, got samples={samples!r}, seed={seed!r}, "
            f"draws={draws!r}: leave them out, or leave split out"
        )
    if draws is not None:
        components = _component_count(unwrap(model), record)
        wanted = _wanted(draws, samples, seed, components)
        flat = flatten_inputs(model, inputs, named_inputs, shared_inputs)
        passes = {
            s: draw_flat(model, flat, 1, noise, seed, first_example, first_sample + s)
            for s in sorted({number % samples for number in wanted})
        }
        return _picked(passes, [divmod(number, samples) for number in wanted], components)
    if record.recurrent and torch.compiler.is_compiling():
        # The compiler would break off inside the draw, and not know of it where it goes on.
        options = (samples, noise, seed, shared_inputs, first_example, first_sample, split)
        return _draw_eagerly(model, inputs, named_inputs, *options)
    flat = flatten_inputs(model, inputs, named_inputs, shared_inputs)
    if split:
        return _draw_split(model, record, flat, noise)
    return draw_flat(model, flat, samples, noise, seed, first_example, first_sample)


def _wanted(
    draws: int | Sequence[int], samples: int, seed: int | Supply | None, components: int
) -> list[int]:
    """The numbers of draws to be made again, checked."""
    check_options(samples, "example", seed)
    numbers = [draws] if isinstance(draws, int) else list(draws)
    if seed is None:
        raise ValueError(
            f"draws={draws!r} are made again by the key of their seed: give the seed they were made with"
        )
    most = components * samples
    if not numbers or not all(type(n) is int and 0 <= n < most for n in numbers):
        raise ValueError(
            f"draws={draws!r}: give numbers from 0 to {most - 1}, for samples={samples} of {components} components; "
            f"draw k · samples + s is sample s of component k"
        )
    return numbers


def _picked(passes: dict[int, Any], places: list[tuple[int, int]], components: int) -> Any:
    """Draws (component, sample) from passes of one sample each: [len(places), batch, ...]."""
    flat = {s: pytree.tree_flatten(output) for s, output in passes.items()}
    leaves, spec = next(iter(flat.values()))
    found = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == components:
            found.append(torch.stack([flat[s][0][i][k] for k, s in places]))
        else:
            found.append(leaf)
    return pytree.tree_unflatten(found, spec)


@_disable_dynamo
def _draw_eagerly(
    model: nn.Module,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    samples: int,
    noise: str,
    seed: int | Supply | None,
    shared: Sequence[str | int],
    first_example: int,
    first_sample: int,
    split: bool,
) -> Any:
    flat = flatten_inputs(model, inputs, named, shared)
    if split:
        return _draw_split(model, find_record(model), flat, noise)
    return draw_flat(model, flat, samples, noise, seed, first_example, first_sample)


def draw_flat(
    model: nn.Module,
    flat: FlatInputs,
    samples: int,
    noise: str,
    seed: int | Supply | None,
    first_example: int,
    first_sample: int,
    evaluated: bool = False,
    ahead: Ahead | None = None,
) -> Any:
    """``draw`` on flattened inputs; ``evaluated`` says that no module is in training mode.

    ``ahead`` keeps what the passes of one prediction choose.
    """
    if ahead is not None and ahead.lane is flat:
        now = Draw(1, samples, flat.batch, noise, seed, first_sample, first_example)
        if ahead.hand_over(now) and now.settled is not None:
            args, kwargs = flat.tile(1)
            with activate(now):
                output = model(*args, **kwargs)
            return unfold(output, samples, flat.batch)
    _refuse_data_parallel(model)
    record = find_record(model)
    check_options(samples, noise, seed, first_example, first_sample)
    if ahead is None and isinstance(seed, int) and not torch.compiler.is_compiling():
        with contextlib.closing(Ahead(samples, 0, record.places)) as own:
            return draw_flat(model, flat, samples, noise, seed, first_example, first_sample, evaluated, own)
    components, ids = _active_components(unwrap(model), record, flat.leaves, seed)
    draws = components * samples
    now = Draw(components, samples, flat.batch, noise, seed, first_sample, first_example, ids)
    shared = may_be_split(record, flat.leaves, flat.tiled, now)
    # Without gradients only: torch's own backward passes may depend on how often a row occurs.
    if (
        draws > 1
        and not shared
        and switches.paths.late
        and not torch.is_grad_enabled()
        and (evaluated or not unwrap(model).training)
    ):
        found, output = _late(model, record, flat, now, evaluated, ahead)
        if found:
            return unfold(output, draws, flat.batch)
    output = _pass(model, record, flat, now, draws, ahead)
    if shared:
        verify_unsplit(model, record, flat, now, shared)
    if ahead is not None and ahead.only_patches and now.settled is not None:
        ahead.lane = flat
    return unfold(output, draws, flat.batch)


def _pass(
    model: nn.Module, record: Record, flat: FlatInputs, now: Draw, repeats: int, ahead: Ahead | None = None
) -> Any:
    """The output for all rows of a draw: the inputs, repeated so often."""
    check_rows = not record.rows_checked and not torch.compiler.is_compiling() and model is unwrap(model)
    if check_rows:
        now.rows_seen = {}
    args, kwargs = flat.tile(repeats)
    _prefill(model, record, flat, now, ahead)
    output = run(model, args, kwargs, flat, now)
    if check_rows:
        verify_rows(model, now, flat)
        record.rows_checked = True
    _keep_mixing(record, now)
    return output


def _draw_split(model: nn.Module, record: Record, flat: FlatInputs, noise: str) -> Any:
    """One draw of every example, whose rows the components share: [1, batch, ...]."""
    _refuse_data_parallel(model)
    check_options(1, noise, None)
    components, ids = _active_components(unwrap(model), record, flat.leaves, None)
    if flat.batch % components != 0:
        raise ValueError(
            f"split=True shares {flat.batch} examples among {components} components, which do not divide them: give a "
            f"multiple of {components} (a DataLoader drops an incomplete batch with drop_last=True)"
        )
    now = Draw(components, 1, flat.batch // components, noise, component_ids=ids)  # rows [K, B/K]
    return unfold(_pass(model, record, flat, now, 1), 1, flat.batch)


def _refuse_data_parallel(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "DataParallel cuts the rows of a draw across its components; use DistributedDataParallel"
        )


def _prefill(model: nn.Module, record: Record, flat: FlatInputs, now: Draw, ahead: Ahead | None) -> None:
    now.gradients = torch.is_grad_enabled()
    if ahead is not None and ahead.only_patches and may_choose(now) and ahead.hand_over(now):
        return
    again = record.checkpointed or not SEES_CHECKPOINTS
    if now.gradients and again and not torch.compiler.is_compiling():
        return
    if any([isinstance(leaf, Tensor) and leaf.device.type in DEVICES for leaf in flat.leaves]):
        layers, groups = layers_and_groups(model)
        prefill(groups, now)
        pairs = [(layer.bayes, layer) for _, layer in layers]
        prefill_points(pairs, now)
        prefill_patches(pairs, now)
        prefill_keyed(pairs, now, ahead)
        others = pairs
    else:
        layers, groups = layers_and_groups(model)
        if now.seed is None and now.noise != "mean":
            prefill(groups, now)
        others = [(layer.bayes, layer) for _, layer in layers if type(layer.bayes) is not Rank1Rule]
        if others and (torch.compiler.is_compiling() or not _hooked(unwrap(model))):
            prefill_weights(others, now)
            prefill_keyed(others, now, ahead)
    if ahead is not None:
        ahead.only_patches = len(others) == len(layers) and all(
            type(rule) is IndexedRule for rule, _ in others
        )


def _hooked(model: nn.Module) -> bool:
    """Whether something may change weights between now and the call of the layer that they belong to."""
    if nn.modules.module._global_forward_pre_hooks:
        return True
    return any([bool(module._forward_pre_hooks) for module in every_module(model)])


def _keep_mixing(record: Record, now: Draw) -> None:
    record.checkpointed = record.checkpointed or now.checkpointed
    if torch.is_grad_enabled():  # a prediction in between must not take the place of the draws to be scored
        record.mixing = list(now.log_probs.values())
        record.byproducts = now.byproducts


def _late(
    model: nn.Module, record: Record, flat: FlatInputs, now: Draw, evaluated: bool, ahead: Ahead | None
) -> tuple[bool, Any]:
    """Run with late tiling where the network allows it: (True, output), else (False, None)."""
    tracing = torch._C._get_tracing_state() is not None
    if tracing or torch.compiler.is_compiling():
        return False, None
    inner = unwrap(model)
    if not evaluated and any(module.training for module in every_module(inner)):
        return False, None
    key = signature(flat.leaves, flat.spec, flat.tiled, flat.batch, now.noise)
    if key is None or (key not in record.late and now.rows < 2 * now.components * min(flat.batch, 2)):
        return False, None  # a probe would have more rows
    plan = plan_for(inner, record, flat, now.noise, key)
    if plan is None:
        return False, None
    args, kwargs = flat.tile(1)
    try:
        late = replace(now, late=plan, cache={}, calls={}, log_probs={}, byproducts={}, noises={})
        _prefill(model, record, flat, late, ahead)
        with activate(late):
            output = plan.finish(model(*args, **kwargs), now.components * now.samples)
    except Exception as error:
        if out_of_memory(error):
            raise
        record.late[key] = None  # the plain pass runs, or says what is wrong
        return False, None
    _keep_mixing(record, late)
    return True, output


def check_options(
    samples: int, noise: str, seed: int | Supply | None, first_example: int = 0, first_sample: int = 0
) -> None:
    """Raise on options of a draw that mean nothing."""
    check_count("samples", samples)
    for name, place in (("first_example", first_example), ("first_sample", first_sample)):
        if not is_count(place, 0) or place >= _PLACES:
            raise ValueError(f"{name} must be an integer from 0 to {_PLACES - 1}, got {place!r}")
    if not isinstance(noise, str) or noise not in NOISE_MODES:
        raise ValueError(f"unknown noise {noise!r}; use 'example', 'shared' or 'mean'")
    if seed is not None and not isinstance(seed, (int, Supply)):
        raise ValueError(f"seed must be an integer or None, got {seed!r}")


def _active_components(
    model: nn.Module, record: Record, leaves: list[Any], seed: int | Supply | None
) -> tuple[int, Tensor | None]:
    step = _component_count(model, record)
    if step == record.components:
        return step, None
    device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    return step, choose_components(record.components, step, seed, device)


def _component_count(model: nn.Module, record: Record) -> int:
    """How many components take part in a draw: all, unless training takes a few at a time."""
    step = record.step_components
    return record.components if step is None or not model.training else step
