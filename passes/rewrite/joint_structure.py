"""Move of nodes that depend on the graph alone, such as a transposed CSR, to the structure graph."""

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import holds_tensor, is_random, is_result, outputs_of, schema_of
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.source import Source, is_structure, source_of
from gnnc.passes.rewrite.structure_edit import finish
from gnnc.torch_private import rename

_aten = torch.ops.aten


def move_to_structure(compute: fx.GraphModule, structure: fx.GraphModule) -> None:
    """Move the nodes of ``compute`` that depend on results of ``structure`` alone, in place.

    What stays reads them from new placeholders with the shapes that the nodes had: a transposed CSR has as
    many edges as the CSR.
    """
    _Move(compute, structure).run()


class _Move:
    """Nodes on the way from the compute graph to the structure graph.

    Attributes:
        copies: the structure node of each value of the compute graph that it has.
    """

    def __init__(self, compute: fx.GraphModule, structure: fx.GraphModule) -> None:
        self.compute, self.structure = compute, structure
        self.moved: dict[Node, None] = {}
        self.results: list[Node] = list(outputs_of(structure.graph))
        by_name = {node.name: node for node in self.results}
        self.copies: dict[Any, Node] = {
            node: by_name[source.name]
            for node in placeholders(compute)
            if (source := source_of(node)) is not None and source.kind == "structure"
        }
        self._sizes: dict[Any, Node] = {
            size_expr(node.meta["val"]): node for node in structure.graph.nodes if _is_size(node)
        }

    def run(self) -> None:
        for node in self.compute.graph.nodes:
            if self._may_move(node):
                self.moved[node] = None
        read = [node for node in self.moved if self._is_read(node)]
        if not read:
            return
        output = self.structure.graph.output_node()
        needed = self._needed(read)
        with self.structure.graph.inserting_before(output):
            for node in self.moved:
                if node in needed:
                    self._copy(node)
        last = placeholders(self.compute)[-1]
        for node in read:
            last = self._take(node, last)
        output.args = (tuple(self.results),)
        self.compute.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        finish(self.structure)

    def _may_move(self, node: Node) -> bool:
        if node.op != "call_function" or is_random(node) or not holds_tensor(node) and op_of(node) is None:
            return False
        tensors = [arg for arg in node.all_input_nodes if not _is_size(arg)]
        sizes = [arg for arg in node.all_input_nodes if _is_size(arg)]
        fixed = all(arg in self.moved or is_structure(arg) for arg in tensors)
        return bool(tensors) and fixed and all(map(self._knows_size, sizes))

    def _knows_size(self, node: Node) -> bool:
        return size_expr(node.meta["val"]) in self._sizes or self._size_source(node) is not None

    def _is_read(self, node: Node) -> bool:
        """Return whether a node that stays reads this one, which is a tensor."""
        return holds_tensor(node) and any(user not in self.moved for user in node.users)

    def _needed(self, read: list[Node]) -> set[Node]:
        needed, pending = set(read), list(read)
        while pending:
            for arg in pending.pop().all_input_nodes:
                if arg in self.moved and arg not in needed:
                    needed.add(arg)
                    pending.append(arg)
        return needed

    def _copy(self, node: Node) -> None:
        copy = self.structure.graph.node_copy(node, lambda arg: self.copies.get(arg) or self._size(arg))
        copy.meta.pop("val", None)
        self.copies[node] = copy
        producer = node.args[0] if is_result(node) else None
        if isinstance(producer, Node) and op_of(producer) is not None:
            rename(copy, schema_of(producer).returns[node.args[1]].name)  # type: ignore[index]

    def _take(self, node: Node, last: Node) -> Node:
        """Replace a node of the compute graph by a placeholder for the structure's result."""
        copy = self.copies[node]
        if copy in self.results:
            known = next(n for n in placeholders(self.compute) if self.copies.get(n) is copy)
            node.replace_all_uses_with(known, delete_user_cb=lambda user: user not in self.moved)
            return last
        self.results.append(copy)
        with self.compute.graph.inserting_after(last):
            placeholder = self.compute.graph.placeholder(copy.name)
        placeholder.meta = {
            "source": Source("structure", copy.name),
            "val": node.meta["val"],
            "layer": node.meta.get("layer", ""),
        }
        self.copies[placeholder] = copy
        node.replace_all_uses_with(placeholder, delete_user_cb=lambda user: user not in self.moved)
        return placeholder

    def _size(self, node: Node) -> Node:
        """Return the structure node of a size of the compute graph."""
        expression = size_expr(node.meta["val"])
        if expression not in self._sizes:
            self._sizes[expression] = self._add_size(node)
        return self._sizes[expression]

    def _add_size(self, node: Node) -> Node:
        found = self._size_source(node)
        assert found is not None
        holder, dim = found
        graph = self.structure.graph
        source = source_of(holder)
        assert source is not None
        if dim is None:
            name = source.name
        elif holder in self.copies:
            return graph.call_function(_aten.sym_size.int, (self.copies[holder], dim))
        else:
            name = f"{source.name}.shape[{dim}]"
        known = [n for n in placeholders(self.structure) if source_of(n) == Source("size", name)]
        if known:
            return known[0]
        inputs = placeholders(self.structure)
        with graph.inserting_after(inputs[-1]):
            size = graph.placeholder("num_" + "".join(c if c.isalnum() else "_" for c in name).strip("_"))
        size.meta = {"val": node.meta["val"], "layer": "", "source": Source("size", name)}
        return size

    def _size_source(self, node: Node) -> tuple[Node, int | None] | None:
        """Return the placeholder that has a size, and its dimension; (the placeholder, None) for a number."""
        expression = size_expr(node.meta["val"])
        for holder in placeholders(self.compute):
            source = source_of(holder)
            if source is None or source.kind not in ("input", "size", "structure"):
                continue
            value = holder.meta["val"]
            if source.kind == "size":
                if size_expr(value) == expression:
                    return holder, None
                continue
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                if size_expr(size) == expression:
                    return holder, dim
        return None


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)
