"""Selections and connections of PyG's poolings, as arguments and results whose tensors pytree finds."""

import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from gnnc.torch_private import pytree

_CLASSES = (
    ("torch_geometric.nn.pool.select.base", "SelectOutput"),
    ("torch_geometric.nn.pool.connect.base", "ConnectOutput"),
)


def register_pool_outputs() -> None:
    """Let pytree look into the outputs of poolings, once PyG has been imported."""
    for module, name in _CLASSES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                _parts,
                lambda parts, kind: _made(kind, parts),
                serialized_type_name=f"{module}.{name}",
                flatten_with_keys_fn=_named_parts,
            )


def _parts(output: Any) -> tuple[list[Any], Any]:
    return [getattr(output, field.name) for field in fields(output)], type(output)


def _named_parts(output: Any) -> tuple[list[tuple[Any, Any]], Any]:
    names = [pytree.GetAttrKey(field.name) for field in fields(output)]
    return list(zip(names, _parts(output)[0], strict=True)), type(output)


def _made(kind: Any, parts: Iterable[Any]) -> Any:
    """Return the object of these parts, which are no tensors while a structure is mapped."""
    output = object.__new__(kind)
    for field, part in zip(fields(kind), parts, strict=True):
        setattr(output, field.name, part)
    return output
