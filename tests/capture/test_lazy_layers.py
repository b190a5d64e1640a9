"""Lazy layers get their parameters at the first capture, as in eager."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import gnnc
from gnnc.errors import CaptureError

WIDTH = 12


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index) if isinstance(layer, pyg.MessagePassing) else layer(x)
        return x


LAZY: dict[str, Callable[[], list[nn.Module]]] = {
    "GCN": lambda: [pyg.GCNConv(-1, 16), pyg.GCNConv(-1, 4)],
    "SAGE": lambda: [pyg.SAGEConv((-1, -1), 16), nn.LazyLinear(4)],
    "GAT": lambda: [pyg.GATConv((-1, -1), 4, heads=2, add_self_loops=False), pyg.Linear(-1, 4)],
    "GIN": lambda: [pyg.GINConv(nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(4)))],
    "Transformer": lambda: [pyg.TransformerConv(-1, 4), nn.LazyBatchNorm1d()],
}


def graph(nodes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes, (2, 5 * nodes), generator=generator)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_lazy_layers_are_as_in_eager(name: str, training: bool):
    torch.manual_seed(1)
    eager = Chain(*LAZY[name]()).train(training)
    torch.manual_seed(1)
    model = Chain(*LAZY[name]()).train(training)
    compiled = gnnc.compile(model, "fp32")
    torch.manual_seed(0)
    expected = eager(*graph(30))
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(*graph(30)), expected, rtol=1e-4, atol=1e-4)
    for (path, value), (_, other) in zip(model.state_dict().items(), eager.state_dict().items(), strict=True):
        torch.testing.assert_close(value, other, msg=path)
    torch.testing.assert_close(compiled(*graph(17)), eager(*graph(17)), rtol=1e-4, atol=1e-4)
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    assert [type(module) for module in model.modules()] == [type(module) for module in eager.modules()]
    assert compiled.explain().rpartition("Captures")[2].strip().count("\n") == 0


@torch.no_grad()
def test_example_inputs_materialize():
    model = Chain(*LAZY["GCN"]())
    compiled = gnnc.compile(model.eval(), "int8", example_inputs=graph(30))
    assert model.get_parameter("layers.0.lin.weight").shape == (16, WIDTH)
    expected = model(*graph(30))
    assert (compiled(*graph(30)) - expected).norm() <= 0.05 * expected.norm()


class Skips(nn.Module):
    """A layer that the call does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.LazyLinear(4), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_layer_out_of_reach_is_named():
    with pytest.raises(CaptureError, match=r"'unused.weight' has no shape yet.*in_channels"), torch.no_grad():
        gnnc.compile(Skips(), "fp32")(torch.randn(3, WIDTH))


def test_a_first_call_that_fails_names_the_line():
    with pytest.raises(CaptureError, match=r"test_lazy_layers\.py:\d+ in forward"), torch.no_grad():
        gnnc.compile(Chain(pyg.GCNConv(-1, 4)), "fp32")(torch.randn(3, WIDTH), torch.tensor([[0, 7], [1, 2]]))
