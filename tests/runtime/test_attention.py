"""Which attention launches are given memory for the factors of the sources."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GATConv, GATv2Conv

import gnnc

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 3]])
FACTORS = 13  # number of the argument


class Attentions(TorchDispatchMode):
    """Collects the arguments of the attention kernels that run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.gnnc_cpu_valid.attention.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def factors_of(conv, precision="int8"):
    model, x = conv.eval(), torch.randn(5, 12)
    with torch.no_grad():
        expected = model(x, EDGES)
        compiled = gnnc.compile(model, precision=precision)
        compiled(x, EDGES)
        with Attentions() as seen:
            result = compiled(x, EDGES)
    assert (result - expected).norm() < 0.05 * expected.norm()
    (call,) = seen.calls
    return call[FACTORS]


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize(("heads", "numbers"), [(1, 4), (2, 4), (4, 8), (8, 16), (16, 32)])
def test_a_bound_stands_for_the_maximum_of_leaky_relu_of_a_sum(heads, numbers, precision):
    assert factors_of(GATConv(12, 16, heads=heads), precision).numel() == 5 * numbers


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "conv",
    [
        pytest.param(lambda: GATConv(12, 16, heads=3), id="heads"),
        pytest.param(lambda: GATConv(12, 16, heads=4, negative_slope=1.5), id="slope"),
        pytest.param(lambda: GATv2Conv(12, 16, heads=4), id="kind"),
    ],
)
def test_other_rows_find_their_maximum(conv):
    assert factors_of(conv()) is None
