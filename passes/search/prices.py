"""Predicted times of ops and of writing tensors in a format, from sizes and the machine's rates."""

from collections.abc import Collection, Sequence

import sympy
import torch
from torch.fx import Node

from gnnc.cost import model
from gnnc.cost.model import Rates, Term
from gnnc.ir.attention import match_attention
from gnnc.ir.nodes import operand
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.row_local import classify
from gnnc.passes.quantization.number_formats import FLOAT_DTYPES, FULL, Option, is_low_aggregation
from gnnc.passes.rewrite.assumed_sizes import AssumedSizes
from gnnc.target import Target

_CALIBRATED = {"fp8": "int8"}
"""The precision whose rates stand for those of one that is not calibrated: rows of as many bytes."""


class Prices:
    """Predicted seconds of ops and of stores.

    Args:
        assumed_sizes: evaluates symbolic sizes.
        rates: the machine's rates.
        target: the backend; says whether one kernel multiplies a matrix with several weights.
    """

    def __init__(self, assumed_sizes: AssumedSizes, rates: Rates, target: Target) -> None:
        self._assumed_sizes = assumed_sizes
        self._rates = rates
        self._target = target

    def joins(self, tensor: Node, products: Collection[Node], name: str) -> bool:
        """Return whether one kernel multiplies a tensor, in a format, with the weights of all products."""
        columns, *widths = (node.meta["val"].shape[-1] for node in (tensor, *products))
        precision = Option.parse(name).precision
        dtype = FLOAT_DTYPES.get(precision.name, torch.float32)
        dtype = precision.activation_qtype().dtype if precision.is_quantized else dtype
        return len(products) == 1 or self._target.joins_products(dtype, columns, widths)

    def op(self, node: Node, option: Option) -> float:
        """Return the time of a primitive in an option, without the write of its result."""
        size = _element_bytes(option)
        terms = model.op_terms(node, _mode(node, option), size)
        if model.family_of(node) == "gemm":
            terms += _preparation(node, option)
        elif option.precision.is_quantized and option.granularity not in (None, "row"):
            terms.append(Term("step", model.elements(node)))
        return self._seconds(_family(node), terms)

    def store(self, tensor: Node, name: str, gemm_loads: bool) -> float:
        """Return the time to write a tensor in a format, or to convert it as GEMMs load it."""
        maker = _maker(tensor)
        if gemm_loads and maker is None:
            return self._narrow_at_load(tensor, name)
        if maker is None and name == "fp32":
            return 0.0
        terms = _write(tensor, name)
        if maker is None:
            read = model.held(tensor)
            return self._seconds("map", [Term("launch", model.ONE), Term("read", read, read), *terms])
        return self._seconds(_family(maker), terms)

    def load(self, tensor: Node, name: str) -> float:
        """Return the time of a GEMM's launch and of reading its rows in a format."""
        size = model.padded(tensor, _element_bytes(Option.parse(name)))
        return self._seconds("gemm", [Term("launch", model.ONE), Term("read", size, size)])

    def _narrow_at_load(self, tensor: Node, name: str) -> float:
        """Return the added time of a GEMM that narrows FP32 rows as it loads them."""
        if name == "fp32":
            return 0.0
        option = Option.parse(name)
        terms = [Term("quantize" if option.precision.is_quantized else "step", model.elements(tensor))]
        fp32_bytes, low_bytes = model.padded(tensor, 4), model.padded(tensor, _element_bytes(option))
        seconds = self._seconds("gemm", [*terms, Term("read", fp32_bytes, fp32_bytes)])
        return seconds - self._seconds("gemm", [Term("read", low_bytes, low_bytes)])

    def _seconds(self, family: str, terms: Sequence[Term]) -> float:
        return self._rates.seconds(family, [term.at(self._assumed_sizes.value) for term in terms])


def _preparation(node: Node, option: Option) -> list[Term]:
    """Return the work of a GEMM on its weight, if it has one, and on its integer result."""
    if option == FULL:
        return []
    op = op_of(node)
    if op is not None and "w" not in op.parameters:
        return [Term("step", 2 * model.elements(node))] if option.precision.is_quantized else []
    weight = operand(node, "w")
    if not option.precision.is_quantized:
        return [Term("step", model.elements(weight))]
    return [Term("quantize", model.elements(weight)), Term("step", 2 * model.elements(node))]


def _write(tensor: Node, name: str) -> list[Term]:
    option = Option.parse(name)
    size = model.padded(tensor, _element_bytes(option))
    if not option.precision.is_quantized:
        steps = [] if name == "fp32" else [Term("step", model.elements(tensor))]
        return [Term("write", size, size), *steps]
    rows = size_expr(tensor.meta["val"].shape[0])
    scales = {"row": rows * 4, "row_pow2": rows}.get(option.granularity or "row")
    extra = [] if scales is None else [Term("write", scales, scales), Term("quantize", rows)]
    return [Term("write", size, size), Term("quantize", model.elements(tensor)), *extra]


def _element_bytes(option: Option) -> sympy.Rational:
    return sympy.Rational(option.precision.activation_bits, 8)


def _mode(node: Node, option: Option) -> str:
    name = _CALIBRATED.get(option.precision.name, option.precision.name)
    return f"{name}.{option.granularity or 'row'}" if _is_scaled_sum(node, option) else name


def _is_scaled_sum(node: Node, option: Option) -> bool:
    return is_low_aggregation(node) and option.precision.is_quantized


def _family(node: Node) -> str:
    return "attention" if match_attention(node) else model.family_of(node)


def _maker(tensor: Node) -> Node | None:
    """Return the primitive whose kernel computes a tensor, or None."""
    node = tensor
    while op_of(node) is None:
        rows = [n for n in node.all_input_nodes if (op := classify(node, n)) and op.role != "store"]
        if not rows:
            return None
        node = rows[0]
    return node
