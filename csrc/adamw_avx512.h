// The update in AVX-512, by hand. The compiler's own loops compute the same bits; with 8-bit moments these need 40 % less
// time of a core. With float moments the two take as long where memory is no limit, but these fetch ahead.
//
// For a file of its own each with AVX-512 alone and with VBMI, which define before
//   STRONGHOLD_BODY     the name of the body
//   STRONGHOLD_TARGET   its attribute
//   STRONGHOLD_VBMI     whether it has VBMI
#pragma once

#include <algorithm>
#include <type_traits>

#include "adamw_task.h"

#include "formats_avx512.h"

namespace stronghold {
namespace {

constexpr int kLanes = 16;

// ---- float moments ----

// Elements ahead of the loads that are fetched into the cache: what Zen 4 and an Intel Xeon are fastest with.
const int kAhead = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") ? 64 : 256;
}();

// Each coefficient in every element of a vector.
struct Vectors {
  STRONGHOLD_AVX512_INLINE explicit Vectors(const Pair& given)
      : high(_mm512_set1_ps(given.high)), low(_mm512_set1_ps(given.low)) {}
  __m512 high;
  __m512 low;
};

// Updates the sixteen elements from i on, operation by operation as adamw_loops.cpp does.
template <class Weight, class Grad>
STRONGHOLD_AVX512_INLINE void update(const Operands<Weight, Grad>& o, float* exp_avg, float* exp_avg_sq, std::int64_t i,
                                     const Wide& c) {
  const Vectors beta1(c.beta1), new1(c.new1), beta2(c.beta2), new2(c.new2);
  const Vectors minus_step_size(c.minus_step_size), decay(c.decay);
  __builtin_prefetch(o.grad + i + kAhead);
  __builtin_prefetch(o.weight + i + kAhead, 1);
  if (std::is_same_v<Weight, Split>) __builtin_prefetch(o.remainder + i + kAhead, 1);  // elsewhere it is null
  __builtin_prefetch(exp_avg + i + kAhead, 1);
  __builtin_prefetch(exp_avg_sq + i + kAhead, 1);
  const __m512 m_old = _mm512_loadu_ps(exp_avg + i);
  const __m512 v_old = _mm512_loadu_ps(exp_avg_sq + i);
  const __m512 w = InSixteens<Weight>::load(o.weight + i, o.remainder + i);
  const __m512 g = _mm512_mul_ps(InSixteens<Grad>::load(o.grad + i, o.grad_remainder + i),
                                 _mm512_set1_ps(c.grad_scale));
  const __m512 m_new = _mm512_fmadd_ps(
      new1.high, g, _mm512_fmadd_ps(new1.low, g, _mm512_mul_ps(beta1.low, m_old)));
  const __m512 m = _mm512_fmadd_ps(beta1.high, m_old, m_new);
  const __m512 v_kept = _mm512_fmadd_ps(beta2.high, v_old, _mm512_mul_ps(beta2.low, v_old));
  const __m512 v = _mm512_fmadd_ps(_mm512_fmadd_ps(new2.high, g, _mm512_mul_ps(new2.low, g)), g, v_kept);
  const __m512 ratio = _mm512_div_ps(m, _mm512_add_ps(_mm512_sqrt_ps(v), _mm512_set1_ps(c.eps)));
  const __m512 moved = _mm512_fmadd_ps(
      minus_step_size.high, ratio, _mm512_fmadd_ps(minus_step_size.low, ratio, _mm512_mul_ps(decay.low, w)));
  _mm512_storeu_ps(exp_avg + i, m);
  _mm512_storeu_ps(exp_avg_sq + i, v);
  InSixteens<Weight>::store(o.weight + i, o.remainder + i, _mm512_fmadd_ps(decay.high, w, moved));
}

// ---- 8-bit moments ----

// The new moments of some blocks on their way from update_moments to update_weights and encode: so many that the
// processor overlaps the long chain of one block's roots and quotients with others, so few that they stay in the
// nearest cache.
constexpr int kTileBlocks = 8;

struct Tile {
  alignas(64) float m[kTileBlocks * kBlock];
  alignas(64) std::int32_t v_bits[kTileBlocks * kBlock];
  std::int32_t m_base[kTileBlocks];
  std::int32_t v_base[kTileBlocks];
};

// A code is a half (binary16 of IEEE 754) of another scale, its subnormals included, with four bits of mantissa where a
// half has ten.
constexpr int kCodeInHalf = 6;
constexpr int kLeastNormalHalf = -14;  // the power of two

STRONGHOLD_AVX512_INLINE __m512 scale_of(std::int32_t base) {
  return _mm512_castsi512_ps(_mm512_set1_epi32(base - kLeastNormalHalf * (1 << 23)));
}

STRONGHOLD_AVX512_INLINE __m128i load_codes(const std::uint8_t* codes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
}

STRONGHOLD_AVX512_INLINE __m512 decode_first(const std::uint8_t* codes, __m512 scale) {
  constexpr short kSignAndCode = static_cast<short>(0x8000 | FirstMoment::kMost << kCodeInHalf);
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_codes(codes)), kCodeInHalf);
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(kSignAndCode))), scale);
}

STRONGHOLD_AVX512_INLINE __m512 decode_second(const std::uint8_t* codes, __m512 scale) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_codes(codes)), kCodeInHalf);
  return _mm512_mul_ps(_mm512_cvtph_ps(shifted), scale);
}

STRONGHOLD_AVX512_INLINE __m512i without_sign(__m512 values) {
  return _mm512_and_si512(_mm512_castps_si512(values), every(0x7FFFFFFF));
}

// The greatest of each vector's numbers, the first's in element 0, the second's in element 2.
STRONGHOLD_AVX512_INLINE __m128i greatest_of(__m512i a, __m512i b) {
  const __m256i a8 = _mm256_max_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  const __m256i b8 = _mm256_max_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
  const __m128i a4 = _mm_max_epi32(_mm256_castsi256_si128(a8), _mm256_extracti128_si256(a8, 1));
  const __m128i b4 = _mm_max_epi32(_mm256_castsi256_si128(b8), _mm256_extracti128_si256(b8, 1));
  const __m128i both = _mm_max_epi32(_mm_unpacklo_epi64(a4, b4), _mm_unpackhi_epi64(a4, b4));
  return _mm_max_epi32(both, _mm_shuffle_epi32(both, 0xB1));
}

// Puts the new moments of a block into the tile, and their exponents where they belong.
template <class Weight, class Grad>
STRONGHOLD_AVX512_INLINE void update_moments(const Operands<Weight, Grad>& o, const MomentBlocks& moments, Tile& tile,
                                             int block, const Narrow& c) {
  const __m512 m_scale = scale_of(FirstMoment::base_of(*moments.exp_avg_exponents));
  const __m512 v_scale = scale_of(SecondMoment::base_of(*moments.exp_avg_sq_exponents));
  __m512i m_greatest = _mm512_setzero_si512();
  __m512i v_greatest = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 0; i < kBlock; i += 2 * kLanes) {
    const ThirtyTwo grads = InThirtyTwos<Grad>::load(o.grad + i, o.grad_remainder + i);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const int j = i + part * kLanes;
      const __m512 m_old = decode_first(moments.exp_avg + j, m_scale);
      const __m512 v_old = decode_second(moments.exp_avg_sq + j, v_scale);
      const __m512 g = _mm512_mul_ps(grads.part[part], _mm512_set1_ps(c.grad_scale));
      const __m512 m = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(c.beta1), m_old),
                                     _mm512_mul_ps(_mm512_set1_ps(c.one_minus_beta1), g));
      const __m512 v = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(c.beta2), v_old),
                                     _mm512_mul_ps(_mm512_set1_ps(c.one_minus_beta2), _mm512_mul_ps(g, g)));
      // With beta2 of 0 to 1 only a NaN can have a sign, and as a number without sign it is large all the same.
      const __m512i v_bits = _mm512_min_epu32(_mm512_castps_si512(v), every(SecondMoment::kLargest));
      _mm512_store_ps(tile.m + kBlock * block + j, m);
      _mm512_store_si512(tile.v_bits + kBlock * block + j, v_bits);
      m_greatest = _mm512_max_epi32(m_greatest, without_sign(m));
      v_greatest = _mm512_max_epi32(v_greatest, v_bits);
    }
  }
  // exponent_of and base_of for both moments at once.
  const __m128i greatest = _mm_min_epi32(greatest_of(m_greatest, v_greatest), _mm_set1_epi32(FirstMoment::kLargest));
  const __m128i rounded = _mm_add_epi32(greatest, _mm_set1_epi32((1 << FirstMoment::kShift) - 1));
  const __m128i exponents = _mm_max_epi32(_mm_srli_epi32(rounded, 23), _mm_set1_epi32(FirstMoment::kLeastExponent));
  const __m128i below = _mm_set_epi32(0, SecondMoment::kBinades, 0, FirstMoment::kBinades);
  const __m128i bases = _mm_slli_epi32(_mm_sub_epi32(exponents, below), 23);
  *moments.exp_avg_exponents = static_cast<std::uint8_t>(_mm_extract_epi8(exponents, 0));
  *moments.exp_avg_sq_exponents = static_cast<std::uint8_t>(_mm_extract_epi8(exponents, 8));
  tile.m_base[block] = _mm_extract_epi32(bases, 0);
  tile.v_base[block] = _mm_extract_epi32(bases, 2);
}

template <class Weight, class Grad>
STRONGHOLD_AVX512_INLINE void update_weights(const Operands<Weight, Grad>& o, const Tile& tile, int block,
                                             const Narrow& c) {
#pragma GCC unroll 2
  for (int i = 0; i < kBlock; i += 2 * kLanes) {
    ThirtyTwo weights = InThirtyTwos<Weight>::load(o.weight + i, o.remainder + i);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const int j = kBlock * block + i + part * kLanes;
      const __m512 root = _mm512_sqrt_ps(_mm512_castsi512_ps(_mm512_load_si512(tile.v_bits + j)));
      const __m512 denom = _mm512_add_ps(_mm512_mul_ps(root, _mm512_set1_ps(c.denom_scale)), _mm512_set1_ps(c.eps));
      const __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(c.step_size), _mm512_load_ps(tile.m + j));
      weights.part[part] = _mm512_sub_ps(_mm512_mul_ps(weights.part[part], _mm512_set1_ps(c.decay)),
                                         _mm512_div_ps(scaled, denom));
    }
    InThirtyTwos<Weight>::store(o.weight + i, o.remainder + i, weights);
  }
}

// The bits, with their dither, from which the codes of sixteen magnitudes are cut, a block's elements from i on.
template <class Moment>
STRONGHOLD_AVX512_INLINE __m512i dithered(__m512i magnitudes, __m512i base, const Dither<Moment>& given, int i) {
  const __m512 x = _mm512_castsi512_ps(magnitudes);
  const __m512i a = _mm512_castps_si512(_mm512_add_ps(x, _mm512_max_ps(x, _mm512_castsi512_ps(base))));
  const __m512i word = _mm512_add_epi32(every(given.start), _mm512_load_si512(kElementTerms<Moment>.terms + i));
  return _mm512_add_epi32(a, _mm512_srli_epi32(word, 32 - Moment::kShift));
}

// The codes of thirty-two magnitudes, not bounded above, in words and in the order of packing.
template <class Moment>
STRONGHOLD_AVX512_INLINE __m512i cut(const __m512i* sums, std::int32_t base) {
  const __m512i words = _mm512_packs_epi32(_mm512_srli_epi32(sums[0], Moment::kShift),
                                           _mm512_srli_epi32(sums[1], Moment::kShift));
  return _mm512_sub_epi16(words, _mm512_set1_epi16(static_cast<short>(base >> Moment::kShift)));
}

// Puts in order the bytes of four vectors of 32-bit numbers that were packed in twos, and these again.
STRONGHOLD_AVX512_INLINE __m512i in_order(__m512i packed) {
  return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), packed);
}

// Stores the codes of a block that begins at element `first` of the tensor.
STRONGHOLD_AVX512_INLINE void encode(const MomentBlocks& moments, const Tile& tile, int block, std::uint32_t first,
                                     std::uint32_t step) {
  constexpr int kParts = kBlock / kLanes;
  const __m512i m_base = _mm512_set1_epi32(tile.m_base[block]);
  const __m512i v_base = _mm512_set1_epi32(tile.v_base[block]);
  const Dither<FirstMoment> m_dither(first, step);
  const Dither<SecondMoment> v_dither(first, step);
  const __m512i v_least = _mm512_add_epi32(v_base, every(1 << SecondMoment::kShift));
  __m512i m_sums[kParts], v_sums[kParts];
  __mmask16 negative[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const int i = part * kLanes;
    const __m512 m = _mm512_load_ps(tile.m + kBlock * block + i);
    const __m512i v_bits = _mm512_load_si512(tile.v_bits + kBlock * block + i);
    negative[part] = _mm512_cmp_ps_mask(m, _mm512_setzero_ps(), _CMP_LT_OQ);
    m_sums[part] = dithered(without_sign(m), m_base, m_dither, i);
    v_sums[part] = dithered(v_bits, v_base, v_dither, i);
    v_sums[part] = _mm512_mask_max_epi32(v_sums[part], _mm512_test_epi32_mask(v_bits, v_bits), v_sums[part], v_least);
  }
  // Packing saturates: at 127 with signs, at 255 without.
  const std::int32_t m_start = tile.m_base[block], v_start = tile.v_base[block];
  const __m512i m_bytes = in_order(
      _mm512_packs_epi16(cut<FirstMoment>(m_sums, m_start), cut<FirstMoment>(m_sums + 2, m_start)));
  const __m512i v_bytes = in_order(
      _mm512_packus_epi16(cut<SecondMoment>(v_sums, v_start), cut<SecondMoment>(v_sums + 2, v_start)));
  const __mmask64 below_zero = _mm512_kunpackd(_mm512_kunpackw(negative[3], negative[2]),
                                               _mm512_kunpackw(negative[1], negative[0]));
  const __mmask64 with_sign = _mm512_mask_test_epi8_mask(below_zero, m_bytes, m_bytes);
  _mm512_storeu_si512(moments.exp_avg, _mm512_mask_add_epi8(m_bytes, with_sign, m_bytes, every(0x80808080u)));
  _mm512_storeu_si512(moments.exp_avg_sq, v_bytes);
}

// ---- chunks ----

template <class Weight, class Grad>
struct Avx512 {
  static STRONGHOLD_TARGET void floats(const Task& task, std::int64_t begin, std::int64_t n) {
    const Operands<Weight, Grad> o(task.segment, begin);
    float* const exp_avg = static_cast<float*>(task.segment.exp_avg) + begin;
    float* const exp_avg_sq = static_cast<float*>(task.segment.exp_avg_sq) + begin;
    const Wide c = task.wide;
    const std::int64_t whole = n - n % kLanes;
    for (std::int64_t i = 0; i < whole; i += kLanes) update(o, exp_avg, exp_avg_sq, i, c);
    if (whole < n) adamw_plain(task, begin + whole, n - whole);
  }

  static STRONGHOLD_TARGET void blocks(const Task& task, std::int64_t begin, std::int64_t n) {
    const Narrow c = task.narrow;
    const auto step = static_cast<std::uint32_t>(task.segment.step);
    const std::int64_t end = begin + n - n % kBlock;
    Tile tile;
    for (std::int64_t first = begin; first < end; first += kTileBlocks * kBlock) {
      const int count = static_cast<int>(std::min<std::int64_t>(end - first, kTileBlocks * kBlock) / kBlock);
      for (int block = 0; block < count; ++block) {
        const std::int64_t i = first + block * kBlock;
        update_moments(Operands<Weight, Grad>(task.segment, i), MomentBlocks(task.segment, i), tile, block, c);
      }
      for (int block = 0; block < count; ++block) {
        const std::int64_t i = first + block * kBlock;
        update_weights(Operands<Weight, Grad>(task.segment, i), tile, block, c);
        encode(MomentBlocks(task.segment, i), tile, block, static_cast<std::uint32_t>(task.segment.first + i), step);
      }
    }
    if (end < begin + n) adamw_plain(task, end, begin + n - end);
  }
};

}  // namespace

STRONGHOLD_TARGET void STRONGHOLD_BODY(const Task& task, std::int64_t begin, std::int64_t n) {
  run<Avx512>(task, begin, n);
}

}  // namespace stronghold
