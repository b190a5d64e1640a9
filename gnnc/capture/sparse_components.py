"""Dense component tensors of torch.sparse matrices, cached on each matrix."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gnnc.tensor_state import state
from gnnc.torch_private import raw_indices, raw_values, storage_uses

_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, ("crow", "col")),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, ("ccol", "row")),
}
_OWN_USES = 3
"""Uses of the memory of a tensor of a matrix: by the matrix, by its alias, by the storage object."""

SPARSE_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


@dataclass(frozen=True, eq=False)
class _Components:
    """Components of a sparse matrix, cached on it.

    Attributes:
        parts: its ``components``.
        seen: the state of the matrix when it was split.
        copies: copies of those of its tensors whose writes no version counter shows.
    """

    parts: dict[str, torch.Tensor]
    seen: tuple[Hashable, ...]
    copies: tuple[torch.Tensor | None, ...]

    def hold(self, matrix: torch.Tensor, sources: Sequence[torch.Tensor], seen: tuple[Hashable, ...]) -> bool:
        """Return whether the matrix has the content that it was split with."""
        return self.seen == seen and not any(self.changed(matrix, sources))

    def changed(self, matrix: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[bool]:
        """Return whether a write that no counter shows may have changed each tensor of the matrix."""
        return [
            _is_shared(matrix, source, held=True) if copy is None else not torch.equal(copy, source)
            for copy, source in zip(self.copies, sources, strict=True)
        ]


_CACHE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def is_sparse(value: Any) -> bool:
    """Return whether ``value`` is a CSR, CSC or COO tensor of torch.sparse."""
    return isinstance(value, torch.Tensor) and value.layout in SPARSE_LAYOUTS


def components(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the dense tensors that represent ``matrix`` [rows, columns, ...] in a captured graph.

    CSR: crow [rows + 1], col [E], values, columns [columns, 0]; CSC: ccol, row, values, rows [rows, 0];
    COO: indices [2, E], values, shape [rows, columns, 0]. The empty tensors carry a size. Values are [E], or
    [E, ...] where the matrix has dense dimensions. Each is the same object for as long as it holds for the
    matrix, so that a cache keyed by the identity of its inputs knows it again.
    """
    cached = _CACHE.get(matrix)
    sources, seen = _sources(matrix)
    if cached is not None and cached.hold(matrix, sources, seen):
        return cached.parts
    held = cached is not None
    copies = tuple(source.clone() if _is_shared(matrix, source, held) else None for source in sources)
    parts = _split(matrix)
    if cached is not None:
        parts = _reused(cached.parts, parts, cached.changed(matrix, sources))
    _CACHE[matrix] = _Components(parts, seen, copies)
    return parts


def forget_components() -> None:
    """Forget the components of every matrix, after writes that no version counter shows."""
    _CACHE.clear()


def _sources(matrix: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[Hashable, ...]]:
    """Return the tensors of a matrix, and the state that shows whether they change."""
    if matrix.layout == torch.sparse_coo:
        sources = raw_indices(matrix), raw_values(matrix)
        return sources, (matrix.is_coalesced(), *map(state, sources))
    pointer, plain, _ = _COMPRESSED[matrix.layout]
    sources = pointer(matrix), plain(matrix), matrix.values()
    return sources, tuple(map(state, sources))


def _is_shared(matrix: torch.Tensor, source: torch.Tensor, held: bool) -> bool:
    """Return whether writes to the memory of a component may leave the matrix's version counter unchanged.

    The tensors from which a matrix was created share its memory, but not its version counters. For COO, the
    reference count of the memory shows whether such a tensor still exists. For CSR and CSC it does not, since
    the matrix refers to these tensors itself: a compressed matrix always counts as shared.

    Args:
        matrix: the matrix.
        source: one of its tensors, as ``_sources`` returns it.
        held: whether components of the matrix are cached, which share its memory and its counters.
    """
    if matrix.layout != torch.sparse_coo:
        return True
    if matrix.is_coalesced():
        return storage_uses(source) > _OWN_USES + held
    return matrix.is_inference() or storage_uses(source) > _OWN_USES


def _reused(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], changed: Sequence[bool]
) -> dict[str, torch.Tensor]:
    """Return the new parts; parts whose content is unchanged keep their old tensor object."""
    written = dict(zip(new, changed, strict=False))  # the last part carries a size alone
    return {
        name: old[name] if _is_same(old[name], part) and not written.get(name) else part
        for name, part in new.items()
    }


def _is_same(old: torch.Tensor, new: torch.Tensor) -> bool:
    if new.numel() == 0:
        return old.shape == new.shape and old.dtype == new.dtype
    return state(old) == state(new)


def _split(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the components of a matrix as new tensors on its memory.

    They are detached, as the structure cache keys views by their base, which all components would share.
    """
    rows, columns, *_ = matrix.shape
    with torch.no_grad():
        if matrix.layout == torch.sparse_coo:
            matrix = matrix.coalesce()
            shape = matrix.values().new_empty((rows, columns, 0))
            return {"indices": matrix.indices().detach(), "values": matrix.values().detach(), "shape": shape}
        pointer, plain, names = _COMPRESSED[matrix.layout]
        csr = matrix.layout == torch.sparse_csr
        other = matrix.values().new_empty((columns if csr else rows, 0))
        return {
            names[0]: pointer(matrix).detach(),
            names[1]: plain(matrix).detach(),
            "values": matrix.values().detach(),
            "columns" if csr else "rows": other,
        }
