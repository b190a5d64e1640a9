"""Models written by hand compute what eager computes, whatever they are spelled like."""

import pytest
import torch
from slow import slow_after
from spellings import WIDTH, spelled
from torch import Tensor
from traced import relative_error

import gnnc


def graph(seed: int, nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    """Features and edges; the last two nodes have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes - 2, (2, edges), generator=generator)


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("seed", slow_after(8, range(24)))
def test_spellings_equal_eager(seed: int) -> None:
    model = spelled(seed)
    compiled = gnnc.compile(model, "fp32", check_finite="off")
    with torch.no_grad():
        for nodes, edges in ((30, 120), (41, 60)):
            args = graph(seed, nodes, edges)
            want = model(*args)
            assert want.isfinite().all()
            assert relative_error(compiled(*args), want) < 1e-4
