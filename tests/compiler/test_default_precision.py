"""The precision where none is named: int8, or fp32 on machines whose int8 kernels are slower than that."""

import dataclasses

import pytest
import torch
from torch_geometric.nn import GCNConv

import gnnc
from gnnc.compiler import dispatch
from gnnc.runtime.backend import Backend, get_backend

GRAPH = torch.randn(30, 16), torch.randint(30, (2, 90))


@pytest.fixture(params=[False, True], ids=["int8 is fast", "int8 is slow"])
def is_slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the CPU backend says that its int8 kernels are slower than FP32's."""
    slower = frozenset({"int8"}) if request.param else frozenset()

    def backend_of(name: str, device: torch.device | None = None) -> Backend:
        found = get_backend(name, device)
        return dataclasses.replace(found, target=dataclasses.replace(found.target, slower=slower))

    monkeypatch.setattr(gnnc.api, "get_backend", backend_of)
    monkeypatch.setattr(dispatch, "get_backend", backend_of)
    return request.param


@pytest.mark.first(1)
@torch.no_grad()
def test_no_precision_is_int8_or_the_faster_fp32_and_explained(is_slow: bool) -> None:
    compiled = gnnc.compile(GCNConv(16, 64).eval(), backend="cpu")
    compiled(*GRAPH)
    assert f", {'fp32' if is_slow else 'int8'} on backend cpu" in str(compiled)
    sentence = "fp32, since no precision was named and int8 is slower than that here (C++ kernels, "
    assert (sentence in compiled.explain()) == is_slow


@pytest.mark.first(1)
@torch.no_grad()
def test_a_named_int8_is_int8_and_explained(is_slow: bool) -> None:
    compiled = gnnc.compile(GCNConv(16, 64).eval(), "int8", backend="cpu")
    compiled(*GRAPH)
    assert ", int8 on backend cpu" in str(compiled)
    assert ("int8, as asked for, is slower than fp32 here (C++ kernels, " in compiled.explain()) == is_slow


@pytest.mark.first(1)
@torch.no_grad()
def test_other_precisions_say_nothing(is_slow: bool) -> None:
    compiled = gnnc.compile(GCNConv(16, 64).eval(), "bf16", backend="cpu")
    compiled(*GRAPH)
    assert "Precision choice" not in compiled.explain()
