import math
from functools import partial

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS, relative_error, star
from one_op import program_of, run_on_cuda

from gnnc.ir.sparse import edge_softmax_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of

GNNC = torch.ops.gnnc
EDGE_SOFTMAX = "edge_softmax"


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("heads", [1, 4, 20, 47])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str, heads: int) -> None:
    g = GRAPHS["random"]()
    logits = torch.randn(g.num_edges, heads)
    program = program_of(GNNC.edge_softmax, g.rowptr, logits, backend=f"cuda-offline:{architecture}")
    assert EDGE_SOFTMAX in dict(program.kernels).values()
    assert_no_spills(resources_of(program.code[architecture]))


@pytest.mark.cuda
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [None, 1, 3, 8, 20, 47])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_edge_softmax(name: str, heads: int | None, eps: float) -> None:
    g = GRAPHS[name]()
    logits = torch.randn(g.num_edges, *([] if heads is None else [heads])) * 20
    call = partial(GNNC.edge_softmax, eps=eps)
    got, again = (run_on_cuda(call, EDGE_SOFTMAX, g.rowptr, logits) for _ in range(2))
    assert torch.equal(got, again)
    assert relative_error(got, edge_softmax_reference(g.rowptr, logits.double(), eps)) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [1, 7])
def test_a_hub_is_computed_by_many_warps(heads: int) -> None:
    g = star(100_000)
    logits = torch.randn(g.num_edges, heads) * 5
    got, again = (run_on_cuda(GNNC.edge_softmax, EDGE_SOFTMAX, g.rowptr, logits) for _ in range(2))
    assert torch.equal(got, again)
    assert relative_error(got, edge_softmax_reference(g.rowptr, logits.double())) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["random", "star"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, torch.finfo(torch.float32).min])
def test_infinite_logits_are_as_in_the_reference(name: str, value: float) -> None:
    """An infinite logit makes its row NaN, as do logits of -inf alone; others of -inf weigh nothing."""
    g = GRAPHS[name]()
    logits = torch.randn(g.num_edges, 3)
    logits[::3, 0] = value
    logits[:, 2] = value
    got = run_on_cuda(GNNC.edge_softmax, EDGE_SOFTMAX, g.rowptr, logits)
    want = edge_softmax_reference(g.rowptr, logits.double())
    torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=1e-5, atol=1e-7)
