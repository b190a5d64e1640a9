"""Body of a map over rows: the text of a fused group of elementwise ops, and its operands."""

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import Node

from gnnc.errors import VerifyError
from gnnc.ir.body import body_text
from gnnc.ir.nodes import first_operand, is_view, op_name, same_size, shape_of
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Plan:
    """A body that computes each row of a result from that row of its operands.

    Attributes:
        body: the text; its inputs are ``e0``, ``e1``, ... with a row for each of the result, and ``c0``, ...
        operands: name in the body and number of each operand of the submodule.
        width: columns of the result.
        dtype: element type of the result, which the body computes in FP32.
    """

    body: str
    operands: tuple[tuple[str, int], ...]
    width: int
    dtype: torch.dtype


def plan(node: Node, *, stores_bool: bool = False) -> Plan:
    """Return the body of a fused group.

    Args:
        node: the group, or a single op.
        stores_bool: whether the kernel stores masks, too.

    Raises:
        Refusal: the group has several results, or values of other rows.
    """
    inner = Inner(node)
    if len(inner.results) != 1:
        raise Refusal(f"it has {len(inner.results)} results")
    (result,) = inner.results
    value = result.meta["val"]
    dtypes = (*_DTYPES, torch.bool) if stores_bool else _DTYPES
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes or value.dim() < 1:
        raise Refusal(f"its result is no matrix of {'floats or bools' if stores_bool else 'floats'}")
    text, names = _text(inner, result)
    operands = tuple((name, inner.operands[operand]) for operand, name in names.items())
    return Plan(text, operands, build.fixed_width(result), value.dtype)


def _text(inner: Inner, result: Node) -> tuple[str, dict[Node, str]]:
    """Return the text of a body, and the names of its operands."""
    graph, copies, names = fx.Graph(), dict[Node, Node](), dict[Node, str]()
    for operand in inner.operands:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue  # a size, which views alone read
        if value.is_floating_point() and value.dtype not in _DTYPES:
            raise Refusal(f"{operand.name} is {value.dtype}")
        kind = "e" if _has_rows_of(operand, result) else "c"
        if kind == "c" and not all(isinstance(size, int) for size in shape_of(operand)):
            raise Refusal(f"{operand.name} has other rows than the result")
        names[operand] = f"{kind}{sum(name[0] == kind for name in names.values())}"
        copies[operand] = graph.placeholder(names[operand])
    for node in inner.nodes:
        copies[node] = _copied(graph, node, copies, is_last=node is result)
    graph.output(copies[result])
    try:
        return body_text(graph), names
    except VerifyError as error:
        raise Refusal(str(error)) from None


def _has_rows_of(operand: Node, result: Node) -> bool:
    """Return whether an operand has a row for each of the result; of fixed sizes, it may broadcast."""
    shape, rows = shape_of(operand), shape_of(result)
    if not shape or not same_size(shape[0], rows[0]):
        return False
    return not isinstance(rows[0], int) or len(shape) == len(rows)


def _copied(graph: fx.Graph, node: Node, copies: dict[Node, Node], *, is_last: bool) -> Node:
    if is_view(node) and op_name(node) != "clone":
        sizes = [-1, *map(int, shape_of(node)[1:])]
        source = copies[first_operand(node)]
        return graph.call_function(torch.ops.aten.reshape.default, (source, sizes))
    if is_last and op_name(node) == "_to_copy":
        return copies[first_operand(node)]
    try:
        return graph.node_copy(node, copies.__getitem__)
    except KeyError as size:
        raise Refusal(f"{node.name} reads the size {size}") from None
