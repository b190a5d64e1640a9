"""Lowering of the gradient of attention whose logits a body computes: a pass by rows, and one by columns."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.format import RUN_TABLE, Format
from gnnc.runtime.cuda.emitter import CudaEmitter, pointer, round_up
from gnnc.runtime.cuda.formats.tables import write_staging
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum
from gnnc.runtime.cuda.kernels.epilogue import literal, truth
from gnnc.runtime.cuda.kernels.logit_body import Logit, write_differentiable_logit
from gnnc.runtime.cuda.kernels.spmm import ELEMENTS, gathered_rows
from gnnc.runtime.cuda.kernels.two_passes import MOST_BYTES, TwoPasses, past
from gnnc.runtime.plans import body_attention_backward
from gnnc.runtime.program.launches import Argument, Expr, Operand
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import Refusal, argument_of, optional_argument

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST_CONSTANTS = 1
"""Constants of a body whose gradients a thread has registers for."""
_DST, _SRC, _X, _GRAD = range(4)


@dataclass(frozen=True, slots=True)
class _Result:
    """Rows of a result: their memory, and the elements from one to the next."""

    memory: Expr
    stride: int


@kernel(
    "fused:body_attention_backward",
    backend="cuda",
    name="body_attention_backward",
    priority=10,
    elements=BYTES,
)
class BodyAttentionBackward:
    """Kernels of ``csrc/cuda/sparse/body_attention_backward.cuh``, which store nothing for an edge."""

    @staticmethod
    def plan(node: Node) -> body_attention_backward.Plan | Decline:
        """Take heads that fit into one gather of a warp, and logits that are sums of elementwise terms."""
        plan = body_attention_backward.plan(node)
        if isinstance(plan, Decline):
            return plan
        dtype = argument_of(node, plan.ends[_X]).meta["val"].dtype
        if dtype not in _FLOATS:
            return Decline(f"rows are {dtype}")
        if plan.width // plan.heads * dtype.itemsize > MOST_BYTES:
            return Decline(f"heads of {plan.width // plan.heads} columns")
        if any(argument_of(node, index).meta["val"].dtype != torch.float32 for index in plan.constants):
            return Decline("a constant of the logits is not float32")
        if len(plan.constants) > _MOST_CONSTANTS:
            return Decline(f"the logits have {len(plan.constants)} constants")
        try:
            _logit(plan, node)
        except Refusal as refusal:
            return Decline(str(refusal))
        return plan

    @staticmethod
    def formats(plan: body_attention_backward.Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table."""
        return (RUN_TABLE,)

    @staticmethod
    def emit(plan: body_attention_backward.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write both launches for each group of heads, and the sums of the constants' gradients."""
        _Writer(plan, node, emitter).write()


def _logit(plan: body_attention_backward.Plan, node: Node) -> Logit:
    """Return the logit of one head of ``plan.heads``, with its derivatives."""
    rows = torch.empty((1, plan.heads, plan.width // plan.heads), dtype=torch.float32, device="meta")
    constants = {f"c{n}": argument_of(node, index).meta["val"] for n, index in enumerate(plan.constants)}
    return write_differentiable_logit(plan.logit, {"i0": rows, "j0": rows, **constants}, plan.scale)


class _Writer(TwoPasses[body_attention_backward.Plan]):
    """Writer of the launches of one node."""

    def __init__(self, plan: body_attention_backward.Plan, node: Node, emitter: CudaEmitter) -> None:
        super().__init__(plan, node, emitter)
        ends = [argument_of(node, index) for index in plan.ends]
        self.dtype = ends[_X].meta["val"].dtype
        self.is_same = ends[_SRC] is ends[_X]
        rows = {end: gathered_rows(emitter, end, plan.width, plan.heads) for end in dict.fromkeys(ends)}
        self.ends = [rows[end] for end in ends]
        self.by_rows = self.edges_of(plan.edges[0], plan.edges[1], self.ends[_X])
        self.by_columns = self.edges_of(plan.edges[2], plan.edges[3], self.ends[_GRAD])
        self.logit = _logit(plan, node)
        self.members = [
            emitter.vector(argument_of(node, plan.constants[int(name[1:])])) for name in self.logit.constants
        ]
        self.down = self._result(plan.results[0], self.num_dst)
        self.dkey = None if plan.joined else self._result(plan.results[1], self.num_src)
        self.dconst = None
        if plan.results[2] is not None:
            count = self.num_src
            self.dconst = emitter.scratch(count, len(plan.constants) * plan.width, torch.float32, flat=True)
        self.stats = emitter.scratch(self.num_dst, 2 * plan.heads, torch.float32, flat=True)

    def write(self) -> None:
        """Write all launches."""
        self.write_passes([self.dtype])
        if self.dconst is not None:
            self._sum(self.dconst)

    def launch(self, head: int, group: int, epilogue: str, values: list[Operand]) -> None:
        """Write both passes over the edges, for the ``group`` heads from ``head`` on."""
        emitter, plan = self.emitter, self.plan
        config = self._config(head, group)
        ends: list[Argument] = []
        for end in (_X, _SRC, _DST, _GRAD):
            rows = self.ends[end]
            ends += [past(pointer(rows.tensor), head * (rows.nbytes // plan.heads)), rows.stride]
        members: list[Operand] = [self.of_head(member, head) for member in self.members]
        members = members or [pointer(None)]
        columns = round_up(group * self.head_width, 4)
        words = 2 * columns + 4 * group
        arguments: list[Argument] = [
            *self.by_rows.arguments,
            *ends,
            past(pointer(self.stats.written), 8 * head),
            self.of_head(self.down.memory.written, head),
            self.down.stride,
            self._divisor(0),
            *write_staging(emitter, self.by_rows.runs, words),
        ]
        kernel, body = f"gnnc::body_attention_rows<{config}>", f"gnnc::BodyAttentionRows<{config}>"
        self.emit(kernel, "BodyAttentionRowsArgs", body, words, arguments, members, self.by_rows)
        dconst, constants = (None, 0) if self.dconst is None else (self.dconst.written, len(plan.constants))
        words = ((1 if plan.joined else 2) + constants) * columns
        dkey, stride = (
            (pointer(None), 0)
            if self.dkey is None
            else (self.of_head(self.dkey.memory.written, head), self.dkey.stride)
        )
        arguments = [
            *self.by_columns.arguments,
            *ends,
            past(pointer(self.stats), 8 * head),
            dkey,
            stride,
            self._divisor(1),
            self.of_head(dconst, head),
            len(plan.constants) * plan.width,
            plan.width,
            *write_staging(emitter, self.by_columns.runs, words),
        ]
        kernel = f"gnnc::body_attention_columns<{config}, {epilogue}>"
        body = f"gnnc::BodyAttentionColumns<{config}, {epilogue}>"
        members = [*members, *values]
        self.emit(kernel, "BodyAttentionColumnsArgs", body, words, arguments, members, self.by_columns)

    def _divisor(self, result: int) -> Expr:
        """Return the address of the number that divides ddst, dsrc or dconst, or null."""
        number = optional_argument(self.node, self.plan.divisors[result])
        return pointer(self.emitter.optional_vector(number))

    def _config(self, head: int, group: int) -> str:
        plan = self.plan
        kernel_set = self.emitter.kernel_set
        constants = kernel_set.struct("Constants", f"  static constexpr float kEps = {literal(plan.eps)};\n")
        logit = kernel_set.struct("Logit", self.logit.text)
        flags = ", ".join(map(truth, (self.is_same, plan.joined, self.dconst is not None)))
        sizes = f"{group * self.head_width}, {group}, {plan.heads}"
        element = f"gnnc::Element::{ELEMENTS[self.dtype]}"
        return f"gnnc::BodyAttentionBackwardConfig<{element}, {sizes}, {flags}, {constants}, {logit}>"

    def _result(self, result: int | None, rows: object) -> _Result:
        """Return the rows of the gradient of one end: of the caller, or of the node alone."""
        emitter, width = self.emitter, self.plan.width
        node = None if result is None else emitter.outputs(self.node)[result]
        if node is None:
            return _Result(emitter.scratch(rows, width, torch.float32, flat=True), width)
        memory = emitter.allocate(node)
        return _Result(memory, emitter.row_stride(node, width))

    def _sum(self, dconst: Expr) -> None:
        """Write the launches of the constants' gradients: the sums over the rows."""
        emitter, plan = self.emitter, self.plan
        assert plan.results[2] is not None
        result = emitter.outputs(self.node)[plan.results[2]]
        if result is None:
            return
        width = len(plan.constants) * plan.width
        text = "  const float* part;\n  __device__ float operator()(int64_t row, int column) const {\n"
        text += f"    return part[row * {width} + column];\n  }}\n"
        value = emitter.kernel_set.struct("Value", text)
        count, out = emitter.size(self.num_src), emitter.allocate(result, dense=True)
        by = emitter.optional_vector(optional_argument(self.node, plan.divisors[2]))
        write_column_sum(emitter, value, [pointer(dconst)], count, width, out, by)
