"""Tensors whose storage was freed or shortened are refused, by name, before anything reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow import slow_after
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, GINEConv, SAGEConv, TransformerConv

import gnnc

NODES, EDGES = 20, 60
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "sage": (lambda: SAGEConv(8, 4), False),
    "gcn": (lambda: GCNConv(8, 4), True),
    "gat": (lambda: GATConv(8, 4, heads=2), False),
    "gin": (lambda: GINConv(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())), False),
    "gine": (lambda: GINEConv(nn.Linear(8, 4), edge_dim=8), True),  # a message, whose body is ATen
    "transformer": (lambda: TransformerConv(8, 4), False),
}


def model_and_arguments(name: str) -> tuple[nn.Module, list[Tensor]]:
    make, takes_edges = MODELS[name]
    arguments = [torch.randn(NODES, 8), torch.randint(NODES, (2, EDGES))]
    if takes_edges:
        arguments.append(torch.randn(EDGES, 8) if name == "gine" else torch.rand(EDGES))
    return make().eval(), arguments


def tensors_of(model: nn.Module, arguments: list[Tensor]) -> dict[str, Tensor]:
    named = {f"argument {i}": value for i, value in enumerate(arguments)}
    named |= dict(model.named_parameters())
    return named | {name: b for name, b in model.named_buffers() if b.is_floating_point()}


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", slow_after(1, ["int8", "fp32"]))
@pytest.mark.parametrize("name", slow_after(2, ["sage", "gine", "gcn", "gat", "gin", "transformer"]))
@torch.no_grad()
def test_each_tensor_of_a_call(name: str, precision: str) -> None:
    model, arguments = model_and_arguments(name)
    fast = gnnc.compile(model, precision, backend="cpu")
    want = fast(*arguments)
    for label, tensor in tensors_of(model, arguments).items():
        storage, saved = tensor.untyped_storage(), tensor.clone()
        for nbytes in (0, storage.nbytes() - 1, storage.nbytes() // 2):
            whole = saved.untyped_storage().nbytes()
            storage.resize_(nbytes)
            with pytest.raises(gnnc.GnncError, match=r"storage was (freed|shortened)") as caught:
                fast(*arguments)
            assert label in str(caught.value) or label.startswith("argument")
            storage.resize_(whole)
            tensor.copy_(saved)
        assert torch.equal(fast(*arguments), want)


@torch.no_grad()
def test_a_first_call_and_examples() -> None:
    model, (x, edge_index) = SAGEConv(8, 4).eval(), model_and_arguments("sage")[1]
    x.untyped_storage().resize_(0)
    with pytest.raises(gnnc.InputError, match="x: its storage was freed"):
        gnnc.compile(model, "fp32")(x, edge_index)
    with pytest.raises(gnnc.InputError, match="x: its storage was freed"):
        gnnc.compile(model, "int8", example_inputs=(x, edge_index))
    model.lin_l.weight.untyped_storage().resize_(4)
    with pytest.raises(gnnc.InputError, match=r"lin_l\.weight"):
        gnnc.compile(model, "fp32")(torch.randn(NODES, 8), edge_index)
    with pytest.raises(gnnc.InputError, match=r"lin_l\.weight"):
        gnnc.compile(model, "int8", example_inputs=(torch.randn(NODES, 8), edge_index))


class Sizes(nn.Module):
    """Reads the elements of one argument, and of the other its size alone."""

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return x * like.shape[0]


@torch.no_grad()
def test_views_into_a_storage_that_still_holds_them() -> None:
    model, (x, edge_index) = model_and_arguments("sage")
    fast = gnnc.compile(model, "fp32", backend="cpu")
    whole = torch.randn(3 * NODES, 8)
    view = whole[NODES : 2 * NODES]
    want = fast(view, edge_index)
    whole.untyped_storage().resize_(2 * NODES * 8 * 4)
    assert torch.equal(fast(view, edge_index), want)
    alike = view[:1].expand(NODES, 8)
    torch.testing.assert_close(fast(alike, edge_index), model(alike, edge_index))
    whole.untyped_storage().resize_(2 * NODES * 8 * 4 - 4)
    with pytest.raises(gnnc.InputError, match="shortened"):
        fast(view, edge_index)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@torch.no_grad()
def test_other_backends_and_arguments_that_give_their_size(backend: str) -> None:
    fast = gnnc.compile(Sizes(), "fp32", backend=backend)
    x, like = torch.randn(5, 3), torch.randn(7, 3)
    assert torch.equal(fast(x, like), x * 7)
    x.untyped_storage().resize_(8)
    with pytest.raises(gnnc.InputError, match="x: its storage was shortened to 8 bytes"):
        fast(x, like)


def test_the_python_check_is_that_of_the_kernels() -> None:
    from gnnc.runtime.program import checks

    compiled, plain = checks.storage_check(), checks._first_unstored
    assert compiled is not plain
    views: list[Any] = [torch.randn(6, 4), torch.randn(6, 4).t(), torch.randn(9)[3:], torch.randn(0, 4)]
    views += [torch.randn(1).expand(2**40, 3), torch.randn(6, 4)[:, 1:3], torch.randn(())]
    for view in views:
        storage = view.untyped_storage()
        for nbytes in sorted({0, 4, 35, 36, 88, 92, 95, storage.nbytes()}, reverse=True):
            if nbytes <= storage.nbytes():
                storage.resize_(nbytes)
            assert compiled([torch.ones(1), view]) == plain([torch.ones(1), view])
