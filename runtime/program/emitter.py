"""Writes the Python program of an executable: one launch a line, memory planned ahead.

Kernels call the methods of `Emitter` while the graph is walked once. A value is known by its exact
form (the shape in the graph) and by its *rows* form, the 2-D matrix that kernels take; views between
the two cost nothing at run time where the memory is ours.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import is_view
from gnnc.runtime.program.checks import check_finite
from gnnc.runtime.program.sizes import Sizes, expression, typical

_FOREVER = 1 << 60
_DENSE_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""Memory of ours has padded rows, which these refuse to take as they are."""
_ROW_BYTES = {torch.int8: 64, torch.uint8: 64, torch.bfloat16: 16, torch.float16: 16, torch.float32: 16}


@dataclass(slots=True)
class Buffer:
    """Memory that a kernel writes: a region of the arena, or an output from the pool.

    Attributes:
        shape: sizes of the rows form.
        stride: elements a row, padding included.
        dtype: element type.
        first, last: steps between which the memory is in use.
        regions: number of the arena's tensor, by (shape text, stride text).
        slot: the arena buffer, once planned.
    """

    shape: tuple[Any, ...]
    stride: Any
    dtype: torch.dtype
    first: int
    last: int
    regions: dict[tuple[str, str], int] = field(default_factory=dict)
    slot: int = -1

    @property
    def typical_bytes(self) -> int:
        """Plausible size, to plan which buffers share memory."""
        rows = typical(self.shape[0]) if self.shape else 1
        return rows * self.stride * self.dtype.itemsize

    @property
    def has_fixed_size(self) -> bool:
        """Whether it is as large on every graph."""
        return not self.shape or bool(expression(self.shape[0]).is_number)


@dataclass(slots=True)
class Value:
    """How the program refers to a node's value."""

    exact: str | None = None
    buffer: Buffer | None = None
    holds: tuple[Buffer, ...] = ()
    matrix: dict[int, str] = field(default_factory=dict)


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    target = node.target
    if node.op == "call_module":
        return node.meta["choice"].kernel.backend == "reference"
    if target is operator.getitem or not isinstance(target, torch._ops.OpOverload):
        return True
    if any(result.alias_info is not None for result in target._schema.returns):
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return the (symbolic) shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same expression."""
    return expression(a) == expression(b)


class Emitter:
    """Collects the lines, the constants and the memory plan of one program."""

    def __init__(self, graph_module: GraphModule, *, check_finite: bool = True) -> None:
        self.graph_module = graph_module
        self.check_finite = check_finite
        self.checks: list[tuple[str, str]] = []
        self.scales: list[tuple[Node, str]] = []
        self.sizes = Sizes()
        self._late_sizes = Sizes(inline=True)
        self.constants: dict[str, Any] = {}
        self.body: list[tuple[str, Node | None]] = []
        self.buffers: list[Buffer] = []
        self.region_texts: list[tuple[Buffer, str, str]] = []
        self._values: dict[Node, Value] = {}
        self._names: dict[int, str] = {}
        self._buffer_under: dict[str, Buffer] = {}
        self._count = 0
        self._step = 0
        self._node: Node | None = None
        self._escaping = _escaping(graph_module)

    @staticmethod
    def padded(width: int, dtype: torch.dtype) -> int:
        """Return the elements from one row to the next, of memory that is ours."""
        elements = _ROW_BYTES.get(dtype, 1) // dtype.itemsize or 1
        return -(-width // elements) * elements

    # Program text

    def prelude(self) -> list[str]:
        """Statements that a program begins with, once it has its arena."""
        return []

    def line(self, text: str) -> None:
        """Append one statement."""
        self.body.append((text, self._node))

    def bind(self, value: Any, hint: str = "k") -> str:
        """Return the name of a global that holds ``value``."""
        key = id(value)
        if key not in self._names:
            self._names[key] = self.fresh(hint)
            self.constants[self._names[key]] = value
        return self._names[key]

    def fresh(self, hint: str) -> str:
        """Return a variable name that nothing else has."""
        self._count += 1
        return f"{hint}_{self._count}"

    def enter(self, step: int, node: Node) -> None:
        """Say which node the next lines belong to."""
        self._step, self._node = step, node

    # Values

    def define(self, node: Node, name: str, *, holds: tuple[Buffer, ...] = ()) -> None:
        """Note that the variable ``name`` is the value of ``node``."""
        self._values[node] = Value(exact=name, holds=holds)
        if node.op == "placeholder":
            self.sizes.learn(name, node.meta.get("val"))
        self._late_sizes.learn(name, node.meta.get("val"))

    def outputs(self, node: Node) -> list[Node | None]:
        """Return the node that stands for each result of ``node``: itself, or its getitems."""
        value = node.meta.get("val")
        if not isinstance(value, tuple | list):
            return [node]
        found: list[Node | None] = [None] * len(value)
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.args[1], int):
                found[user.args[1]] = user
        return found

    def exact(self, node: Node) -> str:
        """Return an expression for the value in the shape that the graph gives it."""
        value = self._value(node)
        self._touch(value)
        if value.exact is None:
            value.exact = self._exact_form(node, value)
        return value.exact

    def matrix(self, node: Node, width: int | None = None) -> str:
        """Return an expression for the value as rows ``[-1, width]``, last dimension dense.

        ``width`` defaults to the elements behind the first dimension; 1-D values have width 1.
        """
        width = width_of(node) if width is None else width
        node = self._base(node)
        value = self._value(node)
        self._touch(value)
        if width not in value.matrix:
            value.matrix[width] = self._matrix_form(node, value, width)
        return value.matrix[width]

    def vector(self, node: Node) -> str:
        """Return an expression for the value as a dense tensor of one dimension or none."""
        node = self._base(node)
        value = self._value(node)
        self._touch(value)
        if 0 not in value.matrix:
            value.matrix[0] = self._vector_form(node, value)
        return value.matrix[0]

    def dense(self, node: Node, width: int | None = None) -> str:
        """Return an expression for the value as rows ``[-1, width]`` without padding between them."""
        text = self.matrix(node, width)
        buffer = self._ours(self._base(node))
        if buffer is None or buffer.stride == buffer.shape[1]:
            return text
        return self._assign("m", f"{text}.contiguous()")

    def _vector_form(self, node: Node, value: Value) -> str:
        buffer = value.buffer
        if buffer is not None and buffer.stride == buffer.shape[1]:
            return self._region(buffer, (buffer.shape[0] * buffer.shape[1],), (1,))
        text = self.exact(node)
        flat = len(shape_of(node)) <= 1
        # A column of a wider matrix reshapes to a strided vector.
        return self._assign("v", f"{text}.contiguous()" if flat else f"{text}.reshape(-1).contiguous()")

    def argument(self, value: Any) -> str:
        """Return an expression for an fx argument: node, size, constant, or nesting of them."""
        if isinstance(value, Node):
            meta = value.meta.get("val")
            return self._size_node(value) if isinstance(meta, torch.SymInt) else self.exact(value)
        if isinstance(value, tuple | list):
            inner = ", ".join(self.argument(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(v)}" for k, v in value.items()) + "}"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        return self.bind(value, "c")

    def size(self, size: Any) -> str:
        """Return an expression for a symbolic size.

        Raises:
            LookupError: a symbol of it cannot be read off any value yet.
        """
        text = self.sizes.text(size) or self._late_sizes.text(size)
        if text is None:
            raise LookupError(f"size {size} is not known before {self._node}")
        return text

    # Memory

    def stride_for(self, node: Node, width: int) -> int:
        """Return the elements from one row of a value of ours to the next."""
        return self.padded(width, node.meta["val"].dtype)

    def allocate(self, node: Node, *, dense: bool = False) -> str:
        """Return the matrix that a kernel writes for ``node``; padded rows unless the caller keeps it."""
        shape, width = shape_of(node), width_of(node)
        rows = shape[0] if shape else 1
        dtype = node.meta["val"].dtype
        if node in self._escaping:
            return self._output(node, dtype, rows, width)
        stride = width if dense or len(shape) < 2 else self.stride_for(node, width)
        buffer = self._buffer((rows, width), stride, dtype)
        if buffer is None:
            return self._late(node, rows, width, dtype)
        value = self._values[node] = Value(buffer=buffer)
        value.matrix[width] = self._region(buffer, (rows, width), (stride, 1))
        return value.matrix[width]

    def allocate_vector(self, node: Node) -> str:
        """Return the dense 1-D tensor that a kernel writes for ``node``."""
        self.allocate(node, dense=True)
        return self.vector(node)

    def scratch(self, rows: Any, width: int, dtype: torch.dtype, *, flat: bool = False) -> str:
        """Return memory that only the present step uses."""
        stride = width if flat else self.padded(width, dtype)
        buffer = self._buffer((rows, width), stride, dtype)
        if buffer is None:
            shape = f"({self.size(rows)} * {width},)" if flat else f"({self.size(rows)}, {width})"
            return self._assign("s", f"empty({shape}, dtype={self.bind(dtype, 'dtype')})")
        shape = (rows * width,) if flat else (rows, width)
        return self._region(buffer, shape, (1,) if flat else (stride, 1))

    def check_values(self, node: Node, name: str) -> None:
        """Have the program refuse to go on if a value of ``name`` is not finite."""
        check = self.bind(partial(check_finite, node.meta.get("layer", "")), "check_finite")
        self.line(f"{check}({name})")

    def check_scale(self, node: Node, name: str) -> None:
        """Have the program refuse to return if the scale ``name``, which it writes, is not finite."""
        if not self.check_finite:
            return
        if name in self._buffer_under:
            self._buffer_under[name].last = _FOREVER
        self.checks.append((name, node.meta.get("layer", "")))

    def flag(self) -> str:
        """Return one float that a kernel raises to the largest magnitude it meets; checked at the end."""
        buffer = Buffer((1, 1), 1, torch.float32, -1, _FOREVER)
        self.buffers.append(buffer)
        text = self._region(buffer, (1,), (1,))
        self.line(f"{text}.zero_()")
        self.checks.append((text, self._node.meta.get("layer", "") if self._node else ""))
        return text

    def hold(self, nodes: Iterable[Node]) -> tuple[Buffer, ...]:
        """Return the buffers that a result over these arguments may keep in use."""
        held: dict[int, Buffer] = {}
        for node in nodes:
            value = self._values.get(node)
            for buffer in self._buffers_of(value) if value else ():
                held[id(buffer)] = buffer
        return tuple(held.values())

    # Inside

    def _value(self, node: Node) -> Value:
        if node not in self._values:
            if not is_view(node):
                raise LookupError(f"{node} has no value yet")
            base = self._values.get(_first(node)) or self._value(_first(node))
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
            node = _first(node)
        return node

    def _size_node(self, node: Node) -> str:
        meta = node.meta["val"]
        text = self.sizes.text(meta) or self._late_sizes.text(meta)
        return text or self.exact(node)

    def _exact_form(self, node: Node, value: Value) -> str:
        base = self._ours(node)
        if base is not None:
            shape = shape_of(node)
            return self._region(base, shape, _strides(shape, base.stride))
        if is_view(node):
            return self._view(node)
        raise LookupError(f"{node} has no exact form")

    def _ours(self, node: Node) -> Buffer | None:
        """The buffer whose rows a node's value is, if its memory is a region of the arena."""
        start = node
        while is_view(node) and (node not in self._values or self._values[node].buffer is None):
            node = _first(node)
        buffer = self._values[node].buffer if node in self._values else None
        shape = shape_of(start)
        if buffer is None or not all(expression(size).is_number for size in shape[1:]):
            return None
        width = width_of(start)
        whole = width == buffer.shape[1] and (not shape or same_size(shape[0], buffer.shape[0]))
        return buffer if whole else None

    def _view(self, node: Node) -> str:
        source = self.exact(_first(node))
        rest = ", ".join(self.argument(arg) for arg in node.args[1:])
        target = torch.ops.aten.reshape.default if node.target in _DENSE_VIEWS else node.target
        return self._assign("v", f"{self.bind(target, 'view')}({source}, {rest})")

    def _matrix_form(self, node: Node, value: Value, width: int) -> str:
        base = self._ours(node)
        if base is not None and width == base.shape[1]:
            return self._region(base, base.shape, (base.stride, 1))
        text = self.exact(node)
        if len(shape_of(node)) != 2 or width_of(node) != width:
            text = f"{text}.reshape(-1, {width})"
        if node.meta["val"].dtype == torch.int8:
            stride = self.padded(width, torch.int8)
            return self._assign("m", f"{self.bind(padded_codes, 'padded')}({text}, {stride})")
        return self._assign("m", f"{text}.contiguous()")

    def _assign(self, hint: str, expression_text: str) -> str:
        name = self.fresh(hint)
        self.line(f"{name} = {expression_text}")
        return name

    def _output(self, node: Node, dtype: torch.dtype, rows: Any, width: int) -> str:
        name = self.fresh("out")
        kind = self.bind(dtype, "dtype")
        self.line(f"{name} = take(({self.size(rows)}, {width}), {kind})")
        return self._settle(node, name, width)

    def _late(self, node: Node, rows: Any, width: int, dtype: torch.dtype) -> str:
        kind = self.bind(dtype, "dtype")
        name = self._assign("t", f"empty(({self.size(rows)}, {width}), dtype={kind})")
        return self._settle(node, name, width)

    def _settle(self, node: Node, name: str, width: int) -> str:
        """Give a dense matrix its exact form, once its shape differs from that."""
        shape = shape_of(node)
        exact = name
        if len(shape) != 2:
            sizes = ", ".join(self.size(size) for size in shape)
            exact = self._assign("v", f"{name}.view(({sizes},))" if shape else f"{name}.view(())")
        self._values[node] = Value(exact=exact, matrix={width: name})
        return name

    def _buffer(self, shape: tuple[Any, ...], stride: int, dtype: torch.dtype) -> Buffer | None:
        """Plan arena memory, or return None where the size is only known in mid-program."""
        if self.sizes.text(shape[0]) is None:
            return None
        buffer = Buffer(shape, stride, dtype, self._step, self._step)
        self.buffers.append(buffer)
        return buffer

    def _region(self, buffer: Buffer, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> str:
        buffer.last = max(buffer.last, self._step)
        sizes = f"({', '.join(self.size(size) for size in shape)},)" if shape else "()"
        strides = f"({', '.join(str(item) for item in stride)},)" if stride else "()"
        key = (sizes, strides)
        if key not in buffer.regions:
            buffer.regions[key] = len(self.region_texts)
            self.region_texts.append((buffer, sizes, strides))
        text = f"t{buffer.regions[key]}"
        self._buffer_under[text] = buffer
        return text


def padded_codes(codes: torch.Tensor, stride: int) -> torch.Tensor:
    """Return int8 rows with the row stride that kernels ask for."""
    rows, width = codes.shape
    out = codes.new_empty((rows, stride))[:, :width]
    return out.copy_(codes)


def width_of(node: Node) -> int:
    """Elements of one row: the product of all sizes but the first, which must be fixed."""
    width = 1
    for size in shape_of(node)[1:]:
        width *= int(expression(size))
    return width


def _first(node: Node) -> Node:
    first = node.args[0]
    assert isinstance(first, Node)
    return first


def _strides(shape: tuple[Any, ...], row: int) -> tuple[int, ...]:
    if not shape:
        return ()
    strides = [1]
    for size in reversed(shape[2:]):
        strides.append(strides[-1] * int(expression(size)))
    return (row,) if len(shape) == 1 else (row, *reversed(strides))


def _escaping(graph_module: GraphModule) -> set[Node]:
    """Nodes whose memory the caller may still hold after the call."""
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
