"""The CUDA backend."""

from functools import cache

import torch

from gnnc.errors import BackendError
from gnnc.runtime.cuda import build


@cache
def load() -> str:
    """Check once that CUDA kernels can be compiled and run here; return a description.

    Raises:
        BackendError: this torch has no CUDA, there is no device or driver, or no NVRTC.
    """
    version = torch.version.cuda
    if version is None:
        raise BackendError(
            "backend 'cuda' needs a CUDA build of torch, and this one is for the CPU: "
            "use backend='cpu' (or 'auto')"
        )
    if not torch.cuda.is_available():
        raise BackendError(
            "backend 'cuda' finds no CUDA device or driver on this machine: use backend='cpu' (or 'auto')"
        )
    compiler = load_compiler()
    major = int(version.split(".")[0])
    if build.compiler_version()[0] != major:
        raise BackendError(
            f"NVRTC is of CUDA {build.compiler_version()[0]} and torch of CUDA {major}: install "
            f"nvidia-cuda-nvrtc of CUDA {major}"
        )
    return f"{torch.cuda.get_device_name()}, {compiler}"


@cache
def load_compiler() -> str:
    """Check once that kernels can be compiled here, with or without a device; return a description.

    Raises:
        BackendError: NVRTC, its Python interface or CUDA's headers are missing.
    """
    major, minor = build.compiler_version()
    build.find_compiler()
    build.toolkit_headers()
    return f"NVRTC {major}.{minor}"
