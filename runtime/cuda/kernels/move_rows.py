"""Lowering of ops that move whole rows: concatenations of rows, constants."""

import math
from typing import Any

from torch.fx import Node

from gnnc.ir.nodes import argument, arguments, aten_name, shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.kernels.epilogue import TYPES, literal
from gnnc.runtime.program.launches import Expr, Operand, expr
from gnnc.runtime.program.values import width_of
from gnnc.runtime.registry import Decline, kernel


@kernel("aten.cat", backend="cuda", name="concatenate_rows")
class ConcatenateRows:
    """Kernel of ``csrc/cuda/dense/move_rows.cuh``: a launch for each operand."""

    @staticmethod
    def plan(node: Node) -> Decline | None:
        """Take rows of floats of a fixed width and of one type."""
        tensors = argument(node, "tensors")
        if arguments(node)["dim"] != 0 or len({value.meta["val"].dtype for value in tensors}) > 1:
            return Decline("it concatenates no rows of one type")
        if any(len(shape_of(value)) != len(shape_of(node)) for value in tensors):
            return Decline("an operand has no rows")
        return _why_not(node)

    @staticmethod
    def emit(plan: None, node: Node, emitter: CudaEmitter) -> None:
        """Write a launch for each operand, which copies its rows."""
        tensors: list[Any] = argument(node, "tensors")
        matrices = [emitter.matrix(value) for value in tensors]
        out = _allocate(node, emitter)
        size = node.meta["val"].element_size() * emitter.row_stride(node)
        before: Operand = 0
        for x, matrix in zip(tensors, matrices, strict=True):
            config, pieces = _config(node, x, emitter)
            rows = emitter.size(shape_of(x)[0])
            target = expr("{} + {} * {}", pointer(out.written), before, size)
            emitter.launch(f"gnnc::copy_rows<{config}>", _grid(rows, pieces), [pointer(matrix), target, rows])
            before = expr("({} + {})", before, rows)


@kernel("aten.full", backend="cuda", name="fill")
class Fill:
    """Kernel of ``csrc/cuda/dense/move_rows.cuh``: each thread writes an element."""

    @staticmethod
    def plan(node: Node) -> Decline | None:
        """Take floats whose sizes, but the number of rows, are fixed."""
        if isinstance(argument(node, "fill_value"), Node):
            return Decline("the number is computed")
        return _why_not(node)

    @staticmethod
    def emit(plan: None, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that fills the result."""
        out = _allocate(node, emitter, dense=True)
        value = literal(float(argument(node, "fill_value")))
        text = f"  __device__ static float value() {{ return {value}; }}\n"
        constant = emitter.kernel_set.struct("Constant", text)
        count = expr("{} * {}", emitter.size(shape_of(node)[0]), width_of(node))
        name = f"gnnc::fill<{TYPES[node.meta['val'].dtype]}, {constant}>"
        emitter.launch(name, expr("({})", blocks(expr("({})", count), BLOCK)), [pointer(out.written), count])


def _why_not(node: Node) -> Decline | None:
    """Return why a result is not rows of floats of a fixed width; None: it is."""
    value, shape = node.meta["val"], shape_of(node)
    if value.dtype not in TYPES or not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return Decline(f"{aten_name(node)} of {value.dtype}")
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape[1:]):
        return Decline("its rows have no fixed width")
    return None


def _allocate(node: Node, emitter: CudaEmitter, *, dense: bool = False) -> Expr:
    """Return memory for the result; numbers and constants are read as vectors, too."""
    return emitter.allocate(node, dense=dense or len(shape_of(node)) < 2)


def _config(node: Node, x: Node, emitter: CudaEmitter) -> tuple[str, int]:
    """Return the C++ name of the ``MoveRowsConfig``, and the pieces of a row."""
    width, stride, pitch = width_of(node), emitter.row_stride(x), emitter.row_stride(node)
    together = math.gcd(16 // x.meta["val"].element_size(), width, stride, pitch)
    kind = TYPES[x.meta["val"].dtype]
    return f"gnnc::MoveRowsConfig<{kind}, {width}, {stride}, {pitch}, {together}>", width // together


def _grid(rows: Expr, pieces: int) -> Expr:
    return expr("({})", blocks(expr("{} * {}", rows, pieces), BLOCK))
