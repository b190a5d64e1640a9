"""Measurements of a program: the time of each op, and the fastest cut of the graph of a call."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.calibrate.bandwidth import copy_bandwidth
from gnnc.compiler.program import Program
from gnnc.cost.model import floor_times
from gnnc.errors import UnsupportedError

_RUNS = 5


def profile(program: Program, tensors: Sequence[Tensor]) -> None:
    """Run a program a few times; store its times in ``program.timings`` and ``program.floors``, in seconds.

    Args:
        program: the program of the call.
        tensors: the tensors of the call.
    """
    runs = [program.profiled(tensors)[1] for _ in range(_RUNS)]
    program.timings = {
        (timing.part, timing.node): statistics.median(run[i].seconds for run in runs)
        for i, timing in enumerate(runs[0])
    }
    device = next((v.device for v in tensors), torch.device("cpu"))
    program.floors = floor_times(program.parts.forward, program.executable.profiled, copy_bandwidth(device))


def tune(owner: str, program: Program, tensors: Sequence[Tensor]) -> None:
    """Cut the graph of a call as measured fastest, for as long as its structure is cached.

    Args:
        owner: the model's class name, for messages.
        program: the program of the call; ``program.tuned`` takes the measurements.
        tensors: the tensors of the call.

    Raises:
        UnsupportedError: the program is not for CUDA, or a CUDA graph of the caller's holds its addresses.
    """
    from gnnc.runtime.cuda.executable import CudaExecutable  # programs for the CPU need none of it

    executable, runner = program.executable, program.runner
    if not isinstance(executable, CudaExecutable):
        raise UnsupportedError(
            f"[{owner}] tune measures how CUDA kernels cut a graph, and this program is for backend "
            f"{program.backend.name!r}: call it as it is, or move the model and its inputs with .cuda()"
        )
    if executable.was_captured:
        raise UnsupportedError(
            f"[{owner}] a CUDA graph that you captured reads memory that tune would free: tune before you "
            "capture, or drop that CUDA graph and call clear_cache() first"
        )
    shares: list[Callable[[], None]] = []

    def structure(*values: Any) -> tuple[Any, ...]:
        assert runner is not None
        outputs, share = runner.rebuild(*values)
        shares.append(share)
        return outputs

    program.tuned = executable.whole(program.bind(executable.tune, structure))(tensors)
    for share in shares:
        share()
