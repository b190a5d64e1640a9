"""Insertion of nodes that carry their meta from the start: passes read shapes as they go."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import holds_tensor, shape_of
from gnnc.ir.source import source_of
from gnnc.torch_private import enable_python_dispatcher

aten = torch.ops.aten


class Emitter:
    """Adds calls to a graph, each right after the last of its operands.

    So placed, a node may serve any reader that its operands may serve: what was emitted once is
    not emitted again.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph = gm.graph
        self.mode = fake_mode_of(gm)
        self.last_input = placeholders(gm)[-1:]  # a graph may have none
        self.made: dict[Any, Node] = {}

    def call(self, target: Any, *args: Any, layer: str = "", **kwargs: Any) -> Node:
        """Insert ``target(*args, **kwargs)`` after its operands, with val and layer."""
        key = number(target, args, kwargs)
        known = self.made.get(key)
        if known is not None and not getattr(known, "_erased", False):
            return known
        operands: list[Node] = list(self.last_input)
        fx.map_arg((args, kwargs), operands.append)
        start = next(iter(self.graph.nodes))
        with self.graph.inserting_after(_last(operands)) if operands else self.graph.inserting_before(start):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(layer=layer, val=self.infer(node))
        if not is_random(node):
            self.made[key] = node
        return node

    def bring_before(self, reader: Node, *nodes: Node) -> bool:
        """Move ``nodes`` and what they are made of before ``reader``; False where they are made of it."""
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

    def infer(self, node: Node) -> Any:
        """The value of ``node`` as far as shape and dtype go, from those of its inputs."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        assert callable(node.target)
        if self.mode is None:
            return node.target(*args, **kwargs)
        # Without the dispatcher, a decomposition in C++ would fix symbolic sizes to their examples.
        with self.mode, enable_python_dispatcher():
            return node.target(*args, **kwargs)


def _last(nodes: list[Node]) -> Node:
    """The node that stands last in the graph."""
    last = nodes[0]
    for node in nodes:
        last = node if last < node else last
    return last


class Sizes:
    """The one node that stands for each symbolic size of a graph.

    Where an input has the size, the node reads it from that input: the structure graph can then
    know it without a tensor of the compute graph.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.known: dict[Any, Node] = {}
        self.inputs = _input_sizes(emitter.graph)

    def add(self, node: Node) -> Node | int:
        """Return what stands for the symbolic int that ``node`` computes: maybe ``node``."""
        expression = node.meta["val"].node.expr
        if expression.is_number:
            return int(expression)
        if expression not in self.known:
            found = self.inputs.get(expression)
            reads_input = found is not None and node.args == found
            made = node if found is None or reads_input else self._size(*found)
            self.known[expression] = made
        return self.known[expression]

    def _size(self, tensor: Node, dim: int) -> Node:
        return self.emitter.call(aten.sym_size.int, tensor, dim)

    def of(self, tensor: Node, dim: int) -> Node | int:
        """A size of ``tensor``: an int, or the node of its symbol."""
        size = shape_of(tensor)[dim]
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression.is_number:  # a number among the arguments has settled it
            return int(expression)
        if expression not in self.known:
            return self.add(self._size(*self.inputs.get(expression, (tensor, dim))))
        return self.known[expression]


def _input_sizes(graph: fx.Graph) -> dict[Any, tuple[Node, int]]:
    """Which dimension of which input each symbolic size is, the first that has it."""
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
    """Erase what nobody reads; sizes stay, for a later pass may count by them."""

    def is_kept(node: Node) -> bool:
        return node.op in ("placeholder", "output") or isinstance(node.meta.get("val"), torch.SymInt)

    gm.graph.eliminate_dead_code(is_impure_node=is_kept)


def is_of_model(node: Node) -> bool:
    """Whether a value depends on parameters, buffers and constants only."""
    if node.op == "placeholder":
        source = source_of(node)
        return source is not None and source.kind in ("parameter", "buffer", "constant")
    return all(map(is_of_model, node.all_input_nodes))


def is_random(node: Node) -> bool:
    """Whether two runs of ``node`` may differ."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def number(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A key that is equal for two calls that compute the same."""
    return target, _key(args), _key(dict(sorted(kwargs.items())))


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, slice):
        return "slice", _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return type(value).__name__, value
