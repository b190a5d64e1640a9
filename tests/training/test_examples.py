"""A model that was compiled with ``example_inputs`` trains: the program of the examples is for inference."""

import copy

import pytest
import torch
from torch_geometric.nn import GCNConv

import gnnc


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("order", [("train", "infer", "train"), ("infer", "train")])
def test_calls_that_want_gradients_have_their_own_program(precision: str, order: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    x, edge_index = torch.randn(50, 16), torch.randint(50, (2, 200))
    model = GCNConv(16, 16)
    eager = copy.deepcopy(model)
    eager(x, edge_index).square().sum().backward()
    compiled = gnnc.compile(model, precision, example_inputs=(x, edge_index))
    for kind in order:
        if kind == "infer":
            with torch.no_grad():
                assert not compiled(x, edge_index).requires_grad
            continue
        model.zero_grad()
        compiled(x, edge_index).square().sum().backward()
        for found, right in zip(model.parameters(), eager.parameters(), strict=True):
            assert found.grad is not None and right.grad is not None
            assert torch.cosine_similarity(found.grad.flatten(), right.grad.flatten(), dim=0) > 0.99


def test_examples_serve_calls_without_gradients_from_the_start() -> None:
    x, edge_index = torch.randn(50, 16), torch.randint(50, (2, 200))
    compiled = gnnc.compile(GCNConv(16, 16), "int8", example_inputs=(x, edge_index))
    with torch.no_grad():
        compiled(x, edge_index)
    assert len(compiled._dispatch.programs()) == 1
