"""Edges by node block: the tables here, on any machine; what kernels make of them in test_spmm.py."""

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import compiled_without_spills
from kernel_graphs import GRAPHS, Graph, random_graph

from gnnc.runtime.cuda.formats.run_table import Cut
from gnnc.runtime.cuda.formats.window_table import (
    NODE_BLOCK,
    NUMBERS,
    WINDOWS,
    Entries,
    Kernels,
    Sizes,
    WindowRuns,
    WindowTable,
    arrange,
    build_window_table,
    cut_rows,
    entries_of,
    find_sizes,
    pays,
    shared_bytes,
    sizes_of,
    slices_of,
)

CUTS = (Cut(1, 1), Cut(32, 16), Cut(64, 64), Cut(512, 128))
BLOCKS = 5
FAMILIES = {
    **GRAPHS,
    "several node blocks": lambda: random_graph(3 * NODE_BLOCK - 7, 2 * NODE_BLOCK + 9, 60_000),
}


def near_of(g: Graph, entries: Entries) -> torch.Tensor:
    """What count_near counts."""
    is_near = g.col.long() // NODE_BLOCK == g.dst() // NODE_BLOCK
    before = torch.cat([torch.zeros(1, dtype=torch.int64), is_near.cumsum(0)])
    return (before[entries.first + entries.edges] - before[entries.first]).int()


def count_entries(rowptr: torch.Tensor, cut: Cut) -> list[int]:
    """Entries, slots, and runs for both windows."""
    node_blocks = -(-(len(rowptr) - 1) // NODE_BLOCK)
    entries, slots, long, short = 0, 0, 0, [0] * node_blocks
    for row, degree in enumerate(rowptr.diff().tolist()):
        parts = 1
        if degree > cut.part:
            size = -(-degree // -(-degree // cut.part))
            parts = -(-degree // size)
            slots += parts
        entries += parts
        if degree <= cut.short and parts == 1:
            short[row // NODE_BLOCK] += 1
        else:
            long += parts
    return [entries, slots, *[long + sum(-(-n // entries_of(window)) for n in short) for window in WINDOWS]]


def reference_sizes(g: Graph, cut: Cut) -> Sizes:
    """Return the sizes that the device finds, with windows that hold whole node blocks."""
    near = int((g.col.long() // NODE_BLOCK == g.dst() // NODE_BLOCK).sum())
    return Sizes.of([*count_entries(g.rowptr, cut), near, near], g.num_edges, cut)


def table(g: Graph, cut: Cut) -> tuple[Entries, WindowRuns]:
    sizes = reference_sizes(g, cut)
    entries = cut_rows(g.rowptr, sizes)
    near = near_of(g, entries)
    return entries, arrange(entries, near, g.num_dst, BLOCKS, NODE_BLOCK, sizes)


@pytest.mark.first(3)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
def test_every_edge_of_every_row_has_a_place_of_its_own(name: str, cut: Cut) -> None:
    g = FAMILIES[name]()
    entries, runs = table(g, cut)
    place = runs.place.long()
    assert torch.equal(place.sort().values, torch.arange(len(place)))
    row, near, far, first = runs.entry.long().unbind(1)
    assert torch.equal(row[place], entries.row.long())
    assert torch.equal((near + far)[place], entries.edges.long())
    edges = torch.cat(
        [torch.arange(a, a + n) for a, n in zip(entries.first.tolist(), entries.edges.tolist(), strict=True)]
    )
    assert torch.equal(edges.sort().values, torch.arange(g.num_edges))
    assert torch.equal(entries.row.long().unique(), torch.arange(g.num_dst))
    words = (near + 7) // 8 + (far + 3) // 4
    assert torch.equal(first, words.cumsum(0) - words)
    assert int(words.sum()) <= runs.word.shape[0] <= int(words.sum()) + 2 * len(words)
    assert (entries.edges <= cut.part).all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
def test_runs_are_entries_of_one_node_block_and_blocks_share_them(name: str, cut: Cut) -> None:
    g = FAMILIES[name]()
    entries, runs = table(g, cut)
    first, count, slot, node_block = runs.run.long().unbind(1)
    assert torch.equal(first, count.cumsum(0) - count) and int(count.sum()) == runs.entry.shape[0]
    row, near, far, _ = runs.entry.long().unbind(1)
    assert torch.equal(row // NODE_BLOCK, node_block.repeat_interleave(count))
    assert (count <= 16).all()
    long = near + far > cut.short
    assert (count.repeat_interleave(count)[long] == 1).all()
    assert torch.equal(slot[slot >= 0].sort().values, torch.arange(runs.split.shape[0]))
    split, at, parts, _ = runs.split.long().unbind(1)
    of = torch.arange(len(split))
    assert ((at <= of) & (of < at + parts) & (parts > 1)).all()
    is_part = entries.part >= 0
    assert torch.equal(entries.part[is_part], of) and torch.equal(entries.row[is_part], split.int())
    _, number = split.unique_consecutive(return_counts=True)
    assert torch.equal(number.repeat_interleave(number), parts)
    node_blocks = -(-g.num_dst // NODE_BLOCK)
    assert runs.begin.tolist() == [int((node_block < s).sum()) for s in range(node_blocks + 1)]
    share = runs.share.long()
    assert (
        share[0] == 0 and share[-1] == len(count) and (share.diff() >= 0).all() and len(share) == BLOCKS + 1
    )


def test_blocks_get_about_the_same_work() -> None:
    _, runs = table(random_graph(20_000, 20_000, 400_000), Cut(512, 128))
    work = (runs.entry[:, 1] + runs.entry[:, 2] + 4).long()
    first = [*runs.run[:, 0].tolist(), len(work)]
    shares = [int(work[first[a] : first[b]].sum()) for a, b in zip(runs.share, runs.share[1:], strict=False)]
    assert max(shares) < 1.05 * int(work.sum()) / BLOCKS


def test_rows_of_a_run_take_about_as_many_steps() -> None:
    g = random_graph(20_000, 20_000, 800_000)
    _, runs = table(g, Cut(512, 128))
    _, near, far, _ = runs.entry.long().unbind(1)
    words = torch.stack([(near + 7) // 8, (far + 3) // 4])
    taken = sum(int(words[:, a : a + n].amax(1).sum()) * n for a, n, _, _ in runs.run.tolist() if n <= 8)
    assert taken < 1.1 * int(words.sum())


def test_it_pays_where_most_edges_are_near_and_each_source_has_several() -> None:
    products, reddit, arxiv = (2_449_029, 123_718_280), (232_965, 114_615_892), (169_343, 2_332_486)

    def paying(nodes: int, edges: int, share: float) -> list[int]:
        return [size for size in (64, 128, 256) if pays(int(share * edges), edges, nodes, 132, size)]

    assert paying(*products, 0.6) == paying(*reddit, 0.6) == [64, 128, 256]
    assert paying(*reddit, 0.49) == [] and paying(*arxiv, 0.8) == [] and paying(2000, 200_000, 1.0) == []


def test_a_window_holds_a_slice_of_each_row() -> None:
    assert [slices_of(size) for size in (4, 16, 33, 64, 65, 94, 128)] == [1] * 7
    assert [slices_of(size) for size in (129, 256, 257, 2408)] == [2, 2, 3, 19]
    assert shared_bytes(64) == 2049 * 64 + 16 and shared_bytes(256, "row") == 1661 * 128 + 1660 * 4 + 16
    assert [shared_bytes(size) // 2049 for size in (4, 16, 17, 32, 33)] == [16, 16, 32, 32, 64]
    assert shared_bytes(94) == shared_bytes(2408) == 1661 * 128 + 16


def test_a_launch_has_a_block_for_each_share() -> None:
    _, runs = table(GRAPHS["random"](), Cut(32, 16))
    given = WindowTable(runs, 77)
    assert (given.blocks, given.slots) == (BLOCKS, runs.split.shape[0]) and runs.split.numel()
    assert given.fields[-1] == 77 and len(given.fields) == 7


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    _, names = compiled_without_spills(architecture, Kernels)
    assert len(names) == 4


def in_order(odd: torch.Tensor, slot: int) -> bool:
    """Whether odd places come first in odd slots, even ones in even slots, both in turns where all share."""
    if slot >= 0:
        return torch.equal(odd, odd.sort(descending=slot == 1).values)
    pairs = int(min(odd.sum(), (1 - odd).sum())) // 8
    turns = torch.tensor([0, 1]).repeat(pairs).repeat_interleave(8)
    rest = odd[16 * pairs :]
    return torch.equal(odd[: 16 * pairs], turns) and torch.equal(rest, rest.sort().values)


@pytest.mark.parametrize("cut", CUTS)
def test_runs_of_narrow_rows_have_twice_as_many_entries(cut: Cut) -> None:
    g = FAMILIES["several node blocks"]()
    sizes = reference_sizes(g, cut)
    entries = cut_rows(g.rowptr, sizes)
    for window, together in zip(WINDOWS, (16, 8), strict=True):
        near = near_of(g, entries)
        runs = arrange(entries, near, g.num_dst, BLOCKS, window, sizes)
        count = runs.run[:, 1].long()
        assert int(count.sum()) == sizes.entries and int(count.max()) <= together
        assert count.numel() == sizes.runs_for(window)


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_of_a_new_graph_are_those_of_the_reference(name: str) -> None:
    """Also where there are edges of no row behind the others, as where a sort drops self loops."""
    g = FAMILIES[name]()
    row = torch.cat([g.dst(), torch.full((9,), g.num_dst)]).int().cuda()
    col = torch.cat([g.col, torch.full((9,), g.num_dst - 1, dtype=torch.int32)]).cuda()
    source = g.col.long()
    near = [
        int(((source // NODE_BLOCK == g.dst() // NODE_BLOCK) & (source % NODE_BLOCK < w)).sum())
        for w in WINDOWS
    ]
    for cut in CUTS:
        found = torch.zeros(NUMBERS, dtype=torch.int32, device="cuda")
        find_sizes(g.rowptr.cuda(), row, col, cut, found)
        assert found.tolist() == [*count_entries(g.rowptr, cut), *near]


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
def test_words_hold_the_sources(name: str, cut: Cut) -> None:
    g = FAMILIES[name]()
    rowptr, col = g.rowptr.cuda(), g.col.cuda()
    runs = build_window_table(rowptr, col, sizes_of(rowptr, col, cut), BLOCKS, NODE_BLOCK, always=True)
    assert runs is not None
    entries, want = table(g, cut)
    assert torch.equal(runs.entry.cpu(), want.entry)
    words, place = runs.word.cpu(), want.place.tolist()
    for first, count, at in zip(entries.first.tolist(), entries.edges.tolist(), place, strict=True):
        row, near, far, word = want.entry[at].tolist()
        source = g.col[first : first + count].long()
        is_near = source // NODE_BLOCK == row // NODE_BLOCK
        half = -(-near // 8)
        ids = words[word : word + half].flatten().view(torch.int16).long()
        assert torch.equal(ids[:near].sort().values, (1 + source[is_near] % NODE_BLOCK).sort().values)
        assert (ids[near:] == 0).all() and in_order(ids[:near] % 2, int(want.slot[at]))
        rest = words[word + half : word + half + -(-far // 4)].flatten().long()
        assert torch.equal(rest[:far], source[~is_near]) and not rest[far:].any()
