#include "stream.h"

#include <cmath>

#include "chunks.h"

namespace stronghold {
namespace {

STRONGHOLD_INLINE void stream_body(float* __restrict__ weight, const float* __restrict__ grad,
                                   float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float added = 1.0f + 0.25f * __builtin_fabsf(grad[i]);
    weight[i] = 0.5f * weight[i] + added;
    exp_avg[i] = 0.5f * exp_avg[i] + added;
    exp_avg_sq[i] = 0.5f * exp_avg_sq[i] + added;
  }
}

#define STRONGHOLD_STREAM(isa, target)                                                                            \
  target void stream_##isa(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq, std::int64_t n) { \
    stream_body(weight, grad, exp_avg, exp_avg_sq, n);                                                            \
  }
STRONGHOLD_EACH_ISA(STRONGHOLD_STREAM)

constexpr decltype(&stream_plain) kStream[] = {
#define STRONGHOLD_ENTRY(isa, target) stream_##isa,
    STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)
#undef STRONGHOLD_ENTRY
};

}  // namespace

void stream(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq, std::int64_t n, int threads,
            Isa isa) {
  check_length("tensor", 0, n);
  Buffers buffers("tensors");
  buffers.add(0, weight, 4 * n);
  buffers.add(1, grad, 4 * n);
  buffers.add(2, exp_avg, 4 * n);
  buffers.add(3, exp_avg_sq, 4 * n);
  buffers.check_apart();
  const auto body = kStream[static_cast<int>(isa)];
  const std::vector<Chunk> chunks = cut({n});
  for_each_chunk(chunks, threads, [&](std::int64_t i) {
    const std::int64_t begin = chunks[i].begin;
    body(weight + begin, grad + begin, exp_avg + begin, exp_avg_sq + begin, chunks[i].n);
  });
}

}  // namespace stronghold
