"""What ``CompiledModel.profile`` does with a program: the time of each op, and what its bytes alone need."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnc.calibrate.bandwidth import copy_bandwidth
from gnnc.compiler.program import Program
from gnnc.cost.model import floor_times

_RUNS = 5


def profile(program: Program, tensors: Sequence[Tensor]) -> None:
    """Run a program a few times; it notes what was measured in ``timings`` and ``floors``.

    Args:
        program: serves the call.
        tensors: of the call.
    """
    runs = [program.profiled(tensors)[1] for _ in range(_RUNS)]
    program.timings = {
        timing.node: statistics.median(run[i].seconds for run in runs) for i, timing in enumerate(runs[0])
    }
    device = next((v.device for v in tensors), torch.device("cpu"))
    program.floors = floor_times(program.parts.forward, program.executable.profiled, copy_bandwidth(device))
