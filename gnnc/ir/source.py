"""Origins of the values of placeholders."""

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal[
    "parameter", "buffer", "constant", "input", "size", "structure", "features", "tangent", "saved", "seed"
]


WANTS_GRADIENT = "wants_gradient"
"""Key of ``node.meta``: whether the program computes the gradient of a placeholder."""


WRITTEN = "written"
"""Key of ``node.meta``: whether a placeholder is a buffer that a call writes after its forward graph."""


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a placeholder, kept in ``node.meta["source"]``.

    Attributes:
        kind: ``parameter`` and ``buffer`` are read from the live model at each call,
            ``constant`` from ``node.meta["value"]``, ``input`` from the call's arguments,
            ``size`` is a plain int taken from an input's shape, ``structure`` is an output of
            the structure graph, ``features`` one of the features graph, ``tangent`` is the gradient of an
            output of the forward graph, ``saved`` is a value of the forward graph that it keeps for the
            backward graph, ``seed`` is an int64 that each call draws from torch's default generator.
        name: the parameter's qualified name, the argument's path, the structure output, the number of the
            features output or of the output that a tangent belongs to, the node that is saved, or what the
            seed is for.
    """

    kind: Kind
    name: str


def source_of(node: torch.fx.Node) -> Source | None:
    """Return the source of a placeholder, or None for any other node."""
    return node.meta.get("source") if node.op == "placeholder" else None


def is_weight(node: torch.fx.Node) -> bool:
    """Return whether ``node`` is a parameter or buffer of the model."""
    source = source_of(node)
    return source is not None and source.kind in ("parameter", "buffer")


def wants_gradient(node: torch.fx.Node) -> bool:
    """Return whether ``node`` is a placeholder whose gradient the program computes."""
    return node.op == "placeholder" and bool(node.meta.get(WANTS_GRADIENT))


def tangent_number(node: torch.fx.Node) -> int | None:
    """Return the number of the output whose gradient ``node`` is, or None for any other node."""
    source = source_of(node)
    return int(source.name) if source is not None and source.kind == "tangent" else None


def is_structure(node: torch.fx.Node) -> bool:
    """Return whether ``node`` is an output of the structure graph."""
    source = source_of(node)
    return source is not None and source.kind == "structure"
