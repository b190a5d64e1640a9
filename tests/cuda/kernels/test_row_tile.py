import pytest
import torch
from architectures import ARCHITECTURES
from cuda_launch import Module, address, compile_kernels

SOURCE = """
#include "common/row_tile.cuh"
template <int kWidth, int kLanes>
__global__ void halve(const float* x, float* out, float* tops) {
  gnnc::RowTile<kWidth, kLanes> tile;
  const int64_t row = threadIdx.x / kLanes;
  for (int i = 0; i < tile.kPer; ++i) tile.v[i] = tile.valid(i) ? x[row * kWidth + tile.column(i)] : 0.0f;
  if (tile.lane == 0) tops[row] = max_abs(tile) + tile.sum([](float v, int) { return v; });
  for (int i = 0; i < tile.kPer; ++i) {
    if (tile.valid(i)) out[row * ((kWidth + 3) / 4 * 4) + tile.column(i)] = tile.v[i];
  }
}
"""
SHAPES = ((16, 4), (47, 8), (64, 16), (602, 32), (1, 1))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiles_of_every_shape_stay_in_registers(architecture: str) -> None:
    names = tuple(f"halve<{width}, {lanes}>" for width, lanes in SHAPES)
    report = compile_kernels(SOURCE, names, architecture)
    assert len(report) == len(SHAPES)
    assert not {name: kernel for name, kernel in report.items() if kernel.spilled or kernel.stack}


STORES = """
#include "common/row_steps.cuh"
template <int kWidth, int kLanes, int kRun, int kStride = kWidth>
__global__ void copy_rows(const float* x, float* out, int64_t rows) {
  const int64_t row = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  if (row >= rows) return;
  gnnc::RowTile<kWidth, kLanes, kRun> tile;
  for (int i = 0; i < tile.kPer; ++i) tile.v[i] = tile.valid(i) ? x[row * kWidth + tile.column(i)] : 77.0f;
  gnnc::step::store<kStride>(tile, out + row * kStride);
}
"""
ALIGNED = ((64, 4, 16), (48, 4, 16), (52, 4, 16), (128, 4, 16), (128, 8, 16), (64, 8, 8), (64, 16, 4))
"""Rows that begin on 16 bytes: their width, threads and columns in turn of each."""
STORED = (
    *((width, 4, 16) for width in (33, 41, 47, 50, 63, 67, 130)),
    *((width, 16, 4) for width in (41, 47, 61, 65, 131)),
    *((width, 32, 4) for width in (1, 2, 3, 7, 47, 127, 602, 1023)),
    *((width, 8, 8) for width in (41, 47, 63)),
)


@pytest.mark.cuda
@pytest.mark.parametrize(("width", "lanes", "run"), STORED)
def test_rows_that_begin_anywhere_are_stored_whole_and_nothing_else(width: int, lanes: int, run: int) -> None:
    name = f"copy_rows<{width}, {lanes}, {run}>"
    module = Module(STORES, (name,))
    for rows, shift in ((1, 0), (37, 0), (37, 1), (256, 2), (256, 3)):
        x = torch.randn(rows, width, device="cuda")
        memory = torch.full((rows * width + 12,), 99.0, device="cuda")
        out = memory[4 + shift : 4 + shift + rows * width]
        module.launch(name, -(-rows * lanes // 128), 128, address(x), address(out), rows)
        assert torch.equal(out.view(rows, width), x)
        memory[4 + shift : 4 + shift + rows * width] = 99.0
        assert (memory == 99.0).all()


@pytest.mark.cuda
@pytest.mark.parametrize(("width", "lanes", "run"), ALIGNED)
def test_rows_that_begin_on_16_bytes_are_stored_whole(width: int, lanes: int, run: int) -> None:
    name = f"copy_rows<{width}, {lanes}, {run}>"
    module, x = Module(STORES, (name,)), torch.randn(37, width, device="cuda")
    memory = torch.full((37 * width + 8,), 99.0, device="cuda")
    out = memory[4 : 4 + 37 * width]
    module.launch(name, -(-37 * lanes // 128), 128, address(x), address(out), 37)
    assert torch.equal(out.view(37, width), x)
    assert (memory[:4] == 99.0).all() and (memory[-4:] == 99.0).all()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("width", "lanes", "run"), [(47, 4, 16), (47, 8, 8), (47, 16, 4), (602, 32, 4), (126, 8, 16)]
)
def test_a_row_fills_its_last_four_columns_and_none_behind(width: int, lanes: int, run: int) -> None:
    whole = -(-width // 4) * 4
    name = f"copy_rows<{width}, {lanes}, {run}, {whole + 4}>"
    module, x = Module(STORES, (name,)), torch.randn(37, width, device="cuda")
    out = torch.full((37, whole + 4), 99.0, device="cuda")
    module.launch(name, -(-37 * lanes // 128), 128, address(x), address(out), 37)
    assert torch.equal(out[:, :width], x)
    assert (out[:, width:whole] != 99.0).all() and (out[:, whole:] == 99.0).all()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_that_begin_anywhere_stay_in_registers(architecture: str) -> None:
    names = tuple(f"copy_rows<{width}, {lanes}, {run}>" for width, lanes, run in (*STORED, *ALIGNED))
    report = compile_kernels(STORES, names, architecture)
    assert len(report) == len(names)
    assert not {name: kernel for name, kernel in report.items() if kernel.spilled or kernel.stack}
