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
constexpr int64_t kTileFloats = 8 << 10;  // of all registers: 32 KB, which L1 holds; L2 holds the weights
constexpr int64_t kLeastEdges = 32, kMostEdges = 128;
constexpr int64_t kMostChunks = 64;                 // of a sum over all edges, each of which has sums of its own
constexpr int64_t kMostPending = int64_t{1} << 26;  // floats of edges that wait to be added to their sources
constexpr int64_t kMostFloats = int64_t{1} << 28;

int64_t padded(int64_t width) { return rounded(width, kBodyPad); }

template <typename Item>
const Item& at(const std::vector<Item>& items, int64_t number, const char* what) {
  STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(items.size()), kOp, ": there is no ", what, " ", number);
  return items[static_cast<size_t>(number)];
}

// Returns the numbers of a table. They are checked and read in this copy, which nobody else writes.
Numbers numbers_of(const Tensor& t, const char* name) {
  const auto* numbers = sparse::flat<int64_t>(t, ScalarType::Long, t.numel(), kOp, name);
  return {numbers, numbers + t.numel()};
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

  void add_outs(const Tensors& outs) {
    for (const Tensor& t : outs) {
      const sparse::Matrix m = sparse::matrix(t, kOp, "out");
      STD_TORCH_CHECK(m.type == ScalarType::Float, kOp, ": out must be float32");
      args.outs.push_back({static_cast<float*>(m.data), m.rows, m.stride, m.width, nullptr, 0});
    }
    written_.assign(outs.size(), false);
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

  // Four numbers tell a weight: its constant, 1 if that is [inputs, outputs], a format, the constant of scales or -1.
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
      args.steps.push_back({static_cast<BodyOp>(number(0)), number(1), number(2), number(3), number(4), number(5), 0});
      check(args.steps.back(), consts);
    }
  }

  // Checks the places of results that no step writes: these are sums over all edges.
  void add_places(const Tensors& outs, const Numbers& places) const {
    int64_t elements = 0;
    for (size_t i = 0; i < outs.size(); ++i) {
      if (written_[i]) continue;
      STD_TORCH_CHECK(outs[i].is_contiguous(), kOp, ": a sum over the edges must be contiguous");
      elements += outs[i].numel();
    }
    STD_TORCH_CHECK(static_cast<int64_t>(places.size()) == elements, kOp,
                    ": a sum over the edges has a place for each of its elements");
    for (const int64_t place : places) {
      STD_TORCH_CHECK(place >= 0 && place < total_floats, kOp, ": there is no total ", place);
    }
  }

  // Writes each element of a sum over all edges from its place among the totals.
  void write_totals(const Numbers& places, const float* totals) const {
    const int64_t* place = places.data();
    for (size_t i = 0; i < args.outs.size(); ++i) {
      if (written_[i]) continue;
      const BodyOut& out = args.outs[i];
      for (int64_t k = 0; k < out.rows * out.width; ++k) out.data[k] = totals[*place++];
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
  std::vector<bool> defined_, written_;

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

  // Returns the result that a step writes, which must have a row for each edge, destination or source.
  const BodyOut& result(const BodyStep& in, int64_t rows) {
    const BodyOut& out = at(args.outs, in.to, "result");
    STD_TORCH_CHECK(in.op == BodyOp::reduce || !written_[static_cast<size_t>(in.to)], kOp, ": result ", in.to,
                    " is written twice");
    STD_TORCH_CHECK(out.rows == rows, kOp, ": result ", in.to, " must have ", rows, " rows, but has ", out.rows);
    written_[static_cast<size_t>(in.to)] = true;
    return out;
  }

  // Adds memory for the sums over all edges of a step, which says where they begin.
  void add_totals(const BodyStep& in, int64_t floats) {
    STD_TORCH_CHECK(in.to == total_floats, kOp, ": the sums of a step begin at ", total_floats);
    total_floats += floats;
    STD_TORCH_CHECK(total_floats < kMostFloats / kMostChunks, kOp, ": the sums are too large");
  }

  void check(BodyStep& in, const Tensors& consts) {
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
        const int64_t width = written(in, {from.uniform}).width;
        STD_TORCH_CHECK(in.b > 0 && in.d > 0 && width % in.d == 0 && width * in.b == from.width, kOp,
                        ": widths differ");
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
        const bool is_uniform = in.c < 0 || read(in.c, w.outputs).uniform;
        STD_TORCH_CHECK(is_uniform || in.d == 1, kOp, ": several rows begin with one row an edge");
        STD_TORCH_CHECK(written(in, {from.uniform, is_uniform}).width == w.outputs * in.d, kOp, ": widths differ");
        return;
      }
      case BodyOp::matmul: {
        const Register &left = read(in.a), &right = read(in.b);
        STD_TORCH_CHECK(in.c > 0 && in.d > 0 && left.width == int64_t{in.c} * in.d && right.width % in.d == 0, kOp,
                        ": widths differ");
        STD_TORCH_CHECK(written(in, {left.uniform, right.uniform}).width == right.width / in.d * in.c, kOp,
                        ": widths differ");
        return;
      }
      case BodyOp::reduce:
        check_reduction(in);
        return;
      case BodyOp::keep:
        STD_TORCH_CHECK(read(in.a).width == result(in, args.csr.num_edges).width, kOp, ": widths differ");
        return;
      case BodyOp::scatter: {
        const BodyOut& out = result(in, at(args.outs, in.to, "result").rows);
        STD_TORCH_CHECK(read(in.a).width == out.width, kOp, ": widths differ");
        return;
      }
      case BodyOp::total:
        add_totals(in, padded(read(in.a).width));
        return;
      case BodyOp::outer: {
        const Register &left = read(in.a), &right = read(in.b);
        STD_TORCH_CHECK(
            in.c > 0 && left.width % in.c == 0 && right.width % in.c == 0 && !right.uniform && !left.uniform, kOp,
            ": widths differ");
        add_totals(in, left.width / in.c * padded(right.width / in.c));
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

  void check_reduction(BodyStep& in) {
    STD_TORCH_CHECK(in.c >= 0 && in.c <= static_cast<int32_t>(Reduction::softmax), kOp, ": no reduction ", in.c);
    const Register& x = read(in.a);
    STD_TORCH_CHECK(in.d >= 0 && in.d + x.width <= result(in, args.csr.num_dst).width, kOp, ": out is too narrow");
    if (in.c != static_cast<int32_t>(Reduction::softmax)) return;
    read(in.b, x.width);
    in.state = static_cast<int32_t>(args.state_floats);
    args.state_floats += 3 * padded(x.width);
  }
};

// Chunks of rows, whose rows + edges are about equal. A body that sums over all edges has sums for each chunk.
class Chunks {
 public:
  Chunks(const Csr& csr, bool has_totals) : csr_(csr), work_(csr.num_dst + csr.num_edges) {
    count_ = std::max<int64_t>((work_ + kChunkWork - 1) / kChunkWork, 1);
    if (has_totals) count_ = std::min(count_, kMostChunks);
  }

  int64_t count() const { return count_; }

  // Returns the first row of a chunk.
  int64_t begin(int64_t number) const {
    if (number == 0) return 0;
    if (number >= count_) return csr_.num_dst;
    const int64_t goal = work_ / count_ * number;
    int64_t low = 0, high = csr_.num_dst;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (csr_.rowptr[middle] + middle < goal) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  const Csr& csr_;
  int64_t work_, count_;
};

// Runs a program on all rows.
class Pass {
 public:
  Pass(EdgeBodyArgs& args, int64_t total_floats)
      : args_(args), chunks_(args.csr, total_floats > 0), total_floats_(total_floats) {
    static thread_local Scratch sums;
    totals_ = sums.get<float>(static_cast<size_t>(total_floats * chunks_.count()));
  }

  // Returns the sums over all edges: those of each chunk, and then these, in their order.
  const float* run(const std::vector<int64_t>& by_source) {
    std::fill_n(totals_, chunks_.count() * total_floats_, 0.0f);
    for (const int64_t number : by_source) {
      const BodyOut& out = args_.outs[static_cast<size_t>(number)];
      for (int64_t row = 0; row < out.rows; ++row) std::fill_n(out.data + row * out.stride, out.width, 0.0f);
    }
    const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
    if (by_source.empty() || threads == 1 || chunks_.count() == 1) {
      run_chunks(0, chunks_.count());
    } else {
      for (int64_t chunk = 0; chunk < chunks_.count(); chunk += 2 * threads) {
        run_pending(by_source, chunk, std::min(chunk + 2 * threads, chunks_.count()));
      }
    }
    for (int64_t chunk = 1; chunk < chunks_.count(); ++chunk) {
      for (int64_t i = 0; i < total_floats_; ++i) totals_[i] += totals_[chunk * total_floats_ + i];
    }
    return totals_;
  }

 private:
  EdgeBodyArgs& args_;
  Chunks chunks_;
  int64_t total_floats_;
  float* totals_;

  void run_chunk(int64_t chunk) const {
    static thread_local Scratch scratch;
    auto* memory = scratch.get<float>(static_cast<size_t>(args_.tile_floats + args_.state_floats + kBodyPad));
    const int64_t begin = chunks_.begin(chunk), end = chunks_.begin(chunk + 1);
    if (begin < end) GNNC_DISPATCH(run_edge_body, args_, begin, end, memory, totals_ + chunk * total_floats_);
  }

  void run_chunks(int64_t first, int64_t last) const {
    parallel_slices(last - first, 1, 2, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) run_chunk(first + chunk);
    });
  }

  // Runs some chunks, whose rows for the sources wait until all are computed. One thread adds those of a source, in the
  // order of the edges. Chunks with more edges than memory is taken for run one after the other.
  void run_pending(const std::vector<int64_t>& by_source, int64_t first, int64_t last) {
    const int64_t begin = args_.csr.rowptr[chunks_.begin(first)], end = args_.csr.rowptr[chunks_.begin(last)];
    int64_t width = 0;
    for (const int64_t number : by_source) width += args_.outs[static_cast<size_t>(number)].width;
    if ((end - begin) * width > kMostPending) {
      for (int64_t chunk = first; chunk < last; ++chunk) run_chunk(chunk);
      return;
    }
    static thread_local Scratch scratch;
    auto* memory = scratch.get<float>(static_cast<size_t>((end - begin) * width));
    for (const int64_t number : by_source) {
      BodyOut& out = args_.outs[static_cast<size_t>(number)];
      out.pending = memory;
      out.pending_edge = begin;
      memory += (end - begin) * out.width;
    }
    run_chunks(first, last);
    for (const int64_t number : by_source) {
      BodyOut& out = args_.outs[static_cast<size_t>(number)];
      const int64_t slice = out.rows / torch::stable::get_num_threads() + 1;
      parallel_slices(out.rows, slice, 2,
                      [&](int64_t from, int64_t to) { GNNC_DISPATCH(add_pending, args_.csr, out, end, from, to); });
      out.pending = nullptr;
    }
  }
};

// Returns the results that a program sums by source.
std::vector<int64_t> sums_by_source(const Numbers& steps) {
  std::vector<int64_t> found;
  for (size_t i = 0; i + 5 < steps.size(); i += 6) {
    if (steps[i] == static_cast<int64_t>(BodyOp::scatter)) found.push_back(steps[i + 1]);
  }
  return found;
}

template <Ids ids>
void edge_body(Tensor rowptr, Tensor col, Tensors dst, Tensors src, Tensors edge, Tensors consts, Tensors chosen,
               Tensor registers, Tensor step_table, Tensor runs, Tensor weights, std::vector<double> numbers,
               Tensor place_table, Tensors outs) {
  const Numbers steps = numbers_of(step_table, "steps"), places = numbers_of(place_table, "places");
  const std::vector<int64_t> by_source = sums_by_source(steps);
  int64_t num_src = std::numeric_limits<int32_t>::max();
  for (const Tensor& t : src) num_src = std::min(num_src, t.dim() == 2 ? t.size(0) : 0);
  for (const int64_t number : by_source) {
    const Tensor& out = at(outs, number, "result");
    num_src = std::min(num_src, out.dim() == 2 ? out.size(0) : 0);
  }
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
  program.add_outs(outs);
  program.add_registers(numbers_of(registers, "registers"));
  program.add_runs(numbers_of(runs, "runs"));
  program.add_weights(numbers_of(weights, "weights"), consts);
  program.add_steps(steps, consts);
  program.add_places(outs, places);
  program.prepare(consts);
  program.write_totals(places, Pass(args, program.total_floats).run(by_source));
}

}  // namespace
}  // namespace gnnc

GNNC_CSR_OP(
    edge_body,
    "(Tensor rowptr, Tensor col, Tensor[] dst, Tensor[] src, Tensor[] edge, Tensor[] const, Tensor[] ids, "
    "Tensor registers, Tensor steps, Tensor runs, Tensor weights, float[] numbers, Tensor places, Tensor(a!)[] outs) "
    "-> ()")
