"""Groups of elementwise ops that one kernel computes element by element, as the body of a map over rows.

A row program has one accumulator. What branches and joins again (a variance), masks, and values side by
side in one row have no place in it: such ops become a body, whose text the kernels of ``edge_map`` can
compute.
"""

import math

import torch
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    first_operand,
    holds_tensor,
    is_float,
    op_name,
    same_size,
    shape_of,
    unpack,
)
from gnnc.passes.rewrite.grouping import Group, Partition
from gnnc.target import Target

_SEEDS = frozenset({"cat", "masked_fill", "where"})
"""Ops that no row program has."""
_ELEMENTWISE = _SEEDS - {"cat"} | frozenset(
    """
    add sub rsub mul div neg abs exp log sqrt rsqrt reciprocal square relu sigmoid tanh silu leaky_relu
    clamp clamp_min clamp_max maximum minimum eq ne lt le gt ge logical_not
    """.split()
)
_LAYOUT = frozenset({"view", "reshape", "unsqueeze", "squeeze", "select", "slice", "cat"})
_FREE = _LAYOUT - {"cat"}
_MOST_COLUMNS = 2048
"""Columns of a row at most."""
_HALVES = (torch.float16, torch.bfloat16)


def grow_row_bodies(partition: Partition, nodes: list[Node], target: Target) -> set[Node]:
    """Group the ops around concatenations and masks, the last of each group first; return their results.

    Args:
        partition: the groups.
        nodes: the graph's nodes, in order.
        target: says whether its kernels compute bodies of rows, and which types they store.
    """
    results = set()
    for node in reversed(nodes) if target.row_bodies else ():
        if op_name(node) in _SEEDS and _is_free(node, partition) and _fits(node):
            group = _grow(partition, node, target)
            results.update([] if group is None else [group.anchor])
    return results


def _grow(partition: Partition, seed: Node, target: Target) -> Group | None:
    members = {seed: None}
    _add_operands(partition, members, seed)
    last = seed
    while (following := _following(partition, members, last, target)) is not None:
        members[following] = None
        _add_operands(partition, members, following)
        last = following
    if sum(op_name(node) not in _FREE for node in members) < 2:
        return None
    group = partition.start("map", last)
    if partition.add(group, sorted(members)):
        return group
    partition.dissolve(group)
    return None


def _add_operands(partition: Partition, members: dict[Node, None], node: Node) -> None:
    """Add the ops that a node reads, and those that these read, which no other op reads."""
    pending = [node]
    while pending:
        for operand in pending.pop().all_input_nodes:
            inside = operand.users.keys() <= members.keys()
            if operand not in members and inside and _is_free(operand, partition) and _fits(operand):
                members[operand] = None
                pending.append(operand)


def _following(partition: Partition, members: dict[Node, None], last: Node, target: Target) -> Node | None:
    """Return the only reader of the group's result, where the kernel can compute it, too."""
    if len(last.users) != 1 or not is_float(last):
        return None
    (user,) = last.users
    others = set(user.all_input_nodes) - {last}
    if not _is_free(user, partition) or not (_fits(user) or _is_stored(user, target)):
        return None
    depends = any(other in members for other in others) or partition.would_cycle(None, *members, user)
    return None if depends else user


def _is_stored(node: Node, target: Target) -> bool:
    """Return whether a node is the conversion of rows to a type that kernels of row bodies store."""
    return op_name(node) == "_to_copy" and is_float(node, *_HALVES) and target.row_bodies_in_16_bits


def _is_free(node: Node, partition: Partition) -> bool:
    return node.op == "call_function" and partition.group_of(node) is None


def _fits(node: Node) -> bool:
    """Return whether a body of rows may hold a node: each row of it follows from that row of its operands."""
    name = op_name(node)
    if name not in _ELEMENTWISE | _LAYOUT or not str(node.target).startswith("aten."):
        return False
    if not holds_tensor(node) or not is_float(node, torch.float32, torch.bool):
        return False
    shape = shape_of(node)
    if not shape or isinstance(shape[0], int) or not all(isinstance(size, int) for size in shape[1:]):
        return False
    if not 0 < math.prod(shape[1:]) <= _MOST_COLUMNS:
        return False
    return (
        _keeps_rows(node, name)
        if name in _LAYOUT
        else all(_is_operand(arg, node) for arg in node.all_input_nodes)
    )


def _keeps_rows(node: Node, name: str) -> bool:
    """Return whether a layout op moves elements within their rows alone."""
    if name in ("cat", "select", "slice", "squeeze", "unsqueeze"):
        dims = argument(node, "dim", None)
        if not isinstance(dims, int) or dims % (len(shape_of(node)) + (name in ("select", "squeeze"))) == 0:
            return False
        if name == "slice" and not all(isinstance(bound, int) for bound in unpack(node, "start", "step")):
            return False
    sources = argument(node, "tensors") if name == "cat" else [first_operand(node)]
    return all(
        holds_tensor(source)
        and is_float(source)
        and shape_of(source)
        and same_size(shape_of(source)[0], shape_of(node)[0])
        and all(isinstance(size, int) for size in shape_of(source)[1:])
        for source in sources
    )


def _is_operand(value: Node, node: Node) -> bool:
    """Return whether an operand of an elementwise op has as many rows, or is the same for all."""
    if not holds_tensor(value) or not is_float(value, torch.float32, torch.bool):
        return False
    shape, rows = shape_of(value), shape_of(node)
    if all(isinstance(size, int) for size in shape):
        return is_float(value) and (len(shape) < len(rows) or shape[0] == 1)
    return len(shape) == len(rows) and same_size(shape[0], rows[0])
