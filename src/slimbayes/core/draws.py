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

from slimbayes.core.context import Draw, Supply, choose_components
from slimbayes.core.conversion import (
    Record,
    every_module,
    find_record,
    hooked,
    ruled_layers,
    shared_out,
    unwrap,
)
from slimbayes.core.facts import facts_for, leave_all, leave_facts, remembers
from slimbayes.core.fitness import check_not_meta, explain_network
from slimbayes.core.paths import ASKED, first
from slimbayes.core.plan import Plan
from slimbayes.core.probes import verify_unsplit
from slimbayes.core.row_mixing import in_passes
from slimbayes.core.rows import FlatInputs, flatten_inputs, may_be_split, run, unfold
from slimbayes.core.sampling import find_groups, sample_group
from slimbayes.core.second_runs import next_node
from slimbayes.core.sharded import agreed, same_noise

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


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
    layout: str = "auto",
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

    ``layout``: "rows" repeats the batch for every draw and runs the network once; "passes" runs it once per draw on the
    batch as it is, which is right also where rows see each other (graphs, contrastive losses, attention over the
    batch). "auto" takes rows, and passes where a small first run finds that rows are mixed; compiled code takes what
    an earlier call outside of it has found.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=4))
    >>> sb.draw(net, torch.zeros(5, 3), samples=2).shape
    torch.Size([8, 5, 2])
    >>> sb.draw(net, torch.zeros(5, 3), samples=2, seed=0, noise="shared", draws=[7]).shape
    torch.Size([1, 5, 2])
    >>> sb.draw(net, torch.zeros(8, 3), split=True).shape
    torch.Size([1, 8, 2])
    """
    plan = Plan(samples, noise, seed, first_example, first_sample, layout)
    if split and (samples != 1 or seed is not None or draws is not None):
        raise ValueError(
            f"split=True gives every example one draw without a key, got samples={samples!r}, seed={seed!r}, "
            f"draws={draws!r}: leave them out, or leave split out"
        )
    record = find_record(model)
    # No compiler takes recurrent layers: it would break off inside the draw, and not know of it where it goes on.
    way = _draw_untraced if record.recurrent and torch.compiler.is_compiling() else _draw
    return way(model, record, (inputs, named_inputs, shared_inputs), plan, split, draws)


def _draw(
    model: nn.Module,
    record: Record,
    given: tuple[Any, ...],
    plan: Plan,
    split: bool,
    draws: int | Sequence[int] | None,
) -> Any:
    flat = flatten_inputs(model, *given)
    if split:
        return _draw_split(model, record, flat, plan)
    return draw_flat(model, flat, plan) if draws is None else _draw_wanted(model, record, flat, plan, draws)


@_disable_dynamo
def _draw_untraced(*options: Any) -> Any:
    return _draw(*options)


def _draw_wanted(
    model: nn.Module, record: Record, flat: FlatInputs, plan: Plan, draws: int | Sequence[int]
) -> Any:
    """Some draws made again by their keys."""
    plan.check()
    wanted = [divmod(n, plan.samples) for n in _wanted(draws, plan, _component_count(unwrap(model), record))]
    now = _start(model, record, flat, plan)
    if in_passes(model, record, flat, now, plan.layout):
        return _passes(model, record, flat, now, wanted)
    passes = {
        s: draw_flat(model, flat, replace(plan, samples=1, first_sample=plan.first_sample + s, layout="rows"))
        for s in sorted({s for _, s in wanted})
    }
    return _picked(passes, wanted, now.components)


def _start(model: nn.Module, record: Record, flat: FlatInputs, plan: Plan) -> Draw:
    """A draw of this plan, of the components that take part."""
    components, ids = _active_components(model, record, flat.leaves, plan.seed)
    return Draw(
        components,
        plan.samples,
        flat.batch,
        plan.noise,
        plan.seed,
        plan.first_sample,
        plan.first_example,
        ids,
    )


def _wanted(draws: int | Sequence[int], plan: Plan, components: int) -> list[int]:
    """The numbers of draws to be made again, checked."""
    numbers = [draws] if isinstance(draws, int) else list(draws)
    if plan.seed is None:
        raise ValueError(
            f"draws={draws!r} are made again by the key of their seed: give the seed they were made with"
        )
    most = components * plan.samples
    if not numbers or not all(type(n) is int and 0 <= n < most for n in numbers):
        raise ValueError(
            f"draws={draws!r}: give numbers from 0 to {most - 1}, for samples={plan.samples} of {components} "
            f"components; draw k · samples + s is sample s of component k"
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


def draw_flat(model: nn.Module, flat: FlatInputs, plan: Plan, course: Any = None) -> Any:
    """``draw`` on flattened inputs; ``course``: what the passes of one prediction share, of which this is one."""
    if course is not None:
        output = course.output(model, flat, plan)
        if output is not None:
            return output
    plan.check()
    _refuse_data_parallel(model)
    if course is None and isinstance(plan.seed, int) and not torch.compiler.is_compiling():
        own = first(ASKED.course, model, plan.samples, 0)
        if own is not None:
            with contextlib.closing(own):
                return draw_flat(model, flat, plan, own)
    record = find_record(model)
    try:
        with _mode(model, record, plan.evaluated):
            return _draw_in_mode(model, record, flat, plan, course)
    except Exception as error:
        explain_network(unwrap(model), error)
        raise


def _mode(model: nn.Module, record: Record, evaluated: bool) -> contextlib.AbstractContextManager[None]:
    """The mode that the network is in, kept from the predictions of other threads; ``evaluated``: it is one itself."""
    if evaluated or torch.compiler.is_compiling():
        return _NOTHING
    alone = not record.modes.evaluations and not unwrap(model).training
    return _NOTHING if alone else record.modes.passing


def _draw_in_mode(model: nn.Module, record: Record, flat: FlatInputs, plan: Plan, course: Any) -> Any:
    now = _start(model, record, flat, plan)
    if in_passes(model, record, flat, now, plan.layout):
        return _passes(model, record, flat, now, None, course)
    draws = now.components * plan.samples
    shared = may_be_split(record, flat.leaves, flat.tiled, now)
    if draws > 1 and not shared and not torch.is_grad_enabled():
        made = first(ASKED.run, model, flat, now, plan.evaluated, course)
        if made is not None:
            return unfold(made[0], draws, flat.batch)
    output = _pass(model, flat, now, draws, course)
    if shared:
        verify_unsplit(model, record, flat, now, shared)
    if course is not None:
        course.ran(flat, now)
    return leave_facts(unfold(output, draws, flat.batch), record, now)


def _pass(model: nn.Module, flat: FlatInputs, now: Draw, repeats: int, course: Any = None) -> Any:
    """The output for all rows of a draw: the inputs, repeated so often."""
    args, kwargs = flat.tile(repeats)
    if remembers():
        now.first_node = next_node()
        if now.seed is not None:  # places in the generator's sequence are taken with and without checkpoints
            now.remember()
    shared = shared_out(model)
    if not shared:  # else every layer samples when it runs, and has its tensors whole
        prepare(model, now, course)
    with same_noise(every_module(unwrap(model)), by_data=True) if shared else _NOTHING:
        output = run(model, args, kwargs, flat, now)
    if type(output) is Tensor and output.is_meta:
        check_not_meta(unwrap(model))
    return output


def _passes(
    model: nn.Module,
    record: Record,
    flat: FlatInputs,
    now: Draw,
    wanted: list[tuple[int, int]] | None,
    course: Any = None,
) -> Any:
    """One pass for every draw that is wanted (component, sample), stacked; None: for all."""
    from slimbayes.core.passes import one_pass, places, stack  # few networks need it

    device = next(leaf.device for leaf in flat.leaves if isinstance(leaf, Tensor))
    each = places(now) if wanted is None else wanted
    parts = [one_pass(now, place, record.components > 1, device) for place in each]
    facts = facts_for(record)
    outputs = [leave_facts(_pass(model, flat, part, 1, course), record, part, facts) for part in parts]
    return leave_all(stack(outputs), facts)


def _draw_split(model: nn.Module, record: Record, flat: FlatInputs, plan: Plan) -> Any:
    """One draw of every example, whose rows the components share: [1, batch, ...]."""
    _refuse_data_parallel(model)
    plan.check()
    with _mode(model, record, False):
        return _split_in_mode(model, record, flat, plan)


def _split_in_mode(model: nn.Module, record: Record, flat: FlatInputs, plan: Plan) -> Any:
    components, ids = _active_components(model, record, flat.leaves, None)
    if flat.batch % components != 0:
        raise ValueError(
            f"split=True shares {flat.batch} examples among {components} components, which do not divide them: give a "
            f"multiple of {components} (a DataLoader drops an incomplete batch with drop_last=True)"
        )
    now = Draw(components, 1, flat.batch // components, plan.noise, component_ids=ids)  # rows [K, B/K]
    whole = in_passes(model, record, flat, now, plan.layout)  # nothing is repeated: one pass either way
    output = _pass(model, flat, now, 1)
    if not whole:
        return leave_facts(unfold(output, 1, flat.batch), record, now)
    from slimbayes.core.passes import stack  # few networks need it

    return leave_facts(stack([output]), record, now)


def _refuse_data_parallel(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "DataParallel cuts the rows of a draw across its components; use DistributedDataParallel"
        )


def prepare(model: nn.Module, now: Draw, course: Any) -> None:
    """Sample ahead of the network what is sampled sooner for many layers at once."""
    if course is not None and course.prepared(now):
        return
    layers = ruled_layers(model)
    for ask in ASKED.prepare:
        ask(model, layers, now, course)
    if now.seed is not None or now.noise == "mean" or torch.compiler.is_compiling():
        return
    groups = find_groups(layers, now)
    if groups and not hooked(model):  # a hook may change what a layer has when it runs
        for group in groups:
            sample_group(group, now)


def _active_components(
    model: nn.Module, record: Record, leaves: list[Any], seed: int | Supply | None
) -> tuple[int, Tensor | None]:
    if record.step_components is None:
        return record.components, None
    model = unwrap(model)
    step = _component_count(model, record)
    if step == record.components:
        return step, None
    device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    ids = choose_components(record.components, step, seed, device)
    return step, agreed(ids, every_module(model)) if shared_out(model) else ids


def _component_count(model: nn.Module, record: Record) -> int:
    """How many components take part in a draw: all, unless training takes a few at a time."""
    step = record.step_components
    return record.components if step is None or not model.training else step
