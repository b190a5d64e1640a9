// See edge_body.h for layout, traffic and floor.

#include "edge_body.h"

#include <algorithm>

#include "edge_low_product.isa.h"
#include "edge_product.isa.h"
#include "gnnc/simd_math.h"
#include "softmax.isa.h"

namespace gnnc::GNNC_ISA {
namespace {

constexpr int64_t kAhead = 8;  // edges whose rows are prefetched

// The rows of a register that the edges of a tile have.
struct View {
  float* data;
  int64_t stride, width;

  float* row(int64_t edge) const { return data + edge * stride; }
};

// Edges `begin` to `end` of a tile, which belong to one row.
struct Segment {
  int64_t row, begin, end;
  bool first, last;
};

struct Tile {
  const EdgeBodyArgs& args;
  float *registers, *state, *totals;
  int64_t first_edge = 0, edges = 0;
  std::vector<int32_t> rows;
  std::vector<Segment> segments;

  View view(int32_t number) const {
    const Register& r = args.registers[static_cast<size_t>(number)];
    if (r.uniform) return {args.uniform + r.offset, 0, r.width};
    return {registers + r.offset * args.tile_edges, r.stride, r.width};
  }
  bool is_uniform(int32_t number) const { return args.registers[static_cast<size_t>(number)].uniform; }
};

template <typename Function, typename... Views>
GNNC_INLINE void map_rows(int64_t edges, const View& to, const Function& f, const Views&... from) {
  if (to.stride != 0 && (... && (from.stride == to.stride))) {
    for (int64_t i = 0; i < edges * to.stride; i += kLanes) store(to.data + i, f(load(from.data + i)...));
    return;
  }
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t c = 0; c < to.width; c += kLanes) store(to.row(e) + c, f(load(from.row(e) + c)...));
  }
}

// Copies rows of `edges` edges; row_of(e) returns that of an edge. Few whole vectors take no loop over columns, which
// would cost more than to copy them.
template <typename RowOf>
GNNC_INLINE void copy_rows(const View& to, int64_t edges, int64_t width, const RowOf& row_of) {
  const auto whole = [&]<int kVectors>() {
    for (int64_t e = 0; e < edges; ++e) {
      const float* from = row_of(e);
      float* row = to.row(e);
      each<kVectors>([&](auto v) __attribute__((always_inline)) { store(row + v * kLanes, load(from + v * kLanes)); });
    }
  };
  if (width == kLanes) return whole.template operator()<1>();
  if (width == 2 * kLanes) return whole.template operator()<2>();
  if (width == 4 * kLanes) return whole.template operator()<4>();
  for (int64_t e = 0; e < edges; ++e) {
    const float* from = row_of(e);
    float* row = to.row(e);
    for_columns(width, [&](int64_t c, auto n) { store(row + c, load(from + c, n)); });
  }
}

void load_rows(const Tile& t, const BodyStep& in) {
  const BodyOperand& operand = t.args.operands[in.a][static_cast<size_t>(in.b)];
  const View to = t.view(in.to);
  const float* data = operand.data;
  const int64_t stride = operand.stride, width = operand.width;
  if (in.a == 2) {
    data += t.first_edge * stride;
    return copy_rows(to, t.edges, width, [=](int64_t e) { return data + e * stride; });
  }
  const int32_t* ids = in.a == 0 ? t.rows.data() : t.args.csr.col + t.first_edge;
  if (in.a == 0) return copy_rows(to, t.edges, width, [=](int64_t e) { return data + ids[e] * stride; });
  const int64_t last = t.edges - 1;
  copy_rows(to, t.edges, width, [=](int64_t e) __attribute__((always_inline)) {
    const float* ahead = data + ids[std::min(e + kAhead, last)] * stride;
    for (int64_t c = 0; c < width; c += 16) __builtin_prefetch(ahead + c);
    return data + ids[e] * stride;
  });
}

// Loads rows of a table. The ids were checked, but may be written meanwhile: those out of range read the first row.
void load_chosen(const Tile& t, const BodyStep& in) {
  const BodyTable& table = t.args.tables[static_cast<size_t>(in.b)];
  const int64_t* ids = t.args.ids[static_cast<size_t>(in.c)] + t.first_edge;
  const View to = t.view(in.to);
  for (int64_t e = 0; e < t.edges; ++e) {
    const auto id = static_cast<uint64_t>(ids[e]);
    const float* from =
        table.data + static_cast<int64_t>(id < static_cast<uint64_t>(table.rows) ? id : 0) * table.stride;
    float* row = to.row(e);
    for_columns(table.width, [&](int64_t c, auto n) { store(row + c, load(from + c, n)); });
  }
}

// Moves a run of the rows of all edges; value(x, c, n) returns its values from column c on.
template <typename Value>
GNNC_INLINE void move_run(const View& to, const View& from, const Run& run, int64_t edges, const Value& value) {
  float* at = to.data + run.to;
  const float* x = from.data + run.from;
  const auto rows = [&](const auto& row) {
    for (int64_t e = 0; e < edges; ++e, at += to.stride, x += from.stride) row();
  };
  if (run.length == kLanes) return rows([&] { store(at, value(x, 0, Whole{})); });
  if (run.length < kLanes) {
    const Tail n{run.length};
    return rows([&] { store(at, value(x, 0, n), n); });
  }
  rows([&] { for_columns(run.length, [&](int64_t c, auto n) { store(at + c, value(x, c, n), n); }); });
}

void move(const Tile& t, const BodyStep& in, int64_t edges) {
  const View to = t.view(in.to), from = t.view(in.a);
  const Run* runs = t.args.runs.data() + in.b;
  for (const Run* run = runs; run < runs + in.c; ++run) {
    if (run->step == 1) {
      move_run(to, from, *run, edges, [](const float* x, int64_t c, auto n) { return load(x + c, n); });
    } else if (run->step == 0) {
      move_run(to, from, *run, edges, [](const float* x, int64_t, auto) { return splat(*x); });
    } else {
      for (int64_t e = 0; e < edges; ++e) {
        for (int64_t i = 0; i < run->length; ++i) to.row(e)[run->to + i] = from.row(e)[run->from + i * run->step];
      }
    }
  }
}

GNNC_INLINE Floats truth(Ints mask) { return as_floats(mask & to_bits(1.0f)); }

void map_unary(const Tile& t, const BodyStep& in, int64_t edges) {
  const View to = t.view(in.to), x = t.view(in.a);
  const float constant = in.c < 0 ? 0.0f : t.args.consts[static_cast<size_t>(in.c)];
  const Floats k = splat(constant), one = splat(1.0f), zero{};
  const auto map = [&](const auto& f) { map_rows(edges, to, f, x); };
  switch (static_cast<Unary>(in.b)) {
    case Unary::relu:
      return map([&](Floats v) { return v < zero ? zero : v; });
    case Unary::leaky_relu:
      return map([&](Floats v) { return v > zero ? v : v * k; });
    case Unary::elu:
      return map([&](Floats v) { return elu(v, constant); });
    case Unary::sigmoid:
      return map([](Floats v) { return sigmoid(v); });
    case Unary::tanh:
      return map([](Floats v) { return tanh(v); });
    case Unary::gelu:
      return map([](Floats v) { return gelu(v); });
    case Unary::gelu_tanh:
      return map([](Floats v) { return gelu_tanh(v); });
    case Unary::silu:
      return map([](Floats v) { return silu(v); });
    case Unary::exp:
      return map([](Floats v) { return exp(v); });
    case Unary::log:
      return map([](Floats v) { return log(v); });
    case Unary::softplus:
      return map([](Floats v) { return softplus(v); });
    case Unary::neg:
      return map([](Floats v) { return -v; });
    case Unary::abs:
      return map([](Floats v) { return absolute(v); });
    case Unary::square:
      return map([](Floats v) { return v * v; });
    case Unary::sqrt:
      return map([](Floats v) { return square_root(v); });
    case Unary::rsqrt:
      return map([&](Floats v) { return one / square_root(v); });
    case Unary::recip:
      return map([&](Floats v) { return one / v; });
    case Unary::clamp_min:
      return map([&](Floats v) { return larger(k, v); });
    case Unary::clamp_max:
      return map([&](Floats v) { return smaller(k, v); });
    case Unary::logical_not:
      return map([&](Floats v) { return truth(v == zero); });
  }
}

void map_binary(const Tile& t, const BodyStep& in, int64_t edges) {
  const View to = t.view(in.to), left = t.view(in.a), right = t.view(in.b);
  const Floats k = splat(in.d < 0 ? 0.0f : t.args.consts[static_cast<size_t>(in.d)]), one = splat(1.0f), zero{};
  const auto map = [&](const auto& f) { map_rows(edges, to, f, left, right); };
  switch (static_cast<Binary>(in.c)) {
    case Binary::add:
      return map([](Floats a, Floats b) { return a + b; });
    case Binary::sub:
      return map([](Floats a, Floats b) { return a - b; });
    case Binary::mul:
      return map([](Floats a, Floats b) { return a * b; });
    case Binary::div:
      return map([](Floats a, Floats b) { return a / b; });
    case Binary::maximum:
      return map([](Floats a, Floats b) { return a != a ? a : larger(a, b); });
    case Binary::minimum:
      return map([](Floats a, Floats b) { return a != a ? a : smaller(a, b); });
    case Binary::eq:
      return map([](Floats a, Floats b) { return truth(a == b); });
    case Binary::ne:
      return map([](Floats a, Floats b) { return truth(a != b); });
    case Binary::lt:
      return map([](Floats a, Floats b) { return truth(a < b); });
    case Binary::le:
      return map([](Floats a, Floats b) { return truth(a <= b); });
    case Binary::gt:
      return map([](Floats a, Floats b) { return truth(a > b); });
    case Binary::ge:
      return map([](Floats a, Floats b) { return truth(a >= b); });
    case Binary::threshold_backward:
      return map([&](Floats g, Floats x) { return x <= k ? zero : g; });
    case Binary::leaky_relu_backward:
      return map([&](Floats g, Floats x) { return x > zero ? g : g * k; });
    case Binary::silu_backward:
      return map([&](Floats g, Floats x) {
        const Floats s = sigmoid(x);
        return g * (s * (one + x * (one - s)));
      });
    case Binary::sigmoid_backward:
      return map([&](Floats g, Floats y) { return g * ((one - y) * y); });
    case Binary::tanh_backward:
      return map([&](Floats g, Floats y) { return g * (one - y * y); });
    case Binary::softplus_backward:
      return map([&](Floats g, Floats x) { return x > splat(20.0f) ? g : g * sigmoid(x); });
  }
}

// Joins `count` rows of `width` values, one after the other.
template <typename Combine>
GNNC_INLINE void fold_rows(const float* x, int64_t count, int64_t width, float* out, const Combine& f) {
  for_columns(width, [&](int64_t c, auto n) {
    Floats all = load(x + c, n);
    for (int64_t k = 1; k < count; ++k) all = f(all, load(x + k * width + c, n));
    store(out + c, all, n);
  });
}

void fold_side_by_side(const Tile& t, const BodyStep& in, int64_t edges) {
  const View to = t.view(in.to), x = t.view(in.a);
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t c = 0; c < to.width; c += in.d) {
      const float* values = x.row(e) + c * in.b;
      float* out = to.row(e) + c;
      if (in.c == 0) {
        fold_rows(values, in.b, in.d, out, [](Floats a, Floats b) { return a + b; });
      } else {
        fold_rows(values, in.b, in.d, out, [](Floats a, Floats b) { return (b > a) | (b != b) ? b : a; });
      }
    }
  }
}

// Writes the results of `count` vectors, at most 16, each of whose lanes are added up.
GNNC_INLINE void write_sums(const Group& group, float* const* to, int64_t count) {
  alignas(64) float sums[16];
  group.sums(sums);
  for (int64_t i = 0; i < count; ++i) *to[i] = sums[i];
}

// Adds up `terms` neighboring values for each column of the result, 16 results at once.
void fold_sums(const View& to, const View& x, int64_t terms, int64_t edges) {
  Group group{};
  float* results[16];
  int64_t count = 0;
  for (int64_t e = 0; e < edges; ++e) {
    const float* values = x.row(e);
    float* row = to.row(e);
    for (int64_t i = 0; i < to.width; ++i, values += terms) {
      Floats total{};
      for_columns(terms, [&](int64_t c, auto n) { total += load(values + c, n); });
      group.set(count, total);
      results[count++] = row + i;
      if (count == 16) write_sums(group, results, count), count = 0;
    }
  }
  if (count > 0) write_sums(group, results, count);
}

void fold(const Tile& t, const BodyStep& in, int64_t edges) {
  if (in.d > 1) return fold_side_by_side(t, in, edges);
  const View to = t.view(in.to), x = t.view(in.a);
  if (in.c == 0) return fold_sums(to, x, in.b, edges);
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t i = 0; i < to.width; ++i) {
      const float* values = x.row(e) + i * in.b;
      float top = values[0];
      for (int64_t c = 1; c < in.b; ++c) top = values[c] > top || values[c] != values[c] ? values[c] : top;
      to.row(e)[i] = top;
    }
  }
}

void narrow(const Tile& t, const BodyStep& in, int64_t edges) {
  const View to = t.view(in.to), x = t.view(in.a);
  const auto format = static_cast<BodyFormat>(in.b);
  const int64_t width = x.width / in.c, floats = narrow_floats(format, width);
  for (int64_t h = 0; h < in.c; ++h) {
    const Rows rows{x.data + h * width, x.stride};
    const RowsOut out{to.data + h * floats, to.stride};
    format == BodyFormat::i8 ? quantize_rows(rows, edges, width, out) : round_rows(rows, edges, width, out);
  }
}

// Multiplies rows by a weight of one column, and adds the summand: dot products, the lanes of 16 of which are added up
// at once.
void multiply_by_column(const BodyWeight& w, const Rows& x, int64_t edges, const Rows& summand, const RowsOut& out) {
  const float* weight = values_of(w);
  Group group{};
  alignas(64) float sums[16];
  for (int64_t first = 0; first < edges; first += 16) {
    const int64_t count = std::min<int64_t>(16, edges - first);
    for (int64_t i = 0; i < count; ++i) {
      const float* row = x.data + (first + i) * x.stride;
      Floats total{};
      for_columns(w.inputs, [&](int64_t c, auto n) { total = fused(load(row + c, n), load(weight + c, n), total); });
      group.set(i, total);
    }
    group.sums(sums);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t e = first + i;
      out.data[e * out.stride] = summand.data == nullptr ? sums[i] : sums[i] + summand.data[e * summand.stride];
    }
  }
}

void multiply(const Tile& t, const BodyStep& in, int64_t edges) {
  const BodyWeight& w = t.args.weights[static_cast<size_t>(in.b)];
  const View to = t.view(in.to), x = t.view(in.a);
  const Rows none{nullptr, 0}, summand = in.c < 0 ? none : Rows{t.view(in.c).data, t.view(in.c).stride};
  const bool is_bias = summand.stride == 0;
  for (int64_t h = 0; h < in.d; ++h) {
    if (w.format != BodyFormat::f32) {
      const float* rows = x.data + h * narrow_floats(w.format, w.inputs);
      multiply_low({w, {rows, x.stride}, edges, summand, {to.data + h * w.outputs, to.stride}});
      continue;
    }
    if (w.outputs == 1) {
      multiply_by_column(w, {x.data + h * w.inputs, x.stride}, edges, summand, {to.data + h, to.stride});
      continue;
    }
    const Factor a{x.data + h * w.inputs, x.stride, 1, edges}, b{values_of(w), padded_outputs(w), 1, w.inputs};
    const RowsOut out{to.data + h * w.outputs, to.stride};
    add_product(a, b, w.outputs, is_bias ? summand : none, is_bias ? none : summand, out);
  }
}

void multiply_matrices(const Tile& t, const BodyStep& in, int64_t edges) {
  const View to = t.view(in.to), left = t.view(in.a), right = t.view(in.b);
  const int64_t rows = in.c, terms = in.d, columns = right.width / terms;
  const Rows none{nullptr, 0};
  for (int64_t e = 0; e < edges; ++e) {
    const Factor a{left.row(e), terms, 1, rows}, b{right.row(e), columns, 1, terms};
    add_product(a, b, columns, none, none, {to.row(e), columns});
  }
}

// Joins the edges of a segment with what `out` has of the row.
template <typename Combine>
void combine(const Segment& s, const View& x, float* out, const Combine& f) {
  for_columns(x.width, [&](int64_t c, auto n) {
    Floats part = load(x.row(s.begin) + c);
    for (int64_t e = s.begin + 1; e < s.end; ++e) part = f(part, load(x.row(e) + c));
    store(out + c, s.first ? part : f(load(out + c, n), part), n);
  });
}

// Joins the edges of a segment with the softmax of those before it. If all logits so far are -inf, the sum is 0, its
// quotient is NaN as in torch, and more of the row may follow; a NaN reaches the sum by its exponential.
void join_softmax(const Segment& s, const View& logits, const View& x, float* state, float* out) {
  const int64_t padded = (x.width + kBodyPad - 1) / kBodyPad * kBodyPad;
  for_columns(x.width, [&](int64_t c, auto n) {
    float *tops = state + c, *sums = tops + padded, *parts = sums + padded;
    const Floats before = s.first ? splat(kNothing) : load(tops);
    Floats top = before;
    for (int64_t e = s.begin; e < s.end; ++e) top = larger(load(logits.row(e) + c), top);
    const Floats shift = top == splat(kNothing) ? Floats{} : top;
    Floats total{}, weighted{};
    for (int64_t e = s.begin; e < s.end; ++e) {
      const Floats exponential = exp_of_negative(load(logits.row(e) + c) - shift);
      total += exponential;
      weighted += exponential * load(x.row(e) + c);
    }
    if (!s.first) {
      const Floats factor = exp_of_negative(before - shift);
      total += load(sums) * factor;
      weighted += load(parts) * factor;
    }
    store(tops, top);
    store(sums, total);
    store(parts, weighted);
    if (s.last) store(out + c, weighted / total, n);
  });
}

void reduce(const Tile& t, const BodyStep& in) {
  const View x = t.view(in.a);
  const BodyOut& result = t.args.outs[static_cast<size_t>(in.to)];
  for (const Segment& s : t.segments) {
    float* out = result.data + s.row * result.stride + in.d;
    if (s.begin == s.end) {
      for_columns(x.width, [&](int64_t c, auto n) { store(out + c, Floats{}, n); });
      continue;
    }
    switch (static_cast<Reduction>(in.c)) {
      case Reduction::sum:
        combine(s, x, out, [](Floats a, Floats b) { return a + b; });
        break;
      case Reduction::mean: {
        combine(s, x, out, [](Floats a, Floats b) { return a + b; });
        const auto count = static_cast<float>(t.args.csr.rowptr[s.row + 1] - t.args.csr.rowptr[s.row]);
        if (s.last) for_columns(x.width, [&](int64_t c, auto n) { store(out + c, load(out + c, n) / count, n); });
        break;
      }
      case Reduction::max:
        combine(s, x, out, [](Floats a, Floats b) { return (b > a) | (b != b) ? b : a; });
        break;
      case Reduction::min:
        combine(s, x, out, [](Floats a, Floats b) { return (b < a) | (b != b) ? b : a; });
        break;
      case Reduction::softmax:
        join_softmax(s, x, t.view(in.b), t.state + in.state, out);
        break;
    }
  }
}

void keep(const Tile& t, const BodyStep& in) {
  const View x = t.view(in.a);
  const BodyOut& result = t.args.outs[static_cast<size_t>(in.to)];
  for (int64_t e = 0; e < t.edges; ++e) {
    float* out = result.data + (t.first_edge + e) * result.stride;
    for_columns(x.width, [&](int64_t c, auto n) { store(out + c, load(x.row(e) + c, n), n); });
  }
}

void add_to(float* row, const float* x, int64_t width) {
  for_columns(width, [&](int64_t c, auto n) { store(row + c, load(row + c, n) + load(x + c, n), n); });
}

// Adds the rows of a tile to those of their sources, or leaves them for add_pending.
void scatter(const Tile& t, const BodyStep& in) {
  const View x = t.view(in.a);
  const BodyOut& result = t.args.outs[static_cast<size_t>(in.to)];
  if (result.pending != nullptr) {
    float* to = result.pending + (t.first_edge - result.pending_edge) * result.width;
    for (int64_t e = 0; e < t.edges; ++e, to += result.width) {
      for_columns(result.width, [&](int64_t c, auto n) { store(to + c, load(x.row(e) + c, n), n); });
    }
    return;
  }
  const int32_t* ids = t.args.csr.col + t.first_edge;
  for (int64_t e = 0; e < t.edges; ++e) {
    if (e + kAhead < t.edges) {
      const float* ahead = result.data + ids[e + kAhead] * result.stride;
      for (int64_t c = 0; c < x.width; c += 16) __builtin_prefetch(ahead + c, 1);
    }
    add_to(result.data + ids[e] * result.stride, x.row(e), x.width);
  }
}

void add_totals(const Tile& t, const BodyStep& in) {
  const View x = t.view(in.a);
  for_columns(x.width, [&](int64_t c, auto) {
    Floats part{};
    for (int64_t e = 0; e < t.edges; ++e) part += load(x.row(e) + c);
    store(t.totals + in.to + c, load(t.totals + in.to + c) + part);
  });
}

void add_outer(const Tile& t, const BodyStep& in) {
  const View left = t.view(in.a), right = t.view(in.b);
  const int64_t rows = left.width / in.c, columns = right.width / in.c;
  const int64_t padded = (columns + kBodyPad - 1) / kBodyPad * kBodyPad;
  for (int64_t h = 0; h < in.c; ++h) {
    const Factor a{left.data + h * rows, 1, left.stride, rows}, b{right.data + h * columns, right.stride, 1, t.edges};
    add_product(a, b, columns, {t.totals + in.to, padded}, {nullptr, 0}, {t.totals + in.to, padded});
  }
}

void run_step(const Tile& t, const BodyStep& in, int64_t edges) {
  switch (in.op) {
    case BodyOp::load:
      return in.a == 4 ? load_chosen(t, in) : load_rows(t, in);
    case BodyOp::move:
      return move(t, in, edges);
    case BodyOp::fill:
      return map_rows(edges, t.view(in.to), [k = splat(t.args.consts[static_cast<size_t>(in.a)])] { return k; });
    case BodyOp::unary:
      return map_unary(t, in, edges);
    case BodyOp::binary:
      return map_binary(t, in, edges);
    case BodyOp::where:
      return map_rows(
          edges, t.view(in.to), [](Floats mask, Floats a, Floats b) { return mask != Floats{} ? a : b; }, t.view(in.a),
          t.view(in.b), t.view(in.c));
    case BodyOp::fold:
      return fold(t, in, edges);
    case BodyOp::narrow:
      return narrow(t, in, edges);
    case BodyOp::product:
      return multiply(t, in, edges);
    case BodyOp::matmul:
      return multiply_matrices(t, in, edges);
    case BodyOp::reduce:
      return reduce(t, in);
    case BodyOp::keep:
      return keep(t, in);
    case BodyOp::total:
      return add_totals(t, in);
    case BodyOp::outer:
      return add_outer(t, in);
    case BodyOp::scatter:
      return scatter(t, in);
  }
}

// Returns whether a step computes a uniform register.
bool is_prepared(const Tile& t, const BodyStep& in) { return in.op < BodyOp::reduce && t.is_uniform(in.to); }

void run_tile(Tile& t) {
  for (const BodyStep& in : t.args.steps) {
    if (!is_prepared(t, in)) run_step(t, in, t.edges);
  }
  t.first_edge += t.edges;
  t.edges = 0;
  t.rows.clear();
  t.segments.clear();
}

void add_segment(Tile& t, int64_t row, int64_t edges, bool first, bool last) {
  t.segments.push_back({row, t.edges, t.edges + edges, first, last});
  t.rows.insert(t.rows.end(), static_cast<size_t>(edges), static_cast<int32_t>(row));
  t.edges += edges;
}

}  // namespace

void prepare_edge_body(const EdgeBodyArgs& args) {
  const Tile t{args, nullptr, nullptr, nullptr, 0, 0, {}, {}};
  for (const BodyWeight& w : args.weights) pack_weight(w);
  for (const BodyStep& in : args.steps) {
    if (is_prepared(t, in) && in.op != BodyOp::load) run_step(t, in, 1);
  }
}

void run_edge_body(const EdgeBodyArgs& args, int64_t row_begin, int64_t row_end, float* scratch, float* totals) {
  Tile t{args, scratch, scratch + args.tile_floats, totals, args.csr.rowptr[row_begin], 0, {}, {}};
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t edges = args.csr.rowptr[row + 1] - args.csr.rowptr[row];
    if (t.edges + edges > args.tile_edges) run_tile(t);
    int64_t done = 0;
    for (; edges - done > args.tile_edges; done += args.tile_edges) {
      add_segment(t, row, args.tile_edges, done == 0, false);
      run_tile(t);
    }
    add_segment(t, row, edges - done, done == 0, true);
    if (done > 0) run_tile(t);
  }
  if (!t.segments.empty()) run_tile(t);
}

void add_pending(const Csr& csr, const BodyOut& out, int64_t edge_end, int64_t source_begin, int64_t source_end) {
  const float* x = out.pending;
  for (int64_t e = out.pending_edge; e < edge_end; ++e, x += out.width) {
    const int64_t source = csr.col[e];
    if (source >= source_begin && source < source_end) add_to(out.data + source * out.stride, x, out.width);
  }
}

}  // namespace gnnc::GNNC_ISA
