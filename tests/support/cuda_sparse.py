"""Calls of the sparse kernel templates on torch tensors, for the kernels' tests and benchmark."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from cuda_launch import Module, address
from torch import Tensor

from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import MOST_WHOLE, CudaEmitter, round_up
from gnnc.runtime.cuda.formats.run_table import Cut, Runs, build_runs
from gnnc.runtime.cuda.formats.tables import RunTable, in_fours
from gnnc.runtime.cuda.formats.window_table import (
    WindowRuns,
    WindowTable,
    build_window_table,
    pays,
    shared_bytes,
    sizes_of,
    slices_of,
    window_rows,
)
from gnnc.runtime.cuda.kernels.spmm import ELEMENTS

NBYTES = {name: dtype.itemsize for dtype, name in ELEMENTS.items()}


@dataclass(frozen=True)
class Sparse:
    """A CSR on the GPU with its run table, for rows of so many bytes."""

    rowptr: Tensor
    col: Tensor
    table: Runs
    multiprocessors: int
    staged_cut: Cut
    row_bytes: int = 64

    @cached_property
    def staged(self) -> WindowRuns:
        """The edges by node block."""
        window = window_rows(self.row_bytes)
        sizes = sizes_of(self.rowptr, self.col, self.staged_cut)
        runs = build_window_table(self.rowptr, self.col, sizes, self.multiprocessors, window, always=True)
        assert runs is not None
        return runs

    @property
    def is_staged(self) -> bool:
        """Return whether programs sum rows of this size through the window table, without weights."""
        edges, blocks = self.col.numel(), self.multiprocessors
        given = edges, self.num_dst, blocks, self.row_bytes
        return pays(edges, *given) and pays(self.staged.near, *given)

    @cached_property
    def runs(self) -> RunTable:
        """Return the arguments of a launch that describe the table."""
        return RunTable(self.table, self.multiprocessors, self.row_bytes)

    @property
    def num_dst(self) -> int:
        """Number of rows."""
        return self.rowptr.numel() - 1

    def gathering(self, x: Tensor) -> "Sparse":
        """Return the same for the rows of x."""
        return replace(self, row_bytes=x.shape[1] * x.element_size())

    def values(self) -> list[int]:
        """Return the fields of ``gnnc::Runs``."""
        return [address(self.rowptr), address(self.col), *self.runs.fields]


def sparse(
    rowptr: Tensor, col: Tensor, cut: Cut, multiprocessors: int, staged_cut: Cut | None = None
) -> Sparse:
    """Put a CSR with its run table onto the GPU; by node block it is cut alike if nothing else is given."""
    rowptr, col = rowptr.cuda(), in_fours(col.cuda())
    runs = build_runs(rowptr, col.numel(), cut, multiprocessors)
    return Sparse(rowptr, col, runs, multiprocessors, staged_cut or cut)


STORES = """
#include "common/row_steps.cuh"
template <int kStride>
struct StoreHalves {  // what goes before an op in fp16
  __half* out;
  template <class Tile>
  __device__ void operator()(const Tile& tile, int64_t row) const {
    const auto rounded = [&](int i) { return gnnc::step::from_float<__half>(tile.v[i]); };
    gnnc::step::store_row<kStride>(tile, out + row * kStride, rounded);
  }
};
template <int kStride>
struct StoreFloats {
  float* out;
  template <class Tile>
  __device__ void operator()(const Tile& tile, int64_t row) const {
    gnnc::step::store<kStride, true>(tile, out + row * kStride);
  }
};
template <int kStride>
struct StoreBytes {  // what a requantizing epilogue with a static scale writes
  signed char* out;
  template <class Tile>
  __device__ void operator()(const Tile& tile, int64_t row) const {
    const auto scaled = [&](int i) { return __fmul_rn(tile.v[i], 0.01f); };
    gnnc::step::store_quantized<kStride>(tile, out + row * kStride, scaled);
  }
};
"""
EPILOGUES = {torch.float32: "StoreFloats", torch.float16: "StoreHalves", torch.int8: "StoreBytes"}


def epilogue_of(dtype: torch.dtype, width: int) -> str:
    """Return the name of the one that stores rows as far apart as programs put what no kernel gathers."""
    return f"{EPILOGUES[dtype]}<{CudaEmitter.padded(width, dtype, gathered=False)}>"


@dataclass(frozen=True)
class SpmmConfig:
    """Mirrors ``gnnc::SpmmConfig``; ``threads`` 0: the default."""

    element: str
    width: int
    reduce: str = "sum"
    value: str = "none"
    scale: str = "none"
    heads: int = 1
    threads: int = 0
    step: int = 4

    def text(self) -> str:
        """Return the C++ type."""
        types = f"gnnc::Element::{self.element}, {self.width}, gnnc::Reduce::{self.reduce}"
        types += f", gnnc::Value::{self.value}, gnnc::Scale::{self.scale}, {self.heads}"
        tuning = f", {self.threads}, {self.step}" if self.threads else ""
        return f"gnnc::SpmmConfig<{types}{tuning}>"

    def name(self, epilogue: str = "", form: str = "spmm") -> str:
        """Return the name of the kernel: ``spmm``, ``spmm_sliced`` or ``spmm_staged``."""
        epilogue = epilogue or epilogue_of(torch.float32, self.width)
        return f"gnnc::{form}<{self.text()}, {epilogue}>"


SPMM_SOURCE = '#include "sparse/spmm.cuh"' + STORES


def form_of(row_bytes: int) -> str:
    """Return the kernel that programs take for rows of so many bytes that are not summed by node block."""
    return "spmm_sliced" if row_bytes > MOST_WHOLE else "spmm"


@cache
def spmm_module(name: str) -> Module:
    """Compile one configuration."""
    return Module(SPMM_SOURCE, (name,))


def past(x: Tensor) -> float:
    """Return what stands past the width of rows: nothing may come of it."""
    return float("nan") if x.is_floating_point() else 77


def rows_of_programs(x: Tensor) -> Tensor:
    """Return x with rows as far from one another as programs put them."""
    padded = torch.empty(x.shape[0], CudaEmitter.padded(x.shape[1], x.dtype), dtype=x.dtype, device="cuda")
    padded[:, : x.shape[1]] = x
    return padded[:, : x.shape[1]]


def rows16(x: Tensor) -> Tensor:
    """Return x with rows that start at multiples of 16 bytes."""
    step = 16 // x.element_size()
    width = (x.shape[1] + step - 1) // step * step
    padded = torch.full((x.shape[0], width), past(x), dtype=x.dtype, device="cuda")
    padded[:, : x.shape[1]] = x
    return padded[:, : x.shape[1]]


def weighted16(x: Tensor, shift: Tensor) -> Tensor:
    """Return quantized values as ``rows16`` does, each row with its weight: ``gnnc::weight_place``."""
    rows = rows16(x)
    whole = rows.as_strided((x.shape[0], rows.stride(0)), (rows.stride(0), 1))
    weight = (128 >> shift.int()).to(torch.uint8).view(torch.int8)
    whole[:, x.shape[1] // 16 * 16 + 15] = weight.to(rows.device)
    return rows


def heads16(x: Tensor, heads: int) -> Tensor:
    """Return x with heads that start at multiples of 16 bytes."""
    step, head_width = 16 // x.element_size(), x.shape[1] // heads
    if heads == 1 or head_width % step == 0:
        return x
    padded = x.new_full((x.shape[0], heads, (head_width + step - 1) // step * step), past(x))
    padded[:, :, :head_width] = x.view(-1, heads, head_width)
    return padded.flatten(1)


def staging_for(slots: int, words: int, slices: int = 1) -> tuple[Tensor, Tensor]:
    """Return memory for parts of rows, and the counters of those that have arrived."""
    memory = torch.empty(slots, words, device="cuda")
    return memory, torch.zeros(slots * slices, dtype=torch.int32, device="cuda")


class Spmm:
    """One aggregation, ready to run again and again; without a form, by the kernel that programs take."""

    def __init__(
        self,
        graph: Sparse,
        x: Tensor,
        value: Tensor | None = None,
        x_scale: Tensor | None = None,
        shift: Tensor | None = None,
        in_row: bool = False,
        reduce: str = "sum",
        to: torch.dtype = torch.float32,
        form: str | None = None,
        **tuning: int,
    ) -> None:
        width, is_sum = x.shape[1], reduce in ("sum", "mean")
        heads = 1 if value is None or value.dim() == 1 else value.shape[1]
        if x.dtype == torch.int8 and is_sum:
            x = heads16(x, heads)
        graph = graph.gathering(x)
        kind = "none" if value is None else "integer" if value.dtype == torch.int8 else "real"
        scale = "row" if x_scale is not None else "power" if shift is not None else "none"
        scale = "in_row" if in_row else scale
        config = SpmmConfig(ELEMENTS[x.dtype], width, reduce, kind, scale, heads)
        self.config = replace(config, **tuning)
        if form is None:
            form = form_of(graph.row_bytes) if heads == 1 else "spmm"
            if value is None and is_sum and graph.is_staged:
                form = "spmm_staged"
        self.staged = staged = form == "spmm_staged"
        self.x_scale, self.value = x_scale, value
        self.name = self.config.name(epilogue_of(to, width), form)
        self.module = spmm_module(self.name)
        stride = CudaEmitter.padded(width, to, gathered=False)
        self.out = torch.full((graph.num_dst, stride), 99, device="cuda", dtype=to)
        table = WindowTable(graph.staged, x.shape[0]) if staged else graph.runs
        self.shared = shared_bytes(graph.row_bytes, scale) if staged else 0
        words = 2 * round_up(x.shape[1], 4)
        staging, self.arrived = staging_for(table.slots, words, slices_of(graph.row_bytes))
        self.operands = (graph, table, x, value, x_scale, shift, staging)
        tensors = (value, x_scale, shift, staging, self.arrived)
        given = [address(graph.rowptr), *table.fields] if staged else graph.values()
        arguments = [*given, address(x), x.stride(0) * x.element_size(), *map(address, tensors)]
        self.arguments = [*arguments, address(self.out)]
        self.grid = table.blocks

    def __call__(self) -> Tensor:
        """Run it; return the result, which the next call overwrites."""
        self.module.launch(self.name, self.grid, AS_COMPILED, *self.arguments, shared=self.shared)
        return self.out[:, : self.config.width]


@dataclass(frozen=True)
class AttentionConfig:
    """Mirrors ``gnnc::AttentionConfig``."""

    element: str
    width: int
    heads: int
    additive: bool
    edge: bool
    threads: int = 0
    step: int = 4

    def text(self) -> str:
        """Return the C++ type."""
        flags = f"{str(self.additive).lower()}, {str(self.edge).lower()}, Constants"
        flags += f", {self.threads}, {self.step}" if self.threads else ""
        return f"gnnc::AttentionConfig<gnnc::Element::{self.element}, {self.width}, {self.heads}, {flags}>"

    def names(self) -> tuple[str, str]:
        """Return the names of the kernel and of the one for alpha."""
        stores = epilogue_of(torch.float32, self.width)
        return f"gnnc::attention<{self.text()}, {stores}>", f"gnnc::attention_weights<{self.text()}>"

    @staticmethod
    def source(slope: float = 0.2, eps: float = 1e-16) -> str:
        """Return a translation unit."""
        constants = f"static constexpr float kSlope = {slope}f, kEps = {eps}f;"
        return f'#include "sparse/attention.cuh"{STORES}struct Constants {{ {constants} }};\n'


@cache
def attention_module(config: AttentionConfig) -> Module:
    """Compile one configuration."""
    return Module(config.source(), config.names())


class Attention:
    """One attention layer's aggregation, ready to run again and again."""

    def __init__(
        self,
        graph: Sparse,
        x: Tensor,
        heads: int,
        a_src: Tensor | None = None,
        a_dst: Tensor | None = None,
        edge: Tensor | None = None,
        x_scale: Tensor | None = None,
        **tuning: int,
    ) -> None:
        config = AttentionConfig(ELEMENTS[x.dtype], x.shape[1], heads, a_src is not None, edge is not None)
        self.config = replace(config, **tuning)
        self.module = attention_module(self.config)
        stride = CudaEmitter.padded(x.shape[1], torch.float32, gathered=False)
        self.out = torch.full((graph.num_dst, stride), float("nan"), device="cuda")
        x = heads16(x, heads)
        graph = graph.gathering(x)
        words = round_up(x.shape[1], 4) + round_up(2 * heads, 4)
        staging, self.arrived = staging_for(graph.runs.slots, words)
        stats = torch.empty(graph.num_dst, heads, 2, device="cuda")
        self.operands = (graph, x, heads, a_src, a_dst, edge, x_scale, staging, stats)
        tensors = (x_scale, a_src, a_dst, edge, stats, staging, self.arrived)
        features = 0, 0
        self.given = [
            *graph.values(),
            address(x),
            x.stride(0) * x.element_size(),
            *map(address, tensors),
            *features,
        ]
        self.arguments = [*self.given, address(self.out)]
        self.grid = graph.runs.blocks

    def __call__(self) -> Tensor:
        """Run it; return the result, which the next call overwrites."""
        self.module.launch(self.config.names()[0], self.grid, AS_COMPILED, *self.arguments)
        return self.out[:, : self.config.width]

    def alpha(self) -> Tensor:
        """Return the attention weights, after a run."""
        out = torch.full((self.operands[0].col.numel(), self.config.heads), float("nan"), device="cuda")
        self.module.launch(self.config.names()[1], self.grid, AS_COMPILED, *self.given, address(out))
        return out


@dataclass(frozen=True)
class SddmmConfig:
    """Mirrors ``gnnc::SddmmConfig``; ``threads`` 0: the default."""

    element: str
    width: int
    op: str = "dot"
    heads: int = 1
    scaled: bool = False
    threads: int = 0
    step: int = 4

    def name(self) -> str:
        """Return the kernel's name."""
        given = f"gnnc::Element::{self.element}, {self.width}, gnnc::EdgeOp::{self.op}, {self.heads}"
        given += f", {str(self.scaled).lower()}{f', {self.threads}, {self.step}' if self.threads else ''}"
        return f"gnnc::sddmm<gnnc::SddmmConfig<{given}>>"


@cache
def sddmm_module(config: SddmmConfig) -> Module:
    """Compile one configuration."""
    return Module('#include "sparse/sddmm.cuh"', (config.name(),))


class Sddmm:
    """One edge product, ready to run again and again."""

    def __init__(
        self,
        graph: Sparse,
        a: Tensor,
        b: Tensor,
        op: str = "dot",
        heads: int = 1,
        a_scale: Tensor | None = None,
        b_scale: Tensor | None = None,
        **tuning: int,
    ) -> None:
        graph = graph.gathering(b)
        config = SddmmConfig(ELEMENTS[b.dtype], b.shape[1], op, heads, a_scale is not None)
        self.config = replace(config, **tuning)
        self.module = sddmm_module(self.config)
        columns = heads if op == "dot" else b.shape[1]
        self.out = torch.full((graph.col.numel(), columns), float("nan"), device="cuda")
        self.operands = (graph, a, b, a_scale, b_scale)
        rows = [address(a), a.stride(0) * a.element_size(), address(b), b.stride(0) * b.element_size()]
        tensors = (a_scale, b_scale, self.out)
        self.arguments = [*graph.values(), *rows, *map(address, tensors)]
        self.grid = graph.runs.blocks

    def __call__(self) -> Tensor:
        """Run it; return the result, which the next call overwrites."""
        self.module.launch(self.config.name(), self.grid, AS_COMPILED, *self.arguments)
        return self.out
