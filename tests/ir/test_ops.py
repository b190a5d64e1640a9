"""Each reference against a formula written out by hand."""

import math

import pytest
import torch

from gnnc.errors import VerifyError
from gnnc.ir import body_inputs, body_text, parse_body, sparse
from gnnc.ir.structure import random_csr

GNNC = torch.ops.gnnc


def test_csr_is_a_stable_sort_by_destination() -> None:
    src, dst = torch.tensor([4, 1, 3, 0]), torch.tensor([2, 0, 2, 0])
    rowptr, col, perm = GNNC.csr(src, dst, 5, 4)
    assert rowptr.tolist() == [0, 2, 2, 4, 4]
    assert col.tolist() == [1, 0, 4, 3]
    assert perm.tolist() == [1, 3, 0, 2]


def test_csr_transpose_twice_is_the_graph() -> None:
    rowptr, col, _ = random_csr(9, 6, 30)
    back, _, perm = GNNC.csr_transpose(rowptr, col, 9)
    again, _, _ = GNNC.csr_transpose(back, GNNC.edge_dst(rowptr, col)[perm].int(), 6)
    assert torch.equal(again, rowptr)


def test_edge_softmax_sums_to_one_on_rows_with_edges() -> None:
    rowptr, col, _ = random_csr(9, 6, 30)
    alpha = GNNC.edge_softmax(rowptr, torch.randn(30, 2) * 100, 0.0)
    total = GNNC.segment_reduce(rowptr, None, alpha, "sum", 6)
    expected = (GNNC.degree(rowptr) > 0).float()[:, None].expand(6, 2)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_sums_of_some_messages_at_a_time_have_the_same_bits(
    reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rowptr = torch.tensor([0, 0, 3, 3, 40, 41, 60, 60, 64, 64])
    col, value = torch.randint(5, (64,), dtype=torch.int32), torch.randn(64)
    x, quantized = torch.randn(5, 2, 3), torch.randint(-127, 128, (5, 6), dtype=torch.int8)
    scale, shift = torch.rand(5), torch.randint(8, (5,), dtype=torch.uint8)

    def results() -> list[torch.Tensor]:
        return [
            GNNC.spmm(rowptr, col, None, x, reduce, 9),
            GNNC.spmm(rowptr, col, value[:, None].expand(-1, 2), x, reduce, 9),
            GNNC.qspmm(rowptr, col, value, quantized, scale, None, reduce, 9),
            GNNC.qspmm(rowptr, col, None, quantized, None, shift, reduce, 9),
            GNNC.qspmm(rowptr, col, None, quantized, None, None, reduce, 9),
        ]

    at_once = results()
    sizes: list[int] = []

    def note(messages: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(messages.shape[0])
        return reduce_edges(messages, *rest)

    reduce_edges = sparse.reduce_edges
    monkeypatch.setattr(sparse, "reduce_edges", note)
    monkeypatch.setattr(sparse, "MOST_ELEMENTS", 30)
    for some, all_of_them in zip(results(), at_once, strict=True):
        assert torch.equal(some, all_of_them)
    assert sizes == [40, 20, 4, 0] * 5


def test_quantize_dequantize_errs_by_half_a_step() -> None:
    x = torch.randn(50, 33) * torch.logspace(-6, 6, 50)[:, None]
    scale = GNNC.scale(x, "int8/row")
    error = (GNNC.dequantize(GNNC.quantize(x, scale, "int8/row"), scale, "row") - x).abs()
    assert (error <= scale[:, None] * 0.5000001).all()


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5]])
    assert GNNC.quantize(x, torch.tensor(1.0), "int8/tensor").tolist() == [[0, 2, 2, 0, -2]]


def test_a_scale_below_normal_counts_as_zero() -> None:
    x = torch.full((2, 3), 1e-40)
    scale = GNNC.scale(x, "int8/row")
    assert scale.tolist() == [0.0, 0.0]
    assert GNNC.quantize(x, scale, "int8/row").eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_row_is_visible_in_its_scale(bad: float) -> None:
    x = torch.randn(3, 4)
    x[1, 2] = bad
    assert GNNC.scale(x, "int8/row").isfinite().tolist() == [True, False, True]


def test_row_shift_gives_each_row_the_finest_scale_that_does_not_saturate() -> None:
    base = torch.tensor(2.0)
    x = torch.tensor([[254.0], [127.0], [126.0], [1.0], [0.0], [900.0]])
    assert GNNC.row_shift(x, base, "int8/row_pow2").tolist() == [0, 1, 1, 7, 7, 0]


def test_shifted_sums_are_exact() -> None:
    rowptr, col, _ = random_csr(40, 10, 200)
    x = torch.randn(40, 5) * torch.logspace(-2, 0, 40)[:, None]
    base = GNNC.scale(x, "int8/tensor")
    shift = GNNC.row_shift(x, base, "int8/row_pow2")
    q = GNNC.quantize(x, base, "int8/row_pow2", shift)
    acc = GNNC.qspmm(rowptr, col, None, q, None, shift, "sum", 10)
    rows = GNNC.dequantize(q, base, "tensor").double() * torch.exp2(-shift.double())[:, None]
    expected = GNNC.spmm(rowptr, col, None, rows, "sum", 10)
    got = GNNC.dequantize(acc, base, "tensor", -7).double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_a_hub_of_bytes_is_summed_exactly() -> None:
    edges = 300_000
    rowptr = torch.tensor([0, edges])
    col = torch.zeros(edges, dtype=torch.int32)
    value = torch.full((edges,), 127, dtype=torch.int8)
    x = torch.full((1, 3), 127, dtype=torch.int8)
    acc = GNNC.qspmm(rowptr, col, value, x, None, None, "sum", 1)
    assert acc.double().tolist() == [[float(torch.tensor(edges * 127 * 127).float())] * 3]


def test_bit_planes_round_trip() -> None:
    q = torch.randint(0, 8, (5, 19), dtype=torch.uint8)
    planes = GNNC.pack(q, 3)
    assert planes.shape == (3, 5, 3)
    assert torch.equal(GNNC.unpack(planes, 3, 19), q)


def test_body_text_round_trips() -> None:
    text = (
        "t0 = aten.add.Tensor(i0, j0); t1 = aten.clamp.default(t0, -inf, 2.5); "
        "t2 = aten._to_copy.default(t1, dtype=torch.float64); return t2"
    )
    assert body_text(parse_body(text).graph) == text
    assert body_inputs(text) == ("i0", "j0")


@pytest.mark.parametrize("text", ["import os", "t0 = open('x'); return t0", "return k0"])
def test_body_refuses_what_is_not_a_body(text: str) -> None:
    with pytest.raises(VerifyError, match="body"):
        parse_body(text)
