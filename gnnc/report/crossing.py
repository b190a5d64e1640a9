"""Values that the backward graph has of the forward pass: saved, given, or computed again."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from gnnc.ir import describe
from gnnc.ir.nodes import is_result
from gnnc.ir.parts import BACKWARD_LAYER, KEPT_WIDE
from gnnc.ir.source import source_of
from gnnc.report.naming import Named

_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A tensor that the forward graph returns for the backward graph.

    Attributes:
        name: its name in both printed graphs.
        layer: path of the module that makes it.
        type: dtype and shape, such as ``f32[N, 16]``.
        bytes: an expression of the sizes of the graph.
        reason: why it is FP32 in a program of 16 bits; empty: it is not, or all are.
    """

    name: str
    layer: str
    type: str
    bytes: sympy.Expr
    reason: str

    def __str__(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        reason = f", FP32: {self.reason}" if self.reason else ""
        return f"{where}{self.name}, {self.type}, {self.bytes} bytes{reason}"


def saved_values(named: Named) -> list[SavedValue]:
    """Return the tensors that are saved for a named backward graph, in the order of its arguments."""
    found = []
    for node in _inputs(named, "saved"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            size = sympy.Mul(value.dtype.itemsize, *named.symbols.sizes(value))
            layer, reason = str(node.meta.get("layer", "")), str(node.meta.get(KEPT_WIDE, ""))
            found.append(SavedValue(named.names[node], layer, named.type_text(value), size, reason))
    return found


def total_bytes(values: Iterable[SavedValue]) -> sympy.Expr:
    """Return the bytes of saved tensors together."""
    return sympy.expand(sympy.Add(*(value.bytes for value in values)))


def crossing_lines(named: Named) -> list[str]:
    """Return comments for a printed backward graph: what is saved for it, shared with it, computed again.

    Args:
        named: the named backward graph.
    """
    saved = saved_values(named)
    names = ", ".join(value.name for value in saved)
    shared = [
        named.names[node] for kind in ("structure", "features", "parameter") for node in _inputs(named, kind)
    ]
    again = [named.names[node] for node in named.graph.nodes if _is_again(node)]
    return [
        *_wrapped(f"saved by compute, {total_bytes(saved)} bytes: {names or 'nothing'}"),
        *_wrapped(f"read by both: {', '.join(shared) or 'nothing'}"),
        *_wrapped(f"computed again: {', '.join(again) or 'nothing'}"),
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="#   ")


def _inputs(named: Named, kind: str) -> list[Node]:
    sources = [(node, source_of(node)) for node in named.graph.nodes if node.op == "placeholder"]
    return [node for node, source in sources if source is not None and source.kind == kind]


def _is_again(node: Node) -> bool:
    """Return whether a node of the backward graph repeats a computation of the forward graph."""
    if node.op != "call_function" or is_result(node) or describe.is_free(node):
        return False
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and not str(node.meta.get("layer", "")).endswith(BACKWARD_LAYER)
