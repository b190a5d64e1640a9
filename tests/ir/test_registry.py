"""Walks the registry: an op that lacks a part of its record fails here."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_flatten, tree_unflatten

from gnnc.ir import REGISTRY, Op
from gnnc.ir.op import Cost, Kind, define
from gnnc.torch_private import schema

CASES = [
    pytest.param(op, sample, id=f"{op.name}-{number}")
    for op in REGISTRY.values()
    for number, sample in enumerate(op.samples())
]
DIFFERENTIABLE = [case for case in CASES if case.values[0].gradient is not None]
OPS = [pytest.param(op, id=op.name) for op in REGISTRY.values()]


@pytest.mark.parametrize("op", OPS)
def test_record_is_complete(op: Op) -> None:
    assert op.reference.__doc__ or op.reference.__name__ == "<lambda>"
    assert op.samples()
    assert (op.gradient is None) != (op.no_gradient is None)
    assert op.quantized is None or op.quantized in REGISTRY


@pytest.mark.parametrize("op", OPS)
def test_traits_are_complete(op: Op) -> None:
    """An op of a model says which operands carry features, and prints under a name of its own kind."""
    names = [argument.name for argument in schema(op.target).arguments]
    assert op.parameters == tuple(names)
    assert op.kind in get_args(Kind)
    assert set(op.low_operands) <= set(op.features) <= set(names)
    if op.kind in ("dense", "aggregate", "edge"):
        assert op.features
        assert op.label is not None
        assert op.cost_family in {other.name for other in REGISTRY.values()}
    if op.kind == "aggregate":
        assert op.gathered
        assert op.counted_as is not None
    if op.quantized is not None:
        assert op.low_operands
        assert op.cost_family == REGISTRY[op.quantized].cost_family


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"kind": "sparse"}, "has kind 'sparse'"),
        ({"features": ("y",)}, "names 'y'; it takes"),
        ({"features": (), "low_operands": ()}, "name them in `features`"),
        ({"features": ("w", "x")}, "in the order of its schema"),
        ({"features": ("w",), "low_operands": ("x",)}, "must be among its features"),
        ({"kind": "structure"}, "has features"),
        ({"label": "{y}_q"}, "names 'y'; it takes"),
    ],
)
def test_traits_that_do_not_fit_are_refused(traits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        define(replace(REGISTRY["gemm"], name="unfit", **traits))
    assert "unfit" not in REGISTRY


def differentiable(op: Op, sample: tuple) -> tuple:
    """The sample, its floats as leaves that want a gradient where the op has one."""
    if op.gradient is None:
        return sample
    flat, spec = tree_flatten(sample)
    floats = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in flat]
    leaves = [a.clone().requires_grad_() if wants else a for a, wants in zip(flat, floats, strict=True)]
    return tree_unflatten(leaves, spec)


@pytest.mark.first(13)
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_opcheck(op: Op, sample: tuple) -> None:
    """Schema, shape rule, autograd registration, and tracing with symbolic sizes, forward and backward."""
    opcheck(op.target, differentiable(op, sample))


def test_every_registered_op_is_checked() -> None:
    """What torch knows in our namespace is what the cases above walk."""
    schemas = torch._C._jit_get_all_schemas()
    known = {schema.name.partition("::")[2] for schema in schemas if schema.name.startswith("gnnc::")}
    assert known == {case.values[0].name for case in CASES}


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_cost_is_nonnegative(op: Op, sample: tuple) -> None:
    cost = op.cost(*sample)
    assert isinstance(cost, Cost)
    assert cost.bytes >= 0
    assert cost.flops >= 0


@pytest.mark.parametrize("op", OPS)
def test_error_inputs_are_refused(op: Op) -> None:
    for case in op.error_inputs():
        with pytest.raises(case.error, match=case.match):
            op.target(*case.args)


@pytest.mark.first(20)
@pytest.mark.parametrize(("op", "sample"), DIFFERENTIABLE)
def test_gradient_rule(op: Op, sample: tuple) -> None:
    flat, spec = tree_flatten(sample)
    if any(isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in flat):
        flat = [a.float() if isinstance(a, torch.Tensor) else a for a in flat]
    leaves = [
        a.double().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in flat
    ]
    assert torch.autograd.gradcheck(lambda *args: op.target(*tree_unflatten(list(args), spec)), leaves)
