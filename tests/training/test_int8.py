"""Training in int8: gradients, what stays FP32, what is saved, and losses, against eager PyTorch."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphs import load
from on_cora import ON_CORA, Net
from torch import Tensor, nn
from torch_geometric import nn as pyg
from training_steps import losses_of_adam
from zoo import ZOO, prepared
from zoo_gradients import gradients, rms

import gnnc
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.op import op_of
from gnnc.ir.parts import SAVED
from gnnc.ir.source import source_of
from gnnc.passes.assign import Assign
from gnnc.passes.pipeline import PIPELINE

WITH_WEIGHTS = [name for name, entry in ZOO.items() if any(True for _ in prepared(entry).parameters())]


def gcn_on_a_random_graph() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    graph = torch.randn(90, 96), torch.randint(90, (2, 400))
    return Net(pyg.GCNConv(96, 64), pyg.GCNConv(64, 5)), graph


def cosine(found: dict[str, Any], right: dict[str, Any]) -> float:
    flat = [torch.cat([side[path].flatten() for path in right]) for side in (found, right)]
    return torch.cosine_similarity(*flat, dim=0).item()


def primitives(graph: torch.fx.Graph) -> Iterator[tuple[str, torch.fx.Node]]:
    for node in graph.nodes:
        if (op := op_of(node)) is not None and "precision" in node.meta:
            yield op.name, node


@pytest.mark.parametrize(
    "name", ["gcn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sage", "gat", "gin"))]
)
def test_gradients_on_cora_at_initialization(name: str) -> None:
    data = load("cora")
    torch.manual_seed(0)
    model = ON_CORA[name](data["x"].shape[1], int(data["y"].max()) + 1).train()
    train = data["train_mask"]

    def gradients_of(call: Any, twin: nn.Module) -> dict[str, Tensor]:
        twin.zero_grad()
        logits = call(data["x"], data["edge_index"])[train]
        nn.functional.cross_entropy(logits, data["y"][train].long()).backward()
        return {path: p.grad for path, p in twin.named_parameters() if p.grad is not None}

    want = gradients_of(model, model)
    twin = copy.deepcopy(model)
    compiled = gnnc.compile(twin, "int8")
    draws = [gradients_of(compiled, twin) for _ in range(16)]
    got = draws[0]
    assert cosine(got, want) >= 0.99
    mean = {path: torch.stack([draw[path] for draw in draws]).mean(0) for path in got}
    assert cosine(mean, want) >= 0.995
    largest = max(map(rms, want.values()))
    for path, grad in want.items():
        if rms(grad) > 0.001 * largest:  # that of a bias before a norm is 0
            assert cosine({path: got[path]}, {path: grad}) >= 0.97, path


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("gcn", "pool-mean") else pytest.mark.slow) for n in WITH_WEIGHTS],
)
def test_gradients_of_the_zoo(name: str) -> None:
    model, arguments = prepared(ZOO[name]).requires_grad_(True).train(), ZOO[name].arguments(40, 90, 0)
    eager = copy.deepcopy(model)
    right = gradients(eager, eager, arguments, torch.float32)
    found = gradients(gnnc.compile(model, "int8"), model, arguments, torch.float32)
    assert {path for path, grad in found.items() if grad is None} == {
        p for p, g in right.items() if g is None
    }
    assert cosine(found, {path: grad for path, grad in right.items() if grad is not None}) >= 0.99


def test_twenty_steps_have_nearly_the_losses_of_eager() -> None:
    model, graph = gcn_on_a_random_graph()
    labels = graph[0][:, :5].argmax(1)
    twin = copy.deepcopy(model)
    losses = [
        losses_of_adam(owner, lambda call=call: nn.functional.cross_entropy(call(*graph), labels))
        for call, owner in ((model, model), (gnnc.compile(twin, "int8"), twin))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < 0.8 * losses[1][0]


def test_what_is_next_to_an_output_stays_fp32_and_says_so() -> None:
    model, graph = gcn_on_a_random_graph()
    low = [Assign(last_layer="low") if step.name == "assign" else step for step in PIPELINE]
    default, all_low = gnnc.compile(model, "int8"), gnnc.compile(model, "int8", pipeline=low)
    for compiled in (default, all_low):
        compiled(*graph)
    names = [
        {(name, node.meta["layer"]) for name, node in primitives(dict(c.stages)["assign"].graph)
         if node.meta["precision"].is_integer}
        for c in (default, all_low)
    ]  # fmt: skip
    assert names[0] == {
        ("gemm", "first.lin"),
        ("spmm", "first"),
        ("spmm", "first (backward)"),
        ("gemm_tn", "first.lin (backward)"),
    }
    assert names[1] - names[0] == {
        ("gemm", "second.lin"),
        ("gemm", "second.lin (backward)"),
        ("gemm_tn", "second.lin (backward)"),
    }  # rows of 5 columns are summed in FP32 anyway
    assert "it is next to an output" in default.explain()
    assert "it is next to an output" not in all_low.explain()


def test_an_inference_program_has_no_such_rule() -> None:
    model, graph = gcn_on_a_random_graph()
    compiled = gnnc.compile(model, "int8")
    with torch.no_grad():
        compiled(*graph)
    assert "it is next to an output" not in compiled.explain()


def test_activations_are_saved_as_quantized_rows() -> None:
    model, graph = gcn_on_a_random_graph()
    saved: dict[str, int] = {}
    for precision in ("fp32", "int8"):
        compiled = gnnc.compile(model, precision)
        compiled(*graph)
        forward = dict(compiled.stages)["partition"]
        values = [outputs_of(forward.graph)[i].meta["val"] for i in forward.meta[SAVED].values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        saved[precision] = sum(t.dtype.itemsize * t[:1].numel() for t in tensors)
        kinds = {(str(t.dtype).removeprefix("torch."), *t.shape[1:]) for t in tensors}
        rows = {("float32", 64)} if precision == "fp32" else {("int8", 64), ("float32",)}
        assert kinds == rows | {("uint8", 8)}
    assert saved["int8"] <= 0.29 * saved["fp32"]


def test_scales_of_training_are_taken_at_each_call() -> None:
    model, graph = gcn_on_a_random_graph()
    compiled = gnnc.compile(model, "int8", example_inputs=graph)
    eager = copy.deepcopy(model)
    for factor in (1.0, 30.0):
        for twin in (model, eager):
            twin.zero_grad()
            with torch.no_grad():
                twin.get_parameter("first.lin.weight").mul_(factor)
        compiled(*graph).square().mean().backward()
        eager(*graph).square().mean().backward()
        found, right = ({n: p.grad for n, p in m.named_parameters()} for m in (model, eager))
        assert cosine(found, right) > 0.99
    sources = [source_of(node) for node in placeholders(dict(compiled.stages)["assign"])]
    assert {source.kind for source in sources if source is not None} == {
        "parameter", "input", "structure", "tangent"
    }  # fmt: skip
