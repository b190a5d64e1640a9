"""Plan of kernels for ops that compute one value, or one row, for every edge."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, operand, unpack
from gnnc.ir.qtype import BYTE_DTYPES, FP8_DTYPES
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned

_OPS = {"dot": 0, "add": 1, "sub": 2, "mul": 3, "copy_src": 4, "copy_dst": 5}


@dataclass(frozen=True, slots=True)
class Plan:
    """Arguments of the kernel.

    Attributes:
        op: number of the operation.
        heads: dot products a row.
        a_width, b_width: widths of the operands' rows.
        is_scaled: whether the rows of both ends have scales: ``a_scale`` and ``b_scale`` of ``gnnc.qsddmm``.
    """

    op: int
    heads: int
    a_width: int
    b_width: int
    is_scaled: bool = False

    @property
    def width(self) -> int:
        """Width of the rows."""
        return self.a_width or self.b_width


@planned
def plan(node: Node) -> Plan:
    """Read the widths; refuse operands that the kernel does not read."""
    a, b, op = unpack(node, "a", "b", "op")
    operands = [value for value in (a, b) if isinstance(value, Node)]
    dtypes = {value.meta["val"].dtype for value in operands}
    are_alike = len(dtypes) == 1 or dtypes == set(FP8_DTYPES)
    if not dtypes <= set(build.ROW_DTYPES) or not are_alike:
        raise Refusal(f"the operands are {', '.join(map(str, dtypes))}")
    if not dtypes.isdisjoint(BYTE_DTYPES) and op != "dot":
        raise Refusal(f"no {op} of quantized rows")
    widths = [0 if v is None else build.fixed_width(v) for v in (a, b)]
    if all(value is not None for value in (a, b)) and widths[0] != widths[1]:
        raise Refusal(f"operands of widths {widths[0]} and {widths[1]} would have to be broadcast")
    is_scaled = any(argument(node, scale, None) is not None for scale in ("a_scale", "b_scale"))
    return Plan(_OPS[op], _heads(node, op), *widths, is_scaled=is_scaled)


@planned
def softmax_plan(node: Node) -> float:
    """Return eps; refuse logits that are not float32."""
    logits = operand(node, "logits")
    if logits.meta["val"].dtype != torch.float32:
        raise Refusal("the logits are not float32")
    build.fixed_width(logits)
    return float(argument(node, "eps"))


@planned
def softmax_backward_plan(node: Node) -> int:
    """Return the number of heads; refuse operands that are not float32."""
    for name in ("alpha", "grad"):
        if operand(node, name).meta["val"].dtype != torch.float32:
            raise Refusal(f"{name} is not float32")
    return build.fixed_width(node)


def _heads(node: Node, op: Any) -> int:
    return build.fixed_width(node) if op == "dot" else 1
