"""The garbage collector of Python: off while a call is captured and lowered, as before afterwards."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gnnc
from gnnc.compiler.build import uncollected

SEEN: list[bool] = []


class Recording(nn.Module):
    """Notes whether the collector is on when forward runs."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(gc.isenabled())
        return x.relu()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Start with the collector on and nothing seen; leave it on."""
    SEEN.clear()
    gc.enable()
    yield
    gc.enable()


def test_a_call_is_captured_without_it() -> None:
    gnnc.compile(Recording(), "fp32")(torch.ones(3, 2))
    assert SEEN and not any(SEEN)
    assert gc.isenabled()


def test_it_is_on_where_programs_run_on_examples() -> None:
    gnnc.compile(Recording(), "fp32", example_inputs=(torch.ones(3, 2),))
    assert SEEN and all(SEEN)


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(gnnc.CaptureError):
        gnnc.compile(Failing(), "fp32")(torch.ones(3, 2))
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    gnnc.compile(Recording(), "fp32")(torch.ones(3, 2))
    assert not gc.isenabled()


def test_a_build_within_a_build_leaves_it_off() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
