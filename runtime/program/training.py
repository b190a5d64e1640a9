"""Program of a forward and a backward graph, as one function of torch's autograd."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.errors import UnsupportedError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import BACKWARD, DIFFERENTIABLE, GRADIENTS, RESULTS, SAVED, Parts
from gnnc.ir.source import source_of
from gnnc.runtime.program.differentiated import DifferentiatedGraph
from gnnc.runtime.program.executable import Executable, Timing
from gnnc.runtime.program.seed import draw_seed
from gnnc.torch_private import is_autocast_enabled

Tangents = Callable[[Sequence[Any]], Mapping[int, Tensor]]
"""Function of a program's outputs to the gradients of them, by number."""


class TrainingExecutable:
    """Runs a lowered forward graph, and its backward graph when autograd asks for gradients.

    ``executable(*values)`` takes one value a placeholder of the forward graph, and returns the outputs of the
    caller. What the backward graph reads is kept by autograd: it is freed with the graph of autograd, and a
    tensor that was written in between is torch's error.

    Attributes:
        forward: the program of the forward graph.
        backward: the program of the backward graph.

    Args:
        owner: class name of the model, for messages.
        parts: the lowered graphs.
        make: makes the program of one graph.
        differentiated: the gradients as differentiable functions; None: not all of the graph is FP32.
    """

    def __init__(
        self,
        owner: str,
        parts: Parts,
        make: Callable[[Any], Executable],
        differentiated: DifferentiatedGraph | None = None,
    ) -> None:
        assert parts.backward is not None
        self.owner = owner
        self._differentiated = differentiated
        self.forward, self.backward = make(parts.forward), make(parts.backward)
        self.backward.share_temporaries(self.forward)
        sources = [source_of(node) for node in placeholders(parts.forward)]
        self._leaves = [sources.index(source) for source in parts.forward.meta[GRADIENTS]]
        self._count = parts.forward.meta[RESULTS]
        self._same = _equal_outputs(outputs_of(parts.forward.graph)[: self._count])
        self._differentiable = parts.forward.meta[DIFFERENTIABLE]
        self._plan = _Plan(parts)

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the forward graph; returns the flat outputs, which autograd knows."""
        outputs = _apply(self, values, *[values[i] for i in self._leaves])
        return tuple([outputs[i] for i in self._same])

    def whole(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that runs a whole call, of which the program is a part, on this device."""
        return self.forward.whole(run)

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Run both graphs once and time every node; the tangents are ones."""
        with torch.no_grad():
            outputs, forward = self.forward.profile(*values)
            results = outputs[: self._count]
            tangents = {i: torch.ones_like(results[i]) for i in self._differentiable}
            kept = self._plan.kept(values, outputs)
            _, backward = self.backward.profile(*self._plan.arguments(kept, tangents))
        timings = [*forward, *(replace(timing, part=BACKWARD) for timing in backward)]
        return tuple([results[i] for i in self._same]), timings

    def step(self, values: Sequence[Any], tangents: Tangents) -> tuple[Any, ...]:
        """Run both graphs once, without autograd.

        Args:
            values: the values of the forward graph's placeholders.
            tangents: maps the outputs to the gradient of each that has one, by its number.

        Returns:
            The outputs of the caller, then the gradients in the order of the joint graph.
        """
        outputs = self.forward(*values)
        gradients = self.backward(*self.arguments(values, outputs, tangents))
        return (*outputs[: self._count], *gradients)

    def arguments(self, values: Sequence[Any], outputs: Sequence[Any], tangents: Tangents) -> list[Any]:
        """Return the arguments of the backward graph after a run of the forward graph."""
        return self._plan.arguments(self._plan.kept(values, outputs), tangents(outputs[: self._count]))

    @property
    def launches(self) -> str | None:
        """Say how calls of each graph make their launches; None: one of them makes them one by one."""
        said = {"forward": self.forward.launches, "backward": self.backward.launches}
        return None if None in said.values() else "; ".join(f"{name}: {text}" for name, text in said.items())

    @property
    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(node name, kernel name) of every launch of both programs, in order."""
        return (*self.forward.kernels, *self.backward.kernels)

    @property
    def source(self) -> str:
        """The generated programs."""
        return f"{self.forward.source}\n{self.backward.source}"

    @property
    def profiled(self) -> tuple[Any, ...]:
        """The values of the forward graph's placeholders in the last ``profile``, as meta tensors."""
        return self.forward.profiled

    @property
    def pool(self) -> Any:
        """Memory for outputs and for saved values."""
        return self.forward.pool

    @property
    def arena_bytes(self) -> int:
        """Bytes of temporaries that stay allocated for later calls."""
        return self.forward.arena_bytes + self.backward.arena_bytes

    def clear(self) -> None:
        """Free the memory that stays allocated for later calls."""
        self.forward.clear()
        self.backward.clear()

    def run_forward(self, ctx: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the forward graph for autograd, whose context keeps what the backward graph reads."""
        again = self._differentiated
        ctx.again = None if again is None else again.state(values)
        with _without_autocast():
            outputs = self.forward(*values)
        kept = self._plan.kept(values, outputs)
        ctx.save_for_backward(*[value for value in kept if isinstance(value, Tensor)])
        ctx.numbers = [None if isinstance(value, Tensor) else value for value in kept]
        results = outputs[: self._count]
        fixed = [value for i, value in enumerate(results) if i not in self._differentiable]
        ctx.mark_non_differentiable(*[value for value in fixed if isinstance(value, Tensor)])
        ctx.set_materialize_grads(False)
        ctx.like = {i: (results[i].shape, results[i].dtype, results[i].device) for i in self._differentiable}
        return tuple([value if self._same[i] == i else None for i, value in enumerate(results)])

    def run_backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run the backward graph on the gradients of the outputs; None is a gradient of zeros.

        Gradients that are to be differentiated themselves (``create_graph=True``) come from
        ``DifferentiatedGraph``.
        """
        saved = iter(ctx.saved_tensors)
        tangents = {i: _tangent(grads[i], *ctx.like[i]) for i in self._differentiable}
        with _without_autocast():
            if torch.is_grad_enabled():
                return self._twice_differentiable().gradients(ctx.again, tangents)
            kept = [next(saved) if number is None else number for number in ctx.numbers]
            return self.backward(*self._plan.arguments(kept, tangents))

    def _twice_differentiable(self) -> DifferentiatedGraph:
        if self._differentiated is None:
            raise UnsupportedError(
                f"[{self.owner}] this backward pass is to be differentiated itself (create_graph=True), and "
                "gradients of gradients are computed in fp32 only: compile the model with precision='fp32', "
                "pass create_graph=False, or call the original model"
            )
        return self._differentiated


class _Plan:
    """Origins of the values that the backward graph takes, in the order of its placeholders."""

    def __init__(self, parts: Parts) -> None:
        assert parts.backward is not None
        given = {source_of(node): i for i, node in enumerate(placeholders(parts.forward))}
        saved = parts.forward.meta[SAVED]
        self._origins: list[tuple[str, int]] = []
        self._seeded: torch.device | None = None
        for node in placeholders(parts.backward):
            source = source_of(node)
            assert source is not None
            if source.kind == "tangent":
                self._origins.append(("tangent", int(source.name)))
            elif source.kind == "saved":
                self._origins.append(("output", saved[source.name]))
            elif source.kind == "seed" and source not in given:
                self._origins.append(("seed", 0))
                self._seeded = node.meta["val"].device
            else:
                self._origins.append(("value", given[source]))

    def kept(self, values: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return what to keep of a call: values of placeholders and outputs of the forward graph, and a seed.

        The seed is drawn now: the random numbers of the forward graph are those of eager PyTorch.
        """
        of = {"output": outputs, "value": values}
        if self._seeded is not None:
            of["seed"] = (draw_seed(self._seeded),)
        return [of[kind][position] for kind, position in self._origins if kind != "tangent"]

    def arguments(self, kept: Sequence[Any], tangents: Mapping[int, Tensor]) -> list[Any]:
        """Return the arguments of the backward graph."""
        rest = iter(kept)
        return [tangents[position] if kind == "tangent" else next(rest) for kind, position in self._origins]


class _Differentiable(torch.autograd.Function):
    """Forward graph as a node of autograd; its inputs are the tensors that have a gradient."""

    @staticmethod
    def forward(ctx: Any, program: TrainingExecutable, values: tuple[Any, ...], *leaves: Tensor) -> Any:
        ctx.program = program
        return program.run_forward(ctx, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.program.run_backward(ctx, grads))


_apply: Any = super(torch.autograd.Function, _Differentiable).apply  # pyright: ignore[reportAttributeAccessIssue]
"""``_Differentiable.apply`` without its search for transforms of torch.func, in which calls are refused."""


def _equal_outputs(outputs: Sequence[Any]) -> list[int]:
    """Return for each output the first that is the same node: autograd gets each tensor once."""
    first: dict[Any, int] = {}
    return [first.setdefault(value, i) if isinstance(value, Node) else i for i, value in enumerate(outputs)]


def _tangent(grad: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the gradient of an output as kernels read it: dense and contiguous."""
    if grad is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return (grad if grad.layout is torch.strided else grad.to_dense()).contiguous()


def _without_autocast() -> AbstractContextManager[Any]:
    """Return a context in which ATen ops keep the dtypes of the graph, which has autocast's casts in it."""
    if not is_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
