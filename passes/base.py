"""What a pass is, what it may know, and the runner that checks it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import fx

from gnnc.ir.graph import clone, infer_meta
from gnnc.ir.verify import verify
from gnnc.precision import INT8, Precision
from gnnc.target import Target


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of a pass that ``explain()`` shows: what it left alone or decided, and why."""

    pass_name: str
    node: str
    layer: str
    text: str


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

    def note(self, node: fx.Node | None, text: str) -> None:
        """Record a remark about ``node`` (or about the whole graph)."""
        name = node.name if node is not None else ""
        layer = str(node.meta.get("layer", "")) if node is not None else ""
        self.notes.append(Note(self.current_pass, name, layer, text))


@runtime_checkable
class Pass(Protocol):
    """One transformation: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """Name in ``stages`` and in notes."""

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Transform ``gm``, a private copy, and return it (or another graph)."""
        ...


Stage = tuple[str, fx.GraphModule]


def run_pass(step: Pass, gm: fx.GraphModule, ctx: Context | None = None) -> fx.GraphModule:
    """Run one pass on a copy of ``gm``: then dead code goes, meta is inferred, the graph verified.

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
    verify(out, step.name)
    ctx.timings[step.name] = ctx.timings.get(step.name, 0.0) + time.perf_counter() - start
    return out


def run_passes(gm: fx.GraphModule, pipeline: Iterable[Pass], ctx: Context) -> list[Stage]:
    """Run ``pipeline`` in order; return each pass's name with the graph after it."""
    stages: list[Stage] = []
    for step in pipeline:
        gm = run_pass(step, gm, ctx)
        stages.append((step.name, gm))
    return stages


def _is_impure(node: fx.Node) -> bool:
    """Placeholders and outputs are the graph's signature; every op is functional."""
    return node.op in ("placeholder", "output")


def is_tensor(node: Any) -> bool:
    """Whether ``node`` is a graph node that holds a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
