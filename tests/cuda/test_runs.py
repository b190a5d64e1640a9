import pytest
import torch
from kernel_graphs import GRAPHS

from gnnc.runtime.cuda.runs import build_runs, run_limit


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("limit", [1, 16, 100, 5000])
@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_runs_cover_every_edge_of_every_row_once_and_in_order(name: str, limit: int, blocks: int) -> None:
    g = GRAPHS[name]()
    runs = build_runs(g.rowptr, limit, blocks)
    row, slot = runs.place[:-1].unbind(1)
    begin, count = runs.begin, runs.begin.diff()
    whole = slot < 0
    assert begin[0] == 0 and begin[-1] == g.num_edges and (count >= 0).all()
    assert (count[~whole] <= limit + 16).all() and (count[whole] < 2 * limit).all()
    assert torch.equal(begin[:-1][whole], g.rowptr[row[whole].long()])
    assert runs.place[-1].tolist() == [g.num_dst, -1]
    rows = torch.where(whole, runs.place[1:, 0] - row, 0)
    assert (rows[whole] > 0).all()
    assert rows.sum() + len(runs.split) == g.num_dst
    assert torch.equal(slot[~whole].long(), torch.arange(runs.slots))
    for first, parts in runs.split.tolist():
        mine = slice(first, first + parts)
        assert parts > 1 and (row[mine] == row[first]).all() and (slot[mine] >= 0).all()
        assert begin[first] == g.rowptr[row[first]] and begin[first + parts] == g.rowptr[row[first] + 1]
    assert runs.split[:, 1].sum() == runs.slots == (~whole).sum()
    assert runs.chunk.shape == (blocks, 2)
    chunk = runs.chunk[runs.chunk[:, 1].argsort(stable=True)]
    chunk = chunk[chunk[:, 0].argsort(stable=True)]
    assert chunk[0, 0] == 0 and chunk[-1, 1] == len(row) and torch.equal(chunk[1:, 0], chunk[:-1, 1])


def test_blocks_get_about_the_same_number_of_edges() -> None:
    runs = build_runs(GRAPHS["chunks"]().rowptr, 32, 50)
    edges = runs.begin[runs.chunk.long()].diff(dim=1).double()
    assert edges.max() < 2 * edges.mean()


def test_the_limit_grows_with_the_graph() -> None:
    limits = [run_limit(edges, 132) for edges in (0, 2_000_000, 115_000_000, 2**40)]
    assert limits == sorted(limits) and limits[0] == 64 and limits[-1] == 512
