"""Changes to the structure graph from the compute side: new results, and none that nobody reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx import Node

from gnnc.ir.graph import clone, infer_meta, placeholders
from gnnc.ir.source import Source, source_of
from gnnc.ir.verify import verify
from gnnc.passes.base import Context
from gnnc.passes.rewrite.boundary import Boundary, refresh_examples
from gnnc.passes.rewrite.emit import Emitter
from gnnc.torch_private import rename


class StructureEdit:
    """A private copy of ``ctx.structure`` that a pass over ``compute`` extends.

    Attributes:
        emit: inserts nodes into the structure graph.
    """

    def __init__(self, compute: fx.GraphModule, structure: fx.GraphModule) -> None:
        self.compute = compute
        self.structure = clone(structure)
        self.structure.meta["examples"] = structure.meta.get("examples")
        self.emit = Emitter(self.structure)
        self._outputs: dict[str, Node] = {node.name: node for node in self._results()}
        self._taken = {
            source.name: node
            for node in placeholders(compute)
            if (source := source_of(node)) is not None and source.kind == "structure"
        }

    def _results(self) -> tuple[Any, ...]:
        return self.structure.graph.output_node().args[0]  # type: ignore[return-value]

    def producer(self, placeholder: Any) -> Node | None:
        """Return the structure node whose value a placeholder of the compute graph takes."""
        source = source_of(placeholder) if isinstance(placeholder, Node) else None
        if source is None or source.kind != "structure":
            return None
        return self._outputs[source.name]

    def take(self, node: Node, name: str) -> Node:
        """Return the compute graph's placeholder for the value of a structure node."""
        known = self._taken.get(node.name)
        if known is not None and self._outputs[node.name] is node:
            return known
        rename(node, name)
        self._outputs[node.name] = node
        with self.compute.graph.inserting_after(placeholders(self.compute)[-1]):
            placeholder = self.compute.graph.placeholder(node.name)
        placeholder.meta = {
            "source": Source("structure", node.name),
            "val": Boundary(self.compute, [node]).value(node),
            "layer": node.meta.get("layer", ""),
        }
        self._taken[node.name] = placeholder
        return placeholder

    def commit(self, ctx: Context) -> None:
        """Drop results that the compute graph no longer reads, and make the copy ``ctx.structure``."""
        graph = self.compute.graph
        # Placeholders that were added stand last and have no example yet.
        known = dict(zip(map(source_of, placeholders(self.compute)), ctx.examples or (), strict=False))
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        for name, node in list(self._taken.items()):
            if not node.users:
                graph.erase_node(node)
                del self._taken[name]
        names = {node: name for name, node in self._taken.items()}
        kept = [self._outputs[names[node]] for node in placeholders(self.compute) if node in names]
        self.structure.graph.output_node().args = (tuple(kept),)
        finish(self.structure, ctx.current_pass)
        self.compute.meta["structure"] = ctx.structure = self.structure
        if ctx.examples is not None:
            refresh_examples(self.compute, self.structure, known, ctx)


@contextmanager
def edited(compute: fx.GraphModule, ctx: Context) -> Iterator[fx.GraphModule]:
    """Yield a copy of ``ctx.structure`` to be changed in place; it then becomes ``ctx.structure``.

    Results may be replaced by other nodes, but stay as many and in their order.
    """
    assert ctx.structure is not None
    structure = clone(ctx.structure)
    before = _result_names(structure)
    yield structure
    _rename_sources(compute, dict(zip(before, _result_names(structure), strict=True)))
    finish(structure, ctx.current_pass)
    compute.meta["structure"] = ctx.structure = structure


def _result_names(structure: fx.GraphModule) -> list[str]:
    return [node.name for node in structure.graph.output_node().args[0]]  # type: ignore[union-attr]


def _rename_sources(compute: fx.GraphModule, names: dict[str, str]) -> None:
    """Let placeholders of the compute graph take the results that stand in the place of the old ones."""
    for node in placeholders(compute):
        source = source_of(node)
        if source is not None and source.kind == "structure":
            node.meta["source"] = Source("structure", names[source.name])


def finish(structure: fx.GraphModule, stage: str) -> None:
    """Drop dead code of a structure graph that was changed, infer its meta and verify it."""
    structure.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    infer_meta(structure)
    structure.recompile()
    verify(structure, f"{stage} (structure)")
