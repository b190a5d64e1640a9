"""Structure ops: from an edge list to compressed sparse rows (CSR) and back.

``csr`` sorts edges by destination, stably, so that edges of a row keep the caller's order. Row ``i``
holds the edges ``rowptr[i] .. rowptr[i + 1]``; ``col`` is the source of each, ``perm`` its position
in the caller's list.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel

_STRUCTURE = "integers have no gradient"


def random_csr(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CSR of a random graph, for samples and tests."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(max(num_src, 1), (num_edges,), generator=generator)
    dst = torch.randint(max(num_dst, 1), (num_edges,), generator=generator)
    return csr_reference(src, dst, num_src, num_dst)


def edge_rows(rowptr: Tensor, num_edges: int) -> Tensor:
    """Return the destination of every edge in CSR order, int64 ``[E]``."""
    rows = torch.arange(rowptr.numel() - 1, device=rowptr.device)
    return torch.repeat_interleave(rows, rowptr.diff(), output_size=num_edges)


def check_index(name: str, index: Tensor, bound: int, side: str) -> None:
    """Refuse node ids that are negative or not below ``bound``; ``name`` and ``side`` are for the message.

    Raises:
        GraphError: names the first such id and its position.
    """
    if index.numel() == 0:
        return
    low, high = int(index.min()), int(index.max())
    if 0 <= low and high < bound:
        return
    bad = ((index < 0) | (index >= bound)).nonzero()[0, 0].item()
    raise GraphError(
        f"[gnnc.csr] {name}[{bad}] = {int(index[bad])} is not a {side} node: ids must be in "
        f"0..{bound - 1} ({bound} nodes); check edge_index against the number of rows of x"
    )


def csr_reference(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, ...]:
    """Sort the edges ``src -> dst`` by destination.

    Args:
        src: source ids, integer ``[E]``.
        dst: destination ids, integer ``[E]``.
        num_src: number of source nodes.
        num_dst: number of destination nodes.

    Returns:
        ``rowptr`` int64 ``[num_dst + 1]``, ``col`` int32 ``[E]``, ``perm`` int64 ``[E]``.

    Raises:
        GraphError: an id is negative or not below its number of nodes.
    """
    check(
        src.dim() == 1 and src.shape == dst.shape,
        "csr",
        lambda: f"expected src and dst of one length, got {tuple(src.shape)}, {tuple(dst.shape)}",
    )
    check_index("src", src, num_src, "source")
    check_index("dst", dst, num_dst, "destination")
    perm = torch.sort(dst, stable=True).indices
    rowptr = dst.new_zeros(num_dst + 1, dtype=torch.int64)
    rowptr[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    return rowptr, src[perm].to(torch.int32), perm


def _csr_fake(src: Tensor, dst: Tensor, num_src: Any, num_dst: Any) -> tuple[Tensor, ...]:
    return (
        src.new_empty((num_dst + 1,), dtype=torch.int64),
        src.new_empty(src.shape, dtype=torch.int32),
        src.new_empty(src.shape, dtype=torch.int64),
    )


def _csr_cost(src: Tensor, dst: Tensor, num_src: Any, num_dst: Any) -> Cost:
    return Cost(bytes=nbytes(src, dst) * 2 + numel(src) * 12, flops=numel(src) * 2)


def _edges(*pairs: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])


def _csr_samples() -> Sequence[tuple[Any, ...]]:
    empty = torch.empty(0, dtype=torch.int64)
    return [
        (*_edges((0, 1), (2, 1), (1, 0), (0, 1)), 3, 2),
        (empty, empty, 7, 7),
        (*_edges((0, 0)), 1, 1),
        (torch.tensor([4, 1, 2], dtype=torch.int32), torch.tensor([0, 3, 0], dtype=torch.int32), 5, 5),
    ]


def _csr_errors() -> Sequence[ErrorInput]:
    return [
        ErrorInput((*_edges((0, 3)), 4, 3), r"dst\[0\] = 3", GraphError),
        ErrorInput((*_edges((0, 0), (-1, 0)), 4, 3), r"src\[1\] = -1", GraphError),
        ErrorInput((torch.zeros(2).long(), torch.zeros(3).long(), 1, 1), "one length"),
    ]


CSR = define(
    Op(
        name="csr",
        schema="(Tensor src, Tensor dst, SymInt num_src, SymInt num_dst)"
        " -> (Tensor rowptr, Tensor col, Tensor perm)",
        kind="structure",
        cached_alone=True,
        reference=csr_reference,
        fake=_csr_fake,
        cost=_csr_cost,
        samples=_csr_samples,
        error_inputs=_csr_errors,
        no_gradient=_STRUCTURE,
    )
)


def csr_transpose_reference(rowptr: Tensor, col: Tensor, num_src: int) -> tuple[Tensor, ...]:
    """Return the CSR by source of a CSR by destination.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        num_src: number of source nodes.

    Returns:
        ``rowptr_t`` int64 ``[num_src + 1]``, ``col_t`` int32 ``[E]`` (destinations) and ``perm_t``
        int64 ``[E]``: position of each edge in the CSR given.
    """
    rows = edge_rows(rowptr, col.numel())
    return csr_reference(rows, col.long(), rowptr.numel() - 1, num_src)


def _csr_transpose_fake(rowptr: Tensor, col: Tensor, num_src: Any) -> tuple[Tensor, ...]:
    return _csr_fake(col, col, 0, num_src)


def _csr_transpose_errors() -> Sequence[ErrorInput]:
    rowptr, col, _ = random_csr(5, 4, 9)
    return [ErrorInput((rowptr, col.clamp(min=4), 4), "not a destination node", GraphError)]


CSR_TRANSPOSE = define(
    Op(
        name="csr_transpose",
        schema="(Tensor rowptr, Tensor col, SymInt num_src)"
        " -> (Tensor rowptr_t, Tensor col_t, Tensor perm_t)",
        kind="structure",
        cached_alone=True,
        reference=csr_transpose_reference,
        fake=_csr_transpose_fake,
        cost=lambda rowptr, col, num_src: Cost(nbytes(rowptr, col) + numel(col) * 12, numel(col) * 2),
        samples=lambda: [(*random_csr(5, 4, 9)[:2], 5), (*random_csr(3, 7, 0)[:2], 3)],
        error_inputs=_csr_transpose_errors,
        no_gradient=_STRUCTURE,
    )
)


def degree_reference(rowptr: Tensor) -> Tensor:
    """Return the number of edges of each row, float32 ``[num_dst]``; ``rowptr``: int64."""
    check(rowptr.dim() == 1, "degree", lambda: f"rowptr must be 1-D, got {tuple(rowptr.shape)}")
    return rowptr.diff().to(torch.float32)


DEGREE = define(
    Op(
        name="degree",
        schema="(Tensor rowptr) -> Tensor",
        kind="structure",
        result_dtype=torch.float32,
        label="deg",
        reference=degree_reference,
        fake=lambda rowptr: rowptr.new_empty((rowptr.shape[0] - 1,), dtype=torch.float32),
        cost=lambda rowptr: Cost(nbytes(rowptr) + numel(rowptr) * 4, numel(rowptr)),
        samples=lambda: [(random_csr(5, 4, 9)[0],), (random_csr(5, 4, 0)[0],)],
        error_inputs=lambda: [ErrorInput((torch.zeros(2, 2).long(),), "1-D")],
        no_gradient=_STRUCTURE,
    )
)


def edge_dst_reference(rowptr: Tensor, col: Tensor) -> Tensor:
    """Return the destination of every edge in CSR order, int64 ``[E]``."""
    check(rowptr.dim() == 1, "edge_dst", lambda: f"rowptr must be 1-D, got {tuple(rowptr.shape)}")
    return edge_rows(rowptr, col.numel())


EDGE_DST = define(
    Op(
        name="edge_dst",
        schema="(Tensor rowptr, Tensor col) -> Tensor",
        kind="structure",
        label="dst",
        reference=edge_dst_reference,
        fake=lambda rowptr, col: col.new_empty(col.shape, dtype=torch.int64),
        cost=lambda rowptr, col: Cost(nbytes(rowptr) + numel(col) * 8, numel(col)),
        samples=lambda: [random_csr(5, 4, 9)[:2], random_csr(5, 4, 0)[:2]],
        error_inputs=lambda: [
            ErrorInput((torch.zeros(2, 2).long(), torch.zeros(1, dtype=torch.int32)), "1-D")
        ],
        no_gradient=_STRUCTURE,
    )
)
