"""Plan of a kernel for a product with a weight: its operands, its constants, and the row program."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, arguments, operand, unpack
from gnnc.ir.qtype import Granularity, QType
from gnnc.ir.row_local import RowOp
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, RowProgram, planned

FLOAT, INT8, BF16, FP16, E4M3, E5M2 = 0, 1, 3, 4, 5, 6
_HALVES = {torch.bfloat16: BF16, torch.float16: FP16}
_QUANTIZED = {torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
"""Modes of products of quantized activations, whose weight is in e4m3 where they are floats."""
_CAST = "aten._to_copy.default"
_QUANTIZE = "gnnc.quantize.default"
_SCALE = "gnnc.scale.default"
_DEQUANTIZE = "gnnc.dequantize.default"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight and the width of its product.

    Attributes:
        w: number of the operand.
        is_kn: whether the layout is ``[in, out]``, not ``[out, in]``.
        width: columns of the product.
    """

    w: int
    is_kn: bool
    width: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of the kernel's operands and its constants.

    Attributes:
        x: number of the activations.
        x_scale: number of their scale; None where the kernel scales every row as it loads it.
        weights: the weights that the activations are multiplied with, one or several.
        mode: ``FLOAT``, ``INT8``, ``BF16``, ``FP16``, ``E4M3`` or ``E5M2``.
        program: row program of the result; of several weights, every one has a window of columns.
    """

    x: int
    x_scale: int | None
    weights: tuple[Weight, ...]
    mode: int
    program: RowProgram

    @property
    def width(self) -> int:
        """Columns of all results; every result begins at a multiple of ``build.WINDOW_ALIGNMENT``."""
        return build.columns_of([weight.width for weight in self.weights])


@dataclass(slots=True)
class _Product:
    """One product: the part that the kernel computes itself, and the chain left to the row program."""

    load: tuple[int, int | None, int]
    weight: Weight
    chain: list[RowOp]
    covered: set[Node]
    bias: int | None = None


@planned
def plan(node: Node) -> Plan:
    """Read operands and row program off products with one matrix and the ops fused around them."""
    inner = Inner(node)
    anchors = inner.some("gnnc.gemm.default", "gnnc.qgemm.default")
    products = [_product(inner, anchor) for anchor in anchors]
    if len({product.load for product in products}) > 1:
        raise Refusal("the products are not of one matrix, loaded in one way")
    widths = [product.weight.width for product in products]
    covered = {node for product in products for node in product.covered}
    program = build.build_windows(inner, widths, [product.chain for product in products], covered)
    if products[0].bias is not None:
        _put_first(program, "ADD_COL", products[0].bias)
    x, x_scale, mode = products[0].load
    return Plan(x, x_scale, tuple(product.weight for product in products), mode, program)


def _product(inner: Inner, anchor: Node) -> _Product:
    if str(anchor.target) == "gnnc.qgemm.default":
        return _plan_quantized(inner, anchor)
    return _plan_float(inner, anchor)


def _plan_float(inner: Inner, anchor: Node) -> _Product:
    x, w, bias, w_is_kn = unpack(anchor, "x", "w", "bias", "w_is_kn")
    covered = {anchor}
    x, x_cast = _uncast(inner, x, covered)
    w, w_cast = _uncast(inner, w, covered)
    w, w_is_kn = _untransposed(inner, w, w_is_kn, covered)
    x_dtype, w_dtype = x_cast or x.meta["val"].dtype, w_cast or w.meta["val"].dtype
    if w_dtype != torch.float32 and x_dtype != w_dtype:
        raise Refusal(f"the weight is {w_dtype} and the activations are not")
    _check_dtypes(x, w)
    if bias is not None and len(inner.nodes) > 1:
        raise Refusal("the bias is inside a product that is fused")
    return _Product(
        load=(inner.operand(x, "x"), None, _HALVES.get(w_dtype, FLOAT)),
        weight=Weight(inner.operand(w, "the weight"), w_is_kn, build.fixed_width(anchor)),
        chain=build.read_chain(inner, anchor),
        covered=covered,
        bias=None if bias is None else inner.operand(bias, "bias"),
    )


def _check_dtypes(x: Node, w: Node) -> None:
    if x.meta["val"].dtype not in (torch.float32, *_HALVES):
        raise Refusal(f"the activations are {x.meta['val'].dtype}")
    if w.meta["val"].dtype != torch.float32:
        raise Refusal(f"the weight is {w.meta['val'].dtype}")
    if x.meta["val"].dim() != 2:
        raise Refusal("the activations are not a matrix")
    build.fixed_width(x)


def _put_first(program: RowProgram, name: str, index: int) -> None:
    number = program.operand(index, "vector")
    code, program.code = program.code, []
    program.add(name, number)
    program.code += code


def _uncast(inner: Inner, node: Any, covered: set[Node]) -> tuple[Node, torch.dtype | None]:
    """Step over a cast to 16 bits that the kernel does as it loads; return the operand and its new dtype."""
    if node in inner.operands or str(node.target) != _CAST:
        return node, None
    dtype = argument(node, "dtype")
    if dtype not in _HALVES:
        raise Refusal(f"the operand is cast to {dtype}")
    covered.add(node)
    return operand(node, "self"), dtype


def _untransposed(inner: Inner, node: Any, w_is_kn: bool, covered: set[Node]) -> tuple[Node, bool]:
    if node in inner.operands or str(node.target) != "aten.t.default":
        return node, w_is_kn
    covered.add(node)
    return operand(node, "self"), not w_is_kn


@dataclass(frozen=True, slots=True)
class _Load:
    """Form in which the kernel loads the activations.

    Attributes:
        value: the node that the kernel reads.
        scale: the scale of the rows, which the kernel computes as it loads them; None where it reads
            quantized values with a scale.
    """

    value: Node
    scale: Node | None


def _plan_quantized(inner: Inner, anchor: Node) -> _Product:
    covered, call = {anchor}, arguments(anchor)
    load = _activations(inner, call["x"], covered)
    w, w_scale, w_is_kn = _weight(inner, call["w"], covered)
    chain = build.read_chain(inner, anchor)
    scale = _take_scales(chain, load, w_scale, covered)
    x_scale = inner.operand(scale, "the scale of x") if load.scale is None else None
    return _Product(
        load=(inner.operand(load.value, "x"), x_scale, _mode(call["x"], call["w"])),
        weight=Weight(inner.operand(w, "the weight"), w_is_kn, build.fixed_width(anchor)),
        chain=chain[2:],
        covered=covered,
    )


def _mode(x: Node, w: Node) -> int:
    x_dtype, w_dtype = x.meta["val"].dtype, w.meta["val"].dtype
    if x_dtype not in _QUANTIZED or w_dtype != (torch.int8 if x_dtype == torch.int8 else torch.float8_e4m3fn):
        raise Refusal(f"the activations are {x_dtype} and the weight is {w_dtype}")
    return _QUANTIZED[x_dtype]


def _activations(inner: Inner, quantized: Any, covered: set[Node]) -> _Load:
    if quantized in inner.operands:
        return _Load(quantized, None)
    if str(quantized.target) != _QUANTIZE or arguments(quantized)["shift"] is not None:
        raise Refusal("the activations are not plainly quantized")
    value, scale, granularity = _quantization(quantized)
    if value.meta["val"].dim() != 2:
        raise Refusal("the activations are not a matrix")
    covered.add(quantized)
    if scale in inner.operands:
        raise Refusal("the scale is an operand, and saturates on load, where no check would find a NaN")
    if not _is_scale_of(scale, value) or granularity != "row":
        raise Refusal(f"the kernel cannot take a {granularity} scale of the activations as it loads")
    covered.add(scale)
    return _Load(value, scale)


def _quantization(node: Node) -> tuple[Node, Node, Granularity]:
    """Return the value, the scale and the granularity of a ``quantize``."""
    call = arguments(node)
    return call["x"], call["scale"], QType.parse(call["qtype"]).granularity


def _is_scale_of(scale: Node, value: Node) -> bool:
    return str(scale.target) == _SCALE and arguments(scale)["x"] is value


def _weight(inner: Inner, quantized: Any, covered: set[Node]) -> tuple[Node, Node, bool]:
    if quantized in inner.operands or str(quantized.target) != _QUANTIZE:
        raise Refusal("the weight is quantized elsewhere, but this kernel quantizes it as it loads")
    value, scale, granularity = _quantization(quantized)
    if granularity != "row" or not _is_scale_of(scale, value):
        raise Refusal(f"the weight has a {granularity} scale, not one an output channel")
    covered.update((quantized, scale))
    w, w_is_kn = _untransposed(inner, value, False, covered)
    if w.meta["val"].dtype != torch.float32:
        raise Refusal(f"the weight is {w.meta['val'].dtype}")
    return w, scale, w_is_kn


def _take_scales(chain: list[RowOp], load: _Load, w_scale: Node, covered: set[Node]) -> Any:
    """Check that the product is scaled by both scales first, which the kernel does; return that of x."""
    if len(chain) < 2 or any(str(op.root.target) != _DEQUANTIZE for op in chain[:2]):
        raise Refusal("the integer product is not dequantized by both scales first")
    first, second = (op.root for op in chain[:2])
    x_scale, exponents = arguments(first)["scale"], [arguments(op)["exponent"] for op in (first, second)]
    if load.scale not in (None, x_scale):
        raise Refusal("the integer product is not dequantized by the scale of its activations first")
    if arguments(second)["scale"] is not w_scale:
        raise Refusal("the integer product is not dequantized by the weight's scale second")
    if any(exponents):
        raise Refusal("the scales come with a power of two")
    covered.update((first, second))
    return x_scale
