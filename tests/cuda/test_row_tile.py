import pytest
from cuda_launch import ARCHITECTURES, compile_kernels

SOURCE = """
#include "row_tile.cuh"
template <int kWidth, int kLanes>
__global__ void halve(const float* x, float* out, float* tops) {
  gnnc::RowTile<kWidth, kLanes> tile;
  const int64_t row = threadIdx.x / kLanes;
  for (int i = 0; i < tile.kPer; ++i) tile.v[i] = tile.valid(i) ? x[row * kWidth + tile.column(i)] : 0.0f;
  if (tile.lane == 0) tops[row] = tile.max_abs() + tile.sum([](float v, int) { return v; });
  gnnc::StoreFloat{out, (kWidth + 3) / 4 * 4}(tile, row);
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
