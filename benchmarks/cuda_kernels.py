"""Times the sparse CUDA kernels beside cuSPARSE, as ratios and as fractions of the floor, in one run.

    python benchmarks/cuda_kernels.py [--graphs arxiv reddit products] [--widths 64 ...]
    python benchmarks/cuda_kernels.py --spmm-widths --graphs products

The floor of a kernel is the larger of its compulsory bytes (every input and output once) over the
bandwidth of a device copy, and the time of gathering the same rows, their scales and the edge weights without
using them; both are measured in this run. The gather is the fastest of several: through the same table as
the sum, and edge by edge in the order of the CSR, ignoring rows (``gather_edges``).
(The issue rate of integer operations is left out; including it could only raise a floor.)
Beside the floor of a sum at every width stands the time of the fastest gather that also stores as many bytes
as the sum's results: loads and stores share the bandwidth of L2, so a wide sum cannot reach the floor alone.
The peer is torch.sparse CSR (cuSPARSE) in FP32, with 32-bit or 64-bit indices, whichever is faster.
"""

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.formats.run_table import Cut, cut_for
from gnnc.runtime.cuda.formats.window_table import WindowTable, shared_bytes, window_cut_for
from gnnc.runtime.cuda.kernels.epilogue import truth
from gnnc.target import CUDA_NARROW_ROWS

sys.path.extend(str(Path(__file__).resolve().parents[1] / part) for part in ("", "tests/support"))

import measure
from cuda_launch import Module, address, compile_kernels
from cuda_sparse import (
    ELEMENTS,
    NBYTES,
    SPMM_SOURCE,
    Attention,
    Sddmm,
    Sparse,
    Spmm,
    SpmmConfig,
    epilogue_of,
    form_of,
    rows_of_programs,
    sparse,
)
from graphs import SHAPES, generate

RESULTS = Path(__file__).resolve().parent / "results" / "cuda-kernels.json"
SPMM_RESULTS = RESULTS.with_name("cuda-spmm-widths.json")
SPMM_WIDTHS = (16, 32, 47, 64, 128, 256, 602)
ONE_SCALE = "int8 edge weights, one scale"
LEAST_MS, MOST_CALLS = 1.0, 50
"""Least milliseconds of a timed loop of calls, and its most calls."""
BLOCKS = (768, 1024)
"""Threads of the gather kernels: the faster number depends on the row."""
GATHER = """
#include "sparse/spmm.cuh"
namespace gnnc {
template <class Layout_, bool kScaled, bool kValued_, int kStep_ = 8, bool kStores = false>
struct GatherBody {
  using Layout = Layout_;
  static constexpr bool kBundle = true, kMasks = false, kWhole = false, kOwns = false;
  static constexpr bool kValued = kValued_;
  static constexpr int kStep = kStep_;
  struct Extra {
    float scale[4];
    float value[4];
  };
  const float* scales;
  float* result = nullptr;  // of the slice
  int64_t stride = 0, columns = 0;
  unsigned int seen = 0;
  template <class Work>
  __device__ void begin(const Work&, int) {}
  // Where four threads read a row, each loads the scale of one edge.
  __device__ void load(Extra& e, const Four& four, const int (&source)[4], unsigned int mask) {
    const int own = Layout::piece() % 4;
    for (int i = 0; i < 4 && kValued; ++i) e.value[i] = four.value[i];
    for (int i = 0; i < 4 && kScaled; ++i) {
      e.scale[i] = load_if((mask >> i & 1) && (Layout::kPieces < 4 || i == own), scales + source[i], 0.0f);
    }
  }
  template <class Window>
  __device__ void load_near(Extra& e, const unsigned int (&place)[4], const Window& window) {
    for (int i = 0; i < 4; ++i) {
      if constexpr (kScaled) e.scale[i] = window.template factor<float>(place[i]);
    }
  }
  // Stores a value in every column of the row where kStores, neighboring threads side by side.
  template <class Work>
  __device__ void finish(const Work& work, int) {
    if constexpr (kStores) {
      const float some = __uint_as_float(seen);
#pragma unroll
      for (int i = 0; i < Layout::kColumns / 4; ++i) {
        const int column = (i * Layout::kPieces + Layout::piece()) * 4;
        if (column >= columns) continue;
        store_vector<true>(result + work.row() * stride + column, Vector<float, 4>{{some, some, some, some}});
      }
    }
  }
  __device__ void end_run(const Run&) {}
  template <bool kMasked>
  __device__ void add(const uint4 (&x)[4], const Extra& e, unsigned int) {
    for (int i = 0; i < 4; ++i) {
      seen ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
      if (kScaled) seen ^= __float_as_uint(e.scale[i]);
      if (kValued) seen ^= __float_as_uint(e.value[i]);
    }
  }
};
template <Element kElement, int kWidth, bool kScaled, bool kValued, int kMost>
struct GatherOnly {
  static constexpr bool kSliced = kWidth * bytes_of(kElement) > kMostWhole;
  using Slices = gnnc::Slices<kElement, kWidth, kSliced ? slice_bytes(kElement) : kMostWhole>;
  using Layout = RowLayout<kElement, (Slices::kCount > 1 ? Slices::kWidth : kWidth)>;
  template <bool kStores>
  using Body = GatherBody<Layout, kScaled, kValued, 8, kStores>;
  static constexpr int kThreads = fitting({kMost, 8}, Layout::kPieces, 0, kValued).threads;
};
template <Element kElement, int kWidth, bool kScaled, bool kValued, int kMost, bool kStores>
__global__ void __launch_bounds__((GatherOnly<kElement, kWidth, kScaled, kValued, kMost>::kThreads), 1)
    gather_only(Runs runs, const char* x, int64_t stride, const float* scales, const float* values,
                unsigned int* out, float* result, int64_t result_stride) {
  using G = GatherOnly<kElement, kWidth, kScaled, kValued, kMost>;
  using Layout = typename G::Layout;
  using Body = typename G::template Body<kStores>;
  __shared__ int next[G::Slices::kCount];
  __shared__ Feed<Layout, Body> feed[G::kThreads / 32];
  open_queues(next, feed[0].runs.preassigned());
  Body body{scales};
  for (int slice = 0; slice < G::Slices::kCount; ++slice) {
    const Gathered rows = G::Slices::of(x, stride, slice);
    body.result = result + slice * G::Slices::kWidth;
    body.stride = result_stride;
    body.columns = min(result_stride - slice * G::Slices::kWidth, static_cast<int64_t>(Layout::kPassColumns));
    for_runs<Layout>(runs, values, rows, next + slice, feed[threadIdx.x / 32], body);
  }
  if (body.seen == 0x12345678u) *out = 1;
}
// Each warp has neighboring edges: a share of them where kShares, else it takes turns with all others. The
// last edges, fewer than a step, are left out. Where kStores, each step writes its share of so many pieces.
template <Element kElement, int kWidth, bool kScaled, bool kValued, bool kShares, bool kStores>
__global__ void __launch_bounds__(1024, 1)
    gather_edges(const int* col, int64_t edges, const char* x, int64_t stride, const float* scales,
                 const float* values, unsigned int* out, uint4* result, int64_t pieces) {
  using Slices = gnnc::Slices<kElement, kWidth, 128>;
  using Layout = RowLayout<kElement, (Slices::kCount > 1 ? Slices::kWidth : kWidth)>;
  static_assert(Layout::kPasses == 1, "a slice is gathered at once");
  constexpr int kLanes = Layout::kPieces, kEach = 8, kEdges = Layout::kSlots * kEach;
  constexpr int kOwn = kLanes < kEach ? kEach / kLanes : 1;  // edges whose scale and weight a thread loads
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32, steps = edges / kEdges;
  const int64_t begin = kShares ? steps * warp / warps : warp, by = kShares ? 1 : warps;
  const int64_t end = kShares ? steps * (warp + 1) / warps : steps;
  unsigned int seen = 0;
  for (int slice = 0; slice < Slices::kCount; ++slice) {
    const Gathered rows = Slices::of(x, stride, slice);
    const bool there = Layout::piece() < rows.pieces;
    const char* first = rows.first + Layout::piece() * 16;
    for (int64_t step = begin; step < end; step += by) {
      const int64_t edge = step * kEdges + Layout::slot() * kEach;
      int source[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(col + edge + i));
        source[i] = four.x, source[i + 1] = four.y, source[i + 2] = four.z, source[i + 3] = four.w;
      }
      uint4 v[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) v[i] = gather_if(there, row_at(first, source[i], rows.stride));
#pragma unroll
      for (int i = 0; i < kOwn && Layout::piece() < kEach; ++i) {
        const int64_t own = edge + i * kLanes + Layout::piece();
        if (kScaled) seen ^= __float_as_uint(__ldg(scales + __ldg(col + own)));
        if (kValued) seen ^= __float_as_uint(__ldg(values + own));
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) seen ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
      if constexpr (kStores) {
        const int64_t turn = slice * steps + step, turns = Slices::kCount * steps;
        const int64_t past = pieces * (turn + 1) / turns;
        for (int64_t piece = pieces * turn / turns + threadIdx.x % 32; piece < past; piece += 32) {
          result[piece] = make_uint4(seen, seen, seen, seen);
        }
      }
    }
  }
  if (seen == 0x12345678u) *out = 1;
}
template <Element kElement, int kWidth, bool kScaled>
using StagedSum =
    Staged<SpmmConfig<kElement, kWidth, Reduce::sum, Value::none, kScaled ? Scale::row : Scale::none>>;
template <Element kElement, int kWidth, bool kScaled>
__global__ void __launch_bounds__((StagedSum<kElement, kWidth, kScaled>::kThreads), 1)
    gather_staged(StagedRuns runs, const char* x, int64_t stride, const float* scales, unsigned int* out) {
  using S = StagedSum<kElement, kWidth, kScaled>;
  constexpr int kStep = S::kResidency.step;
  extern __shared__ int4 memory[];
  __shared__ StagedShare share;
  __shared__ typename S::Feed feed[S::kThreads / 32];
  typename S::Window window(memory);
  GatherBody<typename S::Layout, kScaled, false, kStep> body{scales};
  for (int slice = 0; slice < S::Slices::kCount; ++slice) {
    const Gathered rows = S::Slices::of(x, stride, slice);
    for_staged_runs<typename S::Layout>(runs, rows, scales, window, &share, feed[threadIdx.x / 32], body);
  }
  if (body.seen == 0x12345678u) *out = 1;
}
}
"""


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


class Kind(NamedTuple):
    """A sum that is timed at every width.

    Attributes:
        label: label of its row in the table.
        element: type of x: fp32, fp16, bf16 or int8.
        weights: whether edges have weights.
        scales: whether rows have scales.
        chosen: whether x has the type that int8 programs choose at that width: int8, or bf16.
        to: type of the results.
    """

    label: str
    element: str
    weights: bool = False
    scales: bool = False
    chosen: bool = False
    to: str = "fp32"

    @property
    def peer(self) -> str:
        """The label of the same sum in fp16."""
        return "fp16" + (" edge weights" if self.weights else "") + ("" if self.to == "fp32" else " to fp16")

    def at(self, width: int) -> "Kind":
        """Return the kind that runs at a width."""
        if not self.chosen or CUDA_NARROW_ROWS.pays("row", "sum", width, width):
            return self
        return self._replace(element="bf16", scales=False)

    def config(self, width: int) -> SpmmConfig:
        """Return the configuration of the kernel at a width."""
        value, scale = "real" if self.weights else "none", "row" if self.scales else "none"
        return SpmmConfig(ELEMENTS[DTYPES[self.element]], width, value=value, scale=scale)


SPMM_KINDS = (
    Kind("fp32", "fp32"),
    Kind("fp16", "fp16"),
    Kind("int8", "int8"),
    Kind("int8 row scales", "int8", scales=True),
    Kind("int8 program, row scales", "int8", scales=True, chosen=True),
    Kind("fp16 edge weights", "fp16", weights=True),
    Kind("int8 edge weights", "int8", weights=True, scales=True),
    Kind("int8 program, edge weights", "int8", weights=True, scales=True, chosen=True),
    Kind(ONE_SCALE, "int8", weights=True),
    Kind("fp16 to fp16", "fp16", to="fp16"),
    Kind("int8 to int8", "int8", to="int8"),
    Kind("int8 row scales to int8", "int8", scales=True, to="int8"),
    Kind("fp16 edge weights to fp16", "fp16", weights=True, to="fp16"),
    Kind("int8 edge weights to int8", "int8", weights=True, scales=True, to="int8"),
    Kind(f"{ONE_SCALE} to int8", "int8", weights=True, to="int8"),
)


def median_ms(call: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median over ``repeats`` of the mean of several calls, by device events.

    There are so many calls that the latency of the first launch, some microseconds, is a hundredth of them.
    """
    mean_ms(call, 2)
    inner = min(max(round(LEAST_MS / mean_ms(call, 1)), 1), MOST_CALLS)
    return statistics.median(mean_ms(call, inner) for _ in range(repeats))


def mean_ms(call: Callable[[], Any], count: int) -> float:
    """Return the mean time of ``count`` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


@cache
def copy_gbs() -> float:
    """Return the bytes read plus written per second by a large device copy."""
    source = torch.ones(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e6


def machine() -> dict[str, Any]:
    """Return the device and the versions of its software."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return measure.machine() | {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size // 2**20,
        "driver, clock": driver,
        "copy_gbs": round(copy_gbs()),
        "cuda": torch.version.cuda,
    }


def make_csr(name: str) -> tuple[Tensor, Tensor]:
    """Return rowptr (int64) and col (int32) of a graph of the generator, made on the GPU."""
    nodes = SHAPES[name].nodes
    src, dst = generate(name, device="cuda")
    dst, order = torch.sort(dst, stable=True)
    rowptr = torch.zeros(nodes + 1, dtype=torch.int64, device="cuda")
    rowptr[1:] = torch.bincount(dst, minlength=nodes).cumsum(0)
    return rowptr, src[order].int()


def cusparse(rowptr: Tensor, col: Tensor, width: int, dot: bool) -> dict[str, float]:
    """Return the times of ``A @ x`` and, where ``dot``, of ``sampled_addmm``, in FP32."""
    nodes = rowptr.numel() - 1
    ones = torch.ones(col.numel(), device="cuda")
    x = torch.randn(nodes, width, device="cuda")
    best = {"spmm": float("inf"), "sddmm": float("inf")}
    for kind in (torch.int32, torch.int64):
        adjacency = torch.sparse_csr_tensor(rowptr.to(kind), col.to(kind), ones, (nodes, nodes))
        best["spmm"] = min(best["spmm"], median_ms(lambda a=adjacency: a @ x, 5))
        if dot:
            time = median_ms(lambda a=adjacency: torch.sparse.sampled_addmm(a, x, x.t(), beta=0.0), 3)
            best["sddmm"] = min(best["sddmm"], time)
    return best


def gather_names(element: str, width: int, kind: str, scaled: bool, valued: bool) -> tuple[str, ...]:
    """Return the C++ names of the gather kernels, the fastest of which counts.

    ``kind``: ``only`` gathers; ``staged`` gathers with near rows in windows too; ``stored`` gathers and
    stores, through the table FP32 for each row.
    """
    parameters = f"gnnc::Element::{element}, {width}, {truth(scaled)}"
    weighted, stores = f"{parameters}, {truth(valued)}", truth(kind == "stored")
    names = tuple(f"gnnc::gather_only<{weighted}, {threads}, {stores}>" for threads in BLOCKS)
    names += tuple(f"gnnc::gather_edges<{weighted}, {shares}, {stores}>" for shares in ("true", "false"))
    return (*names, f"gnnc::gather_staged<{parameters}>") if kind == "staged" else names


class Floors:
    """Lower bounds of the time of a kernel on one graph."""

    def __init__(self, graph: Sparse) -> None:
        self.graph = graph
        self._gathers: dict[tuple[str, int], float] = {}

    def gather(
        self, x: Tensor, scale: Tensor | None, value: Tensor | None, kind: str, result: Tensor | None = None
    ) -> float:
        """Return the time of gathering the rows of x, with scales and weights.

        ``kind``: as in ``gather_names``; ``stored`` stores as many bytes as ``result`` has.
        """
        names = gather_names(ELEMENTS[x.dtype], x.shape[1], kind, scale is not None, value is not None)
        if result is not None and result.dtype != torch.float32:
            names = tuple(name for name in names if "gather_edges" in name)
        size = 0 if result is None else result.numel() * result.element_size()
        for name in names:
            if (name, size) not in self._gathers:
                self._gathers[name, size] = self._time(name, x, scale, value, size)
        return min(self._gathers[name, size] for name in names)

    def _time(self, name: str, x: Tensor, scale: Tensor | None, value: Tensor | None, size: int) -> float:
        graph, module = self.graph.gathering(x), Module(GATHER, (name,))
        out = torch.zeros(1, dtype=torch.int32, device="cuda")
        rows = [address(x), x.stride(0) * x.element_size(), address(scale)]
        blocks, shared = graph.multiprocessors, 0
        if "gather_edges" in name:
            result = torch.empty(size // 16 + 1, 4, dtype=torch.int32, device="cuda")
            arguments = [address(graph.col), graph.col.numel(), *rows, address(value), address(out)]
            arguments += [address(result), size // 16]
        elif "gather_staged" in name:
            table = WindowTable(graph.staged, x.shape[0])
            arguments = [address(graph.rowptr), *table.fields, *rows, address(out)]
            blocks, shared = table.blocks, shared_bytes(graph.row_bytes, "none" if scale is None else "row")
        else:
            stride = CudaEmitter.padded(x.shape[1], torch.float32, gathered=False)
            result = torch.empty(graph.num_dst, stride, device="cuda") if "true>" in name else None
            arguments = [*graph.values(), *rows, address(value), address(out), address(result), stride]
            blocks = graph.runs.blocks
        return median_ms(lambda: module.launch(name, blocks, AS_COMPILED, *arguments, shared=shared))

    def copy(self, *tensors: Tensor | None) -> float:
        """Return the time of moving each tensor once."""
        total = sum(
            t.numel() * t.element_size()
            for t in (self.graph.rowptr, self.graph.col, *tensors)
            if t is not None
        )
        return total / copy_gbs() / 1e6


def features(nodes: int, width: int) -> dict[str, Tensor]:
    """Return x in every element type."""
    x = torch.randn(nodes, width, device="cuda")
    return {
        "fp32": rows_of_programs(x),
        "fp16": rows_of_programs(x.half()),
        "bf16": rows_of_programs(x.bfloat16()),
        "int8": rows_of_programs((x * 30).round().clamp(-127, 127).to(torch.int8)),
    }


def kernels(graph: Sparse, xs: dict[str, Tensor], width: int) -> dict[str, tuple[str, Any, tuple[Any, ...]]]:
    """Return name -> (peer, factory of the call, operands beside x).

    A call holds its result, which is up to 0.6 GB on products: one is alive at a time.
    """
    nodes, edges = graph.num_dst, graph.col.numel()
    value, ones = torch.rand(edges, device="cuda"), torch.rand(nodes, device="cuda")
    shift = torch.randint(0, 8, (nodes,), dtype=torch.uint8, device="cuda")
    calls: dict[str, tuple[str, Any, tuple[Any, ...]]] = {}
    for kind, x in xs.items():
        calls[f"spmm {kind}"] = ("spmm", partial(Spmm, graph, x), ())
        scale = ones if kind == "int8" else None
        calls[f"spmm {kind} edge weights"] = ("spmm", partial(Spmm, graph, x, value, scale), (value, scale))
    int8 = xs["int8"]
    calls[f"spmm {ONE_SCALE}"] = ("spmm", partial(Spmm, graph, int8, value), (value,))
    calls["spmm int8 row scales"] = ("spmm", partial(Spmm, graph, int8, x_scale=ones), (ones,))
    calls["spmm int8 powers"] = ("spmm", partial(Spmm, graph, int8, shift=shift), (shift,))
    calls["spmm int8 to int8"] = ("spmm", partial(Spmm, graph, int8, to=torch.int8), ())
    calls["spmm fp16 to fp16"] = ("spmm", partial(Spmm, graph, xs["fp16"], to=torch.float16), ())
    for reduce in ("max",):
        calls[f"spmm fp16 {reduce}"] = ("spmm", partial(Spmm, graph, xs["fp16"], reduce=reduce), ())
        calls[f"spmm int8 {reduce}"] = ("spmm", partial(Spmm, graph, int8, reduce=reduce), ())
    if width == 64:
        weights = torch.rand(edges, 4, device="cuda")
        for kind, scale in (("fp16", None), ("int8", ones)):
            call = partial(Spmm, graph, xs[kind], weights, scale)
            calls[f"spmm {kind} edge weights a head"] = ("spmm", call, (weights, scale))
        a = torch.randn(nodes, 4, device="cuda")
        for kind, x in xs.items():
            calls[f"sddmm {kind} dot"] = ("sddmm", partial(Sddmm, graph, x, x), ())
            scale = ones if kind == "int8" else None
            calls[f"gat 4x16 {kind}"] = (
                "spmm",
                partial(Attention, graph, x, 4, a, a, x_scale=scale),
                (a, scale),
            )
    return calls


def cut_graph(rowptr: Tensor, col: Tensor) -> tuple[Sparse, Cut]:
    """Return a CSR with its run table, and the cut of that table."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    size = rowptr.numel() - 1, col.numel()
    cut = cut_for(*size, processors)
    return sparse(rowptr, col, cut, processors, window_cut_for(*size)), cut


def run(name: str, widths: list[int]) -> dict[str, Any]:
    """Time all kernels on one graph."""
    rowptr, col = make_csr(name)
    graph, cut = cut_graph(rowptr, col)
    floors = Floors(graph)
    nodes = rowptr.numel() - 1
    result: dict[str, Any] = {
        "nodes": nodes,
        "edges": col.numel(),
        "largest degree": int(rowptr.diff().max()),
        "cut": cut._asdict(),
        "cut by node block": graph.staged_cut._asdict(),
        "runs": graph.runs.count,
        "split rows": graph.table.split[:, 0].unique().numel(),
    }
    for width in widths:
        peer = cusparse(rowptr, col, width, dot=width == 64)
        xs = features(nodes, width)
        rows = {}
        for label, (family, make, read) in kernels(graph, xs, width).items():
            call = make()
            x = xs[next(kind for kind in xs if kind in label)]
            time = median_ms(call)
            kind = "staged" if isinstance(call, Spmm) and call.staged else "only"
            operands = (call.x_scale, call.value) if isinstance(call, Spmm) else (None, None)
            gather = floors.gather(x, *operands, kind)
            floor = max(floors.copy(x, call(), *read), gather)
            rows[label] = figures(time, peer[family], floor, gather)
            del call
        result[f"F={width}"] = {"cusparse_ms": {k: round(v, 4) for k, v in peer.items()}, "kernels": rows}
        show(name, width, peer, rows)
        del xs
    return result


def figures(time: float, peer: float, floor: float, gather: float) -> dict[str, float]:
    """Return the recorded figures of one kernel."""
    return {
        "ms": round(time, 4),
        "ratio": round(peer / time, 2),
        "of_floor": round(floor / time, 2),
        "gather_ms": round(gather, 4),
    }


def compile_ahead() -> None:
    """Compile the kernels of ``spmm_widths`` in parallel, into the cache on disk."""
    jobs = []
    for width in SPMM_WIDTHS:
        for config in dict.fromkeys(kind.at(width).config(width) for kind in SPMM_KINDS):
            plain = config.value == "none"
            gathers = ("only", "stored", "staged") if plain else ("only", "stored")
            operands = config.scale == "row", not plain
            names = (gather_names(config.element, width, kind, *operands) for kind in gathers)
            jobs += [(GATHER, (name,)) for group in names for name in group]
            forms = [form_of(width * NBYTES[config.element]), *(["spmm_staged"] if plain else [])]
            results = {kind.to for kind in SPMM_KINDS if kind.at(width).config(width) == config}
            ends = [epilogue_of(DTYPES[to], width) for to in sorted(results)]
            jobs += [(SPMM_SOURCE, (config.name(end, form),)) for form in forms for end in ends]
    major, minor = torch.cuda.get_device_capability()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: compile_kernels(*job, f"sm_{major}{minor}"), jobs))


def spmm_widths(name: str) -> dict[str, Any]:
    """Time sums over neighbors at every width, in each precision."""
    compile_ahead()
    rowptr, col = make_csr(name)
    nodes, edges = rowptr.numel() - 1, col.numel()
    graph, _ = cut_graph(rowptr, col)
    floors = Floors(graph)
    value, scale = torch.rand(edges, device="cuda"), torch.rand(nodes, device="cuda")
    result: dict[str, Any] = {"nodes": nodes, "edges": edges}
    for width in SPMM_WIDTHS:
        peer, xs, rows = cusparse(rowptr, col, width, dot=False)["spmm"], features(nodes, width), {}
        for kind in (kind.at(width) for kind in SPMM_KINDS):
            x, operands = xs[kind.element], (value if kind.weights else None, scale if kind.scales else None)
            call = Spmm(graph, x, *operands, to=DTYPES[kind.to])
            gather = floors.gather(x, operands[1], operands[0], "staged" if call.staged else "only")
            floor = max(floors.copy(x, call(), *operands), gather)
            row = rows[f"spmm {kind.label}"] = figures(median_ms(call), peer, floor, gather)
            if not call.staged:
                stored = floors.gather(x, operands[1], operands[0], "stored", call())
                row |= {"stored_ms": round(stored, 4), "of_stored": round(stored / row["ms"], 2)}
            if kind.label.startswith("int8"):
                row["of fp16"] = round(row["ms"] / rows[f"spmm {kind.peer}"]["ms"], 2)
            del call
        result[f"F={width}"] = {"cusparse_ms": round(peer, 4), "kernels": rows}
        show(name, width, {"spmm": peer}, rows)
        del xs
    return result


def show(name: str, width: int, peer: dict[str, float], rows: dict[str, Any]) -> None:
    """Print one table."""
    print(f"\n{name} F={width}: " + ", ".join(f"cuSPARSE {what} {ms:.3f} ms" for what, ms in peer.items()))
    for label, row in rows.items():
        print(
            f"  {label:42s} {row['ms']:8.3f} ms  {row['ratio']:6.2f}x  {row['of_floor']:5.0%} of floor"
            + (f", {row['of_stored']:.0%} with stores" if "of_stored" in row else ""),
            flush=True,
        )


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=["arxiv", "reddit", "products"], choices=list(SHAPES))
    parser.add_argument("--widths", nargs="+", type=int, default=[64])
    parser.add_argument("--spmm-widths", action="store_true", help="only SpMM, at every width of SPMM_WIDTHS")
    parser.add_argument("--out", type=Path, help="JSON with the results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse")
    torch.manual_seed(0)
    results: dict[str, Any] = {"machine": machine()}
    print(results["machine"])
    for name in args.graphs:
        results[name] = spmm_widths(name) if args.spmm_widths else run(name, args.widths)
        torch.cuda.empty_cache()
    out = args.out or (SPMM_RESULTS if args.spmm_widths else RESULTS)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
