"""Products in low precision in bodies: of bytes, as the reference bit for bit, and of bf16, in FP32."""

import re
from pathlib import Path

import pytest
import torch
from edge_bodies import Groups, edge_body
from edge_layers import EDGE_LAYERS, arguments_of
from kernel_graphs import GRAPHS, Graph, random_graph, relative_error, same_at_any_thread_count
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv

import gnnc
from gnnc.runtime.cpu.edge_opcodes import BodyOp, Format
from gnnc.runtime.cpu.edge_ops import translate
from gnnc.runtime.cpu.parts import Part
from gnnc.runtime.row_program.build import Refusal

HEADER = Path(__file__).parents[2] / "csrc/cpu/edge_body.h"
ROWS = "t0 = gnnc.scale.default({x}, 'int8/row'); t1 = gnnc.quantize.default({x}, t0, 'int8/row'); "
PRODUCT = (
    "t{0} = gnnc.qgemm.default(t1, {weight}); t{1} = gnnc.dequantize.default(t{0}, t0, 'row'); "
    "t{2} = gnnc.dequantize.default(t{1}, {scale}, 'column'); "
)
FIRST = PRODUCT.format(2, 3, 4, weight="c0", scale="c1")
SECOND = PRODUCT.format(5, 6, 7, weight="c0", scale="c1")
INTEGERS = {
    "plain": ROWS.format(x="j0") + FIRST + "return t4",
    "bias": ROWS.format(x="j0") + FIRST + "t5 = aten.add.Tensor(t4, c2); return t5",
    "other side": ROWS.format(x="j0") + FIRST + "t5 = aten.add.Tensor(c2, t4); return t5",
    "twice": ROWS.format(x="e0") + FIRST + SECOND + "t8 = aten.mul.Tensor(t4, t7); return t8",
    "no vector": ROWS.format(x="i0") + FIRST + "t5 = aten.add.Tensor(t4, t4); return t5",
}  # fmt: skip
BF16 = (
    "t0 = aten._to_copy.default(j0, dtype=torch.bfloat16); t1 = gnnc.gemm.default(t0, c0, None, {kn}); "
    "t2 = aten.add.Tensor(t1, c2); return t2"
)
SIZES = [(1, 1), (7, 47), (47, 7), (64, 64), (16, 130), (130, 16)]


def operands(g: Graph, inputs: int, outputs: int) -> Groups:
    generator = torch.Generator().manual_seed(inputs)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    consts = [weight, rand(outputs).abs() / 127, rand(outputs)]
    return [rand(g.num_dst, inputs)], [rand(g.num_src, inputs)], [rand(g.num_edges, inputs)], consts


def test_the_formats_are_those_of_the_header():
    found = re.search(r"enum class BodyFormat : int32_t {([^}]*)}", HEADER.read_text())
    assert found is not None
    assert [word.strip() for word in found[1].split(",")][:3] == [kind.name.lower() for kind in Format]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("body", INTEGERS)
def test_products_of_bytes_are_the_references(graph: str, body: str):
    g = GRAPHS[graph]()
    groups = operands(g, 47, 33)
    want = torch.ops.gnnc.edge_map(g.rowptr, g.col, INTEGERS[body], *groups)
    got = same_at_any_thread_count(lambda: edge_body(g, INTEGERS[body], "", groups, tuple(want.shape)))
    assert torch.equal(got, want)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_of_bytes_of_any_width(inputs: int, outputs: int):
    g = random_graph(40, 30, 500)
    groups = operands(g, inputs, outputs)
    want = torch.ops.gnnc.edge_map(g.rowptr, g.col, INTEGERS["bias"], *groups)
    assert torch.equal(edge_body(g, INTEGERS["bias"], "", groups, tuple(want.shape)), want)


def test_the_most_and_least_values_do_not_overflow():
    g = random_graph(4, 4, 20)
    dst, src, edge, consts = operands(g, 1024, 5)
    src[0].fill_(-3.0)
    consts[0].fill_(-128)
    want = torch.ops.gnnc.edge_map(g.rowptr, g.col, INTEGERS["plain"], dst, src, edge, consts)
    got = edge_body(g, INTEGERS["plain"], "", (dst, src, edge, consts), tuple(want.shape))
    assert torch.equal(got, want)


def test_rows_of_zeros_and_of_values_that_are_not_finite():
    g = random_graph(6, 5, 60)
    groups = operands(g, 20, 9)
    rows = groups[1][0]
    rows[0], rows[1, 3], rows[2, 5], rows[3] = 0.0, torch.nan, torch.inf, 1e-40
    want = torch.ops.gnnc.edge_map(g.rowptr, g.col, INTEGERS["plain"], *groups)
    got = edge_body(g, INTEGERS["plain"], "", groups, tuple(want.shape))
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[finite], want[finite])
    assert bool((got[g.col == 0] == 0).all())


def test_a_matrix_for_each_edge_has_a_scale_for_each_row():
    g = random_graph(30, 20, 200)
    _, _, _, consts = operands(g, 12, 10)
    src = torch.randn(g.num_src, 3, 12) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    body = (
        "t9 = aten.reshape.default(j0, [-1, 12]); " + ROWS.format(x="t9") + FIRST
        + "t5 = aten.reshape.default(t4, [-1, 3, 10]); return t5"
    )  # fmt: skip
    want = torch.ops.gnnc.edge_map(g.rowptr, g.col, body, [], [src], [], consts)
    got = edge_body(g, body, "", ([], [src], [], consts), tuple(want.shape))
    assert torch.equal(got, want)


@pytest.mark.parametrize("is_kn", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_of_bf16(inputs: int, outputs: int, is_kn: bool):
    g = random_graph(40, 30, 500)
    dst, src, edge, consts = operands(g, inputs, outputs)
    weight = torch.randn(outputs, inputs).bfloat16()
    consts = [weight.t().contiguous() if is_kn else weight, *consts[1:]]
    got = edge_body(g, BF16.format(kn=is_kn), "sum", (dst, src, edge, consts), (g.num_dst, outputs))
    exact = src[0].bfloat16().double() @ weight.double().t() + consts[2].double()
    want = torch.ops.gnnc.message(
        g.rowptr, g.col, "t0 = aten.mul.Tensor(j0, 1); return t0", "sum", [], [exact], [], [], g.num_dst
    )
    assert relative_error(got, want) < 1e-6 * inputs**0.5 + 1e-6


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (INTEGERS["plain"].replace("scale.default(j0", "scale.default(i0"), "these scales"),
        (INTEGERS["plain"].replace("int8/row", "int4/row"), "int4/row"),
        (ROWS.format(x="j0") + "t2 = gnnc.qgemm.default(t1, c0); return t2", "values of low precision"),
        (INTEGERS["plain"].replace("(t2, t0, 'row')", "(t2, c1, 'column')"), "scaled by"),
        ("t0 = aten.linear.default(j0, c0, None); return t0", "no weight of a product"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(body: str, reason: str):
    groups = operands(random_graph(4, 4, 9), 16, 16)
    named = {f"{kind}{n}": t for kind, group in zip("ijec", groups, strict=True) for n, t in enumerate(group)}
    with pytest.raises((Refusal, RuntimeError), match=reason):
        translate(body, named, [Part("edges")])


def test_one_quantization_serves_two_products():
    g = random_graph(4, 4, 9)
    groups = operands(g, 16, 16)
    named = {f"{kind}{n}": t for kind, group in zip("ijec", groups, strict=True) for n, t in enumerate(group)}
    steps = [step[0] for step in translate(INTEGERS["twice"], named, [Part("edges")]).steps]
    assert (steps.count(BodyOp.NARROW), steps.count(BodyOp.PRODUCT)) == (1, 2)


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.03), ("bf16", 0.01)])
@torch.no_grad()
def test_a_layer_takes_the_kernel(precision: str, most: float):
    torch.manual_seed(0)
    model = EdgeConv(nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 20))).eval()
    x, edge_index = torch.randn(50, 16), torch.randint(50, (2, 300))
    compiled = gnnc.compile(model, precision)
    got, want = compiled(x, edge_index), model(x, edge_index)
    assert 0 < (got - want).norm() < most * want.norm()
    assert torch.equal(got, gnnc.compile(model, precision)(x, edge_index))
    assert re.search(rf"(\d) of \1 products of its body in {precision}", compiled.explain())
    assert "edge_body" in str(compiled)


@torch.no_grad()
def test_weights_are_quantized_by_a_kernel():
    model = EdgeConv(nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 20))).eval()
    compiled = gnnc.compile(model, "int8")
    compiled(torch.randn(50, 16), torch.randint(50, (2, 300)))
    assert "_scale, w0_q" in str(compiled)
    assert "reference" not in str(compiled)


def test_kernels_quantize_the_weights_of_bodies_that_run_in_one_pass() -> None:
    layer = EDGE_LAYERS["EGNN"]
    model, given = layer.build().eval(), arguments_of(layer, 20, 60)
    compiled = gnnc.compile(model, "int8", backend="cpu")
    with torch.no_grad():
        compiled(**given)
    program = compiled._dispatch.last
    names = dict(program.executable.kernels)
    assert "joint_bodies" in names.values()
    made = [str(node.target) for node in program.parts.forward.graph.nodes if node.op == "call_function"]
    assert "gnnc.quantize.default" not in made and "gnnc.scale.default" not in made
