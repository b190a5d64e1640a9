"""Lowering of the gradient of attention: a pass over the edges by rows, and one by columns."""

import torch
from torch.fx import Node

from gnnc.ir.format import RUN_TABLE, Format
from gnnc.runtime.cuda.emitter import CudaEmitter, pointer, round_up
from gnnc.runtime.cuda.formats.tables import write_staging
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum
from gnnc.runtime.cuda.kernels.epilogue import TYPES, literal, truth
from gnnc.runtime.cuda.kernels.spmm import ELEMENTS, gathered_rows
from gnnc.runtime.cuda.kernels.two_passes import MOST_BYTES, TwoPasses, past
from gnnc.runtime.plans import attention_backward
from gnnc.runtime.program.launches import Expr, Operand
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument

_PART_WORDS = 8
"""Words of a head of a split row: ``gnnc::RowOfHead::kWords``."""


@kernel("fused:attention_backward", backend="cuda", name="attention_backward", priority=10, elements=BYTES)
class AttentionBackward:
    """Kernels of ``csrc/cuda/sparse/attention_backward.cuh``, which store nothing for an edge."""

    @staticmethod
    def plan(node: Node) -> attention_backward.Plan | Decline:
        """Take heads that fit into one gather of a warp."""
        plan = attention_backward.plan(node)
        if isinstance(plan, Decline):
            return plan
        for dtype in _element_types(plan, node):
            if dtype not in ELEMENTS:
                return Decline(f"x or grad is {dtype}")
            if plan.width // plan.heads * dtype.itemsize > MOST_BYTES:
                return Decline(f"heads of {plan.width // plan.heads} columns")
        return plan

    @staticmethod
    def formats(plan: attention_backward.Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table."""
        return (RUN_TABLE,)

    @staticmethod
    def emit(plan: attention_backward.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write both launches for each group of heads, and the sums of the attention vectors' gradients."""
        _Writer(plan, node, emitter).write()


def _element_types(plan: attention_backward.Plan, node: Node) -> tuple[torch.dtype, torch.dtype]:
    """Return the element types of x and of grad."""
    x, grad = (argument_of(node, index).meta["val"].dtype for index in plan.ends[2:])
    return x, grad


class _Writer(TwoPasses[attention_backward.Plan]):
    """Writer of the launches of one node."""

    def __init__(self, plan: attention_backward.Plan, node: Node, emitter: CudaEmitter) -> None:
        super().__init__(plan, node, emitter)
        self.x_node, grad = (argument_of(node, index) for index in plan.ends[2:])
        self.dtypes = _element_types(plan, node)
        self.scales = [emitter.optional_vector(optional_argument(node, index)) for index in plan.scales]
        self.x, self.grad = (
            gathered_rows(emitter, value, plan.width, plan.heads) for value in (self.x_node, grad)
        )
        self.ends = [emitter.dense(argument_of(node, index), plan.heads) for index in plan.ends[:2]]
        self.att = [emitter.optional_vector(optional_argument(node, index)) for index in plan.att]
        self.by_rows = self.edges_of(plan.edges[0], plan.edges[1], self.x)
        self.by_columns = self.edges_of(plan.edges[2], plan.edges[3], self.grad)
        self.da = [
            self._rows(result, rows)
            for result, rows in zip(plan.results[:2], (self.num_dst, self.num_src), strict=True)
        ]
        self.stats = emitter.scratch(self.num_dst, 4 * plan.heads, torch.float32, flat=True)

    def write(self) -> None:
        """Write all launches."""
        self.write_passes(self.dtypes)
        for da, result, divisor in zip(self.da, self.plan.results[2:], self.plan.divisors, strict=True):
            if result is not None:
                self._sum(da, self.emitter.outputs(self.node)[result], divisor)

    def launch(self, head: int, group: int, epilogue: str, values: list[Operand]) -> None:
        """Write both passes over the edges, for the ``group`` heads from ``head`` on."""
        emitter, plan = self.emitter, self.plan
        heads = plan.heads
        x, grad = (
            [past(pointer(rows.tensor), head * (rows.nbytes // heads)), rows.stride]
            for rows in (self.x, self.grad)
        )
        x_scale, grad_scale = map(pointer, self.scales)
        size = argument_of(self.node, plan.ends[0]).meta["val"].dtype.itemsize
        a_dst, a_src = (past(pointer(end), size * head) for end in self.ends)
        da_dst, da_src = (past(pointer(da.written), 4 * head) for da in self.da)
        stats = past(pointer(self.stats.written), 16 * head)
        config = self._config(group)
        arguments = [*self.by_rows.arguments, *x, x_scale, *grad, grad_scale, a_dst, a_src, stats, da_dst]
        arguments += write_staging(emitter, self.by_rows.runs, _PART_WORDS * group)
        kernel = f"gnnc::attention_rows<{config}>"
        body = f"gnnc::AttentionRowsBody<{config}>"
        self.emit(kernel, "AttentionRowsArgs", body, _PART_WORDS * group, arguments, [], self.by_rows)
        att = [self.of_head(vector, head) for vector in self.att]
        words = round_up(group * self.head_width, 4) + round_up(group, 4)
        given = past(pointer(self.da[0]), 4 * head)
        arguments = [
            *self.by_columns.arguments,
            *grad,
            *x,
            x_scale,
            past(pointer(self.stats), 16 * head),
            a_src,
            given,
        ]
        arguments += [*att, da_src, *write_staging(emitter, self.by_columns.runs, words)]
        kernel = f"gnnc::attention_columns<{config}, {epilogue}>"
        body = f"gnnc::AttentionColumnsBody<{config}, {epilogue}>"
        self.emit(kernel, "AttentionColumnsArgs", body, words, arguments, values, self.by_columns)

    def _config(self, group: int) -> str:
        plan = self.plan
        constants = self.emitter.kernel_set.struct(
            "Constants",
            f"  static constexpr float kSlope = {literal(plan.slope)};\n"
            f"  static constexpr float kEps = {literal(plan.eps)};\n",
        )
        is_bf16 = argument_of(self.node, plan.ends[0]).meta["val"].dtype == torch.bfloat16
        flags = ", ".join(map(truth, (is_bf16, *(vector is not None for vector in self.att))))
        sizes = f"{group * self.head_width}, {group}, {plan.heads}"
        elements = ", ".join(f"gnnc::Element::{ELEMENTS[dtype]}" for dtype in self.dtypes)
        return f"gnnc::AttentionBackwardConfig<{elements}, {sizes}, {flags}, {constants}>"

    def _rows(self, result: int | None, rows: object) -> Expr:
        """Return the memory of the gradient of one half of the logits."""
        node = None if result is None else self.emitter.outputs(self.node)[result]
        if node is None:
            return self.emitter.scratch(rows, self.plan.heads, torch.float32, flat=True)
        return self.emitter.allocate(node, dense=True)

    def _sum(self, da: Expr, result: Node | None, divisor: int | None) -> None:
        """Write the launches of the gradient of an attention vector: the sum over the nodes of ``da * x``."""
        if result is None:
            return
        emitter, width = self.emitter, self.plan.width
        rows, stride = emitter.matrix(self.x_node, width), emitter.row_stride(self.x_node, width)
        is_scaled = self.scales[0] is not None
        text = f"  const float* da;\n  const {TYPES[self.dtypes[0]]}* x;\n"
        text += "  const float* scale;\n" if is_scaled else ""
        text += "  __device__ float operator()(int64_t row, int column) const {\n"
        text += f"    const float factor = da[row * {self.plan.heads} + column / {self.head_width}]"
        text += " * scale[row];\n" if is_scaled else ";\n"
        text += f"    return factor * step::as_float(x[row * {stride} + column]);\n  }}\n"
        value = emitter.kernel_set.struct("Value", text)
        members: list[Operand] = [pointer(da), pointer(rows), *map(pointer, self.scales[:1] * is_scaled)]
        count = emitter.size(self.num_src)
        out = emitter.allocate(result, dense=True)
        by = emitter.optional_vector(optional_argument(self.node, divisor))
        write_column_sum(emitter, value, members, count, width, out, by)
