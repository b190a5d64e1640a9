"""gemm against PyTorch: integers bit for bit, floats by relative error against float64."""

import math

import pytest
import torch
from kernel_graphs import threads
from row_programs import (
    ROWS,
    WIDTHS,
    Program,
    bits,
    error,
    gemm,
    padded,
    padding,
    quantized,
    random_int8,
    row_scale,
    store,
    strided,
)
from torch import Tensor

from gnnc.runtime.row_program.opcodes import Op

FLOAT, INT8, BF16 = 0, 1, 3
FLOAT_ERROR = 1e-6


def run(x: Tensor, w: Tensor, mode: int, scale: Tensor | None = None, is_kn: bool = False) -> Tensor:
    width = w.shape[1] if is_kn else w.shape[0]
    out = torch.full((x.shape[0], width), float("nan"))
    gemm(x, scale, w, is_kn, mode, store(out))
    return out


def integer_product(q: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    """The product in int8 mode: exact sums, then two FP32 multiplications in this order."""
    w_scale = row_scale(w)
    sums = q.double() @ quantized(w, w_scale[:, None]).double().t()
    return sums.float() * scale[:, None] * w_scale


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("depth", WIDTHS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape(rows: int, depth: int, width: int) -> None:
    x, w = torch.randn(rows, depth), torch.randn(width, depth)
    want = x.double() @ w.double().t()
    assert error(run(x, w, FLOAT), want) < FLOAT_ERROR
    scale = row_scale(x)
    assert torch.equal(run(x, w, INT8), integer_product(quantized(x, scale[:, None]), scale, w))


@pytest.mark.parametrize("depth", [1, 47, 64, 100])
@pytest.mark.parametrize("width", [1, 47, 64, 100])
@pytest.mark.parametrize("mode", [FLOAT, INT8, BF16])
def test_layouts_of_the_weight_agree(depth: int, width: int, mode: int) -> None:
    x, w = torch.randn(50, depth), torch.randn(width, depth)
    want = run(x, w, mode)
    assert torch.equal(run(x, w.t().contiguous(), mode, is_kn=True), want)
    assert torch.equal(run(x, strided(w), mode), want)
    assert torch.equal(run(x, strided(w.t()), mode, is_kn=True), want)


@pytest.mark.parametrize("mode", [FLOAT, INT8, BF16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 24, 100])
def test_rows_may_be_apart(mode: int, dtype: torch.dtype, rows: int) -> None:
    x, w = torch.randn(rows, 47).to(dtype), torch.randn(40, 47)
    assert torch.equal(run(strided(x), w, mode), run(x, w, mode))


@pytest.mark.parametrize("depth", [7, 64, 602])
def test_bf16(depth: int) -> None:
    x, w = torch.randn(100, depth), torch.randn(40, depth)
    want = x.bfloat16().double() @ w.bfloat16().double().t()
    assert error(run(x, w, BF16), want) < FLOAT_ERROR
    assert error(run(x.bfloat16(), w, BF16), want) < FLOAT_ERROR
    assert error(run(x.bfloat16(), w, FLOAT), x.bfloat16().double() @ w.double().t()) < FLOAT_ERROR


@pytest.mark.parametrize("depth", [7, 47, 64, 100, 1433])
def test_int8_of_bf16_rows(depth: int) -> None:
    x, w = torch.randn(100, depth).bfloat16(), torch.randn(40, depth)
    scale = row_scale(x.float())
    assert torch.equal(run(x, w, INT8), integer_product(quantized(x.float(), scale[:, None]), scale, w))


def mostly_zeros(depth: int) -> Tensor:
    x = torch.randn(100, depth) * (torch.rand(100, depth) < 0.02)
    x[3] = 0
    x[60] = torch.randn(depth)  # its block is multiplied as a whole
    x[80] = torch.randn(depth) * (torch.rand(depth) < 0.3)  # one row that is not, in a block that is
    return x


@pytest.mark.parametrize("depth", [511, 512, 1433])
@pytest.mark.parametrize("width", [7, 40, 64, 100])
@pytest.mark.parametrize("kind", ["int8", "float32", "bfloat16", "one scale"])
def test_int8_of_rows_that_are_mostly_zeros(depth: int, width: int, kind: str) -> None:
    x, w = mostly_zeros(depth), torch.randn(width, depth)
    x = x.bfloat16() if kind == "bfloat16" else x
    scale = torch.tensor([0.02]).expand(100) if kind == "one scale" else row_scale(x.float())
    q = quantized(x.float(), scale[:, None])
    assert q.dtype == torch.int8
    if kind == "int8":
        got = run(q, w, INT8, scale)
    else:
        got = run(x, w, INT8, scale[:1] if kind == "one scale" else None)
    assert torch.equal(got, integer_product(q, scale, w))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_row_among_rows_of_zeros_may_be_of_largest_quantized_values(sign: int) -> None:
    q = torch.zeros(24, 133_120, dtype=torch.int8)
    q[20] = 127
    got = run(q, torch.full((3, 133_120), 127.0 * sign), INT8, torch.ones(24))
    want = torch.zeros(24, 3)
    want[20] = 127.0 * 127 * sign * 133_120
    assert torch.equal(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-42, 3e38])
@pytest.mark.parametrize("scale", [None, torch.tensor([0.02])])
def test_what_a_row_of_zeros_holds_counts_as_in_any_row(value: float, scale: Tensor | None) -> None:
    x, w = torch.randn(24, 600) * (torch.rand(24, 600) < 0.02), torch.randn(40, 600)
    x[5, ::60] = value
    whole = x.clone()
    whole[12:] = torch.randn(12, 600)
    few, all_of = run(x, w, INT8, scale)[:12], run(whole, w, INT8, scale)[:12]
    if scale is None and not math.isfinite(value):
        assert not few[5].isfinite().any() and not all_of[5].isfinite().any()
        few[5] = all_of[5] = 0
    assert bits(few) == bits(all_of)


@pytest.mark.parametrize("depth", WIDTHS)
@pytest.mark.parametrize("single", [True, False])
def test_int8_of_quantized_values(depth: int, single: bool) -> None:
    q, w = random_int8(77, depth), torch.randn(40, depth)
    q.as_strided((77, q.stride(0)), q.stride())[:, depth:] = 55  # what lies past the width must not count
    scale = torch.rand(1 if single else 77)
    assert torch.equal(run(q, w, INT8, scale), integer_product(q, scale.expand(77), w))


@pytest.mark.parametrize("depth", [47, 128])
def test_static_scale_saturates(depth: int) -> None:
    x, w = torch.randn(100, depth) * 3, torch.randn(40, depth)
    x[3, 5], x[4, 6] = 1e30, -1e30
    scale = torch.tensor([0.02])
    q = quantized(x, scale)
    assert (q.abs() == 127).sum() > 100
    assert torch.equal(run(x, w, INT8, scale), integer_product(q, scale.expand(100), w))


@pytest.mark.parametrize("depth", [1023, 1024, 1025, 2049, 8189])
def test_deep_sums(depth: int) -> None:
    x, w = torch.randn(30, depth), torch.randn(70, depth)
    scale = row_scale(x)
    assert torch.equal(run(x, w, INT8), integer_product(quantized(x, scale[:, None]), scale, w))
    assert error(run(x, w, FLOAT), x.double() @ w.double().t()) < 2 * FLOAT_ERROR


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_quantized_values_are_exact(sign: int) -> None:
    depth = 133_144
    q = torch.full((2, (depth + 63) // 64 * 64), 127, dtype=torch.int8)[:, :depth]
    got = run(q, torch.full((1, depth), 127.0 * sign), INT8, torch.ones(1))
    assert got.tolist() == [[torch.tensor(127.0 * 127 * sign * depth).item()]] * 2


def test_zero_tiny_and_constant_rows() -> None:
    x, w = torch.randn(30, 20), torch.randn(12, 20)
    x[3], x[4], x[5], w[2], w[3] = 0.0, 1e-40, 2.0, 0.0, 1e-40
    x[6] = 3e38
    scale = row_scale(x)
    got = run(x, w, INT8)
    assert torch.equal(got, integer_product(quantized(x, scale[:, None]), scale, w))
    assert not got[3].any() and not got[4].any() and not got[:, 2:4].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    x, w = torch.randn(30, 20), torch.randn(12, 20)
    x[7, 11] = bad
    got = run(x, w, INT8)
    assert not got[7].isfinite().any()
    assert got[:7].isfinite().all() and got[8:].isfinite().all()


@pytest.mark.parametrize("width", [7, 64, 100])
def test_epilogue(width: int) -> None:
    x, w, bias = torch.randn(100, 47), torch.randn(width, 47), torch.randn(width)
    q, scale = padded(100, width), torch.empty(100)
    program = Program()
    program.add(Op.ADD_COL, program.operand(bias)).add(Op.RELU)
    program.add(Op.QUANT_ROW, program.out(q), program.out(scale))
    gemm(x, None, w, False, INT8, program)
    x_scale = row_scale(x)
    y = (integer_product(quantized(x, x_scale[:, None]), x_scale, w) + bias).relu()
    assert torch.equal(scale, row_scale(y))
    assert torch.equal(q, quantized(y, scale[:, None]))
    assert not padding(q).any()


@pytest.mark.parametrize("mode", [FLOAT, INT8, BF16])
@pytest.mark.parametrize("widths", [(64, 64), (40, 40), (1, 7, 47), (602, 16)])
def test_several_weights_make_what_each_makes_alone(widths: tuple[int, ...], mode: int) -> None:
    x, program, first = torch.randn(100, 47), Program(), 0
    weights = [torch.randn(width, 47) for width in widths]
    outs = [torch.full((100, width), float("nan")) for width in widths]
    for width, out in zip(widths, outs, strict=True):
        program.add(Op.WINDOW, first, width).add(Op.RELU).add(Op.STORE_F32, program.out(out))
        first += -(-width // 16) * 16
    kn = [i % 2 == 1 for i in range(len(widths))]
    given = [w.t().contiguous() if is_kn else w for w, is_kn in zip(weights, kn, strict=True)]
    gemm(x, None, given, kn, mode, program)
    for w, out in zip(weights, outs, strict=True):
        assert torch.equal(out, run(x, w, mode).relu())


def test_each_of_several_results_gets_scales_of_its_own() -> None:
    x, weights, program = torch.randn(100, 64), [torch.randn(40, 64), 5 * torch.randn(40, 64)], Program()
    stored = [(padded(100, 40), torch.empty(100)) for _ in weights]
    for i, (q, scale) in enumerate(stored):
        program.add(Op.WINDOW, 48 * i, 40).add(Op.QUANT_ROW, program.out(q), program.out(scale))
    gemm(x, None, weights, [False, False], INT8, program)
    for w, (q, scale) in zip(weights, stored, strict=True):
        y = run(x, w, INT8)
        assert torch.equal(scale, row_scale(y))
        assert torch.equal(q, quantized(y, scale[:, None])) and not padding(q).any()


@pytest.mark.parametrize("mode", [FLOAT, INT8, BF16])
@pytest.mark.parametrize("shape", [(20_000, 128, 64), (3000, 300, 200)])
def test_same_bits_at_any_thread_count(mode: int, shape: tuple[int, int, int]) -> None:
    rows, depth, width = shape
    x, w = torch.randn(rows, depth), torch.randn(width, depth)
    results = []
    for count in (1, 2, 4):
        with threads(count):
            results.append(bits(run(x, w, mode)))
    assert results[0] == results[1] == results[2]


def test_a_weight_edited_in_place_is_seen() -> None:
    x, w = torch.randn(10, 16), torch.randn(4, 16)
    before = run(x, w, INT8)
    w.data.mul_(2)
    assert torch.equal(run(x, w, INT8), before * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.ones(4, 9)}, "x has 8 columns, but w takes 9"),
        ({"w": []}, "needs a weight, and the layout of each"),
        ({"w": torch.ones(4, 8, dtype=torch.float64)}, "not Double"),
        ({"w": torch.ones(4, 8).bfloat16()}, "w must be float32"),
        ({"mode": 2}, "mode must be"),
        ({"scale": torch.ones(3)}, "one element"),
        ({"scale": torch.ones(1), "mode": 0}, "int8 mode only"),
        ({"x": torch.ones(5, 8, dtype=torch.int8), "scale": torch.ones(1), "mode": 0}, "needs mode 1"),
        ({"x": torch.ones(5, 8, dtype=torch.int8)}, "needs x_scale"),
        ({"x": torch.ones(8, 5).t()}, "columns of a matrix of a row program must be adjacent"),
        ({"x": torch.ones(2, 5, 8)}, "must have 2 dimensions"),
        ({"x": torch.ones(2, 133_145), "w": torch.ones(4, 133_145)}, "do not fit 32 bits"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments = {
        "x": torch.ones(5, 8),
        "scale": None,
        "w": torch.ones(4, 8),
        "is_kn": False,
        "mode": 1,
    } | change
    with pytest.raises(RuntimeError, match=message):
        gemm(program=store(torch.empty(len(arguments["x"]), 4)), **arguments)  # type: ignore[arg-type]
