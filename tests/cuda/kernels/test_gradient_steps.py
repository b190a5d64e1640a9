"""Steps of gradients that ride on other kernels, each against the ops that it stands for."""

from collections.abc import Callable

import pytest
import torch
from one_op import run_fused_on_cuda, run_on_cuda
from torch import Tensor

GNNC = torch.ops.gnnc
ATEN = torch.ops.aten
WIDTHS = [1, 5, 8, 20, 64, 100, 300]


def signed(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width).masked_fill(torch.rand(rows, width) < 0.2, 0)


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mask": lambda x, row, value: GNNC.relu_backward(x * row, value),
    "elu": lambda x, row, value: ATEN.elu_backward(x * row, 0.7, 1, 1, False, value),
    "elu of the result": lambda x, row, value: ATEN.elu_backward(x * row, 0.7, 1, 1, True, value),
    "leaky relu": lambda x, row, value: ATEN.leaky_relu_backward(x * row, value, 0.3, False),
    "threshold": lambda x, row, value: ATEN.threshold_backward(x * row, value, 0),
    "division": lambda x, row, value: (x * row) / value,
}


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS[1:])  # a chain on single values is no kernel of its own
@pytest.mark.parametrize("step", STEPS)
def test_gradient_of_an_activation(step: str, width: int) -> None:
    values = signed(37, width), torch.rand(37, 1), signed(37, width).clamp(min=-0.6)
    x, row, value = values
    if step == "mask":
        value = GNNC.relu_mask(value)
    if step == "division":
        value = value.abs().sum()
    (got,), want = run_fused_on_cuda(STEPS[step], ["rowmap"], x, row, value), STEPS[step](x, row, value)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_operands_are_read_in_eight_bits(width: int) -> None:
    x, row, value = signed(37, width), torch.rand(37, 1), signed(37, width).clamp(min=-0.6)
    scale = GNNC.scale(value, "int8/row")
    quantized = GNNC.quantize(value, scale, "int8/row")

    def call(x: Tensor, row: Tensor, quantized: Tensor, scale: Tensor) -> Tensor:
        return ATEN.elu_backward(x * row, 0.7, 1, 1, True, GNNC.dequantize(quantized, scale, "row"))

    (got,) = run_fused_on_cuda(call, ["rowmap"], x, row, quantized, scale)
    torch.testing.assert_close(got, call(x, row, quantized, scale), rtol=1e-6, atol=1e-7)


@pytest.mark.cuda
@pytest.mark.parametrize(("inner", "kernel"), [(24, "gemm_fp32"), (600, "cublas")])
@pytest.mark.parametrize("width", [1, 3, 40, 64, 300])
@pytest.mark.parametrize("rows", [0, 1, 65, 500])
def test_sum_of_all_rows_of_a_product_in_fp32(rows: int, width: int, inner: int, kernel: str) -> None:
    """The product and the sum are one kernel, or cuBLAS and a launch of the row program."""
    x, w, row = torch.randn(rows, inner), torch.randn(width, inner), torch.rand(rows, 1)

    def call(x: Tensor, w: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        out = GNNC.gemm(x, w) * row
        return out.sum([0], True), out.half()

    got, want = run_fused_on_cuda(call, [kernel], x, w, row), call(x.double(), w.double(), row.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got[1], want[1].half(), rtol=2e-3, atol=2e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
def test_bits_behind_a_chain(width: int) -> None:
    x, row = signed(37, width), torch.rand(37, 1)
    x[3, 0] = float("nan")

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        out = (x * row - 0.1).relu()
        return out, GNNC.relu_mask(out)

    got, want = run_fused_on_cuda(call, ["rowmap"], x, row), call(x, row)
    assert torch.equal(got[1], want[1])


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("exponent", [-140, -20, 0, 20])
def test_power_of_two_behind_a_chain(width: int, exponent: int) -> None:
    x, row = signed(37, width) * 2.0**exponent, torch.rand(37, 1)

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        out = (x * row) * row
        power = GNNC.fp16_scale(out)
        return (out * power).half(), power

    got, want = run_fused_on_cuda(call, ["rowmap"] * 2, x, row), call(x, row)
    assert torch.equal(got[1], want[1]) and torch.equal(got[0], want[0])


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 1, 500])
@pytest.mark.parametrize("width", [*WIDTHS, 1000])
def test_sum_of_all_rows_behind_a_chain(width: int, rows: int) -> None:
    x, row = torch.randn(rows, width), torch.rand(rows, 1)

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        out = x * row + 1
        return out.sum([0], True), (out * row).half()

    got, want = run_fused_on_cuda(call, ["rowmap"], x, row), call(x.double(), row.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
def test_rows_are_multiplied_again_instead_of_stored() -> None:
    x, row = torch.randn(60, 20), torch.rand(60, 1)

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled = x * row
        power = GNNC.fp16_scale(scaled)
        return x.sum([0]), (scaled * power).half(), power

    got, want = run_fused_on_cuda(call, ["rowmap"] * 2, x, row), call(x, row)
    assert torch.equal(got[2], want[2]) and torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_int8_rows_are_dequantized_as_they_are_loaded(width: int) -> None:
    q, scale = torch.randint(-127, 128, (37, width), dtype=torch.int8), torch.rand(37)

    def call(q: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        return (GNNC.dequantize(q, scale, "row") * value).relu()

    value = signed(37, width)
    (got,), want = run_fused_on_cuda(call, ["rowmap"], q, scale, value), call(q, scale, value)
    assert torch.equal(got, want)
    alone = run_on_cuda(lambda q, scale: GNNC.dequantize(q, scale, "row"), "rowmap", q, scale)
    assert torch.equal(alone, GNNC.dequantize(q, scale, "row"))
