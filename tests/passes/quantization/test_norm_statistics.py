"""Statistics of norms stay FP32: they meet their own operand again, and rounding may be all that is left."""

import pytest
import torch
from slow import slow_after
from torch import nn
from torch_geometric import nn as pyg

import gnnc
from gnnc.ir.op import op_of

WIDTH = 64


class Normed(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = pyg.SAGEConv(WIDTH, WIDTH), norm, pyg.SAGEConv(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        return self.conv2(self.norm(self.conv1(x, edge_index), batch).relu(), edge_index)


class ByHand(nn.Module):
    """Standardizes by `index_add`, in one expression."""

    def forward(self, x, batch):
        zeros = x.new_zeros(10, WIDTH)
        count = zeros[:, :1].index_add(0, batch, x.new_ones(x.shape[0], 1)).clamp(min=1)
        mean = zeros.index_add(0, batch, x) / count
        variance = zeros.index_add(0, batch, x * x) / count - mean * mean
        return (x - mean[batch]) * (variance.clamp(min=0) + 1e-5).rsqrt()[batch]


NORMS = {
    "graph": lambda: pyg.GraphNorm(WIDTH),
    "instance": lambda: pyg.InstanceNorm(WIDTH),
    "pair": pyg.PairNorm,
    "mean subtraction": pyg.MeanSubtractionNorm,
    "layer": lambda: pyg.LayerNorm(WIDTH),
    "by hand": ByHand,
}


def graphs(nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten graphs of so many nodes."""
    generator = torch.Generator().manual_seed(nodes)
    batch = torch.arange(10).repeat_interleave(nodes)
    first = torch.arange(10).repeat_interleave(3 * nodes) * nodes
    edge_index = torch.randint(nodes, (2, 30 * nodes), generator=generator) + first
    return torch.randn(10 * nodes, WIDTH, generator=generator), edge_index, batch


def assigned(compiled: gnnc.CompiledModel) -> dict[str, set[str]]:
    """The precisions of the aggregations of each layer."""
    found: dict[str, set[str]] = {}
    for node in dict(compiled.stages)["assign"].graph.nodes:
        op = op_of(node)
        if op is not None and op.name in ("spmm", "segment_reduce"):
            found.setdefault(node.meta["layer"].split(".")[0], set()).add(node.meta["precision"].name)
    return found


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("precision", slow_after(1, ["int8", "bf16"]))
@pytest.mark.parametrize("name", NORMS)
def test_statistics_stay_fp32_and_sums_of_neighbors_do_not(name, precision):
    torch.manual_seed(0)
    model = Normed(NORMS[name]()).eval()
    compiled = gnnc.compile(model, precision, overrides={"norm": precision})  # not even if asked for
    for nodes in (1, 2, 20):
        expected, actual = model(*graphs(nodes)), compiled(*graphs(nodes))
        assert (actual - expected).norm() <= 0.06 * expected.norm()
    found = assigned(compiled)
    assert found.pop("norm") == {"fp32"}
    assert found == {"conv1": {precision}, "conv2": {precision}}
    assert "its result is the statistics of a norm of its operand" in compiled.explain()


class Pooled(nn.Module):
    """A norm whose difference the largest of each graph is taken of: it is in the body of a message."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = pyg.LGConv(), pyg.GraphNorm(WIDTH)

    def forward(self, x, edge_index, batch):
        return pyg.global_max_pool(self.norm(self.conv(x, edge_index), batch).tanh(), batch, 10)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_statistics_that_a_body_subtracts_stay_fp32(precision):
    torch.manual_seed(0)
    model = Pooled().eval()
    model.norm.bias.fill_(0.5)
    compiled = gnnc.compile(model, precision)
    for nodes in (1, 2, 20):
        expected, actual = model(*graphs(nodes)), compiled(*graphs(nodes))
        assert (actual - expected).norm() <= 0.06 * expected.norm()
    assert assigned(compiled)["norm"] == {"fp32"}


class Residual(nn.Module):
    """Aggregations that meet their operand in a sum, and a difference of two hops."""

    def __init__(self) -> None:
        super().__init__()
        self.gin = pyg.GINConv(nn.Linear(WIDTH, WIDTH))
        self.cheb = pyg.ChebConv(WIDTH, WIDTH, K=3)
        self.appnp = pyg.APPNP(K=2, alpha=0.1)

    def forward(self, x, edge_index):
        return x + self.appnp(x + self.cheb(self.gin(x, edge_index), edge_index), edge_index)


@torch.no_grad()
def test_residuals_and_polynomials_are_no_statistics():
    compiled = gnnc.compile(Residual().eval())
    compiled(*graphs(20)[:2])
    assert assigned(compiled) == {"gin": {"int8"}, "cheb": {"int8"}, "appnp": {"int8"}}
