"""The registrations of the CUDA backends: for a GPU of this machine, and for architectures without a GPU."""

import re
from dataclasses import replace
from functools import partial

import torch

import gnnc.runtime.reference  # noqa: F401  runs what the kernels leave, as torch's CUDA ops
from gnnc.errors import BackendError
from gnnc.ir.format import EDGE_LIST, RUN_TABLE, WINDOW_TABLE
from gnnc.ir.row_steps import GRADIENT_STEPS
from gnnc.runtime import cuda
from gnnc.runtime.backend import Backend
from gnnc.runtime.cuda.executable import CudaExecutable
from gnnc.runtime.cuda.formats import csr
from gnnc.runtime.cuda.kernels.attention import reads_features
from gnnc.runtime.cuda.kernels.gemm import joins_products
from gnnc.runtime.cuda.lowering import KERNEL_FILES  # noqa: F401  registers the kernels
from gnnc.runtime.cuda.offline import OfflineExecutable
from gnnc.target import CUDA_NARROW_ROWS, Target

OFFLINE = ("sm_80", "sm_90", "sm_100")
"""Architectures that ``cuda-offline`` compiles for; ``cuda-offline:sm_90`` names one."""

TARGET = Target(
    name="cuda",
    precisions=frozenset({"fp32", "fp16", "bf16", "int8"}),
    body_products=frozenset({"fp16", "bf16"}),
    rounds_body_rows=True,
    joins_products=joins_products,
    joint_sums=True,
    stored_steps=True,
    narrow_edges=True,
    tensor_scales=True,
    epilogue_scales=True,
    gradient_steps=GRADIENT_STEPS,
    sums_in_maps=True,
    row_bodies=True,
    row_bodies_in_16_bits=True,
    widens_operands=True,
    attention_bodies=True,
    attention_features=reads_features,
    attention_backward=128,
    body_attention_backward=128,
    quantized_attention_gradients=True,
    fused_gemm_tn=True,
    static_features=True,
    quantized_columns=6272,
    least_quantized_columns=32,
    narrow_rows=CUDA_NARROW_ROWS,
    sorts_with_loops=True,
    int32_columns=True,
    formats=(RUN_TABLE, WINDOW_TABLE, EDGE_LIST),
)

_ARCHITECTURE = re.compile(r"sm_(?P<major>[0-9]+)(?P<minor>[0-9])(?P<letter>[af]?)")
_LETTERS_SINCE = {"": 0, "a": 9, "f": 10}
"""The first major version of the compute capability that has the architectures with a letter."""

_FP8_CAPABILITY = 8, 9
"""The first compute capability with conversions and products of 8-bit floats."""


def target_of(capability: tuple[int, int]) -> Target:
    """Return the target of GPUs of a compute capability."""
    added = {"fp8"} if capability >= _FP8_CAPABILITY else set[str]()
    return replace(TARGET, precisions=TARGET.precisions | added)


def create(device: torch.device | None) -> Backend:
    """Return the backend for a GPU.

    Args:
        device: the GPU; the current one where this is no GPU of the machine.

    Raises:
        BackendError: torch, the driver or the compiler for CUDA is missing.
    """
    compiler = cuda.load()  # says what is missing before anything asks for a GPU
    gpu = _gpu(device)
    return Backend(
        target=target_of(torch.cuda.get_device_capability(gpu)),
        chain=("cuda", "reference"),
        structure_hooks=csr.StreamHooks,
        executable=CudaExecutable,
        description=f"CUDA kernels, {torch.cuda.get_device_name(gpu)}, {compiler}",
        device=gpu,
        device_types=frozenset({"cuda"}),
    )


def _capability(architecture: str) -> tuple[int, int]:
    """Return the compute capability of an architecture such as ``sm_90`` or ``sm_90a``.

    Raises:
        BackendError: the text names no architecture.
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None or int(match["major"]) < _LETTERS_SINCE[match["letter"]]:
        raise BackendError(
            f"backend 'cuda-offline:{architecture}' names no architecture: write sm_ and the compute "
            "capability without the dot, such as 'cuda-offline:sm_90', or 'cuda-offline' for "
            f"{', '.join(OFFLINE)}"
        )
    return int(match["major"]), int(match["minor"])


def _gpu(device: torch.device | None) -> torch.device:
    """Return a GPU with its number: the current one where the device is none of this machine's."""
    if device is None or device.type != "cuda" or device.index not in range(torch.cuda.device_count()):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def create_offline(device: torch.device | None, architecture: str) -> Backend:
    """Return the backend that compiles without a GPU.

    Args:
        device: not used.
        architecture: such as ``sm_90`` or ``sm_90a``; "" for all of ``OFFLINE``.

    Raises:
        BackendError: the compiler for CUDA is missing, or the text names no architecture.
    """
    architectures = (architecture,) if architecture else OFFLINE
    name = f"cuda-offline:{architecture}" if architecture else "cuda-offline"
    return Backend(
        target=replace(target_of(min(map(_capability, architectures))), name=name),
        chain=("cuda", "reference"),
        executable=partial(OfflineExecutable, architectures=architectures),
        description=f"compiles for {', '.join(architectures)} without a device, {cuda.load_compiler()}",
        device_types=frozenset({"cpu"}),
        is_runnable=False,
    )
