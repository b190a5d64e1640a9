"""Lowering of matrix products with a weight."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cpu import epilogue
from gnnc.runtime.plans import gemm
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import tuple_of
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument


@kernel("fused:gemm", "gnnc.gemm", "gnnc.qgemm", backend="cpu", name="gemm", priority=10, elements=("int8",))
class Gemm:
    """Kernel ``gnnc_cpu.gemm``: float, bf16 or int8, quantizing activations as it loads them."""

    plan = staticmethod(gemm.plan)

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch of the product and its row program."""
        x = argument_of(node, plan.x)
        scale = emitter.optional_vector(optional_argument(node, plan.x_scale))
        rows = shape_of(x)[0]
        weights = tuple_of(emitter.matrix(argument_of(node, weight.w)) for weight in plan.weights)
        layouts = emitter.bind(tuple(int(weight.is_kn) for weight in plan.weights), "layouts")
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu.gemm.default, "gemm")
        emitter.call(op, [emitter.matrix(x), scale, weights, layouts, plan.mode, *program])
        epilogue.check_scales(emitter)
