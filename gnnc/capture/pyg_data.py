"""PyG graph objects as dicts, so that their tensors are arguments like others."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gnnc.capture.pool_outputs import register_pool_outputs

MARK = ""
"""Key of the entry that says what a dict was; no attribute has this name."""
NUM_GRAPHS = "num_graphs"
"""Key of the entry with the number of graphs of a batch, an int like any other argument."""


@dataclass(frozen=True)
class Container:
    """Record of a PyG graph object that was replaced by a dict.

    Attributes:
        kind: its class; of a batch, the class that it is a batch of.
        is_batch: whether it is a batch of graphs.
        is_hetero: whether its fields are those of types of nodes and edges.
    """

    kind: type
    is_batch: bool
    is_hetero: bool


def to_dicts(value: Any) -> Any:
    """Return ``value`` with every PyG graph object in it replaced by a dict of its contents."""
    data = sys.modules.get("torch_geometric.data")
    if data is None:
        return value
    register_pool_outputs()
    return _open(value, data)


def from_dicts(value: Any, watch: Callable[[Any], None] | None = None) -> Any:
    """Return ``value`` with its PyG graph objects restored; the inverse of ``to_dicts``.

    ``watch`` is called with each of them.
    """
    if isinstance(value, dict):
        inner = {key: from_dicts(item, watch) for key, item in value.items() if key != MARK}
        mark = value.get(MARK)
        if not isinstance(mark, Container):
            return inner
        graph = _close(mark, inner)
        if watch is not None:
            watch(graph)
        return graph
    if type(value) in (list, tuple):
        return type(value)(from_dicts(item, watch) for item in value)
    return value


def _open(value: Any, data: Any) -> Any:
    if isinstance(value, data.Batch):
        mark = Container(type(value).__bases__[-1], True, isinstance(value, data.HeteroData))
        return {MARK: mark, NUM_GRAPHS: value.num_graphs, **value.to_dict()}
    if isinstance(value, data.Data | data.HeteroData):
        mark = Container(type(value), False, isinstance(value, data.HeteroData))
        return {MARK: mark, **value.to_dict()}
    if type(value) is dict:
        return {key: _open(item, data) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_open(item, data) for item in value)
    return value


def _close(mark: Container, content: dict[Any, Any]) -> Any:
    if not mark.is_batch:
        return mark.kind.from_dict(content)  # pyright: ignore[reportAttributeAccessIssue]
    from torch_geometric.data import Batch

    num_graphs = content.pop(NUM_GRAPHS)
    filled = type(Batch(_base_cls=mark.kind)).from_dict(content)
    filled._num_graphs = num_graphs
    return filled
