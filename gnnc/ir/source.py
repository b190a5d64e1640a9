"""Origins of the values of placeholders."""

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["parameter", "buffer", "constant", "input", "size", "structure"]


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a placeholder, kept in ``node.meta["source"]``.

    Attributes:
        kind: ``parameter`` and ``buffer`` are read from the live model at each call,
            ``constant`` from ``node.meta["value"]``, ``input`` from the call's arguments,
            ``size`` is a plain int taken from an input's shape, ``structure`` is an output of
            the structure graph.
        name: the parameter's qualified name, the argument's path, or the structure output.
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


def is_structure(node: torch.fx.Node) -> bool:
    """Return whether ``node`` is an output of the structure graph."""
    source = source_of(node)
    return source is not None and source.kind == "structure"
