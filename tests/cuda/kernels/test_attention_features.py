"""Attention of dot products with edge features in the logits and the sums, in one pass, against float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import all_for_one
from attention_rows import random_rows, weighted_sum, widened
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS, Graph, relative_error, star
from one_op import fused_program_of, run_fused_on_cuda
from torch import Tensor

from gnnc.ir.attention import FEATURE_SUM, feature_dot
from gnnc.ir.message import edge_map_reference, message_reference
from gnnc.ir.sparse import edge_softmax_reference, sddmm_reference, spmm_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of
from gnnc.runtime.cuda.kernels.attention import reads_features

GNNC = torch.ops.gnnc
ATEN = torch.ops.aten
SIZES = ((4, 16, 16), (1, 64, 16), (2, 32, 8), (8, 8, 4), (3, 16, 12), (1, 47, 24), (1, 16, 12))
"""Heads, columns of a head, features of an edge."""
DTYPES = (torch.float32, torch.float16, torch.int8)
SCALE = 0.25


@dataclass(frozen=True)
class Case:
    """Attention on one graph: heads, columns of a head, features, and the element type of gathered rows."""

    heads: int
    each: int
    features: int
    dtype: torch.dtype

    def function(self) -> Callable[..., Any]:
        """Return the ops of the layer."""

        def call(
            rowptr: Tensor,
            col: Tensor,
            own: Tensor,
            x: Tensor,
            x_scale: Tensor,
            key: Tensor,
            key_scale: Tensor,
            feature_own: Tensor,
            features: Tensor,
        ) -> tuple[Tensor, ...]:
            dot = GNNC.sddmm(rowptr, col, own, widened(key, key_scale), "dot") * SCALE
            term = GNNC.edge_map(rowptr, col, feature_dot(SCALE), [feature_own], [], [features], [])
            alpha = GNNC.edge_softmax(rowptr, dot + term)
            rows = own.shape[0]
            result = weighted_sum(rowptr, col, alpha, x, x_scale, rows)
            edges = [features, ATEN.reshape(alpha, [-1, self.heads, 1])]
            return result, GNNC.message(rowptr, col, FEATURE_SUM, "sum", [], [], edges, [], rows)

        return call

    def values(self, g: Graph) -> tuple[Tensor, ...]:
        """Return random operands."""
        shape = (g.num_src, self.heads, self.each)
        x, key = random_rows(shape, self.dtype), random_rows(shape, self.dtype)
        own = torch.randn(g.num_dst, *shape[1:])
        feature_own = torch.randn(g.num_dst, self.heads, self.features)
        features = torch.randn(g.num_edges, self.features)
        return g.rowptr, g.col, own, *x, *key, feature_own, features

    def expected(self, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return both results in float64."""
        rowptr, col, own, x, x_scale, key, key_scale, feature_own, features = values
        rows = x.double() * x_scale.double()[:, None, None]
        keys = key.double() * key_scale.double()[:, None, None]
        edges = features.double()
        dot = sddmm_reference(rowptr, col, own.double(), keys, "dot") * SCALE
        term = edge_map_reference(rowptr, col, feature_dot(SCALE), [feature_own.double()], [], [edges], [])
        alpha = edge_softmax_reference(rowptr, dot + term)
        result = spmm_reference(rowptr, col, alpha, rows, "sum", own.shape[0])
        weighted = [edges, alpha[:, :, None]]
        return result, message_reference(rowptr, col, FEATURE_SUM, "sum", [], [], weighted, [], own.shape[0])

    def check(self, g: Graph) -> None:
        """Compare a program on the GPU with the reference."""
        values = self.values(g)
        got = run_fused_on_cuda(self.function(), ["attention"], *values)
        exact = 2e-4 if self.dtype == torch.int8 else 1e-5  # int8 rows have weights in steps of 2^-15
        for one, other, most in zip(got, self.expected(values), (exact, 1e-5), strict=True):
            assert relative_error(one, other) < most


def fits(size: tuple[int, int, int], dtype: torch.dtype) -> bool:
    return reads_features(*size, dtype)


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "size"), all_for_one([(4, 16, 16), (2, 32, 8), (1, 64, 16)]))
def test_no_kernel_spills(architecture: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = Case(*size, dtype)
    values = case.values(GRAPHS["random"]())
    program = fused_program_of(case.function(), *values, backend=f"cuda-offline:{architecture}")
    resources = resources_of(program.code[architecture])
    assert "body_attention" in str(resources)
    assert_no_spills(resources)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.cuda
def test_sizes(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    if not fits(size, dtype):
        pytest.skip("the threads of a head do not share the features")
    Case(*size, dtype).check(GRAPHS["random"]())


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.cuda
def test_graphs(graph: str, dtype: torch.dtype) -> None:
    Case(4, 16, 16, dtype).check(GRAPHS[graph]())


@pytest.mark.parametrize("size", [(4, 16, 16), (1, 64, 16)])
@pytest.mark.cuda
def test_the_parts_of_a_hub_are_joined(size: tuple[int, int, int]) -> None:
    Case(*size, torch.float16).check(star(70_000))


@pytest.mark.cuda
def test_results_have_the_same_bits_every_time() -> None:
    case = Case(4, 16, 16, torch.float16)
    values = case.values(star(9000))
    once, twice = (run_fused_on_cuda(case.function(), ["attention"], *values) for _ in range(2))
    for one, other in zip(once, twice, strict=True):
        assert torch.equal(one, other)
