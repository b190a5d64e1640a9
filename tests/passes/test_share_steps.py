"""Steps that several bodies of gradients share are computed once and stored; the gradients stay the same."""

from collections.abc import Iterator
from dataclasses import replace

import edge_layers
import pytest
import torch
from raised import nasty_graphs
from torch import Tensor, fx, nn
from torch_geometric.nn import CGConv, GINEConv
from torch_geometric.utils import scatter
from traced import relative_error

import gnnc
from gnnc.ir.body import body_operands, parse_body
from gnnc.ir.nodes import argument, op_name
from gnnc.passes.share_steps import Member, SharedSteps
from gnnc.runtime import backend as backends
from gnnc.runtime.backend import get_backend

NODES, EDGES, WIDTH, FEATURES = 40, 300, edge_layers.WIDTH, edge_layers.FEATURES
GRAPHS = nasty_graphs()
BODIES = ("edge_map", "message", "edge_sum")


@pytest.fixture(autouse=True)
def storing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the reference backend as one that stores steps, and has products of 16 bits in bodies."""
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))
    plain = get_backend("reference")
    precisions = frozenset({"fp32", "fp16", "bf16"})
    target = replace(
        plain.target, name="storing", stored_steps=True, precisions=precisions, body_products=precisions
    )
    backends.register_backend("storing", lambda device: replace(plain, target=target))
    yield


class Maximum(nn.Module):
    """Maximum of an MLP on each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = edge_layers.mlp(2 * WIDTH + FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        return scatter(self.mlp(torch.cat([x[dst], x[src], attr], 1)), dst, 0, x.shape[0], "max")


class Scaled(nn.Module):
    """Sum of rows times a number of the edge: a body of few operations."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        return scatter((x[src] + x[dst]) * attr[:, :1].tanh(), dst, 0, x.shape[0], "sum")


class Gated(nn.Module):
    """Two layers without an op on the nodes between, so that bodies of one read sums of the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.gate = (
            nn.ModuleList([nn.Linear(FEATURES, 128), nn.Linear(FEATURES, 128)]) for _ in range(2)
        )
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128)) for _ in range(2)]
        )

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        x = torch.cat([x, x], 1)
        for edge, mlp, gate in zip(self.edge, self.mlp, self.gate, strict=True):
            x = scatter(mlp(x[src] + edge(attr)) * gate(attr), dst, 0, x.shape[0], "sum")
        return x


class Cosine(nn.Module):
    """Product of a value with the cosine of a large one, which is not rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.a.weight.mul_(300)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        t = self.a(torch.tanh(x[src] * x[dst]))
        return scatter(self.b(t) * torch.cos(t), dst, 0, x.shape[0], "sum")


LAYERS = {
    "mesh network": edge_layers.MeshGraphNet,
    "CG": lambda: CGConv(WIDTH, FEATURES),
    "GINE": lambda: GINEConv(edge_layers.mlp(WIDTH), edge_dim=FEATURES),
    "maximum": Maximum,
    "two layers": Gated,
}


def graph(edges: int = EDGES) -> Tensor:
    return torch.randint(NODES, (2, edges))


def rows(edge_index: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(nodes, WIDTH, requires_grad=True), torch.randn(edge_index.shape[1], FEATURES)


def step(
    model: nn.Module, precision: str, edge_index: Tensor, backend: str = "storing", nodes: int = NODES
) -> tuple[gnnc.CompiledModel, tuple[Tensor, ...]]:
    """Run a training step; return the compiled model, and the gradients of the rows and the parameters."""
    x, attr = rows(edge_index, nodes)
    compiled = gnnc.compile(model, precision=precision, backend=backend)
    loss = compiled(x, edge_index, attr).square().sum()
    return compiled, torch.autograd.grad(loss, [x, *model.parameters()])


def eager(model: nn.Module, edge_index: Tensor, nodes: int = NODES) -> tuple[Tensor, ...]:
    x, attr = rows(edge_index, nodes)
    return torch.autograd.grad(model(x, edge_index, attr).square().sum(), [x, *model.parameters()])


def ops(compiled: gnnc.CompiledModel, part: str = "backward") -> list[fx.Node]:
    """Return the ops of the last program that have bodies or reduce stored rows."""
    gm = dict(compiled._dispatch.last.parts.per_call())[part]
    return [node for node in gm.graph.nodes if op_name(node) in (*BODIES, "segment_reduce")]


def stored(compiled: gnnc.CompiledModel) -> list[fx.Node]:
    """Return the ``edge_map`` ops that the pass has made."""
    notes = compiled.explain()
    assert ("computed once for" in notes) == any(op_name(node) == "edge_map" for node in ops(compiled))
    return [node for node in ops(compiled) if op_name(node) == "edge_map"]


@pytest.mark.parametrize("name", ["mesh network", "CG", "maximum", "two layers"])
def test_steps_are_stored_and_gradients_stay(name: str) -> None:
    torch.manual_seed(0)
    model, edge_index = LAYERS[name](), graph()
    compiled, found = step(model, "fp32", edge_index)
    assert stored(compiled)
    for got, want in zip(found, eager(model, edge_index), strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("name", GRAPHS)
def test_gradients_on_nasty_graphs(name: str) -> None:
    torch.manual_seed(0)
    model, (nodes, edge_index) = edge_layers.MeshGraphNet(), GRAPHS[name]
    compiled, found = step(model, "fp32", edge_index, nodes=nodes)
    assert stored(compiled)
    for got, want in zip(found, eager(model, edge_index, nodes), strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["mesh network", "CG", "GINE"])
def test_rows_behind_products_of_16_bits_have_16_bits(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model, edge_index = LAYERS[name](), graph()
    compiled, found = step(model, precision, edge_index)
    dtypes = {node.meta["val"].dtype for node in stored(compiled)}
    assert dtypes & {torch.float16, torch.bfloat16}
    _, plain = step(model, precision, edge_index, "reference")
    for got, same, want in zip(found, plain, eager(model, edge_index), strict=True):
        assert relative_error(got, want) < 2 * relative_error(same, want) + 2e-2


def test_what_a_cosine_depends_on_is_stored_in_its_own_dtype() -> None:
    torch.manual_seed(0)
    model, edge_index = Cosine(), graph()
    compiled, found = step(model, "bf16", edge_index)
    assert stored(compiled)
    for got, want in zip(found, eager(model, edge_index), strict=True):
        assert relative_error(got, want) < 2e-2


def test_sums_of_a_stored_value_are_segment_reductions() -> None:
    """By destination in order, and by source by the permutation of the edges, which is int32."""
    compiled, _ = step(LAYERS["CG"](), "fp32", graph())
    sums = [node for node in ops(compiled) if op_name(node) == "segment_reduce"]
    permutations = [argument(node, "perm") for node in sums]
    assert len(sums) == 4 and permutations.count(None) == 2
    assert all(perm is None or perm.meta["val"].dtype == torch.int32 for perm in permutations)
    assert "message" not in map(op_name, ops(compiled))


def test_what_a_comparison_reads_is_not_stored() -> None:
    compiled, _ = step(Maximum(), "fp32", graph())
    for node in stored(compiled):
        steps = parse_body(argument(node, "body")).graph.nodes
        reads = body_operands(node).values()
        assert "ne" in map(op_name, steps) or any(read in stored(compiled) for read in reads)


def test_a_body_of_few_operations_is_computed_again() -> None:
    compiled, found = step(Scaled(), "fp32", edge_index := graph())
    assert not stored(compiled)
    assert relative_error(found[0], eager(Scaled(), edge_index)[0]) < 1e-5


def test_other_backends_and_inference_are_left_alone() -> None:
    compiled, _ = step(LAYERS["CG"](), "fp32", graph(), "reference")
    assert "computed once for" not in compiled.explain()
    model = gnnc.compile(LAYERS["CG"]().eval(), precision="fp32", backend="storing")
    with torch.no_grad():
        model(torch.randn(NODES, WIDTH), graph(), torch.randn(EDGES, FEATURES))
    assert "computed once for" not in model.explain()


def operand(kind: str, name: str, graph: fx.Graph) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(WIDTH, WIDTH) if kind == "c" else torch.empty(EDGES, WIDTH)
    return node


PRODUCT = "t0 = aten.add.Tensor(i0, j0); t1 = gnnc.gemm.default(t0, c0, None, False); "


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        # the last value that all of them compute
        ([PRODUCT + "t2 = aten.relu.default(t1); return t2"] * 3, ["relu"]),
        (
            [PRODUCT + f"t2 = aten.{name}.default(t1); return t2" for name in ("relu", "tanh", "exp")],
            ["gemm"],
        ),
        # two do not make up for writing it, in FP32
        ([PRODUCT + "t2 = aten.relu.default(t1); return t2"] * 2, []),
        # operands of a comparison, and all values that they are computed from, stay in the bodies
        (
            [
                PRODUCT + "t2 = aten.eq.Tensor(t1, i0); t3 = aten._to_copy.default(t2, dtype=torch.float32); "
                "return t3",
                PRODUCT + "t2 = aten.tanh.default(t1); return t2",
                PRODUCT + "t2 = aten.exp.default(t1); return t2",
            ],
            [],
        ),
        # cheap
        (["t0 = aten.add.Tensor(i0, j0); return t0"] * 5, []),
    ],
)
def test_which_values_are_stored(texts: list[str], names: list[str]) -> None:
    graph = fx.Graph()
    i, j, c = (operand(kind, kind, graph) for kind in "ijc")
    members = [Member(graph.placeholder("op"), text, ([i], [j], [], [c]), by_source=False) for text in texts]
    found = SharedSteps(members)
    assert [op_name(node) for node in found.stored] == names
    assert set(found.readers_of_stored()) == (set(range(len(texts))) if names else set())
