"""Lowering of the scales of rows that share a base scale, and of the launch that begins such a scale."""

from torch.fx import Node

from gnnc.ir.nodes import operand, shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import kernel


@kernel("gnnc.row_scale", backend="cuda", name="row_scale", priority=10)
class RowScale:
    """Kernel of ``csrc/cuda/dense/row_scale.cuh``: base / 2^shift of each row."""

    @staticmethod
    def plan(node: Node) -> None:
        """Take all."""

    @staticmethod
    def emit(plan: None, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that stores the scale of each row."""
        base, shift = (emitter.vector(operand(node, name)) for name in ("base", "shift"))
        out = emitter.allocate_vector(node)
        count = emitter.size(shape_of(node)[0])
        arguments = [pointer(base), pointer(shift), pointer(out.written), count]
        emitter.launch("gnnc::row_scale", blocks(count, BLOCK), arguments)


def begin_scale(emitter: CudaEmitter, scale: Expr) -> None:
    """Write the launch that sets a scale of a whole tensor to zero, before kernels raise it."""
    emitter.launch("gnnc::begin_scale", 1, [pointer(scale.written)], block=32)
