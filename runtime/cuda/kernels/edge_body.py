"""CUDA C++ of the body of a ``message`` or ``edge_map``: one column of the values of one edge.

Every op of a body is a function that maps the index of an element to its value. The writer starts at the
index of a result and walks back: elementwise ops become expressions, shape ops become arithmetic on indices,
short sums and products of two edge values become loops. Some values are stages (``body_stages``), which a
warp computes once an edge and stores in shared memory: products with a weight, sums over columns, and
expensive values that more than one column reads. Later expressions read the stored results.
"""

from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.body import EDGES, body_inputs, body_values, parse_body
from gnnc.ir.nodes import argument, arguments, first_operand, unpack
from gnnc.runtime.cuda.kernels.body_forms import decomposed
from gnnc.runtime.cuda.kernels.body_fragments import fragment_of
from gnnc.runtime.cuda.kernels.body_ops import (
    BINARY,
    GRADIENTS,
    POWERS,
    SECOND,
    UNARY,
    gradient,
)
from gnnc.runtime.cuda.kernels.body_places import (
    Place,
    between,
    broadcast,
    flat,
    is_in_vector,
    number_of,
    places,
)
from gnnc.runtime.cuda.kernels.body_scope import NO, Neighbors, Scope, operator, statements
from gnnc.runtime.cuda.kernels.body_stages import (
    AT,
    VECTOR,
    Fragment,
    Functor,
    Layout,
    ProductStage,
    Row,
    Side,
    Stage,
    SumStage,
    declared,
    layout_of,
    place_of,
    row_of,
)
from gnnc.runtime.cuda.kernels.body_values import (
    RESHAPES,
    edge_shape,
    has_stages,
    is_product,
    is_sum,
    long_values,
    low_type,
    reduced_dims,
    shapes_of,
    unshaped,
)
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.row_program.build import Refusal

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SHORT_SOFTMAX = 32  # columns that each thread of a row adds up by itself


def write_body(
    text: str,
    operands: dict[str, torch.Tensor],
    strides: dict[str, int],
    *,
    in_vectors: bool = False,
    reduced: bool = False,
) -> Functor:
    """Return a body as a functor.

    Args:
        text: the body.
        operands: fake tensors of the operands, by name (``i0``, ``j0``, ``e0``, ``c0``).
        strides: elements from one row to the next, of operands other than constants.
        in_vectors: whether a thread computes four neighboring columns, from a multiple of four.
        reduced: whether the values of a row's edges are reduced.

    Raises:
        Refusal: the body has an op, or an operand, that a single thread cannot compute.
    """
    return BodyWriter(text, operands, strides).write(in_vectors=in_vectors, reduced=reduced)


def write_sides(
    text: str, operands: dict[str, torch.Tensor], strides: dict[str, int]
) -> tuple[Functor, tuple[Side, ...]]:
    """Return a body as a functor that leaves its values in shared memory, and where they lie.

    Args:
        text: the body.
        operands: fake tensors of the operands, by name.
        strides: elements from one row to the next, of operands other than constants.

    Raises:
        Refusal: as in ``write_body``, or there is no room.
    """
    return BodyWriter(text, operands, strides).write_sides()


class BodyWriter:
    """Writer of the C++ of one body."""

    def __init__(self, text: str, operands: dict[str, torch.Tensor], strides: dict[str, int]) -> None:
        self.module = decomposed(parse_body(text))
        self.names = body_inputs(text)
        self.operands, self.strides = operands, strides
        self.count = 0
        self.shapes = shapes_of(self.module, self.names, operands)
        self.stages: dict[Node, Stage] = {}
        self.reads: set[int | str] = set()
        self.long = long_values(self.module.graph, self.shapes)
        self.in_vectors = False
        self.neighbors: Neighbors | None = None
        self.rows = self._fetched() if has_stages(self.module.graph, self.shapes) else {}

    def write(self, *, in_vectors: bool = False, reduced: bool = False) -> Functor:
        """Return the body as a functor, as ``write_body`` does."""
        self._check_operands()
        self.neighbors = Neighbors() if in_vectors else None
        results = body_values(self.module.graph)
        scope, widths = Scope(), set()
        for number, result in enumerate(results):
            shape = edge_shape(result, self.shapes)
            widths.add(prod(shape))
            value = self.value(result, ("edge", *places("column", shape)), scope)
            scope.lines.append(f"values[{number}] = {value};")
        assert len(widths) == 1, "the values of a body have one shape"
        width, layout, fragment = widths.pop(), None, None
        if self.stages:
            if reduced and len(results) == 1:
                fragment = fragment_of(results[0], self.shapes, self.stages, self.rows, self.value)
            rows, vectors = list(self.rows.values()), len(fragment.vectors) if fragment else 0
            layout = layout_of(list(self.stages.values()), self.reads, width, len(results), rows, vectors)
        return Functor(self._struct(scope, layout, fragment), self.names, width, layout and layout.block)

    def write_sides(self) -> tuple[Functor, tuple[Side, ...]]:
        """Return the body as a functor that leaves its values in shared memory, and where they lie."""
        self._check_operands()
        self.rows = self._fetched()
        values = [self._unwidened(unshaped(value, self.shapes)) for value in body_values(self.module.graph)]
        self.long |= {value for value in values if not self._lies_in_shared_memory(value)}
        sides = tuple(self._side(value) for value in values)
        rows = list(self.rows.values())
        layout = layout_of(list(self.stages.values()), self.reads, 0, 0, rows)
        return Functor(self._struct(Scope(), layout), self.names, 0, layout.block), sides

    def _unwidened(self, value: Node) -> Node:
        """Return the copied row of 16 bits that a value is the FP32 form of, or the value."""
        if str(value.target) != "aten._to_copy.default" or argument(value, "dtype") != torch.float32:
            return value
        source = unshaped(first_operand(value), self.shapes)
        return source if source.op == "placeholder" and self._lies_in_shared_memory(source) else value

    def _lies_in_shared_memory(self, value: Node) -> bool:
        """Return whether a value is a copied row of floats, or the result of a product."""
        if value.op == "placeholder":
            name = str(value.target)
            return name in self.rows and self.operands[name].dtype in _FLOATS
        return is_product(value, self.shapes)

    def _side(self, value: Node) -> Side:
        """Return the place of a value in shared memory."""
        columns = prod(edge_shape(value, self.shapes))
        self.value(value, ("edge", *places("column", edge_shape(value, self.shapes))), Scope())
        if value in self.stages:
            return Side(columns, place_of(list(self.stages).index(value)))
        name = str(value.target)
        return Side(columns, row_of(name), TYPES[self.operands[name].dtype])

    def _check_operands(self) -> None:
        for name in self.names:
            if self.operands[name].dtype not in TYPES:
                raise Refusal(f"an operand of the body is {self.operands[name].dtype}")

    def _struct(self, scope: Scope, layout: Layout | None, fragment: Fragment | None = None) -> str:
        """Return the members, the stages, and the call operator with the statements of a scope."""
        stages, rows = list(self.stages.values()), list(self.rows.values())
        members = [f"const {TYPES[self.operands[name].dtype]}* {name};" for name in self.names]
        lines = [
            *(members or ["int64_t nothing;"]),
            *(declared(stages, rows, layout, fragment, self.names) if layout else ()),
            *(operator if self.neighbors is None else self.neighbors.operator)(AT, scope.lines),
        ]
        return "".join(f"  {line}\n" for line in lines)

    def _fetched(self) -> dict[str, Row]:
        """Return the rows of sources and edges that a warp copies to shared memory."""
        found: dict[str, Row] = {}
        for name in self.names:
            if name[0] in "je" and self._row(name).piece:
                found[name] = self._row(name)
        return found

    def value(self, node: Any, place: Place, scope: Scope) -> str:
        """Return the name of an element's value, computed in ``scope`` where it is not known yet."""
        if not isinstance(node, Node):
            return number_of(node)
        known = scope.find((node, place))
        if known is not None:
            return known
        text = self._text(node, place, scope)
        self.count += 1
        name = f"v{self.count}"
        scope.lines.append(f"const float {name} = {text};")
        scope.known[(node, place)] = name
        return name

    def _text(self, node: Node, place: Place, scope: Scope) -> str:
        if node.op == "placeholder" and node not in self.long:
            return self._load(str(node.target), place, scope)
        if node in self.long or (is_sum(node, self.shapes) and self._is_of_edges(node)):
            return self._staged(node, place)
        return self._computed(node, place, scope)

    def _computed(self, node: Node, place: Place, scope: Scope) -> str:
        """Return an element of an operand, or of an op's result, computed from elements of its operands."""
        if node.op == "placeholder":
            return self._load(str(node.target), place, scope)
        target = str(node.target)
        if target == "gnnc.gemm.default":
            return self._linear(node, place, scope)
        name = target.removeprefix("aten.").partition(".")[0]
        if not target.startswith("aten."):
            raise Refusal(f"the body calls {target}")
        if name in RESHAPES:
            return self.value(first_operand(node), self._reshaped(node, place), scope)
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, node, place, scope)
        if name in UNARY:
            return UNARY[name].format(self._operand(node, "self", place, scope))
        if name in BINARY:
            return self._binary(name, node, place, scope)
        if name in GRADIENTS:
            return self._gradient(name, node, place, scope)
        raise Refusal(f"the body calls {target}")

    def _load(self, name: str, place: Place, scope: Scope) -> str:
        shape = self.operands[name].shape
        if name[0] == "c":
            return f"step::as_float({name}[{flat(place, tuple(map(int, shape)))}])"
        row = {"i": "row", "j": "source", "e": "edge"}[name[0]]
        inner = flat(place[1:], tuple(int(size) for size in shape[1:]))
        if name in self.rows:
            self.reads.add(name)
            kind = TYPES[self.operands[name].dtype]
            return f"step::as_float(reinterpret_cast<const {kind}*>(results + {row_of(name)})[{inner}])"
        row = f"{name} + {row} * {self.strides[name]}"
        has_vectors = (self.in_vectors or self.neighbors) and self.operands[name].element_size() > 1
        if has_vectors and self._row(name).piece == VECTOR and is_in_vector(inner):
            one = f"step::as_float(one_of_four({row}, {inner}))"
            return one if self.neighbors is None else self.neighbors.load(row, inner, scope)
        return f"step::as_float(({row})[{inner}])"

    def _row(self, name: str) -> Row:
        size = self.operands[name].element_size()
        return Row(name, size * prod(map(int, self.operands[name].shape[1:])), size * self.strides[name])

    def _operand(self, node: Node, name: str, place: Place, scope: Scope) -> str:
        value = argument(node, name)
        if not isinstance(value, Node):
            return number_of(value)
        return self.value(value, broadcast(place, self.shapes[value]), scope)

    def _binary(self, name: str, node: Node, place: Place, scope: Scope) -> str:
        second = SECOND.get(name, "other")
        left, right = (self._operand(node, operand, place, scope) for operand in ("self", second))
        alpha = argument(node, "alpha", 1)
        if argument(node, "rounding_mode", None) is not None:
            raise Refusal("the body divides and rounds")
        if name in ("add", "sub") and alpha != 1:
            right = f"({number_of(alpha)} * {right})"
        if name == "rsub" and alpha != 1:
            left = f"({number_of(alpha)} * {left})"
        if name == "pow" and argument(node, second) in POWERS:
            return POWERS[argument(node, second)].format(left)
        return BINARY[name].format(left, right)

    def _gradient(self, name: str, node: Node, place: Place, scope: Scope) -> str:
        names = "grad_output", GRADIENTS[name][0]
        grad, x = (self._operand(node, operand, place, scope) for operand in names)
        return gradient(name, arguments(node), grad, x)

    def _reshaped(self, node: Node, place: Place) -> Place:
        source = self.shapes[first_operand(node)]
        return between(place, self.shapes[node], source)

    def _leaky_relu(self, node: Node, place: Place, scope: Scope) -> str:
        slope = number_of(argument(node, "negative_slope"))
        x = self._operand(node, "self", place, scope)
        if 0 < argument(node, "negative_slope") <= 1:
            return f"fmaxf({x}, {x} * {slope})"
        return f"({x} > 0.0f ? {x} : {x} * {slope})"

    def _elu(self, node: Node, place: Place, scope: Scope) -> str:
        if unpack(node, "scale", "input_scale") != (1, 1):
            raise Refusal("the body scales an elu")
        alpha = number_of(argument(node, "alpha"))
        x = self._operand(node, "self", place, scope)
        return f"({x} > 0.0f ? {x} : {alpha} * expm1f({x}))"

    def _gelu(self, node: Node, place: Place, scope: Scope) -> str:
        if argument(node, "approximate") != "none":
            raise Refusal("the body approximates a gelu")
        x = self._operand(node, "self", place, scope)
        return f"(0.5f * {x} * (1.0f + erff({x} * 0.70710678118654752f)))"

    def _softplus(self, node: Node, place: Place, scope: Scope) -> str:
        if unpack(node, "beta", "threshold") != (1, 20):
            raise Refusal("the body has a softplus with options")
        x = self._operand(node, "self", place, scope)
        return f"({x} > 20.0f ? {x} : log1pf(expf({x})))"

    def _clamp(self, node: Node, place: Place, scope: Scope) -> str:
        x = self._operand(node, "self", place, scope)
        low, high = unpack(node, "min", "max")
        if low is not None:
            x = f"step::larger({x}, {number_of(low)})"
        return x if high is None else f"step::smaller({x}, {number_of(high)})"

    def _where(self, node: Node, place: Place, scope: Scope) -> str:
        mask, yes, no = (self._operand(node, n, place, scope) for n in ("condition", "self", "other"))
        return f"({mask} != 0.0f ? {yes} : {no})"

    def _masked_fill(self, node: Node, place: Place, scope: Scope) -> str:
        x, mask, fill = (self._operand(node, name, place, scope) for name in ("self", "mask", "value"))
        return f"({mask} != 0.0f ? {fill} : {x})"

    def _convert(self, node: Node, place: Place, scope: Scope) -> str:
        dtype = argument(node, "dtype")
        value = self._operand(node, "self", place, scope)
        if dtype in (torch.float16, torch.bfloat16):
            return f"step::as_float(step::from_float<{TYPES[dtype]}>({value}))"
        if dtype not in (None, torch.float32):
            raise Refusal(f"the body converts to {dtype}")
        return value

    def _expand(self, node: Node, place: Place, scope: Scope) -> str:
        return self._operand(node, "self", place, scope)

    def _full_like(self, node: Node, place: Place, scope: Scope) -> str:
        return number_of(argument(node, "fill_value"))

    def _select(self, node: Node, place: Place, scope: Scope) -> str:
        source, dim, index = unpack(node, "self", "dim", "index")
        shape = self.shapes[source]
        dim, index = int(dim) % len(shape), int(index)
        at = index + shape[dim] if index < 0 else index
        if dim == 0:
            raise Refusal("the body selects edges")
        return self.value(source, (*place[:dim], str(at), *place[dim:]), scope)

    def _slice(self, node: Node, place: Place, scope: Scope) -> str:
        source, dim, start, step = unpack(node, "self", "dim", "start", "step")
        shape = self.shapes[source]
        dim, step = int(dim) % len(shape), int(step)
        start = 0 if start is None else int(start)
        if dim == 0:
            raise Refusal("the body slices edges")
        start = max(0, start + shape[dim] if start < 0 else start)
        return self.value(
            source, (*place[:dim], f"({start} + {step} * {place[dim]})", *place[dim + 1 :]), scope
        )

    def _cat(self, node: Node, place: Place, scope: Scope) -> str:
        parts, dim = unpack(node, "tensors", "dim")
        dim = int(dim) % len(self.shapes[node])
        if dim == 0:
            raise Refusal("the body concatenates edges")
        self.count += 1
        name, start = f"v{self.count}", 0
        scope.lines.append(f"float {name};")
        ends = list(accumulate(self.shapes[part][dim] for part in parts))
        is_cut = self.neighbors is not None and self.neighbors.cut(place[dim], ends, scope)
        for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
            inner = Scope(scope, number if is_cut else NO)
            index = f"({place[dim]} - {start})" if start else place[dim]
            value, start = self.value(part, (*place[:dim], index, *place[dim + 1 :]), inner), end
            condition = f"kPart == {number}" if is_cut else f"{place[dim]} < {end}"
            head = "" if number and number == len(ends) - 1 else f"if ({condition}) "
            lines = " ".join([*inner.lines, f"{name} = {value};"])
            scope.lines.append(f"{'else ' if number else ''}{head}{{ {lines} }}")
        return name

    def _linear(self, node: Node, place: Place, scope: Scope) -> str:
        if str(node.target) == "gnnc.gemm.default":
            x, weight, bias, is_kn = unpack(node, "x", "w", "bias", "w_is_kn")
            return self._product(node, place, x, weight, bias, is_kn=bool(is_kn))
        x, weight, bias = unpack(node, "input", "weight", "bias")
        return self._product(node, place, x, weight, bias, is_kn=False)

    def _matmul(self, node: Node, place: Place, scope: Scope) -> str:
        left = first_operand(node)
        right = argument(node, "mat2" if str(node.target) != "aten.matmul.default" else "other")
        if is_product(node, self.shapes):
            return self._product(node, place, left, right, None, is_kn=True)
        return self._batched_product(node, place, left, right, scope)

    def _addmm(self, node: Node, place: Place, scope: Scope) -> str:
        if unpack(node, "beta", "alpha") != (1, 1):
            raise Refusal("the body scales a product")
        bias, x, weight = unpack(node, "self", "mat1", "mat2")
        return self._product(node, place, x, weight, bias, is_kn=True)

    def _is_of_edges(self, node: Node) -> bool:
        return self.shapes[node][:1] == (EDGES,)

    def _product(
        self, node: Node, place: Place, x: Node, weight: Node, bias: Node | None, *, is_kn: bool
    ) -> str:
        """Return an element of a product with a weight."""
        if node not in self.stages:
            self._add_stage(node, lambda: self._product_stage(node, x, weight, bias, is_kn=is_kn))
        return self._result(node, place)

    def _product_stage(
        self, node: Node, x: Node, weight: Node, bias: Node | None, *, is_kn: bool
    ) -> ProductStage:
        if self._is_of_edges(weight) or (bias is not None and self._is_of_edges(bias)):
            raise Refusal("the body multiplies by a matrix of its own at every edge")
        shape, outputs = edge_shape(x, self.shapes), self.shapes[node][-1]
        if prod(shape[:-1]) != 1:
            raise Refusal(f"the body multiplies {prod(shape[:-1])} rows at every edge by a weight")
        dtype = low_type(x, {name: tensor.dtype for name, tensor in self.operands.items()})
        column = tuple("0" for _ in shape[:-1])
        rounds = str(x.target) == "aten._to_copy.default" and argument(x, "dtype") == dtype
        operand = first_operand(x) if rounds else x  # the product rounds it
        functions = {
            "column": self._in_vectors(lambda scope: self.value(operand, ("edge", *column, "column"), scope)),
            "weight": self._returned(weight, ("k", "column") if is_kn else ("column", "k")),
            "bias": self._bias(bias),
        }
        return ProductStage(outputs, functions, inputs=shape[-1], type=dtype and TYPES[dtype])

    def _staged(self, node: Node, place: Place) -> str:
        """Return an element of a sum over columns, or of a value that is stored."""
        if node not in self.stages:
            self._add_stage(node, lambda: self._value_stage(node))
        return self._result(node, place)

    def _value_stage(self, node: Node) -> Stage:
        shape = edge_shape(node, self.shapes)
        if not is_sum(node, self.shapes):
            place = ("edge", *places("column", shape))
            write = self._in_vectors if prod(shape) % 4 == 0 else statements
            return Stage(prod(shape), {"column": write(lambda scope: self._computed(node, place, scope))})
        source = first_operand(node)
        sizes, dims = self.shapes[source], reduced_dims(node, self.shapes)
        inner = iter(places("k", tuple(sizes[dim] for dim in dims)))
        others = tuple(size for dim, size in enumerate(sizes) if dim and dim not in dims)
        kept = iter(places("column", others))
        at = ("edge", *(next(inner if dim in dims else kept) for dim in range(1, len(sizes))))
        terms = prod(sizes[dim] for dim in dims)
        divisor = terms if "mean" in str(node.target) else 1
        return SumStage(prod(shape), {"term": self._returned(source, at)}, terms=terms, divisor=divisor)

    def _add_stage(self, node: Node, make: Callable[[], Stage]) -> None:
        """Add a stage behind those that it reads."""
        outer = self.reads, self.in_vectors
        self.reads, self.in_vectors = set(), False
        stage = make()
        stage.reads = self.reads
        self.reads, self.in_vectors = outer
        self.stages[node] = stage

    def _result(self, node: Node, place: Place) -> str:
        """Return an element of a stage's results."""
        number = list(self.stages).index(node)
        self.reads.add(number)
        return f"results[{place_of(number)} + {flat(place[1:], self.shapes[node][1:])}]"

    def _bias(self, bias: Node | None) -> str:
        return (
            "return 0.0f;"
            if bias is None
            else self._returned(bias, broadcast(("column",), self.shapes[bias]))
        )

    def _returned(self, node: Node, place: Place) -> str:
        """Return the statements of a function whose result is an element."""
        return statements(lambda scope: self.value(node, place, scope))

    def _in_vectors(self, write: Callable[[Scope], str]) -> str:
        """Return the statements of a function that is called for four neighbors, from a multiple of four."""
        self.in_vectors = True
        text = statements(write)
        self.in_vectors = False
        return text

    def _batched_product(self, node: Node, place: Place, left: Node, right: Node, scope: Scope) -> str:
        """Return an element of a product of two matrices of every edge: a loop."""
        shapes = self.shapes[left], self.shapes[right]
        if not all(len(shape) == 3 and shape[0] == EDGES for shape in shapes):
            raise Refusal(f"the body calls {node.target} of {len(shapes[0])} and {len(shapes[1])} dimensions")
        self.count += 1
        total, k, inner = f"v{self.count}", f"k{self.count}", Scope(scope)
        a = self.value(left, (*place[:2], k), inner)
        b = self.value(right, (place[0], k, place[2]), inner)
        loop = f"for (int {k} = 0; {k} < {shapes[0][2]}; ++{k}) {{"
        scope.lines.append(f"float {total} = 0.0f;")
        scope.lines.append(" ".join([loop, *inner.lines, f"{total} += {a} * {b}; }}"]))
        return total

    def _transposed(self, node: Node, place: Place, scope: Scope) -> str:
        source = first_operand(node)
        if self._is_of_edges(source):
            raise Refusal("the body moves the edge dimension")
        return self.value(source, place[::-1], scope)

    def _swapped(self, node: Node, place: Place, scope: Scope) -> str:
        source, *dims = unpack(node, "self", "dim0", "dim1")
        first, second = (int(dim) % len(place) for dim in dims)
        if self._is_of_edges(source) and 0 in (first, second):
            raise Refusal("the body moves the edge dimension")
        swapped = list(place)
        swapped[first], swapped[second] = place[second], place[first]
        return self.value(source, tuple(swapped), scope)

    def _stack(self, node: Node, place: Place, scope: Scope) -> str:
        parts, dim = unpack(node, "tensors", "dim")
        dim = int(dim) % len(self.shapes[node])
        if dim == 0 or len(parts) > 1:
            raise Refusal("the body stacks values")
        return self.value(parts[0], (*place[:dim], *place[dim + 1 :]), scope)

    def _softmax_backward(self, node: Node, place: Place, scope: Scope) -> str:
        """Return the gradient of the logits of a short softmax: each thread adds up its row's products."""
        grad, output, dim = unpack(node, "grad_output", "output", "dim")
        dim, shape = int(dim) % len(place), self.shapes[node]
        if dim == 0 or shape[dim] > _SHORT_SOFTMAX:
            raise Refusal(f"the body has the gradient of a softmax over {shape[dim]} columns")
        self.count += 1
        total, k, inner = f"v{self.count}", f"k{self.count}", Scope(scope)
        along = (*place[:dim], k, *place[dim + 1 :])
        product = f"{self.value(grad, along, inner)} * {self.value(output, along, inner)}"
        loop = f"for (int {k} = 0; {k} < {shape[dim]}; ++{k}) {{"
        scope.lines.append(f"float {total} = 0.0f;")
        scope.lines.append(" ".join([loop, *inner.lines, f"{total} += {product}; }}"]))
        return f"({self.value(output, place, scope)} * ({self.value(grad, place, scope)} - {total}))"

    def _sum(self, node: Node, place: Place, scope: Scope) -> str:
        source = first_operand(node)
        shape, keepdim = self.shapes[source], argument(node, "keepdim", False)
        reduced = reduced_dims(node, self.shapes)
        outer_indices = iter([index for dim, index in enumerate(place) if not keepdim or dim not in reduced])
        self.count += 1
        total = f"v{self.count}"
        loops = {dim: f"k{self.count}_{dim}" for dim in reduced}
        at = tuple(loops[dim] if dim in loops else next(outer_indices) for dim in range(len(shape)))
        inner = Scope(scope)
        value = self.value(source, at, inner)
        scope.lines.append(f"float {total} = 0.0f;")
        heads = [f"for (int {name} = 0; {name} < {shape[dim]}; ++{name}) {{" for dim, name in loops.items()]
        lines = [*heads, *inner.lines, f"{total} += {value};", *("}" for _ in loops)]
        scope.lines.append(" ".join(lines))
        if "mean" in str(node.target):
            return f"({total} / {prod(shape[dim] for dim in reduced)}.0f)"
        return total


_SPECIAL: dict[str, Callable[[BodyWriter, Node, Place, Scope], str]] = {
    "leaky_relu": BodyWriter._leaky_relu,
    "elu": BodyWriter._elu,
    "gelu": BodyWriter._gelu,
    "softplus": BodyWriter._softplus,
    "clamp": BodyWriter._clamp,
    "where": BodyWriter._where,
    "masked_fill": BodyWriter._masked_fill,
    "_to_copy": BodyWriter._convert,
    "expand": BodyWriter._expand,
    "full_like": BodyWriter._full_like,
    "select": BodyWriter._select,
    "slice": BodyWriter._slice,
    "cat": BodyWriter._cat,
    "stack": BodyWriter._stack,
    "t": BodyWriter._transposed,
    "transpose": BodyWriter._swapped,
    "linear": BodyWriter._linear,
    "mm": BodyWriter._matmul,
    "bmm": BodyWriter._matmul,
    "matmul": BodyWriter._matmul,
    "addmm": BodyWriter._addmm,
    "_softmax_backward_data": BodyWriter._softmax_backward,
    "sum": BodyWriter._sum,
    "mean": BodyWriter._sum,
}
