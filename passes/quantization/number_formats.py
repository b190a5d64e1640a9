"""Options of each primitive: a precision of the backend, and a granularity of its scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import arguments, shape_or_none
from gnnc.ir.op import op_of
from gnnc.passes.base import Context
from gnnc.passes.quantization.observe import CANDIDATES, Candidate
from gnnc.precision import BF16, FP8, FP32, Precision
from gnnc.target import Target

FLOAT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype that operands are rounded to, by name of the precision."""

CHOSEN = "chosen"
"""Key in the meta of primitives: whether the precision was chosen for this op, not for the model."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to compute a primitive.

    Attributes:
        precision: precision of the primitive's operands.
        granularity: the rows of an aggregation's input that share a scale; None where the precision
            leaves no choice.
    """

    precision: Precision
    granularity: str | None = None

    def __str__(self) -> str:
        return self.precision.name if self.granularity is None else f"{self.precision} {self.granularity}"

    @staticmethod
    def parse(text: str) -> "Option":
        """Return the option that ``str`` wrote.

        Raises:
            PrecisionError: the first word is not a precision.
        """
        name, _, granularity = text.partition(" ")
        return Option(Precision.parse(name), granularity or None)


FULL = Option(FP32)


def may_take_bf16(node: Node, target: Target) -> bool:
    """Return whether a primitive of a quantized model may take bf16: nothing chose its own precision."""
    asked: Precision = node.meta["precision"]
    return not node.meta.get(CHOSEN, True) and asked.is_quantized and BF16.name in target.precisions


def has_low_form(node: Node) -> bool:
    """Return whether a primitive can compute below FP32 at all."""
    op = op_of(node)
    if op is None or not op.low_operands:
        return False
    named = arguments(node)
    if op.name == "segment_reduce":
        return named["perm"] is not None
    return op.name != "sddmm" or named["op"] == "dot"


def is_low_aggregation(node: Node) -> bool:
    """Return whether a node sums, or otherwise reduces, rows that may be held in fewer bits."""
    op = op_of(node)
    return op is not None and op.kind == "aggregate" and bool(op.low_operands)


def aggregated_rows(node: Node) -> Node:
    """Return the operand of an aggregation that holds the rows."""
    return arguments(node)["x"]


def granularities(node: Node, precision: Precision) -> list[Candidate]:
    """Return the ways in which an aggregation's input can be quantized; none for another op."""
    if not is_low_aggregation(node) or not precision.is_quantized or not has_low_form(node):
        return []
    named = arguments(node)
    sums_integers = precision.is_integer and named.get("value") is None
    return [c for c in CANDIDATES if named["reduce"] in c.reduces and (sums_integers or not c.exact)]


def width_of(node: object) -> int | None:
    """Return the columns of a feature tensor's rows, those of all heads; None where they are not fixed."""
    shape = shape_or_none(node) if isinstance(node, Node) else None
    if shape is None or not all(isinstance(size, int) for size in shape[1:]):
        return None
    return math.prod(shape[1:])


def options_of(node: Node, ctx: Context, asked: Precision | None = None) -> Sequence[Option]:
    """Return every way in which the backend can compute ``node``, FP32 first, in a fixed order.

    FP8 is among them only where it is ``asked`` for: its rates are not calibrated.
    """
    found = [FULL]
    if not has_low_form(node):
        return found
    op = op_of(node)
    for precision in map(Precision.parse, sorted(ctx.target.precisions - {"fp32"})):
        if precision == FP8 != asked:
            continue
        if precision.is_quantized and (op is None or op.quantized is None):
            continue
        ways = granularities(node, precision)
        if not ways:
            found.append(Option(precision))
            continue
        found += [Option(precision, c.granularity) for c in ways if ctx.examples is not None or not c.static]
    return found


def assigned_options(gm: GraphModule) -> dict[str, Option]:
    """Return the options that ``assign`` wrote into a graph, by name of the primitive."""
    return {
        node.name: Option(node.meta["precision"], node.meta.get("granularity"))
        for node in gm.graph.nodes
        if "precision" in node.meta
    }
