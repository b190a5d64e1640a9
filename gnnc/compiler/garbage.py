"""A build that Python's garbage collector does not interrupt.

The first export of a process imports and allocates tens of thousands of objects, which stay. The collector
takes that growth for a reason to walk all that the process holds, torch and sympy included: a fifth of the
time from ``gnnc.compile`` to the first result, for next to nothing that it finds. Afterwards it is due as
before, but a process that only calls what it has compiled gives it no reason.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected(*, unless: bool = False) -> Iterator[None]:
    """Leave cycles of references until afterwards; a collector that was off before stays off.

    Args:
        unless: what runs meanwhile may leave large tensors in cycles, so the collector stays as it is.
    """
    if unless or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
