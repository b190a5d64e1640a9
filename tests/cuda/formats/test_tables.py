"""What is made of a CSR's columns, and when their memory is given back."""

from types import SimpleNamespace

import pytest
import torch

from gnnc.runtime.cuda.formats import tensor_cache
from gnnc.runtime.cuda.formats.keys import PENDING_RUNS, sum_table_key
from gnnc.runtime.cuda.formats.tables import SumTable, give_back, in_fours
from gnnc.runtime.cuda.formats.tensor_cache import attach, attached


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, event = SimpleNamespace(cuda_stream=0), SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


def table(*, staged: bool) -> SumTable:
    made = object.__new__(SumTable)
    made.staged_blocks, made.blocks = (3, 0) if staged else (0, 3)
    return made


def columns() -> torch.Tensor:
    """Nine of them, of which kernels read a copy that ends on a multiple of four."""
    return torch.arange(9, dtype=torch.int32)


def nbytes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


@pytest.mark.parametrize(("staged", "frees"), [([True, True], True), ([True, False], False), ([], False)])
def test_columns_are_freed_where_all_their_tables_are_by_node_block(staged: list[bool], frees: bool) -> None:
    col = columns()
    copy = in_fours(col)
    assert copy is in_fours(col) and nbytes(copy) == [48] and torch.equal(copy, col)
    rowptr = torch.ones(2)
    for row_bytes, each in enumerate(staged):
        attach(copy, sum_table_key(rowptr, 3, row_bytes), table(staged=each))
    other = torch.ones(2)
    for rows in (rowptr, other):
        attach(rows, PENDING_RUNS, "half a run table")
    give_back(col, [rowptr, other], [rowptr])
    assert nbytes(col, copy) == ([0, 0] if frees else [36, 48])
    assert (attached(rowptr, PENDING_RUNS) is None) == frees and attached(other, PENDING_RUNS) is not None
    give_back(col, [torch.ones(2)])
    assert in_fours(col) is copy and col.shape == (9,)


def test_memory_that_others_share_stays() -> None:
    col = columns()
    attach(in_fours(col), sum_table_key(torch.ones(2), 3, 64), table(staged=True))
    give_back(col, [col[2:]])
    assert nbytes(col) == [36]


def test_who_comes_late_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that found no copy yet, while another one made it, used it and gave the columns back."""
    col, made, lock = columns(), [], tensor_cache.BUILDING

    class Late:
        def __enter__(self) -> None:
            tensor_cache.BUILDING = lock
            made.append(in_fours(col))
            attach(made[0], sum_table_key(torch.ones(2), 3, 64), table(staged=True))
            give_back(col, [])

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(tensor_cache, "BUILDING", Late())
    assert in_fours(col) is made[0] and nbytes(col, made[0]) == [0, 0]
