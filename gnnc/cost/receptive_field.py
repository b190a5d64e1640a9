"""Receptive-field gain of each op of a graph network, after 3DRF.

The 3D receptive field of an op is the number of input elements that one element of its result
depends on (UCSB thesis 2024, section 7.3): here the mean number of nodes within the hops so far,
times the number of channels that reach it. Its gain (equation 7.7) is how much more an op sees
than its operand did, less where nearly all has been seen already.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, operand, shape_or_none
from gnnc.ir.op import op_of
from gnnc.ir.source import source_of

ALPHA = 3.0
"""The decay of equation 7.7; the thesis uses 3 throughout."""

SAMPLES = 256
"""Nodes of the graph from which neighbors are counted."""

_SAMPLES_AT_ONCE = 64


def gain(before: float, after: float, volume: float, alpha: float = ALPHA) -> float:
    """Return the gain of equation 7.7, ``(after - before) / before * exp(-alpha * before / volume)``.

    Args:
        before: number of input elements that an element of the op's operand depends on (3DRF of layer k-1),
            above 0.
        after: number of input elements that an element of its result depends on (3DRF of layer k).
        volume: number of elements of the model's input, V0.
        alpha: the decay.
    """
    return (after - before) / before * math.exp(-alpha * before / volume)


@dataclass(frozen=True, slots=True)
class Hop:
    """Aggregation over a CSR, after which a destination depends on the rows of its sources.

    Attributes:
        rowptr: node of the row pointers.
        col: node of the source ids.
    """

    rowptr: Node
    col: Node


@dataclass(frozen=True, slots=True)
class Field:
    """Inputs that one element of a tensor depends on.

    Attributes:
        hops: the steps along edges from the input to it, in order.
        channels: how many channels of the input reach it.
    """

    hops: tuple[Hop, ...] = ()
    channels: int = 1


Reach = Callable[[tuple[Hop, ...]], float]
"""Function from hops to the mean number of nodes that a node reaches by them."""


def receptive_gains(gm: GraphModule, reach: Reach, nodes: float) -> dict[Node, float]:
    """Return the gain of every primitive that reads a computed value.

    Channels follow equation 7.6 with these properties: a linear layer sees all c0 channels of the
    input, an aggregation leaves them as they are, a concatenation adds them up, all capped at c0.
    An op that reads the model's input itself has no gain: equation 7.7 divides by the values seen
    before it, and there are none (the first row of the thesis's table 7.1).

    Args:
        gm: a graph of primitives.
        reach: the number of nodes within some hops, see ``count_reach`` and ``assumed_reach``.
        nodes: the number of nodes of the graph.
    """
    c0 = _input_channels(gm)
    fields: dict[Node, Field | None] = {}
    gains: dict[Node, float] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or not _is_floating(node):
            fields[node] = Field() if _is_feature(node) else None
            continue
        seen = {n: f for n in node.all_input_nodes if (f := fields.get(n)) is not None}
        fields[node] = after = _field(node, seen, c0) if seen else None
        if after is None or op_of(node) is None or Field() in seen.values():
            continue
        # The operand that saw least passes through: attention weights only scale it.
        before = min(reach(f.hops) * f.channels for f in seen.values())
        gains[node] = gain(before, reach(after.hops) * after.channels, nodes * c0)
    return gains


def _is_feature(node: Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind == "input" and _is_floating(node)


def _is_floating(node: Node) -> bool:
    """Return whether a node holds floating values: sizes and ids depend on no feature."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, Tensor) and item.is_floating_point() for item in values)


def _input_channels(gm: GraphModule) -> int:
    """Return c0: channels of all floating inputs."""
    total = 0
    for node in filter(_is_feature, placeholders(gm)):
        shape = shape_or_none(node) or ()
        total += math.prod(size for size in shape[1:] if isinstance(size, int))
    return max(total, 1)


def _field(node: Node, seen: Mapping[Node, Field], c0: int) -> Field:
    op = op_of(node)
    hops = max((f.hops for f in seen.values()), key=len)
    channels = max(f.channels for f in seen.values())
    if op is not None and op.kind == "dense":
        channels = c0
    elif str(node.target).startswith("aten.cat"):
        parts = argument(node, "tensors")
        channels = min(sum(seen[part].channels for part in parts if part in seen), c0)
    if op is not None and op.crosses_edges:
        hops = _one_more(node, seen)
    return Field(hops, channels)


def _one_more(node: Node, seen: Mapping[Node, Field]) -> tuple[Hop, ...]:
    """Hops of an op along edges: its node operands are one step away, its edge operands are not."""
    rowptr, col = operand(node, "rowptr"), operand(node, "col")
    edge_operands = [argument(node, "value", None), *argument(node, "edge", ())]
    ways = [
        field.hops if source in edge_operands else (*field.hops, Hop(rowptr, col))
        for source, field in seen.items()
    ]
    return max(ways, key=len)


def assumed_reach(nodes: float, edges_per_node: float) -> Reach:
    """Return the reach on an assumed graph, where each hop multiplies by the mean degree."""

    def reach(hops: tuple[Hop, ...]) -> float:
        return min(nodes, sum(edges_per_node**k for k in range(len(hops) + 1)))

    return reach


def count_reach(values: Mapping[Node, Any], samples: int = SAMPLES) -> Reach:
    """Return the reach on a real graph, counted from evenly spread nodes.

    Args:
        values: the tensor of each CSR operand.
        samples: number of nodes that the count starts from.
    """
    known: dict[tuple[Hop, ...], float] = {(): 1.0}

    def reach(hops: tuple[Hop, ...]) -> float:
        if hops not in known:
            graphs = [(values[hop.rowptr], values[hop.col]) for hop in hops]
            known[hops] = mean_within(graphs, samples)
        return known[hops]

    return reach


def mean_within(graphs: Sequence[tuple[Tensor, Tensor]], samples: int = SAMPLES) -> float:
    """Return the mean number of nodes from which a row of the last CSR can be reached.

    A node counts as its own neighbor where sources and destinations are one set.

    Args:
        graphs: (rowptr int64 ``[num_dst + 1]``, col ``[E]``) for each hop, the first one nearest to
            the input.
        samples: rows of the last CSR to count for, evenly spread.
    """
    rows = graphs[-1][0].numel() - 1
    if rows <= 0:
        return 1.0
    graphs = [(rowptr.cpu(), col.cpu()) for rowptr, col in graphs]
    picked = torch.linspace(0, rows - 1, min(samples, rows)).long().unique()
    total = 0
    for chunk in picked.split(_SAMPLES_AT_ONCE):
        seen = torch.zeros(rows, chunk.numel())
        seen[chunk, torch.arange(chunk.numel())] = 1
        for rowptr, col in reversed(graphs):
            seen = _step_back(rowptr, col, seen)
        total += int(seen.sum())
    return total / picked.numel()


def _step_back(rowptr: Tensor, col: Tensor, seen: Tensor) -> Tensor:
    """Mark the sources of every marked row: ``[num_dst, S]`` to ``[num_src, S]`` of 0 and 1."""
    rows = torch.repeat_interleave(torch.arange(rowptr.numel() - 1), rowptr.diff())
    size = max(seen.shape[0], int(col.max()) + 1 if col.numel() else 0)
    back = torch.zeros(size, seen.shape[1])
    back[: seen.shape[0]] = seen
    order = torch.argsort(col, stable=True)
    ends = torch.bincount(col, minlength=size).cumsum(0)
    pointers = torch.cat([ends.new_zeros(1), ends])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        transposed = torch.sparse_csr_tensor(
            pointers, rows[order], torch.ones(col.numel()), (size, seen.shape[0]), check_invariants=False
        )
        return ((transposed @ seen + back) > 0).float()
