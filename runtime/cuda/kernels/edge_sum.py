"""Lowering of sums over all edges of a body: the gradient of a weight inside of it."""

from torch.fx import Node

from gnnc.ir.format import EDGE_LIST, Format
from gnnc.ir.nodes import argument, first_operand, operand
from gnnc.ir.vjp import derived_body
from gnnc.runtime.cuda.emitter import CudaEmitter, length, pointer
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum
from gnnc.runtime.cuda.kernels.message import Plan, body_plan, write_destinations, write_functor
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import Refusal, planned

_MAX_WIDTH = 4096
_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.squeeze.dim")


@kernel("gnnc.edge_sum", backend="cuda", name="edge_sum", priority=10)
class EdgeSum:
    """Kernel of ``csrc/cuda/dense/column_sum.cuh`` on the values of a body: no E x F matrix."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Take sums of what a thread can compute by itself, for every edge."""
        if node.meta["val"].numel() > _MAX_WIDTH:
            raise Refusal(f"{node.meta['val'].numel()} values an edge")
        return body_plan(node, derived_body(argument(node, "body"), lambda _, values: _summand(values[0])))

    @staticmethod
    def formats(plan: Plan, node: Node) -> tuple[Format, ...]:
        """Return the edge list."""
        return (EDGE_LIST,)

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches."""
        body = write_functor(plan, node, emitter)
        columns = emitter.vector(operand(node, "col"))
        edges = length(columns)
        rows = write_destinations(operand(node, "rowptr"), edges, emitter)
        text = f"  const int32_t* rows;\n  const int32_t* col;\n  {body.name} body;\n"
        text += "  __device__ float operator()(int64_t edge, int column) const {\n"
        text += "    return body(rows[edge], col[edge], edge, column);\n  }\n"
        value = emitter.kernel_set.struct("Value", text)
        members = [pointer(rows), pointer(columns), *body.pointers]
        write_column_sum(emitter, value, members, edges, body.width, emitter.allocate(node, dense=True))


def _summand(value: Node) -> Node:
    """Return the rows of edges whose sum a body gives, in that shape or in another."""
    while str(value.target) in _RESHAPES:
        value = first_operand(value)
    if str(value.target) != "aten.sum.dim_IntList" or list(argument(value, "dim")) != [0]:
        raise Refusal(f"the body ends in {value.target}, not in a sum over the edges alone")
    return first_operand(value)
