"""Receptive-field gain against cases computed by hand, one of them the thesis's own table 7.1."""

import math

import pytest
import torch
from gnn_graphs import MODELS, Layers, arguments, gat, gcn

from gnnc.cost.receptive_field import Hop, assumed_reach, count_reach, gain, mean_within, receptive_gains

aten = torch.ops.aten


def test_the_thesis_table_7_1() -> None:
    """Convolutions over 8 x 8 x 128: 3DRF 1152, 3200, 6272 and gains 1.17, 0.29."""
    volume = 8 * 8 * 128
    assert gain(1152, 3200, volume) == pytest.approx(1.17, abs=0.005)
    assert gain(3200, 6272, volume) == pytest.approx(0.29, abs=0.011)


def test_nothing_new_is_no_gain() -> None:
    assert gain(100.0, 100.0, 1000.0) == 0


def path_graph(n: int = 5):
    """0 -> 1 -> 2 -> 3 -> 4, as a CSR by destination."""
    src, dst = torch.arange(n - 1), torch.arange(1, n)
    rowptr, col, _ = torch.ops.gnnc.csr(src, dst, n, n)
    return rowptr, col


def test_nodes_within_hops_of_a_path() -> None:
    graph = path_graph()
    # one hop: node 0 sees itself, the others themselves and the node before: (1 + 2 * 4) / 5
    assert mean_within([graph]) == pytest.approx(9 / 5)
    # two hops: 1, 2, 3, 3, 3
    assert mean_within([graph, graph]) == pytest.approx(12 / 5)
    assert mean_within([graph] * 9) == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)


def test_a_graph_without_edges_or_nodes() -> None:
    assert mean_within([(torch.zeros(4, dtype=torch.long), torch.empty(0, dtype=torch.int32))]) == 1
    assert mean_within([(torch.zeros(1, dtype=torch.long), torch.empty(0, dtype=torch.int32))]) == 1


def test_samples_are_evenly_spread() -> None:
    # of nodes 0 and 4 of the path: (1 + 2) / 2
    assert mean_within([path_graph()], samples=2) == pytest.approx(1.5)


def test_assumed_reach() -> None:
    reach = assumed_reach(1000, 10)
    hop = Hop(*[torch.fx.Graph().placeholder("a")] * 2)
    assert [reach((hop,) * k) for k in range(4)] == [1, 11, 111, 1000]


def gains_of(gm, reach=None, nodes=100.0):
    found = receptive_gains(gm, reach or assumed_reach(nodes, 4), nodes)
    return [(str(n.target).split(".")[1], round(g, 6)) for n, g in found.items()]


def test_a_gcn() -> None:
    """Linear sees all 32 channels, the SpMM 5 nodes, the next linear nothing new, the last SpMM 21."""
    volume = 100 * 32
    first = (5 - 1) / 1 * math.exp(-3 * 32 / volume)
    last = (21 - 5) / 5 * math.exp(-3 * 5 * 32 / volume)
    assert gains_of(gcn()) == [("spmm", round(first, 6)), ("gemm", 0.0), ("spmm", round(last, 6))]


def test_an_op_on_the_input_itself_has_no_gain() -> None:
    b = Layers(8)
    assert gains_of(b.finish(b.linear(b.x, 4), b.spmm(b.x))) == []


def test_an_aggregation_leaves_the_channels_alone() -> None:
    """A linear after an SpMM of the input: from 5 nodes of one channel to 5 nodes of all 8."""
    b = Layers(8)
    gm = b.finish(b.linear(b.spmm(b.x), 4))
    assert gains_of(gm) == [("gemm", round((40 - 5) / 5 * math.exp(-3 * 5 / 800), 6))]


def test_a_concatenation_adds_channels_up_to_those_of_the_input() -> None:
    b = Layers(8)
    both = b.call(aten.cat, [b.spmm(b.x), b.spmm(b.x)], 1)
    gm = b.finish(b.linear(both, 4))
    assert gains_of(gm) == [("gemm", round((5 * 8 - 5 * 2) / 10 * math.exp(-3 * 10 / 800), 6))]
    many = Layers(2)
    wide = many.call(aten.cat, [many.spmm(many.x)] * 5, 1)
    assert gains_of(many.finish(many.linear(wide, 4))) == [("gemm", 0.0)]


def test_attention_sees_one_hop_and_not_two() -> None:
    found = receptive_gains(gat(), assumed_reach(100, 4), 100)
    values = {str(n.target).split(".")[1]: g for n, g in found.items() if n.meta["layer"] == "conv1"}
    assert values["spmm"] == pytest.approx(values["sddmm"]) and values["spmm"] > 3
    assert values["edge_softmax"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_on_a_real_graph(name) -> None:
    gm = MODELS[name]()
    nodes = dict(zip(gm.graph.find_nodes(op="placeholder"), arguments(gm), strict=True))
    found = receptive_gains(gm, count_reach(nodes), 30.0)
    assert found and all(math.isfinite(g) and g >= 0 for g in found.values())
