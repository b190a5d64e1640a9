"""Lowering of ops that move elements or sum a dimension: slices, permutations, sums of few terms."""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gnnc.ir.nodes import arguments, aten_name, first_operand, shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.program.launches import expr
from gnnc.runtime.program.values import width_of
from gnnc.runtime.registry import Decline, kernel

_MOST_TERMS = 4096
"""Elements that a thread adds up at most."""
_MOST_DIMS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Place of each element of a result in the rows of an operand.

    Attributes:
        offset: (dimension of the operand, index) of the first element.
        dims: dimension of the operand that each dimension of the result runs along, and its step.
        summed: dimension of the operand that is summed; None: none.
    """

    offset: tuple[int, int]
    dims: tuple[tuple[int, int], ...]
    summed: int | None = None


@kernel(
    *[f"aten.{name}" for name in ("slice", "select", "permute", "transpose", "t", "sum")],
    backend="cuda",
    name="strided",
)
class Strided:
    """Kernel of ``csrc/cuda/dense/strided.cuh``: each thread copies, or adds up, the terms of one element."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take floats whose sizes, but the number of rows, are fixed."""
        x = first_operand(node)
        shape, result = list(shape_of(x)), list(shape_of(node))
        if x.meta["val"].dtype not in TYPES or node.meta["val"].dtype not in TYPES:
            return Decline(f"it makes {node.meta['val'].dtype} of {x.meta['val'].dtype}")
        if not 0 < len(result) <= _MOST_DIMS or not shape:
            return Decline(f"its result has {len(result)} dimensions")
        if not all(isinstance(size, int) and size > 0 for size in (*shape[1:], *result[1:])):
            return Decline("a size behind the rows is not fixed")
        plan = _READERS[aten_name(node)](node, len(shape)) if aten_name(node) in _READERS else None
        if plan is None:
            return Decline(f"{aten_name(node)} with these arguments")
        if x.op == "placeholder" and _is_prefix(plan, len(shape)):
            return Decline("it is a view of whole rows of an argument")
        if plan.summed is not None:
            terms = shape[plan.summed]
            if not isinstance(terms, int) or not 0 < terms <= _MOST_TERMS:
                return Decline(f"it adds up {terms} terms")
        return plan

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that computes the elements of the result."""
        x = first_operand(node)
        strides = _strides(x, emitter.row_stride(x))
        rows, *sizes = shape_of(node)
        given = [step * strides[dim] for dim, step in plan.dims]
        padding = _MOST_DIMS - len(given)
        sizes, given = [*[1] * padding, *map(int, sizes)], [given[0], *[0] * padding, *given[1:]]
        terms, apart = (0, 0) if plan.summed is None else (shape_of(x)[plan.summed], strides[plan.summed])
        dim, first = plan.offset
        matrix = emitter.matrix(x)
        out = emitter.allocate(node, dense=isinstance(rows, int))  # weights are read as vectors, too
        types = f"{TYPES[x.meta['val'].dtype]}, {TYPES[node.meta['val'].dtype]}"
        numbers = [*sizes, first * strides[dim], *given, terms, apart, emitter.row_stride(node)]
        config = f"gnnc::StridedConfig<{types}, {', '.join(map(str, numbers))}>"
        count = emitter.size(rows)
        grid = expr("({})", blocks(expr("{} * {}", count, width_of(node)), BLOCK))
        emitter.launch(f"gnnc::strided<{config}>", grid, [pointer(matrix), pointer(out.written), count])


def _strides(x: Node, row: int) -> list[int]:
    """Return the strides of the dimensions of a value whose rows are ``row`` elements apart."""
    strides = [1]
    for size in reversed(shape_of(x)[2:]):
        strides.append(strides[-1] * int(size))
    return [row, *reversed(strides)] if len(shape_of(x)) > 1 else [row]


def _is_prefix(plan: Plan, rank: int) -> bool:
    """Return whether the elements lie one behind the other in the operand."""
    dims = [dim for dim, step in plan.dims if step == 1]
    return plan.summed is None and plan.offset[0] == 0 and dims == list(range(rank - len(plan.dims), rank))


def _slice(node: Node, rank: int) -> Plan | None:
    given = arguments(node)
    dim, start, step = given["dim"] % rank, given["start"] or 0, given["step"]
    size = shape_of(first_operand(node))[dim]
    if not isinstance(start, int) or not isinstance(step, int) or (start < 0 and not isinstance(size, int)):
        return None
    start = max(start + size, 0) if start < 0 else start
    return Plan((dim, start), tuple((i, step if i == dim else 1) for i in range(rank)))


def _select(node: Node, rank: int) -> Plan | None:
    given = arguments(node)
    dim, index = given["dim"] % rank, given["index"]
    size = shape_of(first_operand(node))[dim]
    if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
        return None
    return Plan((dim, index % size if index < 0 else index), tuple((i, 1) for i in range(rank) if i != dim))


def _permute(node: Node, rank: int) -> Plan | None:
    return Plan((0, 0), tuple((dim % rank, 1) for dim in arguments(node)["dims"]))


def _transpose(node: Node, rank: int) -> Plan | None:
    given = arguments(node)
    a, b = given["dim0"] % rank, given["dim1"] % rank
    return Plan((0, 0), tuple(({a: b, b: a}.get(dim, dim), 1) for dim in range(rank)))


def _t(node: Node, rank: int) -> Plan | None:
    return Plan((0, 0), tuple((dim, 1) for dim in reversed(range(rank))))


def _sum(node: Node, rank: int) -> Plan | None:
    given = arguments(node)
    dims: Any = given["dim"]
    if dims is None or len(dims) != 1 or given["dtype"] is not None:
        return None
    summed = dims[0] % rank
    left = tuple((dim, 1) for dim in range(rank) if dim != summed or given["keepdim"])
    steps = tuple((dim, 0 if dim == summed else step) for dim, step in left)
    return Plan((0, 0), steps, summed) if steps else None


_READERS = {
    "slice.Tensor": _slice,
    "select.int": _select,
    "permute.default": _permute,
    "transpose.int": _transpose,
    "t.default": _t,
    "sum.dim_IntList": _sum,
}
"""The function that plans each op."""
