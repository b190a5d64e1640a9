"""Bodies as C++ compute what the bodies compute: the text is compiled for the CPU, so no GPU is needed."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from gnnc.ir.body import evaluate_body
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.row_program.build import Refusal

BODIES = {
    "gatv2": (
        "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); "
        "t2 = aten.mul.Tensor(t1, c0); t3 = aten.sum.dim_IntList(t2, [-1]); return t3",
        {"i0": (2, 3), "j0": (2, 3), "c0": (1, 2, 3)},
    ),
    "gine": (
        "t0 = aten.add.Tensor(j0, e0); t1 = aten.relu.default(t0); return t1",
        {"j0": (5,), "e0": (5,)},
    ),
    "gated": (
        "t0 = aten.add.Tensor(i0, j0); t1 = aten.sigmoid.default(t0); "
        "t2 = aten.mul.Tensor(t1, j1); return t2",
        {"i0": (4,), "j0": (4,), "j1": (4,)},
    ),
    "joined": (
        "t0 = aten.sub.Tensor(j0, i0); t1 = aten.cat.default([i0, t0, e0], -1); "
        "t2 = aten.tanh.default(t1); return t2",
        {"i0": (3,), "j0": (3,), "e0": (2,)},
    ),
    "reshaped": (
        "t0 = aten.view.default(j0, [-1, 2, 3]); t1 = aten.unsqueeze.default(e0, -1); "
        "t2 = aten.mul.Tensor(t0, t1); t3 = aten.mean.dim(t2, [1]); return t3",
        {"j0": (6,), "e0": (2,)},
    ),
    "gaussian": (
        "t0 = aten.unsqueeze.default(e0, 1); t1 = aten.sub.Tensor(t0, c0); "
        "t2 = aten.pow.Tensor_Scalar(t1, 2); "
        "t3 = aten.div.Tensor(t2, c1); t4 = aten.sum.dim_IntList(t3, [-1]); t5 = aten.mul.Tensor(t4, -0.5); "
        "t6 = aten.exp.default(t5); return t6",
        {"e0": (2,), "c0": (1, 4, 2), "c1": (1, 4, 2)},
    ),
    "softplus": (
        "t0 = aten.softplus.default(j0); t1 = aten.clamp.default(t0, 0.1, 1.5); "
        "t2 = aten.select.int(t1, 1, -1); t3 = aten.unsqueeze.default(t2, 1); "
        "t4 = aten.slice.Tensor(t1, 1, 1, 3); t5 = aten.mul.Tensor(t3, t4); return t5",
        {"j0": (4,)},
    ),
    "derivatives": (
        "t0 = aten.threshold_backward.default(e0, j0, 0.2); "
        "t1 = aten.leaky_relu_backward.default(t0, j0, 0.1, False); "
        "t2 = aten.softplus_backward.default(e0, j0, 1, 0.3); t3 = aten.silu_backward.default(t2, j0); "
        "t4 = aten.gelu_backward.default(t3, j0, approximate='none'); "
        "t5 = aten.add.Tensor(t1, t4); return t5",
        {"j0": (4,), "e0": (4,)},
    ),
    "derivatives_of_results": (
        "t0 = aten.sigmoid.default(j0); t1 = aten.sigmoid_backward.default(e0, t0); "
        "t2 = aten.tanh_backward.default(t1, t0); "
        "t3 = aten.elu_backward.default(t2, 2.0, 1, 1, False, j0); "
        "t4 = aten.elu_backward.default(e0, 2.0, 1, 1, True, j0); "
        "t5 = aten.add.Tensor(t3, t4); return t5",
        {"j0": (4,), "e0": (4,)},
    ),
    "matrices_of_edges": (
        "t0 = aten.view.default(e0, [-1, 3, 2]); t1 = aten.matmul.default(j0, t0); "
        "t2 = aten.bmm.default(t1, e1); t3 = aten.stack.default([t2], 1); return t3",
        {"j0": (2, 3), "e0": (6,), "e1": (2, 4)},
    ),
    "layer_norm": (
        "t0 = aten.add.Tensor(i0, j0); t1 = aten.mean.dim(t0, [-1], True); t2 = aten.sub.Tensor(t0, t1); "
        "t3 = aten.mul.Tensor(t2, t2); t4 = aten.sum.dim_IntList(t3, [-1], True); "
        "t5 = aten.add.Tensor(t4, 1e-5); t6 = aten.rsqrt.default(t5); t7 = aten.mul.Tensor(t2, t6); "
        "return t7",
        {"i0": (9,), "j0": (9,)},
    ),
    "layer_norm_with_weights": (
        "t0 = aten.add.Tensor(i0, j0); t1 = aten.layer_norm.default(t0, [3, 2], c0, c1, 0.1); "
        "t2 = aten.layer_norm.default(t1, [2]); return t2",
        {"i0": (3, 2), "j0": (3, 2), "c0": (3, 2), "c1": (3, 2)},
    ),
    "softmax_of_columns": (
        "t0 = aten.mul.Tensor(i0, j0); t1 = aten.exp.default(t0); "
        "t2 = aten.sum.dim_IntList(t1, [1, 2], True); t3 = aten.div.Tensor(t1, t2); return t3",
        {"i0": (3, 4), "j0": (3, 4)},
    ),
    "masked": (
        "t0 = aten.gt.Tensor(i0, j0); t1 = aten.where.self(t0, i0, j0); t2 = aten.neg.default(t1); "
        "t3 = aten.add.Tensor(t2, j0, alpha=2); return t3",
        {"i0": (3,), "j0": (3,)},
    ),
}
SHIM = """
#include <cmath>
#include <cstring>
#include <cstdint>
#define __device__
#define __host__
inline float __fdividef(float a, float b) { return a / b; }
inline float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }
template <class T> T one_of_four(const T* row, int column) { return row[column]; }
namespace gnnc {
template <class... Each> struct Stages {};
template <class... Each> struct Rows {};
template <bool kOfSources, int kBytes, int kStride, int kPiece, int kTo>
struct Fetched {
  template <int kNumber, class Body>
  static void fetch(const Body& body, int source, int edge, float* results) {
    const char* from = body.template base<kNumber>() + kStride * (kOfSources ? source : edge);
    std::memcpy(results + kTo, from, kBytes);
  }
};
template <int kNumber, class Body>
void fetch(Rows<>, const Body&, int, int, float*) {}
template <int kNumber, class Body, class First, class... Rest>
void fetch(Rows<First, Rest...>, const Body& body, int source, int edge, float* results) {
  First::template fetch<kNumber>(body, source, edge, results);
  fetch<kNumber + 1>(Rows<Rest...>{}, body, source, edge, results);
}
template <int kOut, int kTo>
struct Stored {
  template <int kStage, class Body>
  static void run(const Body& body, int row, int source, int edge, float* results) {
    for (int c = 0; c < kOut; ++c)
      results[kTo + c] = body.template column<kStage>(row, source, edge, results, c);
  }
};
template <int kTerms, int kOut, int kTo, int kDivisor>
struct ColumnSum {
  template <int kStage, class Body>
  static void run(const Body& body, int row, int source, int edge, float* results) {
    for (int c = 0; c < kOut; ++c) {
      float total = 0;
      for (int k = 0; k < kTerms; ++k) total += body.template term<kStage>(row, source, edge, results, c, k);
      results[kTo + c] = total / kDivisor;
    }
  }
};
template <int kStage, class Body>
void run(Stages<>, const Body&, int, int, int, float*) {}
template <int kStage, class Body, class First, class... Rest>
void run(Stages<First, Rest...>, const Body& body, int row, int source, int edge, float* results) {
  First::template run<kStage>(body, row, source, edge, results);
  run<kStage + 1>(Stages<Rest...>{}, body, row, source, edge, results);
}
}
namespace step {
inline float as_float(float x) { return x; }
inline float larger(float a, float b) { return a > b || a != a ? a : b; }
inline float smaller(float a, float b) { return a < b || a != a ? a : b; }
}
"""
ROWS, SOURCES, EDGES = 6, 7, 11


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ compiles the bodies, and there is none")
    folder = tmp_path_factory.mktemp("bodies")
    parts = [SHIM]
    for name, (text, shapes) in BODIES.items():
        functor = write_body(text, {n: meta(n, s) for n, s in shapes.items()}, strides(shapes))
        parts.append(f"struct {name}_body {{\n{functor.text}}};")
        stages = (
            ""
            if functor.block is None
            else (
                f"gnnc::fetch<0>({name}_body::Rows{{}}, body, col[e], e, results);\n    "
                f"gnnc::run<0>({name}_body::Stages{{}}, body, rows[e], col[e], e, results);"
            )
        )
        pointers = ", ".join(f"const float* {n}" for n in functor.operands)
        parts.append(
            f'extern "C" void {name}(const int* rows, const int* col, float* out, {pointers}) {{\n'
            f"  const {name}_body body{{{', '.join(functor.operands)}}};\n"
            f"  float results[128];\n  for (int e = 0; e < {EDGES}; ++e) {{\n    {stages}\n"
            f"    for (int c = 0; c < {functor.width}; ++c)\n"
            f"      body(rows[e], col[e], e, results, c, out + e * {functor.width} + c);\n  }}\n}}"
        )
    (folder / "bodies.cpp").write_text("\n".join(parts))
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", "bodies.so", "bodies.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "bodies.so"))


def meta(name, shape):
    return torch.empty(shape if name[0] == "c" else (1, *shape), device="meta")


def strides(shapes):
    return {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_as_text_computes_what_the_body_computes(library, name):
    text, shapes = BODIES[name]
    counts = {"i": (ROWS,), "j": (SOURCES,), "e": (EDGES,), "c": ()}
    values = {n: torch.randn(*counts[n[0]], *shape) for n, shape in shapes.items()}
    rows = torch.randint(ROWS, (EDGES,), dtype=torch.int32)
    col = torch.randint(SOURCES, (EDGES,), dtype=torch.int32)
    gathered = {"i": rows, "j": col}
    groups = [
        [values[n][gathered[kind]] if kind in gathered else values[n] for n in sorted(values) if n[0] == kind]
        for kind in "ijec"
    ]
    wanted = evaluate_body(text, *groups)
    functor = write_body(text, {n: meta(n, s) for n, s in shapes.items()}, strides(shapes))
    out = torch.full((EDGES, functor.width), torch.nan)
    tensors = [rows, col, out, *(values[n] for n in functor.operands)]
    getattr(library, name)(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))
    torch.testing.assert_close(out, wanted.reshape(EDGES, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "t0 = aten.mm.default(j0, c0); t1 = aten.sum.dim_IntList(t0, [0]); return t1",
            "edge",
        ),
        ("t0 = aten.sum.dim_IntList(j0, [0]); return t0", "over edges|edge dimension"),
        ("t0 = aten.cumsum.default(j0, 1); return t0", "calls aten.cumsum"),
    ],
)
def test_what_a_thread_cannot_compute_by_itself_is_refused(text, reason):
    shapes = {"j0": (3,), "c0": (3, 2)}
    with pytest.raises(Refusal, match=reason):
        write_body(text, {n: meta(n, s) for n, s in shapes.items()}, strides(shapes))


@pytest.mark.parametrize(
    ("keywords", "positions"),
    [
        ("aten.slice.Tensor(j0, dim=1, start=1, step=2)", "aten.slice.Tensor(j0, 1, 1, None, 2)"),
        ("aten.elu.default(j0, alpha=0.5)", "aten.elu.default(j0, 0.5)"),
        ("aten.cat.default([j0, j0], dim=1)", "aten.cat.default([j0, j0], 1)"),
    ],
)
def test_arguments_are_read_by_keyword_and_by_position(keywords: str, positions: str) -> None:
    operands = {"j0": torch.empty(9, 6, device="meta")}
    texts = [
        write_body(f"t0 = {call}; return t0", operands, {"j0": 6}).text for call in (keywords, positions)
    ]
    assert texts[0] == texts[1]


def test_a_scale_of_elu_given_by_keyword_is_refused() -> None:
    operands = {"j0": torch.empty(9, 6, device="meta")}
    with pytest.raises(Refusal, match="scales an elu"):
        write_body("t0 = aten.elu.default(j0, scale=2.0); return t0", operands, {"j0": 6})


def test_neighbors_of_a_concatenation_take_one_load() -> None:
    """A load in a branch of some columns stays one: its index may lie outside in other columns."""
    text = "t0 = aten.cat.default([e0, e1], 1); t1 = aten.relu.default(t0); return t1"
    for width, loads in ((64, {"four_if<kPart == 0>(e0", "four_if<kPart == 1>(e1"}), (62, set())):
        given = {name: torch.empty(9, width, device="meta") for name in ("e0", "e1")}
        written = write_body(text, given, {"e0": 64, "e1": 64}, in_vectors=True).text
        assert set(re.findall(r"four_if<[^>]*>\(e\d", written)) == loads
        assert f"kParts = {len(loads) or 1}" in written and ("column < 62" in written) != bool(loads)
