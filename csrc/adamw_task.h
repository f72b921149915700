// What the bodies of adamw share: a segment with its coefficients, and how a body is called.
#pragma once

#include "adamw.h"
#include "formats.h"
#include "isa.h"

namespace stronghold {

// A coefficient as the sum of two floats: `high` is the coefficient rounded towards zero and `low` the rest, of the same
// sign and never zero beside it, so that an infinity times either is the same infinity.
struct Pair {
  float high;
  float low;
};

// What elements with float moments are updated with; adamw.h has the formulas.
struct Wide {
  float grad_scale;  // a power of two
  Pair beta1;
  Pair new1;
  Pair beta2;
  Pair new2;
  float eps;  // corrected
  Pair minus_step_size;
  Pair decay;
};

// What elements with 8-bit moments are updated with.
struct Narrow {
  float grad_scale;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;
  float denom_scale;
  float eps;
};

struct Task {
  Segment segment;
  Wide wide;
  Narrow narrow;
};

// A body updates n elements of the task's segment from `begin` on, a multiple of kBlock where the moments are 8-bit.
using AdamwBody = void(const Task& task, std::int64_t begin, std::int64_t n);

// adamw_plain and so on.
#define STRONGHOLD_DECLARE(isa, target) AdamwBody adamw_##isa;
STRONGHOLD_EACH_ISA(STRONGHOLD_DECLARE)
#undef STRONGHOLD_DECLARE

// Where a segment's weight and gradient continue at `begin`.
template <class Weight, class Grad>
struct Operands {
  using WeightFormat = Weight;
  using GradFormat = Grad;

  STRONGHOLD_INLINE Operands(const Segment& s, std::int64_t begin)
      : weight(static_cast<typename Weight::type*>(s.weight) + begin),
        remainder(s.remainder == nullptr ? nullptr : s.remainder + begin),
        grad(static_cast<const typename Grad::type*>(s.grad) + begin),
        grad_remainder(s.grad_remainder == nullptr ? nullptr : s.grad_remainder + begin) {}

  typename Weight::type* weight;
  std::int16_t* remainder;
  const typename Grad::type* grad;
  const std::int16_t* grad_remainder;
};

// Where its 8-bit moments continue.
struct MomentBlocks {
  STRONGHOLD_INLINE MomentBlocks(const Segment& s, std::int64_t begin)
      : exp_avg(static_cast<std::uint8_t*>(s.exp_avg) + begin),
        exp_avg_exponents(s.exp_avg_exponents + begin / kBlock),
        exp_avg_sq(static_cast<std::uint8_t*>(s.exp_avg_sq) + begin),
        exp_avg_sq_exponents(s.exp_avg_sq_exponents + begin / kBlock) {}

  std::uint8_t* exp_avg;
  std::uint8_t* exp_avg_exponents;
  std::uint8_t* exp_avg_sq;
  std::uint8_t* exp_avg_sq_exponents;
};

// Calls Body<Weight, Grad>::floats or ::blocks, as the formats of the task's weight, gradient and moments are.
template <template <class, class> class Body, class Weight, class Grad>
STRONGHOLD_INLINE void run_on(const Task& task, std::int64_t begin, std::int64_t n) {
  if (task.segment.exp_avg_exponents == nullptr)
    Body<Weight, Grad>::floats(task, begin, n);
  else
    Body<Weight, Grad>::blocks(task, begin, n);
}

template <template <class, class> class Body, class Weight>
STRONGHOLD_INLINE void run_on(const Task& task, std::int64_t begin, std::int64_t n) {
  if (task.segment.grad_remainder != nullptr)
    run_on<Body, Weight, Split>(task, begin, n);
  else if (task.segment.grad_bf16)
    run_on<Body, Weight, Bf16>(task, begin, n);
  else
    run_on<Body, Weight, F32>(task, begin, n);
}

template <template <class, class> class Body>
STRONGHOLD_INLINE void run(const Task& task, std::int64_t begin, std::int64_t n) {
  if (task.segment.remainder != nullptr)
    run_on<Body, Split>(task, begin, n);
  else
    run_on<Body, F32>(task, begin, n);
}

}  // namespace stronghold
