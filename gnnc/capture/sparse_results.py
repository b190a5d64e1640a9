"""Sparse matrices among the results of forward, such as attention weights on a sparse adjacency.

A graph returns dense tensors alone: while a model is traced, its components take the place of a matrix, and a
call makes the matrix of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.capture.sparse_operand import SparseOperand
from gnnc.torch_private import pytree, raw_indices, raw_values

_CONSTRUCTORS = {torch.sparse_csr: torch.sparse_csr_tensor, torch.sparse_csc: torch.sparse_csc_tensor}


class SparseResult:
    """Components of a sparse matrix, which pytree takes apart.

    Args:
        layout: layout of the matrix.
        is_coalesced: whether a COO matrix is coalesced.
        parts: its indices, its values, and its sizes.
    """

    def __init__(self, layout: torch.layout, is_coalesced: bool, parts: Sequence[Any]) -> None:
        self.layout, self.is_coalesced, self.parts = layout, is_coalesced, list(parts)

    def matrix(self) -> Tensor:
        """Return the matrix, which shares its components."""
        if self.layout is torch.sparse_coo:
            indices, values, *sizes = self.parts
            options = {"is_coalesced": True} if self.is_coalesced else {}
            return torch.sparse_coo_tensor(indices, values, sizes, **options)
        pointer, plain, values, *sizes = self.parts
        return _CONSTRUCTORS[self.layout](pointer, plain, values, sizes)


pytree.register_pytree_node(
    SparseResult,
    lambda result: (result.parts, (result.layout, result.is_coalesced)),
    lambda parts, context: SparseResult(context[0], context[1], list(parts)),
    serialized_type_name="gnnc.SparseResult",
)


def taken_apart(result: Any) -> Any:
    """Return the result of a traced forward with the components of each sparse matrix."""
    return pytree.tree_map_only(SparseOperand, _components, result)


def put_together(result: Any) -> Any:
    """Return the result of a call with the matrices whose components it holds."""
    return pytree.tree_map_only(SparseResult, SparseResult.matrix, result, is_leaf=_is_sparse_result)


def holds_matrices(spec: pytree.TreeSpec) -> bool:
    """Return whether results of a structure hold sparse matrices."""
    result = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    return any(map(_is_sparse_result, pytree.tree_leaves(result, is_leaf=_is_sparse_result)))


def _is_sparse_result(value: Any) -> bool:
    return isinstance(value, SparseResult)


def _components(matrix: SparseOperand) -> SparseResult:
    if matrix.form == torch.sparse_coo:
        indices = raw_indices(matrix)
        return SparseResult(matrix.form, not matrix.raw, [indices, raw_values(matrix), *matrix.sizes])
    by_row = matrix.form == torch.sparse_csr
    pointer = matrix.crow_indices() if by_row else matrix.ccol_indices()
    plain = matrix.col_indices() if by_row else matrix.row_indices()
    return SparseResult(matrix.form, True, [pointer, plain, matrix.values(), *matrix.sizes])
