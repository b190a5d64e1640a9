"""Concatenations and constants move whole rows; layers that move rows are launches alone."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from cuda_cases import error
from one_op import program_of, run_on_cuda
from torch import Tensor, nn

import gnnc

SHAPES = [(9,), (9, 1), (9, 3), (9, 64), (9, 2, 5)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_concatenated_rows(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape), torch.randn(4, *shape[1:])
    got = run_on_cuda(lambda x, y: torch.cat([x, y, x], 0), "concatenate_rows", x, y)
    assert torch.equal(got, torch.cat([x, y, x]))


def rows_of(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that returns rows of one number."""
    return lambda x: torch.full((x.shape[0], 3), value, device=x.device)


@pytest.mark.cuda
def test_fill() -> None:
    for value in (0.0, 1.5, float("inf"), float("-inf")):
        got = run_on_cuda(rows_of(value), "fill", torch.ones(5))
        assert torch.equal(got, torch.full((5, 3), value))


@pytest.mark.usefixtures("compiler")
def test_what_the_kernels_leave_to_torch() -> None:
    x = torch.randn(7, 10)
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda x, y: torch.cat([x, y]), (x.long(), x.long())),
        (lambda x: torch.full((3,), 1, device=x.device), (x,)),
    ]
    for function, values in calls:
        program = program_of(function, *values, backend="cuda-offline:sm_90")
        assert set(dict(program.kernels).values()) == {"reference"}


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "PDN": (lambda: pyg.PDNConv(16, 8, 4, 8), True),
    "MF": (lambda: pyg.MFConv(16, 8, max_degree=2), False),
}


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_that_move_rows(name: str, precision: str) -> None:
    make, has_features = LAYERS[name]
    torch.manual_seed(0)
    model = make().eval()
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), precision, backend="cuda")
    for nodes, edges in ((30, 100), (30, 0), (5, 60)):
        given = _arguments(nodes, edges, has_features=has_features)
        got = compiled(*[value.cuda() for value in given])
        assert error(got, model(*given)) < (1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.usefixtures("compiler")
@torch.no_grad()
@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_that_move_rows_can_be_replayed(name: str) -> None:
    make, has_features = LAYERS[name]
    compiled = gnnc.compile(make().eval(), "fp32", backend="cuda-offline:sm_90")
    with pytest.raises(gnnc.BackendError, match="for a device that is not here"):
        compiled(*_arguments(30, 100, has_features=has_features))
    assert "each call can be replayed as one CUDA graph" in compiled.explain()


def _arguments(nodes: int, edges: int, *, has_features: bool) -> tuple[Tensor, ...]:
    """Return arguments of a layer; each loop once: which of several keeps its features is not determined."""
    edge_index = torch.randint(nodes, (2, edges)).unique(dim=1)
    features = torch.randn(edge_index.shape[1], 4)
    return (torch.randn(nodes, 16), edge_index, *((features,) if has_features else ()))
