import pytest
import torch
from cuda_launch import ARCHITECTURES, compile_kernels
from cuda_sparse import Attention, AttentionConfig, rows16, sparse
from kernel_graphs import GRAPHS, Graph, relative_error
from torch import Tensor

from gnnc.ir.sparse import edge_softmax_reference, spmm_reference
from gnnc.runtime.cuda.runs import Cut

CONFIGS = (
    AttentionConfig("f32", 64, 4, True, False),
    AttentionConfig("f16", 64, 4, True, True),
    AttentionConfig("i8", 64, 4, True, False),
    AttentionConfig("i8", 40, 1, True, False),
    AttentionConfig("f32", 602, 1, False, True),
    AttentionConfig("i8", 28, 4, True, False),
)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str, config: AttentionConfig) -> None:
    report = compile_kernels(config.source(), config.names(), architecture)
    assert len(report) == 3
    assert not {name: kernel for name, kernel in report.items() if kernel.spilled or kernel.stack}


def expected(
    g: Graph, x: Tensor, heads: int, a_src: Tensor, a_dst: Tensor, edge: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = a_src.double()[g.col] + a_dst.double()[g.dst()]
    logits = torch.nn.functional.leaky_relu(logits if edge is None else logits + edge.double(), 0.2)
    alpha = edge_softmax_reference(g.rowptr, logits)
    x = x.double().view(x.shape[0], heads, -1)
    return alpha, spmm_reference(g.rowptr, g.col, alpha, x, "sum", g.num_dst).flatten(1)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (1, 40), (1, 7), (1, 602), (2, 64), (4, 7), (3, 47)])
@pytest.mark.parametrize("large", [1.0, 300.0])
def test_attention(heads: int, each: int, dtype: torch.dtype, large: float) -> None:
    for make in GRAPHS.values():
        g = make()
        a_src, a_dst = torch.randn(g.num_src, heads) * large, torch.randn(g.num_dst, heads)
        edge = torch.randn(g.num_edges, heads)
        scale = None
        if dtype == torch.int8:
            x = torch.randint(-127, 128, (g.num_src, heads * each), dtype=dtype)
            scale = torch.rand(g.num_src)
        else:
            x = torch.randn(g.num_src, heads * each).to(dtype)
        for given in (None, edge):
            call = Attention(
                sparse(g.rowptr, g.col, Cut(32, 16), 5),
                rows16(x) if heads == 1 else x.cuda(),
                heads,
                a_src.cuda(),
                a_dst.cuda(),
                None if given is None else given.cuda(),
                None if scale is None else scale.cuda(),
            )
            first = call().clone()
            call.out.fill_(77.0)
            assert torch.equal(first, call())
            whole = x.double() if scale is None else x.double() * scale.double()[:, None]
            alpha, want = expected(g, whole, heads, a_src, a_dst, given)
            # logits near 300 * 4 have an FP32 error of 1e-4
            assert relative_error(first.cpu(), want) < (2e-6 if large == 1 else 3e-4)
            assert relative_error(call.alpha().cpu(), alpha) < (2e-6 if large == 1 else 3e-4)


@pytest.mark.cuda
def test_edges_that_are_masked_out_weigh_nothing() -> None:
    g = GRAPHS["random"]()
    x, edge = torch.randn(g.num_src, 32), torch.randn(g.num_edges, 1)
    edge[::3] = -float("inf")
    got = Attention(sparse(g.rowptr, g.col, Cut(32, 16), 5), rows16(x), 1, edge=edge.cuda())().cpu()
    leaky = torch.nn.functional.leaky_relu(edge.double(), 0.2)
    kept = torch.isfinite(edge).double()
    total = torch.zeros(g.num_dst, 1, dtype=torch.double).index_add_(0, g.dst(), leaky.exp())
    weights = leaky.exp() / total.clamp(min=1e-300)[g.dst()] * kept
    want = spmm_reference(g.rowptr, g.col, weights[:, 0], x.double(), "sum", g.num_dst)
    assert relative_error(got, want) < 2e-6
