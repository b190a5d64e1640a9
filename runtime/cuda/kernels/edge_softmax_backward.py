"""Lowering of the gradient of the softmax over the edges of each row."""

import torch
from torch.fx import Node

from gnnc.ir.format import EDGE_LIST, RUN_TABLE, Format
from gnnc.ir.nodes import operand, shape_of
from gnnc.runtime.cuda.emitter import CudaEmitter, length
from gnnc.runtime.cuda.formats.tables import runs_arguments, write_runs
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.cuda.kernels.message import body_of, write_destinations, write_edge_map, write_message
from gnnc.runtime.plans import sddmm
from gnnc.runtime.registry import kernel

_PRODUCT = "t0 = aten.mul.Tensor(e0, e1); return t0"
_GRADIENT = "t0 = aten.sub.Tensor(e1, i0); t1 = aten.mul.Tensor(e0, t0); return t1"
"""Bodies on the weight ``e0``, its gradient ``e1``, and the sum ``i0`` of their products over the row."""


@kernel("gnnc.edge_softmax_backward", backend="cuda", name="edge_softmax_backward", priority=10)
class EdgeSoftmaxBackward:
    """Kernels of ``csrc/cuda/sparse/edge.cuh``: a sum by row, then a value at every edge."""

    plan = staticmethod(sddmm.softmax_backward_plan)

    @staticmethod
    def formats(plan: int, node: Node) -> tuple[Format, ...]:
        """Return the run table and the edge list."""
        return (RUN_TABLE, EDGE_LIST)

    @staticmethod
    def emit(plan: int, node: Node, emitter: CudaEmitter) -> None:
        """Write both launches."""
        rowptr, operands = operand(node, "rowptr"), [operand(node, name) for name in ("alpha", "grad")]
        edges = dict(zip(("e0", "e1"), operands, strict=True))
        tensors = {name: emitter.matrix(value, plan) for name, value in edges.items()}
        strides = {name: emitter.row_stride(value, plan) for name, value in edges.items()}
        values = {name: value.meta["val"] for name, value in edges.items()}
        product = body_of(write_body(_PRODUCT, values, strides), tensors, emitter)
        count = shape_of(rowptr)[0] - 1
        rows = write_destinations(rowptr, emitter.size(shape_of(node)[0]), emitter)
        starts = emitter.vector(rowptr)
        runs = write_runs(emitter, starts, length(rows), 4 * plan)
        sums = emitter.scratch(count, plan, torch.float32, flat=True)
        write_message(emitter, product, "sum", runs, runs_arguments(starts, rows, runs), sums, plan)
        values["i0"] = operands[0].meta["val"].new_empty((1, *shape_of(node)[1:]))
        gradient = write_body(_GRADIENT, values, {**strides, "i0": plan})
        body = body_of(gradient, {**tensors, "i0": sums}, emitter)
        write_edge_map(emitter, body, rows, rows, emitter.allocate(node, dense=True))
