"""Rounded operands in float32 stand for the quantized op: both make the same error."""

import pytest
import torch
from gnn_graphs import Layers, arguments, relative_error, run_all

from gnnc.ir.op import op_of
from gnnc.ir.qtype import QType
from gnnc.passes.assign import Assign
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import FULL, Option, options_of
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.passes.quantize import Quantize
from gnnc.passes.search.rounding import round_rows, round_static
from gnnc.passes.search.sensitivity import Bench

ops = torch.ops.gnnc


def _gemm(b):
    return b.linear(b.x, 24)


def _gemm_kn(b):
    return b.call(ops.gemm, b.x, b.weight("w", 32, 24), None, True)


def _gemm_heads(b):
    return b.call(ops.gemm, b.call(torch.ops.aten.view, b.x, [-1, 4, 8]), b.weight("w", 6, 8), None, False)


def _spmm(b):
    return b.spmm(b.mul(b.x, b.norm))


def _spmm_weighted(b):
    return b.spmm(b.x, b.edge_input("edge_weight"))


def _spmm_max(b):
    return b.spmm(b.x, reduce="max")


def _spmm_mean(b):
    return b.spmm(b.x, reduce="mean")


def _dot(b):
    return b.call(ops.sddmm, b.rowptr, b.col, b.x, b.x, "dot")


BUILDERS = [_gemm, _gemm_kn, _gemm_heads, _spmm, _spmm_weighted, _spmm_max, _spmm_mean, _dot]
KINDS = ("gemm", "spmm", "sddmm")


def _one(build):
    b = Layers(32)
    b.layer = "layer"
    return b.finish(build(b))


def _primitive(gm):
    return next(n for n in gm.graph.nodes if (op := op_of(n)) and op.name in KINDS)


@pytest.mark.first(2)
@pytest.mark.parametrize("build", BUILDERS)
def test_every_option_errs_as_its_quantized_form(build) -> None:
    gm = _one(build)
    values = arguments(gm)
    node = _primitive(gm)
    name = str(node.target).split(".")[1]
    options = options_of(node, Context(examples=values))
    assert options[0] == FULL and len(options) >= 3
    for option in options:
        (predicted,) = Bench(gm, values).errors({node: option})
        plan = Plan({"layer": {name: (option,)}})
        quantized, _ = run_all(_one(build), (Assign(), Quantize()), examples=values, plan=plan)
        real = relative_error(quantized(*_with_scales(quantized, values)), _one(build)(*values))
        assert predicted == pytest.approx(real, rel=1e-3, abs=1e-6), str(option)


def _with_scales(gm, values):
    constants = [n.meta["value"] for n in gm.graph.find_nodes(op="placeholder")[len(values) :]]
    return (*values, *constants)


def test_a_row_scale_rounds_to_within_half_a_step() -> None:
    x = torch.tensor([[1.0, -0.5, 0.013], [200.0, 1.0, 0.4]])
    step = x.abs().amax(1, keepdim=True) / 127
    assert bool(((round_rows(x, QType()) - x).abs() <= step / 2 + 1e-6).all())


def test_a_static_scale_saturates_and_shifts_keep_small_rows() -> None:
    x = torch.tensor([[2.0, 1.0], [0.01, 0.005]])
    base = torch.tensor(1.0 / 127)
    plain = round_static(x, base, QType(granularity="tensor"))
    shifted = round_static(x, base, QType(granularity="row_pow2"))
    assert plain[0].tolist() == pytest.approx([1.0, 1.0])
    assert (shifted[1] - x[1]).abs().max() < (plain[1] - x[1]).abs().max()


def test_bits_of_two_floats() -> None:
    gm = _one(_gemm)
    node = _primitive(gm)
    bench = Bench(gm, arguments(gm))
    errors = [bench.errors({node: Option.parse(p)})[0] for p in ("fp16", "bf16", "int8", "int4")]
    assert errors == sorted(errors) and errors[0] > 0
