#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "adamw_task.h"
#include "chunks.h"
#include "formats.h"

namespace stronghold {
namespace {

Pair pair_of(double x) {
  float high = static_cast<float>(x);
  if (std::fabs(static_cast<double>(high)) > std::fabs(x)) high = std::nextafterf(high, 0.0f);
  const double least = std::fabs(x) * 0x1p-60;
  const double rest = std::max(std::fabs(x) - std::fabs(static_cast<double>(high)), least);
  return {high, static_cast<float>(std::copysign(rest, x))};
}

Wide wide_coefficients(const Segment& s) {
  const double t = static_cast<double>(s.step);
  const double correction = std::sqrt(1.0 - std::pow(s.beta2, t));
  // The power of two goes to the gradient, where it costs no rounding and keeps the squares inside float's range.
  const int exponent = s.grad_scale == 0.0 || !std::isfinite(s.grad_scale) ? 0 : std::ilogb(s.grad_scale);
  const double scale = std::ldexp(s.grad_scale, -exponent);
  return {static_cast<float>(std::ldexp(1.0, exponent)),
          pair_of(s.beta1),
          pair_of((1.0 - s.beta1) * scale),
          pair_of(s.beta2),
          pair_of((1.0 - s.beta2) * scale * scale),
          static_cast<float>(s.eps * correction),
          pair_of(-s.lr * correction / (1.0 - std::pow(s.beta1, t))),
          pair_of(1.0 - s.lr * s.weight_decay)};
}

Narrow narrow_coefficients(const Segment& s) {
  const double t = static_cast<double>(s.step);
  return {static_cast<float>(s.grad_scale),
          static_cast<float>(1.0 - s.lr * s.weight_decay),
          static_cast<float>(s.beta1),
          static_cast<float>(1.0 - s.beta1),
          static_cast<float>(s.beta2),
          static_cast<float>(1.0 - s.beta2),
          static_cast<float>(s.lr / (1.0 - std::pow(s.beta1, t))),
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(s.beta2, t))),
          static_cast<float>(s.eps)};
}

constexpr AdamwBody* kBodies[] = {
#define STRONGHOLD_ENTRY(isa, target) adamw_##isa,
    STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)
#undef STRONGHOLD_ENTRY
};

void check(const Segment& s, std::size_t index) {
  check_length("segment", index, s.n);
  const auto refuse = [&](const std::string& rule) {
    throw std::invalid_argument("segment " + std::to_string(index) + ": " + rule);
  };
  if (s.step < 1) refuse("step counts from 1 (got " + std::to_string(s.step) + "); increase it before the update");
  if (s.n == 0) return;
  if (s.grad_remainder != nullptr && !s.grad_bf16) refuse("only a bfloat16 gradient can have a remainder");
  if ((s.exp_avg_exponents == nullptr) != (s.exp_avg_sq_exponents == nullptr))
    refuse("both moments must be of one kind, float or 8-bit");
}

void add_buffers(Buffers& buffers, const Segment& s, std::size_t index) {
  const bool blocks = s.exp_avg_exponents != nullptr;
  const std::int64_t exponents = (s.n + kBlock - 1) / kBlock;
  buffers.add(index, s.weight, (s.remainder == nullptr ? 4 : 2) * s.n);
  buffers.add(index, s.remainder, 2 * s.n);
  buffers.add(index, s.grad, (s.grad_bf16 ? 2 : 4) * s.n);
  buffers.add(index, s.grad_remainder, 2 * s.n);
  buffers.add(index, s.exp_avg, (blocks ? 1 : 4) * s.n);
  buffers.add(index, s.exp_avg_sq, (blocks ? 1 : 4) * s.n);
  buffers.add(index, s.exp_avg_exponents, exponents);
  buffers.add(index, s.exp_avg_sq_exponents, exponents);
}

}  // namespace

void adamw(const std::vector<Segment>& segments, int threads, Isa isa) {
  Buffers buffers("segments");
  std::vector<Task> tasks;
  std::vector<std::int64_t> lengths;
  tasks.reserve(segments.size());
  lengths.reserve(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    check(s, i);
    add_buffers(buffers, s, i);
    tasks.push_back({s, wide_coefficients(s), narrow_coefficients(s)});
    lengths.push_back(s.n);
  }
  buffers.check_apart();
  const std::vector<Chunk> chunks = cut(lengths);
  AdamwBody* const body = kBodies[static_cast<int>(isa)];
  for_each_chunk(chunks, threads, [&](std::int64_t i) {
    body(tasks[chunks[i].owner], chunks[i].begin, chunks[i].n);
  });
}

}  // namespace stronghold
