// The update as loops that the compiler vectorises, once for each instruction set but AVX-512.
#include <algorithm>

#include "adamw_task.h"

namespace stronghold {
namespace {

// The buffers are arguments because __restrict__ is honoured there.
template <class Weight, class Grad>
STRONGHOLD_INLINE void update(typename Weight::type* __restrict__ weight, std::int16_t* __restrict__ remainder,
                              const typename Grad::type* __restrict__ grad,
                              const std::int16_t* __restrict__ grad_remainder, float* __restrict__ exp_avg,
                              float* __restrict__ exp_avg_sq, std::int64_t n, const Wide& given) {
  const Wide c = given;  // a copy of our own: the compiler need not fear that a store changes it
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = Grad::load(grad, grad_remainder, i) * c.grad_scale;
    const float w = Weight::load(weight, remainder, i);
    const float m_new =
        __builtin_fmaf(c.new1.high, g, __builtin_fmaf(c.new1.low, g, c.beta1.low * exp_avg[i]));
    const float m = __builtin_fmaf(c.beta1.high, exp_avg[i], m_new);
    const float v_kept = __builtin_fmaf(c.beta2.high, exp_avg_sq[i], c.beta2.low * exp_avg_sq[i]);
    const float v = __builtin_fmaf(__builtin_fmaf(c.new2.high, g, c.new2.low * g), g, v_kept);
    const float ratio = m / (__builtin_sqrtf(v) + c.eps);
    const float moved = __builtin_fmaf(c.minus_step_size.high, ratio,
                                       __builtin_fmaf(c.minus_step_size.low, ratio, c.decay.low * w));
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    Weight::store(weight, remainder, i, __builtin_fmaf(c.decay.high, w, moved));
  }
}

// Updates the n elements, at most kBlock, of the block that begins at element `first` of the tensor; the pointers are
// to its own elements and exponents. One loop for each width of element: the compiler vectorises each on its own.
template <class Weight, class Grad>
STRONGHOLD_INLINE void update_block(typename Weight::type* __restrict__ weight, std::int16_t* __restrict__ remainder,
                                    const typename Grad::type* __restrict__ grad,
                                    const std::int16_t* __restrict__ grad_remainder,
                                    std::uint8_t* __restrict__ exp_avg, std::uint8_t* __restrict__ exp_avg_exponent,
                                    std::uint8_t* __restrict__ exp_avg_sq,
                                    std::uint8_t* __restrict__ exp_avg_sq_exponent, int n, std::uint32_t first,
                                    std::uint32_t step, const Narrow& c) {
  float w[kBlock], g[kBlock], m[kBlock], v[kBlock];
  const std::int32_t m_base = FirstMoment::base_of(*exp_avg_exponent);
  const std::int32_t v_base = SecondMoment::base_of(*exp_avg_sq_exponent);
  for (int i = 0; i < n; ++i) m[i] = FirstMoment::decode(exp_avg[i], m_base);
  for (int i = 0; i < n; ++i) v[i] = SecondMoment::decode(exp_avg_sq[i], v_base);
  for (int i = 0; i < n; ++i) g[i] = Grad::load(grad, grad_remainder, i);
  for (int i = 0; i < n; ++i) w[i] = Weight::load(weight, remainder, i);

  std::int32_t m_greatest = 0;
  std::int32_t v_greatest = 0;
  for (int i = 0; i < n; ++i) {
    const float scaled = g[i] * c.grad_scale;
    m[i] = c.beta1 * m[i] + c.one_minus_beta1 * scaled;
    const std::int32_t v_bits = SecondMoment::magnitude(c.beta2 * v[i] + c.one_minus_beta2 * (scaled * scaled));
    v[i] = float_of(static_cast<std::uint32_t>(v_bits));
    m_greatest = std::max(m_greatest, FirstMoment::magnitude(m[i]));
    v_greatest = std::max(v_greatest, v_bits);
    const float denom = __builtin_sqrtf(v[i]) * c.denom_scale + c.eps;
    w[i] = w[i] * c.decay - c.step_size * m[i] / denom;
  }

  for (int i = 0; i < n; ++i) Weight::store(weight, remainder, i, w[i]);
  *exp_avg_exponent = FirstMoment::exponent_of(m_greatest);
  *exp_avg_sq_exponent = SecondMoment::exponent_of(v_greatest);
  const Dither<FirstMoment> m_dither(first, step);
  const Dither<SecondMoment> v_dither(first, step);
  const std::int32_t m_new_base = FirstMoment::base_of(*exp_avg_exponent);
  const std::int32_t v_new_base = SecondMoment::base_of(*exp_avg_sq_exponent);
  for (int i = 0; i < n; ++i) exp_avg[i] = FirstMoment::encode(m[i], m_new_base, m_dither[i]);
  for (int i = 0; i < n; ++i) exp_avg_sq[i] = SecondMoment::encode(v[i], v_new_base, v_dither[i]);
}

template <class Weight, class Grad>
STRONGHOLD_INLINE void update_floats(const Task& task, std::int64_t begin, std::int64_t n) {
  const Operands<Weight, Grad> o(task.segment, begin);
  update<Weight, Grad>(o.weight, o.remainder, o.grad, o.grad_remainder,
                       static_cast<float*>(task.segment.exp_avg) + begin,
                       static_cast<float*>(task.segment.exp_avg_sq) + begin, n, task.wide);
}

template <class Weight, class Grad>
STRONGHOLD_INLINE void update_one_block(const Task& task, std::int64_t begin, int n, const Narrow& c) {
  const Operands<Weight, Grad> o(task.segment, begin);
  const MomentBlocks b(task.segment, begin);
  update_block<Weight, Grad>(o.weight, o.remainder, o.grad, o.grad_remainder, b.exp_avg, b.exp_avg_exponents,
                             b.exp_avg_sq, b.exp_avg_sq_exponents, n,
                             static_cast<std::uint32_t>(task.segment.first + begin),
                             static_cast<std::uint32_t>(task.segment.step), c);
}

template <class Weight, class Grad>
STRONGHOLD_INLINE void update_blocks(const Task& task, std::int64_t begin, std::int64_t n) {
  const Narrow c = task.narrow;
  const std::int64_t whole = n - n % kBlock;
  // Twice the same call: where the number of elements is a constant, the loops inside have no remainders.
  for (std::int64_t i = 0; i < whole; i += kBlock) update_one_block<Weight, Grad>(task, begin + i, kBlock, c);
  if (whole < n) update_one_block<Weight, Grad>(task, begin + whole, static_cast<int>(n - whole), c);
}

}  // namespace

// A function for each format: of many loops in one, the compiler keeps the coefficients in memory.
#define STRONGHOLD_APART __attribute__((noinline))
#define STRONGHOLD_ADAMW(isa, target)                                                             \
  namespace {                                                                                     \
  template <class Weight, class Grad>                                                             \
  struct Loops_##isa {                                                                            \
    static STRONGHOLD_APART target void floats(const Task& t, std::int64_t begin, std::int64_t n) { \
      update_floats<Weight, Grad>(t, begin, n);                                                   \
    }                                                                                             \
    static STRONGHOLD_APART target void blocks(const Task& t, std::int64_t begin, std::int64_t n) { \
      update_blocks<Weight, Grad>(t, begin, n);                                                   \
    }                                                                                             \
  };                                                                                              \
  }                                                                                               \
  target void adamw_##isa(const Task& t, std::int64_t begin, std::int64_t n) {                    \
    run<Loops_##isa>(t, begin, n);                                                                \
  }
STRONGHOLD_ADAMW(plain, STRONGHOLD_PLAIN)
#if defined(__x86_64__)
STRONGHOLD_ADAMW(avx2, STRONGHOLD_AVX2)
#elif defined(__aarch64__)
STRONGHOLD_ADAMW(neon, )
#endif

}  // namespace stronghold
