"""Lowering of the softmax over the edges of each row, where no other kernel computes it."""

from torch.fx import Node

from gnnc.ir.format import RUN_TABLE, Format
from gnnc.ir.nodes import operand, shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.formats.tables import runs_arguments, write_runs, write_staging
from gnnc.runtime.cuda.kernels.epilogue import literal
from gnnc.runtime.plans import sddmm
from gnnc.runtime.program.launches import Argument, count_of, expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import fixed_width


@kernel("gnnc.edge_softmax", backend="cuda", name="edge_softmax", priority=10)
class EdgeSoftmax:
    """Kernels of ``csrc/cuda/sparse/edge_softmax.cuh``: rows, then the edges of rows that are split."""

    plan = staticmethod(sddmm.softmax_plan)

    @staticmethod
    def formats(plan: float, node: Node) -> tuple[Format, ...]:
        """Return the run table."""
        return (RUN_TABLE,)

    @staticmethod
    def emit(plan: float, node: Node, emitter: CudaEmitter) -> None:
        """Write both launches."""
        logits = operand(node, "logits")
        heads = fixed_width(logits)
        values = emitter.dense(logits, heads)
        starts = emitter.vector(operand(node, "rowptr"))
        runs = write_runs(emitter, starts, emitter.size(shape_of(logits)[0]), 4 * heads)
        out = emitter.allocate(node, dense=True)
        arguments: list[Argument] = [*runs_arguments(starts, None, runs)]
        arguments += [*write_staging(emitter, runs, 2 * heads), pointer(values), pointer(out.written)]
        text = f"  static constexpr float kEps = {literal(plan)};\n"
        constants = emitter.kernel_set.struct("Constants", text)
        grid = expr("({})", blocks(expr("{}.count", runs), BLOCK // 32))
        for name in ("edge_softmax", "edge_softmax_parts"):
            kernel = f"gnnc::{name}<{heads}, {constants}>"
            emitter.kernel_set.expect(kernel, "EdgeSoftmaxArgs", count_of(arguments))
            emitter.launch(kernel, grid, arguments)
