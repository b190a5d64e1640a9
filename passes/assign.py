"""Assign: a precision for every primitive, and the reason wherever one stays FP32.

Sources, strongest first: what must be FP32 (softmax and its logits, the statistics of norms, ops without
an integer form, values that ``exact_values`` marked), what the user set for the layer (``overrides``, then
``plan``), and the precision of the whole model, unless the op is too narrow to gain from it. For ``auto``
that last one is chosen op by op.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from torch import fx
from torch.fx import Node

from gnnc.errors import PrecisionError, UnsupportedError
from gnnc.ir.exact_reads import EXACT
from gnnc.ir.nodes import argument, first_operand, is_result, op_name, result_index
from gnnc.ir.op import Op, has_body, op_of
from gnnc.ir.parts import BACKWARD_LAYER, GRADIENTS
from gnnc.passes.base import Context, Property
from gnnc.passes.quantization.body_products import gathers_low, has_products, why_full
from gnnc.passes.quantization.last_layer import last_layer
from gnnc.passes.quantization.norm_statistics import statistics
from gnnc.passes.quantization.number_formats import CHOSEN, FULL, Option, options_of, width_of
from gnnc.passes.quantization.variances import variances
from gnnc.passes.search.choice import Choice
from gnnc.precision import AUTO, Precision


@dataclass(frozen=True, slots=True)
class Assign:
    """Set ``node.meta["precision"]`` on every primitive, and whether it was chosen for that one alone.

    Attributes:
        min_row_bytes: an aggregation or edge product stays FP32 where a row of FP32 fits in this many
            bytes: an int8 row is padded to as many, so nothing would be saved. None: as the backend says.
        min_inner_width: a GEMM stays FP32 below this inner width: one integer dot instruction
            takes four products.
        last_layer: the last product and aggregation before each output of a model that trains, forward and
            backward, stay ``fp32`` in an integer precision (Tango, SC'23, section 3.2), or are ``low`` too.
            ``auto`` does not take integers for them either: their errors reach the gradient of the loss.
    """

    min_row_bytes: int | None = None
    min_inner_width: int = 4
    last_layer: Literal["fp32", "low"] = "fp32"
    name: ClassVar[str] = "assign"
    establishes: ClassVar[frozenset[Property]] = frozenset({Property.ASSIGNED})

    def __post_init__(self) -> None:
        """Refuse an unknown rule for the last layer."""
        if self.last_layer not in ("fp32", "low"):
            raise PrecisionError(f"Assign: last_layer must be 'fp32' or 'low', got {self.last_layer!r}")

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Annotate the graph; nothing else changes."""
        primitives = [node for node in gm.graph.nodes if is_primitive(node)]
        check_overrides(primitives, ctx.overrides)
        for precision in (ctx.precision, *ctx.overrides.values()):
            _check_supported(precision, ctx)
        named = _named(primitives, ctx)
        fixed = _fixed(gm.graph) | _bodies_without_low_form(gm, ctx)
        last = last_layer(gm) if self.last_layer == "fp32" else ()
        if ctx.precision == AUTO and ctx.choice is None:
            ctx.choice = Choice.make(gm, ctx, self._allowed(primitives, fixed, named, last, ctx))
        for node in primitives:
            option = _option(node, named, ctx)
            chosen = node in named or ctx.precision == AUTO
            reason = None if option == FULL else self._stays_fp32(node, fixed, option.precision, chosen, ctx)
            if reason is None and node in last and option.precision.is_quantized and not chosen:
                reason = "it is next to an output, and no later layer averages its rounding errors"
            kept = option if reason is None else FULL
            node.meta["precision"], node.meta["granularity"] = kept.precision, kept.granularity
            node.meta[CHOSEN] = chosen
            if reason is not None:
                ctx.note(node, f"stays FP32: {reason}")
            elif option == FULL and ctx.precision == AUTO and node not in named:
                ctx.note(node, f"stays FP32: {self._why_full(node, fixed)}")
        return gm

    def _allowed(
        self,
        primitives: list[Node],
        fixed: dict[Node, str],
        named: dict[Node, Option],
        last: Collection[Node],
        ctx: Context,
    ) -> dict[Node, Sequence[Option]]:
        """The options that ``auto`` may choose from for each primitive."""
        allowed: dict[Node, Sequence[Option]] = {}
        for node in primitives:
            if self._must_be_fp32(node, fixed) is not None:
                continue
            wanted = named.get(node)
            known = options_of(node, ctx, None if wanted is None else wanted.precision)
            if wanted is None and node in last:
                known = [option for option in known if not option.precision.is_quantized]
            if wanted is not None:
                exact = [option for option in known if option == wanted]
                known = exact or [option for option in known if option.precision == wanted.precision]
            allowed[node] = known or [FULL]
        return allowed

    def _why_full(self, node: Node, fixed: dict[Node, str]) -> str:
        if has_body(node):
            return self._must_be_fp32(node, fixed) or "auto weighs no products in bodies"
        return self._must_be_fp32(node, fixed) or "auto chose it, see the precision choice"

    def _stays_fp32(
        self, node: Node, fixed: dict[Node, str], wanted: Precision, chosen: bool, ctx: Context
    ) -> str | None:
        reason = self._must_be_fp32(node, fixed)
        op = op_of(node)
        assert op is not None
        if has_body(node):
            return reason or why_full(node, wanted, ctx.target)
        if reason is None and wanted.is_quantized and op.quantized is None and not _dequantizes(op, ctx):
            return f"{op.name} has no quantized form"
        if reason is not None or chosen or not wanted.is_quantized:
            return reason
        return self._too_narrow(node, op, wanted, ctx)

    def _must_be_fp32(self, node: Node, fixed: dict[Node, str]) -> str | None:
        op = op_of(node)
        assert op is not None
        if op.counted_as == "softmax":
            return "edge softmax is computed in FP32"
        if node in fixed:
            return fixed[node]
        if has_body(node):
            return node.meta.get(EXACT)
        if not op.low_operands or (op.name == "sddmm" and argument(node, "op") != "dot"):
            return f"{op.name} has no low-precision form"
        return node.meta.get(EXACT)

    def _too_narrow(self, node: Node, op: Op, wanted: Precision, ctx: Context) -> str | None:
        width = width_of(argument(node, op.low_operands[0]))
        if width is None:
            return None
        if op.kind == "dense":
            if width >= self.min_inner_width:
                return None
            return f"an inner width of {width} is less than one integer dot instruction takes"
        most = ctx.target.narrow_rows.fp32_bytes if self.min_row_bytes is None else self.min_row_bytes
        if width * 4 > most:
            return None
        return f"a row of {width} FP32 values fits in the {most} bytes that a padded {wanted} row takes"


def _dequantizes(op: Op, ctx: Context) -> bool:
    """Return whether the kernel of an op converts quantized operands to FP32 as it loads them."""
    return op.name == "attention_backward" and ctx.target.quantized_attention_gradients


def is_primitive(node: Node) -> bool:
    """Return whether ``node`` computes on features, so that a precision applies to it."""
    op = op_of(node)
    return op is not None and op.kind != "structure"


def check_overrides(primitives: Iterable[Node], overrides: dict[str, Precision]) -> None:
    """Refuse an override whose glob matches no layer that has a primitive."""
    layers = sorted({layer_of(node) for node in primitives})
    for glob in overrides:
        if any(_is_named(layer, glob) for layer in layers):
            continue
        close = get_close_matches(glob.replace("*", ""), layers, n=3, cutoff=0.3) or layers[:8]
        raise PrecisionError(
            f"[gnnc.assign] overrides: {glob!r} matches no layer with something to quantize; "
            f"close layers: {', '.join(map(repr, close)) or 'none'}"
        )


def layer_of(node: Node) -> str:
    """Return the path of the module that the node came from, empty at the root; also of its gradient."""
    return (node.meta.get("layer", "") or "").removesuffix(BACKWARD_LAYER).rstrip()


def _named(primitives: Sequence[Node], ctx: Context) -> dict[Node, Option]:
    """Return the choice of the user for a layer: the first override that fits, else the plan."""
    named: dict[Node, Option] = {} if ctx.plan is None else ctx.plan.resolve(primitives, ctx)
    for node in primitives:
        for glob, precision in ctx.overrides.items():
            if _is_named(layer_of(node), glob):
                named[node] = Option(precision)
                break
    return named


def _option(node: Node, named: dict[Node, Option], ctx: Context) -> Option:
    """Return the option asked for: by name, or for the whole model."""
    if ctx.precision != AUTO:
        return named.get(node, Option(ctx.precision))
    chosen = ctx.choice.option(node.name) or FULL
    wanted = named.get(node, chosen)
    # The user names a precision; its granularity is auto's to choose.
    return chosen if wanted == Option(chosen.precision) else wanted


def _is_named(layer: str, glob: str) -> bool:
    """Return whether the glob fits the layer or a module around it: naming a module names what it holds."""
    parts = layer.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), glob) for i in range(len(parts)))


def _check_supported(precision: Precision, ctx: Context) -> None:
    if precision != AUTO and precision.name not in ctx.target.supported:
        have = ", ".join(sorted(ctx.target.supported))
        raise UnsupportedError(
            f"[gnnc.assign] backend {ctx.target.name!r} has no {precision.name} kernels yet; it has {have}"
        )


def _fixed(graph: fx.Graph) -> dict[Node, str]:
    """The ops that stay FP32 for what their results are there for, and what that is."""
    logits = dict.fromkeys(_softmax_logits(graph), "its result is the logits of an edge softmax")
    canceling = dict.fromkeys(variances(graph), "its result is a part of a variance, of which most cancels")
    norms = dict.fromkeys(statistics(graph), "its result is the statistics of a norm of its operand")
    gradients = dict.fromkeys(
        _readers_of_logit_gradients(graph), "its operand is the gradient of the logits of an edge softmax"
    )
    return logits | canceling | norms | gradients


def _bodies_without_low_form(gm: fx.GraphModule, ctx: Context) -> dict[Node, str]:
    """The ops with a body that neither multiply nor gather in low precision; the latter is for inference."""
    trains = GRADIENTS in gm.meta
    bodies = [node for node in gm.graph.nodes if has_body(node) and not has_products(node)]
    low = {node for node in bodies if not trains and gathers_low(node, ctx.target)}
    return {node: f"{op_name(node)} has no low-precision form" for node in bodies if node not in low}


def _softmax_logits(graph: fx.Graph) -> set[Node]:
    """Return the edge ops whose result reaches an edge softmax through elementwise ops alone.

    Products with a weight inside a body are computed as those before an edge op are: in low precision.
    """
    found: set[Node] = set()
    softmaxes = [node for node in graph.nodes if str(node.target) == "gnnc.edge_softmax.default"]
    pending = [node.args[1] for node in softmaxes]
    while pending:
        node = pending.pop()
        if not isinstance(node, Node) or node in found:
            continue
        found.add(node)
        if op_of(node) is None:
            pending += node.all_input_nodes
    edges = {node for node in found if (op := op_of(node)) and op.kind == "edge"}
    return {node for node in edges if not has_products(node)}


def _is_gradient_of_logits(node: Node) -> bool:
    """Return whether a node is the gradient of the logits of an edge softmax, or its sums by either end."""
    if is_result(node) and str(first_operand(node).target) == "gnnc.attention_backward.default":
        return result_index(node) in (1, 2)
    return str(node.target) == "gnnc.edge_softmax_backward.default"


def _readers_of_logit_gradients(graph: fx.Graph) -> set[Node]:
    """Return the ops that would round what elementwise ops make of the gradient of logits."""
    found: set[Node] = set()
    pending = [node for node in graph.nodes if _is_gradient_of_logits(node)]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for user in node.users:
            op = op_of(user)
            if op is not None and any(argument(user, name) is node for name in op.low_operands):
                found.add(user)
            elif op is None and user not in seen:
                seen.add(user)
                pending.append(user)
    return found
