"""Sizes that a check of torch refuses, such as one row in a batch norm that trains."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn

import gnnc

ONE_NODE = torch.randn(1, 6), torch.zeros(2, 1, dtype=torch.int64)


class Normed(nn.Module):
    """A layer with a batch norm behind it."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GCNConv(6, 4), norm(4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv(x, edge_index))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, pyg.BatchNorm])
def test_statistics_of_one_row_are_refused(norm: type[nn.Module], is_first: bool) -> None:
    model = Normed(norm).train()
    compiled = gnnc.compile(model, "fp32")
    if not is_first:
        compiled(torch.randn(9, 6), torch.randint(9, (2, 20)))
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(gnnc.GnncError, match="more than 1 value per channel"):
        compiled(*ONE_NODE)
    for path, buffer in model.named_buffers():
        assert torch.equal(buffer, before[path]), path


def test_one_row_has_the_running_statistics_in_evaluation() -> None:
    model = Normed(nn.BatchNorm1d).eval()
    compiled = gnnc.compile(model, "fp32")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*ONE_NODE), model(*ONE_NODE))


STEPS = {
    "split": lambda x, e: torch.cat([part * 2 for part in x.split(5)]),
    "chunk": lambda x, e: torch.cat([part * (i + 1) for i, part in enumerate(x.chunk(4))]),
    "tensor_split": lambda x, e: torch.cat([part * (i + 1) for i, part in enumerate(x.tensor_split(3))]),
    "first-three": lambda x, e: x[:3].relu(),
    "first-two": lambda x, e: x[:2].relu() + 1,
    "all-but-one": lambda x, e: x[1:].relu() + 1,
    "all-but-two": lambda x, e: x[:-2].relu() + 1,
    "last-three": lambda x, e: x[-3:].relu() + 1,
    "both-ends": lambda x, e: x[2:].sum(0) + x[:-2].sum(0),
    "narrow": lambda x, e: x.narrow(0, 1, 2).relu(),
    "topk": lambda x, e: x.topk(2, 0)[0].relu(),
    "difference": lambda x, e: x.diff(dim=0).relu(),
    "windows": lambda x, e: x.unfold(0, 3, 1).relu(),
    "every-other": lambda x, e: x[::2].relu(),
    "pairs": lambda x, e: (x[:3].unsqueeze(1) * x[:3].unsqueeze(0)).relu(),
    "first-edges": lambda x, e: torch.zeros_like(x).index_add(0, e[1, :6], x[e[0, :6]]),
}
SIZES = ((40, 30), (42, 30), (7, 30), (4, 5), (3, 3), (2, 2), (1, 1), (1, 0), (60, 50), (0, 0))


class Stepped(nn.Module):
    """A layer, and a step whose result depends on the sizes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv, self.step = pyg.GCNConv(4, 4), STEPS[name]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.step(self.conv(x, edge_index), edge_index)


@pytest.mark.parametrize("name", slow_but(("split", "first-three"), list(STEPS)))
def test_what_a_trace_assumes_about_sizes_holds_for_the_call(name: str) -> None:
    """A trace counts the parts of a split, and clamps the ends of a slice, for its own sizes."""
    model = Stepped(name).eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes, edges in SIZES:
        x, edge_index = torch.randn(nodes, 4), torch.randint(max(nodes, 1), (2, edges))
        with torch.no_grad():
            try:
                expected = model(x, edge_index)
            except (RuntimeError, IndexError):
                with pytest.raises(gnnc.GnncError):
                    compiled(x, edge_index)
            else:
                torch.testing.assert_close(compiled(x, edge_index), expected)


def test_a_slice_within_the_tensor_is_one_program() -> None:
    model = Stepped("first-three").eval()
    compiled = gnnc.compile(model, "fp32")
    with torch.no_grad():
        for nodes in (40, 3, 17):
            compiled(torch.randn(nodes, 4), torch.randint(nodes, (2, 30)))
    assert len(list(compiled._dispatch.programs())) == 1
