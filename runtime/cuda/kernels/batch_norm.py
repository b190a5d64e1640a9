"""Lowering of batch norm in training, and of its gradient."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, operand, shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, pointer
from gnnc.runtime.cuda.kernels.epilogue import Struct, literal
from gnnc.runtime.cuda.kernels.layer_norm import write_rows, write_sum
from gnnc.runtime.plans import batch_norm
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import Refusal, planned

_MOST_COLUMNS = 1024
"""Columns at most: a thread holds 32 of a row."""


@kernel("aten._native_batch_norm_legit_functional", backend="cuda", name="batch_norm", priority=10)
class BatchNorm:
    """Kernels of ``csrc/cuda/dense``: ``column_sum.cuh`` twice, ``batch_norm.cuh``, ``rowmap.cuh``."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the width; refuse statistics that are given."""
        return _narrow(batch_norm.forward_width(node))

    @staticmethod
    def emit(plan: int, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches: sums of columns, of their squared distances from the mean, moments, rows."""
        x = operand(node, "input")
        weight, bias, *running = (
            emitter.optional_vector(argument(node, name)) for name in batch_norm.VECTORS
        )
        result, *kept = emitter.outputs(node)
        count = emitter.size(shape_of(x)[0])
        total, squares = (emitter.scratch(1, plan, torch.float32, flat=True) for _ in range(2))
        write_sum({}, "", x, plan, total, emitter)
        members = {"const float* sum": pointer(total), "int64_t rows": count}
        distance = " - sum[column] / rows"
        write_sum(members, distance, x, plan, squares, emitter, is_squared=True)
        mean, factor, *following = (_vector(value, plan, emitter) for value in kept)
        numbers = "".join(
            f"  static constexpr float {name} = {literal(float(argument(node, name)))};\n"
            for name in ("momentum", "eps")
        )
        given = [pointer(value) for value in (total, squares, *running)]
        written = [pointer(value.written) for value in (mean, factor, *following)]
        emitter.launch(
            f"gnnc::batch_norm_moments<{plan}, {emitter.kernel_set.struct('Numbers', numbers)}>",
            -(-plan // BLOCK),
            [*given, *written, count],
        )
        if result is None:
            return
        struct = Struct(plan)
        named = {"mean": mean, "factor": factor, "weight": weight, "bias": bias}
        for name, value in named.items():
            struct.member(f"const float* {name}", pointer(value))
        struct.step("step::batch_norm", *named)
        write_rows(struct, result, x, plan, emitter)


@kernel("aten.native_batch_norm_backward", backend="cuda", name="batch_norm_backward", priority=10)
class BatchNormBackward:
    """Kernels of ``csrc/cuda/dense``: ``column_sum.cuh`` for weight and bias, then ``rowmap.cuh``."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the width; refuse gradients of norms whose statistics were given."""
        return _narrow(batch_norm.backward_width(node))

    @staticmethod
    def emit(plan: int, node: Node, emitter: CudaEmitter) -> None:
        """Write both sums over the rows, which the gradient of a row reads, and the launch of the rows."""
        x, grad = operand(node, "input"), operand(node, "grad_out")
        results = zip(emitter.outputs(node), argument(node, "output_mask"), strict=True)
        rows, *sums = (result if is_wanted else None for result, is_wanted in results)
        of_weight, of_bias = (_vector(result, plan, emitter) for result in sums)
        stride = emitter.row_stride(x)
        members = {
            "const float* x": pointer(emitter.matrix(x)),
            "const float* mean": pointer(emitter.vector(argument(node, "save_mean"))),
            "const float* factor": pointer(emitter.vector(argument(node, "save_invstd"))),
        }
        normalized = f"(x[row * {stride} + column] - mean[column]) * factor[column]"
        write_sum(members, f" * {normalized}", grad, plan, of_weight, emitter)
        write_sum({}, "", grad, plan, of_bias, emitter)
        if rows is None:
            return
        struct = Struct(plan)
        weight = emitter.optional_vector(argument(node, "weight"))
        for name, value in (("weight", weight), ("of_weight", of_weight), ("of_bias", of_bias)):
            members[f"const float* {name}"] = pointer(value)
        members["int64_t rows"] = emitter.size(shape_of(x)[0])
        for declaration, value in members.items():
            struct.member(declaration, value)
        names = ["mean", "factor", "weight", "of_weight", "of_bias", "1.0f / rows"]
        struct.step(f"step::batch_norm_backward<{stride}>", f"x + row * {stride}", *names)
        write_rows(struct, rows, grad, plan, emitter)


def _narrow(width: int) -> int:
    """Return the width of rows that the kernels take; refuse wider ones."""
    if not 0 < width <= _MOST_COLUMNS:
        raise Refusal(f"rows of {width} columns")
    return width


def _vector(result: Node | None, width: int, emitter: CudaEmitter) -> Expr:
    """Return memory for a vector of columns, which another kernel reads or none."""
    if result is None or not isinstance(result.meta.get("val"), torch.Tensor):
        return emitter.scratch(1, width, torch.float32, flat=True)
    return emitter.allocate_vector(result)
