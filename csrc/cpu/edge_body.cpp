// Launcher of edge_body.

#include "edge_body.h"

#include "launch.h"
#include "scratch.h"
#include "sparse_launch.h"

namespace gnnc {
namespace {

using sparse::Ids;
using sparse::MaybeTensor;
using sparse::ScalarType;
using sparse::Tensor;

using Tensors = std::vector<Tensor>;
using Numbers = std::vector<int64_t>;

constexpr const char* kOp = "edge_body";
constexpr int64_t kTileFloats = 32 << 10;  // of all registers: 128 KB, which L2 holds beside the weights
constexpr int64_t kLeastEdges = 32, kMostEdges = 128;
constexpr int64_t kSerialWork = 2048;  // rows + edges below which one thread is faster than two
constexpr int64_t kMostChunks = 64;    // of a sum over all edges, each of which has sums of its own
constexpr int64_t kMostFloats = int64_t{1} << 28;

int64_t padded(int64_t width) { return rounded(width, kBodyPad); }

template <typename Item>
const Item& at(const std::vector<Item>& items, int64_t number, const char* what) {
  STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(items.size()), kOp, ": there is no ", what, " ", number);
  return items[static_cast<size_t>(number)];
}

std::vector<BodyOperand> operands_of(const Tensors& tensors, int64_t rows, const char* name) {
  std::vector<BodyOperand> found;
  for (const Tensor& t : tensors) {
    const sparse::Matrix m = sparse::matrix(t, kOp, name);
    STD_TORCH_CHECK(m.type == ScalarType::Float, kOp, ": ", name, " must be float32");
    STD_TORCH_CHECK(rows < 0 || m.rows == rows, kOp, ": ", name, " must have ", rows, " rows, but has ", m.rows);
    found.push_back({static_cast<const float*>(m.data), m.stride, m.width});
  }
  return found;
}

// Copies the elements of a tensor in the order of their indices.
void flatten(const Tensor& t, int64_t dim, const float* from, float*& to) {
  if (dim == t.dim()) {
    *to++ = *from;
    return;
  }
  for (int64_t i = 0; i < t.size(dim); ++i) flatten(t, dim + 1, from + i * t.stride(dim), to);
}

const void* const_data(const Tensor& t, ScalarType type) {
  sparse::check_type(t, type, kOp, "const");
  int64_t last = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    STD_TORCH_CHECK(t.stride(dim) >= 0, kOp, ": strides must not be negative");
    last += (std::max<int64_t>(t.size(dim), 1) - 1) * t.stride(dim);
  }
  return checked_data(t, t.numel() == 0 ? 0 : last + 1, kOp, "const");
}

const float* const_floats(const Tensor& t) { return static_cast<const float*>(const_data(t, ScalarType::Float)); }

// Returns the format that the processor multiplies in.
BodyFormat format_of(int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(BodyFormat::bf16), kOp, ": there is no format ",
                  number);
  const auto format = static_cast<BodyFormat>(number);
  return format == BodyFormat::bf16 && has_bf16_dots() ? BodyFormat::bf16_dots : format;
}

ScalarType type_of(BodyFormat format) {
  if (format == BodyFormat::f32) return ScalarType::Float;
  return format == BodyFormat::i8 ? ScalarType::Char : ScalarType::BFloat16;
}

// The argument of the op, checked, as the kernels take it; and the memory of uniform registers and packed weights.
class Program {
 public:
  EdgeBodyArgs args;
  int64_t total_floats = 0;  // that the steps `total` and `outer` add to

  void add_registers(const Numbers& numbers) {
    STD_TORCH_CHECK(numbers.size() % 2 == 0, kOp, ": a register has 2 numbers");
    for (size_t i = 0; i < numbers.size(); i += 2) {
      const int64_t width = numbers[i];
      STD_TORCH_CHECK(width > 0 && width < kMostFloats, kOp, ": a register has ", width, " columns");
      int64_t& end = numbers[i + 1] != 0 ? uniform_floats_ : edge_floats_;
      args.registers.push_back({width, padded(width), end, numbers[i + 1] != 0});
      end += padded(width);
      STD_TORCH_CHECK(end < kMostFloats, kOp, ": the registers are too large");
    }
    args.tile_edges = std::clamp(kTileFloats / std::max<int64_t>(edge_floats_, 1), kLeastEdges, kMostEdges);
    args.tile_floats = edge_floats_ * args.tile_edges;
  }

  void add_runs(const Numbers& numbers) {
    STD_TORCH_CHECK(numbers.size() % 4 == 0, kOp, ": a run has 4 numbers");
    for (size_t i = 0; i < numbers.size(); i += 4) {
      for (size_t k = i; k < i + 4; ++k)
        STD_TORCH_CHECK(numbers[k] >= 0 && numbers[k] < kMostFloats, kOp, ": a run is wrong");
      args.runs.push_back({static_cast<int32_t>(numbers[i]), static_cast<int32_t>(numbers[i + 1]),
                           static_cast<int32_t>(numbers[i + 2]), static_cast<int32_t>(numbers[i + 3])});
    }
  }

  // Of each weight: a constant, whether that is [inputs, outputs], a format, and a constant of scales or -1.
  void add_weights(const Numbers& numbers, const Tensors& consts) {
    STD_TORCH_CHECK(numbers.size() % 4 == 0, kOp, ": a weight has 4 numbers");
    for (size_t i = 0; i < numbers.size(); i += 4) {
      const Tensor& w = at(consts, numbers[i], "const");
      STD_TORCH_CHECK(w.dim() == 2, kOp, ": a weight has 2 dimensions, but ", w.dim(), " were given");
      const int64_t in = numbers[i + 1] != 0 ? 0 : 1, out = 1 - in;
      STD_TORCH_CHECK(w.numel() > 0 && w.size(in) * padded(w.size(out)) < kMostFloats, kOp, ": a weight is too large");
      const BodyFormat format = format_of(numbers[i + 2]);
      args.weights.push_back({format, const_data(w, type_of(format)), w.size(in), w.size(out), w.stride(in),
                              w.stride(out), nullptr, 0, nullptr});
      if (format == BodyFormat::i8) add_scales(at(consts, numbers[i + 3], "const"));
      packed_floats_ += packed_floats(args.weights.back());
    }
  }

  void add_steps(const Numbers& numbers, const Tensors& consts) {
    STD_TORCH_CHECK(numbers.size() % 6 == 0, kOp, ": a step has 6 numbers");
    defined_.assign(args.registers.size(), false);
    for (size_t i = 0; i < numbers.size(); i += 6) {
      for (size_t k = i; k < i + 6; ++k) {
        STD_TORCH_CHECK(numbers[k] >= -1 && numbers[k] < kMostFloats, kOp, ": a step is wrong");
      }
      const auto number = [&](size_t k) { return static_cast<int32_t>(numbers[i + k]); };
      args.steps.push_back({static_cast<BodyOp>(number(0)), number(1), number(2), number(3), number(4), number(5)});
      check(args.steps.back(), consts);
    }
  }

  // Takes memory, and fills the registers of constants.
  void prepare(const Tensors& consts) {
    static thread_local Scratch scratch;
    args.uniform = scratch.get<float>(static_cast<size_t>(uniform_floats_ + packed_floats_ + kBodyPad));
    float* packed = args.uniform + uniform_floats_;
    for (BodyWeight& w : args.weights) {
      w.packed = packed;
      packed += packed_floats(w);
    }
    for (const BodyStep& in : args.steps) {
      if (in.op != BodyOp::load || in.a != 3) continue;
      const Register& r = args.registers[static_cast<size_t>(in.to)];
      float* to = args.uniform + r.offset;
      std::fill_n(to, r.stride, 0.0f);
      const Tensor& t = consts[static_cast<size_t>(in.b)];
      flatten(t, 0, const_floats(t), to);
    }
    GNNC_DISPATCH(prepare_edge_body, args);
  }

 private:
  // Adds the scales of the last weight.
  void add_scales(const Tensor& scales) {
    BodyWeight& w = args.weights.back();
    STD_TORCH_CHECK(scales.dim() == 1 && scales.numel() == w.outputs, kOp, ": a weight has a scale for each output");
    STD_TORCH_CHECK(w.inputs <= kExactInputs, kOp, ": a product of bytes has ", kExactInputs, " terms at most");
    w.scales = const_floats(scales);
    w.scale_stride = scales.stride(0);
  }

  int64_t uniform_floats_ = 0, edge_floats_ = 0, packed_floats_ = 0;
  std::vector<bool> defined_;

  // Returns a register that a step reads.
  const Register& read(int32_t number) const {
    const Register& r = at(args.registers, number, "register");
    STD_TORCH_CHECK(defined_[static_cast<size_t>(number)], kOp, ": register ", number, " is read before it is written");
    return r;
  }

  const Register& read(int32_t number, int64_t width) const {
    const Register& r = read(number);
    STD_TORCH_CHECK(r.width == width, kOp, ": register ", number, " has ", r.width, " columns, not ", width);
    return r;
  }

  // Returns the register that a step writes, from these.
  const Register& written(const BodyStep& in, std::initializer_list<bool> uniform) {
    const Register& r = at(args.registers, in.to, "register");
    const bool all = std::all_of(uniform.begin(), uniform.end(), [](bool each) { return each; });
    STD_TORCH_CHECK(all || !r.uniform, kOp, ": register ", in.to, " differs from edge to edge");
    defined_[static_cast<size_t>(in.to)] = true;
    return r;
  }

  void check_const(int32_t number, bool needed) const {
    if (number >= 0 || needed) at(args.consts, number, "constant");
  }

  void check(const BodyStep& in, const Tensors& consts) {
    switch (in.op) {
      case BodyOp::load: {
        STD_TORCH_CHECK(in.a >= 0 && in.a <= 4, kOp, ": there is no group ", in.a);
        if (in.a == 4) return check_chosen(in, consts);
        const int64_t width =
            in.a == 3 ? at(consts, in.b, "const").numel() : at(args.operands[in.a], in.b, "operand").width;
        const Register& to = written(in, {in.a == 3});
        STD_TORCH_CHECK(to.width == width && to.uniform == (in.a == 3), kOp, ": register ", in.to,
                        " holds no such row");
        return;
      }
      case BodyOp::move: {
        const Register& from = read(in.a);
        const int64_t width = written(in, {from.uniform}).width;
        STD_TORCH_CHECK(in.b >= 0 && in.c >= 0 && int64_t{in.b} + in.c <= static_cast<int64_t>(args.runs.size()), kOp,
                        ": there are no such runs");
        check_runs(in.b, in.c, from.width, width);
        return;
      }
      case BodyOp::fill:
        check_const(in.a, true);
        written(in, {true});
        return;
      case BodyOp::unary: {
        STD_TORCH_CHECK(in.b >= 0 && in.b <= static_cast<int32_t>(Unary::logical_not), kOp, ": no unary op ", in.b);
        check_const(in.c, false);
        const Register& from = read(in.a);
        STD_TORCH_CHECK(written(in, {from.uniform}).width == from.width, kOp, ": widths differ");
        return;
      }
      case BodyOp::binary: {
        STD_TORCH_CHECK(in.c >= 0 && in.c <= static_cast<int32_t>(Binary::softplus_backward), kOp, ": no binary op ",
                        in.c);
        check_const(in.d, false);
        const Register &left = read(in.a), &right = read(in.b, left.width);
        STD_TORCH_CHECK(written(in, {left.uniform, right.uniform}).width == left.width, kOp, ": widths differ");
        return;
      }
      case BodyOp::where: {
        const Register &mask = read(in.a), &left = read(in.b, mask.width), &right = read(in.c, mask.width);
        STD_TORCH_CHECK(written(in, {mask.uniform, left.uniform, right.uniform}).width == mask.width, kOp,
                        ": widths differ");
        return;
      }
      case BodyOp::fold: {
        const Register& from = read(in.a);
        STD_TORCH_CHECK(in.b > 0 && written(in, {from.uniform}).width * in.b == from.width, kOp, ": widths differ");
        return;
      }
      case BodyOp::narrow: {
        const Register& from = read(in.a);
        STD_TORCH_CHECK(in.b > 0 && in.c > 0 && from.width % in.c == 0 && !from.uniform, kOp, ": it narrows no rows");
        const int64_t width = in.c * narrow_floats(format_of(in.b), from.width / in.c);
        STD_TORCH_CHECK(written(in, {false}).width == width, kOp, ": widths differ");
        return;
      }
      case BodyOp::product: {
        const BodyWeight& w = at(args.weights, in.b, "weight");
        STD_TORCH_CHECK(in.d > 0, kOp, ": a product has a row at least");
        const int64_t width = w.format == BodyFormat::f32 ? w.inputs : narrow_floats(w.format, w.inputs);
        const Register& from = read(in.a, width * in.d);
        STD_TORCH_CHECK(w.format == BodyFormat::f32 || !from.uniform, kOp, ": it multiplies no rows of edges");
        STD_TORCH_CHECK(in.c < 0 || read(in.c, w.outputs).uniform, kOp, ": a bias differs from edge to edge");
        STD_TORCH_CHECK(written(in, {from.uniform}).width == w.outputs * in.d, kOp, ": widths differ");
        return;
      }
      case BodyOp::reduce:
        check_reduction(in);
        return;
      case BodyOp::keep:
        STD_TORCH_CHECK(read(in.a).width <= args.out_width && total_floats == 0, kOp, ": out is too narrow");
        return;
      case BodyOp::total:
        STD_TORCH_CHECK(total_floats == 0, kOp, ": there is a sum over the edges already");
        total_floats = padded(read(in.a).width);
        return;
      case BodyOp::outer: {
        const Register &left = read(in.a), &right = read(in.b);
        STD_TORCH_CHECK(total_floats == 0, kOp, ": there is a sum over the edges already");
        STD_TORCH_CHECK(
            in.c > 0 && left.width % in.c == 0 && right.width % in.c == 0 && !right.uniform && !left.uniform, kOp,
            ": widths differ");
        total_floats = left.width / in.c * padded(right.width / in.c);
        STD_TORCH_CHECK(total_floats < kMostFloats, kOp, ": the sums are too large");
        return;
      }
    }
    STD_TORCH_CHECK(false, kOp, ": there is no step ", static_cast<int32_t>(in.op));
  }

  // Checks the ids that choose rows of a constant.
  void check_chosen(const BodyStep& in, const Tensors& consts) {
    const sparse::Matrix m = sparse::matrix(at(consts, in.b, "const"), kOp, "a table");
    STD_TORCH_CHECK(m.type == ScalarType::Float, kOp, ": a table must be float32");
    args.tables.resize(consts.size());
    args.tables[static_cast<size_t>(in.b)] = {static_cast<const float*>(m.data), m.stride, m.rows, m.width};
    const int64_t* ids = at(args.ids, in.c, "list of ids");
    for (int64_t e = 0; e < args.csr.num_edges; ++e) {
      STD_TORCH_CHECK(ids[e] >= 0 && ids[e] < m.rows, "index ", ids[e], " is out of bounds for dimension 0 with size ",
                      m.rows);
    }
    const Register& to = written(in, {false});
    STD_TORCH_CHECK(to.width == m.width && !to.uniform, kOp, ": register ", in.to, " holds no such row");
  }

  void check_runs(int32_t first, int32_t count, int64_t from, int64_t to) const {
    for (int32_t i = first; i < first + count; ++i) {
      const Run& run = args.runs[static_cast<size_t>(i)];
      const int64_t last = run.from + int64_t{std::max(run.length, 1) - 1} * run.step;
      STD_TORCH_CHECK(run.length > 0 && last < from && int64_t{run.to} + run.length <= to, kOp,
                      ": a run leaves its register");
    }
  }

  void check_reduction(const BodyStep& in) {
    STD_TORCH_CHECK(in.c >= 0 && in.c <= static_cast<int32_t>(Reduction::softmax), kOp, ": no reduction ", in.c);
    const Register& x = read(in.a);
    STD_TORCH_CHECK(in.d >= 0 && in.d + x.width <= args.out_width && total_floats == 0, kOp, ": out is too narrow");
    if (in.c != static_cast<int32_t>(Reduction::softmax)) return;
    read(in.b, x.width);
    STD_TORCH_CHECK(in.to == args.state_floats, kOp, ": the state of this softmax begins at ", args.state_floats);
    args.state_floats += 3 * padded(x.width);
  }
};

int64_t work_of(const Csr& csr) { return csr.num_dst + csr.num_edges; }

void run_rows(const EdgeBodyArgs& args) {
  sparse::for_each_chunk(args.csr, kSerialWork, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    auto* memory = scratch.get<float>(static_cast<size_t>(args.tile_floats + args.state_floats + kBodyPad));
    GNNC_DISPATCH(run_edge_body, args, begin, end, memory, nullptr);
  });
}

// Returns the first row of chunk `number` of `count`, whose rows + edges are about equal.
int64_t first_row(const Csr& csr, int64_t number, int64_t count) {
  const int64_t goal = work_of(csr) / count * number;
  int64_t low = 0, high = csr.num_dst;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (csr.rowptr[middle] + middle < goal) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sums over all edges: those of each chunk, and then these, in their order.
void run_totals(const EdgeBodyArgs& args, int64_t floats, float* totals) {
  const int64_t chunks = std::clamp<int64_t>(work_of(args.csr) / kChunkWork, 1, kMostChunks);
  std::fill_n(totals, chunks * floats, 0.0f);
  parallel_slices(chunks, 1, 2, [&](int64_t first, int64_t last) {
    static thread_local Scratch scratch;
    auto* memory = scratch.get<float>(static_cast<size_t>(args.tile_floats + args.state_floats + kBodyPad));
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t begin = chunk == 0 ? 0 : first_row(args.csr, chunk, chunks);
      const int64_t end = chunk + 1 == chunks ? args.csr.num_dst : first_row(args.csr, chunk + 1, chunks);
      if (begin < end) GNNC_DISPATCH(run_edge_body, args, begin, end, memory, totals + chunk * floats);
    }
  });
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    for (int64_t i = 0; i < floats; ++i) totals[i] += totals[chunk * floats + i];
  }
}

// Writes each result from its place among the totals.
void write_totals(const EdgeBodyArgs& args, const Numbers& places, int64_t floats, const float* totals) {
  STD_TORCH_CHECK(static_cast<int64_t>(places.size()) == args.out_stride * args.out_width, kOp,
                  ": out has a place for each of its elements");
  for (size_t i = 0; i < places.size(); ++i) {
    STD_TORCH_CHECK(places[i] >= 0 && places[i] < floats, kOp, ": there is no total ", places[i]);
    args.out[i] = totals[places[i]];
  }
}

template <Ids ids>
void edge_body(Tensor rowptr, Tensor col, Tensors dst, Tensors src, Tensors edge, Tensors consts, Tensors chosen,
               Numbers registers, Numbers steps, Numbers runs, Numbers weights, std::vector<double> numbers,
               Numbers places, Tensor out) {
  int64_t num_src = std::numeric_limits<int32_t>::max();
  for (const Tensor& t : src) num_src = std::min(num_src, t.dim() == 2 ? t.size(0) : 0);
  const sparse::Structure<ids> structure(rowptr, col, num_src, kOp);
  Program program;
  EdgeBodyArgs& args = program.args;
  args.csr = structure.csr_of();
  args.operands[0] = operands_of(dst, args.csr.num_dst, "dst");
  args.operands[1] = operands_of(src, -1, "src");
  args.operands[2] = operands_of(edge, args.csr.num_edges, "edge");
  for (const Tensor& t : chosen) {
    args.ids.push_back(sparse::flat<int64_t>(t, ScalarType::Long, args.csr.num_edges, kOp, "ids"));
  }
  args.consts.assign(numbers.begin(), numbers.end());
  args.state_floats = 0;
  const sparse::Matrix to = sparse::matrix(out, kOp, "out");
  STD_TORCH_CHECK(to.type == ScalarType::Float, kOp, ": out must be float32");
  args.out = static_cast<float*>(to.data);
  args.out_stride = to.stride;
  args.out_width = to.width;
  program.add_registers(registers);
  program.add_runs(runs);
  program.add_weights(weights, consts);
  program.add_steps(steps, consts);
  program.prepare(consts);
  if (program.total_floats > 0) {
    STD_TORCH_CHECK(out.is_contiguous(), kOp, ": a sum over the edges must be contiguous");
    args.out_stride = to.rows;
    static thread_local Scratch sums;
    auto* totals = sums.get<float>(static_cast<size_t>(program.total_floats * (kMostChunks + 1)));
    run_totals(args, program.total_floats, totals);
    return write_totals(args, places, program.total_floats, totals);
  }
  const bool keeps =
      std::any_of(args.steps.begin(), args.steps.end(), [](const BodyStep& s) { return s.op == BodyOp::keep; });
  const bool reduces =
      std::any_of(args.steps.begin(), args.steps.end(), [](const BodyStep& s) { return s.op == BodyOp::reduce; });
  STD_TORCH_CHECK(!keeps || to.rows == args.csr.num_edges, kOp, ": out must have a row for each edge");
  STD_TORCH_CHECK(!reduces || to.rows == args.csr.num_dst, kOp, ": out must have a row for each destination");
  run_rows(args);
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(
    edge_body,
    "(Tensor rowptr, Tensor col, Tensor[] dst, Tensor[] src, Tensor[] edge, Tensor[] const, Tensor[] ids, "
    "int[] registers, int[] steps, int[] runs, int[] weights, float[] numbers, int[] places, Tensor(a!) out) -> ()")
