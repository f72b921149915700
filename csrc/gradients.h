// Sums over gradients on host memory: their norms, and their accumulation.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace stronghold {

// A run of `n` floats, or bfloat16s where `bf16`.
struct Span {
  const void* data;
  bool bf16;
  std::int64_t n;
};

// The sum of squares of each span's elements, in double. Neither `threads` nor `isa` changes a bit of it. It is finite
// if and only if every element is: the square of a float is far inside double's range. Throws std::invalid_argument.
std::vector<double> squared_norms(const std::vector<Span>& spans, int threads, Isa isa);

// `source` is to be added to `target`, `n` elements each that overlap nowhere: floats both, or, where there is a
// remainder, a split float (see formats.h) and bfloat16s.
struct Addition {
  void* target;
  std::int16_t* remainder;  // null, or the low halves of the targets
  const void* source;
  std::int64_t n;
};

// Adds each source to its target in float and returns the sums of squares of the new targets, the same bits as
// squared_norms gives for them as floats. Throws std::invalid_argument before anything is written.
std::vector<double> accumulate(const std::vector<Addition>& additions, int threads, Isa isa);

}  // namespace stronghold
