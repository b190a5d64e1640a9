"""Low precision inside the bodies of ``message``, ``edge_map`` and ``edge_sum``: products, and gathered rows.

A product of an edge value with a weight becomes that of their quantized values, or of their values of 16
bits; everything else in a body stays FP32. The weight is quantized outside the body, once a call, with a
scale for each row; the edge value inside of it, with a scale for each edge. Where the program is fp16,
products with a gradient are bf16: nothing in a body brings gradients into the range of fp16.

Where kernels of a backend gather rows of 16 bits, a message in inference reads rows of sources in these,
with products or without: as a weighted sum of rows does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import (
    body_operands,
    body_shapes,
    body_text,
    parse_body,
    product_of,
    values_of,
    widen_input,
)
from gnnc.ir.exact_reads import Reader, exact_in_body
from gnnc.ir.nodes import argument, aten_name, descendants, first_operand, with_arguments
from gnnc.ir.op import has_body
from gnnc.passes.quantization.number_formats import FLOAT_DTYPES
from gnnc.precision import Precision
from gnnc.target import Target

_NARROWEST = 8
"""Inner width from which a product gains: rounding an operand takes as long as a few columns of it."""
_FP16, _BF16 = Precision.parse("fp16"), Precision.parse("bf16")
_CANCEL = frozenset({"sub", "rsub", "neg"})
"""Ops of differences, of which most may cancel: what they read is not rounded for the sake of a gather."""
_TRANSPOSES = ("t.default", "transpose.int", "permute.default")

aten, gnnc = torch.ops.aten, torch.ops.gnnc


@dataclass(frozen=True, slots=True)
class BodyProduct:
    """Product of an edge value with a weight, in the graph of ``parse_body``.

    Attributes:
        node: the product.
        x: the edge value.
        sizes: sizes of ``x`` behind the first.
        bias: the bias, or None.
        weight: number of the constant operand that is the weight.
        is_kn: whether that is ``[K, N]``.
    """

    node: Node
    x: Node
    sizes: tuple[int, ...]
    bias: Node | None
    weight: int
    is_kn: bool


def has_products(node: Node) -> bool:
    """Return whether a node computes a body that multiplies edge values by a weight."""
    return has_body(node) and bool(products_of(node))


def format_of(asked: Precision, target: Target) -> Precision | None:
    """Return the precision of a target's products in bodies where another is asked for; None: FP32.

    Integers and floats of 8 bits whose products its kernels of bodies lack become fp16.
    """
    choices = (asked, _FP16) if asked.is_quantized else (asked,)
    return next((choice for choice in choices if choice.name in target.body_products), None)


def gathers_low(node: Node, target: Target) -> bool:
    """Return whether a message without products reads rows of sources in 16 bits on a target."""
    if not target.rounds_body_rows or node.target is not gnnc.message.default:
        return False
    ops = {aten_name(inner).partition(".")[0] for inner in parse_body(argument(node, "body")).graph.nodes}
    return ops.isdisjoint(_CANCEL) and bool(_roundable(node, argument(node, "src")))


def why_full(node: Node, asked: Precision, target: Target) -> str | None:
    """Return why a body is computed in FP32 throughout; None where it is not."""
    reasons = _reasons(node, products_of(node))
    if format_of(asked, target) is None:
        return f"no kernel of bodies multiplies in {asked} on this backend"
    return None if None in reasons or not reasons else reasons[0]


def products_of(node: Node) -> list[BodyProduct]:
    """Return the products of an edge value with a weight, both FP32, in the body of an op."""
    text = argument(node, "body")
    shapes = body_shapes(text, values_of(body_operands(node)))
    of_edges: set[Node] = set()
    found = []
    for inner in parse_body(text).graph.nodes:
        is_edge_input = inner.op == "placeholder" and str(inner.target)[0] != "c"
        if is_edge_input or of_edges & set(inner.all_input_nodes):
            of_edges.add(inner)
        product = _product(inner, of_edges, shapes)
        if product is not None:
            found.append(product)
    return found


def _product(node: Node, of_edges: set[Node], shapes: dict[Node, torch.Tensor]) -> BodyProduct | None:
    given = product_of(node)
    if given is None or given[0] not in of_edges:
        return None
    x, weight, bias, is_kn = given
    while aten_name(weight) in _TRANSPOSES and shapes[weight].dim() == 2:
        weight, is_kn = first_operand(weight), not is_kn
    values, name = (shapes[x], shapes[weight]), str(weight.target)
    is_plain = all(value.dtype == torch.float32 for value in values) and values[1].dim() == 2
    if weight.op != "placeholder" or name[0] != "c" or bias in of_edges or not is_plain:
        return None
    return BodyProduct(node, x, tuple(values[0].shape[1:]), bias, int(name[1:]), is_kn)


def _reasons(node: Node, products: list[BodyProduct]) -> list[str | None]:
    """Return why each product in the body of an op stays FP32; None where it does not."""
    exact = exact_in_body(node)
    return [_why_full(product, exact.get(product.node)) for product in products]


def _why_full(product: BodyProduct, reader: Reader | None) -> str | None:
    if product.sizes[-1] < _NARROWEST:
        return f"an inner width of {product.sizes[-1]} gains less in low precision than its rounding takes"
    if reader is None:
        return None
    return f"its result feeds {reader.op} in the body, {reader.outcome}, which reads no rounded values"


def multiply_low(build: Any) -> Node | None:
    """Rewrite the products of a body, and return the new op; None where all stay FP32.

    Args:
        build: builder of nodes before the op (``gnnc.passes.quantize``).
    """
    node = build.node
    precision = format_of(build.precision, build.ctx.target)
    assert precision is not None, "assign leaves bodies in FP32 that no kernel multiplies in less"
    if precision.is_quantized and build.gradients.nodes:
        build.note(f"stays FP32: products in bodies of a model that trains are not computed in {precision}")
        return None
    found = products_of(node)
    reasons = _reasons(node, found)
    of_gradients = _of_gradients(node, build.gradients.nodes) if precision == _FP16 else set()
    if _BF16.name not in build.ctx.target.body_products:
        in_fp32 = "gradients in a body have no factor that brings them into the range of fp16"
        reasons = [
            in_fp32 if reason is None and product.x in of_gradients else reason
            for product, reason in zip(found, reasons, strict=True)
        ]
    if None not in reasons:
        build.note(f"stays FP32: {reasons[0]}")
        return None
    body = _Body(build)
    formats = [_BF16 if product.x in of_gradients else precision for product in found]
    for product, reason, narrow in zip(found, reasons, formats, strict=True):
        if reason is None:
            body.multiply(product, narrow)
    rounded = body.round_sources(precision) if _rounds_sources(build) else 0
    result = body.finish()
    if rounded:
        build.ctx.note(result, f"gathers rows of sources in {precision}")
    low = [str(narrow) for narrow, reason in zip(formats, reasons, strict=True) if reason is None]
    counts = " and ".join(
        f"{low.count(name)} of {len(found)} products of its body in {name}" for name in dict.fromkeys(low)
    )
    rest = "".join(f"; one in FP32: {reason}" for reason in reasons if reason is not None)
    build.ctx.note(result, counts + rest)
    return result


def gather_low(build: Any) -> Node:
    """Return a message without products that reads rows of sources in 16 bits.

    For 8 bits these are bf16, which has the range of FP32.

    Args:
        build: builder of nodes before the op (``gnnc.passes.quantize``).
    """
    precision, body = _BF16 if build.precision.is_quantized else build.precision, _Body(build)
    body.round_sources(precision)
    result = body.finish()
    asked = f", not {build.precision}: it adds no integers" if build.precision.is_quantized else ""
    build.ctx.note(result, f"gathers rows of sources in {precision}{asked}")
    return result


def _of_gradients(node: Node, gradients: set[Node]) -> set[Node]:
    """Return the values of a body that depend on gradients, for which fp16 lacks the range."""
    operands = body_operands(node)
    inner = parse_body(argument(node, "body")).graph.find_nodes(op="placeholder")
    return descendants(p for p in inner if operands[str(p.target)] in gradients)


def _rounds_sources(build: Any) -> bool:
    """Return whether a body with products in 16 bits gathers rows of sources in these; not in training."""
    return build.ctx.target.rounds_body_rows and not build.gradients.nodes


def _roundable(node: Node, src: Sequence[Node]) -> list[int]:
    """Return the numbers of the rows of sources that a body reads and that may be rounded."""
    inputs = parse_body(argument(node, "body")).graph.find_nodes(op="placeholder")
    exact = {str(inner.target) for inner in exact_in_body(node) if inner.op == "placeholder"}
    read = {str(inner.target) for inner in inputs} - exact
    return [number for number, rows in enumerate(src) if f"j{number}" in read and _is_wide(rows)]


def _is_wide(rows: Node) -> bool:
    """Return whether rows are FP32, and wide enough to gain from being gathered in 16 bits."""
    value = rows.meta["val"]
    return value.dtype == torch.float32 and value[0].numel() >= _NARROWEST


@dataclass(slots=True)
class _Body:
    """Copy of a body whose products are rewritten one by one.

    Attributes:
        build: builder of nodes before the op.
        graph: the copy.
        copies: its nodes, by those of ``parse_body``.
        src: the rows of the sources of edges.
        const: the constant operands.
        rows: the matrix of each edge value in a precision, and the scales of its rows, if any.
        weights: the constant operands, by number and layout of the weight and precision: low precision, and
            scales, if any.
    """

    build: Any
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[Node, Node] = field(default_factory=dict)
    src: list[Node] = field(init=False)
    const: list[Node] = field(init=False)
    rows: dict[tuple[Node, Precision], tuple[Node, Node | None]] = field(default_factory=dict)
    weights: dict[tuple[int, bool, Precision], tuple[Node, Node | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Copy the body."""
        body = parse_body(argument(self.build.node, "body")).graph
        self.graph.output(self.graph.graph_copy(body, self.copies))
        self.src, self.const = (list(argument(self.build.node, name)) for name in ("src", "const"))

    def multiply(self, product: BodyProduct, precision: Precision) -> None:
        """Replace a product by one in low precision."""
        old = self.copies[product.node]
        key = product.weight, product.is_kn, precision
        if key not in self.weights:
            self.weights[key] = self._weight(product, precision)
        weight = self.weights[key]
        with self.graph.inserting_before(old):
            new = self._product(self._rows(product, precision), weight, product.is_kn)
            if len(product.sizes) > 1:
                new = self._call(aten.reshape.default, new, [-1, *product.sizes[:-1], self._outputs(product)])
            if product.bias is not None:
                new = self._call(aten.add.Tensor, new, self.copies[product.bias])
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        self.copies[product.node] = new

    def round_sources(self, precision: Precision) -> int:
        """Read rows of sources in the 16 bits of the products; return the number of such operands."""
        inputs = {str(node.target): node for node in self.graph.find_nodes(op="placeholder")}
        found = _roundable(self.build.node, self.src)
        dtype = FLOAT_DTYPES[precision.name]
        for number in found:
            self.src[number] = self.build.aten("_to_copy", self.src[number], dtype=dtype)
            widen_input(inputs[f"j{number}"])
        return len(found)

    def finish(self) -> Node:
        """Return the op with the new body."""
        self.graph.eliminate_dead_code()
        const, text = self._numbered(), body_text(self.graph)
        args, kwargs = with_arguments(self.build.node, src=self.src, const=const, body=text)
        result = self.build(self.build.node.target, *args, **kwargs)
        result.meta["val"] = self.build.node.meta["val"]
        return result

    def _numbered(self) -> list[Node]:
        """Number the constants that are still read; return them."""
        inputs = self.graph.find_nodes(op="placeholder")
        numbers = {node: int(str(node.target)[1:]) for node in inputs if str(node.target)[0] == "c"}
        read = sorted((node for node in numbers if node.users), key=numbers.__getitem__)
        const = [self.const[numbers[node]] for node in read]
        for number, node in enumerate(read):
            node.target = f"c{number}"
        return const

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def _outputs(self, product: BodyProduct) -> int:
        return self.const[product.weight].meta["val"].shape[1 if product.is_kn else 0]

    def _rows(self, product: BodyProduct, precision: Precision) -> tuple[Node, Node | None]:
        x = self.copies[product.x]
        if (x, precision) not in self.rows:
            flat = [-1, product.sizes[-1]]
            matrix = x if len(product.sizes) == 1 else self._call(aten.reshape.default, x, flat)
            self.rows[x, precision] = self._narrowed(matrix, precision)
        return self.rows[x, precision]

    def _narrowed(self, rows: Node, precision: Precision) -> tuple[Node, Node | None]:
        if not precision.is_quantized:
            return self._call(aten._to_copy.default, rows, dtype=FLOAT_DTYPES[precision.name]), None
        qtype = str(precision.activation_qtype("row"))
        scale = self._call(gnnc.scale.default, rows, qtype)
        return self._call(gnnc.quantize.default, rows, scale, qtype), scale

    def _weight(self, product: BodyProduct, precision: Precision) -> tuple[Node, Node | None]:
        """Return the inputs of the body for a weight in low precision, and for the scales of its rows."""
        weight = self.const[product.weight]
        if not precision.is_quantized:
            narrow = self.build.aten("_to_copy", weight, dtype=FLOAT_DTYPES[precision.name])
            return self._constant(narrow), None
        rows = self.build.aten("t", weight) if product.is_kn else weight
        qtype = str(precision.weight_qtype())
        scale = self.build.op("scale", rows, qtype)
        return self._constant(self.build.op("quantize", rows, scale, qtype)), self._constant(scale)

    def _constant(self, value: Node) -> Node:
        self.const.append(value)
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            return self.graph.placeholder(f"c{len(self.const) - 1}")

    def _product(self, rows: tuple[Node, Node | None], weight: tuple[Node, Node | None], is_kn: bool) -> Node:
        if rows[1] is None:
            return self._call(gnnc.gemm.default, rows[0], weight[0], None, is_kn)
        product = self._call(gnnc.qgemm.default, rows[0], weight[0])
        product = self._call(gnnc.dequantize.default, product, rows[1], "row")
        return self._call(gnnc.dequantize.default, product, weight[1], "column")
