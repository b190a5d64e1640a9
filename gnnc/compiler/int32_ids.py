"""Capture of calls whose node ids are int32: the graph converts them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.capture.export import Captured, capture
from gnnc.capture.value_guards import Number
from gnnc.ir.graph import placeholders
from gnnc.ir.source import Source, source_of
from gnnc.torch_private import pytree


def capture_call(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[Captured] = (),
    guesses: Mapping[str, Number] | None = None,
    *,
    with_gradients: bool = False,
) -> Captured:
    """Trace a call, see ``capture``; node ids may be int32."""
    wide_args, wide_kwargs = pytree.tree_map(_widen, (tuple(args), dict(kwargs)))
    captured = capture(model, wide_args, wide_kwargs, known, guesses, with_gradients=with_gradients)
    narrow = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not any(t.dtype == torch.int32 for t in narrow):
        return captured
    return _accept_int32(captured, model, args, kwargs)


def _widen(value: Any) -> Any:
    is_int32 = isinstance(value, Tensor) and value.dtype == torch.int32
    return value.long() if is_int32 else value


def _accept_int32(
    captured: Captured, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Captured:
    """Convert int32 inputs inside the graph, where the structure cache still knows the caller's tensor."""
    from gnnc.capture.arguments import flatten_call

    call = flatten_call(model, args, kwargs, captured.reads)
    guards = list(captured.guards.inputs)
    inputs = {source_of(node): node for node in placeholders(captured.graph_module)}
    for index, (name, tensor) in enumerate(zip(call.names, call.tensors, strict=True)):
        if tensor.dtype == torch.int32:
            guards[index] = dataclasses.replace(guards[index], dtype=torch.int32)
            _convert(captured.graph_module, inputs[Source("input", name)])
    captured.graph_module.recompile()
    return dataclasses.replace(
        captured, call=call, guards=dataclasses.replace(captured.guards, inputs=tuple(guards))
    )


def _convert(graph_module: GraphModule, node: Node) -> None:
    wide = node.meta["val"]
    later = next(n for n in graph_module.graph.nodes if n.op != "placeholder")
    with graph_module.graph.inserting_before(later):
        cast = graph_module.graph.call_function(
            torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int64}
        )
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta = {"val": wide, "layer": ""}
    with wide.fake_mode:
        node.meta["val"] = wide.to(torch.int32)
