"""Sums over all edges, of products of two values of a body and of values of a body with stages."""

from collections.abc import Callable

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS, Graph, relative_error
from one_op import fused_program_of, program_of, run_fused_on_cuda, run_on_cuda
from slow import slow_but
from torch import Tensor

from gnnc.ir.message import edge_sum_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of

GNNC = torch.ops.gnnc
Groups = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
OUTER = "t0 = aten.t.default({a}); t1 = aten.mm.default(t0, {b}); return t1"
HEADS = (
    "t0 = aten.unsqueeze.default(e1, 2); t1 = aten.mul.Tensor(i0, t0); "
    "t2 = aten.reshape.default(t1, [-1, 64]); "
    "t3 = aten.t.default(t2); t4 = aten.mm.default(t3, e0); t5 = aten.t.default(t4); return t5"
)
SECOND = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.relu.default(t0); t2 = aten.mm.default(t1, c0); "
    "t3 = aten.threshold_backward.default(i1, t2, 0); t4 = aten.t.default(t3); "
    "t5 = aten.mm.default(t4, t1); return t5"
)
SQUARE = "t0 = aten.mm.default(i0, c0); t1 = aten.t.default(t0); t2 = aten.mm.default(t1, t0); return t2"
VALUES = (
    "t0 = aten.mm.default(e0, c0); t1 = aten.sum.dim_IntList(t0, [1], True); t2 = aten.tanh.default(t1); "
    "t3 = aten.mul.Tensor(t2, j0); t4 = aten.sum.dim_IntList(t3, [0]); return t4"
)


def cases(g: Graph) -> dict[str, tuple[str, Groups]]:
    """Return bodies with their operands on a graph."""

    def rows(count: int, *sizes: int) -> Tensor:
        return torch.randn(count, *sizes)

    dst, src, edges = g.num_dst, g.num_src, g.num_edges
    products = {
        f"{a}x{b}": (OUTER.format(a="e0", b="j0"), ([], [rows(src, b)], [rows(edges, a)], []))
        for a, b in ((1, 1), (3, 70), (16, 8), (64, 64), (70, 33), (144, 64))
    }
    heads = ([rows(dst, 4, 16)], [], [rows(edges, 16), rows(edges, 4)], [])
    halves = OUTER.format(a="j0", b="i0"), ([rows(dst, 20)], [rows(src, 24).half()], [], [])
    values = {
        f"values of {width}": (VALUES, ([], [rows(src, width)], [rows(edges, 16)], [rows(16, 24)]))
        for width in (1, 7, 64, 600)
    }
    return {
        **products,
        **values,
        "heads": (HEADS, heads),
        "half": halves,
        "second": (SECOND, ([rows(dst, 64), rows(dst, 64)], [rows(src, 64)], [], [rows(64, 64) / 8])),
        "square": (SQUARE, ([rows(dst, 10)], [], [], [rows(10, 40)])),
        "too wide": (OUTER.format(a="e0", b="i0"), ([rows(dst, 200)], [], [rows(edges, 300)], [])),
    }


NAMES = list(cases(GRAPHS["one-edge"]()))
OFTEN = ("64x64", "3x70", "heads", "second", "values of 64", "values of 7")


def call_of(body: str, g: Graph, groups: Groups) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return a function that calls the op, and the tensors that it takes."""
    sizes = [len(group) for group in groups]

    def call(rowptr: Tensor, col: Tensor, *flat: Tensor) -> Tensor:
        left = iter(flat)
        return GNNC.edge_sum(rowptr, col, body, *([next(left) for _ in range(size)] for size in sizes))

    return call, (g.rowptr, g.col, *(value for group in groups for value in group))


def run(body: str, g: Graph, groups: Groups) -> Tensor:
    """Return the sum that the kernel computes; it has the same bits in two calls."""
    call, values = call_of(body, g, groups)
    return run_on_cuda(call, "edge_sum", *values)


COLUMNS = "t0 = aten.sum.dim_IntList({a}, [0], True); t1 = aten.reshape.default(t0, [-1]); return t1"
GRADIENT = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.relu.default(t0); t2 = aten.mm.default(t1, c0); "
    "t3 = aten.threshold_backward.default(i1, t2, 0); "
    "t4 = aten.sum.dim_IntList(t3, [0], True); t5 = aten.reshape.default(t4, [64]); return t5"
)
Sums = list[tuple[str, Groups]]


def joint_cases(g: Graph) -> dict[str, Sums]:
    """Return a product and sums of its sides, with their operands on a graph."""
    dst, src, edges = g.num_dst, g.num_src, g.num_edges
    columns = COLUMNS.format(a="e0")

    def sides(a: int, b: int) -> tuple[Tensor, Tensor]:
        return torch.randn(edges, a), torch.randn(edges, b)

    def sums(a: Tensor, b: Tensor, *summed: Tensor) -> Sums:
        product = OUTER.format(a="e0", b="e1"), ([], [], [a, b], [])
        return [*((columns, ([], [], [each], [])) for each in summed), product]

    wide, narrow = sides(64, 16)
    large = sides(70, 33)
    gradients = torch.randn(edges, 64).bfloat16()
    rows = [torch.randn(dst, 64), torch.randn(dst, 64)], [torch.randn(src, 64)], [], [torch.randn(64, 64) / 8]
    return {
        "first": sums(wide, narrow, wide),
        "second": sums(wide, narrow, narrow),
        "both": sums(*large, *large),
        "one column": sums(*(ones := sides(1, 1)), ones[0]),
        "of a product with itself": sums(wide, wide, wide),
        "half": sums(gradients, narrow, gradients),
        "stages": [(SECOND, rows), (GRADIENT, rows)],
    }


def call_all(sums: Sums, g: Graph) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a function that calls all ops on tensors that they share, and these tensors."""
    tensors = [value for _, groups in sums for group in groups for value in group]
    shared = list({id(value): value for value in tensors}.values())
    places = {id(value): number for number, value in enumerate(shared)}

    def call(rowptr: Tensor, col: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            GNNC.edge_sum(
                rowptr, col, body, *([values[places[id(each)]] for each in group] for group in groups)
            )
            for body, groups in sums
        )

    return call, (g.rowptr, g.col, *shared)


JOINT = list(joint_cases(GRAPHS["one-edge"]()))


@pytest.mark.cuda
@pytest.mark.parametrize("graph", slow_but(("random",), ["random", "no-edges", "one-edge", "star", "chunks"]))
@pytest.mark.parametrize("name", slow_but(("first", "both", "stages"), JOINT))
def test_a_product_adds_up_its_sides(name: str, graph: str) -> None:
    torch.manual_seed(0)
    g = GRAPHS[graph]()
    sums = joint_cases(g)[name]
    call, values = call_all(sums, g)
    found = run_fused_on_cuda(call, ["edge_sums"], *values)
    for got, (body, groups) in zip(found, sums, strict=True):
        want = edge_sum_reference(g.rowptr, g.col, body, *exact(groups))
        assert got.shape == want.shape and relative_error(got, want) < 4e-6  # the terms of one column cancel


@pytest.mark.cuda
def test_a_sum_beside_a_product_has_what_is_not_finite_in_its_column() -> None:
    g = GRAPHS["random"]()
    sums = joint_cases(g)["first"]
    sums[0][1][2][0][7, 3] = float("inf")
    call, values = call_all(sums, g)
    columns, product = run_fused_on_cuda(call, ["edge_sums"], *values)
    others = torch.arange(64) != 3
    assert columns[3].isinf() and columns[others].isfinite().all() and product[others].isfinite().all()


def exact(groups: Groups) -> Groups:
    """Return the operands in float64."""
    i, j, e, c = ([value.double() for value in group] for group in groups)
    return i, j, e, c


@pytest.mark.cuda
@pytest.mark.parametrize("graph", slow_but(("random",), ["random", "no-edges", "one-edge", "star", "chunks"]))
@pytest.mark.parametrize("name", slow_but(OFTEN, NAMES))
def test_sums_over_all_edges(name: str, graph: str) -> None:
    torch.manual_seed(0)
    g = GRAPHS[graph]()
    body, groups = cases(g)[name]
    got, want = run(body, g, groups), edge_sum_reference(g.rowptr, g.col, body, *exact(groups))
    assert got.shape == want.shape and relative_error(got, want) < 2e-6


@pytest.mark.cuda
@pytest.mark.parametrize("exponent", [-40, 40])
def test_products_of_small_and_large_values_are_exact_as_those_of_fp32(exponent: int) -> None:
    torch.manual_seed(0)
    g = GRAPHS["random"]()
    body, groups = cases(g)["16x8"]
    groups[2][0] *= 2.0**exponent
    got, want = run(body, g, groups), edge_sum_reference(g.rowptr, g.col, body, *exact(groups))
    assert relative_error(got, want) < 2e-6


@pytest.mark.cuda
def test_a_value_that_is_not_finite_stays_in_its_column() -> None:
    g = GRAPHS["random"]()
    body, groups = cases(g)["64x64"]
    groups[2][0][7, 3] = float("nan")
    got = run(body, g, groups)
    assert got[3].isnan().all() and got[:3].isfinite().all() and got[4:].isfinite().all()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sides_share_the_memory_of_a_tile_and_no_kernel_spills(architecture: str) -> None:
    """Only sides of a product that find no room there are stored."""
    g = GRAPHS["random"]()
    for name, (body, groups) in cases(g).items():
        call, values = call_of(body, g, groups)
        program = program_of(call, *values, backend=f"cuda-offline:{architecture}")
        kernels = " ".join(program.code[architecture])
        stored = name == "too wide"
        assert ("edge_sum_products" in kernels) is (not stored and "values" not in name), name
        assert ("edge_map" in kernels) is stored or name == "values of 600", name
        assert_no_spills(resources_of(program.code[architecture]))
    for name, sums in joint_cases(g).items():
        call, values = call_all(sums, g)
        program = fused_program_of(call, *values, backend=f"cuda-offline:{architecture}")
        assert [kernel for _, kernel in program.kernels] == ["edge_sums"], name
        assert_no_spills(resources_of(program.code[architecture]))  # type: ignore[attr-defined]
