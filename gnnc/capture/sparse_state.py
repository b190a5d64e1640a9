"""Sparse matrices that a model holds, in buffers, parameters and attributes: hidden arguments of its calls.

``torch.export`` takes no sparse tensor, neither as a weight nor as a constant. The component tensors of such
a matrix are therefore flat inputs of the graph, behind those of the arguments, read anew from the model at
each call: a matrix that was replaced or edited is seen, and one with another number of entries needs no other
program.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnnc.capture.model_snapshot import NO_CONSTANTS
from gnnc.capture.pyg_data import from_dicts, to_dicts
from gnnc.capture.sparse_components import components, is_sparse
from gnnc.torch_private import pytree

_TABLES = ("_buffers", "_parameters")
_PLAIN = (bool, int, float, str, types.NoneType, types.FunctionType, torch.Tensor)
"""Types that hold nothing; most attributes are of these."""


@dataclass(frozen=True)
class Holding:
    """An attribute, buffer or parameter of a module with sparse matrices: one, or several in a container.

    Attributes:
        module: the module that holds it.
        table: the table of the module: its attributes, buffers or parameters.
        name: its name there.
        path: path of the attribute in the model, such as ``self.conv.adj``.
    """

    module: nn.Module
    table: dict[str, Any]
    name: str
    path: str

    def matrices(self) -> list[tuple[str, torch.Tensor]]:
        """Return the sparse matrices that it holds now, with their paths."""
        value = self.table.get(self.name)
        if is_sparse(value):
            return [(self.path, value)]
        return [] if isinstance(value, _PLAIN) else _sparse_leaves(self.path, value)


def sparse_holdings(model: nn.Module) -> list[Holding]:
    """Return all holdings of sparse matrices in the modules of a model."""
    found = []
    for path, module in model.named_modules(prefix="self"):
        attributes = vars(module)
        for table in (*(attributes[name] for name in _TABLES), attributes):
            names = [name for name in table if table is not attributes or name not in NO_CONSTANTS]
            holdings = (Holding(module, table, name, f"{path}.{name}") for name in names)
            found += [holding for holding in holdings if holding.matrices()]
    return found


def held_matrices(holdings: Sequence[Holding]) -> list[tuple[str, torch.Tensor]]:
    """Return the sparse matrices of holdings with their paths, in order."""
    return [matrix for holding in holdings for matrix in holding.matrices()]


def describe_held(holdings: Sequence[Holding], parts: list[Any], tensors: list[torch.Tensor]) -> None:
    """Describe the matrices that a model holds, as ``describe_arguments`` does for arguments."""
    for path, matrix in held_matrices(holdings):
        parts.append((path, matrix.layout))
        for tensor in components(matrix).values():
            parts += (tensor.device, tensor.ndim, tensor.dtype)
            tensors.append(tensor)


class Hidden:
    """The sparse matrices of a model that is traced: hidden, with stand-ins in their places during forward.

    The model is a private copy, which stays without them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values = [(h, h.table[h.name]) for h in sparse_holdings(model)]
        for holding, _ in self._values:
            del holding.table[holding.name]
            vars(holding.module)[holding.name] = None

    @contextlib.contextmanager
    def shown(self, make: Callable[[], Any]) -> Iterator[None]:
        """Set each attribute to its value with ``make()`` in the place of each matrix, in order."""
        for holding, value in self._values:
            vars(holding.module)[holding.name] = _filled(value, make)
        try:
            yield
        finally:  # torch.export refuses attributes that a run of forward has set
            for holding, _ in self._values:
                vars(holding.module)[holding.name] = None


def _filled(value: Any, make: Callable[[], Any]) -> Any:
    if is_sparse(value):
        return make()
    leaves, spec = pytree.tree_flatten(to_dicts(value))
    return from_dicts(pytree.tree_unflatten([make() if is_sparse(leaf) else leaf for leaf in leaves], spec))


def _sparse_leaves(path: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    leaves = pytree.tree_flatten_with_path(to_dicts(value))[0]
    return [(path + pytree.keystr(keys), leaf) for keys, leaf in leaves if is_sparse(leaf)]
