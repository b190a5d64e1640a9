"""Gradients of attention whose logits a body computes against the reference in float64, on hard graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import all_for_one
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS, Graph, star
from one_op import fused_program_of, run_fused_on_cuda
from torch import Tensor

from gnnc.ir.structure import csr_transpose_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of
from gnnc.runtime.cuda.kernels.logit_body import write_differentiable_logit

GNNC = torch.ops.gnnc
GATV2 = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); t2 = aten.mul.Tensor(t1, c0); "
    "t3 = aten.sum.dim_IntList(t2, [2]); return t3"
)
DOT = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); return t1"
SQUASHED = (
    "t0 = aten.sub.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, t0); t2 = aten.mul.Tensor(t1, c0); "
    "t3 = aten.sum.dim_IntList(t2, [-1]); t4 = aten.tanh.default(t3); return t4"
)
"""A body whose logits are no linear function of the sum."""
BODIES = {"gatv2": GATV2, "dot": DOT, "squashed": SQUASHED}
SHAPES = [
    (2, 32),
    (4, 16),
    (1, 64),
    (1, 1),
    (1, 7),
    (3, 16),
    (3, 10),
    (4, 5),
    (2, 100),
    (1, 100),
    (1, 128),
    (8, 8),
]
"""Heads, and columns of each."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def gradients(body: str, *, joined: bool, results: int = 4) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function of one op, of the operands of ``values_of``."""
    has_constant = "c0" in body

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        *csr, dst, src, x, grad, att = given
        constants = [att] if has_constant else []
        rows = (dst, x if joined else src, x, grad)
        found = GNNC.body_attention_backward(*csr, body, *rows, constants, 0.5, 1e-16, joined)
        kept = [0, 1, *([] if joined else [2]), *([3] if has_constant else [])]
        return tuple(found[index] for index in kept[:results])

    return call


def values_of(g: Graph, heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the CSR, its transpose, rows of both ends, and a constant."""
    rowptr_t, col_t, _ = csr_transpose_reference(g.rowptr, g.col, g.num_src)
    counts = (g.num_dst, g.num_src, g.num_src, g.num_dst)
    rows = [torch.randn(count, heads, width).to(dtype) for count in counts]
    return [g.rowptr, g.col, rowptr_t, col_t, *rows, torch.randn(1, heads, width) / width**0.5]


def doubled(values: list[Tensor]) -> list[Tensor]:
    return [value.double() if value.is_floating_point() else value for value in values]


def assert_right(got: tuple[Tensor, ...], want: tuple[Tensor, ...], allowed: float = 3e-5) -> None:
    assert len(got) == len(want)
    for value, exact in zip(got, want, strict=True):
        assert value.shape == exact.shape and value.dtype == torch.float32
        if exact.numel():
            largest = exact.abs().max().clamp(min=1.0)
            assert float((value.double() - exact).abs().max() / largest) < allowed


def check(g: Graph, name: str, shape: tuple[int, int], dtype: torch.dtype, *, joined: bool) -> None:
    values = values_of(g, *shape, dtype)
    function = gradients(BODIES[name], joined=joined)
    got = run_fused_on_cuda(function, ["body_attention_backward"], *values)
    assert_right(got, function(*doubled(values)))


@pytest.mark.cuda
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BODIES)
def test_gradients_of_rows_of_three_matrices(
    name: str, dtype: torch.dtype, shape: tuple[int, int], graph: str
) -> None:
    check(GRAPHS[graph](), name, shape, dtype, joined=False)


@pytest.mark.cuda
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BODIES)
def test_gradients_of_rows_that_give_logits_too(
    name: str, dtype: torch.dtype, shape: tuple[int, int], graph: str
) -> None:
    check(GRAPHS[graph](), name, shape, dtype, joined=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gatv2", "dot"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_hub_is_computed_by_many_warps(name: str, joined: bool) -> None:
    check(star(100_000), name, (2, 32), torch.float16, joined=joined)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gatv2", "dot"])
def test_all_results_are_divided_as_they_are_stored(name: str) -> None:
    values = [*values_of(GRAPHS["random"](), 2, 32, torch.float16), torch.tensor(8.0)]
    function = gradients(BODIES[name], joined=False)

    def divided(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(result / given[-1] for result in function(*given[:-1]))

    got = run_fused_on_cuda(divided, ["body_attention_backward"], *values)
    assert_right(got, divided(*doubled(values)))


@pytest.mark.cuda
def test_results_that_nothing_reads_are_not_stored() -> None:
    values = values_of(GRAPHS["random"](), 2, 32, torch.float16)
    function = gradients(GATV2, joined=True, results=1)
    got = run_fused_on_cuda(function, ["body_attention_backward"], *values)
    assert_right(got, function(*doubled(values)))


@pytest.mark.cuda
def test_large_logits_have_no_overflow() -> None:
    values = values_of(GRAPHS["random"](), 2, 32, torch.float32)
    values[4] = values[4] * 100
    function = gradients(DOT, joined=False)
    got = run_fused_on_cuda(function, ["body_attention_backward"], *values)
    assert_right(got, function(*doubled(values)), 3e-4)


def program_text(name: str, shape: tuple[int, int], dtype: torch.dtype, backend: str, **options: Any) -> Any:
    values = values_of(GRAPHS["random"](), *shape, dtype)
    return fused_program_of(gradients(BODIES[name], **options), *values, backend=backend)


@pytest.mark.first(2)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "shape"), all_for_one([(2, 32), (3, 10), (1, 128)]))
@pytest.mark.parametrize("name", ["gatv2", "dot"])
def test_no_kernel_spills(name: str, shape: tuple[int, int], dtype: torch.dtype, architecture: str) -> None:
    program = program_text(name, shape, dtype, f"cuda-offline:{architecture}", joined=name == "gatv2")
    text = str(resources_of(program.code[architecture]))
    assert "body_attention_rows" in text and "body_attention_columns" in text
    assert_no_spills(resources_of(program.code[architecture]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BODIES)
def test_logits_of_heads_of_any_shape_have_derivatives(name: str, shape: tuple[int, int]) -> None:
    rows = torch.empty((1, *shape), device="meta")
    operands = {"i0": rows, "j0": rows, **({"c0": rows} if "c0" in BODIES[name] else {})}
    text = write_differentiable_logit(BODIES[name], operands, 0.5).text
    assert f"kWeighted = {'true' if 'c0' in operands else 'false'};" in text


@pytest.mark.parametrize(
    "body",
    [
        "t0 = aten.mul.Tensor(i0, j0); return t0",
        "t0 = aten.mul.Tensor(i0, c0); t1 = aten.mul.Tensor(t0, j0); t2 = aten.mul.Tensor(t1, c1); "
        "t3 = aten.sum.dim_IntList(t2, [-1]); return t3",
    ],
    ids=["no sum", "two constants"],
)
def test_other_bodies_are_declined(body: str) -> None:
    from torch.fx import GraphModule
    from torch.fx.experimental.proxy_tensor import make_fx

    from gnnc.runtime.cuda.kernels.body_attention_backward import BodyAttentionBackward
    from gnnc.runtime.registry import Decline

    def call(*given: Tensor) -> Tensor:
        *csr, dst, src, x, grad, att = given
        constants = [att] * body.count("c0") + [att] * body.count("c1")
        return GNNC.body_attention_backward(*csr, body, dst, src, x, grad, constants, 1.0, 0.0, False)[0]

    values = values_of(GRAPHS["random"](), 1, 1, torch.float32)
    module: GraphModule = make_fx(call, tracing_mode="fake")(*values)
    (node,) = (n for n in module.graph.nodes if "body_attention_backward" in str(n.target))
    assert isinstance(BodyAttentionBackward.plan(node), Decline)
