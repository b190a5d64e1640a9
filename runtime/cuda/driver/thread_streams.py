"""A replacement for CUDA's per-thread default stream, which has one handle in all threads.

The per-thread default stream is another stream in each thread, under one handle. torch's allocator knows
streams by their handles: memory that a thread frees while its kernels still run may be reused on the same
handle by another thread, whose kernels do not wait for the first. Arenas and tables are stored by handle,
too. So a call on this stream runs on a stream from torch's pool, which waits for the caller's stream, and
the caller's stream waits for it.
"""

from collections.abc import Callable
from functools import cache
from threading import get_ident
from typing import Any

import torch

from gnnc.torch_private import pytree

PER_THREAD = 2
"""Handle of CUDA's per-thread default stream."""


def on_own_stream(device: torch.device, call: Callable[..., Any], *values: Any) -> Any:
    """Return ``call(*values)``, run on a stream of this thread, in order with the current stream.

    While a CUDA graph is being captured the call runs on the current stream: memory is that graph's alone.

    Args:
        device: the device whose current stream is CUDA's per-thread default stream.
        call: the function; it returns tensors, in containers or not.
        values: arguments of the function.
    """
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return call(*values)
        outer, inner = torch.cuda.current_stream(device), _stream_of(device, get_ident())
        inner.wait_stream(outer)
        try:
            with torch.cuda.stream(inner):
                results = call(*values)
        finally:
            outer.wait_stream(inner)
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.is_cuda:
                result.record_stream(outer)  # where the caller reads it
        return results


@cache
def _stream_of(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Return the stream of a thread; a later thread with the same number gets the same stream."""
    return torch.cuda.Stream(device)
