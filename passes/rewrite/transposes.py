"""Transposed CSRs that a graph reads from the structure graph, and edge values in their order."""

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import aten_name, is_result, outputs_of, result_index, unpack
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, is_structure, source_of
from gnnc.passes.rewrite.structure_edit import take_result

aten, gnnc = torch.ops.aten, torch.ops.gnnc

Edges = tuple[Node, Node]
"""Offsets and columns of a CSR."""


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transpose of a CSR.

    Attributes:
        of: offsets and columns of the CSR.
        made: node of the structure graph that sorts the edges.
        perm: node of the structure graph with the place in the CSR of each edge of the transpose; None: there
            is none.
    """

    of: Edges
    made: Node
    perm: Node | None


class Transposes:
    """Transposed CSRs among the placeholders of ``gm``, a graph of ``parts``.

    Attributes:
        replaced: names of the results of the structure graph that ``own_copies`` has taken the place of.
    """

    def __init__(self, gm: fx.GraphModule, parts: Parts) -> None:
        structure = parts.structure
        self.gm, self.parts = gm, parts
        self.replaced: set[str] = set()
        self._placeholders = {
            source.name: node
            for node in placeholders(gm)
            if (source := source_of(node)) is not None and is_structure(node)
        }
        results = () if structure is None else outputs_of(structure.graph)
        self._producers = {node.name: node for node in results}
        self._found = {} if structure is None else self._find(structure)

    def _find(self, structure: fx.GraphModule) -> dict[Edges, Transpose]:
        found: dict[Edges, Transpose] = {}
        for made in structure.graph.find_nodes(op="call_function", target=gnnc.csr_transpose.default):
            parts = {result_index(user): user for user in made.users if is_result(user)}
            rowptr, col = map(self._given, unpack(made, "rowptr", "col"))
            rowptr_t, col_t = self._given(parts.get(0)), self._given(parts.get(1))
            if rowptr is not None and col is not None and rowptr_t is not None and col_t is not None:
                found[rowptr_t, col_t] = Transpose((rowptr, col), made, parts.get(2))
        return found

    def _given(self, node: Node | None) -> Node | None:
        """Return the placeholder for a value of the structure graph, if there is one."""
        return None if node is None else self._placeholders.get(node.name)

    def of(self, node: Node) -> Edges | None:
        """Return the CSR whose transpose an op goes over; None for another op."""
        transpose = self._found.get(unpack(node, "rowptr", "col"))
        return None if transpose is None else transpose.of

    def permutation(self, node: Node, dtype: torch.dtype) -> Node:
        """Return the placeholder for the place in the CSR of each edge of the transpose that an op goes over.

        Args:
            node: the op.
            dtype: dtype of the places: int64, or int32 as kernels read the columns of a CSR.
        """
        edges = unpack(node, "rowptr", "col")
        transpose = self._found[edges]
        perm = transpose.perm
        if perm is None:
            with transpose.made.graph.inserting_after(transpose.made):
                perm = transpose.made.graph.call_function(operator.getitem, (transpose.made, 2))
            perm.meta.update(layer=transpose.made.meta.get("layer", ""), val=transpose.made.meta["val"][2])
            self._found[edges] = replace(transpose, perm=perm)
        return self._take(perm if perm.meta["val"].dtype == dtype else _converted(perm, dtype))

    def in_order(self, value: Node) -> Node | None:
        """Return the edge value in the order of the CSR that ``value`` is in the order of its transpose."""
        perms = [transpose.perm for transpose in self._found.values() if transpose.perm is not None]
        if aten_name(value) == "index_select.default":
            source, dim, index = unpack(value, "self", "dim", "index")
            return source if dim == 0 and index in map(self._given, perms) else None
        made = self._producer(value)
        if made is None or aten_name(made) != "index_select.default":
            return None
        source, dim, index = unpack(made, "self", "dim", "index")
        return self._given(source) if dim == 0 and index in perms else None

    def _producer(self, value: Node) -> Node | None:
        source = source_of(value)
        return self._producers.get(source.name) if source is not None and is_structure(value) else None

    def own_copies(self, node: Node) -> tuple[Node, ...]:
        """Let an op read edge values through nodes of its own that bring them to the transpose's order.

        Each is a copy of what it has read, or takes the place of a result of the structure graph.
        """
        copies: dict[Node, Node] = {}
        for value in unpack(node, "edge")[0]:
            if value not in copies:
                copies[value] = self._copy(value, node)
        for value, copy in copies.items():
            node.replace_input_with(value, copy)
        return tuple(copies.values())

    def _copy(self, value: Node, before: Node) -> Node:
        source = self.in_order(value)
        assert source is not None
        made = self._producer(value)
        if made is not None:
            self.replaced.add(made.name)
        index = self._take(made.args[2]) if made is not None else unpack(value, "index")[0]  # type: ignore[arg-type]
        with self.gm.graph.inserting_before(before):
            copy = self.gm.graph.call_function(aten.index_select.default, (source, 0, index))
        copy.meta = {key: value.meta[key] for key in ("val", "layer") if key in value.meta}
        return copy

    def _take(self, node: Node) -> Node:
        """Return the placeholder for a value of the structure graph, new if need be."""
        known = self._placeholders.get(node.name)
        if known is not None:
            return known
        take_result(self.parts, node)
        taken = next(
            found for found in placeholders(self.gm) if source_of(found) == Source("structure", node.name)
        )
        self._placeholders[node.name] = taken
        return taken


def _converted(perm: Node, dtype: torch.dtype) -> Node:
    """Return the node of the structure graph that converts a permutation, new if need be."""
    for user in perm.users:
        if aten_name(user) == "_to_copy.default" and user.meta["val"].dtype == dtype:
            return user
    with perm.graph.inserting_after(perm):
        made = perm.graph.call_function(aten._to_copy.default, (perm,), {"dtype": dtype})
    made.meta.update(layer=perm.meta.get("layer", ""), val=perm.meta["val"].to(dtype))
    return made
