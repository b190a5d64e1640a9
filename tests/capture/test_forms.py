"""The forms in which a graph is given, and models that change between calls."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_geometric.nn as pyg
from compare import capture_count
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData

import gnnc

NODES, WIDTH = 50, 12


def graph(nodes: int = NODES, edges: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.factor = pyg.GCNConv(WIDTH, 16), pyg.SAGEConv(16, 5), 2

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index) * self.factor


class OfData(Net):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GINConv(nn.Linear(WIDTH, 8))

    def forward(self, data):
        return pyg.global_add_pool(self.conv(data.x, data.edge_index), data.batch, size=data.num_graphs)


class OfHetero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv(
            {
                ("paper", "cites", "paper"): pyg.SAGEConv(WIDTH, 8),
                ("author", "writes", "paper"): pyg.SAGEConv((WIDTH, WIDTH), 8),
                ("author", "knows", "author"): pyg.SAGEConv(WIDTH, 8),
            }
        )

    def forward(self, data):
        return self.conv(data.x_dict, data.edge_index_dict)["paper"]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def assert_same(compiled, model, *arguments) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), model(*arguments), rtol=1e-4, atol=1e-4)


def test_data():
    model = made(OfData)
    compiled = gnnc.compile(model, "fp32")
    for sizes in ((50, 300), (31, 90), (7, 0)):
        x, edge_index = graph(*sizes)
        assert_same(compiled, model, Data(x=x, edge_index=edge_index, y=torch.zeros(sizes[0]).long()))
    assert capture_count(compiled) == 1
    x, edge_index = graph()
    edge_index[0, 3] = NODES
    with pytest.raises(gnnc.GraphError, match=r"edge_index.*\[0, 3\] = 50"), torch.no_grad():
        compiled(Data(x=x, edge_index=edge_index, y=torch.zeros(NODES).long()))


def test_batches():
    model = made(OfBatch)
    compiled = gnnc.compile(model, "fp32")
    for seed, sizes in enumerate([(7, 8, 9), (5, 4, 12)]):
        graphs = [Data(*graph(nodes, 20, seed)) for nodes in sizes]
        assert_same(compiled, model, Batch.from_data_list(graphs))
    assert capture_count(compiled) == 1


def test_hetero_data():
    model = made(OfHetero)
    compiled = gnnc.compile(model, "fp32")
    for papers, authors in ((50, 9), (20, 21)):
        data = HeteroData()
        data["paper"].x, data["paper", "cites", "paper"].edge_index = graph(papers)
        data["author"].x, data["author", "knows", "author"].edge_index = graph(authors, 40)
        ends = torch.randint(authors, (30,)), torch.randint(papers, (30,))
        data["author", "writes", "paper"].edge_index = torch.stack(ends)
        assert_same(compiled, model, data)
    assert capture_count(compiled) == 1


def test_an_object_of_another_kind_is_refused():
    class Box:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(gnnc.InputError, match="argument data is a Box.*pass its tensors"), torch.no_grad():
        gnnc.compile(made(OfData))(Box())


def test_bipartite_pairs():
    torch.manual_seed(0)
    model = pyg.SAGEConv((WIDTH, WIDTH), 8).eval()
    compiled = gnnc.compile(model, "fp32")
    for sources, targets in ((50, 20), (40, 19), (7, 7)):
        ends = torch.randint(sources, (60,)), torch.randint(targets, (60,))
        pair = torch.randn(sources, WIDTH), torch.randn(targets, WIDTH)
        assert_same(compiled, model, pair, torch.stack(ends))
    assert capture_count(compiled) == 1


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [pyg.SAGEConv, pyg.GraphConv, pyg.GATConv])
def test_bipartite_pairs_with_their_sizes(kind):
    torch.manual_seed(0)
    model = kind((WIDTH, WIDTH), 8, **({"add_self_loops": False} if kind is pyg.GATConv else {})).eval()
    compiled = gnnc.compile(model, "fp32")
    for sources, targets in ((50, 20), (6, 3), (7, 7)):
        edge_index = torch.stack([torch.randint(sources, (60,)), torch.randint(targets, (60,))])
        pair = torch.randn(sources, WIDTH), torch.randn(targets, WIDTH)
        with torch.no_grad():
            got, expected = (call(pair, edge_index, size=(sources, targets)) for call in (compiled, model))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            if targets < sources:
                edge_index[1, 4] = targets
                with pytest.raises(gnnc.GraphError, match=r"edge_index\[1, 4\]"):
                    compiled(pair, edge_index, size=(sources, targets))


class Attention(nn.Module):
    """Gives the edges back that a layer made, its weights on them, and scores of the caller's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score = pyg.GATConv(WIDTH, 4, heads=2), nn.Linear(16, 3)

    def forward(self, x, edge_index):
        out, (with_loops, alpha) = self.conv(x, edge_index, return_attention_weights=True)
        ends = torch.cat([out[edge_index[0]], out[edge_index[1]]], 1)
        return {"out": out, "edges": with_loops, "alpha": alpha, "scores": self.score(ends)}


@torch.no_grad()
def test_results_at_edges_are_in_the_callers_order():
    model = made(Attention)
    compiled = gnnc.compile(model, "fp32")
    for nodes, edges in ((50, 300), (31, 90), (7, 0)):
        arguments = graph(nodes, edges)
        got, expected = compiled(*arguments), model(*arguments)
        assert torch.equal(got.pop("edges"), expected.pop("edges"))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_of_bipartite_pairs_in_the_callers_order():
    torch.manual_seed(0)
    model = pyg.TransformerConv((WIDTH, WIDTH), 4, heads=2).eval()
    compiled = gnnc.compile(model, "fp32")
    for sources, targets in ((50, 20), (13, 31)):
        ends = torch.randint(sources, (60,)), torch.randint(targets, (60,))
        pair = torch.randn(sources, WIDTH), torch.randn(targets, WIDTH)
        options = {"edge_index": torch.stack(ends), "return_attention_weights": True}
        torch.testing.assert_close(compiled(pair, **options), model(pair, **options), rtol=1e-4, atol=1e-5)


# models that change


def replace_layer(model: Net) -> None:
    model.last = pyg.GraphConv(16, 7).eval()


def add_hook(model: Net) -> None:
    model.first.register_forward_hook(lambda module, arguments, result: result * 2)


def add_pre_hook(model: Net) -> None:
    model.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2, arguments[1]))


def change_constant(model: Net) -> None:
    model.factor = 5


class Holds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tensor, self.numbers, self.named = torch.tensor(2.0), [3.0], {"scale": 0.5}

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.tensor * self.numbers[0] * self.named["scale"]


def test_another_tensor_list_or_dict_of_a_module_is_seen():
    model = made(Holds)
    compiled = gnnc.compile(model, "fp32")
    assert_same(compiled, model, *graph())
    for name, value in (("tensor", torch.tensor(-1.0)), ("numbers", [7.0]), ("named", {"scale": 4.0})):
        setattr(model, name, value)
        assert_same(compiled, model, *graph())
    model.numbers = [7.0]
    assert_same(compiled, model, *graph())
    assert capture_count(compiled) == 4


def freeze(model: Net) -> None:
    model.requires_grad_(False)


@pytest.mark.first(1)
@pytest.mark.parametrize("change", [replace_layer, add_hook, add_pre_hook, change_constant, freeze])
def test_changes_of_the_model_are_seen(change):
    model = made(Net)
    compiled = gnnc.compile(model, "fp32")
    assert_same(compiled, model, *graph())
    change(model)
    assert_same(compiled, model, *graph())
    assert_same(compiled, model, *graph(31, 90))
    assert capture_count(compiled) == (1 if change is freeze else 2)


def test_a_hook_that_goes_is_seen():
    model = made(Net)
    hook = model.first.register_forward_hook(lambda module, arguments, result: result * 2)
    compiled = gnnc.compile(model, "fp32")
    assert_same(compiled, model, *graph())
    hook.remove()
    assert_same(compiled, model, *graph())


def test_tables_of_hooks_that_are_replaced_are_seen():
    model = made(Net)
    add_hook(model)
    compiled = gnnc.compile(model, "fp32")
    assert_same(compiled, model, *graph())
    model.first._forward_hooks = OrderedDict()
    assert_same(compiled, model, *graph())
    add_hook(model)
    assert_same(compiled, model, *graph())


def test_half_is_refused():
    model = made(Net)
    compiled = gnnc.compile(model, "fp32")
    assert_same(compiled, model, *graph())
    model.half()
    with pytest.raises(gnnc.UnsupportedError, match=r"\.float\(\)"), torch.no_grad():
        compiled(*graph())


@torch.no_grad()
def test_autocast_has_a_program_of_its_own():
    model = made(Net)
    compiled = gnnc.compile(model, "fp32")
    plain = compiled(*graph())
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(*graph()), compiled(*graph())
    assert got.dtype == expected.dtype
    assert (got.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()
    assert torch.equal(compiled(*graph()), plain)


@torch.no_grad()
def test_four_threads_equal_one():
    model = made(Net)
    compiled = gnnc.compile(model, "int8")
    graphs = [graph(20 + 7 * seed, 100 + 13 * seed, seed) for seed in range(8)]
    expected = [compiled(*arguments) for arguments in graphs]

    def work(start: int) -> None:
        for step in range(40):
            number = (start + step) % len(graphs)
            assert torch.equal(compiled(*graphs[number]), expected[number])

    in_four_threads(work)


class Scaled(Net):
    """Captured again for each factor."""

    def forward(self, x, edge_index, factor=1):
        return super().forward(x, edge_index) * factor


def in_four_threads(work: Callable[[int], None]) -> None:
    """Run ``work(number of the thread)`` in four threads at once; their errors are raised."""
    start = threading.Barrier(4)

    def begin(number: int) -> None:
        start.wait()
        with torch.no_grad():
            work(number)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(begin, number) for number in range(4)]:
            done.result()


@torch.no_grad()
def test_four_first_calls_at_once_equal_one():
    model = made(Scaled)
    alone, shared = gnnc.compile(model, "int8"), gnnc.compile(model, "int8")
    graphs = [graph(20 + 7 * seed, 100 + 13 * seed, seed) for seed in range(4)]
    expected = [alone(*arguments) for arguments in graphs]
    got: dict[int, Tensor] = {}
    in_four_threads(lambda number: got.__setitem__(number, shared(*graphs[number])))
    assert all(torch.equal(got[number], expected[number]) for number in range(4))
    assert capture_count(shared) == 1


@pytest.mark.slow
@torch.no_grad()
def test_captures_in_one_thread_do_not_disturb_calls_in_others():
    """Two compilations of one model: one is captured again and again, the other has new graphs meanwhile."""
    model = made(Scaled)
    compiled, other = gnnc.compile(model, "int8"), gnnc.compile(model, "fp32")
    graphs = [graph(20 + seed, 100 + 3 * seed, seed) for seed in range(60)]
    expected = [compiled(*arguments) for arguments in graphs]
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            for factor in (2.0, 3.0, 4.0):
                torch.testing.assert_close(
                    other(*graphs[0], factor), model(*graphs[0], factor), rtol=1e-4, atol=1e-4
                )
            done.set()
        while not done.is_set():
            for arguments, wanted in zip(graphs, expected, strict=True):
                x, edge_index = arguments
                assert torch.equal(compiled(x, edge_index.clone()), wanted)

    in_four_threads(work)
    assert capture_count(compiled) == 1
    assert capture_count(other) == 3
