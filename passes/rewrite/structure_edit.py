"""Edits of the structure graph by a pass over the compute graph: new results, and unread ones dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx import Node

from gnnc.ir.graph import infer_meta, placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, is_structure, source_of
from gnnc.passes.base import Context
from gnnc.passes.rewrite.boundary import Boundary, refresh_examples
from gnnc.passes.rewrite.node_builder import NodeBuilder
from gnnc.torch_private import rename


class StructureEdit:
    """Edits of the structure graph, in place, by a pass over ``compute``.

    Attributes:
        builder: inserts nodes into the structure graph.
    """

    def __init__(self, compute: fx.GraphModule, structure: fx.GraphModule) -> None:
        self.compute = compute
        self.structure = structure
        self.builder = NodeBuilder(self.structure)
        self._outputs: dict[str, Node] = {node.name: node for node in self._results()}
        self._taken = {
            source.name: node
            for node in placeholders(compute)
            if (source := source_of(node)) is not None and source.kind == "structure"
        }

    def _results(self) -> tuple[Any, ...]:
        return outputs_of(self.structure.graph)

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
        """Drop results that the compute graph no longer reads; let ``ctx.examples`` follow."""
        graph = self.compute.graph
        # Placeholders that were added stand last and have no example yet.
        examples = dict(zip(map(source_of, placeholders(self.compute)), ctx.examples or (), strict=False))
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        for name, node in list(self._taken.items()):
            if not node.users:
                graph.erase_node(node)
                del self._taken[name]
        names = {node: name for name, node in self._taken.items()}
        read = [self._outputs[names[node]] for node in placeholders(self.compute) if node in names]
        self.structure.graph.output_node().args = (tuple(read),)
        finish(self.structure)
        if ctx.examples is not None:
            refresh_examples(self.compute, self.structure, examples, ctx)


@contextmanager
def replacing_results(parts: Parts) -> Iterator[fx.GraphModule]:
    """Yield the structure graph of a program, to be changed in place; the other parts follow.

    Results may be replaced by other nodes, but stay as many and in their order.
    """
    assert parts.structure is not None
    before = _result_names(parts.structure)
    yield parts.structure
    names = dict(zip(before, _result_names(parts.structure), strict=True))
    for _, gm in parts.per_call():
        _rename_sources(gm, names)


def take_result(parts: Parts, node: Node) -> None:
    """Make a node of the structure graph a result of it, and a placeholder of each graph that runs at a call.

    The backward graph takes no value that the forward graph is not given.
    """
    assert parts.structure is not None
    source = Source("structure", node.name)
    results = outputs_of(parts.structure.graph)
    if node not in results:
        parts.structure.graph.output_node().args = ((*results, node),)
    for _, gm in parts.per_call():
        if all(source_of(placeholder) != source for placeholder in placeholders(gm)):
            with gm.graph.inserting_after(placeholders(gm)[-1]):
                taken = gm.graph.placeholder(node.name)
            taken.meta = {"source": source, "val": node.meta["val"], "layer": node.meta.get("layer", "")}


def drop_results(parts: Parts, unread: set[str]) -> None:
    """Drop results of the structure graph, by name, that no graph reads any more."""
    assert parts.structure is not None
    taken = [node for _, gm in parts.per_call() for node in placeholders(gm) if is_structure(node)]
    names = {node: source.name for node in taken if (source := source_of(node)) is not None}
    unread -= {name for node, name in names.items() if node.users}
    for node, name in names.items():
        if name in unread:
            node.graph.erase_node(node)
    results = [node for node in outputs_of(parts.structure.graph) if node.name not in unread]
    parts.structure.graph.output_node().args = (tuple(results),)


def _result_names(structure: fx.GraphModule) -> list[str]:
    return [node.name for node in structure.graph.output_node().args[0]]  # type: ignore[union-attr]


def _rename_sources(gm: fx.GraphModule, names: dict[str, str]) -> None:
    """Let placeholders take the results that stand in the place of the old ones."""
    for node in placeholders(gm):
        source = source_of(node)
        if source is not None and source.kind == "structure":
            node.meta["source"] = Source("structure", names[source.name])


def finish(structure: fx.GraphModule) -> None:
    """Drop dead code of a structure graph that was changed, and infer its meta, so that it runs."""
    structure.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    infer_meta(structure)
    structure.recompile()
