"""Calls on the stream that has one handle in all threads run on one whose handle says which it is.

CUDA's per-thread default stream is another stream in each thread, under one handle. torch's allocator knows
streams by their handles: what a thread gives back while its kernels still run, it hands to the next who asks
on that handle, and that may be another thread, whose kernels wait for none of the first. Arenas and tables of
ours are kept by handle, too. So a call there runs on a stream from torch's pool, which waits for the caller's
stream, and the caller's stream waits for it.
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
    """Return ``call(*values)``, run on a stream of this thread's between what the current one holds and will.

    While a CUDA graph is being captured the call runs where it is: memory is that graph's alone.

    Args:
        device: whose current stream is CUDA's per-thread default stream.
        call: returns tensors, in containers or not.
        values: its arguments.
    """
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return call(*values)
        outer, own = torch.cuda.current_stream(device), _stream_of(device, get_ident())
        own.wait_stream(outer)
        try:
            with torch.cuda.stream(own):
                results = call(*values)
        finally:
            outer.wait_stream(own)
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.is_cuda:
                result.record_stream(outer)  # where the caller reads it
        return results


@cache
def _stream_of(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Return the stream of a thread: another one's after it may have the same number, and the same stream."""
    return torch.cuda.Stream(device)
