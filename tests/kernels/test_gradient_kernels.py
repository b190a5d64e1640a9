"""The kernels of gradients against their references, in float64 where they sum."""

import pytest
import torch
from kernel_graphs import GRAPHS, ops, relative_error, same_at_any_thread_count
from torch import Tensor

from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu.structure import csr_transpose

GNNC = torch.ops.gnnc


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    get_backend("cpu")


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [None, 1, 2, 3, 4, 8, 16, 20])
def test_edge_softmax_backward(name: str, heads: int | None) -> None:
    g = GRAPHS[name]()
    shape = (g.num_edges, *([] if heads is None else [heads]))
    alpha, grad = torch.rand(shape), torch.randn(shape)

    def call() -> Tensor:
        out = torch.full(shape, float("nan"))
        ops().edge_softmax_backward(g.rowptr, alpha, grad, out)
        return out

    expected = GNNC.edge_softmax_backward(g.rowptr, alpha.double(), grad.double())
    assert relative_error(same_at_any_thread_count(call), expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 127, 129, 20_001])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 47), (47, 7), (6, 32), (64, 33)])
def test_gemm_tn(rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    a, b = torch.randn(rows, inner + 3).to(dtype)[:, :inner], torch.randn(rows, outer).to(dtype)

    def call() -> Tensor:
        out = torch.full((inner, outer), float("nan"))
        ops().gemm_tn(a, b, out)
        return out

    expected = a.double().t() @ b.double()
    torch.testing.assert_close(
        same_at_any_thread_count(call).double(), expected, rtol=1e-4, atol=1e-6 * max(rows, 1) ** 0.5 * 10
    )


@pytest.mark.parametrize("other", ["int8", "float32", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 127, 129, 20_001])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 47), (47, 7), (6, 32), (64, 33)])
def test_gemm_tn_of_quantized_rows(rows: int, inner: int, outer: int, other: str) -> None:
    a, a_scale = quantized_rows(rows, inner)
    b, b_scale = quantized_rows(rows, outer)
    if other != "int8":
        b, b_scale = torch.randn(rows, outer).to(getattr(torch, other)), None

    def call() -> Tensor:
        out = torch.full((inner, outer), float("nan"))
        ops().gemm_tn(a, b, out, a_scale, b_scale)
        return out

    expected, rounding = product_of_quantized_rows(a, a_scale, b, b_scale)
    error = (same_at_any_thread_count(call).double() - expected).abs()
    assert torch.all(error <= 1e-4 * expected.abs() + 1e-5 * rows**0.5 + rounding)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_gemm_tn_of_quantized_rows_hides_no_number_that_is_not_finite(number: float) -> None:
    a, a_scale = quantized_rows(400, 20)
    b, out = torch.randn(400, 30), torch.empty(20, 30)
    a[:, 3], b[:, 7], b[200, 4] = 5, 1e-12, number
    ops().gemm_tn(a, b, out, a_scale, None)
    finite = torch.tensor([c != 4 for c in range(30)])
    assert not out[:, 4].isfinite()[a[200] != 0].any() and out[:, finite].isfinite().all()
    ops().gemm_tn(b, a, out.view(30, 20), None, a_scale)
    assert not out.view(30, 20)[4].isfinite()[a[200] != 0].any()
    small = (a_scale.double() * 5 * 1e-12).sum()
    ops().gemm_tn(a, b, out, a_scale, None)
    torch.testing.assert_close(out[3, 7].double(), small, rtol=1e-4, atol=0)


def product_of_quantized_rows(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the product over all rows, and what rounding one side's columns to 16 bits may change."""
    left = a.double() * a_scale.double()[:, None]
    right = b.double() if b_scale is None else b.double() * b_scale.double()[:, None]
    steps = right.mul(a_scale.double()[:, None]).abs().amax(0) if len(a) else right.new_zeros(b.shape[1])
    bounds = [a.double().square().sum(0).sqrt()[:, None] * steps]
    if b_scale is not None and len(a):
        steps = left.mul(b_scale.double()[:, None]).abs().amax(0)
        bounds.append(steps[:, None] * b.double().square().sum(0).sqrt())
    return left.t() @ right, 3 * 2**-16 * torch.stack(bounds).amax(0)


def quantized_rows(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return int8 rows, padded to 64 bytes, and a scale for each."""
    padded = torch.randint(-127, 128, (rows, -(-width // 64) * 64), dtype=torch.int8)
    return padded[:, :width], torch.rand(rows) / 100


@pytest.mark.parametrize(("inner", "outer"), [(7, 47), (64, 33), (5, 64)])
def test_gemm_tn_rounds_as_a_cast(inner: int, outer: int) -> None:
    a, b = torch.randn(1000, inner), torch.randn(1000, outer)
    want, got = torch.empty(inner, outer), torch.empty(inner, outer)
    ops().gemm_tn(a.bfloat16(), b.bfloat16(), want)
    ops().gemm_tn(a, b.bfloat16(), got, None, None, True, False)
    assert torch.equal(got, want)
    ops().gemm_tn(a.bfloat16(), b, got, None, None, False, True)
    assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="a is not float32, which alone is rounded"):
        ops().gemm_tn(a.bfloat16(), b, got, None, None, True, False)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(2, 16), (3, 7), (5001, 1), (5003, 47), (3001, 64)])
def test_batch_norm(rows: int, width: int, dtype: torch.dtype, affine: bool) -> None:
    x = (torch.randn(rows, width + 2)[:, :width] + 5 * torch.randn(width)).to(dtype)
    weight, bias, *running = torch.rand(4, width)
    given, news = ([weight, bias, *running], 4) if affine else ([None] * 4, 2)

    def call() -> Tensor:
        out, vectors = torch.full((rows, width), float("nan")), torch.full((4, width), float("nan"))
        results = [*vectors[:news], *[None] * (4 - news)]
        ops().batch_norm(x, *given, 0.1, 1e-5, out, *results)
        return torch.cat([out, vectors[:news]])

    got = same_at_any_thread_count(call).double()
    numbers = [t if t is None else t.double() for t in given]
    if not affine:
        numbers = [torch.ones(width), torch.zeros(width), torch.zeros(width), torch.ones(width)]
        numbers = [t.double() for t in numbers]
    op = torch.ops.aten._native_batch_norm_legit_functional.default
    out, *vectors = op(x.double(), *numbers, True, 0.1, 1e-5)
    torch.testing.assert_close(got, torch.cat([out, torch.stack(vectors[:news])]), rtol=2e-5, atol=2e-5)


def test_batch_norm_of_equal_large_values_is_finite() -> None:
    rows, width = 3001, 64
    x = (1e6 * torch.randn(width)).expand(rows, width).contiguous()
    out, vectors = torch.empty(rows, width), torch.empty(4, width)
    ops().batch_norm(x, None, None, torch.zeros(width), torch.ones(width), 1.0, 1e-5, out, *vectors)
    _, inverse, _, variance = vectors
    assert out.isfinite().all() and inverse.isfinite().all() and (variance >= 0).all()


def test_batch_norm_of_no_rows() -> None:
    x, running, vectors = torch.zeros(0, 3), torch.rand(2, 3), torch.full((6, 3), float("nan"))
    ops().batch_norm(x, None, None, *running, 0.1, 1e-5, torch.zeros(0, 3), *vectors[:4])
    assert torch.equal(vectors[2:4], running)
    ops().batch_norm_backward(x, x, None, *vectors[:2], torch.zeros(0, 3), *vectors[4:])
    assert torch.equal(vectors[4:], torch.zeros(2, 3))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(2, 16), (3, 7), (5001, 1), (5003, 47), (3001, 64)])
def test_batch_norm_backward(rows: int, width: int, dtype: torch.dtype, affine: bool) -> None:
    x = (torch.randn(rows, width + 2)[:, :width] + 5 * torch.randn(width)).to(dtype)
    grad, weight = torch.randn(rows, width), torch.rand(width) if affine else None
    mean, inverse = x.float().mean(0), 1 / (x.float().var(0, correction=0) + 1e-5).sqrt()

    def call() -> Tensor:
        out, vectors = torch.full((rows, width), float("nan")), torch.full((2, width), float("nan"))
        ops().batch_norm_backward(grad, x, weight, mean, inverse, out, *vectors)
        return torch.cat([out, vectors])

    got = same_at_any_thread_count(call).double()
    op = torch.ops.aten.native_batch_norm_backward.default
    scale = torch.ones(width) if weight is None else weight
    wide = [t.double() for t in (grad, x, scale)]
    out, *sums = op(*wide, None, None, mean.double(), inverse.double(), True, 1e-5, [True] * 3)
    size = out.abs().max()
    torch.testing.assert_close(got[:-2] / size, out / size, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[-2:], torch.stack(sums), rtol=1e-5, atol=1e-5 * rows**0.5)


@pytest.mark.parametrize("width", [0, 1, 7, 8, 16, 47, 64])
@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_relu(rows: int, width: int) -> None:
    x, grad = torch.randn(rows, width + 2)[:, :width], torch.randn(rows, width)
    x[torch.rand(rows, width) < 0.2] = 0
    x[torch.rand(rows, width) < 0.1] = float("nan")
    mask = torch.full((rows, -(-width // 8)), 255, dtype=torch.uint8)
    ops().relu_mask(x, mask)
    assert torch.equal(mask, GNNC.relu_mask(x))
    out = torch.full((rows, width), float("nan"))
    ops().relu_backward(grad, mask, out)
    assert torch.equal(out, torch.ops.aten.threshold_backward(grad, x, 0))


@pytest.mark.parametrize("name", GRAPHS)
def test_csr_transpose(name: str) -> None:
    g = GRAPHS[name]()
    num_src = int(g.col.max()) + 3 if g.num_edges else 4
    found, expected = csr_transpose(g.rowptr, g.col, num_src), GNNC.csr_transpose(g.rowptr, g.col, num_src)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_refusals() -> None:
    a, b = torch.randn(4, 3), torch.randn(5, 2)
    with pytest.raises(RuntimeError, match="a has 4 rows, but b has 5"):
        ops().gemm_tn(a, b, torch.zeros(3, 2))
    q, scale = quantized_rows(4, 2)
    with pytest.raises(RuntimeError, match="b is int8 and needs a scale for each row"):
        ops().gemm_tn(a, q, torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="a is not int8 and takes no scale"):
        ops().gemm_tn(a, q, torch.zeros(3, 2), scale, scale)
    with pytest.raises(RuntimeError, match="a scale must have 4 elements"):
        ops().gemm_tn(a, q, torch.zeros(3, 2), None, scale[:3])
    with pytest.raises(RuntimeError, match="mask must have 4 elements"):
        ops().relu_backward(a, torch.zeros(9, dtype=torch.uint8), torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="alpha has 3 rows, but there are 2 edges"):
        ops().edge_softmax_backward(torch.tensor([0, 2]), torch.ones(3), torch.ones(3), torch.ones(3))
