"""Random sparse matrices."""

import torch
from torch import Tensor


def matrix(rows: int, columns: int, count: int, seed: int) -> Tensor:
    """Return a coalesced COO matrix with weights."""
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(size, (count,), generator=generator) for size in (rows, columns)]
    weights = torch.rand(count, generator=generator)
    return torch.sparse_coo_tensor(torch.stack(ends), weights, (rows, columns)).coalesce()
