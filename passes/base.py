"""The pass protocol, the context that passes share, and the runner that checks each pass."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol, overload, runtime_checkable

import torch
from torch import fx

from gnnc.ir.graph import clone, infer_meta
from gnnc.ir.parts import FORWARD, GRADIENTS, STRUCTURE, Parts
from gnnc.ir.verify import verify
from gnnc.precision import INT8, Precision
from gnnc.target import Target

NoteKind = Literal["decision", "declined", "format"]


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of a pass, shown by ``explain()``: a node that it left alone or a decision, with the reason.

    Attributes:
        pass_name: the pass.
        node: name of the node, empty for the whole graph.
        layer: path of the module that the node came from.
        text: the remark.
        kind: ``declined`` for a kernel that did not take the node, ``format`` for a choice of a structure
            format, ``decision`` for anything else.
    """

    pass_name: str
    node: str
    layer: str
    text: str
    kind: NoteKind = "decision"


@dataclass(slots=True)
class Context:
    """The request that a pipeline serves, and what its passes learn on the way.

    Attributes:
        precision: the precision asked for.
        overrides: module-path glob to precision.
        target: facts of the backend that passes may use.
        examples: values of the placeholders of the captured graph, in order, or None.
        step: values of the placeholders of the joint graph, on which ``auto`` measures a training step, or
            None; the scales of training are taken at each call, so that its ``examples`` are None.
        error_budget: relative L2 error allowed on the output, for ``auto``; in training on gradients too.
        plan: precisions by layer that the user gave, or None.
        choice: the options of ``auto`` and its choice; ``assign`` makes it where it is not given.
        notes: remarks of the passes.
        timings: seconds that each pass took.
    """

    precision: Precision = INT8
    overrides: dict[str, Precision] = field(default_factory=dict)
    target: Target = field(default_factory=Target)
    examples: tuple[Any, ...] | None = None
    step: tuple[Any, ...] | None = None
    error_budget: float = 0.02
    plan: Any = None
    choice: Any = None
    notes: list[Note] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    current_pass: str = ""

    def note(self, node: fx.Node | None, text: str, kind: NoteKind = "decision") -> None:
        """Record a remark about ``node``, or about the whole graph where it is None."""
        name = node.name if node is not None else ""
        layer = str(node.meta.get("layer", "")) if node is not None else ""
        self.notes.append(Note(self.current_pass, name, layer, text, kind))


class Property(Enum):
    """Property of a graph that a pass establishes and all later stages keep.

    A pass that establishes some lists them in a class variable ``establishes``, a frozenset. Code that
    needs a certain stage asks for the property, not for the name of a pass.
    """

    NORMALIZED = "every computation has one spelling"
    ASSIGNED = "every primitive has a precision"
    LOWERED = "every call has its kernel"


def assigned_at(pipeline: Sequence[Any]) -> int | None:
    """Return the position of the pass that gives each primitive its precision; None: there is none."""
    return next((i for i, step in enumerate(pipeline) if Property.ASSIGNED in established_by(step)), None)


@runtime_checkable
class GraphPass(Protocol):
    """A transformation of each graph that runs at every call: a dataclass, whose fields are its options.

    A pass may also have a class variable ``establishes``, the properties that hold after it.
    """

    name: ClassVar[str]
    """Name in ``stages`` and in notes."""

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Transform ``gm``, a private copy, and return it (or another graph)."""
        ...


@runtime_checkable
class PartsPass(Protocol):
    """A transformation of several graphs of a program at once.

    A pass may also have a method ``applies(parts, ctx)``, which reads the graphs of the stage before.
    Where it returns False, the stage shares those graphs: nothing is copied, inferred or verified.
    """

    name: ClassVar[str]
    """Name in ``stages`` and in notes."""

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Transform the graphs of ``parts``, private copies, and return them (or others)."""
        ...


Pass = GraphPass | PartsPass

Stage = tuple[str, Parts]
"""A pass's name, and the graphs after it."""


def established_by(step: Pass) -> frozenset[Property]:
    """Return the properties that a pass declares in ``establishes``, none without a declaration."""
    return getattr(step, "establishes", frozenset())


def first_with(prop: Property, stages: Iterable[Stage]) -> fx.GraphModule | None:
    """Return the first forward graph of ``stages`` that has a property, or None."""
    forward = (parts.forward for _, parts in stages)
    return next((gm for gm in forward if prop in gm.meta.get("properties", ())), None)


@overload
def run_pass(step: Pass, program: Parts, ctx: Context | None = None) -> Parts: ...
@overload
def run_pass(step: Pass, program: fx.GraphModule, ctx: Context | None = None) -> fx.GraphModule: ...
def run_pass(
    step: Pass, program: Parts | fx.GraphModule, ctx: Context | None = None
) -> Parts | fx.GraphModule:
    """Run one pass on a copy of the graphs that it changes; then drop dead code, infer meta, and verify.

    The properties that the pass establishes join those of the forward graph in ``meta["properties"]``.

    Args:
        step: the pass.
        program: the graphs of a program, or one graph, which stands for its forward graph.
        ctx: the request; a new one without.

    Returns:
        The transformed program, as parts or as one graph, like ``program``.

    Raises:
        VerifyError: the pass broke an invariant.
    """
    ctx = Context() if ctx is None else ctx
    if isinstance(program, fx.GraphModule):
        return run_pass(step, Parts(forward=program), ctx).forward
    ctx.current_pass = step.name
    start = time.perf_counter()
    out = _run(step, program, ctx) if _applies(step, program, ctx) else program
    ctx.timings[step.name] = ctx.timings.get(step.name, 0.0) + time.perf_counter() - start
    return out


def _applies(step: Pass, program: Parts, ctx: Context) -> bool:
    applies = getattr(step, "applies", None)
    return applies is None or applies(program, ctx)


def _run(step: Pass, program: Parts, ctx: Context) -> Parts:
    before = dict(program)
    changed = _transform(step, program, ctx)
    out = changed.map(lambda part, gm: gm if gm is before.get(part) else _finish(gm, step.name, part))
    properties = program.forward.meta.get("properties", frozenset()) | established_by(step)
    out.forward.meta["properties"] = properties
    return out


def _transform(step: Pass, program: Parts, ctx: Context) -> Parts:
    if isinstance(step, PartsPass):
        return step.run_parts(program.map(lambda part, gm: clone(gm)), ctx)
    return program.map(lambda part, gm: gm if part == STRUCTURE else step.run(clone(gm), ctx))


def _finish(gm: fx.GraphModule, stage: str, part: str) -> fx.GraphModule:
    gm.graph.eliminate_dead_code(is_impure_node=_is_impure)
    infer_meta(gm)
    gm.recompile()
    verify(gm, stage if part == FORWARD else f"{stage} ({part})")
    return gm


def run_passes(program: Parts | fx.GraphModule, pipeline: Iterable[Pass], ctx: Context) -> list[Stage]:
    """Run ``pipeline`` in order; return each pass's name with the graphs after it.

    Args:
        program: the graphs of a program, or one graph, which stands for its forward graph.
        pipeline: the passes.
        ctx: the request.
    """
    parts = Parts(forward=program) if isinstance(program, fx.GraphModule) else program
    stages: list[Stage] = []
    for step in pipeline:
        parts = run_pass(step, parts, ctx)
        stages.append((step.name, parts))
    return stages


def run_until_assigned(
    parts: Parts, pipeline: Sequence[Pass], ctx: Context
) -> tuple[list[Stage], Sequence[Pass]]:
    """Run the passes before the one that assigns precisions; return their stages, and the passes left.

    In training the examples become ``ctx.step``: scales are taken at each call.
    """
    place = assigned_at(pipeline) or 0
    stages = run_passes(parts, pipeline[:place], ctx)
    if stages and GRADIENTS in stages[-1][1].forward.meta:
        ctx.step, ctx.examples = ctx.examples, None
    return stages, pipeline[place:]


def _is_impure(node: fx.Node) -> bool:
    """Return whether a node is part of the graph's signature; all ops are functional."""
    return node.op in ("placeholder", "output")


def is_tensor(node: Any) -> bool:
    """Return whether ``node`` is a graph node that holds a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
