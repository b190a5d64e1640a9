"""Lowering of ops that make one value, or one row, for each edge."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.runtime.cpu import epilogue
from gnnc.runtime.cpu.epilogue import Refusal, planned
from gnnc.runtime.emitter import Emitter
from gnnc.runtime.registry import kernel

_OPS = {"dot": 0, "add": 1, "sub": 2, "mul": 3, "copy_src": 4, "copy_dst": 5}


@dataclass(frozen=True, slots=True)
class Plan:
    """Arguments of the kernel.

    Attributes:
        op: number of the operation.
        heads: dot products a row.
        a_width, b_width: widths of the operands' rows.
    """

    op: int
    heads: int
    a_width: int
    b_width: int


@kernel("gnnc.sddmm", "gnnc.qsddmm", backend="cpu", name="sddmm", priority=10)
class Sddmm:
    """``gnnc_cpu.sddmm``: a dot, sum, difference, product or copy of the rows at an edge's ends."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Read the widths; refuse operands that the kernel does not read."""
        _, _, a, b, op = node.args
        operands = [value for value in (a, b) if isinstance(value, Node)]
        dtypes = {value.meta["val"].dtype for value in operands}
        if not dtypes <= {torch.float32, torch.bfloat16, torch.int8} or len(dtypes) != 1:
            raise Refusal(f"the operands are {', '.join(map(str, dtypes))}")
        if torch.int8 in dtypes and op != "dot":
            raise Refusal(f"no integer {op}")
        widths = [0 if v is None else epilogue.fixed_width(v) for v in (a, b)]
        if all(value is not None for value in (a, b)) and widths[0] != widths[1]:
            raise Refusal(f"operands of widths {widths[0]} and {widths[1]} would have to be broadcast")
        return Plan(_OPS[op], _heads(node, op), *widths)

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        rowptr, col, a, b, _ = node.args
        first = a if a is not None else b
        second = b if b is not None else a
        width = plan.a_width or plan.b_width
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.sddmm.default, "sddmm")
        emitter.line(
            f"{op}({emitter.vector(_node(rowptr))}, {emitter.vector(_node(col))}, "
            f"{emitter.matrix(_node(first), width)}, {emitter.matrix(_node(second), width)}, "
            f"None, None, {plan.op}, {plan.heads}, {out})"
        )


@kernel("gnnc.edge_softmax", backend="cpu", name="edge_softmax", priority=10)
class EdgeSoftmax:
    """``gnnc_cpu.edge_softmax``: softmax over each row's edges."""

    @staticmethod
    @planned
    def plan(node: Node) -> float:
        """Return eps; refuse logits that are not float32."""
        if _node(node.args[1]).meta["val"].dtype != torch.float32:
            raise Refusal("the logits are not float32")
        epilogue.fixed_width(node.args[1])
        return float(node.args[2]) if len(node.args) > 2 else 1e-16  # type: ignore[arg-type]

    @staticmethod
    def emit(plan: float, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.edge_softmax.default, "edge_softmax")
        rowptr, logits = (_node(arg) for arg in node.args[:2])
        emitter.line(f"{op}({emitter.vector(rowptr)}, {emitter.dense(logits)}, {plan!r}, {out})")


def _heads(node: Node, op: Any) -> int:
    return epilogue.fixed_width(node) if op == "dot" else 1


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value
