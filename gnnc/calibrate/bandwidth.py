"""Copy bandwidth of a device: the limit that measured kernels are compared with."""

import statistics
import time
from functools import cache

import torch

_BYTES = 2**27
"""More than caches hold."""
_REPEATS = 5


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the copy bandwidth in bytes per second, read plus written, of 128 MiB; measured once a process.

    Args:
        device: a CPU or CUDA device.
    """
    source = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.cuda.device_of(source):  # whose stream events are recorded on
        seconds = [_copy(source, target) for _ in range(_REPEATS + 1)][1:]
    return 2 * _BYTES / statistics.median(seconds)


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    if not source.is_cuda:
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
