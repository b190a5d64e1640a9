"""Messages whose bodies have products with weights, and several reductions, against references in float64."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS, Graph, relative_error
from one_op import program_of, run_on_cuda
from torch import Tensor

from gnnc.ir.edge_gradients import GivenCotangent
from gnnc.ir.message import edge_map_reference, edge_sum_reference, message_reference
from gnnc.ir.vjp import Operand, body_gradients
from gnnc.runtime.cuda.driver.nvrtc import resources_of
from gnnc.runtime.cuda.kernels.body_stages import Block, ProductStage, Row, Stage, SumStage, layout_of
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.row_program.build import Refusal

GNNC = torch.ops.gnnc
SEVERAL = "t0 = aten.add.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, t0); return [t1, t0, t0, t0]"
SOFTMAX = "t0 = aten.mul.Tensor(j0, c0); t1 = aten.add.Tensor(j0, i0); return [t0, t1]"
BOTH = "t0 = aten.add.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, c0); return [t0, t1, t0, t1]"
FILTER = "t0 = aten.linear.default(e0, c0, c1); t1 = aten.mul.Tensor(t0, j0); return t1"
GATE = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.add.Tensor(t0, j0); t2 = aten.sigmoid.default(t1); "
    "t3 = aten.mm.default(e0, c2); t4 = aten.add.Tensor(t3, i0); t5 = aten.mul.Tensor(t2, t4); return t5"
)
CHAIN = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.add.Tensor(t0, j0); t2 = aten.relu.default(t1); "
    "t3 = aten.t.default(c2); t4 = aten.addmm.default(c1, t2, t3); return t4"
)
WEIGHT_GRAD = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.add.Tensor(t0, j0); "
    "t2 = aten.threshold_backward.default(i0, t1, 0); t3 = aten.t.default(t2); t4 = aten.mm.default(t3, e0); "
    "return t4"
)
BIAS_GRAD = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.add.Tensor(t0, j0); "
    "t2 = aten.threshold_backward.default(i0, t1, 0); t3 = aten.sum.dim_IntList(t2, [0], True); "
    "t4 = aten.view.default(t3, [-1]); return t4"
)
NORM = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.add.Tensor(t0, j0); t2 = aten.mean.dim(t1, [-1], True); "
    "t3 = aten.sub.Tensor(t1, t2); t4 = aten.square.default(t3); t5 = aten.mean.dim(t4, [-1], True); "
    "t6 = aten.add.Tensor(t5, 1e-5); t7 = aten.rsqrt.default(t6); t8 = aten.mul.Tensor(t3, t7); "
    "t9 = aten.silu.default(t8); t10 = aten.linear.default(t9, c2, c1); t11 = aten.add.Tensor(t10, t9); "
    "return t11"
)
ROWS_AND_EDGES = {"e0": (16,), "i0": (64,), "j0": (64,), "c0": (64, 16), "c1": (64,)}
NORM_GRAD = body_gradients(
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.add.Tensor(t0, j0); "
    "t2 = aten.layer_norm.default(t1, [64], c1); return t2",
    GivenCotangent("i0"),
    tuple(Operand(name, sizes, torch.float32) for name, sizes in ROWS_AND_EDGES.items()),
    ("j0",),
)["j0"]
NARROW = "t0 = aten.linear.default(i0, c0, c1); t1 = aten.mul.Tensor(t0, j0); return t1"
CASES = {
    "several": (SEVERAL, "sum,max,min,mean"),
    "softmax": (SOFTMAX, "softmax"),
    "both": (BOTH, "max,softmax,mean"),
    "filter": (FILTER, "sum"),
    "gate": (GATE, "mean"),
    "chain": (CHAIN, "max"),
    "norm": (NORM, "sum"),
    "norm_grad": (NORM_GRAD, "sum"),
    "norms": (NORM.replace("return t11", "return [t11, t9, t1]"), "max,softmax"),
}
WIDTHS = (1, 7, 47, 64)


def operands(name: str, g: Graph, width: int) -> tuple[list[Tensor], ...]:
    """Return the operands of a case: rows of ``width`` columns, edge features of 16 or 5."""
    features = 5 if width == 7 else 16
    dst, src = torch.randn(g.num_dst, width), torch.randn(g.num_src, width)
    edge, weight, bias = torch.randn(g.num_edges, features), torch.randn(width, features), torch.randn(width)
    return {
        "several": ([dst], [src], [], []),
        "softmax": ([dst], [src], [], [torch.randn(width) * 20]),
        "both": ([dst], [src], [], [torch.randn(width)]),
        "filter": ([], [src], [edge], [weight, bias]),
        "norm_grad": ([dst], [src], [edge], [weight, bias]),
        "half": ([dst], [src], [edge], [weight, torch.randn(width, width), bias]),
        "gate": ([dst], [src], [edge], [weight, bias, torch.randn(features, width)]),
        **dict.fromkeys(
            ("chain", "norm", "norms"), ([], [src], [edge], [weight, bias, torch.randn(width, width)])
        ),
    }[name]


def in_float64(groups: tuple[list[Tensor], ...]) -> list[list[Tensor]]:
    return [[tensor.double() for tensor in group] for group in groups]


def call_of(op: str, g: Graph, body: str, groups: tuple[list[Tensor], ...], *rest: str) -> tuple[Any, ...]:
    """Return a function that calls an op, and the tensors that it takes."""
    sizes = [len(group) for group in groups]

    def call(rowptr: Tensor, col: Tensor, *flat: Tensor) -> Tensor:
        tensors = iter(flat)
        lists = [[next(tensors) for _ in range(size)] for size in sizes]
        count = [rowptr.shape[0] - 1] if op == "message" else []
        return getattr(GNNC, op)(rowptr, col, body, *rest, *lists, *count)

    return call, g.rowptr, g.col, *(tensor for group in groups for tensor in group)


def run(
    op: str, g: Graph, body: str, groups: tuple[list[Tensor], ...], *rest: str, kernel: str = "edge_body"
) -> Tensor:
    """Return what the kernel computes, as a program calls it."""
    call, *tensors = call_of(op, g, body, groups, *rest)
    return run_on_cuda(call, kernel, *tensors)


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["random", "no-edges", "one-edge", "loops", "star"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_messages(name: str, width: int, graph: str) -> None:
    torch.manual_seed(0)
    g, (body, reduce) = GRAPHS[graph](), CASES[name]
    groups = operands(name, g, width)
    got = run("message", g, body, groups, reduce)
    want = message_reference(g.rowptr, g.col, body, reduce, *in_float64(groups), g.num_dst)
    assert got.shape == want.shape and relative_error(got, want) < 1e-5


HALF_CHAIN = (
    "t0 = aten._to_copy.default(e0, dtype=torch.float16); t1 = gnnc.gemm.default(t0, c0, None, False); "
    "t2 = aten.add.Tensor(t1, j0); t3 = aten.relu.default(t2); "
    "t4 = aten._to_copy.default(t3, dtype=torch.float16); "
    "t5 = gnnc.gemm.default(t4, c1, c2, True); t6 = aten.add.Tensor(t5, i0); return t6"
)


_FULL_CHAIN = (
    "t0 = gnnc.gemm.default(e0, c0, None, False); t1 = aten.add.Tensor(t0, j0); t2 = aten.relu.default(t1); "
    "t3 = gnnc.gemm.default(t2, c1, c2, True); t4 = aten.add.Tensor(t3, i0); return t4"
)


def integers(*shape: int, most: int = 2) -> Tensor:
    return torch.randint(-most, most + 1, shape).float()


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["random", "no-edges", "one-edge", "star"])
@pytest.mark.parametrize(("features", "width"), [(16, 64), (5, 7), (40, 80), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_are_exact_where_their_numbers_are(
    dtype: torch.dtype, features: int, width: int, graph: str
) -> None:
    torch.manual_seed(0)
    g, body = GRAPHS[graph](), HALF_CHAIN.replace("float16", str(dtype).removeprefix("torch."))
    edge, weight = integers(g.num_edges, features, most=1).to(dtype), integers(width, features, most=1)
    second, bias = integers(width, width).to(dtype), integers(width)
    rows = [integers(g.num_dst, width)], [integers(g.num_src, width)]
    body = body.replace(f"aten._to_copy.default(e0, dtype={dtype})", "aten.view.default(e0, [-1, K])")
    body = body.replace("K", str(features))
    groups = (*rows, [edge], [weight.to(dtype), second, bias])
    for reduce in ("sum", "max", "min,sum"):
        text = body.replace("return t6", "return [t6, t3]") if "," in reduce else body
        got = run("message", g, text, groups, reduce)
        assert torch.equal(got, message_reference(g.rowptr, g.col, text, reduce, *groups, g.num_dst))
    got = run("edge_map", g, body, groups)
    assert torch.equal(got, edge_map_reference(g.rowptr, g.col, body, *groups))


@pytest.mark.cuda
@pytest.mark.parametrize("large", [False, True])
def test_products_of_16_bits_round_their_operands_alone(large: bool) -> None:
    """Weights in FP32 are rounded as they are loaded; of a large body some find no room in shared memory."""
    torch.manual_seed(0)
    g, width = GRAPHS["random"](), 160 if large else 64
    weights = [torch.randn(width, 16), torch.randn(width, width) / width**0.5, torch.randn(width)]
    rows = [torch.randn(g.num_dst, width)], [torch.randn(g.num_src, width)]
    groups = (*rows, [torch.randn(g.num_edges, 16)], weights)
    got = run("message", g, HALF_CHAIN, groups, "mean")
    want = message_reference(g.rowptr, g.col, _FULL_CHAIN, "mean", *in_float64(groups), g.num_dst)
    assert 1e-6 < relative_error(got, want) < 2e-3


_ROUNDED = (
    "t1 = aten._to_copy.default(t0, dtype=torch.float16); t2 = gnnc.gemm.default(t1, c0, None, False); "
)
IN_REGISTERS = {
    "vector": f"t0 = aten.add.Tensor(i0, j0); {_ROUNDED}t3 = aten.add.Tensor(t2, c1); return t3",
    "vectors": (
        f"t0 = aten.sub.Tensor(e0, i0); {_ROUNDED}t3 = aten.add.Tensor(t2, c1); t4 = aten.relu.default(t3); "
        "t5 = aten.sub.Tensor(t4, j1); t6 = aten.mul.Tensor(t5, c2); return t6"
    ),
}
"""Bodies whose product is followed by steps of single columns, of vectors of constants and of copied rows."""


def operands_in_registers(name: str, g: Graph, width: int) -> tuple[list[Tensor], ...]:
    """Return the operands of a body of ``IN_REGISTERS``, small integers."""
    weight, *vectors = integers(width, 48).half(), integers(width), integers(width)
    row, source = integers(g.num_dst, 48), integers(g.num_src, 48)
    if name == "vector":
        return [row], [source], [], [weight, vectors[0]]
    return [row], [source, integers(g.num_src, width)], [integers(g.num_edges, 48)], [weight, *vectors]


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["random", "one-edge", "star"])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("reduce", ["sum", "max", "mean"])
@pytest.mark.parametrize("name", IN_REGISTERS)
def test_products_that_are_reduced_in_registers_are_exact(
    name: str, reduce: str, width: int, graph: str
) -> None:
    """Tiles of one row are, and tiles of several rows, or of less edges, of the same run are not."""
    torch.manual_seed(0)
    g, body = GRAPHS[graph](), IN_REGISTERS[name]
    groups = operands_in_registers(name, g, width)
    got = run("message", g, body, groups, reduce)
    want = message_reference(g.rowptr, g.col, body, reduce, *groups, g.num_dst)
    torch.testing.assert_close(got, want, rtol=1e-6 if reduce == "mean" else 0, atol=0)


@pytest.mark.parametrize(
    ("reason", "old", "new"),
    [
        ("", "", ""),
        ("a row of the destination is read where it lies", "Tensor(t2, c1)", "Tensor(t2, i0)"),
        ("columns are left out", "return t3", "t4 = aten.slice.Tensor(t3, 1, 32, 64); return t4"),
        (
            "columns change places",
            "return t3",
            "t4 = aten.slice.Tensor(t3, 1, 0, 32); t5 = aten.slice.Tensor(t3, 1, 32, 64); "
            "t6 = aten.cat.default([t5, t4], 1); return t6",
        ),
        ("the operands are FP32", "dtype=torch.float16", "dtype=torch.float32"),
        ("there are several values", "return t3", "return [t3, t3]"),
        ("a sum over columns follows", "return t3", "t4 = aten.sum.dim_IntList(t3, [-1]); return t4"),
    ],
)
def test_a_product_stays_in_registers_where_its_columns_are_read_one_by_one(
    reason: str, old: str, new: str
) -> None:
    shapes = {"i0": (1, 64), "j0": (1, 64), "c0": (64, 64), "c1": (64,)}
    operands = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    strides = {"i0": 64, "j0": 64, "c0": 1, "c1": 1}
    text = IN_REGISTERS["vector"].replace(old, new) if old else IN_REGISTERS["vector"]
    functor = write_body(text, operands, strides, reduced=True)
    assert ("kInFragments = true" in functor.text) == (not reason), reason
    assert "kInFragments = false" in write_body(text, operands, strides).text, "nothing is reduced"


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["random", "no-edges", "one-edge"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 3), (7, 47), (1, 1), (33, 64)])
def test_edge_values_with_a_product(inputs: int, outputs: int, graph: str) -> None:
    g = GRAPHS[graph]()
    rows = [torch.randn(g.num_dst, inputs)], [torch.randn(g.num_src, outputs)]
    groups = (*rows, [], [torch.randn(outputs, inputs), torch.randn(outputs)])
    got = run("edge_map", g, NARROW, groups)
    want = edge_map_reference(g.rowptr, g.col, NARROW, *in_float64(groups))
    assert got.shape == want.shape and relative_error(got, want) < 1e-5


@pytest.mark.cuda
def test_a_mask_of_destinations_before_a_product() -> None:
    """A mask has a byte an element, of which four are no vector."""
    torch.manual_seed(0)
    g, mask = GRAPHS["random"](), torch.rand(257, 16) < 0.5
    body = "t0 = aten.where.self(i0, j0, j1); t1 = aten.mm.default(t0, c0); return t1"
    source, weight = [torch.randn(g.num_src, 16) for _ in range(2)], torch.randn(16, 16)
    got = run("message", g, body, ([mask], source, [], [weight]), "sum")
    exact = [[mask], [rows.double() for rows in source], [], [weight.double()]]
    assert relative_error(got, message_reference(g.rowptr, g.col, body, "sum", *exact, g.num_dst)) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("graph", ["random", "no-edges", "one-edge"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["several", "chain"])
def test_edge_values_of_16_bits(name: str, width: int, graph: str, dtype: torch.dtype) -> None:
    """Rows that edge_map stores in 16 bits are those of FP32, rounded, with or without products."""
    torch.manual_seed(0)
    g, body = GRAPHS[graph](), CASES[name][0].replace("return [t1, t0, t0, t0]", "return t1")
    groups = operands(name, g, width)
    last = body.split("return ")[1]
    rounded = body.replace(f"return {last}", f"t9 = aten._to_copy.default({last}, dtype={dtype}); return t9")
    got, want = run("edge_map", g, rounded, groups), run("edge_map", g, body, groups)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["random", "no-edges", "star"])
@pytest.mark.parametrize("width", [7, 64])
@pytest.mark.parametrize(
    "body", [WEIGHT_GRAD, WEIGHT_GRAD.replace("return t4", "t5 = aten.t.default(t4); return t5"), BIAS_GRAD]
)
def test_sums_over_all_edges_behind_a_product(body: str, width: int, graph: str) -> None:
    g = GRAPHS[graph]()
    edge, weight, bias = torch.randn(g.num_edges, 16), torch.randn(width, 16), torch.randn(width)
    groups = ([torch.randn(g.num_dst, width)], [torch.randn(g.num_src, width)], [edge], [weight, bias])
    got = run("edge_sum", g, body, groups, kernel="edge_sum")
    want = edge_sum_reference(g.rowptr, g.col, body, *in_float64(groups))
    assert got.shape == want.shape and relative_error(got, want) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_row_has_an_edge_whose_value_is_its_extremum_to_the_bit(reduce: str) -> None:
    """The gradient of an extremum compares values that another kernel computes again."""
    torch.manual_seed(0)
    g, (body, _) = GRAPHS["random"](), CASES["chain"]
    groups = operands("chain", g, 64)
    top = run("message", g, body, groups, reduce)
    values = run("edge_map", g, body, groups)
    again = values.new_zeros(top.shape).scatter_reduce(
        0, g.dst()[:, None].expand(-1, 64), values, "a" + reduce, include_self=False
    )
    assert torch.equal(top, again)
    hit = body.replace("return t4", "t5 = aten.eq.Tensor(t4, i0); t6 = aten._to_copy.default(t5, dtype="
                       "torch.float32); return t6")  # fmt: skip
    hits = run("message", g, hit, ([top], *groups[1:]), "sum")
    assert bool((hits[g.rowptr.diff() > 0] >= 1).all())


@pytest.mark.cuda
def test_a_softmax_of_infinite_and_of_no_numbers_is_that_of_the_reference() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 0.0, 1.0], [-inf, -inf], [inf, 0.0], [nan, 3.0], [0.0, nan], [3.0, -inf]]
    rowptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
    logits = torch.tensor([value for row in rows for value in row])[:, None]
    col = torch.arange(len(logits), dtype=torch.int32)
    g = Graph(rowptr, col, len(logits), len(rows))
    groups: tuple[list[Tensor], ...] = ([], [logits, torch.arange(float(len(logits)))[:, None]], [], [])
    call, *tensors = call_of("message", g, "return [j0, j1]", groups, "softmax")
    on_device = [tensor.cuda() for tensor in tensors]
    got = program_of(call, *on_device, backend="cuda")(*on_device)[0].cpu()
    want = message_reference(g.rowptr, g.col, "return [j0, j1]", "softmax", *groups, g.num_dst)
    assert want.isnan().any() and not want.isnan().all()
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    g = GRAPHS["random"]()
    chain = HALF_CHAIN.replace("aten.add.Tensor(t5, i0)", "aten.mul.Tensor(t5, j0)")
    cases = [
        *((body, reduce, operands(name, g, 64)) for name, (body, reduce) in CASES.items()),
        *((body, "max", operands("half", g, 64)) for body in (HALF_CHAIN, chain)),
        *((body, "mean", operands_in_registers(name, g, 64)) for name, body in IN_REGISTERS.items()),
    ]
    for body, reduce, groups in cases:
        call, *tensors = call_of("message", g, body, groups, reduce)
        program = program_of(call, *tensors, backend=f"cuda-offline:{architecture}")
        assert "reference" not in dict(program.kernels).values()
        assert_no_spills(resources_of(program.code[architecture]))


def products(*sizes: tuple[int, int], dtype: str | None = None) -> list[ProductStage]:
    """Return products, each of which reads the one before it."""
    return [
        ProductStage(outputs, {}, {number - 1} if number else set(), inputs, dtype)
        for number, (inputs, outputs) in enumerate(sizes)
    ]


def test_blocks_have_room_for_weights_and_for_the_tile_of_each_warp() -> None:
    one = layout_of(products((16, 64)), {0}, 64, 1)
    assert (one.pitch, one.operand_bytes, one.weight_bytes) == (72, 80, 4 * 16 * 65)
    assert one.block == Block(8, 4 * 16 * 65 + 8 * 16 * (20 + 4 * 72 + 80))
    weight = 4 * 64 * 65
    assert layout_of(products(*[(64, 64)] * 3), {2}, 64, 1).weights_at == (0, weight, -1)
    half = layout_of(products(*[(64, 64)] * 3, dtype="__half"), {2}, 64, 1)
    assert (half.weight_bytes, half.operand_bytes) == (3 * 2 * 64 * 72, 0), "read once, it stays in registers"
    assert layout_of(products((64, 128), dtype="__half"), {0}, 128, 1).operand_bytes == 2 * 64
    assert layout_of(products((128, 128)), {0}, 128, 1).block.warps == 5
    with pytest.raises(Refusal, match="bytes of shared memory for 16 edges"):
        layout_of(products((2000, 2000)), {0}, 2000, 1)


def test_results_take_the_place_of_those_that_nothing_reads_any_more() -> None:
    assert layout_of(products(*[(64, 64)] * 3), {2}, 64, 1).places == (0, 0, 0)
    assert layout_of(products(*[(64, 64)] * 3), {0, 2}, 64, 1).places == (0, 64, 64)
    stages: list[Stage] = [*products((64, 64)), SumStage(1, {}, {0}, terms=64), Stage(64, {}, {0, 1})]
    assert layout_of(stages, {2}, 64, 1).places == (0, 64, 68), "a value is stored while others are read"
    stages[0].reads.add("j0")
    rows = [Row("e0", 64, 64), Row("j0", 12, 12)]
    behind = layout_of(stages, {2, "e0"}, 64, 1, rows)
    assert (behind.rows_at, behind.places) == ((0, 16), (16, 80, 84)), (
        "a product takes the place of its operand"
    )
    assert [row.piece for row in (*rows, Row("j0", 6, 6), Row("j0", 32, 36))] == [16, 4, 0, 4]
    narrow = layout_of(products((4, 4)), {0}, 16, 3)
    assert narrow.operand_bytes == 4 * 16 * 3, "values of few columns are reduced from shared memory"
