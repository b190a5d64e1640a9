"""Every instruction of the row program, run by map, against PyTorch in float64 (integers bit for bit)."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from row_programs import (
    ROWS,
    WIDTHS,
    Program,
    bits,
    error,
    gemm,
    map_rows,
    padded,
    padding,
    quantized,
    random_int8,
    row_scale,
    strided,
)
from torch import Tensor
from torch.nn import functional as F

from gnnc.runtime.row_program.opcodes import Op

FLOAT_ERROR = 1e-6
WORST_ERROR = 2e-6  # of a single value
HEADER = Path(__file__).parents[2] / "csrc/include/gnnc/row_program.h"

Operand = Callable[[int, int], Tensor]
Formula = Callable[..., Tensor]


def test_opcodes_are_those_of_the_header() -> None:
    text = HEADER.read_text()
    listed = re.search(r"enum class RowOp : int32_t \{(.*?)\};", text, re.S)
    assert listed
    pairs = re.findall(r"(\w+) = (\d+)", listed[1])
    assert {name.upper(): int(number) for name, number in pairs} == {op.name: op.value for op in Op}


def row(m: int, f: int) -> Tensor:
    return torch.rand(m) + 0.5


def column(m: int, f: int) -> Tensor:
    return torch.rand(f) + 0.5


def full(m: int, f: int) -> Tensor:
    return torch.rand(m, f) + 0.5


def apart(m: int, f: int) -> Tensor:
    return strided(full(m, f))


def signed(m: int, f: int) -> Tensor:
    return torch.randn(m, f).masked_fill(torch.rand(m, f) < 0.2, 0)


def half(m: int, f: int) -> Tensor:
    return full(m, f).bfloat16()


def single(m: int, f: int) -> Tensor:
    return torch.rand(1) + 0.5


def by_row(v: Tensor) -> Tensor:
    return v[:, None]


ARITHMETIC: dict[str, tuple[Op, Operand, Formula]] = {
    "mul_row": (Op.MUL_ROW, row, lambda x, v: x * by_row(v)),
    "add_row": (Op.ADD_ROW, row, lambda x, v: x + by_row(v)),
    "div_row": (Op.DIV_ROW, row, lambda x, v: x / by_row(v)),
    "mul_col": (Op.MUL_COL, column, lambda x, v: x * v),
    "add_col": (Op.ADD_COL, column, lambda x, v: x + v),
    "div_col": (Op.DIV_COL, column, lambda x, v: x / v),
    "mul_full": (Op.MUL_FULL, full, lambda x, v: x * v),
    "mul_full_apart": (Op.MUL_FULL, apart, lambda x, v: x * v),
    "mul_full_bf16": (Op.MUL_FULL, half, lambda x, v: x * v),
    "add_full": (Op.ADD_FULL, full, lambda x, v: x + v),
    "add_full_bf16": (Op.ADD_FULL, half, lambda x, v: x + v),
    "rsub_full": (Op.RSUB_FULL, full, lambda x, v: v - x),
    "div_full": (Op.DIV_FULL, apart, lambda x, v: x / v),
    "threshold_backward": (Op.THRESHOLD_BACKWARD, signed, lambda x, v: x.masked_fill(v <= 0, 0)),
    "threshold_backward_bf16": (
        Op.THRESHOLD_BACKWARD,
        lambda m, f: signed(m, f).bfloat16(),
        lambda x, v: x.masked_fill(v <= 0, 0),
    ),
    "mul_tensor": (Op.MUL_TENSOR, single, lambda x, v: x * v),
    "add_tensor": (Op.ADD_TENSOR, single, lambda x, v: x + v),
}

# op, constant, formula, values that it takes, and whether each single value must be accurate
ACTIVATIONS: dict[str, tuple[Op, float | None, Formula, str, bool]] = {
    "mul_const": (Op.MUL_CONST, 1.7, lambda x: x * 1.7, "any", True),
    "add_const": (Op.ADD_CONST, 1.7, lambda x: x + 1.7, "any", False),
    "relu": (Op.RELU, None, torch.relu, "any", True),
    "leaky_relu": (Op.LEAKY_RELU, 0.2, lambda x: F.leaky_relu(x, 0.2), "any", True),
    "elu": (Op.ELU, 0.7, lambda x: F.elu(x, 0.7), "any", True),
    "sigmoid": (Op.SIGMOID, None, torch.sigmoid, "any", True),
    "tanh": (Op.TANH, None, torch.tanh, "any", True),
    "gelu": (Op.GELU, None, lambda x: x * 0.5 * torch.special.erfc(-x / 2**0.5), "any", True),
    "gelu_tanh": (
        Op.GELU_TANH,
        None,
        lambda x: x * torch.sigmoid(1.5957691216 * (x + 0.044715 * x**3)),
        "any",
        False,
    ),
    "silu": (Op.SILU, None, F.silu, "any", True),
    "exp": (Op.EXP, None, torch.exp, "any", True),
    "neg": (Op.NEG, None, torch.neg, "any", True),
    "abs": (Op.ABS, None, torch.abs, "any", True),
    "square": (Op.SQUARE, None, torch.square, "any", True),
    "sqrt": (Op.SQRT, None, torch.sqrt, "positive", True),
    "recip": (Op.RECIP, None, torch.reciprocal, "any", True),
    "clamp_min": (Op.CLAMP_MIN, -0.3, lambda x: x.clamp_min(-0.3), "any", True),
    "clamp_max": (Op.CLAMP_MAX, 0.3, lambda x: x.clamp_max(0.3), "any", True),
    "log": (Op.LOG, None, torch.log, "positive", True),
    "softplus": (Op.SOFTPLUS, None, lambda x: x.clamp_min(0) + torch.log1p(torch.exp(-x.abs())), "any", True),
    "rsqrt": (Op.RSQRT, None, torch.rsqrt, "positive", True),
}


def apply(x: Tensor, op: Op, a: int, b: int, program: Program, width: int | None = None) -> Tensor:
    out = torch.full((x.shape[0], x.shape[1] if width is None else width), float("nan"))
    program.add(op, a, b).add(Op.STORE_F32, program.out(out))
    map_rows(x, None, program)
    return out


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_arithmetic(name: str, width: int, rows: int) -> None:
    op, make, formula = ARITHMETIC[name]
    x, operand, program = torch.randn(rows, width), make(rows, width), Program()
    got = apply(x, op, program.operand(operand), 0, program)
    assert torch.equal(got, formula(x, operand.float()))


@pytest.mark.parametrize("name", ["mul_full", "add_full", "rsub_full", "threshold_backward"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_matrices_are_read_in_eight_bits(name: str, width: int, rows: int) -> None:
    op, _, formula = ARITHMETIC[name]
    x, values = torch.randn(rows, width), random_int8(rows, width)
    scale, program = row(rows, width), Program()
    got = apply(x, op, program.operand(values, scale), 0, program)
    want = formula(x.double(), values.double() * scale.double()[:, None])
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6 * 127)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 47, 602])
def test_activations(name: str, width: int) -> None:
    op, constant, formula, domain, each = ACTIVATIONS[name]
    x = torch.cat([torch.randn(100, width) * size for size in (0.01, 1, 10)])
    x = x.abs() + 1e-3 if domain == "positive" else x
    program = Program()
    got = apply(x, op, 0, program.const(constant) if constant is not None else 0, program)
    want = formula(x.double())
    assert error(got, want) < FLOAT_ERROR
    if each:
        worst = ((got - want).abs() / want.abs().clamp_min(1e-30)).max().item()
        assert worst < WORST_ERROR, worst


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_special_values(name: str) -> None:
    op, constant, formula, _, _ = ACTIVATIONS[name]
    x = torch.tensor([[0.0, float("inf"), -float("inf"), float("nan"), 100.0, -100.0, 1e30, -1e30]])
    program = Program()
    got = apply(x, op, 0, program.const(constant) if constant is not None else 0, program)
    want = formula(x.double()).float()
    if name in ("gelu", "gelu_tanh", "silu"):  # -inf * 0 is a matter of taste
        got[0, 2] = want[0, 2]
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-38, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_factor_with_a_constant_added(width: int, rows: int) -> None:
    x, factor, program = torch.randn(rows, width), torch.randn(1), Program()
    got = apply(x, Op.MUL_SHIFTED, program.operand(factor), program.const(1.5), program)
    assert torch.equal(got, x * (factor + 1.5))


@pytest.mark.parametrize("make", [full, apart, half])
@pytest.mark.parametrize("has_factor", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_add_scaled(width: int, rows: int, has_factor: bool, make: Operand) -> None:
    x, matrix, program = torch.randn(rows, width), make(rows, width), Program()
    factor = torch.randn(1) if has_factor else torch.zeros(1)
    out, added = torch.full((rows, width), float("nan")), program.operand(matrix)
    scalar = program.operand(factor) if has_factor else -1
    program.add(Op.ADD_SCALED, added, program.const(1.5), scalar).add(Op.STORE_F32, program.out(out))
    map_rows(x, None, program)
    assert torch.equal(out, x + (factor + 1.5) * matrix.float())


@pytest.mark.parametrize("width", WIDTHS)
def test_add_quantized(width: int) -> None:
    x, q, scale, program = torch.randn(100, width), random_int8(100, width), torch.rand(100), Program()
    got = apply(x, Op.ADD_QROW, program.operand(q), program.operand(scale), program)
    assert torch.equal(got, x + q.float() * scale[:, None])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(width: int, affine: bool) -> None:
    x, mean, var = torch.randn(100, width), torch.randn(width), torch.rand(width)
    weight, bias = (torch.randn(width), torch.randn(width)) if affine else (torch.empty(0), torch.empty(0))
    program = Program()
    got = apply(x, Op.BATCH_NORM, program.operand(mean, var, weight, bias), program.const(1e-5), program)
    given = (weight.double(), bias.double()) if affine else (None, None)
    assert error(got, F.batch_norm(x.double(), mean.double(), var.double(), *given, eps=1e-5)) < FLOAT_ERROR


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(width: int, affine: bool) -> None:
    x = torch.randn(100, width) * 3 + 1
    weight, bias = (torch.randn(width), torch.randn(width)) if affine else (torch.empty(0), torch.empty(0))
    program = Program()
    got = apply(x, Op.LAYER_NORM, program.operand(weight, bias), program.const(1e-5), program)
    given = (weight.double(), bias.double()) if affine else (None, None)
    want = F.layer_norm(x.double(), (width,), *given, eps=1e-5)
    assert error(got, want) < 2 * FLOAT_ERROR if width > 1 else (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("width", WIDTHS)
def test_l2_normalize(width: int) -> None:
    x, program = torch.randn(100, width), Program()
    x[3] = 0
    got = apply(x, Op.L2_NORMALIZE, 0, program.const(1e-12), program)
    assert error(got, F.normalize(x.double(), dim=1)) < FLOAT_ERROR


@pytest.mark.parametrize("center", [-50, 0, 50])
@pytest.mark.parametrize("width", WIDTHS)
def test_softmax(width: int, center: int) -> None:
    x = torch.randn(100, width) * 5 + center
    assert error(apply(x, Op.SOFTMAX, 0, 0, Program()), x.double().softmax(1)) < FLOAT_ERROR
    assert error(apply(x, Op.LOG_SOFTMAX, 0, 0, Program()), x.double().log_softmax(1)) < FLOAT_ERROR


@pytest.mark.parametrize("depth", [1, 7, 16, 47, 64])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_head_mean_changes_the_width(depth: int, heads: int) -> None:
    x, bias, program = torch.randn(100, heads * depth), torch.randn(depth), Program()
    program.add(Op.HEAD_MEAN, 0, heads)
    got = apply(x, Op.ADD_COL, program.operand(bias), 0, program, width=depth)
    want = x.double().view(100, heads, depth).mean(1) + bias
    assert error(got, want) < FLOAT_ERROR


@pytest.mark.parametrize("depth", [1, 7, 16, 48, 64])
@pytest.mark.parametrize("heads", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_row_dot(depth: int, heads: int, rows: int) -> None:
    x, att, program = torch.randn(rows, heads * depth), torch.randn(heads * depth), Program()
    for out in (torch.empty(rows, heads), strided(torch.zeros(rows, heads))):
        program = Program()
        program.add(Op.ROW_DOT, program.operand(att), program.out(out), heads)
        map_rows(x, None, program)
        want = (x.double() * att).view(rows, heads, depth).sum(2)
        assert error(out, want) < FLOAT_ERROR


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_stores(width: int, rows: int) -> None:
    x = torch.randn(rows, width)
    for make in (torch.zeros_like, lambda t: strided(torch.zeros_like(t))):
        single_, half_, program = make(x), make(x.bfloat16()), Program()
        program.add(Op.STORE_F32, program.out(single_)).add(Op.STORE_BF16, program.out(half_))
        map_rows(x, None, program)
        assert torch.equal(single_, x) and torch.equal(half_, x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 64])
def test_stores_past_the_caches(width: int, dtype: torch.dtype) -> None:
    rows = 2**23 // width + 5  # at least 16 MiB
    x, memory, program = torch.randn(rows, width), torch.zeros(rows * width + 2, dtype=dtype), Program()
    out = memory[1:-1].view(rows, width)  # its lines are not those of the memory
    op = Op.STORE_F32 if dtype == torch.float32 else Op.STORE_BF16
    map_rows(x, None, program.add(op, program.out(out)))
    assert torch.equal(out, x.to(dtype)) and memory[0] == memory[-1] == 0


def test_bf16_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    low = torch.arange(0x3F800000, 0x3F800000 + 0x40000, 0x1000, dtype=torch.int32).view(torch.float32)
    x = torch.cat([low, torch.tensor([float("inf"), -float("inf"), 3.4e38, 1e-40, -0.0])])[None]
    out, program = torch.empty(x.shape, dtype=torch.bfloat16), Program()
    map_rows(x, None, program.add(Op.STORE_BF16, program.out(out)))
    assert torch.equal(out.view(torch.int16), x.bfloat16().view(torch.int16))
    map_rows(
        torch.full((1, 3), float("nan")), None, store_bf16(nan := torch.empty(1, 3, dtype=torch.bfloat16))
    )
    assert nan.isnan().all()


def store_bf16(out: Tensor) -> Program:
    program = Program()
    return program.add(Op.STORE_BF16, program.out(out))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_quant_row(width: int, rows: int) -> None:
    x = torch.randn(rows, width) * torch.logspace(-45, 30, rows)[:, None]
    x[: rows // 100] = 0
    q, scale, program = padded(rows, width), torch.empty(rows), Program()
    map_rows(x, None, program.add(Op.QUANT_ROW, program.out(q), program.out(scale)))
    assert torch.equal(scale, row_scale(x))
    assert torch.equal(q, quantized(x, scale[:, None]))
    assert not padding(q).any()


@pytest.mark.parametrize("width", [7, 64, 100])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_such_a_scale(width: int, bad: float) -> None:
    for at in range(width):
        x = torch.randn(3, width)
        x[1, at] = bad
        q, scale, program = padded(3, width), torch.empty(3), Program()
        amax, columns = torch.zeros(1), torch.zeros(width)
        program.add(Op.QUANT_ROW, program.out(q), program.out(scale))
        program.add(Op.AMAX, program.out(amax)).add(Op.AMAX, program.out(columns))
        map_rows(x, None, program)
        assert scale.isfinite().tolist() == [True, False, True]
        assert not amax.isfinite().any() and columns.isfinite().sum() == width - 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("per_column", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_quant_static(width: int, per_column: bool, counted: bool) -> None:
    x = torch.randn(1000, width) * 2
    x[0, 0], x[1, 0] = 1e35, -1e35
    scale = torch.rand(width if per_column else 1) * 0.02 + 0.01
    q, count, program = padded(1000, width), torch.zeros(1, dtype=torch.int64), Program()
    code, base = program.out(q), program.operand(scale)
    map_rows(x, None, program.add(Op.QUANT_STATIC, code, base, program.out(count) if counted else -1))
    assert torch.equal(q, quantized(x, scale))
    assert not padding(q).any()
    saturated = ((x * (1 / scale)).round().abs() > 127).sum()
    assert saturated > 0 and count.item() == (saturated if counted else 0)


def test_halves_round_to_even() -> None:
    x = torch.arange(-130, 130).float()[None] + 0.5
    q, program = padded(1, 260), Program()
    code, scale = program.out(q), program.operand(torch.ones(1))
    map_rows(x, None, program.add(Op.QUANT_STATIC, code, scale, -1))
    assert torch.equal(q, x.round().clamp(-127, 127).to(torch.int8))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("per_column", [True, False])
def test_quant_pow2(width: int, per_column: bool) -> None:
    x = torch.randn(1000, width) * torch.logspace(-3, 1, 1000)[:, None]
    x[5] = 0
    base = torch.rand(width if per_column else 1) * 0.02 + 0.01
    q, shift, program = padded(1000, width), torch.full((1000,), 9, dtype=torch.uint8), Program()
    values_out, shift_out = program.out(q), program.out(shift)
    map_rows(x, None, program.add(Op.QUANT_POW2, values_out, shift_out, program.operand(base)))
    top = (x * (1 / base)).abs().amax(1)
    want = (top[:, None] * 2.0 ** torch.arange(1, 8) <= 127).sum(1)
    assert torch.equal(shift.long(), want)
    assert torch.equal(q, (x * (1 / base) * 2.0 ** want[:, None]).round().clamp(-127, 127).to(torch.int8))
    assert not padding(q).any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", [Op.QUANT_ROW, Op.QUANT_POW2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "elu"])
def test_a_chain_before_a_quantization(
    width: int, rows: int, op: Op, dtype: torch.dtype, activation: str
) -> None:
    x, more = torch.randn(rows, width), torch.randn(rows, width).to(dtype)
    factor, bias, base = torch.randn(rows), torch.randn(width), torch.rand(width) * 0.02 + 0.01
    scale_type = torch.float32 if op == Op.QUANT_ROW else torch.uint8
    last, constant = ACTIVATIONS[activation][:2]

    def results(values: Tensor, chain: Callable[[Program], object]) -> list[Tensor]:
        q, scale = padded(rows, width), torch.empty(rows, dtype=scale_type)
        after, program = torch.empty(rows, width), Program()
        chain(program)
        unit = program.operand(base) if op == Op.QUANT_POW2 else 0
        program.add(op, program.out(q), program.out(scale), unit)
        map_rows(values, None, program.add(Op.STORE_F32, program.out(after)))
        assert not padding(q).any()
        return [q, scale, after]

    def chain(program: Program) -> None:
        program.add(Op.MUL_ROW, program.operand(factor)).add(Op.ADD_COL, program.operand(bias))
        program.add(Op.ADD_FULL, program.operand(more)).add(last, 0, program.const(constant or 0.0))

    apart, single = x * factor[:, None] + bias + more.float(), Program()
    apart = apply(apart, last, 0, single.const(constant or 0.0), single)
    for got, want in zip(results(x, chain), results(apart, lambda _: None), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("width", WIDTHS)
def test_amax(width: int) -> None:
    x = torch.randn(1000, width)
    tensor, columns, program = torch.zeros(1), torch.zeros(width), Program()
    program.add(Op.AMAX, program.out(tensor)).add(Op.AMAX, program.out(columns))
    map_rows(x, None, program)
    assert tensor.item() == x.abs().max() and torch.equal(columns, x.abs().amax(0))
    map_rows(x / 2, None, program)  # accumulates
    assert tensor.item() == x.abs().max() and torch.equal(columns, x.abs().amax(0))


def test_instructions_go_on_after_a_store() -> None:
    x, bias, program = torch.randn(100, 64), torch.randn(64), Program()
    first, second = torch.empty(100, 64), torch.empty(100, 64)
    program.add(Op.ADD_COL, program.operand(bias)).add(Op.STORE_F32, program.out(first)).add(Op.RELU)
    program.add(Op.STORE_F32, program.out(second))
    map_rows(x, None, program)
    assert torch.equal(first, x + bias) and torch.equal(second, (x + bias).relu())


ROWS3 = torch.ones(3)


@pytest.mark.parametrize(
    ("code", "operands", "outs", "message"),
    [
        ([1, 0, 0], [ROWS3], [], "4 numbers an instruction"),
        ([99, 0, 0, 0], [], [], "unknown opcode 99"),
        ([1, 0, 0, 0], [], [], "names operand 0 of 0"),
        ([1, -1, 0, 0], [ROWS3], [], "names operand -1 of 1"),
        ([1, 0, 0, 0], [torch.ones(4)], [], r"float32 \[rows\]"),
        ([3, 0, 0, 0], [ROWS3], [], r"float32 \[width\]"),
        ([5, 0, 0, 0], [torch.ones(3, 5)], [], r"\[rows, width\]"),
        ([5, 0, 0, 0], [torch.ones(3, 4, dtype=torch.int8)], [], "names operand 1 of 1"),
        ([5, 0, 0, 0], [torch.ones(3, 4, dtype=torch.int8), torch.ones(4)], [], "before its scales"),
        ([8, 0, 0, 0], [], [], "names constant 0 of 0"),
        ([10, 0, 0, 0], [ROWS3], [], "one element"),
        ([45, 0, 3, 0], [], [], "do not divide the width 4"),
        ([46, 8, 2, 0], [], [], "window of 2 columns from 8 of 4"),
        ([46, 0, 5, 0], [], [], "window of 5 columns from 0 of 4"),
        ([46, 0, 0, 0], [], [], "must lie inside"),
        ([60, 0, 0, 0], [], [], "names output 0 of 0"),
        ([60, 0, 0, 0], [], [torch.empty(3, 5)], r"float32 \[rows, width\]"),
        ([60, 0, 0, 0], [], [torch.empty(3, 4).bfloat16()], r"float32 \[rows, width\]"),
        ([62, 0, 1, 0], [], [torch.empty(3, 4, dtype=torch.int8), torch.empty(3)], "padded to 64 bytes"),
        ([60, 0, 0, 0], [], [torch.empty(10).as_strided((3, 4), (3, 1))], "rows of a matrix .* overlap"),
        ([6, 0, 0, 0], [torch.ones(10).as_strided((3, 4), (3, 1))], [], "rows of a matrix .* overlap"),
        ([65, 0, 0, 0], [], [torch.empty(3)], "one element or"),
        ([66, 0, 0, 2], [torch.ones(4)], [torch.empty(3, 3)], r"\[rows, heads\]"),
        ([40, 0, 0, 0], [torch.ones(4)] * 4, [], "names constant 0"),
    ],
)
def test_bad_programs(code: list[int], operands: list[Tensor], outs: list[Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        map_rows(torch.ones(3, 4), None, Program(code, operands, [], outs))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_mask_bits_and_store_bits(width: int, rows: int) -> None:
    x, value = torch.randn(rows, width), signed(rows, width)
    value[torch.rand(rows, width) < 0.1] = float("nan")
    mask = torch.full((rows, -(-width // 8)), 255, dtype=torch.uint8)
    program = Program()
    map_rows(value, None, program.add(Op.STORE_BITS, program.out(mask)))
    assert torch.equal(mask, torch.ops.gnnc.relu_mask(value))
    program = Program()
    got = apply(x, Op.MASK_BITS, program.operand(mask), 0, program)
    assert torch.equal(got, torch.ops.aten.threshold_backward(x, value, 0))


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_elu_backward(width: int, is_result: bool) -> None:
    x, value, program = torch.randn(100, width), torch.randn(100, width), Program()
    value = F.elu(value, 0.7) if is_result else value
    out = torch.full_like(x, float("nan"))
    operand, const = program.operand(value), program.const(0.7)
    program.add(Op.ELU_BACKWARD, operand, const, int(is_result)).add(Op.STORE_F32, program.out(out))
    map_rows(x, None, program)
    want = torch.ops.aten.elu_backward(x.double(), 0.7, 1, 1, is_result, value.double())
    assert error(out, want) < 1e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_leaky_relu_backward(width: int) -> None:
    x, value, program = torch.randn(100, width), signed(100, width), Program()
    got = apply(x, Op.LEAKY_RELU_BACKWARD, program.operand(value), program.const(0.2), program)
    assert torch.equal(got, torch.ops.aten.leaky_relu_backward(x, value, 0.2, False))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 5, 47, 49, 20_000])
def test_col_sum_has_the_same_bits_at_any_thread_count(width: int, rows: int) -> None:
    if rows * width > 2_000_000:
        rows = 2000
    x, w = torch.randn(rows, width), torch.randn(width + 1, width)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            total, product = torch.full((width,), float("nan")), torch.full((width + 1,), float("nan"))
            program = Program()
            map_rows(x, None, program.add(Op.COL_SUM, program.out(total)))
            program = Program()
            gemm(x, None, w, False, 0, program.add(Op.COL_SUM, program.out(product)))
            found.append((total, product))
    finally:
        torch.set_num_threads(threads)
    assert all(bits(*pair) == bits(*found[0]) for pair in found)
    scale = x.double().abs().sum(0)
    assert ((found[0][0].double() - x.double().sum(0)).abs() <= 1e-6 * scale).all()
    bound = 1e-5 * (x.double().abs() @ w.double().abs().t()).sum(0)
    assert ((found[0][1].double() - (x.double() @ w.double().t()).sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_col_sum_of_an_aggregation(width: int, hub: bool) -> None:
    degree = torch.randint(0, 12, (3000,))
    degree[17] = 20_000 if hub else 0
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    col, x = torch.randint(0, 500, (int(rowptr[-1]),), dtype=torch.int32), torch.randn(500, width)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            total, program = torch.full((width,), float("nan")), Program()
            program.add(Op.COL_SUM, program.out(total))
            torch.ops.gnnc_cpu.spmm(rowptr, col, None, x, None, None, 0, 1, *program.arguments)
            found.append(total)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(total, found[0]) for total in found)
    rows = x.double()[col.long()]
    assert ((found[0].double() - rows.sum(0)).abs() <= 1e-6 * rows.abs().sum(0)).all()
