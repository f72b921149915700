#include "gradients.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "chunks.h"
#include "formats.h"

namespace stronghold {
namespace {

// Partial sums within a chunk: element i of the chunk is added to sum i % kLanes. A fixed number, whatever the width
// of a register, gives every instruction set the same order of additions.
constexpr int kLanes = 16;

// Elements that accumulate holds in registers' reach between addition and square; a multiple of kLanes.
constexpr std::int64_t kTile = 256;

// Adds the squares of a run that begins at a multiple of kLanes.
template <class Format>
STRONGHOLD_INLINE void add_squares(double* __restrict__ lanes, const typename Format::type* __restrict__ data,
                                   std::int64_t n) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = static_cast<double>(Format::load(data, nullptr, i + lane));
      lanes[lane] += x * x;
    }
  for (int lane = 0; i < n; ++i, ++lane) {
    const double x = static_cast<double>(Format::load(data, nullptr, i));
    lanes[lane] += x * x;
  }
}

STRONGHOLD_INLINE double sum_of(const double* lanes) {
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

template <class Format>
STRONGHOLD_INLINE double squares_body(const typename Format::type* __restrict__ data, std::int64_t n) {
  double lanes[kLanes] = {};
  add_squares<Format>(lanes, data, n);
  return sum_of(lanes);
}

STRONGHOLD_INLINE double squares_chunk(const Span& s, std::int64_t begin, std::int64_t n) {
  if (s.bf16) return squares_body<Bf16>(static_cast<const std::uint16_t*>(s.data) + begin, n);
  return squares_body<F32>(static_cast<const float*>(s.data) + begin, n);
}

template <class Target, class Source>
STRONGHOLD_INLINE double accumulate_body(typename Target::type* __restrict__ target,
                                         std::int16_t* __restrict__ remainder,
                                         const typename Source::type* __restrict__ source, std::int64_t n) {
  double lanes[kLanes] = {};
  float sums[kTile];
  for (std::int64_t begin = 0; begin < n; begin += kTile) {
    const std::int64_t end = std::min(begin + kTile, n);
    for (std::int64_t i = begin; i < end; ++i) {
      const float sum = Target::load(target, remainder, i) + Source::load(source, nullptr, i);
      Target::store(target, remainder, i, sum);
      sums[i - begin] = sum;
    }
    add_squares<F32>(lanes, sums, end - begin);
  }
  return sum_of(lanes);
}

STRONGHOLD_INLINE double accumulate_chunk(const Addition& a, std::int64_t begin, std::int64_t n) {
  if (a.remainder != nullptr)
    return accumulate_body<Split, Bf16>(static_cast<std::uint16_t*>(a.target) + begin, a.remainder + begin,
                                        static_cast<const std::uint16_t*>(a.source) + begin, n);
  return accumulate_body<F32, F32>(static_cast<float*>(a.target) + begin, nullptr,
                                   static_cast<const float*>(a.source) + begin, n);
}

#define STRONGHOLD_GRADIENTS(isa, target)                                                      \
  target double squares_##isa(const Span& s, std::int64_t begin, std::int64_t n) {             \
    return squares_chunk(s, begin, n);                                                         \
  }                                                                                            \
  target double accumulate_##isa(const Addition& a, std::int64_t begin, std::int64_t n) {      \
    return accumulate_chunk(a, begin, n);                                                      \
  }
STRONGHOLD_EACH_ISA(STRONGHOLD_GRADIENTS)

constexpr decltype(&squares_plain) kSquares[] = {
#define STRONGHOLD_ENTRY(isa, target) squares_##isa,
    STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)
#undef STRONGHOLD_ENTRY
};

constexpr decltype(&accumulate_plain) kAccumulate[] = {
#define STRONGHOLD_ENTRY(isa, target) accumulate_##isa,
    STRONGHOLD_EACH_ISA(STRONGHOLD_ENTRY)
#undef STRONGHOLD_ENTRY
};

// Runs body(piece, begin, n) on every chunk and sums what it returns, for each piece in the order of its chunks.
template <class Piece, class Body>
std::vector<double> sums(const std::vector<Piece>& pieces, int threads, Body body) {
  std::vector<std::int64_t> lengths;
  lengths.reserve(pieces.size());
  for (const Piece& piece : pieces) lengths.push_back(piece.n);
  const std::vector<Chunk> chunks = cut(lengths);
  std::vector<double> partial(chunks.size());
  for_each_chunk(chunks, threads, [&](std::int64_t i) {
    partial[i] = body(pieces[chunks[i].owner], chunks[i].begin, chunks[i].n);
  });
  std::vector<double> result(pieces.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) result[chunks[i].owner] += partial[i];
  return result;
}

}  // namespace

std::vector<double> squared_norms(const std::vector<Span>& spans, int threads, Isa isa) {
  for (std::size_t i = 0; i < spans.size(); ++i) check_length("span", i, spans[i].n);
  return sums(spans, threads, kSquares[static_cast<int>(isa)]);
}

std::vector<double> accumulate(const std::vector<Addition>& additions, int threads, Isa isa) {
  Buffers buffers("additions");
  for (std::size_t i = 0; i < additions.size(); ++i) {
    const Addition& a = additions[i];
    check_length("addition", i, a.n);
    const std::int64_t width = a.remainder == nullptr ? 4 : 2;
    buffers.add(i, a.target, width * a.n);
    buffers.add(i, a.remainder, 2 * a.n);
    buffers.add(i, a.source, width * a.n);
  }
  buffers.check_apart();
  return sums(additions, threads, kAccumulate[static_cast<int>(isa)]);
}

}  // namespace stronghold
