"""One CUDA device: emitter, memory, clock and profiler ranges of its programs."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from gnnc.ir.graph import placeholders
from gnnc.ir.source import is_structure
from gnnc.runtime.cuda.driver.nan_flag import NanFlag
from gnnc.runtime.cuda.driver.nvrtc import Resources, resources_of
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.formats.tables import write_give_back
from gnnc.runtime.cuda.graphs.recording import Recording, obstacle, recording
from gnnc.runtime.cuda.memory import CudaArena, CudaArenaPool
from gnnc.runtime.program.device import Device
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.program.memory import Layout, OutputPool
from gnnc.torch_private import empty_strided_cuda


@dataclass(frozen=True, slots=True)
class CudaBuild:
    """A program whose kernels are loaded on a device.

    Attributes:
        recording: the recording form of the program; None where it is not launches alone.
        obstacle: reason why the program is not recorded; None where it is.
        resources: registers and memory of each kernel, by C++ name.
        code_hash: hash of the machine code.
        structure: positions of the placeholders that are parts of the graph's structure.
        nan_flag: the flag that kernels raise for NaN and infinity.
    """

    recording: Recording | None
    obstacle: str | None
    resources: dict[str, Resources]
    code_hash: str
    structure: list[int]
    nan_flag: NanFlag


class CudaDevice(Device):
    """The CUDA device of a program's tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def emitter(self, graph_module: GraphModule, check_finite: bool) -> CudaEmitter:
        """Return an emitter of CUDA programs."""
        return CudaEmitter(graph_module, check_finite=check_finite, offline=False)

    def finish(self, emitter: CudaEmitter, results: list[Expr]) -> CudaBuild:
        """Compile the kernels and load them on the device."""
        write_give_back(emitter)
        inputs = placeholders(emitter.graph_module)
        structure = [place for place, node in enumerate(inputs) if is_structure(node)]
        code = emitter.kernel_set.build(self.device.index)
        digests = b"".join(hashlib.sha256(part.cubin).digest() for part in code.values())
        return CudaBuild(
            recording(emitter, results),
            obstacle(emitter),
            resources_of(code),
            hashlib.sha256(digests).hexdigest(),
            structure,
            emitter.nan_flag,
        )

    def replays(self, emitter: CudaEmitter, results: list[Expr]) -> None:
        """Return None: calls of several launches are CUDA graphs, see ``CudaExecutable``."""

    def arena_pool(self, layout: Layout) -> CudaArenaPool:
        """Return the pool of the temporaries of a program, by stream."""
        return CudaArenaPool(layout, self.device)

    def allocators(self, pool: OutputPool) -> dict[str, Callable[..., Any]]:
        """Return the functions that a program allocates with, on the current device."""
        # The allocator of torch.compile's programs: it takes a third of the time of `torch.empty`.
        new = empty_strided_cuda()

        def take(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            return new(shape, (shape[1], 1), dtype)

        empty = partial(torch.empty, device=self.device)
        return {"take": take, "empty": empty, "counters": CudaArena.counters}

    def clock(self) -> torch.cuda.Event:
        """Return an event that is recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        """Return the seconds between two events; waits for the later one."""
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def enter_range(self, msg: str) -> int:
        """Begin an NVTX range."""
        return torch.cuda.nvtx.range_push(msg)

    def leave_range(self) -> int:
        """End the NVTX range that was entered last."""
        return torch.cuda.nvtx.range_pop()
