"""Quantize: primitives take integers (or 16-bit floats), with their scales as values of the graph.

A GEMM's activations get a scale a row (one pass over a row that is in cache anyway) and its weight a
scale an output channel. An aggregation adds rows, and integers add only under one scale: with
examples it takes a power-of-two fraction of one static scale for each row, without them a scale
a row, folded into the edge's weight and summed in floats. Rows too narrow to gain from that take bf16
(``widen``), and what a kernel only hands to the next to be added travels in it too (``carry``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.fx import Node

from gnnc.errors import PrecisionError
from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import argument, shape_of
from gnnc.ir.op import Op, op_of
from gnnc.ir.quantized import MAX_SHIFT, qmax_of
from gnnc.ir.source import Source
from gnnc.passes.base import Context
from gnnc.passes.quantization.bf16_narrow_rows import widen
from gnnc.passes.quantization.bf16_partials import carry_in_bf16, producer
from gnnc.passes.quantization.number_formats import granularities, width_of
from gnnc.passes.quantization.observe import Candidate, Observation, choose, observe
from gnnc.precision import Precision

STATIC_SCALE = "static_scale"
"""Key in the meta of the placeholders of scales that the examples gave."""


@dataclass(frozen=True, slots=True)
class Quantize:
    """Replace primitives by their low-precision forms.

    Attributes:
        max_error: mean relative error of a row up to which the cheapest granularity is taken.
        carry: whether a result that a later kernel only adds travels in bf16.
        dynamic: where no examples gave a scale, whether each ``row`` of an aggregation's input takes its
            own, or fractions of one for the whole ``tensor``, which the product before finds and one more
            pass applies. ``precision="auto"`` weighs scales a row alone.
    """

    max_error: float = 0.015
    carry: bool = True
    dynamic: Literal["row", "tensor"] = "row"
    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        """Refuse a granularity that there is not."""
        if self.dynamic not in ("row", "tensor"):
            raise PrecisionError(f"Quantize: dynamic must be 'row' or 'tensor', got {self.dynamic!r}")

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return the graph with every op whose precision is below FP32 rewritten."""
        low = [node for node in gm.graph.nodes if _is_low(node)]
        if self.carry:
            carry_in_bf16(gm.graph, frozenset(low), ctx)
        seen = _observe(gm, low, ctx)
        scaled = self._scaled_by_products(low, ctx)
        known = len(placeholders(gm))
        for node in low:
            widen(node, ctx, _candidates(node), seen.get(node), self.max_error)
            emit = _Emitter(gm, node, ctx, seen.get(node), self.max_error, node in scaled)
            rules = _INTEGER if emit.precision.is_integer else _HALF
            result = rules[_op(node).name](emit)
            if result is not None:
                _replace(gm.graph, node, result)
        if ctx.examples is not None:
            scales = (node.meta["value"] for node in placeholders(gm)[known:])
            ctx.examples = (*ctx.examples, *scales)
        return gm

    def _scaled_by_products(self, low: list[Node], ctx: Context) -> frozenset[Node]:
        """The aggregations whose input's scale the kernel finds that makes it."""
        if self.dynamic == "row" or ctx.examples is not None or not ctx.target.tensor_scales:
            return frozenset()
        first: dict[Node, Node] = {}  # a product finds one scale, of one of the values that it makes
        found = set()
        for node in filter(_takes_fractions, low):
            rows = _aggregated(node)
            maker = producer(rows, frozenset(low))
            if maker is not None and _is_codes_product(maker) and first.setdefault(maker, rows) is rows:
                found.add(node)
        return frozenset(found)


def _takes_fractions(node: Node) -> bool:
    """Whether an aggregation may add rows that have fractions of one scale, whatever the scale is."""
    fits = any(c.granularity == "row_pow2" for c in _candidates(node))
    of_8 = node.meta["precision"].activation_bits == 8
    return fits and of_8 and len(shape_of(_aggregated(node)) or ()) == 2


def _is_codes_product(node: Node) -> bool:
    """Whether a primitive becomes a product of codes."""
    is_product = _op(node).name == "gemm" and node.meta["precision"].is_integer
    return is_product and width_of(node.args[0]) is not None


def _is_low(node: Node) -> bool:
    precision: Precision | None = node.meta.get("precision")
    return precision is not None and precision.name != "fp32" and op_of(node) is not None


def _op(node: Node) -> Op:
    op = op_of(node)
    assert op is not None
    return op


def _observe(gm: fx.GraphModule, low: list[Node], ctx: Context) -> dict[Node, Observation]:
    """What the examples say about the input of every aggregation that has a choice."""
    if ctx.examples is None:
        return {}
    read = {node: _aggregated(node) for node in low if any(c.static for c in _candidates(node))}
    seen = observe(gm, ctx.examples, frozenset(read.values())) if read else {}
    return {node: seen[source] for node, source in read.items()}


def _candidates(node: Node) -> list[Candidate]:
    """The granularities that an aggregation may take: all that it can, or the one that was assigned."""
    wanted = node.meta.get("granularity")
    return [c for c in granularities(node, node.meta["precision"]) if wanted in (None, c.granularity)]


def _aggregated(node: Node) -> Any:
    return node.args[3 if _op(node).name == "spmm" else 2]


def _replace(graph: fx.Graph, node: Node, result: Node) -> None:
    node.replace_all_uses_with(result)
    result.meta["val"] = node.meta.get("val")
    graph.erase_node(node)


@dataclass(slots=True)
class _Emitter:
    """Writes new nodes before ``node``, with its layer and precision."""

    gm: fx.GraphModule
    node: Node
    ctx: Context
    seen: Observation | None
    max_error: float
    is_scaled: bool  # by the kernel that makes its input

    @property
    def precision(self) -> Precision:
        """The precision that ``assign`` gave the node."""
        return self.node.meta["precision"]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.node):
            new = self.gm.graph.call_function(target, args, kwargs)
        new.meta["layer"] = self.node.meta.get("layer", "")
        new.meta["precision"] = self.precision
        new.meta["assigned"] = self.node.meta.get("assigned", self.node.name)
        return new

    def op(self, name: str, *args: Any) -> Node:
        """Call a primitive."""
        return self(getattr(torch.ops.gnnc, name).default, *args)

    def aten(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Call an ATen op by ``name.overload``."""
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base)
        return self(getattr(packet, overload or "default"), *args, **kwargs)

    def per_row(self, x: Node, bits: int) -> tuple[Node, Node]:
        """Codes of ``x`` and their scales, one a row."""
        scale = self.op("scale", x, "row", *_unless_8(bits))
        return self.op("quantize", x, scale, "row", *_unless_8(bits, None)), scale

    def constant(self, value: float, name: str) -> Node:
        """A placeholder for a scale that the examples gave."""
        graph = self.gm.graph
        with graph.inserting_after(placeholders(self.gm)[-1]):
            new = graph.placeholder(name)
        tensor = torch.tensor(value, dtype=torch.float32, device=self.node.meta["val"].device)
        mode = fake_mode_of(self.gm)
        new.meta = {
            "source": Source("constant", new.name),
            "value": tensor,
            "val": tensor if mode is None else mode.from_tensor(tensor),
            "layer": self.node.meta.get("layer", ""),
            STATIC_SCALE: True,
        }
        return new

    def note(self, text: str) -> None:
        """Record a remark about the node."""
        self.ctx.note(self.node, text)


def _unless_8(bits: int, *before: Any) -> tuple[Any, ...]:
    """Trailing arguments that say the number of bits, where it is not the default."""
    return () if bits == 8 else (*before, bits)


def _gemm(emit: _Emitter) -> Node | None:
    x, w, bias, w_is_kn = _gemm_arguments(emit.node)
    shape = shape_of(x) or ()
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape[1:]):
        emit.note("stays FP32: its input is not rows of a fixed width")
        return None
    flat = len(shape) == 2
    rows = x if flat else emit.aten("reshape", x, [-1, shape[-1]])
    codes, scale = emit.per_row(rows, emit.precision.activation_bits)
    weight = emit.aten("t", w) if w_is_kn else w
    weight_codes, weight_scale = emit.per_row(weight, emit.precision.weight_bits)
    result = emit.op("qgemm", codes, weight_codes)
    result = emit.op("dequantize", result, scale, "row")
    result = emit.op("dequantize", result, weight_scale, "column")
    if bias is not None:
        result = emit.aten("add.Tensor", result, bias)
    if flat:
        return result
    return emit.aten("reshape", result, [-1, *(shape_of(emit.node) or ())[1:]])


def _gemm_arguments(node: Node) -> tuple[Node, Node, Node | None, bool]:
    x, w = node.args[:2]
    return x, w, argument(node, 2, "bias", None), argument(node, 3, "w_is_kn", False)


def _spmm(emit: _Emitter) -> Node:
    rowptr, col, value, x, reduce, num_dst = emit.node.args
    return _aggregate(emit, rowptr, col, value, x, reduce, num_dst)


def _segment_reduce(emit: _Emitter) -> Node | None:
    rowptr, perm, x, reduce, num_dst = emit.node.args
    if perm is None:
        emit.note("stays FP32: rows that are read once, in order, gain nothing from a copy in int8")
        return None
    return _aggregate(emit, rowptr, perm, None, x, reduce, num_dst)


def _aggregate(emit: _Emitter, rowptr: Any, col: Any, value: Any, x: Any, reduce: Any, num_dst: Any) -> Node:
    bits = emit.precision.activation_bits
    if emit.is_scaled:
        base, x = _found_scale(emit, x)
        granularity = "row_pow2"
    else:
        chosen, why = choose(_candidates(emit.node), emit.seen, emit.max_error)
        emit.note(why)
        granularity = chosen.granularity
        if granularity == "row":
            codes, scale = emit.per_row(x, bits)
            return emit.op("qspmm", rowptr, col, value, codes, scale, None, reduce, num_dst)
        base = _static_scale(emit, chosen.headroom)
    shift = _row_shift(emit, x, base) if granularity == "row_pow2" else None
    options = (shift, *_unless_8(bits)) if shift is not None else _unless_8(bits, None)
    codes = emit.op("quantize", x, base, "tensor", *options)
    total = emit.op("qspmm", rowptr, col, value, codes, None, shift, reduce, num_dst)
    exponent = () if shift is None else (-MAX_SHIFT,)
    return emit.op("dequantize", total, base, "tensor", *exponent)


def _found_scale(emit: _Emitter, x: Node) -> tuple[Node, Node]:
    """The scale that the product before finds, and the rows that it writes, bf16: fp16 ends at 65504."""
    emit.note("row_pow2 scales, fractions of one that is taken of the whole tensor at each call")
    base = emit.op("scale", x, "tensor")
    narrow = emit.aten("_to_copy", x, dtype=torch.bfloat16)
    return base, emit.aten("_to_copy", narrow, dtype=torch.float32)


def _static_scale(emit: _Emitter, headroom: float) -> Node:
    assert emit.seen is not None, "a static granularity was chosen without examples"
    qmax = qmax_of(emit.precision.activation_bits)
    return emit.constant(emit.seen.amax * headroom / qmax, f"{emit.node.name}_scale")


def _row_shift(emit: _Emitter, x: Node, base: Node) -> Node:
    is_flat = len(shape_of(_aggregated(emit.node)) or ()) == 2
    rows = x if is_flat else emit.aten("flatten.using_ints", x, 1)
    return emit.op("row_shift", rows, base, *_unless_8(emit.precision.activation_bits))


def _sddmm(emit: _Emitter) -> Node:
    """The integer dot of both ends, times both ends' scales."""
    rowptr, col, a, b, op = emit.node.args
    bits = emit.precision.activation_bits
    a_codes, a_scale = emit.per_row(a, bits)
    b_codes, b_scale = emit.per_row(b, bits)
    return emit.op("qsddmm", rowptr, col, a_codes, b_codes, op, a_scale, b_scale)


_INTEGER: dict[str, Callable[[_Emitter], Node | None]] = {
    "gemm": _gemm,
    "spmm": _spmm,
    "segment_reduce": _segment_reduce,
    "sddmm": _sddmm,
}


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _round_operands(*positions: int) -> Callable[[_Emitter], Node]:
    def rule(emit: _Emitter) -> Node:
        args = list(emit.node.args)
        for position in positions:
            args[position] = emit.aten("_to_copy", args[position], dtype=_DTYPES[emit.precision.name])
        return emit(emit.node.target, *args, **emit.node.kwargs)

    return rule


_HALF: dict[str, Callable[[_Emitter], Node | None]] = {
    "gemm": _round_operands(0, 1),
    "spmm": _round_operands(3),
    "segment_reduce": _round_operands(2),
    "sddmm": _round_operands(2, 3),
}
