"""Readers of one fx node: its op, its arguments by name, its shape."""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from gnnc.ir.aten import UNTAGGED_POINTWISE, VIEWS
from gnnc.ir.qtype import QType
from gnnc.torch_private import OpOverload, schema, statically_known_true

_REQUIRED: Any = object()
"""Stands for the default of a reader that has none."""


def op_name(node: Node) -> str:
    """Return the short name of the op of a node: ``spmm``, ``relu``, ``placeholder``."""
    target = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return node.op
    if isinstance(target, OpOverload):
        return schema(target).name.split("::")[1]
    return str(getattr(target, "__name__", target))


def cast_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype that a cast converts to; None for another op, or a cast that keeps the dtype."""
    return argument(node, "dtype", None) if op_name(node) == "_to_copy" else None


def aten_name(node: Node) -> str:
    """Return ``add.Tensor`` for ``aten.add.Tensor``, or "" for anything that is not an ATen op."""
    text = str(node.target)
    return text.removeprefix("aten.") if text.startswith("aten.") else ""


def is_gnnc(node: Node) -> bool:
    """Return whether a node calls one of the primitives."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "gnnc"


def is_pointwise(node: Node) -> bool:
    """Return whether a node is an ATen op that computes every element from the elements at its place."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or op_name(node) in UNTAGGED_POINTWISE


def is_view(node: Node) -> bool:
    """Return whether a node only gives a tensor another shape."""
    return aten_name(node) in VIEWS


def schema_of(node: Node) -> torch.FunctionSchema:
    """Return the schema of a node that calls an ``OpOverload``."""
    assert isinstance(node.target, OpOverload), node.format_node()
    return schema(node.target)


@cache
def _parameters(target: OpOverload) -> dict[str, tuple[int, Any]]:
    """Return the position and the default (None where it has none) of each parameter of an op."""
    declared = enumerate(schema(target).arguments)
    return {a.name: (position, a.default_value) for position, a in declared}


def argument(node: Node, name: str, default: Any = _REQUIRED) -> Any:
    """Return the argument of a call of an ``OpOverload`` that its schema calls ``name``.

    Args:
        node: the call; the argument may be given by position or by keyword.
        name: the name in the schema.
        default: the result where the op has no such parameter, for rules that serve several ops
            (``alpha`` of ``add`` and ``mul``). Without it, such a name is an error.

    Returns:
        The argument, or the schema's default where the call leaves it out.
    """
    found = _parameters(node.target).get(name)  # type: ignore[arg-type]
    if found is None:
        if default is _REQUIRED:
            raise ValueError(f"{node.target} has no parameter {name!r}; it has {list(arguments(node))}")
        return default
    position, omitted = found
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, omitted)


def unpack(node: Node, *names: str) -> tuple[Any, ...]:
    """Return several arguments of a call by the names in its schema."""
    return tuple([argument(node, name) for name in names])


def arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of a call of an ``OpOverload`` by name, defaults filled in."""
    return {argument.name: _given(node, i, argument) for i, argument in enumerate(schema_of(node).arguments)}


def _given(node: Node, position: int, parameter: torch.Argument) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(parameter.name, parameter.default_value)


def operand(node: Node, name: str) -> Node:
    """Return the argument that the schema calls ``name``, which must be a node."""
    return as_node(argument(node, name))


def first_operand(node: Node) -> Node:
    """Return the first argument, which must be a node: the operand of a view, a unary op or a getitem."""
    found = node.args[0]
    assert isinstance(found, Node), f"the first argument of {node.format_node()} is not a node"
    return found


def set_argument(node: Node, name: str, value: Any) -> None:
    """Change the argument that the schema calls ``name``."""
    position, _ = _parameters(node.target)[name]  # type: ignore[index, arg-type]
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def with_arguments(node: Node, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the ``(args, kwargs)`` of a call with some arguments changed; the node stays."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in changes.items():
        position, _ = _parameters(node.target)[name]  # type: ignore[index, arg-type]
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def is_result(node: Node) -> bool:
    """Return whether a node picks one value of a tuple (``getitem``)."""
    return node.target is operator.getitem


def result_index(node: Node) -> Any:
    """Return which value of its tuple a ``getitem`` picks."""
    return node.args[1]


def is_random(node: Node) -> bool:
    """Return whether two runs of ``node`` may differ."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def outputs_of(graph: Graph) -> Any:
    """Return the value of a graph: a node, or a tuple or list of nodes."""
    return graph.output_node().args[0]


def holds_tensor(node: Any) -> bool:
    """Return whether ``node`` is a node that holds one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def value_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node that holds a tensor."""
    return node.meta["val"]


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return the sizes, ints or SymInts, of a node that holds a tensor."""
    return tuple(node.meta["val"].shape)


def shape_or_none(node: Node) -> tuple[Any, ...] | None:
    """Return the sizes of a node that holds a tensor, or None for any other node."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def qtype_of(node: Node) -> QType | None:
    """Return the type of a node's quantized values, or None where it holds anything else."""
    qtype = node.meta.get("qtype")
    return qtype if isinstance(qtype, QType) else None


def same_size(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal for every value of their symbols."""
    return bool(statically_known_true(a == b))


def same_shape(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether two shapes are equal for every value of their symbols."""
    return len(a) == len(b) and all(map(same_size, a, b))


def may_be_same_shape(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether two shapes are equal for some value of their symbols, as far as is known."""
    return len(a) == len(b) and not any(statically_known_true(x != y) for x, y in zip(a, b, strict=True))


def all_ones(sizes: Collection[Any]) -> bool:
    """Return whether every size is 1."""
    return all(statically_known_true(size == 1) for size in sizes)


def is_float(node: Node, *dtypes: torch.dtype) -> bool:
    """Return whether a node holds a tensor of one of these types, float32 where none is given."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (dtypes or (torch.float32,))


def is_number(value: Any) -> bool:
    """Return whether an argument is a plain Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_node(value: Any) -> Node:
    """Return an argument that must be a node."""
    assert isinstance(value, Node)
    return value


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and everything that their values are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and everything that is computed from their values."""
    return reached(nodes, lambda node: node.users)


def reached(nodes: Iterable[Node], neighbors: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes and all that can be reached from them through their neighbors."""
    found, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += neighbors(node)
    return found


def call_key(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a hashable key that is equal for two calls of equal targets and arguments."""
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
