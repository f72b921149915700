// The bound that memory sets for an update.
#pragma once

#include <cstdint>

#include "isa.h"

namespace stronghold {

// Reads four arrays of n floats and writes all but `grad`, with next to no arithmetic, cut and scheduled as adamw
// does it: the traffic of its float format, 28 bytes an element, and nothing else that takes time. Each written value
// becomes half of itself plus 1 + |grad| / 4, so values stay finite and normal however often it is called. Throws
// std::invalid_argument before anything is written.
void stream(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq, std::int64_t n, int threads, Isa isa);

}  // namespace stronghold
