"""States of torch's random generators: a run draws again what an earlier one drew."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SEED = 0


@contextmanager
def seeded() -> Iterator[None]:
    """Draw from one fixed seed within the block; the generators of the caller stay as they are."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(_SEED)
        yield


def generator_states() -> list[Tensor]:
    """Return the states of the generators of all devices."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


@contextmanager
def drawing_from(states: list[Tensor]) -> Iterator[None]:
    """Draw from the given states within the block; the generators of the caller stay as they are."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state_all(states[1:])
        yield
