"""Rows of many parts: sums of sums, in the same order in every call, and counters that begin at 0 again."""

import pytest
import torch
from cuda_launch import Module, address
from cuda_sparse import Attention, Sparse, Spmm, rows16, sparse, staging_for
from kernel_graphs import Graph, relative_error
from torch import Tensor

from gnnc.ir.quantized import qspmm_reference
from gnnc.ir.sparse import edge_softmax_reference, spmm_reference
from gnnc.runtime.cuda.formats.run_table import Cut

pytestmark = pytest.mark.cuda

TIMES = 20 if torch.cuda.is_available() else 2
PARTS = (2, 15, 16, 17, 31, 33, 255, 256, 257, 258, 272)
"""Of rows; up to 16 are joined at once, and up to 16 such sums."""
_EDGES = 32  # of a part


@pytest.fixture(scope="module")
def hubs() -> Graph:
    rows = [(_EDGES * parts, 3, _EDGES * parts - 5, 0) for parts in PARTS]
    degree = torch.tensor(rows).flatten()
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    return Graph(rowptr, torch.randint(0, 900, (int(degree.sum()),), dtype=torch.int32), 900, len(degree))


def on_gpu(g: Graph) -> Sparse:
    graph = sparse(g.rowptr, g.col, Cut(_EDGES, 16), 7)
    most = int(g.rowptr.diff().max())
    assert int(graph.table.split[:, 2].max()) == most // _EDGES
    return graph


def again_and_again(call: Spmm | Attention) -> Tensor:
    """The result, the same in every call."""
    first = call().clone()
    for _ in range(TIMES - 1):
        call.out.fill_(99)
        assert torch.equal(first, call())
        assert not call.arrived.any()
    return first.cpu()


@pytest.mark.parametrize("form", ["spmm", "spmm_staged"])
@pytest.mark.parametrize("width", [7, 64, 128, 512])
def test_integers(hubs: Graph, width: int, form: str) -> None:
    x = torch.randint(-127, 128, (900, width), dtype=torch.int8)
    got = again_and_again(Spmm(on_gpu(hubs), rows16(x), form=form))
    want = qspmm_reference(hubs.rowptr, hubs.col, None, x, None, None, "sum", hubs.num_dst)
    assert torch.equal(got, want)


@pytest.mark.parametrize("width", [602, 1433])
def test_integers_of_several_passes_are_64_bits_wide(width: int) -> None:
    edges = 4200 * _EDGES
    hub = Graph(torch.tensor([0, edges]), torch.zeros(edges, dtype=torch.int32), 1, 1)
    x = torch.full((1, width), -127, dtype=torch.int8)
    value = torch.full((edges,), 127, dtype=torch.int8)
    want = qspmm_reference(hub.rowptr, hub.col, value, x, None, None, "sum", 1)
    for form in ("spmm", "spmm_sliced"):
        got = again_and_again(Spmm(on_gpu(hub), rows16(x), value=value.cuda(), form=form))
        assert torch.equal(got, want) and want.min() < -(2**31)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 41), (torch.float32, 602), (torch.float16, 64)])
def test_floats(hubs: Graph, dtype: torch.dtype, width: int, reduce: str) -> None:
    x = torch.randn(900, width).to(dtype)
    got = again_and_again(Spmm(on_gpu(hubs), rows16(x), reduce=reduce, form="spmm"))
    want = spmm_reference(hubs.rowptr, hubs.col, None, x.double(), reduce, hubs.num_dst)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("form", ["spmm_sliced", "spmm_staged"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 65), (torch.float32, 128), (torch.half, 602)])
def test_parts_are_joined_slice_by_slice(hubs: Graph, dtype: torch.dtype, width: int, form: str) -> None:
    x = torch.randn(900, width).to(dtype)
    got = again_and_again(Spmm(on_gpu(hubs), rows16(x), form=form))
    want = spmm_reference(hubs.rowptr, hubs.col, None, x.double(), "sum", hubs.num_dst)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize(("heads", "each"), [(4, 16), (2, 48), (2, 301), (3, 7)])
def test_integers_with_weights_a_head(hubs: Graph, heads: int, each: int) -> None:
    x = torch.randint(-127, 128, (900, heads * each), dtype=torch.int8)
    value = torch.rand(hubs.num_edges, heads)
    got = again_and_again(Spmm(on_gpu(hubs), rows16(x), value=value.cuda()))
    weight, per_head = value.double(), x.double().view(900, heads, each)
    want = spmm_reference(hubs.rowptr, hubs.col, weight, per_head, "sum", hubs.num_dst)
    size = spmm_reference(hubs.rowptr, hubs.col, weight, per_head.abs(), "sum", hubs.num_dst)
    assert relative_error(got, want.flatten(1), size.flatten(1)) < 1e-5


@pytest.mark.parametrize(("heads", "each"), [(4, 16), (1, 40), (2, 301), (3, 7)])
def test_attention(hubs: Graph, heads: int, each: int) -> None:
    x, a_src = torch.randn(900, heads * each), torch.randn(900, heads) * 20
    a_dst = torch.randn(hubs.num_dst, heads)
    call = Attention(on_gpu(hubs), rows16(x) if heads == 1 else x.cuda(), heads, a_src.cuda(), a_dst.cuda())
    got = again_and_again(call)
    logits = a_src.double()[hubs.col] + a_dst.double()[hubs.dst()]
    alpha = edge_softmax_reference(hubs.rowptr, torch.nn.functional.leaky_relu(logits, 0.2))
    per_head = x.double().view(900, heads, each)
    want = spmm_reference(hubs.rowptr, hubs.col, alpha, per_head, "sum", hubs.num_dst).flatten(1)
    assert relative_error(got, want) < 1e-5
    assert relative_error(call.alpha().cpu(), alpha) < 1e-5


BODY = """
#include "sparse/edge.cuh"
struct Body {
  static constexpr int kProducts = 0;
  const float* x;
  __device__ void operator()(int64_t, int64_t source, int64_t, const float*, int column, float* v) const {
    v[0] = x[source * %d + column];
  }
};
"""


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize(("width", "lanes"), [(1, 1), (5, 8), (40, 32)])
def test_messages(hubs: Graph, width: int, lanes: int, reduce: str) -> None:
    graph, x = on_gpu(hubs), torch.randn(900, width)
    name = f"gnnc::message<{width}, {width}, {lanes}, gnnc::Reductions<gnnc::Join::{reduce}>, Body>"
    module = Module(BODY % width, (name,))
    out = torch.empty(hubs.num_dst, width, device="cuda")
    memory, arrived = staging_for(graph.runs.slots, width)
    on_device = x.cuda()
    given = [address(memory), address(arrived), address(out), graph.runs.count, address(on_device)]
    results = []
    for _ in range(TIMES):
        module.launch(name, -(-graph.runs.count * lanes // 256), 256, *graph.values(), *given)
        results.append(out.clone())
        assert not arrived.any()
    want = spmm_reference(hubs.rowptr, hubs.col, None, x.double(), reduce, hubs.num_dst)
    assert relative_error(results[0].cpu(), want) < 1e-5
    assert all(torch.equal(results[0], each) for each in results)
