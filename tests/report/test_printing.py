"""The printed program: readable, deterministic, and Python that computes what the graph computes."""

import operator
import re
from collections.abc import Callable

import hand_graphs
import pytest
import torch
from hand_graphs import LAYERS, Builder, aten, gnnc
from torch.fx import GraphModule

from gnnc.ir.parts import Parts
from gnnc.report.printing import format_graph, format_program, graph_source, namespace

Make = Callable[[], GraphModule]
each_layer = pytest.mark.parametrize("make", LAYERS, ids=lambda make: make.__name__)


def execute(gm: GraphModule, *values: object) -> object:
    names = namespace(gm)
    exec(graph_source(gm), names)
    return names["forward"](*values)


@each_layer
def test_golden(make: Make, golden: Callable[[str], None]) -> None:
    golden(format_graph(make()))


@pytest.mark.first(1)
@each_layer
def test_source_computes_what_the_graph_computes(make: Make) -> None:
    gm = make()
    values = hand_graphs.values(gm)
    torch.testing.assert_close(execute(gm, *values), gm(*values), rtol=0, atol=0)


@each_layer
def test_text_depends_on_the_graph_alone(make: Make) -> None:
    text = format_graph(make())
    assert text == format_graph(make())
    assert not re.search(r"0x[0-9a-f]{6,}|/home|/tmp|/work|\bs\d+\b", text)


def test_program(golden: Callable[[str], None]) -> None:
    header = ["quantized 2 of 2 ops"]
    golden(
        format_program(Parts(structure=hand_graphs.structure(), forward=hand_graphs.fused_layer()), header)
    )


def test_program_shares_names_between_its_parts() -> None:
    text = format_program(Parts(structure=hand_graphs.structure(), forward=hand_graphs.float_layer()))
    returned = re.search(r"def structure.*?return \(([^)]*)\)", text, re.DOTALL)
    assert returned is not None
    compute = text[text.index("def compute") :]
    for name in returned[1].split(", "):
        assert f"\n    {name}," in compute


def test_program_without_structure_has_one_part() -> None:
    text = format_program(Parts(forward=hand_graphs.float_layer()))
    assert text.startswith("# runs at every call\ndef compute(")
    assert "def structure" not in text


def test_notes_end_the_line_of_their_node() -> None:
    text = format_graph(hand_graphs.float_layer(), notes={"spmm_default": "linear went first"})
    (line,) = [line for line in text.splitlines() if "gnnc.spmm(" in line]
    assert line.endswith("linear went first")


def test_kernel_is_named_on_its_block() -> None:
    gm = hand_graphs.fused_layer()
    next(node for node in gm.graph.nodes if node.op == "call_module").meta["kernel"] = "gemm_s8"
    assert "# one kernel (gemm_s8); stores " in format_graph(gm)


def test_tuple_with_a_dropped_part_is_unpacked() -> None:
    b = Builder()
    x = b.input("x", (4, 3))
    values, _ = b.parts(b.call(aten.max.dim, x, 1))
    gm = b.finish(values)
    gm.graph.eliminate_dead_code()
    assert "h0, _ = aten.max.dim(x, 1)" in format_graph(gm)
    x = torch.randn(4, 3)
    torch.testing.assert_close(execute(gm, x), gm(x))


def test_a_tuple_used_whole_stays_whole() -> None:
    b = Builder()
    x = b.input("x", (4, 3))
    both = b.call(aten.max.dim, x, 1)
    first = b.call(operator.getitem, both, 0)
    gm = b.finish(first, b.call(operator.getitem, both, 0))
    assert "t0 = aten.max.dim(x, 1)" in format_graph(gm)


@pytest.mark.parametrize(
    ("fill", "text"),
    [(float("inf"), 'float("inf")'), (float("nan"), 'float("nan")'), (0.1, "0.1"), (True, "True")],
)
def test_constants_are_python(fill: float, text: str) -> None:
    b = Builder()
    x = b.input("x", (2,))
    gm = b.finish(b.call(aten.full_like.default, x, fill))
    assert f"aten.full_like(x, {text})" in format_graph(gm)
    values = torch.zeros(2)
    torch.testing.assert_close(execute(gm, values), gm(values), equal_nan=True)


def test_names_that_are_not_identifiers() -> None:
    b = Builder()
    size = b.size("n", 5)
    odd = [b.input(name, (size, 2)) for name in ("data[0]", "0", "class", "torch", "N", "data.0")]
    total = odd[0]
    for node in odd[1:]:
        total = b.call(aten.add.Tensor, total, node)
    gm = b.finish(total)
    values = [torch.randn(5, 2) for _ in odd]
    torch.testing.assert_close(execute(gm, *values), gm(*values))


def test_sizes_are_named_by_what_they_count() -> None:
    b = Builder()
    n, m, e = b.size("n", 5), b.size("m", 7), b.size("e", 12)
    b.input("x_src", (n, 4))
    b.input("x_dst", (m, 4))
    b.input("edge_index", (2, e), dtype=torch.int64)
    b.input("edge_weight", (e,))
    text = format_graph(b.finish())
    types = re.findall(r"# (\S+\[.*?\])", text)
    assert types == ["f32[N, 4]", "f32[N1, 4]", "i64[2, E]", "f32[E]"]


def test_a_batch_vector_counts_nodes() -> None:
    b = Builder()
    n, e = b.size("n", 5), b.size("e", 12)
    b.input("batch", (n,), dtype=torch.int64)
    b.input("edge_index", (2, e), dtype=torch.int64)
    assert re.findall(r"# (\S+\[.*?\])", format_graph(b.finish())) == ["i64[N]", "i64[2, E]"]


def test_shared_quantize_says_how_often_it_is_used() -> None:
    b = Builder()
    x, weight = b.input("x", (b.size("n", 5), 4)), b.parameter("w", 3, 4)
    quantized = b.call(gnnc.quantize, x, b.call(gnnc.scale, x, "int8/row"), "int8/row")
    weight_quantized = b.call(gnnc.quantize, weight, b.call(gnnc.scale, weight, "int8/row"), "int8/row")
    first = b.call(gnnc.qgemm, quantized, weight_quantized)
    gm = b.finish(first, b.call(gnnc.qgemm, quantized, weight_quantized))
    (line,) = [line for line in format_graph(gm).splitlines() if "x_q = " in line]
    assert line.endswith("used 2 times")
