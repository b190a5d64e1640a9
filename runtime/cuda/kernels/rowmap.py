"""Lowering of row-local chains that follow no product and no aggregation."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, lanes_for, pointer
from gnnc.runtime.cuda.kernels.column_sum import shares_of, write_sum_of_parts
from gnnc.runtime.cuda.kernels.epilogue import TYPES, write_epilogue
from gnnc.runtime.plans import rowmap
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import RowProgram, argument_of
from gnnc.runtime.row_program.opcodes import Op

_MOST_SHARES = 1056
"""Blocks of a sum of all rows at most: what fills a large GPU. The same on each, so that bits are equal."""
_SHARE = 64
"""Rows of such a block at least."""
_MOST_SUMMED = 1024
"""Columns of such a row at most: the sums of a block's groups lie in shared memory."""


@kernel("fused:map", "gnnc.dequantize", backend="cuda", name="rowmap", priority=10, elements=BYTES)
class Map:
    """Kernel of ``csrc/cuda/dense/rowmap.cuh``: a row program over the rows of one tensor."""

    @staticmethod
    def plan(node: Node) -> rowmap.Plan | Decline:
        """Take one sum of all rows at most, of rows that fit into shared memory."""
        plan = rowmap.plan(node)
        if isinstance(plan, Decline):
            return plan
        reason = why_no_sums(plan.program, plan.width)
        return plan if reason is None else Decline(reason)

    @staticmethod
    def emit(plan: rowmap.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch of the row program."""
        x = argument_of(node, plan.x)
        rows, stride = emitter.matrix(x, plan.width), emitter.row_stride(x, plan.width)
        kind = TYPES[x.meta["val"].dtype]
        launch_rowmap(emitter, node, rows, kind, stride, shape_of(x)[0], plan.width, plan.program)


def why_no_sums(program: RowProgram, width: int) -> str | None:
    """Return why ``launch_rowmap`` cannot compute the sums of all rows of a program; None: it can."""
    sums = [out for out in program.outs if out.form == "sum"]
    if len(sums) > 1 or (sums and (Op.HEAD_MEAN in program.ops or width > _MOST_SUMMED)):
        return f"{len(sums)} sums of all rows of {width} columns"
    return None


def sum_of(program: RowProgram, node: Node, emitter: CudaEmitter) -> Node | None:
    """Return the result of ``node`` that is the sum of all rows of a row program; None: it has none."""
    sums = [out.result for out in program.outs if out.form == "sum"]
    return emitter.outputs(node)[sums[0]] if sums and sums[0] is not None else None


def launch_rowmap(
    emitter: CudaEmitter,
    node: Node,
    x: Expr,
    kind: str,
    stride: int,
    rows: object,
    width: int,
    program: RowProgram,
) -> None:
    """Write a launch that runs a row program over the rows of ``x``, C++ type ``kind``."""
    lanes = lanes_for(width, columns=16 if program.quantizes else 4)
    epilogue, values = write_epilogue(program, node, emitter, rows, width)
    count = emitter.size(rows)
    config = f"gnnc::RowmapConfig<{kind}, {width}, {stride}, {lanes}>, {epilogue}"
    result = sum_of(program, node, emitter)
    if result is None:
        grid = blocks(count, BLOCK // lanes)
        emitter.launch(f"gnnc::rowmap<{config}>", grid, [pointer(x), count, *values])
        return
    parts = emitter.scratch(1, _MOST_SHARES * width, torch.float32, flat=True)
    shares = shares_of(count, _SHARE, _MOST_SHARES)
    arguments = [pointer(x), count, pointer(parts.written), shares, *values]
    emitter.launch(f"gnnc::rowmap_sums<{config}>", shares, arguments)
    write_sum_of_parts(emitter, parts, shares, width, emitter.allocate(result, dense=True))
