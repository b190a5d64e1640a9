"""A model without parameters takes the backend and the precisions of the GPU that its inputs are on."""

import pytest
import torch
from torch import Tensor, nn

import gnnc


class Sums(nn.Module):
    """Sums of the rows of the neighbors: no parameter says on which device it runs."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


@pytest.mark.cuda
def test_inputs_on_a_gpu_take_its_precisions() -> None:
    compiled = gnnc.compile(Sums(), "fp16")
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]], device="cuda")
    x = torch.randn(3, 8, device="cuda")
    torch.testing.assert_close(compiled(x, edge_index), Sums()(x, edge_index), rtol=1e-2, atol=1e-2)
    assert compiled._captured().backend.name == "cuda"
