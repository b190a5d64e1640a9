"""Plans: written from a graph, read back, and refused where they do not fit the model."""

import json

import pytest
import torch
from gnn_graphs import Layers, arguments, gcn, run_all

from gnnc.errors import PrecisionError, UnsupportedError
from gnnc.passes.assign import Assign
from gnnc.passes.quantization.number_formats import Option
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.precision import BF16, FP32


def assigned(gm, **options):
    gm, _ = run_all(gm, [Assign()], **options)
    return Plan.of(gm)


def text(plan, layer, op):
    return [str(option) for option in plan.layers[layer][op]]


def written(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_it_survives_a_round_trip(tmp_path) -> None:
    plan = Plan(
        {
            "conv1": {"spmm": (Option.parse("int8 row_pow2"),), "gemm": (Option.parse("fp32"),)},
            "": {"gemm": (Option.parse("int8"), Option.parse("bf16"))},
        }
    )
    path = written(tmp_path, plan.to_json())
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["layers"]["conv1"] == {"spmm": "int8 row_pow2", "gemm": "fp32"}


def test_a_plan_decides_and_precision_fills_in() -> None:
    plan = Plan({"conv1": {"gemm": (Option.parse("bf16"),)}})
    made = assigned(gcn(), plan=plan, precision=FP32)
    assert text(made, "conv1", "gemm") == ["bf16"]
    assert text(made, "conv1", "spmm") == ["fp32"]


def test_overrides_win_over_the_plan() -> None:
    plan = Plan({"conv1": {"gemm": (Option.parse("int8"),), "spmm": (Option.parse("int8 row"),)}})
    made = assigned(gcn(), plan=plan, precision=FP32, overrides={"conv1": BF16})
    assert text(made, "conv1", "gemm") == ["bf16"] and text(made, "conv1", "spmm") == ["bf16"]


def test_granularity_is_part_of_it() -> None:
    gm = gcn()
    plan = Plan({"conv1": {"spmm": (Option.parse("int8 tensor"),)}})
    made = assigned(gm, plan=plan, examples=arguments(gm), precision=FP32)
    assert text(made, "conv1", "spmm") == ["int8 tensor"]


def test_an_op_that_a_layer_runs_twice_has_two_entries() -> None:
    b = Layers(32)
    b.layer = "conv"
    gm = b.finish(b.spmm(b.spmm(b.x)))
    two = Plan({"conv": {"spmm": (Option.parse("bf16"), Option.parse("fp32"))}})
    assert text(assigned(gm, plan=two), "conv", "spmm") == ["bf16", "fp32"]
    one = Plan({"conv": {"spmm": (Option.parse("bf16"),)}})
    assert text(assigned(gm, plan=one), "conv", "spmm") == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ({"conv9": {"gemm": "int8"}}, "no layer 'conv9' .*'conv1', 'conv2'|'conv2', 'conv1'"),
        ({"conv1": {"gem": "int8"}}, "in layer 'conv1', the model has no op 'gem' .*'gemm'"),
        ({"conv1": {"gemm": ["int8", "int8", "fp32"]}}, "runs 'gemm' 1 times, and the plan has 3"),
        (
            {"conv1": {"spmm": "int8 tensor"}},
            "cannot be 'int8 tensor' without example_inputs; it can be 'fp32'",
        ),
        ({"conv1": {"gemm": "int8 row"}}, "'gemm' of layer 'conv1' cannot be 'int8 row'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path, layers, match) -> None:
    plan = Plan.load(written(tmp_path, {"version": 1, "layers": layers}))
    with pytest.raises(PrecisionError, match=match):
        assigned(gcn(), plan=plan)


def test_a_precision_that_the_backend_lacks() -> None:
    plan = Plan({"conv1": {"gemm": (Option.parse("int4"),)}})
    with pytest.raises(UnsupportedError, match="plan: backend 'reference' has no int4 kernels yet"):
        assigned(gcn(), plan=plan)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a plan of version 1"),
        ({"version": 2, "layers": {}}, "is not a plan of version 1"),
        ({"version": 1, "layers": {"a": "int8"}}, "is not a plan of version 1"),
        ({"version": 1, "layers": {"a": {"gemm": 8}}}, "'a' 'gemm' is 8, not the name of a precision"),
        ({"version": 1, "layers": {"a": {"gemm": "int9000"}}}, "unknown precision 'int9000'"),
        ({"version": 1, "layers": {"a": {"gemm": [["int8"]]}}}, "is .*, not the name of a precision"),
        ({"version": 1, "layers": {"a": {"b": {"gemm": "int8"}}}}, "is .*, not the name of a precision"),
        ("[" * 100_000 + "]" * 100_000, r"cannot be read .*recursion.*save_plan"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, r"cannot be read .*recursion.*save_plan"),
        ("9" * 5000, "cannot be read .*save_plan"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "cannot be read"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, data, match) -> None:
    with pytest.raises(PrecisionError, match=match):
        Plan.load(written(tmp_path, data))


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(PrecisionError, match="nowhere.json' cannot be read"):
        Plan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("path", [5, 5.0, True, {"version": 1}, [], b"plan.json"])
def test_what_is_no_path_is_refused(path) -> None:
    with pytest.raises(PrecisionError, match=f"plan takes the path .*save_plan.*got {type(path).__name__}"):
        Plan.load(path)


@pytest.mark.parametrize("path", ["", ".", "/dev/zero", "\0", "x" * 5000])
def test_paths_of_no_file_are_refused(path) -> None:
    with pytest.raises(PrecisionError, match="cannot be read"):
        Plan.load(path)


def test_softmax_stays_fp32_whatever_a_plan_says() -> None:
    b = Layers(32)
    b.layer = "conv"
    alpha = b.call(torch.ops.gnnc.edge_softmax, b.rowptr, b.edge_input("logits", 4))
    gm = b.finish(alpha)
    with pytest.raises(PrecisionError, match="'edge_softmax' of layer 'conv' cannot be 'int8'"):
        assigned(gm, plan=Plan({"conv": {"edge_softmax": (Option.parse("int8"),)}}))
