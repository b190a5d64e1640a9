"""Builder of nodes with meta: passes read the shapes of nodes that they have just inserted."""

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import call_key, holds_tensor, is_random, shape_of
from gnnc.ir.source import source_of
from gnnc.torch_private import enable_python_dispatcher

aten = torch.ops.aten


class NodeBuilder:
    """Builder that inserts each call right after the last of its operands.

    In that place a node can serve every reader that its operands can serve, so equal calls share one node.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph = gm.graph
        self.mode = fake_mode_of(gm)
        self.last_input = placeholders(gm)[-1:]  # a graph may have none
        self.calls: dict[Any, Node] = {}

    def call(self, target: Any, *args: Any, layer: str = "", **kwargs: Any) -> Node:
        """Return the node of ``target(*args, **kwargs)``, inserted after its operands with val and layer."""
        key = call_key(target, args, kwargs)
        known = self.calls.get(key)
        if known is not None and not getattr(known, "_erased", False):
            return known
        operands: list[Node] = list(self.last_input)
        fx.map_arg((args, kwargs), operands.append)
        start = next(iter(self.graph.nodes))
        with self.graph.inserting_after(_last(operands)) if operands else self.graph.inserting_before(start):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(layer=layer, val=self.infer(node))
        if not is_random(node):
            self.calls[key] = node
        return node

    def bring_before(self, reader: Node, *nodes: Node) -> bool:
        """Move ``nodes`` and their inputs before ``reader``; return False where they depend on it."""
        late: set[Node] = set()
        pending = [node for node in nodes if not node < reader]
        while pending:
            node = pending.pop()
            if node is reader:
                return False
            if node not in late:
                late.add(node)
                pending += [arg for arg in node.all_input_nodes if not arg < reader]
        for node in sorted(late):
            reader.prepend(node)
        return True

    def move_up(self, node: Node) -> None:
        """Move a call right behind the last of its operands."""
        if node.op == "call_function" and node.all_input_nodes:
            _last([*self.last_input, *node.all_input_nodes]).append(node)

    def infer(self, node: Node) -> Any:
        """Return the fake value of ``node``: shape and dtype, inferred from its inputs."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        assert callable(node.target)
        if self.mode is None:
            return node.target(*args, **kwargs)
        # Without the dispatcher, a decomposition in C++ would fix symbolic sizes to their examples.
        with self.mode, enable_python_dispatcher():
            return node.target(*args, **kwargs)


def _last(nodes: list[Node]) -> Node:
    """Return the node that stands last in the graph."""
    last = nodes[0]
    for node in nodes:
        last = node if last < node else last
    return last


class Sizes:
    """Table of the one node that computes each symbolic size of a graph.

    If an input has the size, the node reads it from that input: the structure graph can then compute
    it without a tensor of the compute graph.
    """

    def __init__(self, builder: NodeBuilder) -> None:
        self.builder = builder
        self.nodes: dict[Any, Node] = {}
        self.inputs = _input_sizes(builder.graph)

    def add(self, node: Node) -> Node | int:
        """Return the int or the node that replaces ``node``, a symbolic int: perhaps ``node`` itself."""
        expression = node.meta["val"].node.expr
        if expression.is_number:
            return int(expression)
        if expression not in self.nodes:
            dimension = self.inputs.get(expression)
            reads_input = dimension is not None and node.args == dimension
            replacement = node if dimension is None or reads_input else self._size(*dimension)
            self.nodes[expression] = replacement
        return self.nodes[expression]

    def _size(self, tensor: Node, dim: int) -> Node:
        return self.builder.call(aten.sym_size.int, tensor, dim)

    def of(self, tensor: Node, dim: int) -> Node | int:
        """Return a size of ``tensor``: an int, or the node of its symbol."""
        size = shape_of(tensor)[dim]
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression.is_number:  # a number among the arguments has settled it
            return int(expression)
        if expression not in self.nodes:
            return self.add(self._size(*self.inputs.get(expression, (tensor, dim))))
        return self.nodes[expression]


def _input_sizes(graph: fx.Graph) -> dict[Any, tuple[Node, int]]:
    """Return the first input and dimension that each symbolic size is the size of."""
    sizes: dict[Any, tuple[Node, int]] = {}
    for node in graph.nodes:
        source = source_of(node)
        if source is None or source.kind != "input" or not holds_tensor(node):
            continue
        for dim, size in enumerate(shape_of(node)):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (node, dim))
    return sizes


def drop_dead(gm: fx.GraphModule) -> None:
    """Erase nodes without readers, except sizes: a later rewrite may need them."""

    def stays(node: Node) -> bool:
        return node.op in ("placeholder", "output") or isinstance(node.meta.get("val"), torch.SymInt)

    gm.graph.eliminate_dead_code(is_impure_node=stays)


def is_of_model(node: Node) -> bool:
    """Return whether a value depends on parameters, buffers and constants only."""
    if node.op == "placeholder":
        source = source_of(node)
        return source is not None and source.kind in ("parameter", "buffer", "constant")
    return all(map(is_of_model, node.all_input_nodes))
