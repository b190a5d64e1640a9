"""The values of a graph's nodes, as expressions of a program.

A value has an exact form (the shape in the graph) and a rows form, the 2-D matrix that kernels take;
views between the two cost nothing at run time where the memory is the arena's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import first_operand, is_result, is_view, result_index, shape_of
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.runtime.program.launches import Expr, Operand, View, expr, literal, sequence, variable
from gnnc.runtime.program.memory_plan import Buffer, MemoryPlan
from gnnc.runtime.program.sizes import Sizes, expression
from gnnc.runtime.program.statements import StatementList

_DENSE_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""Views that refuse the padded rows of the arena; ``reshape`` takes their place."""
_ROW_BYTES = {torch.int8: 64, torch.uint8: 64, torch.bfloat16: 16, torch.float16: 16, torch.float32: 16}


@dataclass(slots=True)
class Value:
    """A node's value in a program.

    Attributes:
        exact: expression in the shape that the graph gives the value.
        buffer: the memory of the arena that the value is.
        holds: buffers that the value may share memory with.
        matrix: expressions as rows, by width; the dense vector at 0.
        is_dense: whether ``exact`` is a variable of memory without padding, which has views of any shape.
    """

    exact: Expr | None = None
    buffer: Buffer | None = None
    holds: tuple[Buffer, ...] = ()
    matrix: dict[int, Expr] = field(default_factory=dict)
    is_dense: bool = False


class Values(StatementList):
    """Forms of the values of one graph, made once each.

    Attributes:
        graph_module: the graph.
        memory: the plan of the temporaries.
        sizes: variables for sizes that are known when the program starts.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.memory = MemoryPlan()
        self.sizes = Sizes()
        self._late_sizes = Sizes(inline=True)
        self._values: dict[Node, Value] = {}

    @staticmethod
    def padded(width: int, dtype: torch.dtype) -> int:
        """Return the elements from one row to the next, of memory of the arena."""
        elements = _ROW_BYTES.get(dtype, 1) // dtype.itemsize or 1
        return round_up(width, elements)

    def define(self, node: Node, value: Expr, *, holds: tuple[Buffer, ...] = ()) -> None:
        """Give a node its value.

        Args:
            node: the node.
            value: its value in the shape that the graph gives it.
            holds: buffers that the value may share memory with.
        """
        self._values[node] = Value(exact=value, holds=holds)
        if node.op == "placeholder":
            self.sizes.learn(value, node.meta.get("val"))
        self._late_sizes.learn(value, node.meta.get("val"))

    def outputs(self, node: Node) -> list[Node | None]:
        """Return the node that stands for each result of ``node``: itself, or its getitems."""
        value = node.meta.get("val")
        if not isinstance(value, tuple | list):
            return [node]
        found: list[Node | None] = [None] * len(value)
        for user in node.users:
            if is_result(user) and isinstance(result_index(user), int):
                found[result_index(user)] = user
        return found

    # Forms

    def exact(self, node: Node) -> Expr:
        """Return the value in the shape that the graph gives it."""
        value = self._value(node)
        self._touch(value)
        if value.exact is None:
            value.exact = self._exact_form(node)
        return value.exact

    def matrix(self, node: Node, width: int | None = None) -> Expr:
        """Return the value as rows ``[-1, width]``, last dimension dense.

        ``width`` defaults to the elements behind the first dimension; 1-D values have width 1.
        """
        width = width_of(node) if width is None else width
        node = self._base(node)
        value = self._value(node)
        self._touch(value)
        if width not in value.matrix:
            value.matrix[width] = self._matrix_form(node, width)
        return value.matrix[width]

    def vector(self, node: Node) -> Expr:
        """Return the value as a dense tensor of one dimension or none."""
        node = self._base(node)
        value = self._value(node)
        self._touch(value)
        if 0 not in value.matrix:
            value.matrix[0] = self._vector_form(node)
        return value.matrix[0]

    def optional_vector(self, node: Node | None) -> Expr | None:
        """Return the value as a dense tensor of one dimension or none, or None where it is absent."""
        return None if node is None else self.vector(node)

    def dense(self, node: Node, width: int | None = None) -> Expr:
        """Return the value as rows ``[-1, width]`` without padding between them."""
        rows = self.matrix(node, width)
        buffer = self._arena_buffer(self._base(node))
        if buffer is None or buffer.stride == buffer.shape[1]:
            return rows
        return self.as_dense("m", rows)

    def argument(self, value: Any) -> Expr:
        """Return an fx argument: node, size, constant, or nesting of them."""
        if isinstance(value, Node):
            meta = value.meta.get("val")
            return self._size_node(value) if isinstance(meta, torch.SymInt) else self.exact(value)
        if isinstance(value, tuple | list):
            inner = sequence(map(self.argument, value))
            return expr("[{}]" if isinstance(value, list) else "({},)", inner)
        if isinstance(value, dict):
            return expr(
                "{{{}}}", sequence(expr("{}: {}", Expr(repr(k)), self.argument(v)) for k, v in value.items())
            )
        if value is None or isinstance(value, bool | int | str):
            return Expr(repr(value))
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return Expr(repr(value))
        return self.bind(value, "c")

    def size(self, size: Any) -> Expr:
        """Return a symbolic size.

        Raises:
            LookupError: a symbol of the size cannot be read off any value yet.
        """
        found = self.sizes.find(size) or self._late_sizes.find(size)
        if found is None:
            raise LookupError(f"size {size} is not known before {self._node}")
        return found

    # Inside

    def _value(self, node: Node) -> Value:
        if node not in self._values:
            if not is_view(node):
                raise LookupError(f"{node} has no value yet")
            base = self._values.get(first_operand(node)) or self._value(first_operand(node))
            self._values[node] = Value(holds=self._buffers_of(base))
        return self._values[node]

    @staticmethod
    def _buffers_of(value: Value) -> tuple[Buffer, ...]:
        return (value.buffer,) if value.buffer else value.holds

    def _touch(self, value: Value) -> None:
        for buffer in self._buffers_of(value):
            buffer.last = max(buffer.last, self._step)

    def _base(self, node: Node) -> Node:
        """Step back through views: they keep the order of the elements, hence the rows."""
        while is_view(node) and (node not in self._values or self._values[node].exact is None):
            node = first_operand(node)
        return node

    def _size_node(self, node: Node) -> Expr:
        meta = node.meta["val"]
        return self.sizes.find(meta) or self._late_sizes.find(meta) or self.exact(node)

    def _exact_form(self, node: Node) -> Expr:
        buffer = self._arena_buffer(node)
        if buffer is not None:
            shape = shape_of(node)
            return self._region(buffer, shape, _strides(shape, buffer.stride))
        if is_view(node):
            return self._view(node)
        raise LookupError(f"{node} has no exact form")

    def _matrix_form(self, node: Node, width: int) -> Expr:
        buffer = self._arena_buffer(node)
        if buffer is not None and width == buffer.shape[1]:
            return self._region(buffer, buffer.shape, (buffer.stride, 1))
        if (dense := self._dense_region(node, width)) is not None:
            return dense
        dtype = node.meta["val"].dtype
        if dtype not in BYTE_DTYPES and (view := self._dense_view(node, (-1, width))) is not None:
            return view
        value = self.exact(node)
        if len(shape_of(node)) != 2 or expression(shape_of(node)[1]) != width:
            value = expr("{}.reshape(-1, {})", value, width)
        if dtype in BYTE_DTYPES:
            return self.let_call("m", self.bind(padded_rows, "padded"), [value, self.padded(width, dtype)])
        return self.as_dense("m", value)

    def _vector_form(self, node: Node) -> Expr:
        if (dense := self._dense_region(node, None) or self._dense_view(node, (-1,))) is not None:
            return dense
        exact = self.exact(node)
        # A column of a wider matrix reshapes to a strided vector.
        return self.as_dense("v", exact if len(shape_of(node)) <= 1 else expr("{}.reshape(-1)", exact))

    def _dense_region(self, node: Node, width: int | None) -> Expr | None:
        """Return memory of the arena that has no padding as rows of another width, or as a vector (None)."""
        buffer = self._values[node].buffer if node in self._values else None
        if buffer is None or buffer.dtype in BYTE_DTYPES:
            return None
        rows, columns = buffer.shape
        if buffer.stride != columns and not (isinstance(rows, int) and rows == 1):
            return None
        if width is None:
            return self._region(buffer, (rows * columns,), (1,))
        if not columns or not width:
            return None
        count = rows * (columns // width) if columns % width == 0 else rows * columns // width
        if self.sizes.find(count) is None:
            return None
        return self._region(buffer, (count, width), (width, 1))

    def _dense_view(self, node: Node, shape: tuple[Any, ...]) -> Expr | None:
        """Return a view of memory without padding in another shape; None where a value is no such memory.

        Unlike ``reshape``, which copies where it must, the view reads nothing.
        """
        value = self._value(node)
        if not value.is_dense or value.exact is None:
            return None
        if len(shape) == 1 == len(shape_of(node)):
            return value.exact
        view = View(self.fresh("v"), value.exact.text, tuple(map(self._size_of_view, shape)))
        self.append(view)
        return variable(view.result)

    def _size_of_view(self, size: Any) -> Expr:
        return literal(size) if isinstance(size, int) else self.size(size)

    def _arena_buffer(self, node: Node) -> Buffer | None:
        """The buffer whose rows a node's value is, if its memory is a region of the arena."""
        start = node
        while is_view(node) and (node not in self._values or self._values[node].buffer is None):
            node = first_operand(node)
        buffer = self._values[node].buffer if node in self._values else None
        shape = shape_of(start)
        if buffer is None or not all(expression(size).is_number for size in shape[1:]):
            return None
        width = width_of(start)
        same_rows = not shape or expression(shape[0]) == expression(buffer.shape[0])
        return buffer if width == buffer.shape[1] and same_rows else None

    def _view(self, node: Node) -> Expr:
        source = self.exact(first_operand(node))
        if (view := self._dense_view(first_operand(node), shape_of(node))) is not None:
            self._values[node].is_dense = True
            return view
        # Sizes and dimensions, by position: every view op has names of its own for them.
        rest: list[Operand] = [self.argument(value) for value in node.args[1:]]
        target = torch.ops.aten.reshape.default if node.target in _DENSE_VIEWS else node.target
        return self.let_call("v", self.bind(target, "view"), [source, *rest])

    def _region(self, buffer: Buffer, shape: Iterable[Any], stride: Iterable[int]) -> Expr:
        buffer.last = max(buffer.last, self._step)
        return self.memory.region(buffer, [self.size(size) for size in shape], stride)


def padded_rows(rows: torch.Tensor, stride: int) -> torch.Tensor:
    """Return 8-bit rows with ``stride`` elements from one row to the next: a copy, unless they have these.

    Floats are copied wherever rows have a padding: kernels multiply it by zero, so that it must not be NaN.
    """
    count, width = rows.shape
    end = rows.storage_offset() + count * stride
    may_keep = not rows.is_floating_point() or stride == width
    if may_keep and rows.stride() == (stride, 1) and end <= rows.untyped_storage().nbytes():
        return rows
    make = rows.new_zeros if rows.is_floating_point() else rows.new_empty
    out = make((count, stride))[:, :width]
    return out.copy_(rows)


def width_of(node: Node) -> int:
    """Return the elements of one row: the product of all sizes but the first, which must be fixed."""
    width = 1
    for size in shape_of(node)[1:]:
        width *= int(expression(size))
    return width


def _strides(shape: tuple[Any, ...], row: int) -> tuple[int, ...]:
    if not shape:
        return ()
    strides = [1]
    for size in reversed(shape[2:]):
        strides.append(strides[-1] * int(expression(size)))
    return (row,) if len(shape) == 1 else (row, *reversed(strides))


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple
