"""Keys of values that are cached on the columns of a graph: they go by the identity of the row offsets."""

import gc
import weakref

import pytest
import torch

from gnnc.runtime.cuda.formats.keys import (
    RUNS,
    run_table_key,
    sum_table_key,
    window_sizes_key,
    window_table_key,
)
from gnnc.runtime.cuda.formats.tensor_cache import attach, attached, cached, cached_values, detach


def test_the_same_row_offsets_and_numbers_find_the_value() -> None:
    rowptr, col = torch.zeros(3), torch.zeros(4)
    assert cached(col, sum_table_key(rowptr, 5, 64), lambda: rowptr) is rowptr
    assert cached(col, sum_table_key(rowptr, 5, 64), lambda: pytest.fail("built again")) is rowptr
    others = [(rowptr, 5, 32), (rowptr, 6, 64), (rowptr.clone(), 5, 64), (rowptr.view(3), 5, 64)]
    assert all(attached(col, sum_table_key(*other)) is None for other in others)


def test_formats_of_the_same_numbers_are_told_apart() -> None:
    rowptr = torch.zeros(3)
    keys = [window_sizes_key(rowptr), window_table_key(rowptr, 64), sum_table_key(rowptr, 5, 64)]
    assert len({*keys, RUNS, run_table_key(64), run_table_key(0)}) == 6


def test_a_value_of_freed_row_offsets_is_not_found_by_others_at_their_address() -> None:
    col, memory = torch.zeros(4), torch.zeros(3)
    rowptr = memory.view(3)
    attach(col, window_sizes_key(rowptr), None)
    attach(col, window_sizes_key(rowptr), col.clone())
    alive = weakref.ref(rowptr)
    del rowptr
    gc.collect()
    assert alive() is None, "the key holds the row offsets"
    other = memory.view(3)
    assert attached(col, window_sizes_key(other)) is None and detach(col, window_sizes_key(other)) is None
    assert len(list(cached_values(col))) == 1
