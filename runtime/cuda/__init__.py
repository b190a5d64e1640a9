"""The CUDA backend."""

from functools import cache

import torch

from gnnc.errors import BackendError
from gnnc.runtime.cuda.driver import nvrtc


@cache
def load() -> str:
    """Check once that CUDA kernels can be compiled and run here; return a description of the compiler.

    Raises:
        BackendError: torch was built without CUDA, this machine has no device or driver, or NVRTC is
            missing or of another version than torch's CUDA.
    """
    if torch.version.cuda is None:
        raise BackendError(
            "backend 'cuda' needs a CUDA build of torch, and this one is for the CPU: "
            "use backend='cpu' (or 'auto')"
        )
    if not torch.cuda.is_available():
        raise BackendError(
            "backend 'cuda' finds no CUDA device or driver on this machine: use backend='cpu' (or 'auto')"
        )
    found, major = nvrtc.compiler_version()[0], nvrtc.torch_major()
    if found != major:
        raise nvrtc.missing(f"NVRTC is of CUDA {found} and torch of CUDA {major}")
    return load_compiler()


@cache
def load_compiler() -> str:
    """Check once that kernels can be compiled here, with or without a device; return a description.

    Raises:
        BackendError: NVRTC, its Python interface or CUDA's headers are missing.
    """
    major, minor = nvrtc.compiler_version()
    nvrtc.find_compiler()
    nvrtc.toolkit_headers()
    return f"NVRTC {major}.{minor}"
