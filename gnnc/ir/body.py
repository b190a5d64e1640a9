"""Bodies: the small per-edge programs that ``message`` and ``edge_map`` carry as text.

A body is straight-line Python over ATen calls, such as
``t0 = aten.add.Tensor(i0, j0); t1 = aten.relu.default(t0); return t1``. Its inputs are rows gathered
per edge: ``i0, i1, ...`` from destinations, ``j0, ...`` from sources, ``e0, ...`` edge tensors, and
``c0, ...`` constants without an edge dimension. A call with several results is followed by
``t2 = t1[0]``. The body returns one value, or a list of values that are
each with a reduction of its own. As text, a body is an ordinary op argument: it prints,
hashes, compares, pickles and merges like any other.
"""

import ast
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from gnnc.errors import VerifyError
from gnnc.ir.nodes import (
    aten_name,
    first_operand,
    is_result,
    is_view,
    op_name,
    outputs_of,
    result_index,
    unpack,
)
from gnnc.torch_private import LazyGraphModule, OpOverload

_DTYPES = {f"torch.{name}": getattr(torch, name) for name in (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"
)}  # fmt: skip

GROUPS = {"i": "dst", "j": "src", "e": "edge", "c": "const"}
"""The argument of an op with a body that holds the operands of each kind of input."""
KINDS = "".join(GROUPS)
"""The first letters of the inputs of a body, in the order of the arguments."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
"""Names of the ATen ops of a body that compare values."""


def body_text(graph: fx.Graph) -> str:
    """Return the text of ``graph``: placeholders named i*, j*, e*, c*, ATen calls, one output.

    Raises:
        VerifyError: a node is not a call of an ATen overload with literal arguments.
    """
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "output":
            lines.append(f"return {_text(outputs_of(graph), names)}")
        else:
            lines.append(_statement(node, names))
    return "; ".join(lines)


def _statement(node: fx.Node, names: dict[fx.Node, str]) -> str:
    target = node.target
    if is_result(node):
        names[node] = f"t{sum(1 for name in names.values() if name[0] == 't')}"
        return f"{names[node]} = {_text(first_operand(node), names)}[{result_index(node)}]"
    if node.op != "call_function" or not isinstance(target, OpOverload):
        raise VerifyError(f"a body holds ATen calls only, got {node.format_node()}")
    parts = [_text(arg, names) for arg in node.args]
    parts += [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    names[node] = f"t{sum(1 for name in names.values() if name[0] == 't')}"
    return f"{names[node]} = {target.namespace}.{target.__name__}({', '.join(parts)})"


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, names) for item in value)}]"
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{'-' if value < 0 else ''}{'nan' if math.isnan(value) else 'inf'}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise VerifyError(f"a body cannot hold the argument {value!r} of type {type(value).__name__}")


@lru_cache(maxsize=1024)
def parse_body(text: str) -> fx.GraphModule:
    """Return the GraphModule that ``text`` stands for; its placeholders are the inputs used.

    Raises:
        VerifyError: the text is not a body.
    """
    graph = fx.Graph()
    values: dict[str, Any] = {"inf": math.inf, "nan": math.nan, **_DTYPES}
    for name in body_inputs(text):
        values[name] = graph.placeholder(name)
    for statement in ast.parse(text.replace("return ", "out = ")).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            raise VerifyError(f"not a body statement: {ast.unparse(statement)}")
        name = statement.targets[0].id
        if name == "out":  # the body's `return`, spelled as an assignment so that ast takes it
            graph.output(_value(statement.value, values, graph))
        else:
            values[name] = _value(statement.value, values, graph)
    return LazyGraphModule({}, graph, "Body")


@lru_cache(maxsize=1024)
def body_inputs(text: str) -> tuple[str, ...]:
    """Return the input names of a body, ordered i0, i1, ..., j0, ..., e0, ..., c0, ..."""
    tree = ast.parse(text.replace("return ", "out = "))
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    kinds = list(GROUPS)
    inputs = [name for name in used if name[0] in kinds and name[1:].isdigit()]
    return tuple(sorted(inputs, key=lambda name: (kinds.index(name[0]), int(name[1:]))))


def widen_input(rows: fx.Node) -> None:
    """Let the steps of a body read the FP32 form of an input of 16 bits."""
    with rows.graph.inserting_after(rows):
        full = rows.graph.call_function(torch.ops.aten._to_copy.default, (rows,), {"dtype": torch.float32})
    rows.replace_all_uses_with(full, delete_user_cb=lambda user: user is not full)


def body_values(graph: fx.Graph) -> list[Any]:
    """Return the values of the graph of a body, which returns one or a list of them."""
    found: Any = outputs_of(graph)
    return list(found) if isinstance(found, list | tuple) else [found]


def body_operands(node: fx.Node) -> dict[str, fx.Node]:
    """Return the operands of an op with a body, by the names of the body's inputs."""
    return name_operands(unpack(node, *GROUPS.values()))


def name_operands(groups: Sequence[Sequence[fx.Node]]) -> dict[str, fx.Node]:
    """Return operands by destination, by source, by edge, and constants, by their names in a body."""
    kinds = zip(GROUPS, groups, strict=True)
    return {f"{kind}{number}": operand for kind, group in kinds for number, operand in enumerate(group)}


def values_of(operands: Mapping[str, fx.Node]) -> dict[str, torch.Tensor]:
    """Return the fake tensors of a body's operands, by name."""
    return {name: operand.meta["val"] for name, operand in operands.items()}


def _value(tree: ast.expr, values: dict[str, Any], graph: fx.Graph) -> Any:
    match tree:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in values:
            return values[name]
        case ast.List(items):
            return [_value(item, values, graph) for item in items]
        case ast.UnaryOp(ast.USub(), operand):
            return operator.neg(_value(operand, values, graph))
        case ast.Attribute() if (name := ast.unparse(tree)) in values:
            return values[name]
        case ast.Subscript(several, ast.Constant(int(number))):
            return graph.call_function(operator.getitem, (_value(several, values, graph), number))
        case ast.Call(func, args, keywords):
            return graph.call_function(
                _target(ast.unparse(func)),
                tuple(_value(arg, values, graph) for arg in args),
                {str(k.arg): _value(k.value, values, graph) for k in keywords},
            )
    raise VerifyError(f"not part of a body: {ast.unparse(tree)}")


def _target(name: str) -> Any:
    parts = name.split(".")
    if len(parts) != 3:
        raise VerifyError(f"not part of a body: a call of {name}")
    namespace, op, overload = parts
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def evaluate_body(
    text: str,
    dst: list[torch.Tensor],
    src: list[torch.Tensor],
    edge: list[torch.Tensor],
    const: list[torch.Tensor],
) -> Any:
    """Run a body on rows that are already gathered per edge.

    Returns:
        ``[E, ...]``, or a list of such tensors where the body returns a list.
    """
    groups = {"i": dst, "j": src, "e": edge, "c": const}
    return parse_body(text)(*(groups[n[0]][int(n[1:])] for n in body_inputs(text)))


def product_of(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """Return operand, weight and bias of a product in a body, and whether the weight is ``[K, N]``.

    Returns:
        None where the node is no product of rows with a matrix.
    """
    match aten_name(node):
        case "linear.default":
            return (*unpack(node, "input", "weight", "bias"), False)
        case "mm.default":
            return (*unpack(node, "self", "mat2"), None, True)
        case "addmm.default" if unpack(node, "beta", "alpha") == (1, 1):
            bias, x, weight = unpack(node, "self", "mat1", "mat2")
            return x, weight, bias, True
    return None


EDGES = 1009
"""Edges while the shapes of a body are computed: a prime, which divides the sizes of no weight."""
_PRODUCTS = ("linear", "mm", "addmm", "bmm", "gemm", "qgemm")
_STEP = 12
"""Operations of a product in the time of an elementwise step on one element."""


def measure_body(text: str, operands: dict[str, torch.Tensor]) -> tuple[int, frozenset[int]]:
    """Return the most elements of a value for one edge, and the steps that add up or multiply across edges.

    Args:
        text: the body.
        operands: a tensor of the shape and dtype of each operand, by name (``i0``, ``c0``); only
            their sizes are read, and of all but constants not the first.

    Returns:
        The elements of the widest value, operands included, and the positions in the body's graph of the
        nodes with a value that edges share.
    """
    graph_module = parse_body(text)
    widths = [1]
    shared: dict[fx.Node, int] = {}

    class Measure(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            results = result if isinstance(result, tuple) else (result,)
            tensors = [t for t in results if isinstance(t, torch.Tensor)]
            of_edges = [t for t in tensors if t.dim() and t.shape[0] and t.shape[0] % EDGES == 0]
            widths.extend(t.numel() // EDGES for t in of_edges if n.op != "output")
            sees_edges = any(arg in edge_values or arg in shared for arg in n.all_input_nodes)
            if n.op == "call_function" and sees_edges and tensors:
                mixes = len(of_edges) < len(tensors) or any(arg in shared for arg in n.all_input_nodes)
                shared.update({n: position[n]} if mixes else {})
            if n not in shared and (of_edges or sees_edges):
                edge_values.add(n)
            return result

    position = {node: number for number, node in enumerate(graph_module.graph.nodes)}
    edge_values: set[fx.Node] = set()
    Measure(graph_module).run(*(stand_in(name, operands[name]) for name in body_inputs(text)))
    return max(widths), frozenset(shared.values())


def body_work(text: str, operands: dict[str, torch.Tensor]) -> float:
    """Return the operations of a body for one edge: products, and some for each element of other steps.

    Args: as of ``measure_body``.
    """
    tensors = body_shapes(text, operands)
    return sum(step_work(node, tensors) for node in tensors)


def step_work(node: fx.Node, tensors: Mapping[fx.Node, torch.Tensor]) -> float:
    """Return the operations of one step of a body for one edge, as ``body_work`` counts them.

    Args:
        node: the step; an input or a view has none.
        tensors: the values of the body's nodes, as ``tensors_of`` returns them.
    """
    if node.op != "call_function" or node not in tensors or is_view(node):
        return 0.0
    result, read = tensors[node], [tensors[arg] for arg in node.all_input_nodes if arg in tensors]
    if op_name(node) in _PRODUCTS:
        x = read[1] if op_name(node) == "addmm" else read[0]
        return 2 * result.numel() * x.shape[-1] / EDGES
    return _STEP * max(value.numel() for value in (result, *read)) / EDGES


def body_shapes(text: str, operands: Mapping[str, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """Return tensors without memory of the shapes and dtypes of a body's values, by node of ``parse_body``.

    Args: as of ``measure_body``.
    """
    inputs = [stand_in(name, operands[name]) for name in body_inputs(text)]
    return tensors_of(parse_body(text), inputs)


def tensors_of(module: fx.GraphModule, inputs: Iterable[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """Run the graph of a body; return the tensor that each of its nodes computes."""
    found: dict[fx.Node, torch.Tensor] = {}

    class Record(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                found[n] = result
            return result

    Record(module).run(*inputs)
    return found


def stand_in(name: str, operand: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor without memory for an operand of a body: of ``EDGES`` rows where it is no constant.

    Args:
        name: name of the operand in the body.
        operand: tensor with the sizes of the operand.
        dtype: dtype of the result; None: that of the operand.
    """
    shape = [int(size) for size in operand.shape[0 if name[0] == "c" else 1 :]]
    sizes = shape if name[0] == "c" else [EDGES, *shape]
    return torch.empty(sizes, dtype=dtype or operand.dtype, device="meta")


def widest_value(text: str, operands: dict[str, torch.Tensor]) -> int:
    """Return the most elements that a value of a body has for one edge; arguments as of ``measure_body``."""
    return measure_body(text, operands)[0]
