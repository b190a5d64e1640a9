"""Rows of attention in FP32, 16 bits or int8: random ones, their values, and sums by weights of edges."""

import torch
from torch import Tensor

GNNC = torch.ops.gnnc


def random_rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows of a shape and dtype, and a scale for each: ones where they are not int8."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]) / 100
    return torch.randn(shape).to(dtype), torch.ones(shape[0])


def widened(rows: Tensor, scale: Tensor) -> Tensor:
    """Return the values of rows, by the ops of a program."""
    if rows.dtype == torch.float32:
        return rows
    if rows.dtype == torch.int8:
        return GNNC.dequantize(rows, scale, "row")
    return torch.ops.aten._to_copy(rows, dtype=torch.float32)


def weighted_sum(rowptr: Tensor, col: Tensor, alpha: Tensor, x: Tensor, scale: Tensor, rows: int) -> Tensor:
    """Return the sum of the rows of the sources of edges by weights, by the op for their dtype."""
    if x.dtype == torch.int8:
        return GNNC.qspmm(rowptr, col, alpha, x, scale, None, "sum", rows)
    return GNNC.spmm(rowptr, col, alpha, x, "sum", rows)
