"""The registration of the CPU backend."""

import torch

import gnnc.runtime.reference  # noqa: F401  runs ops without a C++ kernel
from gnnc.ir.row_steps import GRADIENT_STEPS
from gnnc.runtime.backend import Backend
from gnnc.runtime.cpu import library
from gnnc.runtime.cpu.lowering import KERNEL_FILES  # noqa: F401  registers the kernels
from gnnc.target import Target

_MOST_COLUMNS = 2**31 - 1


def create(device: torch.device | None) -> Backend:
    """Return the backend of the C++ kernels, for the best instruction set of this machine."""
    isa = library.load()
    slower = frozenset({"fp16"}) if isa == "avx512" else frozenset({"fp16", "int8"})
    return Backend(
        target=Target(
            "cpu",
            frozenset({"fp32", "bf16", "int8"}),
            rounded=frozenset({"fp16"}),
            slower=slower,
            joint_bodies=True,
            body_products=frozenset({"bf16", "int8"}),
            epilogue_scales=True,
            gradient_steps=GRADIENT_STEPS - {"div_tensor", "fp16_scale"},
            row_bodies=True,
            widens_operands=True,
            fused_gemm_tn=True,
            attention_backward=_MOST_COLUMNS,
            quantized_attention_gradients=True,
            sorts_with_loops=True,
            int32_columns=True,
            static_features=True,
        ),
        chain=("cpu", "reference"),
        device_types=frozenset({"cpu"}),
        description=f"C++ kernels, {isa}",
    )
