"""Snapshot of a model: detects later changes of its modules, hooks, constants, code and shared weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gnnc.capture.live_views import SeenViews
from gnnc.capture.object_graph import NO_CONSTANTS, ObjectGraph
from gnnc.torch_private import is_autocast_enabled

__all__ = ["NO_CONSTANTS", "ModelSnapshot", "autocast_mode"]

_WEIGHTS = ("_parameters", "_buffers")
_NO_AUTOCAST = (None, None)


class ModelSnapshot:
    """Snapshot of a model's modules: the identities of all objects that their code can read.

    Parameters and buffers count only by which of them are the same tensor, for which a trace has one input:
    their values are read at each call.

    Attributes:
        modes: whether each module is in train mode. Not a change: calls in another mode have programs of
            their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._sharing = _sharing(self._modules.values())
        self._graph = ObjectGraph(self._modules)
        self._look(self._graph)

    def _look(self, graph: ObjectGraph) -> None:
        """Store what the views of a graph, which is equal to that of the snapshot, show now."""
        self.modes = tuple([module.training for module in self._modules.values()])
        self._seen = SeenViews(graph.views)

    def has_changed(self) -> bool:
        """Return whether layers, hooks, values of constants, code, or the sharing of weights have changed."""
        return not self._seen.are_now() and self.change() is not None

    def change(self) -> str | None:
        """Return what has changed, by its path; None: nothing that matters."""
        graph = ObjectGraph(self._modules)
        place = self._graph.difference(graph)
        if place is not None:
            return place[0]
        if _sharing(self._modules.values()) != self._sharing:
            return "which weights are one tensor"
        self._graph = graph
        self._look(graph)
        return None

    def change_within(self) -> str | None:
        """Return the path of the first change if an object holds it that is no module; else None."""
        place = None if self._seen.are_now() else self._graph.difference(ObjectGraph(self._modules))
        return None if place is None or place[1] else place[0]


def _sharing(modules: Iterable[nn.Module]) -> list[tuple[int, torch.layout] | None]:
    """Return, for each parameter and buffer, the first entry that is the same tensor, and its layout."""
    tables = [vars(module)[name] for module in modules for name in _WEIGHTS]
    weights = [weight for table in tables for weight in table.values()]
    first: dict[int, int] = {}
    return [
        None if weight is None else (first.setdefault(id(weight), place), weight.layout)
        for place, weight in enumerate(weights)
    ]


def autocast_mode() -> tuple[Any, ...]:
    """Return the dtype that autocast uses for a call now, by device; None where autocast is off."""
    if not is_autocast_enabled():
        return _NO_AUTOCAST
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    )
