"""Costs of structure formats: which one is cheapest for a graph."""

import pytest

from gnnc.ir import format as formats
from gnnc.ir.format import CSR, NODE_BLOCK, RUN_TABLE, WINDOW_TABLE, Format, Gather, cheapest, window_rows

BLOCKS = 4
ALL = [value for value in vars(formats).values() if isinstance(value, Format)]


def gather(near: int, edges: int = 1_000_000, row_bytes: int = 64) -> Gather:
    return Gather(edges=edges, rows=10 * NODE_BLOCK, near=near, blocks=BLOCKS, row_bytes=row_bytes)


@pytest.mark.parametrize("found", ALL, ids=str)
def test_a_format_is_complete(found: Format) -> None:
    assert found.name.isidentifier() and found.parts and found.builder and found.rule
    assert found.edge_bytes > 0
    assert found.cost(gather(1_000_000)) > 0


def test_names_are_unique() -> None:
    assert len({found.name for found in ALL}) == len(ALL) >= 5


def test_a_window_costs_its_far_edges_and_the_rows_that_are_copied() -> None:
    copied = (10 + BLOCKS) * window_rows(64)
    assert WINDOW_TABLE.cost(gather(900_000)) == 100_000 + formats.LEAST_USES * copied
    assert RUN_TABLE.cost(gather(900_000)) == CSR.cost(gather(0)) == 1_000_000


@pytest.mark.parametrize("row_bytes", [64, 256])
def test_a_window_is_taken_from_so_many_near_edges_on(row_bytes: int) -> None:
    least = formats.LEAST_USES * (10 + BLOCKS) * window_rows(row_bytes)
    for near, want in ((least - 1, RUN_TABLE), (least, WINDOW_TABLE)):
        assert cheapest((RUN_TABLE, WINDOW_TABLE), gather(near, row_bytes=row_bytes)) is want


def test_a_window_is_not_taken_for_a_graph_most_of_whose_edges_are_far() -> None:
    near = 3_000_000
    assert cheapest((RUN_TABLE, WINDOW_TABLE), gather(near, edges=2 * near)) is WINDOW_TABLE
    assert cheapest((RUN_TABLE, WINDOW_TABLE), gather(near, edges=2 * near + 1)) is RUN_TABLE


def test_no_edges_are_no_reason_for_a_window() -> None:
    assert cheapest((RUN_TABLE, WINDOW_TABLE), gather(0, edges=0)) is RUN_TABLE
