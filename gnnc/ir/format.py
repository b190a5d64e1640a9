"""Structure formats: the ways to store the edges of a graph for one family of kernels.

A format names the tensors that make it up, who builds them, what they take, and what a kernel that reads
them costs. The pass ``select_format`` chooses by that cost; where the cost depends on a graph that only a
call knows, the runtime asks the same cost for that graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NODE_BLOCK = 2048
"""Consecutive rows of a window table that a block of threads works on at a time."""
LEAST_NEAR = 0.5
"""Share of near edges below which a window costs more than it saves: it takes memory from L1, where far
sources then are not found."""
LEAST_USES = 24
"""Near edges for each row that is copied to a window, at least: with fewer, the copy takes what it saves.
Measured: docs/cuda-sparse-kernels.md."""


def window_rows(row_bytes: int) -> int:
    """Return how many rows of x, of so many bytes, the window of a node block holds: its first ones."""
    return NODE_BLOCK if row_bytes <= 64 else 1660


class Gather(NamedTuple):
    """Sizes of one gather along edges that the cost of a format depends on.

    Attributes:
        edges: number of edges.
        rows: number of destination nodes.
        near: number of edges whose source is in the window of their destination's node block.
        blocks: blocks of threads of a launch.
        row_bytes: bytes of a row of x.
    """

    edges: int
    rows: int
    near: int
    blocks: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the edges of a graph.

    Attributes:
        name: one word, as printed programs show it.
        parts: the tensors that make it up.
        builder: the op or function that builds it.
        edge_bytes: bytes that it takes for an edge.
        cost: reads of rows of x from memory, or as much time as so many take.
        rule: one clause that says when the format pays, for ``explain()``.
    """

    name: str
    parts: tuple[str, ...]
    builder: str
    edge_bytes: float
    cost: Callable[[Gather], float]
    rule: str

    def __str__(self) -> str:
        return self.name


def _one_read_an_edge(gather: Gather) -> float:
    return gather.edges


def _window_cost(gather: Gather) -> float:
    if gather.near < LEAST_NEAR * gather.edges:
        return float("inf")
    copied = (-(-gather.rows // NODE_BLOCK) + gather.blocks) * window_rows(gather.row_bytes)
    return gather.edges - gather.near + LEAST_USES * copied


CSR = Format(
    name="csr",
    parts=("rowptr int64 [rows + 1]", "col int32 [E]", "perm int64 [E]"),
    builder="gnnc.csr",
    edge_bytes=12,
    cost=_one_read_an_edge,
    rule="every kernel can read it",
)
"""Compressed sparse rows: ``rowptr`` says where the edges of each destination begin, ``col`` names the
source of each edge, and ``perm`` its position in the caller's list, where something is read by it.
``gnnc.csr`` builds it by a sort, once for each graph. It always pays: all other formats are made from it."""

CSR_TRANSPOSE = Format(
    name="csr_t",
    parts=("rowptr_t int64 [sources + 1]", "col_t int32 [E]", "perm_t int64 [E]"),
    builder="gnnc.csr_transpose",
    edge_bytes=12,
    cost=_one_read_an_edge,
    rule="sums go to the sources of edges",
)
"""Compressed sparse rows by source: ``rowptr_t``, ``col_t`` (destinations), and ``perm_t``, the position
of each edge in the CSR. ``gnnc.csr_transpose`` builds it by a second sort. It pays where values of edges
are added up to their sources."""

EDGE_LIST = Format(
    name="edges",
    parts=("row int32 [E]", "col int32 [E]"),
    builder="gnnc.runtime.cuda.formats.sort.rows_of",
    edge_bytes=8,
    cost=_one_read_an_edge,
    rule="each edge has a result of its own",
)
"""Both ends of every edge, in the order of the CSR: ``row`` beside ``col``. One kernel writes ``row``
from ``rowptr``. It pays where a result for each edge is computed by itself, so that nothing is added up
by row."""

RUN_TABLE = Format(
    name="runs",
    parts=("rowptr", "col", "entry int32 [entries, 4]", "run int32 [runs, 4]", "split int32 [slots, 4]"),
    builder="gnnc.runtime.cuda.formats.run_table.Draft",
    edge_bytes=4,
    cost=_one_read_an_edge,
    rule="it costs one read of a row for each edge",
)
"""A CSR with its edges cut into runs of about equal cost: rows of few edges share a run, rows of many are
split, and ``split`` says how their parts are joined. Kernels behind the sort write it, about 16 bytes a
row beside the CSR's 4 bytes an edge; the host waits once, for the sizes. It pays on every graph: no warp
waits for another one with a longer row."""

WINDOW_TABLE = Format(
    name="window",
    parts=("word int32 [words, 4]", "entry int32 [entries, 4]", "run int32 [runs, 4]", "split, begin, share"),
    builder="gnnc.runtime.cuda.formats.window_table.build_window_table",
    edge_bytes=4,
    cost=_window_cost,
    rule="at least half of the edges connect nearby ids, and enough of them share each source",
)
"""Edges by node block of ``NODE_BLOCK`` rows, near ones apart from far ones: sources of near edges are copied
to shared memory once for each node block, and are read there, with 2 bytes an edge; far edges take 4.
Kernels write it from the CSR, whose columns it then replaces. It pays for plain sums on large graphs most
of whose edges connect nearby ids."""


def cheapest(formats: Sequence[Format], gather: Gather) -> Format:
    """Return the format that costs least for a gather; of several, the last."""
    return min(reversed(formats), key=lambda found: found.cost(gather))
