"""Ints and sizes that change between calls: one program, or a named reason for another."""

import logging
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, SAGEConv, global_add_pool
from torch_geometric.utils import trim_to_layer

import gnnc
from gnnc.compiler.captures import CaptureLog

WIDTH = 6


def compiled_of(model: nn.Module):
    return gnnc.compile(model.eval(), "fp32")


def assert_same(compiled, *arguments) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), compiled.model(*arguments), rtol=1e-4, atol=1e-4)


def captures(compiled) -> list[str]:
    return compiled._dispatch.captures


def graph(nodes: int, edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, WIDTH, generator=generator), torch.randint(
        nodes, (2, edges), generator=generator
    )


def sampled(seed: int) -> Data:
    """Return a batch as NeighborLoader gives it: nodes and edges by hop, seeds first."""
    numbers = random.Random(seed)
    nodes, edges, parts = [numbers.randint(1, 9)], [], []
    for _ in range(2):
        known, new = sum(nodes), numbers.randint(0, 9)
        edges.append(numbers.randint(1, 30))
        src = torch.tensor([numbers.randrange(known + new) for _ in range(edges[-1])])
        dst = torch.tensor([numbers.randrange(known) for _ in range(edges[-1])])
        parts.append(torch.stack([src, dst]))
        nodes.append(new)
    total = sum(nodes)
    return Data(
        x=torch.randn(total, WIDTH, generator=torch.Generator().manual_seed(seed)),
        edge_index=torch.cat(parts, 1),
        n_id=torch.arange(total),
        input_id=torch.arange(nodes[0]),
        batch_size=nodes[0],
        num_sampled_nodes=nodes,
        num_sampled_edges=edges,
    )


class Trimmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(WIDTH, 8), SAGEConv(8, 4)])

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        for layer, conv in enumerate(self.convs):
            x, edge_index, _ = trim_to_layer(
                layer, data.num_sampled_nodes, data.num_sampled_edges, x, edge_index
            )
            x = conv(x, edge_index)
        return x[: data.batch_size]


def test_sampled_batches_are_one_program():
    compiled = compiled_of(Trimmed())
    for seed in range(60):
        assert_same(compiled, sampled(seed))
    assert len(captures(compiled)) <= 3, captures(compiled)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 4)

    def forward(self, data):
        return global_add_pool(self.conv(data.x, data.edge_index), data.batch, data.num_graphs)


def test_numbers_of_graphs_are_one_program():
    compiled = compiled_of(Pooled())
    for count in (3, 5, 1, 4, 2):
        graphs = [Data(*graph(4 + seed, 9, seed)) for seed in range(count)]
        assert_same(compiled, Batch.from_data_list(graphs))
    assert len(captures(compiled)) <= 3, captures(compiled)


class Nodewise(nn.Module):
    """Sequences or batches of features of one graph: x [B, N, F]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).relu()


def test_every_dimension_of_x_may_vary():
    compiled = compiled_of(Nodewise())
    for batch, nodes in ((3, 20), (3, 31), (5, 12), (2, 40), (4, 4)):
        assert_same(compiled, torch.randn(batch, nodes, WIDTH), graph(nodes, 60)[1])
    assert len(captures(compiled)) == 2, captures(compiled)


class Sliced(nn.Module):
    """Ints in lists and dicts, of which one is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 4)

    def forward(self, x, edge_index, chunks, more):
        x = self.conv(x, edge_index)
        return torch.cat([x[start:end] for start, end in chunks]) * more["factor"]


def test_ints_in_lists_and_dicts_are_one_program():
    compiled = compiled_of(Sliced())
    for nodes, cut, factor in ((30, 11, 2), (40, 7, 3), (50, 33, 4), (9, 5, 7)):
        more = {"factor": factor, "unread": nodes}
        assert_same(compiled, *graph(nodes, 70), [(0, cut), (cut, nodes)], more)
    assert len(captures(compiled)) <= 3, captures(compiled)


class Rolled(nn.Module):
    """Loop over the first dimension, or over a number, written in one of several ways."""

    def __init__(self, steps: Callable[[Tensor, int], Iterable[Tensor]]) -> None:
        super().__init__()
        self.conv, self.steps = GCNConv(WIDTH, WIDTH), steps

    def forward(self, x, edge_index, count):
        hidden = torch.zeros_like(x[0])
        for step in self.steps(x, count):
            hidden = self.conv(hidden + step, edge_index)
        return hidden


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "steps",
    [
        lambda x, count: (x[t] for t in range(x.size(0))),
        lambda x, count: x.unbind(0),
        lambda x, count: (x[0] * t for t in range(count)),
        pytest.param(lambda x, count: x, marks=pytest.mark.slow),
        pytest.param(lambda x, count: (part[0] for part in x.split(1)), marks=pytest.mark.slow),
    ],
)
def test_loops_are_captured_once_for_each_length(steps, monkeypatch):
    nodes_traced, export = [], torch.export.export

    def counted(entry, tensors, **options):
        program = export(entry, tensors, **options)
        nodes_traced.append(len(program.graph.nodes))
        return program

    monkeypatch.setattr(torch.export, "export", counted)
    compiled = compiled_of(Rolled(steps))
    for length, nodes in ((2, 20), (2, 13), (3, 16), (3, 30)):
        assert_same(compiled, torch.randn(length, nodes, WIDTH), graph(nodes, 60)[1], length)
    assert len(captures(compiled)) <= 4
    assert len(nodes_traced) == len(captures(compiled))  # other traces stop at the loop
    assert any("but was captured for 2" in reason or "a number" in reason for reason in captures(compiled))


class Constant(nn.Module):
    def forward(self, x, flag):
        return x * 2 if flag in (True, "a", 0.5, -3) else x


@pytest.mark.first(2)
@pytest.mark.parametrize("values", [(True, False), ("a", "b"), (0.5, 0.25), (-3, -4), (1, 1.0), (1, True)])
def test_constants_are_captured_each(values):
    compiled = compiled_of(Constant())
    for value in (*values, *values):
        assert_same(compiled, torch.randn(5, WIDTH), value)
    assert len(captures(compiled)) == len(set(map(repr, values)))


def test_reasons_are_logged_and_many_are_a_warning(caplog):
    compiled = compiled_of(Constant())
    with caplog.at_level(logging.INFO, "gnnc"):
        for value in range(8):
            assert_same(compiled, torch.randn(5, WIDTH), value + 0.5)
        assert len(caplog.records) == 7
        assert "flag has 7.5 as a constant, it had 6.5" in caplog.text
        with pytest.warns(UserWarning, match=r"Constant.*8 times.*flag has 8.5.*pass it as a tensor"):
            assert_same(compiled, torch.randn(5, WIDTH), 8.5)


class ReadsTwo(nn.Module):
    """Reads x and edge_index of a graph object; asks for one field that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 4)

    def forward(self, data):
        return self.conv(data.x, data.edge_index, data.get("edge_weight"))


class CountsNodes(ReadsTwo):
    """Lists the fields, as ``num_nodes`` does."""

    def forward(self, data):
        return super().forward(data) * data.num_nodes


@pytest.mark.first(1)
@pytest.mark.parametrize("model", [ReadsTwo, CountsNodes])
def test_fields_that_forward_does_not_read_are_no_guards(model):
    compiled = compiled_of(model())
    for seed, name in enumerate(("a", "b", "c", "d")):
        x, edge_index = graph(20 + seed, 60, seed)
        data = Data(
            x=x, edge_index=edge_index, name=name, names=[name] * seed, y=torch.zeros(seed + 2).long()
        )
        data.rate, data.count = 0.5 + seed, seed
        assert_same(compiled, data)
    if model is ReadsTwo:
        assert_same(compiled, Data(x=x, edge_index=edge_index, other=x.double()))
    assert len(captures(compiled)) == 1 if model is ReadsTwo else 2, captures(compiled)
    data.edge_weight = torch.rand(60)  # it asks for this one
    assert_same(compiled, data)


class ReadsConstant(ReadsTwo):
    def forward(self, data):
        return super().forward(data) * (2 if data.kind == "a" else 3)


def test_fields_that_forward_reads_are_guards():
    compiled = compiled_of(ReadsConstant())
    x, edge_index = graph(20, 60)
    for kind in ("a", "b", "a", "c"):
        assert_same(compiled, Data(x=x, edge_index=edge_index, kind=kind, name=kind))
    assert len(captures(compiled)) == 3
    assert "data['kind'] has 'c' as a constant" in captures(compiled)[-1]


def reasons(calls: Iterable[Callable[[Any], object]]) -> list[str]:
    """Return the reasons of the captures after the first, of calls of one compiled model."""
    compiled = gnnc.compile(TwoModes().eval(), "fp32")
    for call in calls:
        call(compiled)
    return captures(compiled)[1:]


class TwoModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = GCNConv(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.drop(self.norm(self.conv(x, edge_index, edge_weight)))


X, EDGES = graph(20, 60)


def evaluate(compiled: Any, *arguments: Tensor) -> None:
    with torch.no_grad():
        compiled(*(arguments or (X, EDGES)))


def evaluate_in_bf16(compiled: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        evaluate(compiled)


CHANGES = {
    "gradients": (lambda c: c(X, EDGES), "gradients are wanted"),
    "train": (lambda c: evaluate(c.train()), "the model is in train mode, it was in eval mode"),
    "a module": (
        lambda c: (c.model.drop.train(), evaluate(c)),
        "drop is in train mode, it was in eval mode",
    ),
    "two modules": (
        lambda c: (c.model.norm.train(), c.model.drop.train(), evaluate(c)),
        "norm is in train mode, it was in eval mode (2 of 6 modules changed)",
    ),
    "both": (
        lambda c: c.train()(X, EDGES),
        "the model is in train mode, it was in eval mode and gradients are wanted",
    ),
    "autocast": (evaluate_in_bf16, "autocast is bfloat16 on cpu, it was off"),
    "dtype": (lambda c: evaluate(c, X, EDGES.int()), "edge_index is int32, it was int64"),
    "an argument": (
        lambda c: evaluate(c, X, EDGES, torch.ones(60)),
        "edge_weight is a tensor, it was the constant None",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_reason_names_what_has_changed(name: str) -> None:
    call, expected = CHANGES[name]
    assert reasons([evaluate, call]) == [expected]


def test_the_reason_is_told_from_the_call_that_is_most_alike() -> None:
    found = reasons([evaluate, lambda c: c.train()(X, EDGES), lambda c: evaluate(c.eval(), X, EDGES.int())])
    assert found[-1] == "edge_index is int32, it was int64"


def test_gradients_of_an_argument_are_no_new_structure() -> None:
    found = reasons([lambda c: c(X, EDGES), lambda c: c(X.clone().requires_grad_(), EDGES)])
    assert found == ["gradients of other arguments are wanted"]


def test_the_same_leaves_in_another_container_are_another_structure() -> None:
    compiled = compiled_of(TakesPair())
    for pair in ((X, EDGES), [X, EDGES]):
        evaluate(compiled, pair)
    assert captures(compiled)[1:] == [
        "another structure of arguments: lists, tuples or dicts are nested otherwise"
    ]


class TakesPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor] | list[Tensor]) -> Tensor:
        x, edge_index = pair
        return x.relu()


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("edge_weight is a tensor, it was the constant None", "in every call, or in none"),
        ("gradients are wanted", "torch.no_grad"),
        ("drop is in train mode, it was in eval mode", "train() and eval()"),
        ("autocast is off, it was bfloat16 on cpu", "torch.autocast"),
        ("x is on cpu, it was on cuda:0", "device of the model"),
        ("x has 3 dimensions, it had 2", "same dimensions"),
        ("x is int32, it was int64", "one dtype"),
    ],
)
def test_advice_fits_the_reason(reason: str, advice: str) -> None:
    log = CaptureLog("Net")
    with pytest.warns(UserWarning, match=re.escape(advice)):
        for _ in range(9):
            log.add(reason)
