"""Neighbor sampling in plain torch: what ``NeighborLoader`` yields, without the packages that it needs."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Sampler:
    """Samples neighbors of seed nodes, hop by hop (Hamilton et al., 2017).

    Args:
        edge_index: int64 ``[2, E]``.
        num_nodes: number of nodes.
        fan_out: neighbors a node, one number a hop; drawn with replacement, duplicates dropped.
        seed: of the generator.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, fan_out: Sequence[int], seed: int = 0) -> None:
        src, dst = edge_index
        self.src = src[torch.argsort(dst, stable=True)]
        self.rowptr = torch.zeros(num_nodes + 1, dtype=torch.long)
        self.rowptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
        self.num_nodes, self.fan_out = num_nodes, tuple(fan_out)
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nodes of a batch, seeds first, and its edges ``[2, e]`` in numbers within the batch."""
        return self.sample_by_hop(seeds)[:2]

    def sample_by_hop(self, seeds: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return what ``sample`` does, and how many nodes and edges each hop added, seeds first."""
        number = torch.full((self.num_nodes,), -1)
        nodes, frontier, edges, counts = seeds, seeds, [], [len(seeds)]
        number[nodes] = torch.arange(len(nodes))
        for fan in self.fan_out:
            src, dst = self._neighbors(frontier, fan)
            frontier = src[number[src] < 0].unique()
            number[frontier] = torch.arange(len(nodes), len(nodes) + len(frontier))
            nodes = torch.cat([nodes, frontier])
            counts.append(len(frontier))
            edges.append(torch.stack([number[src], number[dst]]))
        return nodes, torch.cat(edges, 1), counts, [hop.shape[1] for hop in edges]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of ``size`` seeds, epoch after epoch."""
        while True:
            order = torch.randperm(self.num_nodes, generator=self.generator)
            for start in range(0, self.num_nodes - size + 1, size):
                yield self.sample(order[start : start + size])

    def _neighbors(self, nodes: Tensor, fan: int) -> tuple[Tensor, Tensor]:
        start = self.rowptr[nodes][:, None]
        degree = self.rowptr[nodes + 1][:, None] - start
        place = torch.arange(fan).expand(len(nodes), fan)
        drawn = (torch.rand(len(nodes), fan, generator=self.generator) * degree).long()
        taken = (start + torch.where(degree <= fan, place, drawn))[place < degree]
        dst = nodes[:, None].expand(-1, fan)[place < degree]
        pairs = (dst * self.num_nodes + self.src[taken]).unique()
        return pairs % self.num_nodes, pairs // self.num_nodes
