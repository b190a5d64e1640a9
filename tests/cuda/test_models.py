"""Whole models on a CUDA device: as eager, as the reference, and as the CPU kernels compute them."""

import copy
from typing import Any

import pytest
import torch
from test_backends import MODELS, given
from zoo import ZOO, build

import gnnc

pytestmark = pytest.mark.cuda
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
LIMIT = {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.03, "int8": 0.06}
"""Relative error of the output against eager FP32."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp(min=1e-30)) if want.numel() else 0.0


def on_device(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.cuda() if isinstance(v, torch.Tensor) else v, value)


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
    got = gnnc.compile(model, precision)(*arguments)
    assert got.is_cuda and error(got, eager) < LIMIT[precision]
    reference = gnnc.compile(model, precision, backend="reference")(*arguments)
    assert error(got, reference) < {"fp32": 1e-5, "int8": 0.01}.get(precision, 0.005)
    if precision != "fp16":
        cpu = gnnc.compile(on_cpu, precision, backend="cpu")(*given())
        assert error(got, cpu) < {"fp32": 1e-5, "int8": 0.01}.get(precision, 0.005)


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
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, precision: str) -> None:
    model = build(name)
    args, kwargs = ZOO[name].arguments(60, 400, 0)
    eager = model(*args, **kwargs)
    args, kwargs = on_device((args, kwargs))
    got = gnnc.compile(model.cuda(), precision)(*args, **kwargs)
    assert error(got, eager) <= LIMIT[precision]


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
@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin", "gat"])
def test_first_call_on_an_empty_graph_serves_others(name: str) -> None:
    model = build(name)
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), "fp32")
    for nodes, edges in ((7, 0), (60, 400)):
        args, kwargs = ZOO[name].arguments(nodes, edges, 1)
        eager = model(*args, **kwargs)
        args, kwargs = on_device((args, kwargs))
        assert error(compiled(*args, **kwargs), eager) <= LIMIT["fp32"]
