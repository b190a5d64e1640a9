"""Lowering of attention: logits, softmax and weighted sum in one pass over the edges."""

from math import prod

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import body_text, parse_body
from gnnc.ir.format import RUN_TABLE, Format
from gnnc.ir.nodes import shape_of
from gnnc.ir.vjp import derived_body
from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import CudaEmitter, length, pointer, round_up
from gnnc.runtime.cuda.formats.tables import runs_arguments, write_columns, write_runs, write_staging
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.cuda.kernels.epilogue import literal, truth, write_epilogue
from gnnc.runtime.cuda.kernels.logit_body import Logit, write_logit
from gnnc.runtime.cuda.kernels.message import body_of, write_destinations, write_edge_map
from gnnc.runtime.cuda.kernels.spmm import ELEMENTS, gathered_rows, packed_width
from gnnc.runtime.plans import attention
from gnnc.runtime.program.launches import Argument, Expr, Operand, count_of, expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import Refusal, argument_of, optional_argument

aten = torch.ops.aten

_ADD, _DOT = 0, 1
_MAX_WIDTH = 1024
_PIECE = 16
"""Bytes of a row that a thread reads."""
_MOST_FEATURES = 16
"""Features of an edge that a thread adds up, at most."""
_MOST_BYTES = 512
"""Bytes of rows that a warp reads in one pass."""
_OWN_ROWS = (torch.float32, torch.float16, torch.bfloat16)
_DOT_BODY = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); "


@kernel("fused:attention", backend="cuda", name="attention", priority=10, elements=BYTES)
class Attend:
    """Kernels of ``csrc/cuda/sparse/attention.cuh`` and ``body_attention.cuh``.

    Logits that rows at both ends give reach memory only where the rows are wide, or not of one kind.
    """

    @staticmethod
    def plan(node: Node) -> attention.Plan | Decline:
        """Take rows that fit into the registers of a warp."""
        plan = attention.plan(node)
        if isinstance(plan, Decline):
            return plan
        dtype = argument_of(node, plan.x).meta["val"].dtype
        if packed_width(plan.width, plan.heads, dtype) > _MAX_WIDTH:
            return Decline(f"rows of {plan.width} columns in {plan.heads} heads")
        if plan.kind == _DOT and len(argument_of(node, plan.a_src or 0).meta["val"].shape) < 2:
            return Decline("dot products of single values")
        if plan.features is not None and _logit(plan, node) is None:
            return Decline("rows of the logits and of the sum are of two kinds")
        return plan

    @staticmethod
    def formats(plan: attention.Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table."""
        return (RUN_TABLE,)

    @staticmethod
    def emit(plan: attention.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches: sums, and attention weights where a node reads them."""
        if plan.kind not in (_DOT, attention.BODY):
            _Writer(plan, node, emitter).write()
        elif logit := _logit(plan, node):
            _Writer(plan, node, emitter).write_with_body(logit)
        else:
            _Writer(plan, node, emitter).write_behind_edge_map()


def reads_features(heads: int, columns: int, features: int, dtype: torch.dtype) -> bool:
    """Return whether the threads of a head share the features of an edge, for rows of a dtype."""
    piece = _PIECE // dtype.itemsize
    if features % 4 or heads * columns * dtype.itemsize > _MOST_BYTES or (heads > 1 and columns % piece):
        return False
    own, left = divmod(features, -(-columns // piece))
    return not left and own <= _MOST_FEATURES


def _body(plan: attention.Plan) -> str:
    """Return the body of the logits, before their scale."""
    if plan.kind == attention.BODY:
        return plan.body
    if plan.edge is None:
        return _DOT_BODY + "return t1"
    return _DOT_BODY + f"t2 = aten.mul.Tensor(t1, {plan.scale!r}); t3 = aten.add.Tensor(t2, e0); return t3"


def _scale(plan: attention.Plan) -> float:
    """Return the factor of the body's values."""
    return 1.0 if plan.kind == _DOT and plan.edge is not None else plan.scale


def _body_operands(plan: attention.Plan) -> dict[str, int]:
    """Return the number of each operand of the body, by name."""
    assert plan.a_src is not None and plan.a_dst is not None
    edge = {} if plan.edge is None else {"e0": plan.edge}
    constants = {f"c{index}": number for index, number in enumerate(plan.constants)}
    return {"i0": plan.a_dst, "j0": plan.a_src, **edge, **constants}


def _body_values(plan: attention.Plan, node: Node) -> dict[str, torch.Tensor]:
    """Return a tensor like each operand of the body: rows at both ends have the same columns in one shape."""
    values = {name: argument_of(node, index).meta["val"] for name, index in _body_operands(plan).items()}
    own, key = values["i0"].shape[1:], values["j0"]
    if prod(own) == prod(key.shape[1:]):
        values["j0"] = torch.empty((1, *own), dtype=key.dtype, device="meta")
    return values


def _logit(plan: attention.Plan, node: Node) -> Logit | None:
    """Return the logits as the kernel of one pass computes them; None where they take an ``edge_map``."""
    operands = _body_values(plan, node)
    x = argument_of(node, plan.x).meta["val"]
    if operands["j0"].dtype != x.dtype or operands["i0"].dtype not in _OWN_ROWS:
        return None
    if any(prod(operands[end].shape[1:]) != plan.width for end in ("i0", "j0")):
        return None
    if packed_width(plan.width, plan.heads, x.dtype) * x.dtype.itemsize > _MOST_BYTES:
        return None
    try:
        return write_logit(_body(plan), operands, _scale(plan))
    except Refusal:
        return None


class _Writer:
    """Writer of the launches of one node."""

    def __init__(self, plan: attention.Plan, node: Node, emitter: CudaEmitter) -> None:
        self.plan, self.node, self.emitter = plan, node, emitter
        self.rowptr = argument_of(node, plan.rowptr)
        self.rows = shape_of(self.rowptr)[0] - 1
        self.starts = emitter.vector(self.rowptr)
        self.col = write_columns(emitter, emitter.vector(argument_of(node, plan.col)))
        self.x = gathered_rows(emitter, argument_of(node, plan.x), plan.width, plan.heads)
        self.scale = emitter.optional_vector(optional_argument(node, plan.x_scale))
        self.runs = write_runs(emitter, self.starts, length(self.col), self.x.nbytes)
        self.grid = expr("{}.blocks", self.runs)
        features = None if plan.features is None else argument_of(node, plan.features)
        self.features = 0 if features is None else int(shape_of(features)[1])

    def write(self) -> None:
        """Write the launches for logits of the sums of two terms, or of given logits."""
        additive = self.plan.kind == _ADD
        ends = [self._dense(self.plan.a_src), self._dense(self.plan.a_dst)] if additive else [None, None]
        self._launch(ends, self._dense(self.plan.edge), additive=additive)

    def write_behind_edge_map(self) -> None:
        """Write the launch that stores the logits, and the others."""
        self._launch([None, None], self._stored_logits(), additive=False)

    def write_with_body(self, logit: Logit) -> None:
        """Write the launch that computes the logits on its way, and the one of the attention weights."""
        plan, node, emitter = self.plan, self.node, self.emitter
        assert plan.a_dst is not None and plan.a_src is not None
        own_node, key_node = argument_of(node, plan.a_dst), argument_of(node, plan.a_src)
        is_same = key_node is argument_of(node, plan.x)
        own = gathered_rows(emitter, own_node, plan.width, plan.heads)
        key = self.x if is_same else gathered_rows(emitter, key_node, plan.width, plan.heads)
        key_scale = emitter.optional_vector(optional_argument(node, plan.a_src_scale))
        edge = self._dense(plan.edge)
        constants = {name: index for name, index in _body_operands(plan).items() if name in logit.constants}
        members = [pointer(emitter.vector(argument_of(node, constants[name]))) for name in logit.constants]
        weights, stats = self._weights()
        epilogue, values = self._epilogue()
        arguments = self._arguments([None, None], edge, stats)
        arguments += [pointer(own.tensor), own.stride, pointer(key.tensor), key.stride, pointer(key_scale)]
        arguments.append(pointer(None if weights is None else weights.written))
        arguments += self._feature_rows()
        config = self._config(additive=False, edge=edge is not None, body=True)
        flags = f"gnnc::Element::{ELEMENTS[own_node.meta['val'].dtype]}, {truth(is_same)}"
        functor = emitter.kernel_set.struct("Logit", logit.text)
        config = f"gnnc::BodyAttentionConfig<{config}, {flags}, {truth(weights is not None)}, {functor}>"
        kernel = f"gnnc::body_attention<{config}, {epilogue}>"
        emitter.kernel_set.expect(kernel, "BodyAttentionArgs", count_of(arguments))
        given = [*arguments, *(members or [pointer(None)]), *values]
        emitter.launch(kernel, self.grid, given, block=AS_COMPILED)
        if weights is not None:
            arguments = self._arguments([None, None], weights, stats)
            self._write_weights(self._config(additive=False, edge=True), arguments, weights)

    def _arguments(self, ends: list[Expr | None], edge: Expr | None, stats: Expr | None) -> list[Argument]:
        """Return the members of a ``gnnc::AttentionArgs``."""
        x, plan = self.x, self.plan
        words = round_up(x.columns, 4) + round_up(2 * plan.heads, 4) + plan.heads * self.features
        return [
            *runs_arguments(self.starts, self.col, self.runs),
            pointer(x.tensor),
            x.stride,
            *map(pointer, (self.scale, *ends, edge, stats)),
            *write_staging(self.emitter, self.runs, words),
            *map(pointer, self._features()),
        ]

    def _features(self) -> tuple[Expr | None, Expr | None]:
        """Return the memory of the edge features and of their sums."""
        plan, emitter = self.plan, self.emitter
        if plan.feature_sum is None:
            return None, None
        total = emitter.allocate(emitter.outputs(self.node)[plan.feature_sum], dense=True)
        return self._dense_rows(plan.features, self.features), total.written

    def _feature_rows(self) -> list[Argument]:
        """Return the rows whose dot products with the edge features are in the logits, and their stride."""
        if self.plan.feature_own is None:
            return [pointer(None), 0]
        node, width = argument_of(self.node, self.plan.feature_own), self.plan.heads * self.features
        return [pointer(self.emitter.matrix(node, width)), self.emitter.row_stride(node, width)]

    def _dense_rows(self, index: int | None, columns: int) -> Expr | None:
        return None if index is None else self.emitter.dense(argument_of(self.node, index), columns)

    def _weights(self) -> tuple[Expr | None, Expr | None]:
        """Return the memory of the attention weights that a node reads, and of the statistics of the rows."""
        plan, emitter = self.plan, self.emitter
        alpha = None if plan.alpha is None else emitter.outputs(self.node)[plan.alpha]
        if alpha is None:
            return None, None
        stats = emitter.scratch(self.rows, 2 * plan.heads, torch.float32, flat=True)
        return emitter.allocate(alpha, dense=True), stats.written

    def _launch(self, ends: list[Expr | None], edge: Expr | None, *, additive: bool) -> None:
        """Write the launch for logits of terms in memory, and the one of the attention weights."""
        weights, stats = self._weights()
        epilogue, values = self._epilogue()
        arguments = self._arguments(ends, edge, stats)
        config = self._config(additive=additive, edge=edge is not None)
        kernel = f"gnnc::attention<{config}, {epilogue}>"
        self.emitter.kernel_set.expect(kernel, "AttentionArgs", count_of(arguments))
        self.emitter.launch(kernel, self.grid, [*arguments, *values], block=AS_COMPILED)
        if weights is not None:
            self._write_weights(config, arguments, weights)

    def _write_weights(self, config: str, arguments: list[Argument], weights: Expr) -> None:
        kernel = f"gnnc::attention_weights<{config}>"
        self.emitter.launch(kernel, self.grid, [*arguments, pointer(weights.written)], block=AS_COMPILED)

    def _epilogue(self) -> tuple[str, list[Operand]]:
        return write_epilogue(self.plan.program, self.node, self.emitter, self.rows, self.plan.width)

    def _config(self, *, additive: bool, edge: bool, body: bool = False) -> str:
        """Return the C++ type of the configuration; ``body``: whether a body gives the logits."""
        plan = self.plan
        slope = plan.slope if additive else 1.0
        constants = self.emitter.kernel_set.struct(
            "Constants",
            f"  static constexpr float kSlope = {literal(slope)};\n"
            f"  static constexpr float kEps = {literal(plan.eps)};\n",
        )
        element = ELEMENTS[argument_of(self.node, plan.x).meta["val"].dtype]
        rows = f"gnnc::Element::{element}, {plan.width}, {plan.heads}"
        residency = ""
        if body:
            residency = (
                f", gnnc::body_attention_residency({rows}, {self.features}).threads, 4, {self.features}"
            )
        return f"gnnc::AttentionConfig<{rows}, {truth(additive)}, {truth(edge)}, {constants}{residency}>"

    def _dense(self, index: int | None) -> Expr | None:
        return self._dense_rows(index, self.plan.heads)

    def _stored_logits(self) -> Expr:
        """Write the launch that stores the logits of every edge; return their memory."""
        plan, emitter = self.plan, self.emitter
        body, operands = _scaled(_body(plan), _scale(plan)), _body_values(plan, self.node)
        tensors: dict[str, Expr] = {}
        strides: dict[str, int] = {}
        for name, index in _body_operands(plan).items():
            node = argument_of(self.node, index)
            tensors[name] = emitter.vector(node) if name[0] == "c" else emitter.matrix(node)
            strides[name] = 1 if name[0] == "c" else emitter.row_stride(node)
        if plan.a_src_scale is not None:
            scale = argument_of(self.node, plan.a_src_scale)
            body, operands["j1"] = _scaled_rows(body, operands["j0"]), scale.meta["val"]
            tensors["j1"], strides["j1"] = emitter.vector(scale), 1
        functor = body_of(write_body(body, operands, strides), tensors, emitter)
        edges = length(self.col)
        rows = write_destinations(self.rowptr, edges, emitter)
        logits = emitter.empty("logits", [expr("{} * {}", edges, plan.heads)], torch.float32)
        write_edge_map(emitter, functor, rows, self.col, logits)
        return logits


def _scaled(body: str, factor: float) -> str:
    """Return a body whose value is multiplied by a number."""
    if factor == 1.0:
        return body
    return derived_body(body, lambda graph, values: graph.call_function(aten.mul.Tensor, (values[0], factor)))


def _scaled_rows(body: str, rows: torch.Tensor) -> str:
    """Return a body that multiplies the quantized rows ``j0`` by their scales ``j1`` before it reads them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(parse_body(body).graph, {}))
    quantized = next(node for node in graph.find_nodes(op="placeholder") if node.target == "j0")
    with graph.inserting_before(quantized.next):
        scales = graph.placeholder("j1")
        sizes = [-1, *(1 for _ in rows.shape[1:])]
        column = graph.call_function(aten.reshape.default, (scales, sizes))
        values = graph.call_function(aten.mul.Tensor, (quantized, column))
    quantized.replace_all_uses_with(values, delete_user_cb=lambda user: user is not values)
    return body_text(graph)
