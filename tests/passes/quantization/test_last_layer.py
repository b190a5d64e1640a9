"""The products and aggregations next to the outputs of a model that trains."""

import pytest
import torch
import torch_geometric.nn as pyg
from gnn_graphs import gcn
from torch import Tensor, nn

import gnnc
from gnnc.errors import PrecisionError
from gnnc.ir.op import op_of
from gnnc.passes.assign import Assign
from gnnc.passes.quantization.last_layer import last_layer


class TwoHeads(nn.Module):
    """Two outputs, one of them of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(20, 24), pyg.GCNConv(24, 20)
        self.head = nn.Linear(24, 20)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x, edge_index).relu()
        return self.second(hidden, edge_index), self.head(hidden)


def found(model: nn.Module) -> set[tuple[str, str]]:
    compiled = gnnc.compile(model, "fp32")
    compiled(torch.randn(30, 20), torch.randint(30, (2, 90)))
    nodes = last_layer(dict(compiled.stages)["joint"])
    return {(op.name, str(node.meta["layer"])) for node in nodes if (op := op_of(node)) is not None}


def test_each_output_and_each_of_their_gradients_has_its_own() -> None:
    assert found(TwoHeads()) == {
        ("spmm", "second"),
        ("gemm", "second.lin"),
        ("gemm", "head"),
        ("spmm", "second (backward)"),
        ("gemm", "second.lin (backward)"),
        ("gemm_tn", "second.lin (backward)"),
        ("gemm", "head (backward)"),
        ("gemm_tn", "head (backward)"),
    }


def test_gradient_of_attention_is_an_aggregation() -> None:
    assert found(pyg.GAT(20, 24, 2, 8, heads=1)) == {
        ("gemm", "convs.1.lin"),
        ("sddmm", "convs.1"),
        ("spmm", "convs.1"),
        ("attention_backward", "convs.1 (backward)"),
        ("gemm", "convs.1.lin (backward)"),
        ("gemm_tn", "convs.1.lin (backward)"),
    }


def test_a_graph_without_gradients_has_none() -> None:
    assert not last_layer(gcn())


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(PrecisionError, match="last_layer must be 'fp32' or 'low', got 'int8'"):
        Assign(last_layer="int8")  # type: ignore[arg-type]
