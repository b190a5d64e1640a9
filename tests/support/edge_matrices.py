"""Recorder of the tensors that calls make, to find rows of features for every edge."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class EdgeMatrices(TorchDispatchMode):
    """Mode that collects op and shape of every float result with ``edges`` rows, wider than ``width``.

    Attributes:
        found: ops and shapes of the matrices, in order; matrices inside of an op of ``gnnc`` are not seen.
    """

    def __init__(self, edges: range, width: int) -> None:
        super().__init__()
        self.edges, self.width = edges, width
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.dim():
                continue
            if tensor.shape[0] in self.edges and tensor.numel() > tensor.shape[0] * self.width:
                self.found.append((str(func), tuple(tensor.shape)))
        return result


def edge_matrices(
    function: Callable[[], Any], edges: int | range, width: int = 1
) -> list[tuple[str, tuple[int, ...]]]:
    """Return what ``function()`` makes of more than ``width`` floats for each edge.

    Args:
        function: runs the calls.
        edges: numbers of rows that count as one for each edge.
        width: the most values of an edge that are no features.
    """
    with EdgeMatrices(range(edges, edges + 1) if isinstance(edges, int) else edges, width) as mode:
        function()
    return mode.found
