// The AdamW update and the gradient norm on host memory.
//
// Nothing here knows Python or PyTorch: pointers, lengths and numbers in, memory changed or a number out.
// Errors are thrown (std::invalid_argument); nothing is printed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stronghold {

// The instruction sets that a kernel is compiled for. All compute the same bits: products and sums are never
// contracted into fused multiply-adds, and every sum has one fixed order.
enum class Isa { plain, avx2, avx512 };

// The sets that this processor runs, the plainest first.
std::vector<std::string> available_isas();

// The last of available_isas().
const char* best_isa();

// The set of that name. Throws std::invalid_argument where it is unknown or this processor lacks it.
Isa isa_named(const std::string& name);

// One tensor's share of an AdamW step. The buffers hold `n` elements each and overlap nowhere.
struct Segment {
  float* weight;
  const void* grad;  // float, or bfloat16 where grad_bf16
  bool grad_bf16;
  float* exp_avg;
  float* exp_avg_sq;
  std::uint16_t* low;  // null, or where the new weight goes as bfloat16, rounded to nearest even
  std::int64_t n;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  std::int64_t step;  // counted from 1, this step included
  float grad_scale;   // what the gradient is multiplied by first, in float
};

// One step of torch.optim.AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019) on
// every segment: loads and stores are float, what happens between them is double, so that each result is within
// one ulp of exact arithmetic on the stored values. One parallel region for the whole call; `threads` changes
// the time it takes and nothing else. Throws std::invalid_argument before anything is written.
void adamw(const std::vector<Segment>& segments, int threads, Isa isa);

// A run of `n` floats, or bfloat16s where `bf16`.
struct Span {
  const void* data;
  bool bf16;
  std::int64_t n;
};

// The sum of squares of all elements, in double. Neither `threads` nor `isa` changes a bit of it. It is finite
// if and only if every element is: the square of a float is far inside double's range.
double squared_norm(const std::vector<Span>& spans, int threads, Isa isa);

}  // namespace stronghold
