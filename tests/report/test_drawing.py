"""The networkx graph of a program, its layout, and the files that draw() writes."""

from itertools import combinations
from pathlib import Path

import hand_graphs
import networkx as nx
import pytest

from gnnc.errors import InputError
from gnnc.ir.parts import Parts
from gnnc.report.drawing import draw, to_networkx
from gnnc.report.layered_layout import layered_layout


def fused_program() -> Parts:
    return Parts(structure=hand_graphs.structure(), forward=hand_graphs.fused_layer())


def test_every_value_is_a_node() -> None:
    graph = to_networkx(fused_program())
    assert nx.is_directed_acyclic_graph(graph)
    assert graph.nodes["compute.acc1"] == {
        "part": "compute",
        "op": "qspmm",
        "layer": "conv1",
        "precision": "int8→fp32",
        "type": "f32[N, 8]",
        "kernel": "",
        "launch": "compute.fused_1",
        "source": "",
        "label": "acc1",
        "primitive": True,
        "free": False,
    }
    assert graph.nodes["compute.conv1_bias"]["source"] == "parameter"
    assert nx.has_path(graph, "structure.edge_index", "compute.output0")


def test_edges_carry_the_type_of_the_value() -> None:
    graph = to_networkx(Parts(forward=hand_graphs.float_layer()))
    assert graph.edges["compute.h0", "compute.h2"]["type"] == "f32[N, 8]"


def test_structure_results_are_not_doubled() -> None:
    graph = to_networkx(fused_program())
    assert graph.has_edge("structure.rowptr", "compute.acc1")
    assert "compute.rowptr" not in graph


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_draw_writes_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"program{suffix}"
    draw(path, fused_program(), title="GCN")
    start = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)


def test_svg_names_ops_layers_and_precisions(tmp_path: Path) -> None:
    path = tmp_path / "program.svg"
    draw(path, fused_program(), title="GCN")
    text = path.read_text(encoding="utf-8")
    for word in ("GCN", "qgemm", "qspmm", "conv1.lin", "int8→fp32", "f32[N, 8]", "edge_index"):
        assert word in text


def test_the_same_program_draws_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        draw(path, Parts(forward=hand_graphs.attention_layer()))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"draw writes \.svg, \.png, \.pdf files, got '.*\.gif'"):
        draw(tmp_path / "program.gif", fused_program())


@pytest.mark.parametrize("path", ["no/such/folder/program.svg", "\0.svg", "x" * 300 + ".svg"])
def test_files_that_cannot_be_written_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draw cannot write to .*name a file or folder"):
        draw(f"{tmp_path}/{path}", fused_program())


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(InputError, match="draw takes the path of a file to write, got int"):
        draw(5, fused_program())  # pyright: ignore[reportArgumentType]


def test_layout_flows_down_and_keeps_boxes_apart() -> None:
    graph = nx.gnp_random_graph(30, 0.12, seed=3, directed=True)
    graph = nx.DiGraph((a, b) for a, b in graph.edges if a < b)
    widths = {node: 1.0 + node % 3 for node in graph}
    layout = layered_layout(graph, widths, gap=0.5)
    assert all(layout.position[a][1] < layout.position[b][1] for a, b in graph.edges)
    for a, b in combinations(graph, 2):
        (xa, ya), (xb, yb) = layout.position[a], layout.position[b]
        if ya == yb:
            assert abs(xa - xb) >= (widths[a] + widths[b]) / 2 + 0.5 - 1e-9
    assert all(0 <= layout.position[n][0] <= layout.width for n in graph)


def test_long_edges_pass_every_layer_between() -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    layout = layered_layout(graph, dict.fromkeys(graph, 1.0))
    assert [y for _, y in layout.routes["a", "d"]] == [0, 1, 2, 3]


def test_layout_of_nothing() -> None:
    assert layered_layout(nx.DiGraph(), {}).layers == 0
