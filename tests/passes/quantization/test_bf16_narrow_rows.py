"""Widen: which rows take bf16 in an int8 model, on which backend, and that nothing else does."""

import pytest
import torch
from gnn_graphs import MODELS, Layers, arguments, relative_error, run_all, targets

from gnnc.passes.assign import Assign
from gnnc.passes.quantize import Quantize
from gnnc.precision import BF16, INT8, Precision
from gnnc.target import CUDA_NARROW_ROWS, NarrowRows, Target

gnnc = torch.ops.gnnc
aten = torch.ops.aten
ON_CUDA = Target("cuda", frozenset({"fp32", "fp16", "bf16", "int8"}), narrow_rows=CUDA_NARROW_ROWS)


def aggregation(width, *, weights=None, reduce="sum"):
    """One sum, mean, maximum or minimum, whose edges have no value, one, or one a head."""
    b = Layers(width)
    x, value = b.x, None
    if weights == "edge":
        value = b.edge_input("edge_weight")
    elif weights is not None:
        x, value = b.call(aten.view, b.x, [-1, weights, width // weights]), b.edge_input("alpha", weights)
    return b.finish(b.spmm(x, value, reduce))


def dot(width, heads=1):
    b = Layers(width)
    x = b.x if heads == 1 else b.call(aten.view, b.x, [-1, heads, width // heads])
    return b.finish(b.call(gnnc.sddmm, b.rowptr, b.col, x, x, "dot"))


def widened(gm, *, static=False, target=ON_CUDA, **options):
    """What the gathered rows are, and the notes."""
    examples = arguments(gm) if static else None
    gm, ctx = run_all(gm, (Assign(), Quantize()), target=target, examples=examples, **options)
    return rows_of(gm), [note.text for note in ctx.notes]


def rows_of(gm):
    """How the rows that edges gather are stored: a dtype, or int8 and the granularity of its scale."""
    op = next(n for name in GATHERS for n in gm.graph.nodes if str(n.target) == f"gnnc.{name}.default")
    if str(op.target) == "gnnc.qspmm.default":
        scale, shift = op.args[4:6]
        return "int8 row" if scale is not None else "int8 tensor" if shift is None else "int8 row_pow2"
    if str(op.target) == "gnnc.qsddmm.default":
        return "int8 row"
    x = op.args[2 if "sddmm" in str(op.target) else 3]
    return str(x.meta["val"].dtype).removeprefix("torch.")


GATHERS = ("qspmm", "spmm", "qsddmm", "sddmm")


@pytest.mark.parametrize(
    ("width", "weights", "want"),
    [
        (4, None, "float32"), (5, None, "bfloat16"), (16, None, "bfloat16"), (32, None, "bfloat16"),
        (33, None, "int8 row"), (32, "edge", "bfloat16"), (33, "edge", "int8 row"),
        (64, 8, "bfloat16"), (72, 8, "int8 row"), (32, 2, "bfloat16"), (64, 4, "int8 row"),
    ],
)  # fmt: skip
def test_rows_with_scales_of_their_own(width, weights, want):
    got, notes = widened(aggregation(width, weights=weights))
    assert got == want
    said = f"bf16, not int8: int8 makes gathering rows of {width} columns no faster here"
    assert (said in notes) == (want == "bfloat16")


@pytest.mark.parametrize(
    ("width", "weights", "want"),
    [(4, None, "float32"), (8, None, "bfloat16"), (9, None, "int8 tensor"), (32, None, "int8 tensor"),
     (33, None, "int8 row_pow2"), (32, "edge", "bfloat16"), (33, "edge", "int8 row")],
)  # fmt: skip
def test_rows_under_one_scale_of_the_examples(width, weights, want):
    assert widened(aggregation(width, weights=weights), static=True)[0] == want


def test_one_scale_that_does_not_fit_the_examples_is_not_taken():
    gm = aggregation(16)
    spread = list(arguments(gm))
    x = next(i for i, v in enumerate(spread) if v.shape == (30, 16))
    spread[x] = spread[x] * torch.logspace(-4, 2, 30)[:, None]
    got, _ = run_all(gm, (Assign(), Quantize()), target=ON_CUDA, examples=tuple(spread))
    assert rows_of(got) == "bfloat16"


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize(("static", "want"), [(False, "bfloat16"), (True, "int8 tensor")])
def test_extremes_take_quantized_values_under_one_scale_only(reduce, static, want):
    assert widened(aggregation(256, reduce=reduce), static=static)[0] == want


def test_means_have_scales_of_their_own():
    assert widened(aggregation(32, reduce="mean"), static=True)[0] == "bfloat16"
    assert widened(aggregation(40, reduce="mean"), static=True)[0] == "int8 row"


@pytest.mark.parametrize(
    ("width", "heads", "want"),
    [(4, 1, "float32"), (16, 1, "bfloat16"), (17, 1, "int8 row"), (64, 8, "bfloat16"), (64, 4, "int8 row")],
)
def test_dot_products(width, heads, want):
    assert widened(dot(width, heads))[0] == want


def test_a_named_layer_keeps_what_was_named():
    assert widened(aggregation(16), overrides={"*": INT8})[0] == "int8 row"


def test_other_precisions_have_no_rule():
    assert widened(aggregation(16), precision=Precision.parse("fp16"))[0] == "float16"
    assert widened(aggregation(16), precision=BF16)[0] == "bfloat16"


def test_a_backend_says_what_is_narrow():
    assert widened(aggregation(17), target=Target())[0] == "int8 row"
    assert widened(aggregation(16), target=Target())[0] == "float32"
    without = Target("other", frozenset({"fp32", "int8"}), narrow_rows=CUDA_NARROW_ROWS)
    assert widened(aggregation(16), target=without)[0] == "int8 row"
    wide = Target("other", narrow_rows=NarrowRows(fp32_bytes=0, scaled_columns=100))
    assert widened(aggregation(100), target=wide)[0] == "bfloat16"


def test_products_are_left_alone():
    b = Layers(8)
    gm, _ = run_all(b.finish(b.linear(b.x, 4)), (Assign(), Quantize()), target=ON_CUDA)
    assert "qgemm.default" in targets(gm)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_no_model_gets_worse_by_it(name):
    gm = MODELS[name]()
    want = gm(*arguments(gm))
    errors = {}
    for target in (Target(narrow_rows=NarrowRows(fp32_bytes=0)), ON_CUDA):
        low, _ = run_all(gm, (Assign(), Quantize()), target=target)
        errors[target.name] = relative_error(low(*arguments(low)), want)
    # The products' own rounding is most of it, and adds up by chance.
    assert errors["cuda"] <= 1.2 * errors["reference"] < 0.05
