"""A model without parameters and buffers compiles for the device of the tensors of its calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnc
from gnnc import api
from gnnc.capture.arguments import flatten_call
from gnnc.compiler import dispatch
from gnnc.errors import UnsupportedError

REFUSED = "precision 'fp16' is not built for backend 'cpu'"


class Sums(nn.Module):
    """Sums of the rows of the neighbors: no parameter says on which device it runs."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


def arguments(device: str = "cpu") -> tuple[Tensor, Tensor]:
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]], device=device)
    return torch.randn(3, 8, device=device), edge_index


@pytest.fixture
def without_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fp16 away from the CPU backend."""
    choose = dispatch.get_backend

    def chosen(*request: Any) -> Any:
        backend = choose(*request)
        return replace(backend, target=replace(backend.target, rounded=frozenset()))

    for module in (dispatch, api):
        monkeypatch.setattr(module, "get_backend", chosen)


pytestmark = pytest.mark.usefixtures("without_fp16")


def test_a_precision_is_checked_at_the_first_call() -> None:
    compiled = gnnc.compile(Sums(), "fp16")
    with pytest.raises(UnsupportedError, match=REFUSED):
        compiled(*arguments())


def test_with_examples_it_is_checked_at_once() -> None:
    with pytest.raises(UnsupportedError, match=REFUSED):
        gnnc.compile(Sums(), "fp16", example_inputs=arguments())


@pytest.mark.parametrize(("model", "backend"), [(nn.Linear(2, 2), "auto"), (Sums(), "cpu")])
def test_where_the_device_is_known_it_is_checked_at_once(model: nn.Module, backend: str) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED):
        gnnc.compile(model, "fp16", backend=backend)


def test_overrides_are_checked_at_the_first_call_too() -> None:
    compiled = gnnc.compile(nn.Sequential(Sums()), "fp32", overrides={"0": "fp16"})
    with pytest.raises(UnsupportedError, match=REFUSED):
        compiled._dispatch.options_for(flatten_call(compiled.model, arguments()[:1], {}))


def test_the_tensors_of_the_call_choose_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = gnnc.compile(Sums(), "fp32")
    asked: list[Any] = []
    choose = dispatch.get_backend
    monkeypatch.setattr(dispatch, "get_backend", lambda *request: asked.append(request) or choose("cpu"))
    compiled._dispatch.options_for(flatten_call(compiled.model, arguments("meta"), {}))
    assert asked == [("auto", torch.device("meta"))]


def test_a_precision_of_the_backend_runs() -> None:
    x, edge_index = arguments()
    torch.testing.assert_close(gnnc.compile(Sums(), "fp32")(x, edge_index), Sums()(x, edge_index))
