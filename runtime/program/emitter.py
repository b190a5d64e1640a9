"""Writes the program of an executable: statements, constants and a memory plan.

Kernel lowerings call the methods of ``Emitter`` while the graph is walked once.
"""

import operator
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import qtype_of, shape_of
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.ir.quantized import STATIC_RANGE
from gnnc.runtime.program.checks import check_finite, check_range, check_values_in_range
from gnnc.runtime.program.launches import (
    Allocate,
    Columns,
    Expr,
    Let,
    Operand,
    Take,
    View,
    Zero,
    expr,
    literal,
    variable,
)
from gnnc.runtime.program.memory_plan import END, Buffer
from gnnc.runtime.program.values import Value, Values, round_up, width_of
from gnnc.runtime.registry import Choice
from gnnc.torch_private import OpOverload, is_composite, schema

_LINE = 64
"""Bytes of a cache line."""


class Emitter(Values):
    """Program of one graph under construction: values, statements, memory that kernels write, checks.

    Attributes:
        check_finite: whether scales that are not finite are errors.
        checks: the scales that the program checks at its end, each with the name of its layer.
        ranges: largest values that the program checks at its end, each with its check.
        scales: row scales of the present launch, each with its node.
    """

    IN_ORDER: ClassVar[frozenset[str]] = frozenset(
        {"gemm", "gemm_tn", "rounding_gemm_tn", "map", "batch_norm", "batch_norm_backward", "relu_mask"}
        | {"relu_backward", "reference"}
    )
    """Names of the kernels that read each row of a matrix once, one after the other."""

    def __init__(self, graph_module: GraphModule, *, check_finite: bool = True) -> None:
        super().__init__(graph_module)
        self.check_finite = check_finite
        self.checks: list[tuple[Expr, str]] = []
        self.ranges: list[tuple[Expr, Expr]] = []
        self.scales: list[tuple[Node, Expr]] = []
        self._escaping = _escaping(graph_module)

    def prelude(self) -> list[Let]:
        """Return the statements at the begin of a program, once it has its arena."""
        return []

    # Memory

    def stride_for(self, node: Node, width: int) -> int:
        """Return the elements from one row to the next, of a value in the arena.

        Gathered rows of floats start on a cache line if that adds half at most, else on half of one: loads of
        a vector that begin elsewhere touch two lines.
        """
        dtype = node.meta["val"].dtype
        stride, nbytes = self.padded(width, dtype), width * dtype.itemsize
        if not dtype.is_floating_point or nbytes <= _LINE // 4 or self.is_read_in_order(node):
            return stride
        lines = round_up(nbytes, _LINE)
        return (lines if 2 * lines <= 3 * nbytes else round_up(nbytes, _LINE // 2)) // dtype.itemsize

    def is_read_in_order(self, node: Node) -> bool:
        """Return whether no kernel gathers the rows of a value."""

        def reads_in_order(user: Node) -> bool:
            choice = user.meta.get("choice")
            if not isinstance(choice, Choice):
                return user.op == "output" or self.is_read_in_order(user)
            return choice.kernel is not None and choice.kernel.name in self.IN_ORDER

        return all(reads_in_order(user) for user in node.users)

    def allocate(self, node: Node, *, dense: bool = False) -> Expr:
        """Return the matrix that a kernel writes for ``node``; padded rows unless the caller keeps it."""
        shape, width = shape_of(node), width_of(node)
        rows = shape[0] if shape else 1
        dtype = node.meta["val"].dtype
        if node in self._escaping:
            return self._output(node, dtype, rows, width)
        stride = width if dense or len(shape) < 2 else self.stride_for(node, width)
        buffer = self._buffer((rows, width), stride, dtype)
        if buffer is None:
            stride = self.stride_outside_arena(stride, width, dtype)
            dense = stride == width or _is_dense(dtype)
            matrix = self._rows("t", self.size(rows), width, stride, dtype)
            return self._settle(node, matrix, width, is_dense=dense)
        value = self._values[node] = Value(buffer=buffer)
        value.matrix[width] = self._region(buffer, (rows, width), (stride, 1))
        return value.matrix[width]

    def stride_outside_arena(self, stride: int, width: int, dtype: torch.dtype) -> int:
        """Return the elements from one row to the next in memory that no arena gives."""
        return stride

    def allocate_vector(self, node: Node) -> Expr:
        """Return the dense 1-D tensor that a kernel writes for ``node``."""
        self.allocate(node, dense=True)
        return self.vector(node)

    def scratch(self, rows: Any, width: int, dtype: torch.dtype, *, flat: bool = False) -> Expr:
        """Return memory that only the present node uses: rows, padded, or one dense vector if ``flat``."""
        stride = width if flat else self.padded(width, dtype)
        buffer = self._buffer((rows, width), stride, dtype)
        if buffer is None:
            count = self.size(rows)
            if flat:
                return self.empty("s", (expr("{} * {}", count, width),), dtype)
            return self._rows("s", count, width, stride, dtype)
        shape = (rows * width,) if flat else (rows, width)
        return self._region(buffer, shape, (1,) if flat else (stride, 1))

    def empty(self, hint: str, shape: Iterable[Operand], dtype: torch.dtype) -> Expr:
        """Return a new tensor of a size that is known only within the program; ``hint`` begins its name."""
        kind = self.bind(dtype, "dtype")
        name = self.fresh(hint)
        self.append(Allocate(name, tuple(map(literal, shape)), kind.text))
        return variable(name)

    def _rows(self, hint: str, rows: Expr, width: int, stride: int, dtype: torch.dtype) -> Expr:
        """Return a new matrix; rows of integers are padded, since kernels read whole blocks of them."""
        if stride == width or _is_dense(dtype):
            return self.empty(hint, (rows, width), dtype)
        whole = self.empty(hint, (rows, stride), dtype)
        part = Columns(self.fresh(hint), whole.text, width)
        self.append(part)
        return variable(part.result)

    def hold(self, nodes: Iterable[Node]) -> tuple[Buffer, ...]:
        """Return the buffers that a result over these arguments may keep in use."""
        held: dict[int, Buffer] = {}
        for node in nodes:
            value = self._values.get(node)
            for buffer in self._buffers_of(value) if value else ():
                held[id(buffer)] = buffer
        return tuple(held.values())

    # Checks

    def check_values(self, node: Node, values: Expr) -> None:
        """Write a check that raises unless all values of a tensor are finite."""
        check = self.bind(partial(check_finite, node.meta.get("layer", "")), "check_finite")
        self.call(check, [values])

    def check_values_in_range(self, node: Node, values: Expr) -> None:
        """Write a check that raises unless the values that a node quantizes suit its static scale."""
        check = partial(check_values_in_range, node.meta.get("layer", ""), node.meta[STATIC_RANGE])
        self.call(self.bind(check, "check_range"), [values])

    def check_scale(self, node: Node, scale: Expr) -> None:
        """Write a check at the end of the program that raises unless a scale that it writes is finite."""
        if not self.check_finite:
            return
        for name in scale.reads:
            self.memory.keep(name)
        self.checks.append((scale, node.meta.get("layer", "")))

    def check_range(self, node: Node, suited: tuple[float, float], largest: Expr, factor: float) -> None:
        """Write a check at the end of the program that raises unless a largest value suits a static scale.

        Args:
            node: the node whose launch writes ``largest``.
            suited: the least and the most that the scale suits.
            largest: the largest magnitude, or that of each row.
            factor: number that ``largest`` is multiplied by before the comparison.
        """
        for name in largest.reads:
            self.memory.keep(name)
        check = partial(check_range, node.meta.get("layer", ""), suited, factor)
        self.ranges.append((largest, self.bind(check, "check_range")))

    def flag(self) -> Expr:
        """Return one float that a kernel raises to the largest magnitude it meets; checked at the end."""
        buffer = self.memory.add(Buffer((1, 1), 1, torch.float32, -1, END))
        flag = self._region(buffer, (1,), (1,))
        self.append(Zero(flag.text))
        self.checks.append((flag, self._node.meta.get("layer", "") if self._node else ""))
        return flag

    # Inside

    def _output(self, node: Node, dtype: torch.dtype, rows: Any, width: int) -> Expr:
        """Take memory that outlives the call; quantized rows, which no caller sees, are padded."""
        stride = width if qtype_of(node) is None else self.padded(width, dtype)
        name = self.fresh("out")
        kind = self.bind(dtype, "dtype")
        self.append(Take(name, self.size(rows), stride, kind.text))
        if stride == width:
            return self._settle(node, variable(name), width, is_dense=True)
        part = Columns(self.fresh("t"), name, width)
        self.append(part)
        return self._settle(node, variable(part.result), width)

    def _settle(self, node: Node, matrix: Expr, width: int, *, is_dense: bool = False) -> Expr:
        """Give a node the value of a matrix, as a view where the node has another shape."""
        shape, exact = shape_of(node), matrix
        if len(shape) != 2:
            view = View(self.fresh("v"), matrix.text, tuple(map(self.size, shape)))
            self.append(view)
            exact = variable(view.result)
        self._values[node] = Value(exact=exact, matrix={width: matrix}, is_dense=is_dense)
        return matrix

    def _buffer(self, shape: tuple[Any, ...], stride: int, dtype: torch.dtype) -> Buffer | None:
        """Plan arena memory, or return None where the size is only known within the program."""
        if self.sizes.find(shape[0]) is None:
            return None
        return self.memory.add(Buffer(shape, stride, dtype, self._step, self._step))


def may_alias(node: Node) -> bool:
    """Return whether a node's result may share memory with an argument."""
    target = node.target
    if node.op == "call_module":
        return node.meta["choice"].kernel.backend == "reference"
    if target is operator.getitem or not isinstance(target, OpOverload):
        return True
    if any(result.alias_info is not None for result in schema(target).returns):
        return True
    return is_composite(target)


def _escaping(graph_module: GraphModule) -> set[Node]:
    """Return the nodes whose memory the caller may still hold after the call."""
    found: set[Node] = set()
    pending = list(graph_module.graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node.op in ("call_function", "call_module") and may_alias(node):
            pending.extend(node.all_input_nodes)
    return found


def _is_dense(dtype: torch.dtype) -> bool:
    """Return whether rows are dense in memory of their own; kernels read whole blocks of quantized rows."""
    return dtype.is_floating_point and dtype not in BYTE_DTYPES
