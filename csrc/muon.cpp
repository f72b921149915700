#include "muon.h"

#include <cmath>

#include "chunks.h"
#include "formats.h"

namespace stronghold {
namespace {

// To the nearest bfloat16, ties to even, as PyTorch rounds; a NaN stays a quiet one.
STRONGHOLD_INLINE std::uint16_t to_even(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

// lerp's weight, and whether it is counted from the other end.
struct Lerp {
  explicit Lerp(float weight) : small(std::fabs(weight) < 0.5f), factor(small ? weight : weight - 1.0f) {}
  bool small;
  float factor;
};

template <class Grad, bool kNesterov>
STRONGHOLD_INLINE void momentum_body(std::uint16_t* __restrict__ direction,
                                     const typename Grad::type* __restrict__ grad,
                                     const std::int16_t* __restrict__ grad_remainder, float* __restrict__ buffer,
                                     std::int64_t n, Lerp into, Lerp ahead, float scale) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = Grad::load(grad, grad_remainder, i) * scale;
    const float before = buffer[i];
    const float m = __builtin_fmaf(into.factor, g - before, into.small ? before : g);
    buffer[i] = m;
    direction[i] = to_even(kNesterov ? __builtin_fmaf(ahead.factor, m - g, ahead.small ? g : m) : m);
  }
}

template <class Grad>
STRONGHOLD_INLINE void momentum_of(const Momentum& s, std::int64_t begin, std::int64_t n) {
  const auto* grad = static_cast<const typename Grad::type*>(s.grad) + begin;
  const std::int16_t* low = s.grad_remainder == nullptr ? nullptr : s.grad_remainder + begin;
  const Lerp into(static_cast<float>(1.0 - s.momentum)), ahead(static_cast<float>(s.momentum));
  const float scale = static_cast<float>(s.grad_scale);
  if (s.nesterov)
    momentum_body<Grad, true>(s.direction + begin, grad, low, s.momentum_buffer + begin, n, into, ahead, scale);
  else
    momentum_body<Grad, false>(s.direction + begin, grad, low, s.momentum_buffer + begin, n, into, ahead, scale);
}

STRONGHOLD_INLINE void momentum_chunk(const Momentum& s, std::int64_t begin, std::int64_t n) {
  if (!s.grad_bf16) return momentum_of<F32>(s, begin, n);
  if (s.grad_remainder == nullptr) return momentum_of<Bf16>(s, begin, n);
  momentum_of<Split>(s, begin, n);
}

template <class Weight>
STRONGHOLD_INLINE void move_body(const std::uint16_t* __restrict__ direction,
                                 typename Weight::type* __restrict__ weight, std::int16_t* __restrict__ remainder,
                                 std::int64_t n, float kept, float rate) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float w = Weight::load(weight, remainder, i) * kept;
    Weight::store(weight, remainder, i, __builtin_fmaf(Bf16::load(direction, nullptr, i), rate, w));
  }
}

STRONGHOLD_INLINE void move_chunk(const Move& s, std::int64_t begin, std::int64_t n) {
  const float kept = static_cast<float>(1.0 - s.decay), rate = static_cast<float>(-s.lr);
  if (s.remainder == nullptr)
    move_body<F32>(s.direction + begin, static_cast<float*>(s.weight) + begin, nullptr, n, kept, rate);
  else
    move_body<Split>(s.direction + begin, static_cast<std::uint16_t*>(s.weight) + begin, s.remainder + begin, n, kept,
                     rate);
}

#define STRONGHOLD_MUON(isa, target)                                                        \
  target void momentum_##isa(const Momentum& s, std::int64_t begin, std::int64_t n) {       \
    momentum_chunk(s, begin, n);                                                            \
  }                                                                                         \
  target void move_##isa(const Move& s, std::int64_t begin, std::int64_t n) { move_chunk(s, begin, n); }
STRONGHOLD_EACH_ISA(STRONGHOLD_MUON)

constexpr decltype(&momentum_plain) kMomentum[] = {
#define STRONGHOLD_ENTRY(isa, target) momentum_##isa,
    STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)
#undef STRONGHOLD_ENTRY
};

constexpr decltype(&move_plain) kMove[] = {
#define STRONGHOLD_ENTRY(isa, target) move_##isa,
    STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)
#undef STRONGHOLD_ENTRY
};

template <class Piece, class Body>
void on_chunks(const std::vector<Piece>& pieces, int threads, Body body) {
  std::vector<std::int64_t> lengths;
  lengths.reserve(pieces.size());
  for (const Piece& piece : pieces) lengths.push_back(piece.n);
  const std::vector<Chunk> chunks = cut(lengths);
  for_each_chunk(chunks, threads, [&](std::int64_t i) {
    body(pieces[chunks[i].owner], chunks[i].begin, chunks[i].n);
  });
}

}  // namespace

void muon_momentum(const std::vector<Momentum>& matrices, int threads, Isa isa) {
  Buffers buffers("matrices");
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const Momentum& s = matrices[i];
    check_length("matrix", i, s.n);
    buffers.add(i, s.direction, 2 * s.n);
    buffers.add(i, s.grad, (s.grad_bf16 ? 2 : 4) * s.n);
    buffers.add(i, s.grad_remainder, 2 * s.n);
    buffers.add(i, s.momentum_buffer, 4 * s.n);
  }
  buffers.check_apart();
  on_chunks(matrices, threads, kMomentum[static_cast<int>(isa)]);
}

void muon_move(const std::vector<Move>& matrices, int threads, Isa isa) {
  Buffers buffers("matrices");
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const Move& s = matrices[i];
    check_length("matrix", i, s.n);
    buffers.add(i, s.direction, 2 * s.n);
    buffers.add(i, s.weight, (s.remainder == nullptr ? 4 : 2) * s.n);
    buffers.add(i, s.remainder, 2 * s.n);
  }
  buffers.check_apart();
  on_chunks(matrices, threads, kMove[static_cast<int>(isa)]);
}

}  // namespace stronghold
