"""Recorder of the tensors that calls make, to find rows of features for every edge."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class EdgeMatrices(TorchDispatchMode):
    """Mode that collects the op and the shape of every result with a row for each edge, wider than ``width``.

    Attributes:
        found: what was found, in order; what an op of ``gnnc`` makes inside is not seen.
    """

    def __init__(self, edges: int, width: int) -> None:
        super().__init__()
        self.edges, self.width = edges, width
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape[:1] == (self.edges,):
                if tensor.numel() > self.edges * self.width:
                    self.found.append((str(func), tuple(tensor.shape)))
        return result


def edge_matrices(function: Any, edges: int, width: int = 1) -> list[tuple[str, tuple[int, ...]]]:
    """Return what ``function()`` makes of more than ``width`` values for each of ``edges`` edges."""
    with EdgeMatrices(edges, width) as mode:
        function()
    return mode.found
