"""Direct calls of public ops with hostile arguments: an error or a result, never a crash.

The sanitizers of `make asan` see the same calls: there a read past the end of a tensor is an error too.
"""

import random

import pytest
import torch
from hostile import SPOILS, HostileCall, hostile_calls, places, random_call
from kernel_graphs import ops, random_graph, threads

from gnnc.errors import GraphError, InputError
from gnnc.tensor_state import storage_fault

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of torch, about hostile arguments
    pytest.mark.skipif(
        torch.__version__.startswith("2.11."),
        reason="torch 2.11 ends the process where an op refuses some tensors (THPVariable_clear)",
    ),
]

TAKES_ALL = ("gnnc_cpu.first_unstored", "gnnc_cpu.first_not_finite (0, 1)")
"""An op that tells which storage is too short, and a tensor without elements."""
FAR_IDS = {
    "gnnc_cpu.spmm": "(1,)",
    "gnnc_cpu.sddmm": "(1,)",
    "gnnc_cpu.attention": "(1,)",
    "gnnc_cpu.csr": "(0,)",
}
"""The place of the ids among the arguments of an op."""


def calls(only: str) -> list[HostileCall]:
    with threads(1):
        return [call for call in hostile_calls(only)]


@pytest.mark.parametrize("namespace", ["gnnc_cpu.", pytest.param("gnnc.", marks=pytest.mark.slow)])
def test_spoilt_arguments_end_in_an_error_or_a_result(namespace: str) -> None:
    came = [(call.label, call.run()) for call in calls(namespace)]
    assert len(came) > 5000
    assert len({label.partition(" ")[0] for label, _ in came}) > 10


@pytest.mark.first(1)
@pytest.mark.parametrize("namespace", ["gnnc_cpu.", "gnnc."])
def test_tensors_without_memory_are_refused(namespace: str) -> None:
    faulty = [call for call in calls(namespace) if has_fault(call) and not call.label.startswith(TAKES_ALL)]
    assert len(faulty) > 500
    assert {call.run() for call in faulty} <= {"InputError", "RuntimeError"}


class Named(torch.Tensor):
    """A subclass of tensors without a dispatch of its own."""


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_subclass_without_memory_is_refused(kept: int) -> None:
    for value in (torch.ones(9, 8).as_subclass(Named), torch.nn.Buffer(torch.ones(9, 8))):
        value.untyped_storage().resize_(kept)
        with pytest.raises(InputError, match=r"\[gnnc.gemm\] x: its storage was"):
            torch.ops.gnnc.gemm(value, torch.ones(4, 8), None, False)


def has_fault(call: HostileCall) -> bool:
    """Return whether a tensor among the arguments has a storage that does not hold its elements."""
    tensors = [value for _, value in places(call.args) if isinstance(value, torch.Tensor)]
    return any(t.layout is torch.strided and t.is_cpu and storage_fault(t) is not None for t in tensors)


def test_ids_out_of_range_are_refused() -> None:
    for op, place in FAR_IDS.items():
        for kind in ("far", "last far", "just too far", "negative", "last negative", "smallest"):
            found = [call for call in calls(op) if call.label == f"{op} {place} {kind}"]
            assert found, (op, kind)
            assert {call.run() for call in found} == {"RuntimeError"}, (op, kind)


@pytest.mark.slow
def test_two_spoilt_arguments() -> None:
    rng = random.Random(0)
    assert all(random_call(rng).run() for _ in range(300))


def test_there_are_many_kinds() -> None:
    assert len(SPOILS) >= 50


@pytest.mark.parametrize(
    ("rowptr", "col", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], r"rowptr\[2\] is 1, but rowptr\[1\] is 2"),
        ([1, 2, 3, 3], [0, 1, 2], "rowptr must start at 0"),
        ([0, 1, 2**33, 3], [0, 1, 2], "must not fall"),
        ([0, 1, 2, 3], [0, 3, 2], r"col\[1\] is 3, but must be in 0..2"),
        ([0, 1, 2, 3], [0, 1, -1], r"col\[2\] is -1"),
        ([0, 1, 2, 4], [0, 1, 2], "col must have 4 elements"),
    ],
)
def test_a_csr_is_validated(rowptr: list[int], col: list[int], message: str) -> None:
    x, out = torch.randn(3, 5), torch.zeros(3, 5)
    edges = torch.tensor(rowptr), torch.tensor(col, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops().spmm(*edges, None, x, None, None, 0, 1, [60, 0, 0, 0], [], [], [out])
    assert not out.any()
    with pytest.raises(RuntimeError, match=message):
        ops().sddmm(*edges, x, x, None, None, 0, 1, torch.zeros(len(col), 1))
    with pytest.raises((GraphError, InputError), match="rowptr|col"):
        torch.ops.gnnc.spmm(*edges, None, x, "sum", 3)


def test_an_int8_row_without_padding_is_refused() -> None:
    g, q = random_graph(1, 1, 3), torch.ones(1, 7, dtype=torch.int8)
    out = torch.zeros(1, 7)
    with pytest.raises(RuntimeError, match="rows lack their padding"):
        ops().spmm(g.rowptr, g.col, None, q, None, None, 0, 1, [60, 0, 0, 0], [], [], [out])
    with pytest.raises(RuntimeError, match="rows lack their padding"):
        ops().map(torch.ones(1, 7), None, [62, 0, 1, 0], [], [], [q.clone(), torch.zeros(1)])


def test_a_window_of_columns_that_overflows_is_refused() -> None:
    x, out = torch.ones(3, 40), torch.zeros(3, 40)
    for first, columns in ((2**31 - 16, 2**31 - 1), (16, 2**31 - 1), (-16, 32)):
        with pytest.raises(RuntimeError, match="window"):
            ops().map(x, None, [46, first, columns, 0, 60, 0, 0, 0], [], [], [out])
    with pytest.raises(RuntimeError, match="does not fit 32 bits"):
        ops().map(x, None, [60 + 2**32, 0, 0, 0], [], [], [out])


def test_a_vector_is_a_matrix_of_one_column() -> None:
    x, out = torch.randn(9, 1), torch.full((9,), 7.0)
    ops().map(x, None, [60, 0, 0, 0], [], [], [out])
    assert torch.equal(out, x[:, 0])
    ops().map(x, None, [6, 0, 0, 0, 60, 0, 0, 0], [torch.arange(9.0)], [], [out])
    assert torch.equal(out, x[:, 0] + torch.arange(9.0))


def test_outputs_of_csr_that_share_memory_are_refused() -> None:
    src, dst = torch.randint(5, (2, 20))
    rowptr, col, perm = torch.zeros(6).long(), torch.zeros(20, dtype=torch.int32), torch.zeros(20).long()
    for outs, message in (
        ((rowptr, col, src), "perm shares memory with src"),
        ((perm[:6], col, perm), "rowptr shares memory with perm"),
        ((rowptr, perm.view(torch.int32)[20:], perm), "col shares memory with perm"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops().csr(src, dst, 5, 5, *outs)
