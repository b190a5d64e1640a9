"""Attention whose logits are computed from the rows at both ends of an edge, in one pass, against float64."""

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

from gnnc.ir.message import edge_map_reference
from gnnc.ir.sparse import edge_softmax_reference, spmm_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of

GNNC = torch.ops.gnnc
GATV2 = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); t2 = aten.mul.Tensor(t1, c0); "
    "t3 = aten.sum.dim_IntList(t2, [2]); return t3"
)
DISTANCE = (
    "t0 = aten.sub.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, t0); t2 = aten.sum.dim_IntList(t1, [-1]); "
    "t3 = aten.neg.default(t2); t4 = aten.add.Tensor(t3, e0); return t4"
)
DOT = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); return t1"
SIZES = (
    (2, 32),
    (4, 16),
    (1, 64),
    (1, 1),
    (1, 7),
    (3, 47),
    (1, 47),
    (8, 8),
    (5, 12),
    (3, 16),
    (1, 100),
    (1, 128),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Case:
    """Attention on one graph.

    Attributes:
        name: ``gatv2``, ``dot`` (rows of its own, scaled), or ``distance`` (a body with a value of the edge).
        heads, each: heads of a row, and columns of a head.
        dtype: element type of the rows that edges gather.
        alpha: whether the attention weights are read, too.
    """

    name: str
    heads: int
    each: int
    dtype: torch.dtype
    alpha: bool = False

    @property
    def is_same(self) -> bool:
        """Whether the rows of the logits are those of the sum."""
        return self.name != "dot"

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
            edge: Tensor,
            att: Tensor,
        ) -> tuple[Tensor, ...]:
            read = widened(x, x_scale) if self.is_same else widened(key, key_scale)
            if self.name == "gatv2":
                logits = GNNC.edge_map(rowptr, col, GATV2, [own], [read], [], [att])
            elif self.name == "distance":
                logits = GNNC.edge_map(rowptr, col, DISTANCE, [own], [read], [edge], [])
            else:
                logits = GNNC.sddmm(rowptr, col, own, read, "dot") / 4.0
            alpha = GNNC.edge_softmax(rowptr, logits)
            rows = own.shape[0]
            result = weighted_sum(rowptr, col, alpha, x, x_scale, rows)
            return (result, alpha) if self.alpha else (result,)

        return call

    def values(self, g: Graph) -> tuple[Tensor, ...]:
        """Return random operands."""
        shape = (g.num_src, self.heads, self.each)
        x, key = random_rows(shape, self.dtype), random_rows(shape, self.dtype)
        own = torch.randn(g.num_dst, *shape[1:])
        edge, att = torch.randn(g.num_edges, self.heads), torch.randn(1, *shape[1:])
        return g.rowptr, g.col, own, *x, *key, edge, att

    def expected(self, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the result and the attention weights, in float64."""
        rowptr, col, own, x, x_scale, key, key_scale, edge, att = values
        whole = x.double() * x_scale.double()[:, None, None]
        read = whole if self.is_same else key.double() * key_scale.double()[:, None, None]
        body = {"gatv2": GATV2, "distance": DISTANCE, "dot": DOT}[self.name]
        edges = [edge.double()] if self.name == "distance" else []
        constants = [att.double()] if self.name == "gatv2" else []
        logits = edge_map_reference(rowptr, col, body, [own.double()], [read], edges, constants)
        alpha = edge_softmax_reference(rowptr, logits / 4.0 if self.name == "dot" else logits)
        return spmm_reference(rowptr, col, alpha, whole, "sum", own.shape[0]), alpha

    def check(self, g: Graph) -> None:
        """Compare a program on the GPU with the reference."""
        values = self.values(g)
        got = run_fused_on_cuda(self.function(), ["attention"], *values)
        want = self.expected(values)
        exact = 2e-4 if self.dtype == torch.int8 else 1e-5  # int8 rows have weights in steps of 2^-15
        for one, other in zip(got, want, strict=False):
            assert relative_error(one, other) < exact


def kernels_of(case: Case, architecture: str) -> tuple[str, bytes]:
    values = case.values(GRAPHS["random"]())
    program = fused_program_of(case.function(), *values, backend=f"cuda-offline:{architecture}")
    code = program.code[architecture]
    return str(resources_of(code)), code


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "size"), all_for_one([(2, 32), (5, 12), (1, 128)]))
@pytest.mark.parametrize("name", ["gatv2", "dot"])
def test_no_kernel_spills(architecture: str, name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    text, code = kernels_of(Case(name, *size, dtype), architecture)
    assert "body_attention" in text
    assert_no_spills(resources_of(code))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gatv2", "dot", "distance"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_results_are_those_of_the_reference(
    graph: str, size: tuple[int, int], dtype: torch.dtype, name: str
) -> None:
    Case(name, *size, dtype).check(GRAPHS[graph]())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gatv2", "dot", "distance"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(2, 32), (3, 47)])
@pytest.mark.parametrize("graph", ["random", "star"])
def test_attention_weights_are_stored_for_other_readers(
    graph: str, size: tuple[int, int], dtype: torch.dtype, name: str
) -> None:
    Case(name, *size, dtype, alpha=True).check(GRAPHS[graph]())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gatv2", "dot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_wide_rows_are_stored(dtype: torch.dtype, name: str) -> None:
    Case(name, 2, 301, dtype).check(GRAPHS["random"]())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gatv2", "dot"])
def test_a_hub_is_computed_by_many_warps(name: str) -> None:
    Case(name, 2, 32, torch.float16).check(star(100_000))
