"""Rows that a kernel reads as they are, where its group converts them to FP32."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.aten import ROW_VIEWS
from gnnc.ir.nodes import aten_name, first_operand, op_name, operand
from gnnc.runtime.row_program.build import Inner, Refusal


@dataclass(frozen=True, slots=True)
class ConvertedRows:
    """An operand before its conversion to FP32.

    Attributes:
        values: the rows.
        scale: scales of quantized rows; None: there are none.
        conversions: the nodes of the group that convert them, and views.
    """

    values: Node
    scale: Node | None
    conversions: tuple[Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the rows."""
        return self.values.meta["val"].dtype


def read_rows(inner: Inner, node: Node) -> ConvertedRows:
    """Read an operand back to what the group is given."""
    conversions: list[Node] = []
    scale: Node | None = None
    while node not in inner.operands:
        conversions.append(node)
        if op_name(node) == "dequantize":
            scale = operand(node, "scale")
        elif aten_name(node) not in (*ROW_VIEWS, "_to_copy.default"):
            raise Refusal(f"{node.name} is computed inside the group")
        node = first_operand(node)
    return ConvertedRows(node, scale, tuple(conversions))
