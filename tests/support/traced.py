"""Captured graphs in tests: run them on the live model, and take them through the first passes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from gnnc.capture.arguments import flatten_call
from gnnc.capture.export import Captured, capture
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.source import Source
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise


class Formula(nn.Module):
    """A model that is ``function(x, sources, destinations)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        src, dst = edge_index
        return self.function(x, src, dst)


@dataclass
class Traced:
    """A model's graph after each of the first stages."""

    model: nn.Module
    captured: Captured
    normalized: GraphModule
    raised: GraphModule
    context: Context

    def run(self, gm: GraphModule, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``gm`` as the model would be called; the flat user outputs."""
        return run(gm, self.model, args, kwargs)


def trace(model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    captured = capture(model, args, kwargs)
    context = Context()
    normalized = run_pass(Normalize(), captured.graph_module, context)
    raised = run_pass(Raise(), normalized, context)
    return Traced(model, captured, normalized, raised, context)


def run(gm: GraphModule, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    with torch.no_grad():
        return list(gm(*operands(gm, model, args, kwargs)))


def operands(gm: GraphModule, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of the placeholders of ``gm``: arguments, parameters, buffers and constants."""
    tensors = iter(flatten_call(model, args, kwargs).tensors)
    sources: list[tuple[Source, Any]] = [
        (node.meta["source"], node) for node in gm.graph.nodes if node.op == "placeholder"
    ]
    return [_value(source, node, model, tensors) for source, node in sources]


def eager(model: nn.Module, *args: Any, **kwargs: Any) -> list[Any]:
    """Return the flat outputs of the model itself."""
    with torch.no_grad():
        return pytree.tree_leaves(model(*args, **kwargs))


def relative_error(got: Any, expected: Any) -> float:
    """Return the relative L2 error; infinite where shape or dtype differ."""
    if not isinstance(expected, torch.Tensor):
        return 0.0 if got == expected else float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def targets(gm: GraphModule) -> list[str]:
    """Name of every call, without namespace and overload."""
    calls = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in calls if "." in name]


def count(gm: GraphModule, name: str) -> int:
    return targets(gm).count(name)


def edge_widths(gm: GraphModule) -> dict[str, int]:
    """Columns of every floating value that has a row for each edge, fused submodules included."""
    widths: dict[str, int] = {}
    edges = {symbol for node in gm.graph.nodes if (symbol := _edge_symbol(node)) is not None}
    for module in (gm, *(inner for _, inner in gm.named_children() if isinstance(inner, GraphModule))):
        for node in module.graph.nodes:
            value = node.meta.get("val")
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, torch.Tensor) and item.is_floating_point() and item.dim():
                    if size_expr(item.shape[0]).free_symbols & edges:
                        widths[node.name] = math.prod(int(size) for size in item.shape[1:])
    return widths


def _edge_symbol(node: Any) -> Any:
    """The symbol of the length of the ``col`` that an op along edges reads."""
    op = op_of(node)
    if op is None or op.name not in ("spmm", "sddmm", "message", "edge_map"):
        return None
    (symbol,) = size_expr(node.args[1].meta["val"].shape[0]).free_symbols or {None}
    return symbol


def _value(source: Source, node: Any, model: nn.Module, tensors: Any) -> Any:
    if source.kind == "input":
        return next(tensors)
    if source.kind == "parameter":
        return model.get_parameter(source.name)
    return model.get_buffer(source.name) if source.kind == "buffer" else node.meta["value"]
