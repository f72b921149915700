// The AdamW update on host memory.
//
// Nothing in the kernels knows Python or PyTorch: pointers, lengths and numbers in, memory changed or numbers out.
// Errors are thrown (std::invalid_argument); nothing is printed.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace stronghold {

// One tensor's share of an AdamW step. The buffers hold `n` elements each (exponents: n / 64 rounded up) and overlap
// nowhere. formats.h defines the split float and the 8-bit moments.
struct Segment {
  void* weight;                       // float, or the upper halves of a split float
  std::int16_t* remainder;            // null, or the weight's lower halves
  const void* grad;                   // float, or bfloat16 where grad_bf16
  const std::int16_t* grad_remainder; // null, or with it the gradient is a split float
  bool grad_bf16;
  void* exp_avg;                      // float, or the codes of an 8-bit first moment
  std::uint8_t* exp_avg_exponents;    // null, or the exponents
  void* exp_avg_sq;                   // float, or the codes of an 8-bit second moment
  std::uint8_t* exp_avg_sq_exponents; // null, or the exponents; both moments are float or both are 8-bit
  std::int64_t n;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  std::int64_t step;  // counted from 1, this step included
  double grad_scale;  // what the gradient is multiplied by
  std::int64_t first; // the number of the first element in its tensor, a multiple of 64 where the moments are 8-bit
};

// One step of torch.optim.AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019) on every
// segment. `threads` and `isa` change the time it takes and nothing else. Throws std::invalid_argument before anything
// is written.
//
// With t = step, decay = 1 - lr * weight_decay and correction = sqrt(1 - beta2^t), an element with float moments is
// updated in double, between a float load and a float store, in this order of operations:
//   m = new1 * grad + (beta1 * m)                        fused, with new1 = (1 - beta1) * grad_scale
//   v = new2 * (grad * grad) + (beta2 * v)               fused, with new2 = (1 - beta2) * grad_scale^2
//   denom = sqrt(v) + eps * correction
//   w = w * decay - step_size * m / denom                with step_size = lr * correction / (1 - beta1^t);
//                                                        the product before the quotient
// so that each result is within one ulp of exact arithmetic on the stored values.
//
// An element with 8-bit moments is updated in float, the coefficients rounded to float once:
//   g = grad * grad_scale
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * (g * g)
//   denom = sqrt(v) * (1 / correction) + eps
//   w = w * decay - lr / (1 - beta1^t) * m / denom
// where v, after its line, is the float with the bits min(bits & 0x7FFFFFFF, 0x7B780000): the update sees the new moments
// before they are encoded, for element i of the tensor and step t.
void adamw(const std::vector<Segment>& segments, int threads, Isa isa);

}  // namespace stronghold
