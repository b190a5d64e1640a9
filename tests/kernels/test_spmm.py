"""spmm against gathers and sums in PyTorch: integers bit for bit, floats against float64."""

import pytest
import torch
from kernel_graphs import (
    GRAPHS,
    WIDTHS,
    Graph,
    ops,
    padded_int8,
    random_graph,
    random_int8,
    relative_error,
    segment_sum,
    spmm,
    star,
    sum_error,
)
from torch import Tensor

SUM, MEAN, MAX, MIN = range(4)
FLOAT_ERROR = 1e-6
FIXED_ERROR = 1.5e-5  # positive weights of int8 rows are 16-bit integers


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> Graph:
    return GRAPHS[request.param]()


def gathered(g: Graph, x: Tensor) -> Tensor:
    return x[g.col.long()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight", ["none", "shift", "value"])
def test_integer_sums_are_exact(graph: Graph, width: int, weight: str) -> None:
    q = random_int8(graph.num_src, width)
    messages = gathered(graph, q.long())
    if weight == "shift":
        shift = torch.randint(8, (graph.num_src,), dtype=torch.uint8)
        got = spmm(graph, q, shift=shift)
        messages = messages << (7 - gathered(graph, shift.long()))[:, None]
    elif weight == "value":
        value = torch.randint(-127, 128, (graph.num_edges,), dtype=torch.int8)
        got = spmm(graph, q, value)
        messages = messages * value.long()[:, None]
    else:
        got = spmm(graph, q)
    assert torch.equal(got, segment_sum(graph, messages).float())


@pytest.mark.parametrize("num_edges", [65535, 65536, 65537, 131073, 300_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_hub_is_exact(num_edges: int, sign: int) -> None:
    g = star(num_edges)
    q = padded_int8(torch.full((g.num_src, 70), 127, dtype=torch.int8))
    value = torch.full((num_edges,), 127 * sign, dtype=torch.int8)
    for got, want in (
        (spmm(g, q, value), 127 * 127 * sign * num_edges),
        (spmm(g, q), 127 * num_edges),
        (spmm(g, q, shift=torch.zeros(g.num_src, dtype=torch.uint8)), 127 * 128 * num_edges),
    ):
        assert (got[2] == torch.tensor(want).float()).all()
        assert (got[[0, 1, 3, 4]] == 0).all()


def test_hub_of_any_values_is_exact() -> None:
    g = star(200_001)
    q, value = random_int8(g.num_src, 100), torch.randint(-127, 128, (200_001,), dtype=torch.int8)
    want = segment_sum(g, gathered(g, q.long()) * value.long()[:, None])
    assert torch.equal(spmm(g, q, value), want.float())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("weighted", ["no", "positive", "any"])
def test_float_sums(graph: Graph, width: int, dtype: torch.dtype, weighted: str) -> None:
    value = None if weighted == "no" else torch.randn(graph.num_edges)
    if value is not None and weighted == "positive":
        value = value.abs()
    x = (
        random_int8(graph.num_src, width)
        if dtype == torch.int8
        else torch.randn(graph.num_src, width).to(dtype)
    )
    x_scale = torch.rand(graph.num_src) if dtype == torch.int8 else None
    messages = gathered(graph, x.double())
    if value is not None:
        messages *= value.double()[:, None]
    if x_scale is not None:
        messages *= gathered(graph, x_scale.double())[:, None]
    got = spmm(graph, x, value, x_scale)
    assert sum_error(got, graph, messages) < (FIXED_ERROR if dtype == torch.int8 else FLOAT_ERROR)


@pytest.mark.parametrize("heads", [1, 4, 8, 20])
@pytest.mark.parametrize("head_width", [1, 7, 16, 47])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_heads(heads: int, head_width: int, dtype: torch.dtype) -> None:
    g = random_graph(90, 80, 2000)
    width = heads * head_width
    x = random_int8(90, width) if dtype == torch.int8 else torch.randn(90, width).to(dtype)
    x_scale = torch.rand(90) if dtype == torch.int8 else None
    value = torch.randn(g.num_edges, heads)
    messages = gathered(g, x.double()).view(-1, heads, head_width) * value.double()[:, :, None]
    if x_scale is not None:
        messages *= gathered(g, x_scale.double())[:, None, None]
    got = spmm(g, x, value, x_scale, heads=heads)
    assert sum_error(got, g, messages.flatten(1)) < FLOAT_ERROR


def test_float_values_of_shifted_rows() -> None:
    g = random_graph(90, 80, 2000)
    q, value = random_int8(90, 47), torch.randn(2000)
    shift = torch.randint(8, (90,), dtype=torch.uint8)
    scale = value.double() * (128 >> gathered(g, shift.long()))
    got = spmm(g, q, value, shift=shift)
    assert sum_error(got, g, gathered(g, q.double()) * scale[:, None]) < FLOAT_ERROR


@pytest.mark.parametrize("width", [1, 47, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("reduce", [MAX, MIN])
@pytest.mark.parametrize("weighted", [False, True])
def test_extremes(graph: Graph, width: int, dtype: torch.dtype, reduce: int, weighted: bool) -> None:
    x = (
        random_int8(graph.num_src, width)
        if dtype == torch.int8
        else torch.randn(graph.num_src, width).to(dtype)
    )
    value = torch.randn(graph.num_edges) if weighted else None
    messages = gathered(graph, x.float())
    if value is not None:
        messages = messages * value[:, None]
    want = torch.zeros(graph.num_dst, width)
    index = graph.dst()[:, None].expand_as(messages)
    want.scatter_reduce_(0, index, messages, "amax" if reduce == MAX else "amin", include_self=False)
    assert torch.equal(spmm(graph, x, value, reduce=reduce), want)


@pytest.mark.parametrize("num_edges", [512, 513, 5000])
def test_extremes_of_a_hub(num_edges: int) -> None:
    g, x = star(num_edges), random_int8(50, 70)
    assert torch.equal(spmm(g, x, reduce=MAX)[2], gathered(g, x).amax(0).float())
    assert torch.equal(spmm(g, x, reduce=MIN)[2], gathered(g, x).amin(0).float())


@pytest.mark.parametrize("reduce", [MAX, MIN])
def test_extremes_keep_nan(reduce: int) -> None:
    g, x = star(1000), torch.randn(50, 20)
    x[g.col[3].long(), 5] = float("nan")
    out = torch.empty(5, 20)
    ops().spmm(g.rowptr, g.col, None, x, None, None, reduce, 1, [60, 0, 0, 0], [], [], [out])
    assert out[2].isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("width", [7, 64])
def test_mean(graph: Graph, width: int) -> None:
    q = random_int8(graph.num_src, width)
    count = graph.rowptr.diff().clamp(min=1).float()[:, None]
    assert torch.equal(
        spmm(graph, q, reduce=MEAN), segment_sum(graph, gathered(graph, q.long())).float() / count
    )
    x = torch.randn(graph.num_src, width)
    got = spmm(graph, x, reduce=MEAN)
    assert sum_error(got * count, graph, gathered(graph, x.double())) < FLOAT_ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("reduce", [SUM, MEAN, MAX])
def test_rows_in_order(dtype: torch.dtype, reduce: int) -> None:
    g = star(1500)._replace(col=torch.arange(1500, dtype=torch.int32), num_src=1500)
    x = random_int8(1500, 47) if dtype == torch.int8 else torch.randn(1500, 47).to(dtype)
    assert torch.equal(spmm(g, x, reduce=reduce, col=False), spmm(g, x, reduce=reduce))


def test_rows_in_order_take_scales_and_shifts() -> None:
    g = star(1500)._replace(col=torch.arange(1500, dtype=torch.int32), num_src=1500)
    q, scale = random_int8(1500, 47), torch.rand(1500)
    shift = torch.randint(8, (1500,), dtype=torch.uint8)
    assert torch.equal(spmm(g, q, x_scale=scale, col=False), spmm(g, q, x_scale=scale))
    assert torch.equal(spmm(g, q, shift=shift, col=False), spmm(g, q, shift=shift))


def test_rows_apart() -> None:
    g = random_graph(90, 80, 2000)
    wide = torch.randn(90, 100)
    assert torch.equal(spmm(g, wide[:, 3:50]), spmm(g, wide[:, 3:50].contiguous()))


def test_refusals() -> None:
    g = random_graph(9, 8, 20)
    q, x = random_int8(9, 16), torch.randn(9, 16)
    with pytest.raises(RuntimeError, match="belong to an int8 x"):
        spmm(g, x, x_scale=torch.ones(9))
    with pytest.raises(RuntimeError, match="not both"):
        spmm(g, q, x_scale=torch.ones(9), shift=torch.ones(9, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="value must have 20 elements, but has 19"):
        spmm(g, x, torch.ones(19))
    with pytest.raises(RuntimeError, match="x_scale must have 9 elements"):
        spmm(g, q, x_scale=torch.ones(8))
    with pytest.raises(RuntimeError, match="padded to 64 bytes"):
        spmm(g, torch.zeros(9, 16, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="must be float32, bfloat16 or int8"):
        spmm(g, x.double())
    with pytest.raises(RuntimeError, match="3 heads do not divide"):
        spmm(g, x, heads=3)
    with pytest.raises(RuntimeError, match="no rows"):
        spmm(g._replace(num_src=0), x[:0])
    with pytest.raises(RuntimeError, match="rowptr ends at 20, but x has 9 rows"):
        spmm(g, x, col=False)
    with pytest.raises(RuntimeError, match="value has 2 heads, but heads is 4"):
        spmm(g, x, torch.ones(20, 2), heads=4)


def test_the_row_program_sees_every_row(graph: Graph) -> None:
    """Bias, ReLU, store, then a row sum through the same accumulator."""
    x, bias, ones = torch.randn(graph.num_src, 47), torch.randn(47), torch.ones(47)
    out, dot = torch.full((graph.num_dst, 47), float("nan")), torch.full((graph.num_dst, 1), float("nan"))
    program = [4, 0, 0, 0, 20, 0, 0, 0, 60, 0, 0, 0, 66, 1, 1, 1]
    arguments = (program, [bias, ones], [], [out, dot])
    ops().spmm(graph.rowptr, graph.col, None, x, None, None, SUM, 1, *arguments)
    assert torch.equal(out, (spmm(graph, x) + bias).relu())
    assert relative_error(dot[:, 0], out.double().sum(1)) < FLOAT_ERROR
