"""Groups of nodes never make a cycle, whichever of their nodes joins last."""

import pytest
import torch
from torch import fx

from gnnc.passes.rewrite.grouping import Partition, contract


def _chain() -> tuple[fx.Graph, list[fx.Node]]:
    """Return a graph of three ops, each of which reads the one before, and the ops."""
    graph = fx.Graph()
    node, ops = graph.placeholder("x"), []
    for _ in range(3):
        node = graph.call_function(torch.relu, (node,))
        node.meta["val"] = torch.empty(1)
        ops.append(node)
    graph.output(node)
    return graph, ops


@pytest.mark.parametrize("backwards", [False, True])
def test_both_ends_of_a_chain_do_not_join_without_its_middle(backwards: bool) -> None:
    graph, (first, middle, last) = _chain()
    partition = Partition()
    ends = [last, first] if backwards else [first, last]
    group = partition.start("map", ends[0])
    assert partition.add(group, ends[:1])
    assert partition.would_cycle(group, ends[1])
    assert not partition.add(group, ends[1:])
    assert partition.add(group, [middle, ends[1]])
    joined = contract(fx.GraphModule(torch.nn.Module(), graph), partition)
    assert joined(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_a_group_that_another_group_reads_through_is_seen() -> None:
    graph, (first, middle, last) = _chain()
    partition = Partition()
    other = partition.start("map", middle)
    assert partition.add(other, [middle])
    group = partition.start("map", last)
    assert partition.add(group, [last])
    assert partition.would_cycle(group, first)
