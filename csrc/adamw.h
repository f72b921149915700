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
// With t = step, correction = sqrt(1 - beta2^t) and grad_scale = 2^k s with 1 <= s < 2, an element with float moments is
// updated in float, in this order of operations. fma(a, b, c) = a b + c is rounded once. A coefficient x is the sum of
// two floats, x' = x rounded towards zero and x" = what that lacks, so that its own rounding is lost nowhere; the
// coefficients are computed in double:
//   g = 2^k grad
//   m = fma(beta1', m, fma(new1', g, fma(new1", g, beta1" m)))              new1 = (1 - beta1) s
//   v = fma(fma(new2', g, new2" g), g, fma(beta2', v, beta2" v))            new2 = (1 - beta2) s^2
//   r = m / (sqrt(v) + eps correction)
//   w = fma(decay', w, fma(size', r, fma(size", r, decay" w)))              size = -lr correction / (1 - beta1^t),
//                                                                           decay = 1 - lr weight_decay
// How far that is from exact arithmetic on the stored values, with u = 2^-24, the relative error of one rounding, which
// is between half an ulp and one, and without the products of two errors:
//   m: half an ulp each for what is new and for the sum, which may be in the next binade: within 1.5 ulp of the larger
//      of beta1 m and new1 g.
//   v: u for each of two parts, of which none is negative, and half an ulp for their sum: within 1.5 ulp of v.
//   r: 2 u of m; 2 u of the root, half of v's and its own, or u of eps, and u of their sum; u of the quotient. So 6 u of
//      itself, where m's terms do not cancel.
//   w: half an ulp of w, half an ulp of the update, and 6 u of the update that there would be had m's terms one sign.
// So a weight is within 2 ulp of itself where it is at least 8 times its update: 1 for its rounding, if the sum is in the
// next binade, 1/8 for the update's, 6 / 8. Where it is smaller, as a bias that begins at zero is, its error is that of
// its update, 6 u, and the two roundings: within 7.5 ulp of the larger of both. That holds where nothing underflows: v and
// what is computed from it lose relative accuracy below 2^-126, as any fp32 implementation does.
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
