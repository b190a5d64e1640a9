"""A boolean mask among the arguments selects rows, edges or entries: one program for all masks."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional
from torch_2_11 import NOT_IN_2_11
from torch_geometric.data import Data

import gnnc

WIDTH = 8
SHARES = ((30, 0.5), (21, 0.3), (17, 0.0), (12, 1.0))
Effect = Callable[["Net", Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Runs a function of its two layers, ``x``, the graph and a mask."""

    def __init__(self, effect: Effect) -> None:
        super().__init__()
        self.conv, self.lin, self.effect = pyg.GCNConv(WIDTH, 16), nn.Linear(WIDTH, 16), effect

    def forward(self, x, edge_index, mask):
        return self.effect(self, x, edge_index, mask)


class OfData(Net):
    def forward(self, data):
        return self.effect(self, data.x, data.edge_index, data.train_mask)


def written(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    h = net.conv(x, edge_index)
    h[mask] = net.lin(x[mask])
    return h


def zeroed(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = 0.0
    return net.conv(x, edge_index)


OF_NODES: dict[str, Effect] = {
    "out[mask]": lambda net, x, e, mask: net.conv(x, e)[mask],
    "x[mask]": lambda net, x, e, mask: net.lin(x[mask]).relu(),
    "out[~mask]": lambda net, x, e, mask: net.conv(x, e).relu()[~mask],
    "out[mask, 0]": lambda net, x, e, mask: net.conv(x, e)[mask, 0],
    "nonzero()": lambda net, x, e, mask: net.conv(x, e)[mask.nonzero().squeeze(-1)],
    "nonzero(as_tuple)": lambda net, x, e, mask: net.conv(x, e)[mask.nonzero(as_tuple=True)[0]],
    "where": lambda net, x, e, mask: net.conv(x, e)[torch.where(mask)[0]],
    "masked_select": lambda net, x, e, mask: torch.masked_select(net.conv(x, e), mask.unsqueeze(1)),
    "written rows": written,
    "zeroed rows": zeroed,
    "sum of some": lambda net, x, e, mask: net.conv(x, e)[mask].sum(0),
    "computed mask": lambda net, x, e, mask: net.conv(x, e)[x[:, 0] > 0],
    "two masks": lambda net, x, e, mask: net.conv(x, e)[mask & (x[:, 1] > 0)],
    "loss": lambda net, x, e, mask: functional.nll_loss(
        net.conv(x, e).log_softmax(-1)[mask], e[0, : x.size(0)][mask] % 16, reduction="sum"
    ),
}
OF_EDGES: dict[str, Effect] = {
    "edge_index[:, mask]": lambda net, x, e, mask: net.conv(net.lin(x)[:, :WIDTH], e[:, mask]),
    "nonzero of edges": lambda net, x, e, mask: net.conv(x, e[:, mask.nonzero().view(-1)]),
}


def arguments(nodes: int, share: float, of_edges: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    edge_index = torch.randint(nodes, (2, 5 * nodes), generator=generator)
    return x, edge_index, torch.rand(5 * nodes if of_edges else nodes, generator=generator) < share


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", [*OF_NODES, *OF_EDGES])
@torch.no_grad()
def test_masks(name: str, precision: str, request: pytest.FixtureRequest):
    if name == "loss":
        request.applymarker(NOT_IN_2_11)
    torch.manual_seed(0)
    model = Net((OF_NODES | OF_EDGES)[name]).eval()
    compiled = gnnc.compile(model, precision)
    for nodes, share in SHARES:
        inputs = arguments(nodes, share, name in OF_EDGES)
        expected, actual = model(*inputs), compiled(*inputs)
        assert actual.shape == expected.shape
        assert (actual - expected).norm() <= (1e-4 if precision == "fp32" else 0.05) * expected.norm() + 1e-6
    assert len(compiled.explain().rpartition("Captures")[2].strip().splitlines()) == 1


@torch.no_grad()
def test_masks_of_data():
    torch.manual_seed(0)
    model = OfData(OF_NODES["out[mask]"]).eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes, share in SHARES:
        x, edge_index, mask = arguments(nodes, share, of_edges=False)
        data = Data(x=x, edge_index=edge_index, train_mask=mask)
        torch.testing.assert_close(compiled(data), model(data), rtol=1e-4, atol=1e-5)
