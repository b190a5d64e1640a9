"""Lowering of layer norm of the rows of a matrix in training, and of its gradient."""

from collections.abc import Mapping

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, operand, shape_of, unpack
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, lanes_for, pointer
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum
from gnnc.runtime.cuda.kernels.epilogue import Struct, literal
from gnnc.runtime.program.launches import Expr, Operand
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned

_MOST_COLUMNS = 1024
"""Columns at most: a thread holds 32 of a row."""


@kernel("aten.native_layer_norm", backend="cuda", name="layer_norm", priority=10)
class LayerNorm:
    """Kernel of ``csrc/cuda/dense/rowmap.cuh``; it stores the mean and the deviation of each row, too."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the width of the rows."""
        return _width(node, ("input",))

    @staticmethod
    def emit(plan: int, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that normalizes the rows, and stores their means and deviations."""
        x = operand(node, "input")
        rows, mean, factor = emitter.outputs(node)
        struct = Struct(plan)
        for name, value in zip(("weight", "bias"), unpack(node, "weight", "bias"), strict=True):
            struct.member(f"const float* {name}", pointer(emitter.optional_vector(value)))
        places = [_member(struct, name, result, emitter) for name, result in (("m", mean), ("f", factor))]
        struct.step("step::layer_norm", "weight", "bias", literal(argument(node, "eps")), *places)
        write_rows(struct, rows, x, plan, emitter)


@kernel("aten.native_layer_norm_backward", backend="cuda", name="layer_norm_backward", priority=10)
class LayerNormBackward:
    """Kernels of ``csrc/cuda/dense``: ``rowmap.cuh`` for the rows, ``column_sum.cuh`` for weight and bias."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the width of the rows."""
        return _width(node, ("input", "grad_out"))

    @staticmethod
    def emit(plan: int, node: Node, emitter: CudaEmitter) -> None:
        """Write a launch for the gradient of the rows, and a sum over the rows for each other gradient."""
        grad, x, mean, factor, weight = (
            argument(node, name) for name in ("grad_out", "input", "mean", "rstd", "weight")
        )
        results = zip(emitter.outputs(node), argument(node, "output_mask"), strict=True)
        rows, of_weight, of_bias = (result if is_wanted else None for result, is_wanted in results)
        stride = emitter.row_stride(x)
        members = {"const float* x": pointer(emitter.matrix(x))}
        members |= {
            f"const float* {name}": pointer(emitter.vector(value))
            for name, value in (("mean", mean), ("factor", factor))
        }
        if rows is not None:
            struct = Struct(plan)
            for declaration, value in members.items():
                struct.member(declaration, value)
            struct.member("const float* weight", pointer(emitter.optional_vector(weight)))
            moments = "step::Moments{__ldg(mean + row), __ldg(factor + row)}"
            struct.step(f"step::layer_norm_backward<{stride}>", f"x + row * {stride}", "weight", moments)
            write_rows(struct, rows, grad, plan, emitter)
        normalized = f"(x[row * {stride} + column] - mean[row]) * factor[row]"
        for result, term in ((of_weight, f" * {normalized}"), (of_bias, "")):
            if result is not None:
                write_sum(
                    members if term else {}, term, grad, plan, emitter.allocate(result, dense=True), emitter
                )


def _width(node: Node, rows: tuple[str, ...]) -> int:
    """Return the width of the rows; refuse what is no matrix of floats that is normalized row by row."""
    x = operand(node, "input").meta["val"]
    for name in rows:
        value = operand(node, name).meta["val"]
        if value.dtype != torch.float32 or value.dim() != 2:
            raise Refusal(f"{name} is {value.dtype} of {value.dim()} dimensions")
    vectors = [argument(node, name) for name in ("weight", "bias")]
    if any(value is not None and value.meta["val"].dtype != torch.float32 for value in vectors):
        raise Refusal("the weight or the bias is not float32")
    width = build.fixed_width(x)
    if list(argument(node, "normalized_shape")) != [width] or not 0 < width <= _MOST_COLUMNS:
        raise Refusal(f"it normalizes {argument(node, 'normalized_shape')} of rows of {width} columns")
    return width


def _member(struct: Struct, name: str, result: Node | None, emitter: CudaEmitter) -> str:
    """Add the member of a result with a number for each row; return where that of a row is stored."""
    if result is None:
        return "nullptr"
    struct.member(f"float* {name}", pointer(emitter.allocate(result, dense=True).written))
    return f"{name} + row"


def write_rows(struct: Struct, result: Node | None, x: Node, width: int, emitter: CudaEmitter) -> None:
    """Write the launch that runs steps on each row of ``x``, and stores the rows where they are read."""
    if result is not None:
        struct.member("float* out", pointer(emitter.allocate(result).written))
        stride = emitter.row_stride(result)
        struct.step(f"step::store<{stride}, false, float>", f"out + row * {stride}")
    lanes, rows = lanes_for(width), emitter.matrix(x)
    config = f"gnnc::RowmapConfig<float, {width}, {emitter.row_stride(x)}, {lanes}>"
    name = f"gnnc::rowmap<{config}, {emitter.kernel_set.struct('Epilogue', struct.text)}>"
    count = emitter.size(shape_of(x)[0])
    emitter.launch(name, blocks(count, BLOCK // lanes), [pointer(rows), count, *struct.values])


def write_sum(
    members: Mapping[str, Operand],
    term: str,
    rows: Node,
    width: int,
    out: Expr,
    emitter: CudaEmitter,
    *,
    is_squared: bool = False,
) -> None:
    """Write the launches that add up a term of all rows.

    Args:
        members: declarations of what the term reads, with the values.
        term: C++ behind the element of the row: nothing, or an operator and a value of ``row``, ``column``.
        rows: the rows.
        width: their columns.
        out: the sums, dense.
        emitter: the program under construction.
        is_squared: whether the terms are squared.
    """
    text = "".join(f"  {declaration};\n" for declaration in ("const float* from", *members))
    text += "  __device__ float operator()(int64_t row, int column) const {\n"
    text += f"    const float value = from[row * {emitter.row_stride(rows)} + column]{term};\n"
    text += f"    return value{' * value' if is_squared else ''};\n  }}\n"
    value = emitter.kernel_set.struct("Value", text)
    values = [pointer(emitter.matrix(rows)), *members.values()]
    write_column_sum(emitter, value, values, emitter.size(shape_of(rows)[0]), width, out)
