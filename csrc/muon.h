// Muon's work on the elements of a matrix: its momentum and direction before the iteration, its weight behind it.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace stronghold {

// With g the gradient times grad_scale, in float:
//   m = lerp(m, g, 1 - momentum)
//   direction = bfloat16(nesterov ? lerp(g, m, momentum) : m), to nearest, ties to even
// lerp(a, b, w) is fma(w, b - a, a) for |w| < 1/2, else fma(w - 1, b - a, b), as PyTorch has it.
struct Momentum {
  std::uint16_t* direction;
  const void* grad;  // floats, or bfloat16s where `grad_bf16`
  const std::int16_t* grad_remainder;  // null, or the low halves of the gradients (formats.h)
  bool grad_bf16;
  float* momentum_buffer;
  std::int64_t n;
  double momentum;
  bool nesterov;
  double grad_scale;
};

// weight = fma(direction, -lr, weight * (1 - decay)), in float. `remainder` is null, or has the weights' low halves.
struct Move {
  const std::uint16_t* direction;
  void* weight;
  std::int16_t* remainder;
  std::int64_t n;
  double lr;
  double decay;
};

// Neither `threads` nor `isa` changes a bit. Both throw std::invalid_argument before anything is written.
void muon_momentum(const std::vector<Momentum>& matrices, int threads, Isa isa);
void muon_move(const std::vector<Move>& matrices, int threads, Isa isa);

}  // namespace stronghold
