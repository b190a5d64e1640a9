"""The registration of the reference backend."""

import torch

import gnnc.runtime.reference  # noqa: F401  registers its kernel
from gnnc.runtime.backend import Backend
from gnnc.target import Target


def create(device: torch.device | None) -> Backend:
    """Return the backend that runs every node by its definition in PyTorch, on any device."""
    return Backend(
        target=Target(
            "reference",
            frozenset({"fp32", "fp16", "bf16", "fp8", "int8"}),
            body_products=frozenset({"fp16", "bf16", "int8"}),
            sorts_with_loops=True,
        ),
        chain=("reference",),
        description="plain PyTorch, one op at a time",
    )
