"""Values on the device, errors and lowered programs, for the CUDA tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from zoo import ZOO, build

import gnnc
from gnnc.runtime.cuda.driver.kernel_set import KernelSet
from gnnc.runtime.cuda.driver.nvrtc import Resources, resources_of


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative L2 error, computed in float64."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp(min=1e-30)) if want.numel() else 0.0


def on_device(value: Any) -> Any:
    """Return the same nest of values with its tensors on the CUDA device."""
    return pytree.tree_map(lambda v: v.cuda() if isinstance(v, torch.Tensor) else v, value)


def on_host(value: Any) -> Any:
    """Return the same nest of values with its tensors in the host's memory."""
    return pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, value)


def lowered(name: str, precision: str, backend: str):
    """Return a zoo model, compiled for a device that need not be here."""
    args, kwargs = ZOO[name].arguments(60, 400, 0)
    compiled = gnnc.compile(build(name), precision, backend=backend)
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="compiles for a device that is not here"):
        compiled(*args, **kwargs)
    return compiled


def assert_no_spills(report: dict[str, Resources]) -> None:
    """No kernel spills registers, or has local memory: none here declares any."""
    assert not {name: kernel for name, kernel in report.items() if kernel.spilled or kernel.stack}


def compiled_without_spills(
    architecture: str, make: Callable[..., Any], *given: Any
) -> tuple[Any, list[str]]:
    """Compile what ``make(kernel_set, *given)`` asks for; return that, and the names of its kernels."""
    kernel_set = KernelSet()
    made = make(kernel_set, *given)
    report = resources_of(kernel_set.compile(architecture))
    assert_no_spills(report)
    return made, list(report)
