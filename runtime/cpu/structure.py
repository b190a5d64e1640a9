"""The C++ kernel for sorting edges, swapped into structure programs."""

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.runtime.structure_runner import StructureRunner


def use_kernels(runner: StructureRunner) -> None:
    """Let every part of a structure program sort with ``gnnc_cpu.csr``."""
    for group in runner.groups:
        for node in group.module.graph.nodes:
            if node.target is torch.ops.gnnc.csr.default:
                node.target = csr
        group.module.recompile()


def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by destination; see ``gnnc.csr``.

    Raises:
        GraphError: an id is out of range.
    """
    rowptr = torch.empty(num_dst + 1, dtype=torch.int64)
    col = torch.empty(src.shape[0], dtype=torch.int32)
    perm = torch.empty(src.shape[0], dtype=torch.int64)
    try:
        torch.ops.gnnc_cpu.csr(src, dst, num_src, num_dst, rowptr, col, perm)
    except RuntimeError as error:
        raise GraphError(
            f"[gnnc.csr] {_first_line(error)}: node ids must be in 0..{num_src - 1} (sources) and "
            f"0..{num_dst - 1} (destinations); check edge_index against the number of rows of x"
        ) from None
    return rowptr, col, perm


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
