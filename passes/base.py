"""The pass protocol, the context that passes share, and the runner that checks each pass."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import fx

from gnnc.ir.graph import clone, infer_meta
from gnnc.ir.verify import verify
from gnnc.precision import INT8, Precision
from gnnc.target import Target

NoteKind = Literal["decision", "declined"]


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of a pass, shown by ``explain()``: a node that it left alone or a decision, with the reason.

    Attributes:
        pass_name: the pass.
        node: name of the node, empty for the whole graph.
        layer: path of the module that the node came from.
        text: the remark.
        kind: ``declined`` for a kernel that did not take the node, ``decision`` for anything else.
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
        target: what passes may know of the backend.
        examples: values of the placeholders of the captured graph, in order, or None.
        structure: the structure graph, once ``hoist`` has split it off.
        error_budget: relative L2 error allowed on the output, for ``auto``.
        plan: precisions by layer that the user gave, or None.
        choice: what ``auto`` weighed and chose; made by ``assign`` where it is not given.
        notes: remarks of the passes.
        timings: seconds that each pass took.
    """

    precision: Precision = INT8
    overrides: dict[str, Precision] = field(default_factory=dict)
    target: Target = field(default_factory=Target)
    examples: tuple[Any, ...] | None = None
    structure: fx.GraphModule | None = None
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


@runtime_checkable
class Pass(Protocol):
    """One transformation of a graph: a frozen dataclass whose fields are its options.

    A pass may also have a class variable ``establishes``, the properties that hold after it.
    """

    name: ClassVar[str]
    """Name in ``stages`` and in notes."""

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Transform ``gm``, a private copy, and return it (or another graph)."""
        ...


Stage = tuple[str, fx.GraphModule]
"""A pass's name, and the graph after it."""


def established_by(step: Pass) -> frozenset[Property]:
    """Return the properties that a pass declares in ``establishes``, none without a declaration."""
    return getattr(step, "establishes", frozenset())


def first_with(prop: Property, stages: Iterable[Stage]) -> fx.GraphModule | None:
    """Return the first graph of ``stages`` that has a property, or None."""
    return next((gm for _, gm in stages if prop in gm.meta.get("properties", ())), None)


def run_pass(step: Pass, gm: fx.GraphModule, ctx: Context | None = None) -> fx.GraphModule:
    """Run one pass on a copy of ``gm``, then drop dead code, infer meta and verify the result.

    The properties that the pass establishes join those of ``gm`` in ``meta["properties"]``.

    Raises:
        VerifyError: the pass broke an invariant.
    """
    ctx = Context() if ctx is None else ctx
    ctx.current_pass = step.name
    start = time.perf_counter()
    out = step.run(clone(gm), ctx)
    out.graph.eliminate_dead_code(is_impure_node=_is_impure)
    infer_meta(out)
    out.recompile()
    out.meta["properties"] = gm.meta.get("properties", frozenset()) | established_by(step)
    verify(out, step.name)
    ctx.timings[step.name] = ctx.timings.get(step.name, 0.0) + time.perf_counter() - start
    return out


def run_passes(gm: fx.GraphModule, pipeline: Iterable[Pass], ctx: Context) -> list[Stage]:
    """Run the passes of ``pipeline`` in order, and return the stages."""
    stages: list[Stage] = []
    for step in pipeline:
        gm = run_pass(step, gm, ctx)
        stages.append((step.name, gm))
    return stages


def _is_impure(node: fx.Node) -> bool:
    """Return whether a node is part of the graph's signature; all ops are functional."""
    return node.op in ("placeholder", "output")


def is_tensor(node: Any) -> bool:
    """Return whether ``node`` is a graph node that holds a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
