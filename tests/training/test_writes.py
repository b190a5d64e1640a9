"""Gradients through values that forward writes in part: rows, columns, slices, masks."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from training_steps import EDGES, WIDTH, X, compare

import gnnc


def a_row(h: Tensor) -> Tensor:
    h[0] = h[1] * 2
    return h


def a_row_by_a_number_for_each_column(h: Tensor) -> Tensor:
    h[0] = h.mean(0)
    h[1:] = h[0]
    return h


def columns(h: Tensor) -> Tensor:
    h[:, 1:3] = h[:, :1]
    h[:, 3] = 0
    return h


def a_slice_in_place(h: Tensor) -> Tensor:
    h[1:] -= h[:-1].clone()
    return h


def another_type(h: Tensor) -> Tensor:
    h[2] = h[3].double() * 3
    return h


def a_view(h: Tensor) -> Tensor:
    part = h[2:5]
    part *= 3
    return h


def a_mask(h: Tensor) -> Tensor:
    h[h > 0] = 0.5
    return h


class Written(nn.Module):
    """A layer whose result a function writes."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head, self.write = GCNConv(WIDTH, 8), GCNConv(8, 4), write

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.write(self.conv(x, edge_index) * 1), edge_index)


WRITES = (a_row, a_row_by_a_number_for_each_column, columns, a_slice_in_place, another_type, a_view, a_mask)


@pytest.mark.parametrize("write", WRITES)
def test_written_parts_have_the_gradient_of_what_is_written(write: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Written(write).train()
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())
    inference = copy.deepcopy(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(gnnc.compile(inference, "fp32")(X, EDGES), inference(X, EDGES))
