"""Narrow edges: a value of every edge is stored in the 16 bits to which its readers round it.

An ``edge_map`` that is stored (``raise``) gives FP32. Where its readers are bodies, casts to 16 bits and sums
of its rows, and round it, its rows are written and read in these 16 bits: in a layer of EGNN the copy of the
edge MLP's result takes longer than the sum that reads it. A reader of FP32, such as a residual, takes rounded
values where they are bf16; fp16 would lose the range of FP32. Products that were asked for in 8 bits, and run
in fp16, take bf16, too, beside a reader of FP32: its error is at most half of that of 8 bits with one scale a
row. What a comparison depends on stays as it is.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import body_operands, body_text, parse_body, widen_input
from gnnc.ir.exact_reads import EXACT, exact_in_body
from gnnc.ir.nodes import argument, cast_dtype, op_name, operand, with_arguments
from gnnc.ir.op import has_body
from gnnc.passes.base import Context
from gnnc.precision import Precision

aten = torch.ops.aten

_LOW = (torch.float16, torch.bfloat16)
_FP16_OR_BF16 = torch.int8
"""Stands, among the dtypes that readers take, for fp16 of a product that was asked for in 8 bits."""


@dataclass(frozen=True, slots=True)
class NarrowEdges:
    """Store values of edges in the 16 bits in which products and sums read them."""

    name: ClassVar[str] = "narrow_edges"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return the graph with the results of these ``edge_map`` in 16 bits."""
        if not ctx.target.narrow_edges:
            return gm
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.gnnc.edge_map.default):
            dtype = _dtype_of_readers(node)
            if dtype is not None:
                _store_in(node, dtype)
                ctx.note(node, f"stored in {str(dtype).removeprefix('torch.')}: products or sums read it so")
        return gm


def _dtype_of_readers(node: Node) -> torch.dtype | None:
    """Return the 16-bit dtype to which the readers of a value round it; None: they do not, or not all may."""
    if node.meta["val"].dtype != torch.float32 or EXACT in node.meta:
        return None
    dtypes = _dtypes_read(node)
    if not dtypes or dtypes == {torch.float32}:
        return None
    if dtypes <= {torch.float16, _FP16_OR_BF16}:
        return torch.float16
    return None if torch.float16 in dtypes else torch.bfloat16


def _dtypes_read(value: Node) -> set[torch.dtype] | None:
    """Return the dtypes in which readers take an edge value; None: one of them reads all its bits."""
    dtypes = set[torch.dtype]()
    for user in value.users:
        if cast_dtype(user) in _LOW:
            found: set[torch.dtype] | None = {argument(user, "dtype")}
        elif has_body(user):
            found = _dtypes_in_body(user, value)
        elif _moves_rows(user, value):
            found = _dtypes_read(user)
        else:
            sums = op_name(user) == "segment_reduce" and operand(user, "x") is value
            found = {torch.float32} if sums else None
        if found is None:
            return None
        dtypes |= found
    return dtypes


def _moves_rows(user: Node, value: Node) -> bool:
    """Return whether an op puts the rows of a value in another order."""
    return str(user.target) == "aten.index_select.default" and user.args[:2] == (value, 0)


def _dtypes_in_body(user: Node, value: Node) -> set[torch.dtype] | None:
    """Return the dtypes in which steps of a body take an edge value; None: it needs each bit of it."""
    names = [name for name, operand in body_operands(user).items() if operand is value]
    exact = {str(node.target) for node in exact_in_body(user) if node.op == "placeholder"}
    if exact & set(names) or any(name[0] != "e" for name in names):
        return None
    inputs = parse_body(argument(user, "body")).graph.find_nodes(op="placeholder")
    readers = [reader for node in inputs if str(node.target) in names for reader in node.users]
    found = {dtype if (dtype := cast_dtype(reader)) in _LOW else torch.float32 for reader in readers}
    return {_FP16_OR_BF16 if dtype == torch.float16 and _asks_8_bits(user) else dtype for dtype in found}


def _asks_8_bits(user: Node) -> bool:
    """Return whether an op was asked for in integers or floats of 8 bits."""
    precision: Precision | None = user.meta.get("precision")
    return precision is not None and precision.is_quantized


def _store_in(node: Node, dtype: torch.dtype) -> None:
    """Let an ``edge_map`` give 16 bits, and its readers take them."""
    _narrow(node, dtype)
    _take_narrow(node, dtype)


def _take_narrow(value: Node, dtype: torch.dtype) -> None:
    """Let the readers of a value take it in 16 bits."""
    value.meta["val"] = value.meta["val"].to(dtype)
    for user in list(value.users):
        if cast_dtype(user) == dtype:
            user.replace_all_uses_with(value)
            value.graph.erase_node(user)
        elif has_body(user):
            _widen(user, value)
        elif _moves_rows(user, value):
            _take_narrow(user, dtype)


def _narrow(node: Node, dtype: torch.dtype) -> None:
    """Convert the value of a body."""
    graph = fx.Graph()
    result = graph.graph_copy(parse_body(argument(node, "body")).graph, {})
    graph.output(graph.call_function(aten._to_copy.default, (result,), {"dtype": dtype}))
    _set_body(node, graph)


def _widen(user: Node, value: Node) -> None:
    """Convert an edge value to FP32 in a body that reads it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(parse_body(argument(user, "body")).graph, {}))
    names = {name for name, operand in body_operands(user).items() if operand is value}
    for rows in graph.find_nodes(op="placeholder"):
        if str(rows.target) in names:
            widen_input(rows)
    _set_body(user, graph)


def _set_body(node: Node, graph: fx.Graph) -> None:
    node.args, node.kwargs = with_arguments(node, body=body_text(graph))
