"""Lowering of ops that compute one value, or one row, for every edge."""

import torch
from torch.fx import Node

from gnnc.ir.format import RUN_TABLE, Format
from gnnc.ir.nodes import as_node, operand, unpack
from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import CudaEmitter, length, pointer
from gnnc.runtime.cuda.formats.tables import runs_arguments, write_columns, write_runs
from gnnc.runtime.cuda.kernels.epilogue import truth
from gnnc.runtime.cuda.kernels.spmm import ELEMENTS, gathered_rows, packed_width
from gnnc.runtime.plans import sddmm
from gnnc.runtime.program.launches import count_of, expr
from gnnc.runtime.registry import BYTES, Decline, kernel

_OPS = ("dot", "add", "sub", "mul", "copy_src", "copy_dst")
_PIECE = 16
_MAX_WIDTH = 1024


@kernel("gnnc.sddmm", "gnnc.qsddmm", backend="cuda", name="sddmm", priority=10, elements=BYTES)
class Sddmm:
    """Kernel of ``csrc/cuda/sparse/sddmm.cuh``: dot, sum, difference, product or copy of endpoint rows."""

    @staticmethod
    def plan(node: Node) -> sddmm.Plan | Decline:
        """Take rows of more than one value, all of whose heads a warp multiplies at once."""
        plan = sddmm.plan(node)
        if isinstance(plan, Decline):
            return plan
        if plan.width == 1 or plan.width > _MAX_WIDTH:
            return Decline(f"rows of {plan.width} columns")
        a, b = unpack(node, "a", "b")
        return _fitting(plan, as_node(b if a is None else a).meta["val"].dtype)

    @staticmethod
    def formats(plan: sddmm.Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table."""
        return (RUN_TABLE,)

    @staticmethod
    def emit(plan: sddmm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that stores a value for each edge."""
        a, b = unpack(node, "a", "b")
        first, second = as_node(a if a is not None else b), as_node(b if b is not None else a)
        rows = [gathered_rows(emitter, value, plan.width, plan.heads) for value in (first, second)]
        width = rows[0].columns
        starts = emitter.vector(operand(node, "rowptr"))
        columns = write_columns(emitter, emitter.vector(operand(node, "col")))
        runs = write_runs(emitter, starts, length(columns), rows[1].nbytes)
        out = emitter.allocate(node, dense=True)
        values = runs_arguments(starts, columns, runs)
        for row, given in zip(rows, (a, b), strict=True):  # an absent operand has the other's first row alone
            values += [pointer(row.tensor), 0 if given is None else row.stride]
        scales = ("a_scale", "b_scale") if plan.is_scaled else ()
        factors = [emitter.vector(operand(node, scale)) for scale in scales]
        values += map(pointer, (*(factors or [None, None]), out.written))
        own, element = (ELEMENTS[value.meta["val"].dtype] for value in (first, second))
        own = "" if own == element else f", gnnc::Element::{own}"
        config = f"gnnc::SddmmConfig<gnnc::Element::{element}, {width}, gnnc::EdgeOp::{_OPS[plan.op]}, "
        config += f"{plan.heads}, {truth(plan.is_scaled)}{own}>"
        kernel = f"gnnc::sddmm<{config}>"
        emitter.kernel_set.expect(kernel, "SddmmArgs", count_of(values))
        emitter.launch(kernel, expr("{}.blocks", runs), values, block=AS_COMPILED)


def _fitting(plan: sddmm.Plan, dtype: torch.dtype) -> sddmm.Plan | Decline:
    pieces = packed_width(plan.width, plan.heads, dtype) * dtype.itemsize // _PIECE
    head_pieces = pieces // plan.heads
    if plan.heads > 1 and (head_pieces & (head_pieces - 1) or pieces > 32):
        return Decline("a head is not a power of two of 16-byte pieces of a warp")
    return plan
