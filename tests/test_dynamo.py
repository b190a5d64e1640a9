"""``torch.compile(model, backend="gnnc")`` gives the programs that ``gnnc.compile`` gives."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from slow import slow_after
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_add_pool
from zoo import ZOO, prepared
from zoo_layers import LAYERS

import gnnc
from gnnc import dynamo

MODELS = (
    *("gin", "gine", "sage-max", "gatv2", "transformer", "link-prediction", "pna", "film"),
    *("fast-rgcn", "point-net"),
)


class Model(nn.Module):
    def __init__(self, conv: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.second = conv(12, 16), nn.BatchNorm1d(16), conv(16, 5)

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


def graph(nodes: int, edges: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 12, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


@pytest.fixture(autouse=True)
def whole_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    wanted = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs", "specialize_float")
    with torch._dynamo.config.patch(dict.fromkeys(wanted, True)):
        yield
    torch._dynamo.reset()


def spy(made: list, precision: str):
    def backend(graph_module, example_inputs):
        made.append(dynamo.backend(graph_module, example_inputs, options={"precision": precision}))
        return made[-1]

    return backend


def kernels(compiled: gnnc.CompiledModel) -> Counter:
    return Counter(kernel for _, kernel in compiled._dispatch.last.executable.kernels)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", slow_after(1, ["int8", "fp32"]))
@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, GATConv])
@torch.no_grad()
def test_same_programs(conv, precision):
    torch.manual_seed(0)
    model, made = Model(conv).eval(), []
    through = torch.compile(model, backend=spy(made, precision), dynamic=True, fullgraph=True)
    direct = gnnc.compile(model, precision)
    for seed, sizes in enumerate([(60, 400), (37, 150), (81, 90)]):
        arguments = graph(*sizes, seed)
        torch.testing.assert_close(through(*arguments), direct(*arguments), rtol=1e-6, atol=1e-6)
    assert len(made) == 1
    assert kernels(made[0].compiled) == kernels(direct)
    assert set(made[0].compiled.state_dict()) <= set(model.state_dict())


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_after(2, MODELS))
@torch.no_grad()
def test_same_programs_of_the_zoo(name):
    entry, made = (ZOO | LAYERS)[name], []
    model = prepared(entry)
    through = torch.compile(model, backend=spy(made, "int8"), dynamic=True, fullgraph=True)
    direct = gnnc.compile(model, "int8")
    for seed, sizes in enumerate([(60, 400), (37, 150)]):
        args, kwargs = entry.arguments(*sizes, seed)
        assert torch.equal(through(*args, **kwargs), direct(*args, **kwargs))
    assert len(made) == 1
    assert kernels(made[0].compiled) == kernels(direct)


@torch.no_grad()
def test_by_name_with_options_and_without_dynamic_sizes():
    torch.manual_seed(0)
    model = Model(GCNConv).eval()
    through = torch.compile(model, backend="gnnc", options={"precision": "fp32"})
    for seed, sizes in enumerate([(60, 400), (37, 150), (81, 90)]):
        arguments = graph(*sizes, seed)
        torch.testing.assert_close(through(*arguments), model(*arguments), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_graph_breaks_leave_pieces():
    class Breaks(Model):
        def forward(self, x, edge_index):
            x = self.first(x, edge_index).relu()
            torch._dynamo.graph_break()
            return self.second(x, edge_index)

    torch.manual_seed(0)
    model, made = Breaks(SAGEConv).eval(), []
    through = torch.compile(model, backend=spy(made, "fp32"), dynamic=True)
    arguments = graph(60, 400)
    torch.testing.assert_close(through(*arguments), model(*arguments), rtol=1e-4, atol=1e-5)
    assert len(made) == 2


@torch.no_grad()
def test_new_weights_are_seen():
    torch.manual_seed(0)
    model = Model(SAGEConv).eval()
    through = torch.compile(model, backend="gnnc", options={"precision": "fp32"}, dynamic=True)
    arguments = graph(60, 400)
    through(*arguments)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    torch.testing.assert_close(through(*arguments), model(*arguments), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_pooling_with_a_size():
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(12, 16)

        def forward(self, x, edge_index, batch):
            return global_add_pool(self.conv(x, edge_index), batch, size=3)

    torch.manual_seed(0)
    model = Pools().eval()
    through = torch.compile(model, backend="gnnc", options={"precision": "fp32"}, dynamic=True)
    arguments = *graph(60, 400), torch.arange(60) // 20
    torch.testing.assert_close(through(*arguments), model(*arguments), rtol=1e-4, atol=1e-4)


def test_a_model_trains_in_auto(rates):
    torch.manual_seed(0)
    model = Model(SAGEConv)
    through = torch.compile(model, backend="gnnc", dynamic=True, options={"precision": "auto"})
    found = []
    for call in (through, model):
        model.zero_grad()
        call(*graph(60, 400)).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.cosine_similarity(*found, dim=0) > 0.99


def test_unknown_options_are_refused():
    with pytest.raises(gnnc.GnncError, match="precison"):
        dynamo.backend(torch.fx.symbolic_trace(nn.ReLU()), (), options={"precison": "fp32"})
