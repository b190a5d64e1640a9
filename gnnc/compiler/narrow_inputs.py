"""Capture of calls with inputs in fewer bits, which the graph converts: int32 ids, features in 8 bits."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.capture.arguments import Leaf, flatten_call
from gnnc.capture.export import Captured, capture
from gnnc.capture.guards import InputGuard
from gnnc.capture.pyg_data import to_dicts
from gnnc.capture.value_guards import Number
from gnnc.ir.graph import placeholders
from gnnc.ir.qtype import FP8_DTYPES
from gnnc.ir.source import Source, source_of
from gnnc.precision import FP8
from gnnc.quantized_tensor import PARTS, ROWS, QuantizedTensor
from gnnc.torch_private import pytree

_WIDE = {torch.int32: torch.int64, torch.float8_e4m3fn: torch.float32}
"""Dtypes of inputs that a graph converts, and the dtypes that it converts them to."""


def capture_call(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[Captured] = (),
    guesses: Mapping[str, Number] | None = None,
    *,
    with_gradients: bool = False,
) -> Captured:
    """Trace a call, see ``capture``; node ids may be int32, and features int8 or FP8.

    The conversions are nodes of the graph, whose placeholders are the caller's own tensors: the structure
    cache knows these, and passes may let an op read them as they are.
    """
    given = to_dicts((tuple(args), dict(kwargs)))
    wide_args, wide_kwargs = pytree.tree_map(_widen, given)
    captured = capture(model, wide_args, wide_kwargs, known, guesses, with_gradients=with_gradients)
    if not any(map(_is_narrow, pytree.tree_leaves(given))):
        return captured
    return _accept_narrow(captured, model, *given)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, QuantizedTensor) or isinstance(value, Tensor) and value.dtype in _WIDE


def _widen(value: Any) -> Any:
    if isinstance(value, QuantizedTensor):
        return value.dequantize()
    return value.to(_WIDE[value.dtype]) if _is_narrow(value) else value


def _accept_narrow(
    captured: Captured, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Captured:
    """Let a graph take the inputs of a call as they are, and convert them."""
    call = flatten_call(model, args, kwargs, captured.reads)
    tensors = dict(zip(call.names, call.tensors, strict=True))
    wide = iter(captured.guards.inputs)
    inputs = {source_of(node): node for node in placeholders(captured.graph_module)}
    guards: list[InputGuard] = []
    for leaf in call.leaves:
        if leaf.kind == "quantized":
            guard = next(wide)
            guards += _quantized_guards(leaf, guard)
            _take_quantized(captured.graph_module, inputs[Source("input", guard.name)], leaf)
            continue
        for name in leaf.tensor_names:
            guard, dtype = next(wide), tensors[name].dtype
            guards.append(dataclasses.replace(guard, dtype=dtype) if dtype in _WIDE else guard)
            if dtype in _WIDE:
                _convert(captured.graph_module, inputs[Source("input", name)], dtype)
    captured.graph_module.recompile()
    taken = dataclasses.replace(captured.guards, inputs=tuple(guards))
    return dataclasses.replace(captured, call=call, guards=taken)


def _quantized_guards(leaf: Leaf, guard: InputGuard) -> list[InputGuard]:
    values, scale = leaf.tensor_names
    return [
        dataclasses.replace(guard, name=values, dtype=torch.int8),
        dataclasses.replace(guard, name=scale, shape=guard.shape[:1], unrolled=()),
    ]


def _take_quantized(graph_module: GraphModule, node: Node, leaf: Leaf) -> None:
    """Replace an FP32 input by quantized rows, and the op that dequantizes them."""
    wide, graph = node.meta["val"], graph_module.graph
    with wide.fake_mode:
        made = torch.empty_like(wide, dtype=torch.int8), wide.new_empty(wide.shape[:1])
    parts: list[Node] = []
    for part, name, value in zip(PARTS, leaf.tensor_names, made, strict=True):
        with graph.inserting_before(node):
            parts.append(graph.placeholder(f"{node.name}_{part}"))
        parts[-1].meta = {**node.meta, "val": value, "source": Source("input", name)}
    parts[0].meta["qtype"] = ROWS
    with graph.inserting_before(_first_call(graph_module)):
        float_rows = graph.call_function(torch.ops.gnnc.dequantize.default, (*parts, "row"))
    float_rows.meta = {"val": wide, "layer": ""}
    node.replace_all_uses_with(float_rows)
    graph.erase_node(node)


def _convert(graph_module: GraphModule, node: Node, dtype: torch.dtype) -> None:
    wide = node.meta["val"]
    with graph_module.graph.inserting_before(_first_call(graph_module)):
        cast = graph_module.graph.call_function(
            torch.ops.aten._to_copy.default, (node,), {"dtype": _WIDE[dtype]}
        )
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta = {"val": wide, "layer": ""}
    with wide.fake_mode:
        node.meta["val"] = wide.to(dtype)
    if dtype in FP8_DTYPES:
        node.meta["qtype"] = FP8.activation_qtype()


def _first_call(graph_module: GraphModule) -> Node:
    return next(node for node in graph_module.graph.nodes if node.op != "placeholder")
