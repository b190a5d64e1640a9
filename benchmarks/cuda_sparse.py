"""Calls of the sparse kernel templates on torch tensors, for the kernels' tests and benchmark."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from cuda_launch import Module, address
from torch import Tensor

from gnnc.runtime.cuda.runs import Runs, build_runs

ELEMENTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int8: "i8"}
THREADS = 256


@dataclass(frozen=True)
class Sparse:
    """A CSR on the GPU with its run table."""

    rowptr: Tensor
    col: Tensor
    runs: Runs

    @property
    def num_dst(self) -> int:
        """Number of rows."""
        return self.rowptr.numel() - 1

    def values(self) -> list[int]:
        """Return the fields of ``gnnc::Runs``."""
        tensors = (self.rowptr, self.col, self.runs.begin, self.runs.place, self.runs.chunk, self.runs.split)
        return [*map(address, tensors), self.col.numel()]


def sparse(rowptr: Tensor, col: Tensor, limit: int, blocks: int) -> Sparse:
    """Put a CSR with its run table onto the GPU."""
    rowptr, col = rowptr.cuda(), col.cuda()
    return Sparse(rowptr, col, build_runs(rowptr, limit, blocks))


@dataclass(frozen=True)
class SpmmConfig:
    """Mirrors ``gnnc::SpmmConfig``; ``blocks`` 0: the default."""

    element: str
    width: int
    reduce: str = "sum"
    value: str = "none"
    scale: str = "none"
    heads: int = 1
    threads: int = THREADS
    blocks: int = 0

    def text(self) -> str:
        """Return the C++ type."""
        types = f"gnnc::Element::{self.element}, {self.width}, gnnc::Reduce::{self.reduce}"
        types += f", gnnc::Value::{self.value}, gnnc::Scale::{self.scale}, {self.heads}, {self.threads}"
        return f"gnnc::SpmmConfig<{types}{f', {self.blocks}' if self.blocks else ''}>"

    def names(self, epilogue: str = "gnnc::StoreFloat") -> tuple[str, str]:
        """Return the names of the kernel and of the one that joins split rows."""
        given = f"{self.text()}, {epilogue}"
        return f"gnnc::spmm<{given}>", f"gnnc::spmm_combine<{given}>"


@cache
def spmm_module(config: SpmmConfig) -> Module:
    """Compile one configuration."""
    return Module('#include "spmm.cuh"', config.names())


def rows16(x: Tensor) -> Tensor:
    """Return x with rows that start at multiples of 16 bytes."""
    step = 16 // x.element_size()
    width = (x.shape[1] + step - 1) // step * step
    padded = torch.full((x.shape[0], width), 77, dtype=x.dtype, device="cuda")
    padded[:, : x.shape[1]] = x
    return padded[:, : x.shape[1]]


class Spmm:
    """One aggregation, ready to run again and again."""

    def __init__(
        self,
        graph: Sparse,
        x: Tensor,
        value: Tensor | None = None,
        x_scale: Tensor | None = None,
        shift: Tensor | None = None,
        reduce: str = "sum",
        **tuning: int,
    ) -> None:
        kind = "none" if value is None else "integer" if value.dtype == torch.int8 else "real"
        scale = "row" if x_scale is not None else "power" if shift is not None else "none"
        heads = 1 if value is None or value.dim() == 1 else value.shape[1]
        config = SpmmConfig(ELEMENTS[x.dtype], x.shape[1], reduce, kind, scale, heads)
        self.config = replace(config, **tuning)
        self.module = spmm_module(self.config)
        width = (x.shape[1] + 3) // 4 * 4
        self.out = torch.full((graph.num_dst, width), float("nan"), device="cuda")
        staging = torch.empty(graph.runs.slots, width, device="cuda")
        self.kept = (graph, x, value, x_scale, shift, staging)
        tensors = (value, x_scale, shift, staging)
        arguments = [*graph.values(), address(x), x.stride(0) * x.element_size(), *map(address, tensors)]
        self.arguments = [*arguments, address(self.out), width]
        self.grids = graph.runs.chunk.numel() - 1, graph.runs.split.shape[0]

    def __call__(self) -> Tensor:
        """Run it; return the result, which the next call overwrites."""
        spmm, combine = self.config.names()
        self.module.launch(spmm, self.grids[0], self.config.threads, *self.arguments)
        self.module.launch(combine, self.grids[1], 256, *self.arguments)
        return self.out[:, : self.config.width]
