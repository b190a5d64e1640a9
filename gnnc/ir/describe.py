"""Facts about the nodes of a graph that the printer, the reports and the drawings share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gnnc.ir.aten import FREE, RENAMINGS
from gnnc.ir.nodes import (
    argument,
    arguments,
    first_operand,
    is_gnnc,
    is_result,
    op_name,
    outputs_of,
    qtype_of,
    result_index,
)
from gnnc.ir.op import op_of
from gnnc.ir.parts import BACKWARD_LAYER
from gnnc.ir.qtype import QType
from gnnc.ir.source import is_weight
from gnnc.torch_private import OpOverload

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_PRECISION = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_BITS = {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16}


@dataclass(frozen=True, slots=True)
class Block:
    """A fused submodule that a node of an inlined graph came from.

    Attributes:
        name: the submodule's name in the graph module.
        kind: ``gemm``, ``spmm``, ``attention``, ``map`` or ``graph``.
        kernel: the kernel that runs it, once lowered.
        node: the name of the node that calls it.
        format: the structure formats that may serve the kernel, as ``format_text`` gives them.
    """

    name: str
    kind: str
    kernel: str | None
    node: str
    format: str = ""


def reads_edges(node: Node) -> bool:
    """Return whether a node, or one of the ops fused in it, computes along edges or segments of a CSR."""
    if node.op == "call_module":
        return node.meta.get("kind") in ("spmm", "attention", "bodies")
    op = op_of(node)
    return op is not None and op.kind in ("aggregate", "edge")


def format_text(node: Node) -> str:
    """Return the names of the structure formats that may serve a node, such as ``runs|window``, or ""."""
    return "|".join(map(str, node.meta.get("format", ())))


def changes_precision(node: Node) -> bool:
    """Return whether a node calls an op that changes how a value is held, and computes nothing else."""
    op = op_of(node)
    return op is not None and op.kind == "precision"


def returns_many(node: Node) -> bool:
    """Return whether a node's value is a tuple or a list."""
    return isinstance(node.meta.get("val"), tuple | list)


def dtype_text(dtype: torch.dtype) -> str:
    """Return ``f32`` for ``torch.float32``, and so on."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def element_text(qtype: QType) -> str:
    """Return ``i8`` for ``int8``, ``u4`` for ``uint4``."""
    return qtype.element.replace("int", "i").replace("ui", "u")


def producer(node: Node) -> Node:
    """Return the node that made a value, past views of it."""
    while op_name(node) in RENAMINGS:
        node = first_operand(node)
    return node


def precision_of(node: Node) -> str | None:
    """Return the precision in which a value is held, or None where it is not a feature tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    qtype = qtype_of(node)
    return _PRECISION.get(value.dtype) if qtype is None else qtype.element


def bits_of(precision: str) -> int:
    """Return the bits of one value: 8 for ``int8``, 16 for ``bf16``."""
    return _BITS.get(precision) or QType.parse(f"{precision}/tensor").bits


def operands(node: Node) -> list[Node]:
    """Return the operands of a node that carry features, edge values or weights."""
    if not isinstance(node.target, OpOverload):
        return list(node.all_input_nodes)
    op, named = op_of(node), arguments(node)
    names = named if op is None else op.features
    found: list[Node] = []
    for value in (named[name] for name in names):
        items = value if isinstance(value, list | tuple) else (value,)
        found += [item for item in items if isinstance(item, Node)]
    return found


def precision_in(node: Node) -> str | None:
    """Return the lowest precision in which the kernel of a node of an inlined graph reads an operand."""
    return lowest_precision(loaded_operands(node))


def lowest_precision(values: Iterable[Node]) -> str | None:
    """Return the lowest precision in which some values are held, or None where none is a feature tensor."""
    found = [p for p in map(precision_of, values) if p is not None]
    return min(found, key=bits_of) if found else None


def loaded_operands(node: Node) -> list[Node]:
    """Return the operands of a node as its kernel loads them: quantized, where it dequantizes them itself."""
    op = op_of(node)
    if op is None or node.meta.get("block") is None:
        return operands(node)
    low = [value for value in map(arguments(node).get, op.low_operands) if isinstance(value, Node)]
    return [_loaded(operand) if operand in low else operand for operand in operands(node)]


def _loaded(operand: Node) -> Node:
    """Return the quantized values that an operand is made of within its fused kernel, else the operand."""
    made = producer(operand)
    is_own = made.meta.get("block") is not None and made.meta["block"] == operand.meta["block"]
    return first_operand(made) if is_own and op_name(made) == "dequantize" else operand


def granularity_of(node: Node) -> str:
    """Return which elements share a scale: ``row``, ``channel``, ``row_pow2``, ``row × channel``."""
    if not is_gnnc(node):
        return ""
    named = arguments(node)
    granularity = named.get("granularity")
    if "qtype" in named:
        granularity = QType.parse(named["qtype"]).granularity
    if granularity is None:
        found = [_granularity_of_value(operand) for operand in loaded_operands(node)]
        return " × ".join(text for text in found if text)
    return "channel" if granularity in ("row", "column") and _of_weight(node, op_name(node)) else granularity


def _of_weight(node: Node, name: str) -> bool:
    """Return whether a precision op's scale is one of a weight, whose rows are output channels."""
    operand = argument(node, "scale" if name == "dequantize" else "x", None)
    if name == "dequantize" and isinstance(operand, Node) and op_name(operand) == "scale":
        operand = argument(operand, "x")
    return isinstance(operand, Node) and is_weight(producer(operand))


def _granularity_of_value(node: Node) -> str:
    qtype = qtype_of(node)
    if qtype is None:
        return ""
    made = producer(node)
    return granularity_of(made) if is_gnnc(made) else qtype.granularity


def is_free(node: Node) -> bool:
    """Return whether a node only picks, sizes or views a value."""
    return op_name(node) in FREE or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def is_quantized(node: Node) -> bool:
    """Return whether the kernel of an op reads quantized values."""
    return any(qtype_of(operand) is not None for operand in loaded_operands(node))


def layer_of(node: Node) -> str:
    """Return the module path of a node, empty at the root."""
    return str(node.meta.get("layer") or "")


def shown_layer(layer: str) -> str:
    """Return a module path as people read it: ``<model>`` for the root, where the path is empty."""
    return f"<model> {layer}".rstrip() if layer in ("", BACKWARD_LAYER) else layer


def assigned_name(node: Node) -> str:
    """Return the name that a primitive of an inlined graph had when precisions were assigned."""
    return str(node.meta.get("assigned", node.meta["origin"]))


def inline(gm: GraphModule) -> Graph:
    """Return a copy of the graph with every submodule's nodes in place of its call.

    Each node's ``meta["origin"]`` names the node it was copied from, and ``meta["block"]`` is the
    ``Block`` it belongs to, or None at the top level. The submodules of ``gm`` are not changed.
    """
    graph = Graph()
    outputs = _inline_into(graph, gm, None, None, "")
    graph.output(outputs)
    return graph


def _inline_into(
    graph: Graph, gm: GraphModule, values: list[Any] | None, block: Block | None, prefix: str
) -> Any:
    mapped: dict[Node, Any] = {}
    given = iter(values or ())

    def lookup(argument: Any) -> Any:
        return map_arg(argument, lambda node: mapped[node])

    for node in gm.graph.nodes:
        if node.op == "output":
            return _lookup_structure(outputs_of(gm.graph), mapped)
        if node.op == "placeholder" and values is not None:
            mapped[node] = next(given)
        elif isinstance(child := _submodule(gm, node), GraphModule):
            mapped[node] = _inline_into(
                graph, child, list(lookup(node.args)), _block(node), f"{prefix}{node.target}."
            )
        elif is_result(node) and isinstance(whole := lookup(first_operand(node)), tuple):
            mapped[node] = whole[result_index(node)]
        else:
            mapped[node] = _copy(graph, node, lookup, block, prefix)
    return ()


def _copy(graph: Graph, node: Node, lookup: Any, block: Block | None, prefix: str) -> Node:
    target = f"{prefix}{node.target}" if node.op in ("get_attr", "call_module") else node.target
    copied = graph.create_node(node.op, target, lookup(node.args), lookup(node.kwargs), name=node.name)
    copied.meta = {**node.meta, "origin": node.name, "block": block}
    return copied


def _submodule(gm: GraphModule, node: Node) -> Any:
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


def _block(node: Node) -> Block:
    kind, kernel = str(node.meta.get("kind", "graph")), node.meta.get("kernel")
    return Block(str(node.target), kind, kernel, node.name, format_text(node))


def _lookup_structure(argument: Any, mapped: dict[Node, Any]) -> Any:
    """Resolve a graph's output, whose values may themselves be tuples of an inlined call."""
    if isinstance(argument, Node):
        return mapped[argument]
    if isinstance(argument, tuple | list):
        return tuple(_lookup_structure(item, mapped) for item in argument)
    return argument
