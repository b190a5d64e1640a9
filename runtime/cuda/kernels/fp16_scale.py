"""Lowering of the power of two that brings a gradient into the range of fp16."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import operand
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.program.launches import Expr, expr
from gnnc.runtime.registry import Decline, kernel

_VALUES = 16
"""Values of a thread: it has as many in flight."""
_MOST_BLOCKS = 1056
"""Blocks at most: what fills a large GPU."""


@kernel("gnnc.fp16_scale", backend="cuda", name="fp16_scale", priority=10)
class Fp16Scale:
    """Kernel of ``csrc/cuda/dense/fp16_scale.cuh``, for values whose producer does not find the power."""

    @staticmethod
    def plan(node: Node) -> Decline | None:
        """Take float32 values."""
        dtype = operand(node, "x").meta["val"].dtype
        return None if dtype == torch.float32 else Decline(f"x is {dtype}")

    @staticmethod
    def emit(plan: None, node: Node, emitter: CudaEmitter) -> None:
        """Write both launches."""
        x = emitter.dense(operand(node, "x"))
        power = emitter.allocate(node, dense=True)
        begin_fp16_scale(emitter, power)
        count = expr("{}.numel()", x)
        grid = expr("max(1, min({}, {}))", _MOST_BLOCKS, blocks(count, BLOCK * _VALUES))
        emitter.launch("gnnc::fp16_scale", grid, [pointer(x), count, pointer(power.written)])


def begin_fp16_scale(emitter: CudaEmitter, power: Expr) -> None:
    """Write the launch that sets a power of two to the largest, before kernels lower it."""
    emitter.launch("gnnc::begin_fp16_scale", 1, [pointer(power.written)], block=32)
