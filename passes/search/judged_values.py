"""Values of a program whose errors count for ``precision="auto"``: its outputs, and gradients in training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import DIFFERENTIABLE, GRADIENTS


@dataclass(frozen=True, slots=True)
class JudgedValue:
    """Tensors that have one relative error together.

    Attributes:
        name: text for people.
        positions: their positions among the outputs of the graph.
    """

    name: str
    positions: tuple[int, ...]


def judged_values(gm: fx.GraphModule) -> list[JudgedValue]:
    """Return what the errors of a graph are taken of.

    In inference that is each floating output. A joint graph is judged by the outputs that gradients go
    through, by the gradient of all weights as one vector, and by the gradient of each argument.
    """
    outputs = outputs_of(gm.graph)
    if GRADIENTS not in gm.meta:
        return [JudgedValue(f"output {i}", (i,)) for i, node in enumerate(outputs) if _is_floating(node)]
    judged = [JudgedValue(f"output {i}", (i,)) for i in gm.meta[DIFFERENTIABLE]]
    first = len(outputs) - len(gm.meta[GRADIENTS])
    numbered = list(enumerate(gm.meta[GRADIENTS], first))
    weights = tuple(i for i, source in numbered if source.kind != "input")
    if weights:
        judged.append(JudgedValue("the gradient of all weights together", weights))
    return judged + [
        JudgedValue(f"the gradient of {source.name}", (i,))
        for i, source in numbered
        if source.kind == "input"
    ]


def _is_floating(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.is_floating_point()


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return ``|got - want| / |want|`` (L2, in float64) of tensors as one vector.

    Args:
        got: floating tensors.
        want: the expected tensors, of the same shapes.

    Returns:
        0 where both are equal (also zero, also empty), infinite where only ``want`` is zero or
        ``got`` is not finite.
    """
    distance = _norm([a.double() - b.double() for a, b in zip(got, want, strict=True)])
    norm = _norm([b.double() for b in want])
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and distance == distance else float("inf")


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm()) if tensors else 0.0
