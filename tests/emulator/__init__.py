"""A CUDA device that is this machine: kernels run on the CPU, from the PTX that NVRTC makes of them.

``emulated()`` puts it in the place of the driver, of the assembler and of torch's device "cuda", so that a
kernel's test runs as it does on a GPU. See ``machine.h`` for what it has and has not.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cuda_launch
import torch
from torch._C._dynamo import guards
from torch.overrides import TorchFunctionMode

from emulator import compiler
from emulator.driver import Driver, EmulatorError
from gnnc import api
from gnnc.capture import validate
from gnnc.compiler import dispatch
from gnnc.runtime import backend, cuda
from gnnc.runtime.cuda import executable
from gnnc.runtime.cuda.driver import kernel_set, launch, nvrtc, readback
from gnnc.runtime.cuda.driver.nvrtc import CompiledCode
from gnnc.runtime.cuda.graphs import cuda_graph

__all__ = ["Driver", "EmulatorError", "emulated"]

_MULTIPROCESSORS = 7
_IS_CUDA = torch.Tensor.is_cuda.__get__


@contextmanager
def emulated(seed: int = 0) -> Iterator[Driver]:
    """Run kernels on the CPU.

    Args:
        seed: of the order in which threads run; each launch has another.
    """
    driver = _driver()
    driver.begin(seed)
    with ExitStack() as stack:
        for target, name, value in _replaced(driver):
            made = getattr(target, "__name__", "").startswith("torch")
            stack.enter_context(patch.object(target, name, value, create=made))
        stack.enter_context(_OnTheCpu())
        yield driver


@cache
def _driver() -> Driver:
    """Return the one of this process: kernels that tests keep stay loaded."""
    return Driver()


class _Code(launch.LoadedCode):
    """Is not unloaded, which may be when the emulator is in nobody's place."""

    def __del__(self) -> None:
        """Do nothing."""


class _Graph(cuda_graph._Graph):
    """The same of a graph of launches."""

    def __del__(self) -> None:
        """Do nothing."""


def _replaced(driver: Driver) -> Iterator[tuple[Any, str, Any]]:
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_event=lambda event: None)
    limits = SimpleNamespace(multi_processor_count=_MULTIPROCESSORS, shared_memory_per_block_optin=227 * 1024)
    yield from ((module, "driver", lambda: driver) for module in (readback, launch, cuda_graph))
    yield cuda_graph, "_Graph", _Graph
    yield launch, "has_programmatic_edges", lambda: False
    yield from ((module, "LoadedCode", _Code) for module in (launch, kernel_set, cuda_launch))
    yield nvrtc, "_compile", compiler.compile_source
    yield nvrtc, "compile_source", _named(nvrtc.compile_source)
    yield kernel_set, "architecture_of", lambda device: "sm_{}{}".format(*compiler.CAPABILITY)
    yield cuda, "load", lambda: "emulated"
    yield from ((module, "get_backend", _cuda_for_auto) for module in (api, dispatch))
    yield validate, "_check_backend", lambda *given: None
    yield executable, "device_of", lambda graph: torch.device("cpu")
    yield (
        guards,
        "_empty_strided_cuda",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    yield torch.cuda, "Event", _Event
    yield torch.cuda, "_sleep", lambda cycles: None
    yield torch.cuda, "is_current_stream_capturing", lambda: False
    yield torch._C, "_cuda_exchangeDevice", lambda index: index
    yield torch.cuda, "get_device_name", lambda device=None: "emulator"
    yield torch.cuda, "get_device_capability", lambda device=None: compiler.CAPABILITY
    yield torch.cuda, "get_device_properties", lambda device=None: limits
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "current_stream", lambda device=None: stream
    yield torch.cuda, "synchronize", lambda device=None: None
    yield torch.cuda, "device", lambda device: nullcontext()
    yield torch._C, "_cuda_getCurrentRawStream", lambda index: 0


def _cuda_for_auto(name: str, device: torch.device | None = None) -> backend.Backend:
    """Return the backend of a name, where ``auto`` is CUDA whatever the device of the model."""
    return backend.get_backend("cuda" if name == "auto" else name)


class _Event:
    """A place in a stream, where everything before it is done at once."""

    def __init__(self, **options: bool) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Note the place."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Answer that the event is over."""
        return True

    def elapsed_time(self, other: "_Event") -> float:
        """Milliseconds, few enough for a graph of launches."""
        return 0.01


def _here(value: Any) -> Any:
    """Return "cpu" for a CUDA device, all else as it is."""
    is_device = isinstance(value, str | torch.device)
    return torch.device("cpu") if is_device and str(value).startswith("cuda") else value


class _OnTheCpu(TorchFunctionMode):
    """Takes "cuda" for "cpu"; what moves there and back is copied, and new memory is NaN or garbage."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.device:
            return _here(func(*args, **(kwargs or {})))
        args, kwargs = tuple(map(_here, args)), {name: _here(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        if func == _IS_CUDA:
            return True
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0].clone()
        out = func(*args, **kwargs)
        if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty):
            out.fill_(float("nan") if out.is_floating_point() else 0 if out.dtype == torch.bool else 77)
        return out


def _named(compile_source: Callable[..., CompiledCode]) -> Callable[..., CompiledCode]:
    """Give code for the emulator places of its own in the cache."""
    return lambda source, names, _: compile_source(source, names, compiler.architecture())
