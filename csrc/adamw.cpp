#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#if defined(__x86_64__)
#define STRONGHOLD_X86 1
#else
#define STRONGHOLD_X86 0
#endif

#define STRONGHOLD_INLINE inline __attribute__((always_inline))

namespace stronghold {
namespace {

// Elements that one thread takes at a time. The cuts depend on the lengths alone, never on the thread count.
constexpr std::int64_t kChunk = 64 * 1024;

// Partial sums of squared_norm within a chunk: element i of the chunk is added to sum i % kLanes. A fixed number,
// whatever the width of a register, gives every instruction set the same order of additions.
constexpr int kLanes = 16;

struct Coefficients {
  float grad_scale;
  double decay;        // 1 - lr * weight_decay
  double beta1;
  double one_minus_beta1;
  double beta2;
  double one_minus_beta2;
  double step_size;    // lr / (1 - beta1^t)
  double denom_scale;  // 1 / sqrt(1 - beta2^t)
  double eps;
};

Coefficients coefficients(const Segment& s) {
  const double t = static_cast<double>(s.step);
  return {s.grad_scale,
          1.0 - s.lr * s.weight_decay,
          s.beta1,
          1.0 - s.beta1,
          s.beta2,
          1.0 - s.beta2,
          s.lr / (1.0 - std::pow(s.beta1, t)),
          1.0 / std::sqrt(1.0 - std::pow(s.beta2, t)),
          s.eps};
}

// ---- element access ----

struct F32 {
  using type = float;
  static STRONGHOLD_INLINE float load(float x) { return x; }
};

struct Bf16 {
  using type = std::uint16_t;
  static STRONGHOLD_INLINE float load(std::uint16_t x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// Rounds to nearest, ties to even; a NaN becomes the quiet NaN 0x7FC0, as rounding could carry it to infinity.
STRONGHOLD_INLINE std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// ---- bodies: compiled once per instruction set, vectorised by the compiler ----

template <class Grad, bool has_low>
STRONGHOLD_INLINE void adamw_body(float* __restrict__ weight, const typename Grad::type* __restrict__ grad,
                                  float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq,
                                  std::uint16_t* __restrict__ low, std::int64_t n, const Coefficients& given) {
  const Coefficients c = given;  // a copy of our own: the compiler need not fear that a store changes it
  for (std::int64_t i = 0; i < n; ++i) {
    const double g = static_cast<double>(Grad::load(grad[i]) * c.grad_scale);
    const double m = c.beta1 * static_cast<double>(exp_avg[i]) + c.one_minus_beta1 * g;
    const double v = c.beta2 * static_cast<double>(exp_avg_sq[i]) + c.one_minus_beta2 * (g * g);
    const double denom = __builtin_sqrt(v) * c.denom_scale + c.eps;
    const double w = static_cast<double>(weight[i]) * c.decay - c.step_size * m / denom;
    const float stored = static_cast<float>(w);
    exp_avg[i] = static_cast<float>(m);
    exp_avg_sq[i] = static_cast<float>(v);
    weight[i] = stored;
    if (has_low) low[i] = to_bf16(stored);
  }
}

STRONGHOLD_INLINE void adamw_chunk_body(const Segment& s, const Coefficients& c, std::int64_t begin,
                                        std::int64_t n) {
  float* weight = s.weight + begin;
  float* exp_avg = s.exp_avg + begin;
  float* exp_avg_sq = s.exp_avg_sq + begin;
  if (s.grad_bf16) {
    const auto* grad = static_cast<const std::uint16_t*>(s.grad) + begin;
    if (s.low != nullptr)
      adamw_body<Bf16, true>(weight, grad, exp_avg, exp_avg_sq, s.low + begin, n, c);
    else
      adamw_body<Bf16, false>(weight, grad, exp_avg, exp_avg_sq, nullptr, n, c);
  } else {
    const auto* grad = static_cast<const float*>(s.grad) + begin;
    if (s.low != nullptr)
      adamw_body<F32, true>(weight, grad, exp_avg, exp_avg_sq, s.low + begin, n, c);
    else
      adamw_body<F32, false>(weight, grad, exp_avg, exp_avg_sq, nullptr, n, c);
  }
}

template <class Element>
STRONGHOLD_INLINE double squares_body(const typename Element::type* __restrict__ data, std::int64_t n) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = static_cast<double>(Element::load(data[i + lane]));
      lanes[lane] += x * x;
    }
  for (int lane = 0; i < n; ++i, ++lane) {
    const double x = static_cast<double>(Element::load(data[i]));
    lanes[lane] += x * x;
  }
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

STRONGHOLD_INLINE double squares_chunk_body(const Span& s, std::int64_t begin, std::int64_t n) {
  if (s.bf16) return squares_body<Bf16>(static_cast<const std::uint16_t*>(s.data) + begin, n);
  return squares_body<F32>(static_cast<const float*>(s.data) + begin, n);
}

// ---- the bodies under each instruction set ----

struct Kernels {
  void (*adamw)(const Segment&, const Coefficients&, std::int64_t, std::int64_t);
  double (*squares)(const Span&, std::int64_t, std::int64_t);
};

#define STRONGHOLD_KERNELS(isa, target)                                                                          \
  target void adamw_##isa(const Segment& s, const Coefficients& c, std::int64_t begin, std::int64_t n) {         \
    adamw_chunk_body(s, c, begin, n);                                                                            \
  }                                                                                                              \
  target double squares_##isa(const Span& s, std::int64_t begin, std::int64_t n) {                               \
    return squares_chunk_body(s, begin, n);                                                                      \
  }

STRONGHOLD_KERNELS(plain, )
#if STRONGHOLD_X86
STRONGHOLD_KERNELS(avx2, __attribute__((target("avx2"))))
STRONGHOLD_KERNELS(avx512,
                   __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

Kernels kernels(Isa isa) {
#if STRONGHOLD_X86
  if (isa == Isa::avx512) return {adamw_avx512, squares_avx512};
  if (isa == Isa::avx2) return {adamw_avx2, squares_avx2};
#endif
  (void)isa;
  return {adamw_plain, squares_plain};
}

// ---- cutting and checking ----

struct Chunk {
  std::size_t owner;  // index of the segment or span
  std::int64_t begin;
  std::int64_t n;
};

template <class Piece>
std::vector<Chunk> cut(const std::vector<Piece>& pieces) {
  std::vector<Chunk> chunks;
  for (std::size_t owner = 0; owner < pieces.size(); ++owner)
    for (std::int64_t begin = 0; begin < pieces[owner].n; begin += kChunk)
      chunks.push_back({owner, begin, std::min(kChunk, pieces[owner].n - begin)});
  return chunks;
}

// Runs work(i) for every i below count on `threads` threads, one parallel region in all.
template <class Work>
void for_each(std::int64_t count, int threads, const Work& work) {
  if (threads == 1 || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) work(i);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::int64_t i = 0; i < count; ++i) work(i);
}

void check_threads(int threads) {
  if (threads < 1)
    throw std::invalid_argument("threads must be 1 or more (got " + std::to_string(threads) + ")");
}

void check_length(const char* what, std::size_t index, std::int64_t n) {
  if (n < 0)
    throw std::invalid_argument(std::string(what) + " " + std::to_string(index) +
                                " must not have a negative length (got " + std::to_string(n) + ")");
}

// Overlapping buffers would make the result depend on which thread came first.
void check_apart(const std::vector<Segment>& segments) {
  struct Range {
    const char* begin;
    const char* end;
    std::size_t owner;
  };
  std::vector<Range> ranges;
  ranges.reserve(5 * segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    const auto add = [&](const void* data, std::int64_t width) {
      if (data == nullptr || s.n == 0) return;
      const char* begin = static_cast<const char*>(data);
      ranges.push_back({begin, begin + s.n * width, i});
    };
    add(s.weight, 4);
    add(s.grad, s.grad_bf16 ? 2 : 4);
    add(s.exp_avg, 4);
    add(s.exp_avg_sq, 4);
    add(s.low, 2);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].begin < ranges[i - 1].end)
      throw std::invalid_argument("the buffers of a step must not overlap (two of segments " +
                                  std::to_string(std::min(ranges[i - 1].owner, ranges[i].owner)) + " and " +
                                  std::to_string(std::max(ranges[i - 1].owner, ranges[i].owner)) +
                                  " do); pass each tensor once");
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names = {"plain"};
#if STRONGHOLD_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) names.push_back("avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    names.push_back("avx512");
#endif
  return names;
}

const char* best_isa() {
  const std::string name = available_isas().back();
  return name == "avx512" ? "avx512" : name == "avx2" ? "avx2" : "plain";
}

Isa isa_named(const std::string& name) {
  const std::vector<std::string> names = available_isas();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    std::string known;
    for (const std::string& each : names) known += (known.empty() ? "" : ", ") + each;
    throw std::invalid_argument("isa must be one that this processor runs (got '" + name + "', it runs " + known +
                                ")");
  }
  return name == "avx512" ? Isa::avx512 : name == "avx2" ? Isa::avx2 : Isa::plain;
}

void adamw(const std::vector<Segment>& segments, int threads, Isa isa) {
  check_threads(threads);
  std::vector<Coefficients> scalars;
  scalars.reserve(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    check_length("segment", i, segments[i].n);
    if (segments[i].step < 1)
      throw std::invalid_argument("step counts from 1 (got " + std::to_string(segments[i].step) + " in segment " +
                                  std::to_string(i) + ")");
    scalars.push_back(coefficients(segments[i]));
  }
  check_apart(segments);
  const std::vector<Chunk> chunks = cut(segments);
  const auto update = kernels(isa).adamw;
  for_each(static_cast<std::int64_t>(chunks.size()), threads, [&](std::int64_t i) {
    const Chunk& chunk = chunks[i];
    update(segments[chunk.owner], scalars[chunk.owner], chunk.begin, chunk.n);
  });
}

double squared_norm(const std::vector<Span>& spans, int threads, Isa isa) {
  check_threads(threads);
  for (std::size_t i = 0; i < spans.size(); ++i) check_length("span", i, spans[i].n);
  const std::vector<Chunk> chunks = cut(spans);
  std::vector<double> partial(chunks.size());
  const auto squares = kernels(isa).squares;
  for_each(static_cast<std::int64_t>(chunks.size()), threads, [&](std::int64_t i) {
    partial[i] = squares(spans[chunks[i].owner], chunks[i].begin, chunks[i].n);
  });
  double sum = 0.0;
  for (const double part : partial) sum += part;
  return sum;
}

}  // namespace stronghold
