"""Quantize: primitives take quantized values (or 16-bit floats), with scales as values of the graph.

A GEMM's activations get a scale a row (one pass over a row that is in cache anyway) and its weight a
scale an output channel. An aggregation adds rows, and integers add only under one scale: with
examples it takes a power-of-two fraction of one static scale for each row, without them a scale
a row, folded into the edge's weight and summed in floats. Rows too narrow to gain from that take bf16
(``bf16_narrow_rows``), as do results that a later kernel only adds (``bf16_partials``).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import fx
from torch.fx import Node

from gnnc.errors import PrecisionError
from gnnc.ir.aten import ROW_VIEWS
from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import (
    ancestors,
    argument,
    arguments,
    aten_name,
    descendants,
    first_operand,
    qtype_of,
    shape_or_none,
    with_arguments,
)
from gnnc.ir.op import Op, has_body, op_of
from gnnc.ir.qtype import Granularity, QType
from gnnc.ir.quantized import MAX_SHIFT, STATIC_RANGE
from gnnc.ir.source import Source, source_of
from gnnc.passes.base import Context
from gnnc.passes.quantization.bf16_attention import use_bf16_for_attention
from gnnc.passes.quantization.bf16_narrow_rows import use_bf16_for_narrow_rows
from gnnc.passes.quantization.bf16_partials import producer, round_partials_to_bf16
from gnnc.passes.quantization.bf16_products import use_bf16_for_product
from gnnc.passes.quantization.body_products import gather_low, has_products, multiply_low
from gnnc.passes.quantization.gradients import GradientRounding, GradientScale, Quantized, Rounding
from gnnc.passes.quantization.logit_rows import logit_rows, read_rounded
from gnnc.passes.quantization.number_formats import (
    CHOSEN,
    FLOAT_DTYPES,
    aggregated_rows,
    granularities,
    width_of,
)
from gnnc.passes.quantization.observe import (
    CLIPPED,
    Candidate,
    Observation,
    choose,
    observe,
)
from gnnc.precision import FP8, INT8, Precision
from gnnc.torch_private import statically_known_true

STATIC_SCALE = "static_scale"
"""Key in the meta of the placeholders of scales that come from the examples."""

SCALED_FROM = "scaled_from"
"""Key in the meta of a graph: the set of ``Source`` that values with a static scale may depend on."""


@dataclass(frozen=True, slots=True)
class Quantize:
    """Replace primitives by their low-precision forms.

    Attributes:
        max_error: mean relative error of a row up to which the cheapest granularity is taken.
        bf16_partials: whether a result that a later kernel only adds is rounded to bf16.
        dynamic: scales of an aggregation's input where no examples gave one: one for each ``row``, or
            power-of-two fractions of one for the whole ``tensor``, which the product before finds and one
            more pass applies. ``precision="auto"`` weighs row scales only.
        gradients: scales of gradients: power-of-two fractions of one for the whole tensor for each row
            (``row_pow2``) where an aggregation sums them, so that it adds integers, and else one for each
            row; one for each ``row``; or one for the ``tensor``.
        rounding: gradients round ``stochastic``, with a seed from torch's default generator at each call, or
            to ``nearest``. All other values round to nearest, and so do all of FP8.
    """

    max_error: float = 0.015
    bf16_partials: bool = True
    dynamic: Literal["row", "tensor"] = "row"
    gradients: GradientScale = "row_pow2"
    rounding: Rounding = "stochastic"
    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        """Refuse an unknown granularity or rounding."""
        if self.dynamic not in ("row", "tensor"):
            raise PrecisionError(f"Quantize: dynamic must be 'row' or 'tensor', got {self.dynamic!r}")
        if self.gradients not in get_args(GradientScale):
            raise PrecisionError(
                f"Quantize: gradients must be 'row_pow2', 'row' or 'tensor', got {self.gradients!r}"
            )
        if self.rounding not in get_args(Rounding):
            raise PrecisionError(
                f"Quantize: rounding must be 'stochastic' or 'nearest', got {self.rounding!r}"
            )

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return the graph with every op whose precision is below FP32 rewritten."""
        low = [node for node in gm.graph.nodes if _is_low(node)]
        for node in low:
            _take_arriving_format(node, ctx)
        if self.bf16_partials:
            round_partials_to_bf16(gm.graph, frozenset(node for node in low if not has_body(node)), ctx)
        observed = _observe(gm, low, ctx)
        gm.meta[SCALED_FROM] = _sources(map(aggregated_rows, observed))
        scaled = self._scaled_by_products(low, ctx)
        num_inputs = len(placeholders(gm))
        summed = {aggregated_rows(node) for node in low if _sums_integers(node)}
        gradients = GradientRounding(self.gradients, self.rounding, _gradients(gm), summed)
        ones: dict[Node, Node] = {}
        for node in low:
            if not gradients.nodes:  # a training step reads its quantized features again
                use_bf16_for_product(node, ctx)
            use_bf16_for_narrow_rows(node, ctx, _candidates(node), observed.get(node), self.max_error)
            use_bf16_for_attention(node, ctx, trains=bool(gradients.nodes))
            build = _Builder(
                gm, node, ctx, observed.get(node), self.max_error, node in scaled, gradients, ones
            )
            logits = logit_rows(node, ctx.target, trains=bool(gradients.nodes))
            if logits is not None:
                read_rounded(logits, partial(_rounded_rows, replace(build, before=logits.reader)))
                ctx.note(logits.reader, f"reads rows of sources in {build.precision}, as the sum does")
            result = _rewrite_of(node)(build)
            if result is not None:
                _replace(gm.graph, node, result)
                if node in gradients.nodes:
                    gradients.nodes.add(result)
        _note_widened_inputs(gm, ctx)
        if ctx.examples is not None:
            ctx.examples += tuple(node.meta["value"] for node in placeholders(gm)[num_inputs:])
        return gm

    def _scaled_by_products(self, low: list[Node], ctx: Context) -> frozenset[Node]:
        """Return the aggregations whose input's scale is found by the kernel that computes the input."""
        if self.dynamic == "row" or ctx.examples is not None or not ctx.target.tensor_scales:
            return frozenset()
        first: dict[Node, Node] = {}  # a product finds the scale of one of its results only
        found = set()
        for node in filter(_takes_fractions, low):
            rows = aggregated_rows(node)
            maker = producer(rows, frozenset(low))
            if maker is not None and _is_integer_product(maker) and first.setdefault(maker, rows) is rows:
                found.add(node)
        return frozenset(found)


def _note_widened_inputs(gm: fx.GraphModule, ctx: Context) -> None:
    """Record the arguments that arrive in 8 bits, and that some op reads in FP32."""
    for node in gm.graph.nodes:
        if not node.users or str(node.target) not in ("gnnc.dequantize.default", "aten._to_copy.default"):
            continue
        source = source_of(first_operand(node))
        dtype = first_operand(node).meta["val"].dtype if source is not None else None
        if source is None or source.kind != "input" or dtype not in (torch.int8, torch.float8_e4m3fn):
            continue
        given = f"{source.name.removesuffix('.values')} arrives in {str(dtype).removeprefix('torch.')}"
        ctx.note(node, f"{given} and is converted to FP32 at each call, for what reads it in FP32")


def _takes_fractions(node: Node) -> bool:
    """Return whether an aggregation may add rows under power-of-two fractions of a scale of any origin."""
    return _sums_integers(node) and len(shape_or_none(aggregated_rows(node)) or ()) == 2


def _is_integer_product(node: Node) -> bool:
    """Return whether a primitive becomes a product of quantized values."""
    is_product = _op(node).name == "gemm" and node.meta["precision"].is_integer
    return is_product and width_of(arguments(node)["x"]) is not None


def _gradients(gm: fx.GraphModule) -> set[Node]:
    """Return the nodes of a joint graph that depend on the gradient of an output."""
    sources = [(node, source_of(node)) for node in placeholders(gm)]
    return descendants(node for node, source in sources if source is not None and source.kind == "tangent")


def _is_low(node: Node) -> bool:
    precision: Precision | None = node.meta.get("precision")
    return precision is not None and precision.name != "fp32" and op_of(node) is not None


def _op(node: Node) -> Op:
    op = op_of(node)
    assert op is not None
    return op


def _observe(gm: fx.GraphModule, low: list[Node], ctx: Context) -> dict[Node, Observation]:
    """Return the observation of the input of every aggregation whose scale may be static."""
    if ctx.examples is None:
        return {}
    read = {node: aggregated_rows(node) for node in low if any(c.static for c in _candidates(node))}
    qtypes: dict[Node, set[QType]] = {}
    for node, rows in read.items():
        qtypes.setdefault(rows, set()).update(c.qtype(node.meta["precision"]) for c in _candidates(node))
    observed = observe(gm, ctx.examples, qtypes) if qtypes else {}
    return {node: observed[rows] for node, rows in read.items()}


def _sources(values: Iterable[Node]) -> frozenset[Source]:
    """Return the sources of the placeholders that values are computed from."""
    found = (source_of(node) for node in ancestors(values) if node.op == "placeholder")
    return frozenset(source for source in found if source is not None)


def _candidates(node: Node) -> list[Candidate]:
    """Return the granularities that an aggregation may take: all that it can, or the one assigned to it."""
    assigned = node.meta.get("granularity")
    return [c for c in granularities(node, node.meta["precision"]) if assigned in (None, c.granularity)]


def _rewrite_of(node: Node) -> "Callable[[_Builder], Node | None]":
    """Return the function that builds the low-precision form of a primitive."""
    if has_body(node):
        return multiply_low if has_products(node) else gather_low
    return _QUANTIZED[_op(node).name] if node.meta["precision"].is_quantized else _round_operands


def _replace(graph: fx.Graph, node: Node, result: Node) -> None:
    node.replace_all_uses_with(result)
    result.meta["val"] = node.meta.get("val")
    graph.erase_node(node)


@dataclass(slots=True)
class _Builder:
    """Builder of nodes before ``node``, with its layer and precision.

    Attributes:
        gm: the graph.
        node: the primitive to be replaced.
        ctx: takes notes.
        observed: the observation of an aggregation's input, or None.
        max_error: mean relative error of a row up to which a granularity is good enough.
        is_scaled: whether the kernel that computes the input finds its scale.
        gradients: rounding of the nodes that depend on the gradient of an output.
        ones: scales of one for each row, by the rows that arrived without scales.
        before: the node that new nodes stand before; None: ``node``.
    """

    gm: fx.GraphModule
    node: Node
    ctx: Context
    observed: Observation | None
    max_error: float
    is_scaled: bool
    gradients: GradientRounding
    ones: dict[Node, Node]
    before: Node | None = None

    @property
    def precision(self) -> Precision:
        """The precision that ``assign`` gave the node."""
        return self.node.meta["precision"]

    def qtype(self, granularity: Granularity = "row") -> QType:
        """Return the quantized type of the node's activations."""
        return self.precision.activation_qtype(granularity)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.before or self.node):
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

    def quantize_rows(self, x: Node, qtype: QType) -> tuple[Node, Node]:
        """Quantize ``x`` with a scale a row, or as a gradient; return the quantized values and the scales.

        Rows that arrived in this type are taken as they are.
        """
        if x in self.gradients.nodes:
            rows = self.gradients.quantize(self, x)
            return rows.values, self.gradients.row_scale(self, x, rows)
        if _arriving_type(x) == qtype:
            return self.arrived_rows(x)
        scale = self.op("scale", x, str(qtype))
        return self.op("quantize", x, scale, str(qtype)), scale

    def arrived_rows(self, x: Node) -> tuple[Node, Node]:
        """Return the quantized values and the scales of rows that arrived so; of plain floats ones."""
        values, *scales = x.args[:2]
        assert isinstance(values, Node)
        if scales:
            return values, scales[0]  # pyright: ignore[reportReturnType]  # by the schema of dequantize
        if values not in self.ones:
            count = self.aten("sym_size.int", values, 0)
            options = {"dtype": torch.float32, "device": values.meta["val"].device}
            self.ones[values] = self.aten("ones", [count], **options)
        return values, self.ones[values]

    def constant(self, value: float, name: str) -> Node:
        """Add a placeholder for a scale that the examples gave."""
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


def _arriving_type(x: Node) -> QType | None:
    """Return the type of the quantized rows, an argument of the model, that a matrix is converted from."""
    op = op_of(x)
    is_dequantized = op is not None and op.name == "dequantize" and x.args[2] == "row"
    if not is_dequantized and aten_name(x) != "_to_copy.default":
        return None
    values = first_operand(x)
    source = source_of(values)
    return qtype_of(values) if source is not None and source.kind == "input" else None


def _arriving_precision(x: Node, ctx: Context) -> Precision | None:
    """Return the precision of the backend that reads rows as they arrive; None where it has none."""
    arriving = _arriving_type(x)
    known = (p for p in (INT8, FP8) if p.name in ctx.target.precisions)
    return next((p for p in known if p.activation_qtype() == arriving), None)


def _take_arriving_format(node: Node, ctx: Context) -> None:
    """Let an op whose rows arrive in 8 bits compute in their format, where the backend has it."""
    rows = argument(node, "x", None)
    asked: Precision = node.meta["precision"]
    if not isinstance(rows, Node) or not asked.is_quantized or node.meta.get(CHOSEN, True):
        return
    arriving = _arriving_precision(rows, ctx)
    if arriving is not None and arriving != asked:
        node.meta["precision"], node.meta["granularity"] = arriving, None
        ctx.note(node, f"{arriving}, not {asked}: its rows arrive so, and are read as they are")


def _gemm(build: _Builder) -> Node | None:
    named = arguments(build.node)
    x, w, bias = named["x"], named["w"], named["bias"]
    shape = shape_or_none(x) or ()
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape[1:]):
        build.note("stays FP32: its input is not rows of a fixed width")
        return None
    is_flat = len(shape) == 2
    rows = x if is_flat else build.aten("reshape", x, [-1, shape[-1]])
    quantized, scale = build.quantize_rows(rows, build.qtype())
    weight = build.aten("t", w) if named["w_is_kn"] else w
    quantized_weight, weight_scale = build.quantize_rows(weight, build.precision.weight_qtype())
    result = build.op("qgemm", quantized, quantized_weight)
    result = build.op("dequantize", result, scale, "row")
    result = build.op("dequantize", result, weight_scale, "column")
    if bias is not None:
        result = build.aten("add.Tensor", result, bias)
    if is_flat:
        return result
    return build.aten("reshape", result, [-1, *(shape_or_none(build.node) or ())[1:]])


def _gemm_tn(build: _Builder) -> Node:
    """Replace a product over nodes by the one of quantized rows; the model's own inputs stay as they are."""
    rows: list[Node] = []
    scales: list[Node | None] = []
    for value in (argument(build.node, "a"), argument(build.node, "b")):
        source = source_of(value)
        if source is not None and source.kind == "input":
            quantized, scale = value, None
        elif _arriving_precision(value, build.ctx) is not None:
            quantized, scale = build.arrived_rows(value)
        else:
            quantized, scale = build.quantize_rows(value, build.qtype())
        rows.append(quantized)
        scales.append(scale)
    return build.op("qgemm_tn", *rows, *scales)


def _spmm(build: _Builder) -> Node:
    named = arguments(build.node)
    return _aggregate(build, named["col"], named["value"])


def _segment_reduce(build: _Builder) -> Node | None:
    perm = arguments(build.node)["perm"]
    if perm is None:
        build.note(
            "stays FP32: rows that are read once, in order, gain nothing from a copy in "
            f"{build.precision.activation_qtype().element}"
        )
        return None
    return _aggregate(build, perm, None)


def _aggregate(build: _Builder, col: Node, value: Node | None) -> Node:
    named = arguments(build.node)
    rowptr, x, reduce, num_dst = named["rowptr"], named["x"], named["reduce"], named["num_dst"]
    if x in build.gradients.nodes:
        return _aggregate_gradients(build, col, value, build.gradients.quantize(build, x))
    if build.is_scaled:
        base, x = _found_scale(build, x)
        granularity: Granularity = "row_pow2"
    else:
        chosen, why = choose(_candidates(build.node), build.precision, build.observed, build.max_error)
        build.note(why)
        granularity = chosen.granularity
        if granularity == "row":
            quantized, scale = build.quantize_rows(x, build.qtype())
            return build.op("qspmm", rowptr, col, value, quantized, scale, None, reduce, num_dst)
        base = _static_scale(build, chosen)
    qtype = str(build.qtype(granularity))
    shift = (_row_shift(build, x, base, qtype),) if granularity == "row_pow2" else ()
    quantized = build.op("quantize", x, base, qtype, *shift)
    if STATIC_RANGE in base.meta:
        quantized.meta[STATIC_RANGE] = base.meta[STATIC_RANGE]
    total = build.op("qspmm", rowptr, col, value, quantized, None, *(shift or (None,)), reduce, num_dst)
    exponent = (-MAX_SHIFT,) if shift else ()
    return build.op("dequantize", total, base, "tensor", *exponent)


def _sums_integers(node: Node) -> bool:
    """Return whether an aggregation may sum rows as integers: it has no weights."""
    return any(c.granularity == "row_pow2" for c in _candidates(node))


def _aggregate_gradients(build: _Builder, col: Node, value: Node | None, rows: Quantized) -> Node:
    """Sum quantized gradients: integers under one scale or fractions of one, else floats."""
    named = arguments(build.node)
    rowptr, x, reduce, num_dst = named["rowptr"], named["x"], named["reduce"], named["num_dst"]
    granularity = "row" if rows.base is None else build.gradients.granularity
    rounding = build.gradients.rounding_of(build.precision)
    build.note(f"{granularity} scales, rounded {_ADVERBS[rounding]}: a gradient")
    if rows.base is None or value is not None or reduce != "sum":
        scale = build.gradients.row_scale(build, x, rows)
        return build.op("qspmm", rowptr, col, value, rows.values, scale, None, reduce, num_dst)
    total = build.op("qspmm", rowptr, col, None, rows.values, None, rows.shift, reduce, num_dst)
    exponent = () if rows.shift is None else (-MAX_SHIFT,)
    return build.op("dequantize", total, rows.base, "tensor", *exponent)


def _found_scale(build: _Builder, x: Node) -> tuple[Node, Node]:
    """Return the scale that the product before finds, and its rows rounded to bf16: fp16 ends at 65504."""
    build.note("row_pow2 scales, fractions of one that is taken of the whole tensor at each call")
    base = build.op("scale", x, str(build.qtype("row_pow2")))
    narrow = build.aten("_to_copy", x, dtype=torch.bfloat16)
    return base, build.aten("_to_copy", narrow, dtype=torch.float32)


def _static_scale(build: _Builder, chosen: Candidate) -> Node:
    assert build.observed is not None, "a static granularity was chosen without examples"
    amax = build.observed.amax
    new = build.constant(amax * chosen.headroom / build.qtype().qmax, f"{build.node.name}_scale")
    new.meta[STATIC_RANGE] = (amax * chosen.least, amax * chosen.headroom * CLIPPED)
    return new


def _row_shift(build: _Builder, x: Node, base: Node, qtype: str) -> Node:
    is_flat = len(shape_or_none(aggregated_rows(build.node)) or ()) == 2
    rows = x if is_flat else build.aten("flatten.using_ints", x, 1)
    return build.op("row_shift", rows, base, qtype)


def _sddmm(build: _Builder) -> Node:
    """Replace a dot product of both ends by the integer one, times the scales of both ends."""
    named = arguments(build.node)
    a, a_scale = build.quantize_rows(named["a"], build.qtype())
    b, b_scale = build.quantize_rows(named["b"], build.qtype())
    return build.op("qsddmm", named["rowptr"], named["col"], a, b, named["op"], a_scale, b_scale)


def _attention_backward(build: _Builder) -> Node | None:
    """Quantize the gradient that edges gather; ``partition`` saves quantized rows of ``x``."""
    grad, views = _viewed(argument(build.node, "grad"))
    before, after = (shape_or_none(node) or () for node in (grad, argument(build.node, "grad")))
    if len(before) not in (2, 3) or not statically_known_true(before[0] == after[0]):
        build.note("stays FP32: its gradient is a view of another number of rows")
        return None
    values, scale = build.quantize_rows(grad, build.qtype())
    wide = build.op("dequantize", values, scale, "row")
    for view in views:
        wide = build(view.target, wide, *view.args[1:], **view.kwargs)
    args, kwargs = with_arguments(build.node, grad=wide)
    result = build(build.node.target, *args, **kwargs)
    result.meta["val"] = build.node.meta["val"]
    rounding = build.gradients.rounding_of(build.precision)
    build.note(f"row scales, rounded {_ADVERBS[rounding]}: a gradient")
    return result


def _round_operands(build: _Builder) -> Node:
    """Call the same op on operands of 16 bits, or of FP32 that were rounded to 16 bits before."""
    named = {name: argument(build.node, name) for name in _op(build.node).low_operands}
    scales = _gradient_scales(build, named)
    rounded = {name: _rounded(build, value, scales.get(name)) for name, value in named.items()}
    args, kwargs = with_arguments(build.node, **rounded)
    result = build(build.node.target, *args, **kwargs)
    result.meta["val"] = build.node.meta.get("val")
    if build.precision.name in build.ctx.target.rounded:
        reason = f"its operands are rounded to {build.precision}, which has no kernel on this backend"
        build.ctx.note(result, f"stays FP32: {reason}")
    if isinstance(result.meta["val"], tuple):
        _divide_results(build, scales)
        return result
    for scale in scales.values():
        result = build.aten("div.Tensor", result, scale)
    return result


def _rounded_rows(build: _Builder, rows: Node) -> Node:
    """Return rows in FP32 that were rounded as an aggregation rounds them."""
    if build.precision.is_quantized:
        return build.op("dequantize", *build.quantize_rows(rows, build.qtype()), "row")
    narrow = build.aten("_to_copy", rows, dtype=FLOAT_DTYPES[build.precision.name])
    return build.aten("_to_copy", narrow, dtype=torch.float32)


def _divide_results(build: _Builder, scales: Mapping[str, Node]) -> None:
    """Divide each result of an op with several by the factors of its operands."""
    for result in list(build.node.users):
        graph, last = build.gm.graph, result
        for scale in scales.values():
            with graph.inserting_after(last):
                quotient = graph.call_function(torch.ops.aten.div.Tensor, (last, scale))
            quotient.meta = dict(result.meta)
            last.replace_all_uses_with(
                quotient, delete_user_cb=lambda user, quotient=quotient: user is not quotient
            )
            last = quotient


def _rounded(build: _Builder, value: Node, scale: Node | None) -> Node:
    views: list[Node] = []
    if scale is not None:
        value, views = _viewed(value)
        value = build.aten("mul.Tensor", value, scale)
    narrow = build.aten("_to_copy", value, dtype=FLOAT_DTYPES[build.precision.name])
    for view in views:
        narrow = build(view.target, narrow, *view.args[1:], **view.kwargs)
    if build.precision.name not in build.ctx.target.rounded:
        return narrow
    return build.aten("_to_copy", narrow, dtype=torch.float32)


def _gradient_scales(build: _Builder, operands: Mapping[str, Node]) -> dict[str, Node]:
    """Return the power of two by which each gradient among the operands is multiplied before it is rounded.

    Gradients are mostly below the normal numbers of fp16; times the power of two they end at its largest.
    All ops with operands of 16 bits are linear in each.
    """
    if build.precision.name != "fp16" or "bias" in arguments(build.node) and argument(build.node, "bias"):
        return {}
    gradients = build.gradients.nodes
    return {
        name: build.op("fp16_scale", _viewed(value)[0])
        for name, value in operands.items()
        if value in gradients
    }


def _viewed(value: Node) -> tuple[Node, list[Node]]:
    """Return the value whose elements, all of them, a value shows in another shape, and the views between."""
    views: list[Node] = []
    while aten_name(value) in ROW_VIEWS:
        views.insert(0, value)
        value = first_operand(value)
    return value, views


_ADVERBS = {"stochastic": "stochastically", "nearest": "to nearest"}
_QUANTIZED: dict[str, Callable[[_Builder], Node | None]] = {
    "gemm": _gemm,
    "gemm_tn": _gemm_tn,
    "spmm": _spmm,
    "segment_reduce": _segment_reduce,
    "sddmm": _sddmm,
    "attention_backward": _attention_backward,
}
