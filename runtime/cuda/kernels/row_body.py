"""Lowering of elementwise ops on rows that branch, mask or concatenate: their body becomes CUDA C++."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.kernels import message
from gnnc.runtime.cuda.kernels.body_ops import GRADIENTS
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.plans import row_body
from gnnc.runtime.program.launches import expr
from gnnc.runtime.registry import BYTES, kernel
from gnnc.runtime.row_program.build import Refusal, argument_of, planned

_SINGLE = tuple(
    f"aten.{name}"
    for name in (
        "add sub rsub mul div neg abs exp log sqrt rsqrt reciprocal square pow relu sigmoid tanh silu "
        "elu gelu leaky_relu softplus clamp clamp_min clamp_max maximum minimum masked_fill where "
        "cat _to_copy _softmax_backward_data eq ne lt le gt ge logical_not logical_and logical_or"
    ).split()
) + tuple(f"aten.{name}" for name in GRADIENTS)
"""Ops that run in the kernel by themselves, too: a call of launches alone is replayed as a CUDA graph."""
_LOW = (torch.float16, torch.bfloat16)
_VECTOR = 4
"""Columns that a thread computes, and loads and stores at once."""


@kernel("fused:map", *_SINGLE, backend="cuda", name="row_body", priority=5, elements=BYTES)
class RowBody:
    """Kernel of ``csrc/cuda/dense/row_body.cuh``: each thread computes neighbors in the result."""

    @staticmethod
    @planned
    def plan(node: Node) -> row_body.Plan:
        """Take bodies whose elements a thread can compute by itself."""
        plan = row_body.plan(node, stores_bool=True)
        values = {name: argument_of(node, index).meta["val"] for name, index in plan.operands}
        if plan.dtype == torch.bool and any(value.dtype in _LOW for value in values.values()):
            raise Refusal("it compares values of 16 bits, which torch does in their type")
        if write_body(plan.body, values, dict.fromkeys(values, 1)).block is not None:
            raise Refusal("it multiplies by a weight, or sums columns")
        return plan

    @staticmethod
    def emit(plan: row_body.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch of the body over the elements of the result."""
        out = emitter.allocate(node, dense=plan.width == 1)  # a vector for what reads a number a row
        stride = emitter.row_stride(node)
        together = _VECTOR if plan.width % _VECTOR == stride % _VECTOR == 0 else 1
        edges = message.Plan(plan.body, None, plan.operands)
        body = message.write_functor(edges, node, emitter, in_vectors=together > 1)
        count = emitter.size(shape_of(node)[0])
        grid = expr("({})", blocks(expr("{} * {}", count, plan.width // together), BLOCK))
        kernel = f"gnnc::row_body<{plan.width}, {stride}, {together}, {TYPES[plan.dtype]}, {body.name}>"
        emitter.launch(kernel, grid, [pointer(out.written), count, *body.pointers])
