"""The CUDA backend: absent from this version, and saying so."""

from typing import NoReturn

from gnnc.errors import BackendError


def load() -> NoReturn:
    """Refuse, with what to use instead.

    Raises:
        BackendError: always.
    """
    raise BackendError(
        "backend 'cuda' is not built in this version of gnnc: move the model and its inputs to the CPU "
        "and use backend='cpu' (or 'auto')"
    )
