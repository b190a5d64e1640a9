"""Lowering of rows picked by ids, such as the values of edges in the order of the transposed CSR."""

from typing import NamedTuple

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, operand, shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.program.launches import expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import Refusal, fixed_width, planned

_PIECES = {16: "int4", 8: "int2", 4: "int32_t", 2: "int16_t", 1: "int8_t"}
"""C++ types of what a thread copies, by their bytes."""
_IDS = {torch.int64: "int64_t", torch.int32: "int32_t"}


class GatherPlan(NamedTuple):
    """Columns of a row, and the C++ type of an id."""

    width: int
    id_type: str


@kernel("aten.index_select", backend="cuda", name="gather_rows", priority=10)
class GatherRows:
    """Kernel of ``csrc/cuda/dense/gather_rows.cuh``."""

    @staticmethod
    @planned
    def plan(node: Node) -> GatherPlan:
        """Take rows of floats, picked along the first dimension."""
        x, ids = operand(node, "self").meta["val"], operand(node, "index").meta["val"]
        if argument(node, "dim") not in (0, -x.dim()):
            raise Refusal("the op picks along another dimension than the first")
        if x.dtype not in TYPES or ids.dtype not in _IDS or ids.dim() != 1:
            raise Refusal(f"the op picks rows of {x.dtype} by {ids.dim()} dimensions of {ids.dtype}")
        width = fixed_width(x)
        if width == 0:
            raise Refusal("rows of no column")
        return GatherPlan(width, _IDS[ids.dtype])

    @staticmethod
    def emit(plan: GatherPlan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that copies the picked rows."""
        x = operand(node, "self")
        rows, ids = emitter.matrix(x, plan.width), emitter.vector(operand(node, "index"))
        size = x.meta["val"].element_size()
        nbytes, stride = size * plan.width, size * emitter.row_stride(x, plan.width)
        piece = next(piece for piece in _PIECES if nbytes % piece == 0 == stride % piece)
        out = emitter.allocate(node, dense=True)
        count = emitter.size(shape_of(node)[0])
        types = f"{_PIECES[piece]}, {plan.id_type}"
        grid = blocks(expr("{} * {}", count, nbytes // piece), BLOCK)
        values = [pointer(rows), pointer(ids), pointer(out.written), emitter.size(shape_of(x)[0]), count]
        emitter.launch(f"gnnc::gather_rows<{types}, {nbytes // piece}, {stride // piece}>", grid, values)
