"""Every model of the zoo, compiled, against eager: on the traced graph, another, and the smallest."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from bad_inputs import assert_refused
from compare import SIZES, assert_close, eager, relative_error
from slow import slow_but, slow_if
from zoo import ZOO, prepared
from zoo_layers import LAYERS

import gnnc

ALL = ZOO | LAYERS
# Relative L2 error of the output, by precision.
LIMIT = {"fp32": 1e-5, "bf16": 2e-2, "int8": 5e-2}
LAYER_LIMIT = {"fp32": 1e-4, "int8": 5e-2}
# `make test` runs these in every precision, and some of the others in one.
MAIN = ("gcn", "sage-mean", "gin", "gat")
# Their own code asks whether there are edges, or takes a number: other captures serve other answers.
BRANCHES_ON_SIZE = ("attention-returned", "hetero-conv", "hgt", "hypergraph", "models.AttentiveFP")


def build(name: str) -> torch.nn.Module:
    return prepared(ALL[name])


def compare(name: str, compiled: Any, sizes: list[tuple[int, int]], limit: float) -> None:
    for seed, (nodes, edges) in enumerate(sizes):
        args, kwargs = arguments = ALL[name].arguments(nodes, edges, seed)
        with torch.no_grad():
            expected = eager(compiled.model, arguments)
            if expected is not None:
                assert_close(compiled(*args, **kwargs), expected, limit, (nodes, edges))


def refuse(name: str, compiled: Any, *, traced: bool = False) -> None:
    """Bad calls are refused before anything is traced, and leave the compiled model as it was."""
    count = assert_refused(compiled, *ALL[name].arguments(60, 400, 0), traced=traced)
    assert count >= 3


def cases(names: Iterable[str], precisions: Iterable[str], every: int) -> list[Any]:
    """Return parameters (name, precision); main models are fast, and so is one in ``every`` other in INT8."""
    return [
        pytest.param(name, precision, id=f"{name}-{precision}", marks=slow_if(not fast))
        for (place, name), precision in product(enumerate(names), precisions)
        for fast in [name in MAIN or (precision == "int8" and place % every == 0)]
    ]


@pytest.mark.parametrize(("name", "precision"), cases(ZOO, LIMIT, every=2))
def test_compiled_equals_eager(name: str, precision: str) -> None:
    compiled = gnnc.compile(build(name), precision=precision)
    compare(name, compiled, SIZES, LIMIT[precision])
    if precision == "fp32":
        refuse(name, compiled)


@pytest.mark.parametrize(("name", "precision"), cases(LAYERS, LAYER_LIMIT, every=5))
def test_layers_equal_eager(name: str, precision: str) -> None:
    compiled = gnnc.compile(build(name), precision=precision)
    # The first graph is a large one in FP32, the smallest in INT8: both must serve the others.
    sizes = SIZES if precision == "fp32" else SIZES[:2] if name in BRANCHES_ON_SIZE else SIZES[::-1]
    compare(name, compiled, sizes, LAYER_LIMIT[precision])
    if name not in BRANCHES_ON_SIZE:
        assert "\n  2. " not in compiled.explain()  # one capture serves all sizes
    if precision == "fp32":
        refuse(name, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES_ON_SIZE)
def test_the_smallest_graph_first_in_int8(name: str) -> None:
    compare(name, gnnc.compile(build(name), precision="int8"), SIZES[::-1], LAYER_LIMIT["int8"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcn-edge-weight", pytest.param("gat-edges", marks=pytest.mark.slow)])
def test_arguments_that_only_a_trace_can_refuse(name: str) -> None:
    refuse(name, gnnc.compile(build(name), precision="fp32"), traced=True)


@pytest.mark.first(1)
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


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin", "gat"])
def test_static_scales(name: str) -> None:
    model = build(name)
    args, _ = ZOO[name].arguments(60, 400, 0)
    compiled = gnnc.compile(model, precision="int8", example_inputs=args)
    with torch.no_grad():
        assert relative_error(compiled(*args), model(*args)) <= LIMIT["int8"]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_but(MAIN, list(ZOO)))
def test_first_call_on_an_empty_graph_serves_others(name: str) -> None:
    compare(name, gnnc.compile(build(name), precision="fp32"), [(7, 0), (60, 400)], LIMIT["fp32"])
