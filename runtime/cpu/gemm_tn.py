"""Lowering of the product over all rows, which is the gradient of a weight."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import arguments, unpack
from gnnc.runtime.plans import gemm_tn
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, argument_of, optional_argument, planned

_SCALES = ("a_scale", "b_scale")
_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@kernel("gnnc.gemm_tn", "gnnc.qgemm_tn", backend="cpu", name="gemm_tn", priority=10, elements=("int8",))
class GemmTn:
    """Kernel ``gnnc_cpu.gemm_tn``: float, bf16 or int8 rows, summed in FP32."""

    @staticmethod
    @planned
    def plan(node: Node) -> tuple[int, ...]:
        """Return the widths of both matrices; refuse operands that the kernel does not read."""
        values = [value.meta["val"] for value in unpack(node, "a", "b")]
        for value in values:
            if value.dtype not in _DTYPES:
                raise Refusal(f"an operand is {value.dtype}")
            if value.dim() != 2:
                raise Refusal("an operand is not a matrix")
        return tuple(build.fixed_width(value) for value in values)

    @staticmethod
    def emit(plan: tuple[int, ...], node: Node, emitter: Emitter) -> None:
        """Write the launch of the product over all rows."""
        matrices = [
            emitter.matrix(value, width) for value, width in zip(unpack(node, "a", "b"), plan, strict=True)
        ]
        given = arguments(node)
        scales = [emitter.optional_vector(given.get(name)) for name in _SCALES]
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.gemm_tn.default, "gemm_tn")
        emitter.call(op, [*matrices, out.written, *scales])


@kernel("fused:gemm_tn", backend="cpu", name="rounding_gemm_tn", priority=10)
class RoundingGemmTn:
    """Kernel ``gnnc_cpu.gemm_tn``, which rounds FP32 rows to bf16 as it loads them."""

    @staticmethod
    def plan(node: Node) -> gemm_tn.Plan | Decline:
        """Take products in FP32 and bf16."""
        plan = gemm_tn.plan(node)
        if isinstance(plan, Decline) or plan.dtype in _DTYPES:
            return plan
        return Decline(f"the operands are {plan.dtype}")

    @staticmethod
    def emit(plan: gemm_tn.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch, and the division of its small result."""
        operands = [argument_of(node, number) for number in plan.sides]
        matrices = [emitter.matrix(value, width) for value, width in zip(operands, plan.widths, strict=True)]
        rounds = [
            plan.dtype == torch.bfloat16 and value.meta["val"].dtype == torch.float32 for value in operands
        ]
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.gemm_tn.default, "gemm_tn")
        emitter.call(op, [*matrices, out.written, None, None, *rounds])
        write_division(emitter, out, optional_argument(node, plan.divisor))


def write_division(emitter: Emitter, result: Expr, divisor: Node | None) -> None:
    """Write the division of a small result by a number, where there is one."""
    if divisor is not None:
        divide = emitter.bind(torch.ops.aten.div_.Tensor, "div_")
        emitter.call(divide, [result.written, emitter.vector(divisor)])
