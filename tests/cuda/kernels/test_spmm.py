import copy
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills, error, on_device
from cuda_launch import compile_kernels
from cuda_sparse import NBYTES, SPMM_SOURCE, Sparse, Spmm, SpmmConfig, form_of, rows16, sparse, weighted16
from kernel_graphs import GRAPHS, Graph, random_graph, relative_error, star
from slow import slow_but
from torch import Tensor, nn

import gnnc
from gnnc.ir.quantized import qspmm_reference
from gnnc.ir.sparse import spmm_reference
from gnnc.runtime.cuda.formats.run_table import Cut

WIDTHS = (1, 7, 16, 32, 47, 64, 128, 256, 602)
FEW_WIDTHS = (7, 16, 47, 64, 602)
BUILT_WIDTHS = (7, 16, 47, 64, 128, 602)
"""Widths of the kernels that are compiled for sm_90; those of models are in ``test_offline.py``."""
ENDS = (7, 602)
"""The narrowest and the widest of them, which are compiled for the other architectures, too."""
KINDS = {
    "fp32": SpmmConfig("f32", 0),
    "fp32 weights": SpmmConfig("f32", 0, value="real"),
    "fp32 max": SpmmConfig("f32", 0, "max"),
    "fp16": SpmmConfig("f16", 0),
    "fp16 weights": SpmmConfig("f16", 0, value="real"),
    "bf16 weights": SpmmConfig("bf16", 0, "mean", value="real"),
    "int8": SpmmConfig("i8", 0),
    "int8 weights": SpmmConfig("i8", 0, value="integer"),
    "int8 powers": SpmmConfig("i8", 0, scale="power"),
    "int8 real": SpmmConfig("i8", 0, value="real", scale="row"),
    "int8 real, one scale": SpmmConfig("i8", 0, value="real"),
    "int8 max": SpmmConfig("i8", 0, "max"),
    "int8 min, row scales": SpmmConfig("i8", 0, "min", scale="row"),
    "fp16 min": SpmmConfig("f16", 0, "min"),
    "bf16 max": SpmmConfig("bf16", 0, "max"),
    "fp8": SpmmConfig("e4m3", 0, scale="row"),
    "fp8 real": SpmmConfig("e5m2", 0, value="real", scale="row"),
    "fp8 max": SpmmConfig("e4m3", 0, "max", scale="row"),
}
IN_ROW = SpmmConfig("i8", 0, scale="in_row")
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def has_place(width: int) -> bool:
    """Whether a row of quantized values has a byte for its weight, and is gathered at once."""
    return width % 16 > 0 and width <= 128


def built_widths(architecture: str) -> tuple[int, ...]:
    """Return the widths to compile: register files are of one size, and one architecture has all widths."""
    return BUILT_WIDTHS if architecture == "sm_90" else ENDS


def skip_without_fp8(architecture: str, kind: str) -> None:
    """Skip kernels of 8-bit floats for an architecture without their conversions."""
    if kind.startswith("fp8") and architecture == "sm_80":
        pytest.skip(f"{architecture} has no 8-bit floats")


def forms_of(row_bytes: int) -> list[str]:
    """Kernels that sum rows of so many bytes: as a whole, and in slices where there are several."""
    return sorted({"spmm", form_of(row_bytes)})


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", slow_but(["fp32", "int8 powers", "fp16 weights"], list(KINDS)))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str, kind: str) -> None:
    skip_without_fp8(architecture, kind)
    widths = built_widths(architecture)
    configs = [replace(KINDS[kind], width=w) for w in widths]
    if kind == "int8 powers":
        configs += [replace(IN_ROW, width=w) for w in widths if has_place(w)]
    names = tuple(c.name(form=form) for c in configs for form in forms_of(c.width * NBYTES[c.element]))
    names += (configs[widths.index(602)].name("StoreFloats<602>", "spmm_sliced"),)
    report = compile_kernels(SPMM_SOURCE, names, architecture)
    assert len(report) == len(names)
    assert_no_spills(report)


HEADS = ((4, 16), (8, 8), (3, 7), (2, 48), (2, 301))
BUILT_HEADS = (*HEADS, (2, 16), (12, 64), (16, 24))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_sum_of_quantized_values_with_weights_a_head_spills(architecture: str) -> None:
    configs = [
        SpmmConfig("i8", heads * each, reduce, "real", scale, heads)
        for heads, each in (BUILT_HEADS if architecture == "sm_90" else ((3, 7), (2, 301), (12, 64)))
        for reduce, scale in (("mean", "row"), ("sum", "none"))
    ]
    report = compile_kernels(SPMM_SOURCE, tuple(config.name() for config in configs), architecture)
    assert len(report) == len(configs)
    assert_no_spills(report)


STAGED = {
    "int8": SpmmConfig("i8", 0),
    "int8 powers": SpmmConfig("i8", 0, "mean", scale="power"),
    "int8 row scales": SpmmConfig("i8", 0, scale="row"),
    "fp16": SpmmConfig("f16", 0),
    "bf16 mean": SpmmConfig("bf16", 0, "mean"),
    "fp32": SpmmConfig("f32", 0),
    "fp8": SpmmConfig("e4m3", 0, scale="row"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", slow_but(["int8 powers"], list(STAGED)))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_staged_kernel_spills(architecture: str, kind: str) -> None:
    skip_without_fp8(architecture, kind)
    widths = built_widths(architecture)
    configs = [replace(STAGED[kind], width=w) for w in widths]
    if kind == "int8 powers":
        configs += [replace(IN_ROW, reduce="mean", width=w) for w in widths if has_place(w)]
    names = tuple(config.name(form="spmm_staged") for config in configs)
    names += (replace(STAGED[kind], width=602).name("StoreFloats<602>", "spmm_staged"),)
    report = compile_kernels(SPMM_SOURCE, names, architecture)
    assert len(report) == len(names)
    assert_no_spills(report)


def on_gpu(g: Graph, part: int = 32, blocks: int = 5) -> Sparse:
    return sparse(g.rowptr, g.col, Cut(part, part // 2), blocks)


def random_int8(rows: int, width: int) -> Tensor:
    return torch.randint(-127, 128, (rows, width), dtype=torch.int8)


def twice(call: Spmm) -> Tensor:
    """The result, after checking that every element is written and that two runs give the same bits."""
    first = call().clone()
    call.out.fill_(12345.0)
    assert torch.equal(first.nan_to_num(7.0), call().nan_to_num(7.0))
    return first.cpu()


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("width", WIDTHS)
def test_integer_reductions_are_exact(width: int, reduce: str) -> None:
    for make in GRAPHS.values():
        g = make()
        x = random_int8(g.num_src, width)
        want = qspmm_reference(g.rowptr, g.col, None, x, None, None, reduce, g.num_dst)
        for form in forms_of(width):
            assert torch.equal(twice(Spmm(on_gpu(g), rows16(x), reduce=reduce, form=form)), want)


@pytest.mark.cuda
def test_a_row_may_have_more_slices_than_threads_open_queues() -> None:
    g, width = random_graph(6, 5, 30), 130 * 128 - 7
    x = random_int8(g.num_src, width)
    want = qspmm_reference(g.rowptr, g.col, None, x, None, None, "sum", g.num_dst)
    assert torch.equal(twice(Spmm(on_gpu(g), rows16(x), form="spmm_sliced")), want)


@pytest.mark.cuda
@pytest.mark.parametrize("width", FEW_WIDTHS)
def test_integer_weights_are_exact(width: int) -> None:
    for make in GRAPHS.values():
        g = make()
        x, value = random_int8(g.num_src, width), random_int8(g.num_edges, 1).squeeze(1)
        shift = torch.randint(0, 8, (g.num_src,), dtype=torch.uint8)
        graph = on_gpu(g)
        want = qspmm_reference(g.rowptr, g.col, value, x, None, None, "sum", g.num_dst)
        for form in forms_of(width):
            assert torch.equal(twice(Spmm(graph, rows16(x), value=value.cuda(), form=form)), want)
        want = qspmm_reference(g.rowptr, g.col, None, x, None, shift, "sum", g.num_dst)
        for form in forms_of(width):
            assert torch.equal(twice(Spmm(graph, rows16(x), shift=shift.cuda(), form=form)), want)
        if has_place(width):
            assert torch.equal(twice(Spmm(graph, weighted16(x, shift), in_row=True)), want)


def test_error(
    got: Tensor,
    g: Graph,
    value: Tensor | None,
    x: Tensor,
    x_scale: Tensor | None,
    reduce: str = "sum",
) -> float:
    """RMS error over the RMS of the sums (or means) of magnitudes, in float64."""
    x = x.double() if x_scale is None else x.double() * x_scale.double().view(-1, *[1] * (x.dim() - 1))
    value = None if value is None else value.double()
    want = spmm_reference(g.rowptr, g.col, value, x, reduce, g.num_dst)
    size = spmm_reference(g.rowptr, g.col, None if value is None else value.abs(), x.abs(), reduce, g.num_dst)
    return relative_error(got, want.flatten(1), size.flatten(1))


test_error.__test__ = False


@pytest.mark.cuda
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("width", FEW_WIDTHS)
def test_float_sums(width: int, kind: str, weighted: bool) -> None:
    for make in GRAPHS.values():
        g = make()
        x = torch.randn(g.num_src, width).to(TORCH[kind])
        value = torch.randn(g.num_edges) * torch.logspace(-6, 3, g.num_edges) if weighted else None
        for form in forms_of(width * x.element_size()):
            call = Spmm(on_gpu(g), rows16(x), value=None if value is None else value.cuda(), form=form)
            assert test_error(twice(call), g, value, x, None) < (1e-5 if kind == "bf16" else 1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [*FEW_WIDTHS, 128])
def test_integer_rows_with_real_weights(width: int) -> None:
    for make in GRAPHS.values():
        g = make()
        x, value = random_int8(g.num_src, width), torch.randn(g.num_edges)
        scale = torch.rand(g.num_src) * torch.logspace(-2, 2, g.num_src)
        graph = on_gpu(g)
        for form in forms_of(width):
            call = Spmm(graph, rows16(x), value=value.cuda(), x_scale=scale.cuda(), form=form)
            assert test_error(twice(call), g, value, x, scale) < 1e-4
            call = Spmm(graph, rows16(x), value=value.cuda(), form=form)
            assert test_error(twice(call), g, value, x, None) < 1e-4
            call = Spmm(graph, rows16(x), x_scale=scale.cuda(), form=form)
            assert test_error(twice(call), g, None, x, scale) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize(("width", "heads"), [(256, 1), (512, 1), (640, 1), (512, 2), (280, 8)])
def test_real_weights_of_a_long_part_stay_in_range(width: int, heads: int) -> None:
    """Rows of 257 columns and more take a whole warp: one slot has all edges of a part."""
    edges = 2048
    g = random_graph(3, 1, edges)
    x = torch.full((3, width), 127, dtype=torch.int8)
    value = torch.full((edges, heads) if heads > 1 else (edges,), 0.999)
    got = twice(Spmm(on_gpu(g, part=edges), rows16(x), value.cuda(), form="spmm"))
    want = torch.full((1, width), 0.999 * 127 * edges)
    assert relative_error(got, want) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [47, 128])
def test_real_weights_in_steps_of_four(width: int, scaled: bool) -> None:
    """As devices before sm_90 take them."""
    g = random_graph(60, 50, 900)
    x, value, scale = random_int8(60, width), torch.randn(900), torch.rand(60) if scaled else None
    scales = None if scale is None else scale.cuda()
    call = Spmm(on_gpu(g), rows16(x), value.cuda(), scales, form="spmm", threads=512, step=4)
    assert test_error(twice(call), g, value, x, scale) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("width", [16, 64])
def test_the_first_weights_of_a_row_may_be_of_any_size(width: int) -> None:
    """The unit of a row's sums follows its largest weight: nothing of the first ones is taken for more."""
    g = GRAPHS["random"]()
    x = random_int8(g.num_src, width)
    sizes = torch.tensor([0.0, 1e-42, 1e-36, 1e-33, 1e-20, 1.0])
    for which in (sizes[torch.randint(6, (g.num_edges,))], sizes[:5][torch.arange(g.num_edges) % 5]):
        value = which * (1 + torch.rand(g.num_edges))
        got = twice(Spmm(on_gpu(g), rows16(x), value=value.cuda(), form="spmm"))
        assert test_error(got, g, value, x, None) < 1e-4


def error_of_a_head(
    got: Tensor, g: Graph, value: Tensor, x: Tensor, x_scale: Tensor | None, reduce: str = "sum"
) -> float:
    """The largest, over the heads, of their errors."""
    heads = value.shape[1]
    got, x = got.view(len(got), heads, -1), x.view(len(x), heads, -1)
    each = (test_error(got[:, h], g, value[:, h], x[:, h], x_scale, reduce) for h in range(heads))
    return max(each)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (3, 7), (8, 8), (2, 301)])
def test_weights_a_head(heads: int, each: int, dtype: torch.dtype) -> None:
    g = GRAPHS["random"]()
    x, value = torch.randn(g.num_src, heads * each).to(dtype), torch.randn(g.num_edges, heads)
    got = twice(Spmm(on_gpu(g), rows16(x), value=value.cuda()))
    assert error_of_a_head(got, g, value, x, None) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize(("reduce", "scaled"), [("sum", True), ("sum", False), ("mean", True)])
@pytest.mark.parametrize(("heads", "each"), HEADS)
def test_integer_rows_with_weights_a_head(heads: int, each: int, reduce: str, scaled: bool) -> None:
    """Each head has units of its own: that of small weights errs by no more of them than any other."""
    for make in GRAPHS.values():
        g = make()
        x = random_int8(g.num_src, heads * each)
        value = torch.randn(g.num_edges, heads) * torch.logspace(-6, 3, heads)
        scale = torch.rand(g.num_src) * torch.logspace(-2, 2, g.num_src) if scaled else None
        given = None if scale is None else scale.cuda()
        call = Spmm(on_gpu(g), rows16(x), value=value.cuda(), x_scale=given, reduce=reduce)
        assert error_of_a_head(twice(call), g, value, x, scale, reduce) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_of_integer_rows_with_weights_a_head(reduce: str) -> None:
    g = GRAPHS["random"]()
    x, value = random_int8(g.num_src, 21), torch.randn(g.num_edges, 3)
    got = twice(Spmm(on_gpu(g), rows16(x), value=value.cuda(), reduce=reduce))
    want = spmm_reference(g.rowptr, g.col, value, x.float().view(-1, 3, 7), reduce, g.num_dst)
    assert torch.allclose(got, want.flatten(1), rtol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("width", FEW_WIDTHS)
def test_float_reductions(width: int, kind: str, reduce: str) -> None:
    for make in GRAPHS.values():
        g = make()
        x, value = torch.randn(g.num_src, width).to(TORCH[kind]), torch.randn(g.num_edges)
        for given in (None, value):
            want = spmm_reference(g.rowptr, g.col, given, x.float(), reduce, g.num_dst)
            for form in forms_of(width * x.element_size()):
                moved = None if given is None else given.cuda()
                call = Spmm(on_gpu(g), rows16(x), moved, reduce=reduce, form=form)
                assert torch.allclose(twice(call), want, rtol=1e-5, atol=1e-5)


LARGER = {**GRAPHS, "node blocks": lambda: random_graph(5000, 4500, 90_000)}
"""With sources in windows that are not full, and destinations in several node blocks."""


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("width", [7, 16, 32, 33, 47, 64, 100, 128, 256, 602])
def test_staged_sums_of_integers_are_exact(width: int, reduce: str) -> None:
    for make in LARGER.values():
        g = make()
        x, shift = random_int8(g.num_src, width), torch.randint(0, 8, (g.num_src,), dtype=torch.uint8)
        for given in (None, shift):
            moved = None if given is None else given.cuda()
            got = twice(Spmm(on_gpu(g), rows16(x), shift=moved, reduce=reduce, form="spmm_staged"))
            want = qspmm_reference(g.rowptr, g.col, None, x, None, given, reduce, g.num_dst)
            assert torch.equal(got, want)
        if has_place(width):
            got = twice(Spmm(on_gpu(g), weighted16(x, shift), in_row=True, reduce=reduce, form="spmm_staged"))
            assert torch.equal(got, want)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [16, 31, 33, 47, 64, 128, 602])
def test_staged_sums_with_row_scales(width: int) -> None:
    for make in LARGER.values():
        g = make()
        x, scale = random_int8(g.num_src, width), torch.rand(g.num_src) * torch.logspace(-2, 2, g.num_src)
        call = Spmm(on_gpu(g), rows16(x), x_scale=scale.cuda(), form="spmm_staged")
        assert test_error(twice(call), g, None, x, scale) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *[("fp32", 3), ("fp32", 8), ("fp32", 9), ("fp32", 17), ("fp32", 64), ("fp32", 128), ("fp32", 602)],
        *[("fp16", 7), ("fp16", 16), ("fp16", 31), ("fp16", 47), ("fp16", 64), ("fp16", 602)],
        *[("bf16", 13), ("bf16", 65), ("bf16", 256)],
    ],
)
def test_staged_sums_of_floats(kind: str, width: int, reduce: str) -> None:
    for make in LARGER.values():
        g = make()
        x = torch.randn(g.num_src, width).to(TORCH[kind])
        got = twice(Spmm(on_gpu(g), rows16(x), reduce=reduce, form="spmm_staged"))
        want = spmm_reference(g.rowptr, g.col, None, x.double(), reduce, g.num_dst)
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.cuda
def test_a_staged_hub() -> None:
    g, x = star(300_000, 3000), torch.full((3000, 64), 127, dtype=torch.int8)
    got = twice(Spmm(on_gpu(g, 2048), rows16(x), form="spmm_staged"))
    assert torch.equal(got, qspmm_reference(g.rowptr, g.col, None, x, None, None, "sum", g.num_dst))
    half = (100 + torch.rand(3000, 64)).half()
    got = twice(Spmm(on_gpu(g, 1024), rows16(half), form="spmm_staged"))
    want = spmm_reference(g.rowptr, g.col, None, half.double(), "sum", g.num_dst)
    assert torch.isfinite(got).all() and relative_error(got, want) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_hub_of_a_million_edges_does_not_overflow(kind: str) -> None:
    g = star(1_000_000)
    x = (100 + torch.rand(g.num_src, 64)).to(TORCH[kind])
    got = twice(Spmm(on_gpu(g, 1024), rows16(x)))
    want = spmm_reference(g.rowptr, g.col, None, x.double(), "sum", g.num_dst)
    assert torch.isfinite(got).all() and relative_error(got, want) < 1e-5


@pytest.mark.cuda
def test_integers_of_a_hub_pass_32_bits() -> None:
    g = star(300_000)
    x, value = (
        torch.full((g.num_src, 64), 127, dtype=torch.int8),
        torch.full((300_000,), 127, dtype=torch.int8),
    )
    got = twice(Spmm(on_gpu(g, 2048), rows16(x), value=value.cuda()))
    want = qspmm_reference(g.rowptr, g.col, value, x, None, None, "sum", g.num_dst)
    assert torch.equal(got, want) and want.max() > 2**31


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_that_are_not_finite_show_in_their_rows_only(dtype: torch.dtype) -> None:
    g = random_graph(50, 40, 900)
    x = torch.randn(50, 64)
    x[::7, 5], x[3, 17] = float("inf"), float("nan")
    got = twice(Spmm(on_gpu(g), rows16(x.to(dtype))))
    want = spmm_reference(g.rowptr, g.col, None, x.to(dtype).float(), "sum", g.num_dst)
    bad = ~want.isfinite()
    assert bad.any() and not got[bad].isfinite().any()
    assert got[~bad.any(1)].isfinite().all() and got[:, 32:].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extremes_that_are_not_finite_show_where_they_are(dtype: torch.dtype, reduce: str) -> None:
    g = random_graph(50, 40, 900)
    x = torch.randn(50, 47)
    x[::7, 5], x[1::7, 6], x[3, 17] = float("inf"), -float("inf"), float("nan")
    got = twice(Spmm(on_gpu(g), rows16(x.to(dtype)), reduce=reduce))
    want = spmm_reference(g.rowptr, g.col, None, x.to(dtype).float(), reduce, g.num_dst)
    assert want.isnan().any() and want.isinf().any()
    assert torch.equal(got.nan_to_num(12345.0), want.nan_to_num(12345.0))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, scaled", [(torch.float16, False), (torch.int8, False), (torch.int8, True)])
def test_a_weight_that_is_not_finite_shows(dtype: torch.dtype, scaled: bool) -> None:
    g = random_graph(50, 40, 900)
    value = torch.rand(900)
    value[100] = float("nan")
    x = torch.randint(1, 9, (50, 64)).to(dtype)
    scale = torch.ones(50).cuda() if scaled else None
    got = twice(Spmm(on_gpu(g), rows16(x), value=value.cuda(), x_scale=scale))
    hit = int(g.dst()[100])
    assert got[hit].isnan().all() and got[:hit].isfinite().all() and got[hit + 1 :].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (3, 7)])
def test_a_weight_that_is_not_finite_shows_in_its_head(heads: int, each: int, bad: float) -> None:
    g = random_graph(50, 40, 900)
    value = torch.rand(900, heads)
    value[100, 1] = bad
    x = torch.randint(1, 9, (50, heads * each)).to(torch.int8)
    got = twice(Spmm(on_gpu(g), rows16(x), value=value.cuda())).view(-1, heads, each)
    hit = torch.zeros_like(got, dtype=torch.bool)
    hit[g.dst()[100], 1] = True
    assert got[hit].isnan().all() and got[~hit].isfinite().all()


class WeighedHeads(nn.Module):
    """A sum over neighbors with a weight an edge and head."""

    def __init__(self, heads: int, each: int) -> None:
        super().__init__()
        self.shape, self.lin = (-1, heads, each), nn.Linear(24, heads * each)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        """Return one row a node."""
        h = self.lin(x).view(self.shape)
        messages = h[edge_index[0]] * weight[:, :, None]
        return torch.zeros_like(h).index_add(0, edge_index[1], messages).flatten(1)


def given(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(60, 24), torch.randint(50, (2, 400)), torch.randn(400, heads)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (3, 12)])
def test_programs_with_weights_a_head(heads: int, each: int) -> None:
    """Rows whose heads do not begin on 16 bytes are copied to where they do."""
    model, args = WeighedHeads(heads, each).eval(), given(heads)
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), "int8")
    got = compiled(*on_device(args))
    assert "qspmm" in str(compiled) and "spmm" in [
        name for _, name in compiled._dispatch.last.executable.kernels
    ]
    assert error(got, model(*args)) < 0.03


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_rows_that_do_not_fit_into_shared_memory_are_left_to_others(precision: str) -> None:
    """Where heads have weights of their own a warp holds a row of 4 * 640 columns, and none of more."""
    for each, fits in ((640, True), (648, False)):
        compiled = gnnc.compile(WeighedHeads(4, each).eval(), precision, backend="cuda-offline:sm_90")
        with pytest.raises(gnnc.BackendError, match="not here"):
            compiled(*given(4))
        assert ("spmm" in [name for _, name in compiled._dispatch.last.executable.kernels]) == fits
