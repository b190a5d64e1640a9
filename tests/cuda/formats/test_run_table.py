from types import SimpleNamespace

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import compiled_without_spills
from kernel_graphs import GRAPHS
from torch import Tensor

from gnnc.runtime.cuda.formats import tables
from gnnc.runtime.cuda.formats.csr import csr, csr_with_loops
from gnnc.runtime.cuda.formats.keys import RUNS
from gnnc.runtime.cuda.formats.run_table import (
    ROW_COST,
    Cut,
    Draft,
    Kernels,
    Runs,
    build_runs,
    chunk_of,
    cut_for,
    multiprocessors_of,
)
from gnnc.runtime.cuda.formats.tensor_cache import attached
from gnnc.runtime.cuda.formats.window_table import window_cut_for

CUTS = (Cut(8, 1), Cut(64, 16), Cut(64, 64), Cut(512, 128), Cut(5000, 5000), Cut(256, 8, entries=1))
WINDOW, GROUP = 256, 8


def reference(rowptr: Tensor, cut: Cut, shares: int) -> Runs:
    """The run table, row by row."""
    degree, first = rowptr.diff().tolist(), rowptr.tolist()
    entry: list[list[int]] = []
    run: list[list[int]] = []
    split: list[list[int]] = []
    cost: list[int] = []
    for window in range(0, len(degree), WINDOW):
        rows = range(window, min(window + WINDOW, len(degree)))
        short = sorted((row for row in rows if degree[row] <= cut.short), key=lambda row: -degree[row])
        for of in short_runs([degree[row] for row in short], cut):
            run.append([len(entry) + of.start, len(of), -1, 0])
            cost.append(sum(degree[short[i]] + ROW_COST for i in of))
        entry += [[row, degree[row], first[row]] for row in short]
        for row in rows:
            if degree[row] <= cut.short:
                continue
            size = -(-degree[row] // (-(-degree[row] // cut.part) * 32)) * 32
            offsets = range(0, degree[row], size)
            slot = len(split)
            for number, offset in enumerate(offsets):
                run.append([len(entry), 1, slot + number if len(offsets) > 1 else -1, 0])
                entry.append([row, min(size, degree[row] - offset), first[row] + offset])
                cost.append(entry[-1][1] + ROW_COST)
            if len(offsets) > 1:
                split += [[row, slot, len(offsets), 0]] * len(offsets)
    table = [[row, edges, begin & 0xFFFFFFFF, begin >> 32] for row, edges, begin in entry]
    tensors = [torch.tensor(rows, dtype=torch.int64).view(-1, 4).int() for rows in (table, run, split)]
    per_block = torch.tensor(deal(run, cost, shares), dtype=torch.int32)
    return Runs(*tensors, sum(degree), cut, per_block)


def short_runs(degree: list[int], cut: Cut) -> list[range]:
    """Rows of each run: groups of eight, of which a run takes as many as cost about so much."""
    most = min(cut.part, GROUP * (cut.short + ROW_COST))
    least = -(-most * GROUP // max(cut.entries, GROUP))
    spent, begins = 0, list[tuple[int, int]]()
    for begin in range(0, len(degree), GROUP):
        spent += max(GROUP * (degree[begin] + ROW_COST), least)
        begins.append(((spent - 1) // most, begin))
    opens = [begin for at, (turn, begin) in enumerate(begins) if at == 0 or begins[at - 1][0] != turn]
    ends = [*opens[1:], len(degree)][: len(opens)]
    return [range(begin, end) for begin, end in zip(opens, ends, strict=True)]


def deal(run: list[list[int]], cost: list[int], shares: int) -> list[list[int]]:
    """Runs by share, those that cost most first, up to a power of two."""
    shares = max(min(len(run), shares), 1)
    per_block: list[list[int]] = [[] for _ in range(shares)]
    ends = 0
    for number, spent in enumerate(cost):
        ends += spent
        per_block[(ends - spent // 2) * shares // sum(cost)].append(number)
    size = 1 << (max(map(len, per_block)) - 1).bit_length() if run else 1
    filled = [[run[i] for i in sorted(share, key=lambda i: -cost[i])] for share in per_block]
    return [each for share in filled for each in share + [[0, 0, -1, 0]] * (size - len(share))]


def entries_of(runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
    row, count = runs.entry[:, :2].long().unbind(1)
    return row, count, runs.entry[:, 2:].contiguous().view(torch.int64).squeeze(1)


@pytest.mark.cuda
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cut", CUTS)
def test_tables_are_those_of_the_reference(name: str, cut: Cut) -> None:
    rowptr, cut = GRAPHS[name]().rowptr, cut._replace(chunk=0)
    for shares in (1, 5, 132):
        assert_is(build_runs(rowptr.cuda(), int(rowptr[-1]), cut, shares), reference(rowptr, cut, shares))


def assert_is(got: Runs, want: Runs) -> None:
    for actual, wanted in zip(got, want, strict=True):
        assert torch.equal(actual.cpu(), wanted) if isinstance(wanted, Tensor) else actual == wanted


def offsets(degree: list[int]) -> Tensor:
    return torch.tensor([0, *degree]).cumsum(0)


@pytest.mark.cuda
@pytest.mark.parametrize("cut", CUTS)
def test_tables_at_the_bounds_of_cuts(cut: Cut) -> None:
    """Whole windows and parts of one, of rows with as many edges as need one entry, or part, more."""
    sizes = (cut.short, cut.short + 1, cut.part, cut.part + 1, 2 * cut.part + 1)
    for count in (1, 255, 256, 257, 512):
        for size in sizes:
            rowptr = offsets([size] * count)
            draft = build_runs(rowptr.cuda(), int(rowptr[-1]), cut._replace(chunk=0), 7)
            assert_is(draft, reference(rowptr, cut._replace(chunk=0), 7))
    mixed = [sizes[i * i % 5] * (i % 3 > 0) for i in range(300)]
    rowptr, cut = offsets(mixed), cut._replace(chunk=0)
    assert_is(build_runs(rowptr.cuda(), int(rowptr[-1]), cut, 7), reference(rowptr, cut, 7))


@pytest.mark.cuda
def test_no_rows_are_no_runs() -> None:
    runs = build_runs(torch.zeros(1, dtype=torch.int64).cuda(), 0, Cut(64, 16), 7)
    assert runs.run.numel() == runs.entry.numel() == 0
    assert runs.per_block is not None and runs.per_block.tolist() == [[0, 0, -1, 0]]


@pytest.mark.cuda
def test_blocks_take_turns_where_a_share_has_thousands_of_runs() -> None:
    """Those of rows without edges, beside a row with many."""
    rowptr = offsets([*[0] * 40_000, 20_000_000])
    assert build_runs(rowptr.cuda(), 20_000_000, Cut(256, 1, entries=1), 132).per_block is None


@pytest.mark.cuda
@pytest.mark.parametrize("loops", [False, True])
def test_a_new_graph_keeps_its_table(loops: bool) -> None:
    g = GRAPHS["loops"]()
    src, dst, nodes = g.col.long().cuda(), g.dst().cuda(), max(g.num_src, g.num_dst)
    rowptr, *_ = csr_with_loops(src, dst, nodes) if loops else csr(src, dst, nodes, nodes)
    shares = multiprocessors_of(rowptr)
    kept, before = attached(rowptr, RUNS), g.num_edges + (nodes if loops else 0)
    want = reference(rowptr.cpu(), cut_for(nodes, before, shares), shares)
    assert_is(kept, want)


@pytest.mark.cuda
def test_blocks_that_take_turns_get_no_runs_of_their_own() -> None:
    rowptr = torch.arange(16 * 64 * 8 + 1).cuda()  # 16 turns of 64 runs of 8 rows
    edges = rowptr.numel() - 1
    assert build_runs(rowptr, edges, Cut(64, 1), 1).per_block is None
    assert build_runs(rowptr, edges, Cut(64, 1, chunk=32), 1).per_block is None
    assert build_runs(rowptr, edges, Cut(64, 1, chunk=0), 1).per_block is not None
    assert build_runs(rowptr[:-8], edges - 8, Cut(64, 1), 1).per_block is not None


@pytest.mark.cuda
def test_nothing_is_written_by_offsets_that_may_be_anything() -> None:
    """Those of a graph with ids out of range, before the host knows of them."""
    rowptr = torch.tensor([0, 5, 2**31 - 1, -7, 2**40, 3]).cuda()
    sizes, refused = torch.zeros(4, dtype=torch.int32).cuda(), torch.ones(1, dtype=torch.int32).cuda()
    draft = Draft(rowptr, 5, Cut(64, 16), 132, sizes, refused)
    torch.cuda.synchronize()
    assert draft.finish([0, 0, 0, 0], 5).run.numel() == 0 and sizes.tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    _, names = compiled_without_spills(architecture, Kernels)
    assert len(names) == 4


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cut", CUTS)
def test_runs_cover_every_edge_of_every_row_once(name: str, cut: Cut) -> None:
    g = GRAPHS[name]()
    runs = reference(g.rowptr, cut, 132)
    row, count, first = entries_of(runs)
    edges = torch.cat([torch.arange(a, a + n) for a, n in zip(first.tolist(), count.tolist(), strict=True)])
    assert torch.equal(edges.sort().values, torch.arange(g.num_edges))
    assert torch.equal(row.unique(), torch.arange(g.num_dst))
    assert (first >= g.rowptr[row]).all() and (first + count <= g.rowptr[row + 1]).all()

    begin, entries, slot, _ = runs.run.long().unbind(1)
    used = torch.cat([torch.arange(a, a + n) for a, n in zip(begin.tolist(), entries.tolist(), strict=True)])
    assert torch.equal(used.sort().values, torch.arange(len(row)))
    assert ((entries > 0) & (entries <= max(cut.entries, GROUP))).all() and (entries[slot >= 0] == 1).all()
    assert torch.equal(slot[slot >= 0].sort().values, torch.arange(runs.split.shape[0]))
    assert (count <= max(cut.short, -(-cut.part // 32) * 32)).all()

    parts = dict(zip(slot.tolist(), begin.tolist(), strict=True))
    for of, (split, at, number, _) in enumerate(runs.split.tolist()):
        assert at <= of < at + number
        mine = torch.tensor([parts[at + i] for i in range(number)])
        assert number > 1 and (row[mine] == split).all()
        assert torch.equal(first[mine][1:], (first + count)[mine][:-1])
        assert count[mine].sum() == g.rowptr[split + 1] - g.rowptr[split]


def test_rows_of_a_run_have_about_as_many_edges() -> None:
    runs = reference(GRAPHS["chunks"]().rowptr, Cut(512, 128), 132)
    _, count, _ = entries_of(runs)
    groups = [count[a : a + n] for a, n, slot, _ in runs.run.tolist() if slot < 0 and n > 1]
    steps = sum(len(part) * int(part.max()) for each in groups for part in each.split(8))
    assert steps < 1.15 * sum(int(each.sum()) for each in groups)


def test_blocks_of_a_large_graph_take_turns_often_enough_to_end_together() -> None:
    for count in (0, 1, 15, 16 * 132, 16 * 132 * 32 - 1, 100_000, 10**7):
        for row_bytes, size in ((64, 32), (256, 64)):
            assert chunk_of(count, 132, row_bytes) == (size if count >= 16 * 132 * size else 0)
            assert chunk_of(count, 132, row_bytes, per_block=False) == size


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("blocks", [1, 5, 132])
def test_every_run_belongs_to_one_block(name: str, cut: Cut, blocks: int) -> None:
    runs = reference(GRAPHS[name]().rowptr, cut, blocks)
    per_block = runs.per_block
    assert per_block is not None
    shares = per_block.view(max(min(blocks, runs.run.shape[0]), 1), -1, 4)
    size = shares.shape[1]
    assert size & (size - 1) == 0
    empty = shares[:, :, 1] == 0
    assert torch.equal(empty, empty.sort(dim=1).values), "a share ends with what is empty"
    assert (shares[empty][:, 2] == -1).all(), "and is no part of a row"
    assert sorted(per_block[per_block[:, 1] > 0].tolist()) == sorted(runs.run.tolist())


def test_shares_cost_the_same_and_begin_with_what_costs_most() -> None:
    generator = torch.Generator().manual_seed(0)
    degree = (torch.rand(40_000, generator=generator) ** -0.8).long().clamp(max=9_000)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    runs = reference(rowptr, cut_for(len(degree), int(degree.sum()), 20), 20)
    assert runs.per_block is not None
    edges = torch.nn.functional.pad((runs.entry[:, 1].long() + ROW_COST).cumsum(0), (1, 0))
    first, count = runs.per_block.view(20, -1, 4)[:, :, :2].long().unbind(-1)
    cost = edges[first + count] - edges[first]
    assert (cost.diff(dim=1) <= 0).all()
    assert cost.sum(1).max() < 1.05 * cost.sum(1).double().mean()


def test_cuts_grow_with_the_graph_and_with_its_degrees() -> None:
    sizes = ((2_700, 10_000), (169_000, 2_300_000), (2_400_000, 124_000_000), (230_000, 115_000_000))
    cuts = [cut_for(rows, edges, 132)[:2] for rows, edges in sizes]
    assert cuts == [(256, 8), (256, 64), (512, 128), (2048, 256)]
    assert cut_for(1, 2**40, 132)[:2] == (2048, 256) and cut_for(0, 0, 132)[:2] == (256, 8)
    assert [window_cut_for(rows, edges)[:2] for rows, edges in sizes[2:]] == [(512, 128), (1024, 512)]


def test_rows_of_a_small_graph_are_the_work_of_all_warps() -> None:
    """Citation graphs: more runs than before by far, none of them long, and hubs in one piece."""
    generator = torch.Generator().manual_seed(0)
    degree = (torch.rand(19_717, generator=generator) ** -0.9).long().clamp(max=171) + 1
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    cut = cut_for(len(degree), int(degree.sum()), 132)
    runs = reference(rowptr, cut, 132)
    assert cut.short == 16 and runs.split.numel() == 0
    short = [int((window <= 16).sum()) for window in degree.split(WINDOW)]
    assert runs.run.shape[0] == sum(-(-count // 8) for count in short) + len(degree) - sum(short)


def test_what_a_graph_of_calls_points_to_is_not_replaced_by_a_slower_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rowptr, quick = torch.tensor([0, 2, 2, 3]), []

    class Event:
        def record(self, stream: object) -> None:
            if not quick:  # meanwhile another thread is through
                quick.append(None)
                quick[0] = tables.in_order(rowptr, 3)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    slow = tables.in_order(rowptr, 3)
    assert slow.tolist() == [0, 1, 2] and slow is quick[0] is tables.in_order(rowptr, 3)
