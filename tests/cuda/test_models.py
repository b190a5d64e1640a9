"""Whole models on a CUDA device: as eager, as the reference, and as the CPU kernels compute them."""

import copy
import threading
from dataclasses import replace
from typing import Any

import graphs
import models
import pytest
import torch
from backend_models import MODELS, given
from bad_inputs import assert_refused
from compare import SIZES, assert_close, eager
from cuda_cases import error, on_device, on_host
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GCN
from zoo import ZOO, build, prepared
from zoo_layers import LAYERS

import gnnc
from gnnc.runtime.cuda.formats import tables, window_table

pytestmark = pytest.mark.cuda
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8")
_NEIGHBORS = graphs.Shape(nodes=5000, edges=100_000, features=64, classes=47, skew=1.6)
LIMIT = {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.03, "fp8": 0.12, "int8": 0.06}
"""Relative error of the output against eager FP32."""


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_cuda_computes_what_eager_and_the_reference_compute(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    arguments = given()
    eager = model(*arguments)
    on_cpu = copy.deepcopy(model)
    model.cuda()
    arguments = on_device(arguments)
    compiled = gnnc.compile(model, precision)
    got = compiled(*arguments)
    assert "on backend cuda" in str(compiled)
    assert got.is_cuda and error(got, eager) < LIMIT[precision]
    reference = gnnc.compile(model, precision, backend="reference")(*arguments)
    # on CUDA products of narrow rows are bf16 in int8 models; a value next to a tie of fp8 moves by 6%
    assert error(got, reference) < {"fp32": 1e-5, "int8": 0.02, "fp8": LIMIT["fp8"]}.get(precision, 0.005)
    if precision not in ("fp16", "fp8"):
        cpu = gnnc.compile(on_cpu, precision, backend="cpu")(*given())
        assert error(got, cpu) < {"fp32": 1e-5, "int8": 0.02}.get(precision, 0.005)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_static_scales(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    eager = model(*given())
    arguments = on_device(given())
    compiled = gnnc.compile(model.cuda(), "int8", example_inputs=arguments)
    assert error(compiled(*arguments), eager) < LIMIT["int8"]


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_node_blocks_change_nothing(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays on graphs of millions of edges only."""
    torch.manual_seed(0)
    model = models.MODELS[name](64, 47).eval().cuda()
    x, edge_index = torch.randn(5000, 64).cuda(), graphs.generate(_NEIGHBORS).cuda()
    plain = gnnc.compile(model, precision, example_inputs=(x, edge_index))(x, edge_index)
    assert error(plain, model(x, edge_index)) < LIMIT[precision]
    taken = []
    monkeypatch.setattr(tables, "pays", lambda *_: taken.append(1) or True)
    monkeypatch.setattr(window_table, "pays", lambda *_: True)
    again = gnnc.compile(model, precision, example_inputs=(x, edge_index))(x, edge_index.clone())
    assert taken and error(again, plain) < LIMIT[precision] / 10


class Mixed(torch.nn.Module):
    """A sum, and a maximum, which reads the source ids."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.sum, self.max = SAGEConv(inner, out), SAGEConv(inner, out, aggr="max")

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.sum(x, edge_index) + self.max(x, edge_index)


def columns_of(compiled: gnnc.CompiledModel) -> list[torch.Tensor]:
    """The source ids of every CSR that a model's last program keeps."""
    entries = compiled._dispatch.last.runner.cache._entries.values()
    tensors = [value for entry in entries for value in entry.outputs if isinstance(value, torch.Tensor)]
    return [value for value in tensors if value.dtype == torch.int32 and value.numel() >= _NEIGHBORS.edges]


@torch.no_grad()
@pytest.mark.parametrize(("model", "frees"), [(models.MODELS["sage"], True), (Mixed, False)])
def test_source_ids_are_kept_for_who_reads_them(
    model: Any, frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edges by node block hold the ids: four bytes an edge less, and every later call as the first."""
    torch.manual_seed(0)
    model = model(64, 47).eval().cuda()
    x, edge_index = torch.randn(5000, 64).cuda(), graphs.generate(_NEIGHBORS).cuda()
    plain = gnnc.compile(model, "int8")
    expected = plain(x, edge_index)
    assert columns_of(plain) and all(col.untyped_storage().nbytes() for col in columns_of(plain))
    monkeypatch.setattr(tables, "pays", lambda *_: True)
    monkeypatch.setattr(window_table, "pays", lambda *_: True)
    compiled = gnnc.compile(model, "int8")
    first = compiled(x, edge_index)
    assert all((col.untyped_storage().nbytes() == 0) == frees for col in columns_of(compiled))
    assert error(first, expected) < 1e-3
    for turn in range(4):  # as they are, and as a graph
        assert torch.equal(compiled(x, edge_index if turn < 3 else edge_index.clone()), first)


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the emulator is one thread's")
def test_threads_meet_a_graph_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "pays", lambda *_: True)
    monkeypatch.setattr(window_table, "pays", lambda *_: True)
    torch.manual_seed(0)
    x, edge_index = torch.randn(5000, 64).cuda(), graphs.generate(_NEIGHBORS).cuda()
    compiled = gnnc.compile(models.MODELS["sage"](64, 47).eval().cuda(), "int8")
    first = compiled(x, edge_index)
    for _ in range(5):
        new, found = edge_index.clone(), []
        threads = [threading.Thread(target=call, args=(compiled, x, new, found)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert len(found) == 4 and all(torch.equal(each, first) for each in found)


def call(
    compiled: gnnc.CompiledModel, x: torch.Tensor, edge_index: torch.Tensor, found: list[torch.Tensor]
) -> None:
    """Call a model on a stream of this thread."""
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        found.append(compiled(x, edge_index))
        torch.cuda.current_stream().synchronize()


def compare(model: torch.nn.Module, compiled: gnnc.CompiledModel, entry: Any, limit: float) -> None:
    """Graphs of every size, the smallest too, against eager on the CPU."""
    for seed, (nodes, edges) in enumerate(SIZES):
        arguments = entry.arguments(nodes, edges, seed)
        expected = eager(model, arguments)
        if expected is not None:
            args, kwargs = on_device(arguments)
            assert_close(on_host(compiled(*args, **kwargs)), expected, limit, (nodes, edges))


def refuse(compiled: gnnc.CompiledModel, entry: Any) -> None:
    """Bad calls are errors of ours, and the good one works on: no kernel has read out of bounds."""

    def same(after: torch.Tensor, before: torch.Tensor) -> bool:
        return error(after, before) < 1e-5  # torch's own ops add in any order

    # The sort takes bool ids for 0 and 1; eager fails, since it indexes weights of self loops by a mask.
    taken = {"edge_index: bool"} if entry is ZOO["gcn-edge-weight"] else ()
    assert assert_refused(compiled, *on_device(entry.arguments(60, 400, 0)), same=same, taken=taken) >= 3
    torch.cuda.synchronize()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, precision: str) -> None:
    model = build(name)
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), precision)
    compare(model, compiled, ZOO[name], LIMIT[precision])
    if precision == "fp32":
        refuse(compiled, ZOO[name])


@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_the_four_models_run_on_kernels_of_our_own(name: str) -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(MODELS[name]().eval().cuda(), "int8")
    compiled(*on_device(given()))
    fallbacks = [
        node
        for node in compiled.graph_module.graph.nodes
        if node.meta.get("kernel") == "reference" and node.meta["val"].dim() > 1
    ]
    assert not fallbacks, compiled.explain()


@torch.no_grad()
def test_a_scale_of_a_whole_tensor_is_that_of_its_call() -> None:
    torch.manual_seed(0)
    passes = [replace(p, dynamic="tensor") if p.name == "quantize" else p for p in gnnc.passes.PIPELINE]
    model, (x, edge_index) = GCN(24, 64, 2, 47).eval().cuda(), on_device(given())
    compiled = gnnc.compile(model, "int8", pipeline=passes)
    large = compiled(x * 100.0, edge_index)
    assert '"int8/row_pow2")  ' in str(compiled)  # rows are fractions of one scale, taken from the tensor
    for given_x in (x, x, x * 0.0):
        fresh = gnnc.compile(model, "int8", pipeline=passes)
        assert torch.equal(compiled(given_x, edge_index), fresh(given_x, edge_index))
    assert not torch.equal(large, compiled(x, edge_index))
    with pytest.raises(gnnc.PrecisionError, match="conv"):
        for _ in range(3):  # said by a later call
            compiled(x * float("nan"), edge_index)
            torch.cuda.synchronize()


@torch.no_grad()
@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin", "gat"])
def test_first_call_on_an_empty_graph_serves_others(name: str) -> None:
    model = build(name)
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), "fp32")
    for nodes, edges in ((7, 0), (60, 400)):
        args, kwargs = ZOO[name].arguments(nodes, edges, 1)
        eager = model(*args, **kwargs)
        args, kwargs = on_device((args, kwargs))
        assert error(compiled(*args, **kwargs), eager) <= LIMIT["fp32"]


NOT_CAPTURED = {
    "gated-graph": "torch has no shape rule for the fused GRU cell of CUDA",
    "models.AttentiveFP": "torch has no shape rule for the fused GRU cell of CUDA",
    "hgt": "the layer makes a tensor on the CPU",
}


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.xfail(raises=gnnc.CaptureError, reason=NOT_CAPTURED[n]))
        if n in NOT_CAPTURED
        else n
        for n in LAYERS
    ],
)
def test_every_other_layer(name: str) -> None:
    model = prepared(LAYERS[name])
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), "fp32")
    compare(model, compiled, LAYERS[name], 1e-4)
    refuse(compiled, LAYERS[name])


@torch.no_grad()
@pytest.mark.parametrize("name", models.MODELS)
def test_accuracy_on_cora(name: str) -> None:
    """A trained model predicts the same class for nearly every node, with static and dynamic scales."""
    data = graphs.load("cora")
    x, edge_index, y = (data[key].cuda() for key in ("x", "edge_index", "y"))
    masks = [data[key].cuda() for key in ("train_mask", "val_mask")]
    torch.manual_seed(0)
    model = models.MODELS[name](x.shape[1], int(data["num_classes"])).cuda()
    with torch.enable_grad():
        models.train(model, x, edge_index, y, *masks, epochs=60)
    wanted = model(x, edge_index).argmax(-1)
    for precision in PRECISIONS:
        for examples in (None, (x, edge_index)):
            compiled = gnnc.compile(model, precision, example_inputs=examples)
            same = (compiled(x, edge_index).argmax(-1) == wanted).float().mean()
            least = 0.97 if precision == "fp8" else 0.99
            assert same > least, (precision, examples is not None, float(same))
