"""FP8: e4m3 rows, e5m2 gradients, and what int8 has that it has not, on the reference backend."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch_geometric import nn as pyg

import gnnc
from gnnc.ir.nodes import op_name, qtype_of
from gnnc.ir.qtype import FP8_DTYPES, QType
from gnnc.ir.quantized import quantize_reference, scale_reference
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import options_of
from gnnc.precision import FP8
from gnnc.runtime.backend import get_backend

MODELS = {
    "gcn": lambda: pyg.GCN(64, 64, 3, 40),
    "sage": lambda: pyg.GraphSAGE(64, 64, 3, 40),
    "gin": lambda: pyg.GIN(64, 64, 3, 40),
    "gat": lambda: pyg.GAT(64, 64, 3, 40, heads=4),
}


def given(nodes: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(nodes, 64, generator=generator), torch.randint(
        nodes, (2, 6 * nodes), generator=generator
    )


def compiled(name: str, **options: Any) -> tuple[nn.Module, gnnc.CompiledModel]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, gnnc.compile(copy.deepcopy(model), "fp8", backend="reference", **options)


def error(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def nodes_of(fast: gnnc.CompiledModel, stage: str) -> Iterator[Node]:
    graph = dict(fast.stages)[stage]
    assert isinstance(graph, GraphModule)
    yield from graph.graph.nodes


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_inference_is_that_of_eager_with_rows_in_e4m3(name: str) -> None:
    model, fast = compiled(name)
    assert error(fast.eval()(*given()), model.eval()(*given())) < 0.08
    found = {qtype for node in nodes_of(fast, "cache") if (qtype := qtype_of(node)) is not None}
    assert found == {QType.parse("e4m3/row")}
    assert {"qgemm"} <= {op_name(node) for node in nodes_of(fast, "cache")}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_e5m2_rounded_to_nearest(name: str) -> None:
    model, fast = compiled(name)
    x, edge_index = given()
    classes = torch.randint(40, (200,), generator=torch.Generator().manual_seed(1))
    for each in (model.train(), fast.train()):
        nn.functional.cross_entropy(each(x, edge_index), classes).backward()
    right, found = (
        torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, fast)
    )
    assert torch.cosine_similarity(right, found, dim=0) > 0.98
    text = str(fast)
    assert '"e5m2/row"' in text and '"e4m3/row"' in text and "int8" not in text and "row_pow2" not in text
    first = [p.grad.clone() for p in fast.parameters() if p.grad is not None]
    fast.zero_grad()
    nn.functional.cross_entropy(fast(x, edge_index), classes).backward()
    again = [p.grad for p in fast.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "no random bits"


def test_examples_give_no_static_scales() -> None:
    _, fast = compiled("gcn", example_inputs=given())
    assert not [node for node in nodes_of(fast, "cache") if "static_scale" in node.meta]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_the_largest_value_of_a_row_is_the_largest_of_the_type(element: str) -> None:
    qtype = QType.parse(f"{element}/row")
    x = torch.randn(50, 33) * torch.logspace(-30, 30, 50)[:, None]
    x[7] = 0
    scale = scale_reference(x, str(qtype))
    values = quantize_reference(x, scale, str(qtype))
    assert values.dtype in FP8_DTYPES and values.float().isfinite().all()
    largest = values.float().abs().amax(1)
    assert (largest[torch.arange(50) != 7] == qtype.qmax).all() and largest[7] == 0
    beyond = quantize_reference(torch.tensor([[1e9, -1e9, torch.inf]]), torch.ones(1), str(qtype))
    assert beyond.float().abs().eq(qtype.qmax).all()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("kind", ["packed", "plain"])
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_the_first_op_reads_rows_as_they_arrive(name: str, kind: str, precision: str) -> None:
    x, edge_index = given()
    features = gnnc.pack(x) if kind == "packed" else x.to(torch.float8_e4m3fn)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    fast = gnnc.compile(model, precision, backend="reference")
    wide = features.float() if isinstance(features, Tensor) else features.dequantize()
    assert error(fast(features, edge_index), model(wide, edge_index)) < 0.08
    rows = next(node for node in nodes_of(fast, "cache") if node.name in ("x", "x_values"))
    assert {op_name(user) for user in rows.users} <= {"qgemm", "qspmm", "sym_size"}
    text = fast.explain()
    assert "converted to FP32" not in text
    other = {"packed": "fp8", "plain": "int8"}[kind]
    assert ("its rows arrive so, and are read as they are" in text) == (precision == other)


@torch.no_grad()
def test_rows_that_arrive_in_fp8_are_no_reason_to_change_a_named_precision() -> None:
    x, edge_index = given()
    torch.manual_seed(0)
    model = MODELS["gcn"]().eval()
    fast = gnnc.compile(model, "fp8", backend="reference", overrides={"*": "int8"})
    features = x.to(torch.float8_e4m3fn)
    assert error(fast(features, edge_index), model(features.float(), edge_index)) < 0.08
    products = [node for node in nodes_of(fast, "quantize") if op_name(node) == "qgemm"]
    assert products and {node.meta["precision"].name for node in products} == {"int8"}


def test_auto_does_not_search_it_unless_it_is_asked_for() -> None:
    model, _ = compiled("gcn")
    fast = gnnc.compile(model.eval(), "bf16", backend="reference")
    with torch.no_grad():
        fast(*given())
    target = get_backend("reference").target
    node = next(node for node in nodes_of(fast, "reorder") if op_name(node) == "spmm")
    context = Context(FP8, target=target)
    names = {option.precision.name for option in options_of(node, context)}
    assert "fp8" not in names and "int8" in names
    assert "fp8" in {option.precision.name for option in options_of(node, context, FP8)}


@torch.no_grad()
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_saved_plan_is_loaded_again(name: str, tmp_path: Path) -> None:
    model, fast = compiled(name)
    right = fast.eval()(*given())
    fast.save_plan(tmp_path / "plan.json")
    assert '"fp8' in (tmp_path / "plan.json").read_text()
    again = gnnc.compile(model.eval(), "fp32", backend="reference", plan=tmp_path / "plan.json")
    assert torch.equal(again(*given()), right)
    again.save_plan(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


@pytest.mark.parametrize("text", ["e3m4/row", "e4m3/row_pow2", "e5m2/row/zero=3"])
def test_other_floats_are_no_types(text: str) -> None:
    with pytest.raises(ValueError, match="8-bit floats are e4m3 and e5m2"):
        QType.parse(text)
