"""The CPU kernels compute what the reference computes, in every precision, on every kind of model."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    SAGEConv,
    SGConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
)
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import gnnc
from gnnc.runtime import registry
from gnnc.runtime.backend import get_backend
from gnnc.runtime.registry import Decline

WIDTH, HIDDEN, CLASSES = 24, 64, 7


class Stack(nn.Module):
    """Two layers with what stands between them in practice."""

    def __init__(self, first: nn.Module, second: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, norm

    def forward(self, x, edge_index):
        hidden = self.norm(self.first(x, edge_index)).relu()
        return self.second(hidden, edge_index).log_softmax(-1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = x + torch.nn.functional.gelu(conv(x, edge_index))
        return x


class Links(nn.Module):
    """Scores pairs of nodes by a dot product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(WIDTH, HIDDEN)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return (h[edge_index[0]] * h[edge_index[1]]).sum(-1)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(WIDTH, HIDDEN)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index).relu()
        batch = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return global_add_pool(h, batch, size=1) + global_max_pool(h, batch, size=1)


MODELS = {
    "GCN": lambda: GCN(WIDTH, HIDDEN, 2, CLASSES, norm="batch_norm"),
    "GCN with layer norm": lambda: GCN(WIDTH, HIDDEN, 2, CLASSES, norm="layer_norm", jk="cat"),
    "GraphSAGE": lambda: GraphSAGE(WIDTH, HIDDEN, 2, CLASSES),
    "GraphSAGE max": lambda: GraphSAGE(WIDTH, HIDDEN, 2, CLASSES, aggr="max"),
    "GIN": lambda: GIN(WIDTH, HIDDEN, 2, CLASSES),
    "GAT": lambda: GAT(WIDTH, HIDDEN, 2, CLASSES, heads=4),
    "GAT with one head": lambda: GAT(WIDTH, HIDDEN, 2, CLASSES),
    "GATv2": lambda: Stack(GATv2Conv(WIDTH, 8, heads=4), GATv2Conv(32, CLASSES), nn.LayerNorm(32)),
    "Transformer": lambda: Stack(
        TransformerConv(WIDTH, 8, heads=4), TransformerConv(32, CLASSES), nn.Identity()
    ),
    "AGNN": lambda: Stack(SGConv(WIDTH, HIDDEN, K=2), AGNNConv(), nn.BatchNorm1d(HIDDEN)),
    "GAT with concatenation off": lambda: Stack(
        GATConv(WIDTH, 32, heads=2, concat=False), GATConv(32, CLASSES, heads=2), nn.Identity()
    ),
    "residual": Residual,
    "link prediction": Links,
    "pooling": Pooled,
}
PRECISIONS = ("fp32", "bf16", "int8")


def given(nodes: int = 90, edges: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """A graph with a hub, isolated nodes, self loops and duplicate edges."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(nodes - 5, (2, edges), generator=generator)
    edge_index[1, : edges // 5] = 3
    edge_index[:, -3:] = edge_index[:, :3]
    return torch.randn(nodes, WIDTH, generator=generator), edge_index


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-9))


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
def test_cpu_equals_reference(model, precision):
    arguments = given()
    eager = model(*arguments)
    results = {}
    for backend in ("cpu", "reference"):
        compiled = gnnc.compile(model, precision, backend=backend)
        results[backend] = compiled(*arguments)
    assert relative(results["reference"], eager) < {"fp32": 1e-5, "bf16": 0.02, "int8": 0.05}[precision]
    assert (
        relative(results["cpu"], results["reference"])
        < {"fp32": 1e-5, "bf16": 0.005, "int8": 0.01}[precision]
    )


@torch.no_grad()
def test_static_scales_on_the_cpu(model):
    arguments = given()
    compiled = gnnc.compile(model, "int8", backend="cpu", example_inputs=arguments)
    assert relative(compiled(*arguments), model(*arguments)) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_the_four_models_run_on_kernels_of_our_own(name):
    torch.manual_seed(0)
    compiled = gnnc.compile(MODELS[name]().eval(), "int8", backend="cpu")
    compiled(*given())
    fallbacks = [
        node
        for node in compiled.graph_module.graph.nodes
        if node.meta.get("kernel") == "reference" and node.meta["val"].dim() > 1
    ]
    assert not fallbacks, compiled.explain()


class Declines:
    """A kernel that is asked first and takes nothing."""

    @staticmethod
    def plan(node):
        return Decline("it is Sunday")

    @staticmethod
    def emit(plan, node, emitter):
        raise AssertionError("a kernel that declined was chosen")


@pytest.fixture
def kernels(monkeypatch):
    get_backend("cpu")
    copied = {name: list(entries) for name, entries in registry._KERNELS.items()}
    monkeypatch.setattr(registry, "_KERNELS", copied)
    return copied


@torch.no_grad()
def test_explain_names_the_kernels_that_declined(kernels):
    registry.kernel("fused:gemm", backend="cpu", name="picky", priority=99)(Declines)
    compiled = gnnc.compile(MODELS["GCN"]().eval(), "int8", backend="cpu")
    compiled(*given())
    assert "kernel picky declined: it is Sunday" in compiled.explain()


@torch.no_grad()
@pytest.mark.parametrize("absent", ["gemm", "spmm", "attention", "map"])
def test_without_a_kernel_its_submodules_are_taken_apart(kernels, absent):
    kernels["cpu"] = [entry for entry in kernels["cpu"] if entry.name != absent]
    torch.manual_seed(0)
    model = MODELS["GAT" if absent == "attention" else "GCN"]().eval()
    compiled = gnnc.compile(model, "int8", backend="cpu", example_inputs=given())
    assert relative(compiled(*given()), model(*given())) < 0.05
    if absent != "map":
        assert "taken apart, no kernel runs it as a whole" in compiled.explain()


@torch.no_grad()
def test_memory_is_flat_over_mini_batches():
    torch.manual_seed(0)
    compiled = gnnc.compile(MODELS["GAT"]().eval(), "int8", backend="cpu")
    compiled(*given(300, 2000))
    program, held = compiled._last, set()
    for i in range(40):
        compiled(*given(100 + i % 7, 400 + i))
        held.add((program.executable.arena_bytes, len(program.runner.cache) <= 3))
    assert compiled._last is program and len(held) == 1
    compiled.clear_cache()
    assert program.executable.arena_bytes == 0 and len(program.runner.cache) == 0


class Halves(nn.Module):
    """Row-local ops that begin with rows of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.to(self.dtype).float()) * 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(dtype, backend):
    model, x = Halves(dtype), given()[0]
    assert torch.equal(gnnc.compile(model, "fp32", backend=backend)(x), model(x))
