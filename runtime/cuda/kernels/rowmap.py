"""Lowering of row-local chains that follow no product and no aggregation."""

from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, lanes_for, pointer
from gnnc.runtime.cuda.kernels.epilogue import TYPES, write_epilogue
from gnnc.runtime.plans import rowmap
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import RowProgram, argument_of


@kernel("fused:map", backend="cuda", name="rowmap", priority=10, elements=("int8",))
class Map:
    """Kernel of ``csrc/cuda/dense/rowmap.cuh``: a row program over the rows of one tensor."""

    plan = staticmethod(rowmap.plan)

    @staticmethod
    def emit(plan: rowmap.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch."""
        x = argument_of(node, plan.x)
        rows, stride = emitter.matrix(x, plan.width), emitter.row_stride(x, plan.width)
        kind = TYPES[x.meta["val"].dtype]
        launch_rowmap(emitter, node, rows, kind, stride, shape_of(x)[0], plan.width, plan.program)


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
    emitter.launch(
        f"gnnc::rowmap<gnnc::RowmapConfig<{kind}, {width}, {stride}, {lanes}>, {epilogue}>",
        blocks(count, BLOCK // lanes),
        [pointer(x), count, *values],
    )
