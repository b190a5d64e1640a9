"""Training steps in which the steps that gradients share are stored for every edge, in rows of 16 bits."""

import copy
from typing import Any

import edge_layers
import pytest
import torch
from cuda_cases import error, on_device
from torch import Tensor, nn
from torch_geometric.nn import CGConv

import gnnc

NODES, EDGES = 30, 150
LAYERS = {"mesh": edge_layers.MeshBlock, "CG": lambda: CGConv(edge_layers.WIDTH, edge_layers.FEATURES)}
BODIES = ("gnnc.edge_map.default", "gnnc.edge_sum.default", "gnnc.message.default")


def arguments(name: str) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(NODES, edge_layers.WIDTH, requires_grad=True)
    features = edge_layers.WIDTH if name == "mesh" else edge_layers.FEATURES
    return x, torch.randint(0, NODES, (2, EDGES)), torch.randn(EDGES, features)


def gradients(call: Any, model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of the rows and the parameters; the loss weighs every element of the rows."""
    found = call(*args)
    out = found[0] if isinstance(found, tuple) else found
    loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)).sum()
    return list(torch.autograd.grad(loss, [args[0], *model.parameters()]))


@pytest.mark.cuda
@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-5), ("fp16", 2e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_in_float64(name: str, precision: str, most: float) -> None:
    torch.manual_seed(0)
    model, args = LAYERS[name](), arguments(name)
    exact = copy.deepcopy(model).double()
    wanted = gradients(exact, exact, tuple(t.double() if t.is_floating_point() else t for t in args))
    compiled = gnnc.compile(model.cuda(), precision=precision)
    args = on_device(args)
    for got, want in zip(gradients(compiled, model, args), wanted, strict=True):
        assert error(got, want) < most
    graph = compiled._dispatch.last.parts.backward.graph
    bodies = [node for node in graph.nodes if str(node.target) in BODIES]
    assert {node.meta["kernel"] for node in bodies} == {"edge_body", "edge_sum"}
    dtypes = {node.meta["val"].dtype for node in bodies if "edge_map" in str(node.target)}
    assert dtypes <= {torch.float32} if precision == "fp32" else dtypes & {torch.float16, torch.bfloat16}
