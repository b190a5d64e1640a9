"""Every model of the zoo, compiled, against eager: on the traced graph, another, and the smallest."""

from typing import Any

import pytest
import torch
from zoo import ZOO, build

import gnnc

# Relative L2 error of the output, by precision.
LIMIT = {"fp32": 1e-5, "bf16": 2e-2, "int8": 5e-2}
SIZES = [(60, 400), (37, 150), (1, 0), (1, 1), (7, 0)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.double().norm()
    return ((got.double() - expected.double()).norm() / norm.clamp(min=1e-6)).item()


@pytest.mark.parametrize("precision", LIMIT)
@pytest.mark.parametrize("name", ZOO)
def test_compiled_equals_eager(name: str, precision: str) -> None:
    model = build(name)
    compiled = gnnc.compile(model, precision=precision)
    for seed, (nodes, edges) in enumerate(SIZES):
        args, kwargs = ZOO[name].arguments(nodes, edges, seed)
        with torch.no_grad():
            expected, got = model(*args, **kwargs), compiled(*args, **kwargs)
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        if expected.numel():
            assert relative_error(got, expected) <= LIMIT[precision], (nodes, edges)


@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gat", "pool-add"])
def test_cpu_equals_reference(name: str) -> None:
    model = build(name)
    args, kwargs = ZOO[name].arguments(60, 400, 0)
    with torch.no_grad():
        outputs = [
            gnnc.compile(model, precision="int8", backend=backend)(*args, **kwargs)
            for backend in ("cpu", "reference")
        ]
    # One code off by one, where a tie falls the other way, is far below this.
    assert relative_error(*outputs) < 5e-3


@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin", "gat"])
def test_static_scales(name: str) -> None:
    model = build(name)
    args, _ = ZOO[name].arguments(60, 400, 0)
    compiled = gnnc.compile(model, precision="int8", example_inputs=args)
    with torch.no_grad():
        assert relative_error(compiled(*args), model(*args)) <= LIMIT["int8"]


@pytest.mark.parametrize("name", ZOO)
def test_first_call_on_an_empty_graph_serves_others(name: str) -> None:
    model = build(name)
    compiled = gnnc.compile(model, precision="fp32")
    with torch.no_grad():
        for nodes, edges in ((7, 0), (60, 400)):
            args, kwargs = ZOO[name].arguments(nodes, edges, 1)
            got: Any = compiled(*args, **kwargs)
            assert relative_error(got, model(*args, **kwargs)) <= LIMIT["fp32"]
