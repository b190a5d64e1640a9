import pytest
import torch
from kernel_graphs import GRAPHS

from gnnc.runtime.cuda import tables
from gnnc.runtime.cuda.runs import ROW_COST, Cut, Runs, build_runs, chunk_of, cut_for, deal
from gnnc.runtime.cuda.staged import staged_cut_for

CUTS = (
    Cut(1, 1, 1, 1),
    Cut(64, 16),
    Cut(64, 64, 8, 16),
    Cut(512, 128),
    Cut(5000, 5000),
    Cut(256, 8, entries=1),
)


def entries_of(runs: Runs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row, count = runs.entry[:, :2].long().unbind(1)
    return row, count, runs.entry[:, 2:].contiguous().view(torch.int64).squeeze(1)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cut", CUTS)
def test_runs_cover_every_edge_of_every_row_once(name: str, cut: Cut) -> None:
    g = GRAPHS[name]()
    runs = build_runs(g.rowptr, cut)
    row, count, first = entries_of(runs)
    edges = torch.cat([torch.arange(a, a + n) for a, n in zip(first.tolist(), count.tolist(), strict=True)])
    assert torch.equal(edges.sort().values, torch.arange(g.num_edges))
    assert torch.equal(row.unique(), torch.arange(g.num_dst))
    assert (first >= g.rowptr[row]).all() and (first + count <= g.rowptr[row + 1]).all()

    begin, entries, slot, _ = runs.run.long().unbind(1)
    used = torch.cat([torch.arange(a, a + n) for a, n in zip(begin.tolist(), entries.tolist(), strict=True)])
    assert torch.equal(used.sort().values, torch.arange(len(row)))
    assert ((entries > 0) & (entries <= max(cut.entries, cut.group))).all() and (
        entries[slot >= 0] == 1
    ).all()
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
    runs = build_runs(GRAPHS["chunks"]().rowptr, Cut(512, 128))
    _, count, _ = entries_of(runs)
    groups = [count[a : a + n] for a, n, slot, _ in runs.run.tolist() if slot < 0 and n > 1]
    steps = sum(len(part) * int(part.max()) for each in groups for part in each.split(8))
    assert steps < 1.15 * sum(int(each.sum()) for each in groups)


def test_blocks_of_a_large_graph_take_turns_often_enough_to_end_together() -> None:
    for count in (0, 1, 15, 16 * 132, 16 * 132 * 32 - 1, 100_000, 10**7):
        for row_bytes, size in ((64, 32), (256, 64)):
            assert chunk_of(count, 132, row_bytes) == (size if count >= 16 * 132 * size else None)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("blocks", [1, 5, 132])
def test_every_run_is_dealt_to_one_block(name: str, cut: Cut, blocks: int) -> None:
    runs = build_runs(GRAPHS[name]().rowptr, cut)
    dealt = deal(runs, blocks)
    shares = dealt.view(blocks, -1, 4)
    size = shares.shape[1]
    assert size & (size - 1) == 0
    empty = shares[:, :, 1] == 0
    assert torch.equal(empty, empty.sort(dim=1).values), "a share ends with what is empty"
    assert (shares[empty][:, 2] == -1).all(), "and is no part of a row"
    assert sorted(dealt[dealt[:, 1] > 0].tolist()) == sorted(runs.run.tolist())


def test_shares_cost_the_same_and_begin_with_what_costs_most() -> None:
    generator = torch.Generator().manual_seed(0)
    degree = (torch.rand(40_000, generator=generator) ** -0.8).long().clamp(max=9_000)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    runs = build_runs(rowptr, cut_for(len(degree), int(degree.sum()), 20))
    edges = torch.nn.functional.pad((runs.entry[:, 1].long() + ROW_COST).cumsum(0), (1, 0))
    first, count = deal(runs, 20).view(20, -1, 4)[:, :, :2].long().unbind(-1)
    cost = edges[first + count] - edges[first]
    assert (cost.diff(dim=1) <= 0).all()
    assert cost.sum(1).max() < 1.05 * cost.sum(1).double().mean()


def test_cuts_grow_with_the_graph_and_with_its_degrees() -> None:
    sizes = ((2_700, 10_000), (169_000, 2_300_000), (2_400_000, 124_000_000), (230_000, 115_000_000))
    cuts = [cut_for(rows, edges, 132)[:2] for rows, edges in sizes]
    assert cuts == [(256, 8), (256, 64), (512, 128), (2048, 256)]
    assert cut_for(1, 2**40, 132)[:2] == (2048, 256) and cut_for(0, 0, 132)[:2] == (256, 8)
    assert [staged_cut_for(rows, edges)[:2] for rows, edges in sizes[2:]] == [(512, 128), (1024, 512)]


def test_rows_of_a_small_graph_are_the_work_of_all_warps() -> None:
    """Citation graphs: more runs than before by far, none of them long, and hubs in one piece."""
    generator = torch.Generator().manual_seed(0)
    degree = (torch.rand(19_717, generator=generator) ** -0.9).long().clamp(max=171) + 1
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    cut = cut_for(len(degree), int(degree.sum()), 132)
    runs = build_runs(rowptr, cut)
    assert cut.short == 16 and runs.split.numel() == 0
    long = int((degree > 16).sum())
    assert runs.run.shape[0] == -(-(len(degree) - long) // 8) + long


def test_what_a_graph_of_calls_points_to_is_not_replaced_by_a_slower_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rowptr, quick = torch.tensor([0, 2, 2, 3]), []

    class Stream:
        def synchronize(self) -> None:
            if not quick:  # meanwhile another thread is through
                quick.append(None)
                quick[0] = tables.destinations(rowptr, 3)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    slow = tables.destinations(rowptr, 3)
    assert slow.tolist() == [0, 0, 2] and slow is quick[0] is tables.destinations(rowptr, 3)
