"""Gradients that are only added up are added edge by edge, and give what eager gives."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.utils import scatter

import gnnc
from gnnc.ir.body import body_inputs, evaluate_body, parse_body
from gnnc.ir.body_sums import sum_of_values
from gnnc.ir.nodes import op_name

NODES, EDGES, WIDTH = 40, 300, 64


class TwoReaders(nn.Module):
    """Sum of a message that moves positions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        """Return the sum of both results."""
        src, dst = edge_index
        message = self.mlp(torch.cat([x[dst], x[src]], 1))
        total = scatter(message, dst, 0, x.shape[0], "sum")
        return total + scatter(attr * self.move(message), dst, 0, x.shape[0], "mean")


class States(nn.Module):
    """Edge states of two layers, each of which is summed by destination."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.deep = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, edges: Tensor) -> Tensor:
        """Return the rows after both layers."""
        src, dst = edge_index
        for layer in (self.first, self.second):
            edges = edges + self.deep(layer(torch.cat([x[dst], x[src], edges], 1)))
            x = x + scatter(edges, dst, 0, x.shape[0], "sum").tanh()
        return x


def _arguments(kind: str = "plain") -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    edge_index = torch.randint(NODES, (2, 0 if kind == "none" else EDGES))
    if kind == "hub":
        edge_index[1, :200] = 3
    return torch.randn(NODES, WIDTH), edge_index, torch.randn(edge_index.shape[1], WIDTH)


def _compiled(model: nn.Module, *given: Tensor) -> gnnc.CompiledModel:
    compiled = gnnc.compile(model, precision="fp32", backend="cpu")
    compiled(*given).square().sum().backward()
    return compiled


@pytest.mark.parametrize("kind", ["plain", "hub", "none"])
@pytest.mark.parametrize("make", [TwoReaders, States])
def test_gradients_are_those_of_float64(make: type[nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    model, given = make(), _arguments(kind)
    compiled = gnnc.compile(model, precision="fp32", backend="cpu")
    x = given[0].clone().requires_grad_()
    compiled(x, *given[1:]).square().sum().backward()
    got = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    exact, wide = given[0].double().requires_grad_(), model.double()
    wide(exact, given[1], given[2].double()).square().sum().backward()
    wanted = [exact.grad, *(parameter.grad for parameter in wide.parameters())]
    for ours, true in zip(got, wanted, strict=True):
        assert ours is not None and true is not None
        torch.testing.assert_close(
            ours.double(), true, rtol=1e-4, atol=1e-5 * max(true.abs().max().item(), 1.0)
        )


def _stage(compiled: gnnc.CompiledModel, name: str) -> list[str]:
    """Return the calls of the joint graph after a pass."""
    graph = dict(compiled.stages)[name].graph
    return [op_name(node) for node in graph.nodes if node.op == "call_function"]


def test_two_gradients_of_a_message_run_its_chain_backwards_once() -> None:
    compiled = _compiled(TwoReaders(), *_arguments())
    before, after = _stage(compiled, "joint"), _stage(compiled, "gradient_sums")
    merged = sum(before.count(name) - after.count(name) for name in ("message", "edge_sum", "edge_map"))
    assert merged == before.count("add") - after.count("add") > 3
    assert "two gradients are added up at each edge" in compiled.explain()


def test_a_gradient_of_edge_states_is_added_up_where_it_is_read() -> None:
    compiled = _compiled(States(), *_arguments())
    assert _stage(compiled, "joint").count("sddmm") > _stage(compiled, "gradient_sums").count("sddmm")
    assert "added up where it is read, stored for no edge" in compiled.explain()


def test_inference_and_backends_without_joint_bodies_are_left_alone() -> None:
    given = _arguments()
    compiled = gnnc.compile(TwoReaders(), precision="fp32", backend="reference")
    compiled(*given).sum().backward()
    assert _stage(compiled, "joint") == _stage(compiled, "gradient_sums")
    compiled = gnnc.compile(TwoReaders(), precision="fp32", backend="cpu")
    with torch.no_grad():
        compiled(*given)
    assert _stage(compiled, "joint") == _stage(compiled, "gradient_sums")


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        (
            "t0 = aten.mm.default(i0, c0); t1 = aten.mm.default(j0, c0); "
            "t2 = aten.silu_backward.default(t0, e0); t3 = aten.silu_backward.default(t1, e0); "
            "return [t2, t3]",
            ["add", "mm", "silu_backward"],
        ),
        ("t0 = aten.relu.default(i0); t1 = aten.relu.default(j0); return [t0, t1]", ["relu", "relu", "add"]),
        (
            "t0 = aten.silu_backward.default(i0, e0); t1 = aten.silu_backward.default(j0, i0); "
            "return [t0, t1]",
            ["silu_backward", "silu_backward", "add"],
        ),
        (
            "t0 = aten.sum.dim_IntList(i0, [1], True); t1 = aten.expand.default(t0, [-1, 4]); "
            "t2 = aten.expand.default(j0, [-1, 4]); return [t1, t2]",
            ["sum", "expand", "expand", "add"],
        ),
        ("t0 = aten.silu_backward.default(e0, i0); t1 = aten.silu_backward.default(e0, j0); return [t0, t1]",
         ["silu_backward", "silu_backward", "add"]),
    ],
)  # fmt: skip
def test_linear_ops_that_both_summands_share_are_done_once(text: str, ops: list[str]) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(6, 4, dtype=torch.float64) for name in ("i0", "j0", "e0")}
    given["c0"] = torch.randn(4, 4, dtype=torch.float64)
    used = {name: given[name] for name in body_inputs(text)}
    body = sum_of_values(text, used)
    got = [op_name(node) for node in parse_body(body).graph.nodes if node.op == "call_function"]
    assert sorted(got) == sorted(ops)
    groups = [[given["i0"]], [given["j0"]], [given["e0"]], [given["c0"]]]
    first, second = evaluate_body(text, *groups)
    torch.testing.assert_close(evaluate_body(body, *groups), first + second)
