"""Reading an fx node: its shape and its arguments."""

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.qtype import QType
from gnnc.torch_private import OpOverload, schema, statically_known_true

_UNTAGGED = frozenset(("aten::leaky_relu", "aten::hardswish", "aten::_prelu_kernel"))
"""Pointwise ops that torch does not tag as such, some of them before version 2.13 only."""

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
        _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.flatten.using_ints,
        _aten.alias.default, _aten.detach.default,
    }
)  # fmt: skip


def shape_of(node: Node) -> tuple[Any, ...] | None:
    """The (symbolic) shape of a tensor node, or None for anything else."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def qtype_of(node: Node) -> QType | None:
    """Return the type of a node's quantized values, or None where it holds anything else."""
    qtype = node.meta.get("qtype")
    return qtype if isinstance(qtype, QType) else None


def same_sizes(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether two shapes are equal for every value of their symbols."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def all_ones(sizes: Collection[Any]) -> bool:
    """Whether every size is 1."""
    return all(statically_known_true(size == 1) for size in sizes)


def is_float(node: Node, *dtypes: torch.dtype) -> bool:
    """Whether a node holds a tensor of one of these types, float32 where none is given."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (dtypes or (torch.float32,))


def is_pointwise(node: Node) -> bool:
    """Whether a node is an ATen op that computes every element from those at its place."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or schema(target).name in _UNTAGGED


def is_view(node: Node) -> bool:
    """Whether a node only gives a tensor another shape."""
    return node.op == "call_function" and node.target in _VIEWS


def argument(node: Node, index: int, name: str, default: Any) -> Any:
    """An op's argument by position or keyword, or its default."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def is_number(value: Any) -> bool:
    """Whether an argument is a plain Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_node(value: Any) -> Node:
    """An argument that must be a node."""
    assert isinstance(value, Node)
    return value
