"""One contender on one network, ready to be stepped: training or prediction, eager or compiled."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.lab.bench.settings import CONTENDERS, REFERENCE, Network
from slimbayes.verbs.method_text import parse_method

NUM_DATA = 50_000
SMALL = (10, 16)  # samples, examples
HEAD_DRAWS = 100
MANY_DRAWS = 200


@dataclass
class Case:
    """A step to time, what it is divided by, and what it holds between steps.

    ``rows`` go through the network in one step; ``units`` are what its time is counted per.
    """

    name: str
    step: Callable[[], Tensor]
    rows: int
    units: int
    model: nn.Module
    clear: Callable[[], None] = lambda: None
    held: list[Any] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def held_bytes(self) -> int:
        """Bytes of parameters, buffers, gradients, optimizer state and inputs, shared storage once."""
        found: dict[int, int] = {}
        for tensor in self._held():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    def _held(self) -> Iterator[Tensor]:
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        for item in self.held:
            if isinstance(item, torch.optim.Optimizer):
                for state in item.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))
            else:
                yield item


def build(name: str, network: Network, phase: str, mode: str, device: torch.device) -> Case:
    """The contender, from the same seed as every other.

    >>> from slimbayes.lab.bench.settings import NETWORKS
    >>> case = build("rank1", NETWORKS["tiny"], "train", "eager", torch.device("cpu"))
    >>> case.rows, bool(case.step().isfinite())
    (64, True)
    """
    torch.manual_seed(0)
    plain = network.make().to(device)
    if len(network.shape) == 3:
        plain = plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if phase == "train":
        return _training(name, plain, network, mode, device)
    return _prediction(name, plain, network, phase, mode, device)


def inputs(network: Network, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random inputs, channels last for images, and classes."""
    if network.words:
        x = torch.randint(network.words, (batch, *network.shape), device=device)
    else:
        x = torch.randn(batch, *network.shape, device=device)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    return x, torch.randint(network.classes, (batch,), device=device)


def distinct(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """The function with code of its own.

    The compiler keeps what it compiled by code object: contenders that shared one would test each other's guards at
    every call, and too many of them would end compilation.
    """
    code = function.__code__.replace(co_name="objective_" + "".join(c if c.isalnum() else "_" for c in name))
    return types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )


def compiled(function: Callable[..., Tensor], name: str, mode: str) -> Callable[..., Tensor]:
    """The function as the mode wants it: ours by the library's own compile, a peer's even with breaks in its graph."""
    if mode == "eager":
        return function
    compiler = getattr(sb, "compile", torch.compile) if name in CONTENDERS else torch.compile
    result: Callable[..., Tensor] = compiler(
        distinct(function, name), fullgraph=name == REFERENCE or name in CONTENDERS, **_options(mode)
    )
    return result


def _options(mode: str) -> dict[str, Any]:
    return {"mode": "reduce-overhead"} if mode == "graphs" else {}


def precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 autocast on a GPU, nothing on the CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def _theirs(family: Any, plain: nn.Module, network: Network, device: torch.device) -> nn.Module:
    """A peer's network, in the same memory layout as ours."""
    model: nn.Module = family.convert(plain).to(device)
    if len(network.shape) == 3 and family.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _peer(name: str) -> Any:
    """The functions that make and use a peer's network."""
    return importlib.import_module("slimbayes.lab.bench.peers").FAMILIES[name]


def _training(name: str, plain: nn.Module, network: Network, mode: str, device: torch.device) -> Case:
    model, batch = plain, network.rows
    if name == REFERENCE:

        def objective(x: Tensor, y: Tensor) -> Tensor:
            with precision(device):
                return nn.functional.cross_entropy(plain(x), y)

    elif name in CONTENDERS:
        contender = CONTENDERS[name]
        method = parse_method(contender.method)
        model = sb.bayesianize(plain, method)
        batch = network.rows // method.traits.components
        noise = contender.noise

        def objective(x: Tensor, y: Tensor) -> Tensor:
            with precision(device):
                return sb.elbo(sb.draw(model, x, noise=noise), y, model, num_data=NUM_DATA).loss

    else:
        family = _peer(name)
        model = _theirs(family, plain, network, device)
        batch = network.rows // family.components
        objective = family.objective(model, NUM_DATA)
    x, y = inputs(network, batch, device)
    model.train()
    optimizer = make_optimizer(model, device, network.adam)
    if network.words:
        _meet_all_words(optimizer)
    loss_of = compiled(objective, name, mode)

    def step() -> Tensor:
        if mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    clear = lambda: optimizer.zero_grad(set_to_none=True)  # noqa: E731
    return Case(name, step, network.rows, network.rows, model, clear, [optimizer, x, y])


def _meet_all_words(optimizer: torch.optim.Optimizer) -> None:
    """One step with a gradient everywhere, as in the midst of training, when every word has been seen.

    Roots and quotients of exact zeros take another time than those of numbers, and contenders whose rows are several
    components of the same sequences would have more words that they never see.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()


def make_optimizer(model: nn.Module, device: torch.device, adam: bool) -> torch.optim.Optimizer:
    """Adam as torch has it on the CPU; on a GPU fused, Adam or SGD with Nesterov momentum."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if device.type != "cuda":
        return torch.optim.Adam(parameters, lr=1e-4)
    if adam:
        return torch.optim.Adam(parameters, lr=1e-4, fused=True)
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, nesterov=True, fused=True)


def _prediction(
    name: str, plain: nn.Module, network: Network, phase: str, mode: str, device: torch.device
) -> Case:
    if name == REFERENCE:
        return _reference_prediction(plain, network, phase, mode, device)
    samples = {"small": SMALL[0], "many": MANY_DRAWS}.get(phase, network.samples)
    chunk = network.rows if phase == "many" else None
    if name in CONTENDERS:
        contender = CONTENDERS[name]
        method = parse_method(contender.method)
        components = method.traits.components
        if components > 1 and not method.traits.noisy:
            samples = 1  # more would be copies
        if phase == "head":
            samples = max(1, HEAD_DRAWS // components)
        model = sb.bayesianize(plain, method, **({"include": network.head} if phase == "head" else {}))
        noise = contender.noise
        # Of many passes the network alone is compiled: all of them in one graph would be too much for a compiler.
        drawn: Any = torch.compile(model, **_options(mode)) if phase == "many" and mode != "eager" else model

        def function(x: Tensor) -> Tensor:
            with precision(device):
                return sb.predict(
                    drawn, x, samples=samples, noise=noise, chunk=chunk, keep_draws=chunk is None
                ).mean

    else:
        family = _peer(name)
        model, components = _theirs(family, plain, network, device), family.components
        if components > 1:
            samples = 1
        function = family.prediction(model, samples)
    draws = components * samples
    whole = max(1, (network.predict_rows or network.rows) // draws)
    batch = {"small": SMALL[1], "head": network.rows, "many": network.rows}.get(phase, whole)
    x, _ = inputs(network, batch, device)
    model.eval()
    run = compiled(function, name, "eager" if phase == "many" else mode)

    def step() -> Tensor:
        with torch.no_grad():
            if mode == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            return run(x)

    return Case(name, step, draws * batch, batch if phase == "head" else draws * batch, model, held=[x])


def _reference_prediction(
    plain: nn.Module, network: Network, phase: str, mode: str, device: torch.device
) -> Case:
    rows = network.predict_rows if phase == "predict" and network.predict_rows else network.rows
    passes, batch = SMALL if phase == "small" else (MANY_DRAWS if phase == "many" else 1, rows)
    x, _ = inputs(network, batch, device)
    plain.eval()

    def function(x: Tensor) -> Tensor:
        with precision(device):
            logits: Tensor = plain(x)
            return logits.softmax(-1)

    run = compiled(function, REFERENCE, mode)

    def step() -> Tensor:
        # Around all passes: weights are rounded once, as in a prediction.
        with torch.no_grad(), precision(device):
            for _ in range(passes):
                if mode == "graphs":
                    torch.compiler.cudagraph_mark_step_begin()
                probabilities = run(x)
        return probabilities

    return Case(REFERENCE, step, passes * batch, passes * batch, plain, held=[x])
