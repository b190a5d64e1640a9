"""Registers and steps of a body while it is translated for ``gnnc_cpu.edge_body``.

A value of a body is a register with one row an edge, and a table that says where in the row each element is:
layout ops (views, slices, ``expand``) change the table alone. A step that needs its operands in order moves
them there first. Tables are tensors of the shape that the value has for one edge, so that a layout op is
applied to a table by running it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from gnnc.ir.body import EDGES, GROUPS, body_shapes, body_values, parse_body
from gnnc.ir.nodes import aten_name, op_name
from gnnc.runtime.cpu.edge_opcodes import (
    Binary,
    BodyOp,
    Format,
    Reduction,
    Steps,
    Unary,
    add_in_products,
)
from gnnc.runtime.cpu.edge_tables import are_adjacent, runs_of, table_of
from gnnc.runtime.cpu.parts import Part
from gnnc.runtime.row_program.build import Refusal

_MOST_COLUMNS = 4096
"""Columns of a value of the body; wider ones leave no room for a tile in the caches."""
_LANES = 16
"""Floats that rows of registers are padded to."""
_UNARY = {
    "relu": Unary.RELU,
    "sigmoid": Unary.SIGMOID,
    "tanh": Unary.TANH,
    "silu": Unary.SILU,
    "exp": Unary.EXP,
    "log": Unary.LOG,
    "neg": Unary.NEG,
    "abs": Unary.ABS,
    "square": Unary.SQUARE,
    "sqrt": Unary.SQRT,
    "rsqrt": Unary.RSQRT,
    "reciprocal": Unary.RECIP,
    "logical_not": Unary.LOGICAL_NOT,
}
_BINARY = {
    "mul": Binary.MUL,
    "maximum": Binary.MAXIMUM,
    "minimum": Binary.MINIMUM,
    "eq": Binary.EQ,
    "ne": Binary.NE,
    "lt": Binary.LT,
    "le": Binary.LE,
    "gt": Binary.GT,
    "ge": Binary.GE,
    "silu_backward": Binary.SILU_BACKWARD,
    "sigmoid_backward": Binary.SIGMOID_BACKWARD,
    "tanh_backward": Binary.TANH_BACKWARD,
}
_LAYOUT = frozenset(
    {"view", "reshape", "_unsafe_view", "expand", "unsqueeze", "squeeze", "select", "slice", "permute", "t"}
    | {"transpose", "alias", "detach", "clone", "contiguous"}
)
"""Ops that move the elements of an edge, where the first dimension of the result still is that of edges."""
_FORMATS = {torch.float32: Format.F32, torch.int8: Format.I8, torch.bfloat16: Format.BF16}
"""The format of a product whose weight has a dtype."""
_MOST_INPUTS = 1024
"""Terms of a sum of products of bytes in floats, of which every kernel computes the exact value."""
_OF_BOOLEANS = frozenset({"where", "masked_fill", "_to_copy", "logical_not", *_LAYOUT})
"""Ops that compute the same with 1.0 and 0.0 as with the booleans that these stand for."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the body.

    Attributes:
        register: number of the register that holds it; None: a constant operand that is not loaded.
        table: positions of its elements in a row of the register, a tensor of its shape for one edge.
        uniform: whether it is the same at all edges.
        const: number of the constant operand that it is a view of; None: it is none.
    """

    register: int | None
    table: Tensor
    uniform: bool
    const: int | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over all edges; ``table`` says where among the totals each of its elements is."""

    table: Tensor


@dataclass(frozen=True, slots=True)
class Ids:
    """An integer of each edge that chooses a row of a table; ``number`` is its place among such operands."""

    number: int


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of the rows of a matrix."""

    rows: Value


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix in low precision.

    Attributes:
        rows: the matrix that it was narrowed from.
        register: number of the register that holds it.
        format: its format.
    """

    rows: Value
    register: int
    format: Format


@dataclass(frozen=True, slots=True)
class Sums:
    """A product of integers, without the scales of its columns, or without any.

    Attributes:
        left: the rows.
        weight: the constant that they are multiplied by.
        scaled: whether the scales of the rows are in it.
    """

    left: Rows
    weight: Value
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Transposed:
    """The transpose of a matrix with one row, or a few rows, an edge."""

    value: Value


class Translator:
    """Translator of one body.

    Args:
        text: the body.
        operands: a tensor of the shape and dtype of each operand, by name (``i0``, ``c0``); of all but
            constants the first size is not read.
        special: functions that translate an op, by its name, beside the ops that have a step each.
    """

    def __init__(
        self,
        text: str,
        operands: dict[str, Tensor],
        special: Mapping[str, Callable[["Translator", Node], Any]],
    ) -> None:
        self._special = special
        _check_sizes(operands)
        self._graph = parse_body(text).graph
        self.shapes = body_shapes(text, operands)
        self._steps = Steps()
        self._values: dict[Node, Any] = {}
        self._loaded: dict[int, int] = {}
        self._done: dict[Node, Value] = {}
        self._totals = 0

    def run(self, parts: Sequence[Part]) -> Steps:
        """Return the steps; see ``translate`` for the parts."""
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._operand(node)
            elif node.op == "call_function":
                self._values[node] = self._checked(node, self._call(node))
        results = iter([self._values[value] for value in body_values(self._graph)])
        for number, part in enumerate(parts):
            self._result(number, part, results)
        self._steps.steps = add_in_products(self._steps.steps, self._steps.registers)
        return self._steps

    def _result(self, number: int, part: Part, results: Iterator[Any]) -> None:
        """Add the steps that write a result, from the next values of the body."""
        match part.kind:
            case "all":
                total = next(results)
                if not isinstance(total, Total):
                    raise Refusal("its value is no sum over the edges that tiles add up")
                self._steps.places += total.table.flatten().tolist()
            case "rows":
                self._reduce(number, part.reductions, results)
            case "edges":
                self.add(BodyOp.KEEP, number, self.in_order(of_edges(next(results))))
            case "sources":
                self.add(BodyOp.SCATTER, number, self.in_order(of_edges(next(results))))

    def _reduce(self, number: int, reductions: Sequence[str], results: Iterator[Any]) -> None:
        values, column = (self.in_order(of_edges(result)) for result in results), 0
        for name in reductions:
            value = next(values)
            weighted = next(values) if name == "softmax" else -1  # by the softmax of the first
            self.add(BodyOp.REDUCE, number, value, weighted, Reduction[name.upper()], column)
            column += self._steps.registers[value][0]

    def _operand(self, node: Node) -> Value | Ids:
        name, shape = str(node.target), self.shapes[node]
        kind = list(GROUPS).index(name[0])
        if name[0] == "e" and shape.dtype == torch.int64 and shape.dim() == 1:
            self._steps.operands[4].append(name)
            return Ids(len(self._steps.operands[4]) - 1)
        if shape.dtype != torch.float32 and (name[0] != "c" or shape.dtype not in _FORMATS):
            raise Refusal(f"{name} is {shape.dtype}")
        listed = self._steps.operands[kind]
        listed.append(name)
        if name[0] == "c":
            return Value(None, table_of(shape.shape), True, len(listed) - 1)
        value = self.new((1, *shape.shape[1:]), False)
        self.add(BodyOp.LOAD, register_of(value), kind, len(listed) - 1)
        return value

    def _checked(self, node: Node, value: Any) -> Any:
        """Return a value, whose shape for one edge must be that of the body's value."""
        if isinstance(value, Scales | Rows | Sums):
            return value
        name, shape = aten_name(node), self.shapes.get(node)
        if shape is None or shape.dtype not in (torch.float32, torch.bool):
            raise Refusal(f"{name} is {'no tensor' if shape is None else shape.dtype}")
        if isinstance(value, Transposed):
            return value
        of_one = tuple(shape.shape)
        if isinstance(value, Value) and not value.uniform:
            if not of_one or of_one[0] % EDGES:
                raise Refusal(f"{name} moves the dimension of edges")
            of_one = (of_one[0] // EDGES, *of_one[1:])
        if tuple(value.table.shape) != of_one:
            raise Refusal(f"{name} mixes the rows of edges")
        return value

    # Registers and steps

    def add(self, op: BodyOp, to: int, a: int = -1, b: int = -1, c: int = -1, d: int = -1) -> None:
        """Append a step."""
        self._steps.steps.append((int(op), to, int(a), int(b), int(c), int(d)))

    def new(self, shape: Sequence[int], uniform: bool) -> Value:
        """Return a value of a shape, in a register of its own."""
        table = table_of(shape)
        if not 0 < table.numel() <= _MOST_COLUMNS:
            raise Refusal(f"a value has {table.numel()} columns at each edge")
        self._steps.registers.append((table.numel(), int(uniform)))
        return Value(len(self._steps.registers) - 1, table, uniform)

    def number(self, value: float) -> int:
        """Return the position of a number among those of the steps."""
        self._steps.numbers.append(float(value))
        return len(self._steps.numbers) - 1

    def held(self, value: Value) -> int:
        """Return the register that holds a value; constants are loaded at their first use."""
        if value.register is not None:
            return value.register
        assert value.const is not None
        self._check_floats(value.const)
        if value.const not in self._loaded:
            self._loaded[value.const] = register_of(self.new(self._whole(value).shape, True))
            self.add(BodyOp.LOAD, self._loaded[value.const], 3, value.const)
        return self._loaded[value.const]

    def in_order(self, value: Value) -> int:
        """Return a register whose row is the elements of a value in their order."""
        register, wanted = self.held(value), value.table.flatten()
        if self._is_in_order(value):
            return register
        to = register_of(self.new(wanted.shape, value.uniform))
        self.move(to, register, range(wanted.numel()), wanted.tolist())
        return to

    def _is_in_order(self, value: Value) -> bool:
        """Return whether the row of a value's register is its elements in their order."""
        width = self._steps.registers[self.held(value)][0]
        return torch.equal(value.table.flatten(), torch.arange(width))

    def move(self, to: int, register: int, places: Sequence[int], sources: Sequence[int]) -> None:
        """Add the step that writes elements of one register to places of another."""
        first = len(self._steps.runs)
        self._steps.runs += runs_of(places, sources)
        self.add(BodyOp.MOVE, to, register, first, len(self._steps.runs) - first)

    def chosen(self, table: Value, ids: Any) -> Value:
        """Add the step that loads the rows of a table, a whole constant, that the ids of edges choose."""
        if (
            not isinstance(ids, Ids)
            or table.const is None
            or table.table.dim() != 2
            or not self.is_whole(table)
        ):
            raise Refusal("rows are chosen of no matrix among the constants, or not by integers of the edges")
        value = self.new((1, table.table.shape[1]), False)
        self.add(BodyOp.LOAD, register_of(value), 4, table.const, ids.number)
        return value

    def is_whole(self, value: Value) -> bool:
        """Return whether a view of a constant is the constant as it is."""
        return torch.equal(value.table, self._whole(value))

    def _whole(self, value: Value) -> Tensor:
        assert value.const is not None
        return table_of(self._given(value.const).shape)

    def _given(self, const: int) -> Tensor:
        """Return a tensor without memory, of the shape and dtype of a constant."""
        name = self._steps.operands[3][const]
        return next(t for n, t in self.shapes.items() if n.target == name)

    def _check_floats(self, const: int) -> None:
        if self._given(const).dtype != torch.float32:
            raise Refusal(f"a constant in {self._given(const).dtype} is no weight of a product")

    def constant(self, value: float, shape: Sequence[int]) -> Value:
        """Return a value of one number."""
        filled = self.new(shape, True)
        self.add(BodyOp.FILL, register_of(filled), self.number(value))
        return filled

    # Kinds of ops

    def value_of(self, argument: Any) -> Any:
        """Return the value of an argument, a scalar if it is a number."""
        return self._values[argument] if isinstance(argument, Node) else argument

    def spread(self, arguments: Sequence[Any]) -> tuple[list[Value], torch.Size]:
        """Return values that are expanded to a common shape."""
        values = [self.value_of(argument) for argument in arguments]
        shapes = [of_edges(value).table.shape for value in values if not isinstance(value, int | float)]
        shape = torch.broadcast_shapes(*shapes)
        spread = []
        for value in values:
            if isinstance(value, int | float):
                spread.append(self.constant(value, shape))
            else:
                table = value.table.expand(shape)
                spread.append(Value(value.register, table, value.uniform, value.const))
        return spread, shape

    def binary(self, kind: Binary, left: Any, right: Any, number: float | None = None) -> Value:
        """Add a step of two values."""
        values, shape = self.spread([left, right])
        first, second = map(self.in_order, values)
        result = self.new(shape, all(value.uniform for value in values))
        position = -1 if number is None else self.number(number)
        self.add(BodyOp.BINARY, register_of(result), first, second, kind, position)
        return result

    def unary(self, kind: Unary, argument: Any, number: float | None = None) -> Value:
        """Add a step of one value."""
        value = of_edges(self.value_of(argument))
        register = self.in_order(value)
        result = self.new(value.table.shape, value.uniform)
        self.add(
            BodyOp.UNARY, register_of(result), register, kind, -1 if number is None else self.number(number)
        )
        return result

    def where(self, mask: Any, left: Any, right: Any) -> Value:
        """Add the step that selects one of two values."""
        values, shape = self.spread([mask, left, right])
        registers = list(map(self.in_order, values))
        result = self.new(shape, all(value.uniform for value in values))
        self.add(BodyOp.WHERE, register_of(result), *registers)
        return result

    def fold(self, value: Value, dims: Sequence[int], keepdim: bool, largest: bool = False) -> Value:
        """Add a step that sums over dimensions of an edge, or finds the largest there."""
        table, axes = value.table, sorted(dim % value.table.dim() for dim in dims)
        kept = [dim for dim in range(table.dim()) if dim not in axes]
        count = math.prod(table.shape[dim] for dim in axes)
        last = Value(value.register, table.permute(*kept, *axes), value.uniform, value.const)
        side_by_side = 1
        if not self._is_in_order(last) and are_adjacent(axes, table.shape):
            last, side_by_side = value, math.prod(table.shape[axes[-1] + 1 :])
        register = self.in_order(last)
        shape = [1 if dim in axes else size for dim, size in enumerate(table.shape) if keepdim or dim in kept]
        result = self.new(shape, value.uniform)
        self.add(BodyOp.FOLD, register_of(result), register, count, int(largest), side_by_side)
        return result

    def weight(self, value: Value, is_kn: bool, scales: int = -1) -> int:
        """Return the number of the weight that a value is, as it is or transposed."""
        const = value.const
        if const is None or value.table.dim() != 2:
            raise Refusal("a product's weight is no matrix among the constants")
        whole = self._whole(value)
        if whole.dim() != 2 or not (torch.equal(whole, value.table) or torch.equal(whole.t(), value.table)):
            raise Refusal("a product's weight is part of a constant")
        if not torch.equal(whole, value.table):
            is_kn = not is_kn
        self._steps.weights.append((const, int(is_kn), int(_FORMATS[self._given(const).dtype]), scales))
        return len(self._steps.weights) - 1

    def product(self, node: Node, x: Any, weight: Any, bias: Any, is_kn: bool) -> Any:
        """Add the step of a product with a weight, or of a sum over all edges of outer products."""
        left, right = self.value_of(x), self.value_of(weight)
        if isinstance(left, Transposed):
            return self._outer(node, left.value, right, bias)
        if not isinstance(right, Value) or of_edges(left).uniform or not right.uniform:
            raise Refusal(f"{aten_name(node)} multiplies no edge values by a weight")
        if right.const is not None:
            self._check_floats(right.const)
        register = self.in_order(left)
        added = -1 if bias is None else self._bias(node, bias)
        return self._multiplied(node, left, register, self.weight(right, is_kn), added)

    def _multiplied(self, node: Node, rows: Value, register: int, weight: int, bias: int) -> Value:
        """Add the step of a product of rows, which a register holds, and return its result."""
        result = self.new(self.shape_of_product(node), False)
        count = math.prod(rows.table.shape[:-1])
        self.add(BodyOp.PRODUCT, register_of(result), register, weight, bias, count)
        return result

    def matmul(self, left: Value, right: Value) -> Value:
        """Add the step of a product of two matrices of each edge."""
        shapes = left.table.shape, right.table.shape
        if any(len(shape) != 3 or shape[0] != 1 for shape in shapes) or (left.uniform and right.uniform):
            raise Refusal("it multiplies no single matrix of each edge by another")
        (_, rows, terms), (_, _, columns) = shapes
        registers = self.in_order(left), self.in_order(right)
        result = self.new((1, rows, columns), False)
        self.add(BodyOp.MATMUL, register_of(result), *registers, rows, terms)
        return result

    def _bias(self, node: Node, bias: Node) -> int:
        """Return the register of a vector that is added to each row of a product."""
        offset = of_edges(self.value_of(bias))
        columns = (self.shapes[node].shape[-1],)
        if not offset.uniform or offset.table.dim() > 1:
            raise Refusal(f"{aten_name(node)} adds a matrix")
        return self.in_order(Value(offset.register, offset.table.expand(columns), True, offset.const))

    def narrowed(self, x: Value, dtype: torch.dtype) -> Rows:
        """Add the step that quantizes or rounds the rows of a matrix."""
        width = x.table.shape[-1]
        if x.uniform or x.table.dim() != 2 or dtype not in _FORMATS or width > _MOST_INPUTS:
            raise Refusal(f"no step makes {dtype} of a value of {tuple(x.table.shape)} for each edge")
        narrow, count = _FORMATS[dtype], x.table.shape[0]
        register = self.in_order(x)
        floats = count * (_up(width, 64) // 4 + _LANES if narrow == Format.I8 else _up(width, 32) // 2)
        to = self.new((floats,), False)
        self.add(BodyOp.NARROW, register_of(to), register, narrow, count)
        return Rows(x, register_of(to), narrow)

    def low_product(self, node: Node, left: Rows, weight: Value, is_kn: bool, scales: int = -1) -> Value:
        """Add the step of a product in low precision, and of the bias that the only reader of it adds."""
        number, added = self.weight(weight, is_kn, scales), self._added_to(node)
        bias = -1 if added is None else self._bias(node, added)
        result = self._multiplied(node, left.rows, left.register, number, bias)
        if added is not None:
            self._done[next(iter(node.users))] = result
        return result

    def _added_to(self, node: Node) -> Node | None:
        """Return the vector that the only reader of a matrix adds to its rows; None: it adds none."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if user is None or aten_name(user) != "add.Tensor" or len(user.args) != 2 or user.kwargs:
            return None
        other = user.args[1] if user.args[0] is node else user.args[0]
        value = self._values.get(other) if isinstance(other, Node) else None
        is_vector = isinstance(value, Value) and value.uniform and value.table.dim() == 1
        columns = self.shapes[node].shape[-1:]
        return other if is_vector and tuple(value.table.shape) == columns else None  # type: ignore[return-value, union-attr]

    def shape_of_product(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a product of edge values for one edge."""
        shape = self.shapes[node].shape
        return shape[0] // EDGES, *shape[1:]

    def _outer(self, node: Node, left: Value, right: Any, bias: Any) -> Total:
        if bias is not None or not isinstance(right, Value) or left.uniform or right.uniform:
            raise Refusal(f"{aten_name(node)} multiplies no two matrices of edges")
        if right.table.dim() != 2 or left.table.shape[0] != right.table.shape[0]:
            raise Refusal(f"{aten_name(node)} multiplies matrices of other numbers of edges")
        rows, columns = left.table.shape[1], right.table.shape[1]
        start, width = self._totals, _padded(columns)
        self._totals += rows * width
        self.add(BodyOp.OUTER, start, self.in_order(left), self.in_order(right), left.table.shape[0])
        return Total(start + torch.arange(rows)[:, None] * width + torch.arange(columns))

    def total(self, value: Value, dims: Sequence[int], keepdim: bool) -> Total:
        """Add a sum over all edges, and over other dimensions."""
        others = [dim for dim in dims if dim % value.table.dim() != 0]
        if value.uniform:
            raise Refusal("a constant is summed over the edges")
        whole = value.table
        if others:
            value = self.fold(value, others, True)
        if value.table.shape[0] > 1:
            value = self.fold(value, [0], True)
        start, width = self._totals, value.table.numel()
        self._totals += _padded(width)
        self.add(BodyOp.TOTAL, start, self.in_order(value))
        axes = {dim % whole.dim() for dim in dims}
        shape = [1 if d in axes else size for d, size in enumerate(whole.shape) if keepdim or d not in axes]
        return Total(start + table_of(shape))

    def _call(self, node: Node) -> Any:
        if node in self._done:
            return self._done[node]
        name = op_name(node)
        operands = node.all_input_nodes
        booleans = [operand for operand in operands if self.shapes[operand].dtype == torch.bool]
        if booleans and name not in _OF_BOOLEANS:
            raise Refusal(f"{aten_name(node)} computes with booleans")
        if name in _LAYOUT:
            return self._layout(node)
        if name in self._special:
            return self._special[name](self, node)
        if name in _UNARY:
            return self.unary(_UNARY[name], operands[0])
        if name in _BINARY and len(node.args) == 2:
            return self.binary(_BINARY[name], *node.args)
        raise Refusal(f"no step computes {aten_name(node)}")

    def _layout(self, node: Node) -> Any:
        operand = node.all_input_nodes[0]
        value = self._values[operand]
        if not isinstance(value, Value | Total):
            raise Refusal(f"{aten_name(node)} moves the dimension of edges, or values of low precision")
        is_matrix = value.table.dim() == 2
        if op_name(node) in ("t", "transpose") and is_matrix and isinstance(value, Value):
            if not value.uniform and self.shapes[node].shape[1] % EDGES == 0:
                return Transposed(value)
        table = _run(node, {operand: value.table})
        if isinstance(value, Total):
            return Total(table)
        return Value(value.register, table, value.uniform, value.const)


def of_edges(value: Any) -> Value:
    """Return a value; raise Refusal where it is a sum over all edges, or an integer."""
    if isinstance(value, Ids | Scales | Rows | Sums):
        raise Refusal("it computes with integers of the edges, or with values of low precision")
    if not isinstance(value, Value):
        raise Refusal("what is summed over all edges is used at each of them")
    return value


def register_of(value: Value) -> int:
    """Return the register of a value that is no constant operand."""
    assert value.register is not None
    return value.register


def _padded(width: int) -> int:
    """Return the floats of a row of a register."""
    return _up(width, _LANES)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _run(node: Node, tables: dict[Node, Tensor]) -> Tensor:
    """Run a layout op on the table of its operand."""
    args = map_arg(node.args, tables.__getitem__)
    kwargs = map_arg(node.kwargs, tables.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError) as error:
        raise Refusal(f"{aten_name(node)} moves the dimension of edges") from error


def _check_sizes(operands: Mapping[str, Tensor]) -> None:
    """Raise Refusal unless the sizes of operands for an edge are fixed."""
    for name, operand in operands.items():
        sizes = operand.shape if name[0] == "c" else operand.shape[1:]
        if any(not isinstance(size, int) for size in sizes):
            raise Refusal(f"the sizes of {name} are not fixed")
