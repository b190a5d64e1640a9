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
    row, slot = runs.place.unbind(1)
    count = runs.begin.diff()
    assert runs.begin[0] == 0 and runs.begin[-1] == g.num_edges
    assert (count >= 0).all() and (count <= limit + 16).all()
    assert torch.equal(row.unique(), torch.arange(g.num_dst, dtype=torch.int32))
    covered = torch.zeros(g.num_dst, dtype=torch.int64).index_add_(0, row.long(), count)
    assert torch.equal(covered, g.rowptr.diff())
    assert (row.diff() >= 0).all()
    assert torch.equal(slot[slot >= 0].long(), torch.arange(runs.slots))
    split = (runs.place[:, 1] >= 0).int().sum()
    assert split == runs.slots == runs.split[:, 1].sum()
    for first, parts in runs.split.tolist():
        assert parts > 1 and (row[first : first + parts] == row[first]).all() and slot[first] >= 0
    assert runs.chunk[0] == 0 and runs.chunk[-1] == len(row) and (runs.chunk.diff() >= 0).all()


def test_blocks_get_about_the_same_number_of_edges() -> None:
    runs = build_runs(GRAPHS["chunks"]().rowptr, 128, 50)
    edges = runs.begin[runs.chunk.long()].diff().double()
    assert edges.max() < 2 * edges.mean()


def test_the_limit_grows_with_the_graph() -> None:
    limits = [run_limit(edges, 132) for edges in (0, 2_000_000, 115_000_000, 2**40)]
    assert limits == sorted(limits) and limits[0] == 128 and limits[-1] == 2048
