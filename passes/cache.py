"""Cache: quantize each tensor once, for all its readers.

``quantize`` inserts a quantization for every reader; this pass merges equal scales, shifts,
quantizations, casts and dequantizations, so that ``fuse`` can let the producer write the quantized
values. Stochastically rounded values merge if they have one seed and one stream, so that they are equal.
A reader that needs FP32 still reads the FP32 value: dequantizing for it would round twice.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx import Node

from gnnc.passes.base import Context

_MERGEABLE = {
    "gnnc.scale.default": "scale",
    "gnnc.row_shift.default": "row shift",
    "gnnc.row_scale.default": "row scale",
    "gnnc.quantize.default": "quantization",
    "gnnc.dequantize.default": "dequantization",
    "gnnc.fp16_scale.default": "power of two",
    "aten.mul.Tensor": "scaled gradient",
    "aten._to_copy.default": "cast",
    "aten.t.default": "transpose",
}


@dataclass(frozen=True, slots=True)
class Cache:
    """Merge equal scales, quantizations and casts."""

    name: ClassVar[str] = "cache"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return the graph with every tensor quantized once per scale."""
        for shared, copies in _merge(gm.graph).items():
            kind = _MERGEABLE[str(shared.target)]
            ctx.note(shared, f"one {kind} serves {copies + 1} consumers")
        return gm


def _merge(graph: fx.Graph) -> dict[Node, int]:
    """Replace equal nodes by the first of them; return how many nodes each one replaced."""
    first: dict[Any, Node] = {}
    copies: dict[Node, int] = defaultdict(int)
    for node in list(graph.nodes):
        if str(node.target) not in _MERGEABLE or not _is_of_quantization(node):
            continue
        shared = first.setdefault(_key(node), node)
        if shared is not node:
            node.replace_all_uses_with(shared)
            graph.erase_node(node)
            copies[shared] += 1
    return copies


def _is_of_quantization(node: Node) -> bool:
    """Return whether a product is that of a gradient and its power of two; true of all other nodes."""
    powers = [arg for arg in node.all_input_nodes if str(arg.target) == "gnnc.fp16_scale.default"]
    return str(node.target) != "aten.mul.Tensor" or bool(powers)


def _key(node: Node) -> tuple[Any, ...]:
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value: Any) -> Any:
    """Return a hashable copy of arguments; numbers keep their type, so that 1 and 1.0 differ."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return value if isinstance(value, Node) else (type(value), value)
