import copy
import math

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills, on_device
from cuda_launch import compile_kernels
from cuda_sparse import Attention, AttentionConfig, rows16, sparse
from kernel_graphs import GRAPHS, Graph, relative_error, star
from torch import Tensor, nn
from torch_geometric.utils import softmax

import gnnc
from gnnc.ir.sparse import edge_softmax_reference, spmm_reference
from gnnc.runtime.cuda.formats.run_table import Cut

CONFIGS = (
    AttentionConfig("f32", 64, 4, True, False),
    AttentionConfig("f16", 64, 4, True, True),
    AttentionConfig("i8", 64, 4, True, False),
    AttentionConfig("i8", 40, 1, True, False),
    AttentionConfig("f32", 602, 1, False, True),
    AttentionConfig("i8", 28, 4, True, False),
)


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str, config: AttentionConfig) -> None:
    report = compile_kernels(config.source(), config.names(), architecture)
    assert len(report) == 2
    assert_no_spills(report)


def expected(
    g: Graph, x: Tensor, heads: int, a_src: Tensor, a_dst: Tensor, edge: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = a_src.double()[g.col] + a_dst.double()[g.dst()]
    logits = torch.nn.functional.leaky_relu(logits if edge is None else logits + edge.double(), 0.2)
    alpha = edge_softmax_reference(g.rowptr, logits)
    x = x.double().view(x.shape[0], heads, -1)
    return alpha, spmm_reference(g.rowptr, g.col, alpha, x, "sum", g.num_dst).flatten(1)


def attention_on(
    g: Graph, x: Tensor, heads: int, a_src: Tensor, a_dst: Tensor, edge: Tensor | None, scale: Tensor | None
) -> Attention:
    return Attention(
        sparse(g.rowptr, g.col, Cut(32, 16), 5),
        rows16(x) if heads == 1 else x.cuda(),
        heads,
        a_src.cuda(),
        a_dst.cuda(),
        None if edge is None else edge.cuda(),
        None if scale is None else scale.cuda(),
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (1, 40), (1, 7), (1, 602), (2, 64), (4, 7), (3, 47)])
@pytest.mark.parametrize("large", [1.0, 300.0])
@pytest.mark.parametrize("graph", GRAPHS)
def test_attention(graph: str, heads: int, each: int, dtype: torch.dtype, large: float) -> None:
    g = GRAPHS[graph]()
    a_src, a_dst = torch.randn(g.num_src, heads) * large, torch.randn(g.num_dst, heads)
    edge = torch.randn(g.num_edges, heads)
    scale = None
    if dtype == torch.int8:
        x = torch.randint(-127, 128, (g.num_src, heads * each), dtype=dtype)
        scale = torch.rand(g.num_src)
    else:
        x = torch.randn(g.num_src, heads * each).to(dtype)
    for given in (None, edge):
        call = attention_on(g, x, heads, a_src, a_dst, given, scale)
        first = call().clone()
        call.out.fill_(77.0)
        assert torch.equal(first, call())
        whole = x.double() if scale is None else x.double() * scale.double()[:, None]
        alpha, want = expected(g, whole, heads, a_src, a_dst, given)
        # logits near 300 * 4 have an FP32 error of 1e-4; weights of int8 rows one of 2^-15
        exact = 1e-4 if dtype == torch.int8 else 2e-6
        assert relative_error(first.cpu(), want) < (exact if large == 1 else 3e-4)
        assert relative_error(call.alpha().cpu(), alpha) < (2e-6 if large == 1 else 3e-4)


@pytest.mark.cuda
def test_edges_that_are_masked_out_weigh_nothing() -> None:
    g = GRAPHS["random"]()
    x, edge = torch.randn(g.num_src, 32), torch.randn(g.num_edges, 1)
    edge[::3] = -math.inf
    got = Attention(sparse(g.rowptr, g.col, Cut(32, 16), 5), rows16(x), 1, edge=edge.cuda())().cpu()
    leaky = torch.nn.functional.leaky_relu(edge.double(), 0.2)
    kept = torch.isfinite(edge).double()
    total = torch.zeros(g.num_dst, 1, dtype=torch.double).index_add_(0, g.dst(), leaky.exp())
    weights = leaky.exp() / total.clamp(min=1e-300)[g.dst()] * kept
    want = spmm_reference(g.rowptr, g.col, weights[:, 0], x.double(), "sum", g.num_dst)
    assert relative_error(got, want) < 2e-6


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (1, 40), (1, 602), (4, 7)])
def test_rows_that_are_masked_whole_are_as_in_the_reference(
    heads: int, each: int, dtype: torch.dtype
) -> None:
    """-inf - -inf is NaN; a row without edges is zeros."""
    for make in GRAPHS.values():
        g = make()
        a_src, a_dst = torch.randn(g.num_src, heads), torch.randn(g.num_dst, heads)
        edge, degree = torch.randn(g.num_edges, heads), g.rowptr.diff()
        masked = torch.arange(g.num_dst) % 3 == 0
        masked[degree.argmax()] = True
        edge[masked[g.dst()], 0] = -math.inf
        is_int8 = dtype == torch.int8
        x = torch.randn(g.num_src, heads * each) * (40 if is_int8 else 1)
        x = x.clamp(-127, 127).to(dtype)
        scale = torch.rand(g.num_src) / 40 if is_int8 else None
        call = attention_on(g, x, heads, a_src, a_dst, edge, scale)
        whole = x.double() if scale is None else x.double() * scale.double()[:, None]
        alpha, want = expected(g, whole, heads, a_src, a_dst, edge)
        got = call().cpu().double()
        atol = 4e-4 if is_int8 else 1e-4
        torch.testing.assert_close(got, want, rtol=1e-4, atol=atol, equal_nan=True)
        torch.testing.assert_close(call.alpha().cpu().double(), alpha, rtol=1e-4, atol=1e-6, equal_nan=True)
        assert (got[degree == 0] == 0).all()
        assert got[:, :each].isnan().all(1).equal(masked & (degree > 0))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_hub_of_a_million_edges_with_large_values(dtype: torch.dtype) -> None:
    g = star(1_000_000)
    x = (100 + torch.rand(g.num_src, 16)).to(dtype)
    a_src, a_dst = 100 + torch.randn(g.num_src, 1), 100 + torch.randn(g.num_dst, 1)
    call = Attention(sparse(g.rowptr, g.col, Cut(1024, 256), 16), rows16(x), 1, a_src.cuda(), a_dst.cuda())
    got = call().cpu()
    alpha, want = expected(g, x.double(), 1, a_src, a_dst, None)
    assert torch.isfinite(got).all() and relative_error(got, want) < 1e-4
    assert relative_error(call.alpha().cpu(), alpha) < 1e-4


class Masked(nn.Module):
    """Attention whose logits have a term of the caller's for each edge."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.lin, self.slope = nn.Linear(24, 32), slope

    def forward(self, x: Tensor, edge_index: Tensor, term: Tensor) -> Tensor:
        """Return one row a node."""
        source, target = edge_index
        h = self.lin(x).relu()
        logits = h.sum(-1)[source] + h.mean(-1)[target] + term
        if self.slope != 1:
            logits = nn.functional.leaky_relu(logits, self.slope)
        alpha = softmax(logits, target, num_nodes=x.shape[0])
        return torch.zeros_like(h).index_add(0, target, h[source] * alpha[:, None])


MASKS = {"-inf": (-math.inf, 0.2), "-inf, no slope": (-math.inf, 1.0), "least": (torch.finfo().min, 1.0)}


@torch.no_grad()
def check_masked(device: str, precision: str, mask: str) -> None:
    value, slope = MASKS[mask]
    model = Masked(slope).eval()
    x, edge_index, term = torch.randn(60, 24), torch.randint(50, (2, 400)), torch.randn(400)
    term[edge_index[1] % 3 == 0], term[7] = value, value
    want = model(x, edge_index, term)
    assert want.isnan().any() == math.isinf(value) and (want[50:] == 0).all()
    compiled = gnnc.compile(copy.deepcopy(model).to(device), precision)
    inputs = (x, edge_index, term)
    for given in (inputs, (x, edge_index, torch.zeros(400)), inputs):
        got = compiled(*(on_device(given) if device == "cuda" else given)).cpu()
        torch.testing.assert_close(got, model(*given), rtol=0.03, atol=0.03, equal_nan=True)


@pytest.mark.first(1)
@pytest.mark.parametrize("mask", MASKS)
def test_models_with_masked_rows_on_the_cpu(mask: str) -> None:
    check_masked("cpu", "fp32", mask)


@pytest.mark.cuda
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_models_with_masked_rows(precision: str, mask: str) -> None:
    check_masked("cuda", precision, mask)
