"""Loader of the C++ kernels, whose operators are `torch.ops.gnnc_cpu.*`."""

from functools import cache
from pathlib import Path

import torch

# gnnc/libgnnc_cpu.so, seen from gnnc/runtime/cpu/ of the package or of the tree.
PATH = Path(__file__).parents[2] / "libgnnc_cpu.so"


@cache
def load() -> str:
    """Load the kernels once and return the instruction set that they use.

    Raises:
        gnnc.BackendError: the library is missing or does not load, or `GNNC_ISA` names an instruction
            set that this machine lacks.
    """
    try:
        torch.ops.load_library(str(PATH))  # pyright: ignore[reportUnknownMemberType]
        return torch.ops.gnnc_cpu.isa()
    except (OSError, RuntimeError) as error:
        from gnnc.errors import BackendError

        if not PATH.exists():
            raise BackendError(
                f"the CPU kernels are not built: {PATH} is missing; "
                "run `pip install -e .` in the folder of gnnc"
            ) from None
        raise BackendError(f"the CPU kernels cannot be used: {error}") from error
