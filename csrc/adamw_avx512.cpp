// The update in AVX-512, by hand. Where two threads share the memory of a small server the compiler's own loops are
// limited by arithmetic; these take 10 % (float moments) to 40 % (8-bit) less of it and compute the same bits.
#include "adamw_task.h"

#if defined(__x86_64__)

#include <immintrin.h>

// GCC 12's own header says of a vector that is masked away whole that it is used uninitialised.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace stronghold {
namespace {

#define STRONGHOLD_AVX512_INLINE STRONGHOLD_INLINE STRONGHOLD_AVX512

// ---- sixteen elements of a format, as floats: [i, i + 8) and [i + 8, i + 16) ----

struct Pair {
  __m256 low;
  __m256 high;
};

// The floats whose bits are sixteen `upper` halves above sixteen `lower` ones.
STRONGHOLD_AVX512_INLINE Pair interleave(__m256i lower, __m256i upper) {
  // Unpacking works within 128 bits: the second and third quarters change places first.
  lower = _mm256_permute4x64_epi64(lower, 0xD8);
  upper = _mm256_permute4x64_epi64(upper, 0xD8);
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(lower, upper)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower, upper))};
}

STRONGHOLD_AVX512_INLINE __m256i load_halves(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}

template <class Format>
struct Sixteen;

template <>
struct Sixteen<F32> {
  static STRONGHOLD_AVX512_INLINE Pair load(const float* data, const std::int16_t*) {
    return {_mm256_loadu_ps(data), _mm256_loadu_ps(data + 8)};
  }
  static STRONGHOLD_AVX512_INLINE void store(float* data, std::int16_t*, Pair values) {
    _mm256_storeu_ps(data, values.low);
    _mm256_storeu_ps(data + 8, values.high);
  }
};

template <>
struct Sixteen<Bf16> {
  static STRONGHOLD_AVX512_INLINE Pair load(const std::uint16_t* data, const std::int16_t*) {
    return interleave(_mm256_setzero_si256(), load_halves(data));
  }
};

template <>
struct Sixteen<Split> {
  static STRONGHOLD_AVX512_INLINE Pair load(const std::uint16_t* data, const std::int16_t* remainder) {
    const __m256i low = load_halves(remainder);
    // A negative remainder borrows one from the upper half.
    return interleave(low, _mm256_add_epi16(load_halves(data), _mm256_srai_epi16(low, 15)));
  }
  static STRONGHOLD_AVX512_INLINE void store(std::uint16_t* data, std::int16_t* remainder, Pair values) {
    const __m256i even = _mm256_set_epi16(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m256i odd = _mm256_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m256i half = _mm256_set1_epi32(0x8000);
    const __m256i first = _mm256_castps_si256(values.low);
    const __m256i second = _mm256_castps_si256(values.high);
    __m256i low = _mm256_permutex2var_epi16(first, even, second);
    __m256i high = _mm256_permutex2var_epi16(_mm256_add_epi32(first, half), odd, _mm256_add_epi32(second, half));
    if (__builtin_expect(_mm256_cmp_ps_mask(values.low, values.high, _CMP_UNORD_Q) != 0, 0)) {
      const auto nan = static_cast<__mmask16>(_mm256_cmp_ps_mask(values.low, values.low, _CMP_UNORD_Q) |
                                              _mm256_cmp_ps_mask(values.high, values.high, _CMP_UNORD_Q) << 8);
      const __m256i quiet = _mm256_set1_epi16(0x40);
      high = _mm256_mask_blend_epi16(nan, high, _mm256_or_si256(_mm256_permutex2var_epi16(first, odd, second), quiet));
      low = _mm256_mask_blend_epi16(nan, low, _mm256_setzero_si256());
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainder), low);
  }
};

template <class Format>
STRONGHOLD_AVX512_INLINE __m512 load16(const typename Format::type* data, const std::int16_t* remainder) {
  const Pair values = Sixteen<Format>::load(data, remainder);
  return _mm512_insertf32x8(_mm512_castps256_ps512(values.low), values.high, 1);
}

template <class Format>
STRONGHOLD_AVX512_INLINE void store16(typename Format::type* data, std::int16_t* remainder, __m512 values) {
  Sixteen<Format>::store(data, remainder, {_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1)});
}

STRONGHOLD_AVX512_INLINE __m512d wide(const float* data) { return _mm512_cvtps_pd(_mm256_loadu_ps(data)); }

STRONGHOLD_AVX512_INLINE void store_narrow(float* data, __m512d values) {
  _mm256_storeu_ps(data, _mm512_cvtpd_ps(values));
}

// ---- 8-bit moments ----

// The bits of sixteen decoded first moments.
STRONGHOLD_AVX512_INLINE __m512i decode_first(const std::uint8_t* codes, __m512i base) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i shifted = _mm512_and_si512(_mm512_slli_epi32(code, FirstMoment::kShift), _mm512_set1_epi32(0x07F00000));
  const __mmask16 not_zero = _mm512_test_epi32_mask(code, _mm512_set1_epi32(0x7F));
  constexpr int kFirstOrSecondAndThird = 0xF8;
  return _mm512_maskz_ternarylogic_epi32(not_zero, _mm512_add_epi32(shifted, base), _mm512_slli_epi32(code, 24),
                                         _mm512_set1_epi32(static_cast<int>(0x80000000u)), kFirstOrSecondAndThird);
}

STRONGHOLD_AVX512_INLINE __m512i decode_second(const std::uint8_t* codes, __m512i base) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return _mm512_maskz_add_epi32(_mm512_test_epi32_mask(code, code), _mm512_slli_epi32(code, SecondMoment::kShift), base);
}

template <class Moment>
STRONGHOLD_AVX512_INLINE __m512i magnitude(__m512 values) {
  return _mm512_min_epi32(_mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7FFFFFFF)),
                          _mm512_set1_epi32(Moment::kLargest));
}

// The codes of sixteen magnitudes, of a block's elements from `i` on, before they are clamped.
template <class Moment>
STRONGHOLD_AVX512_INLINE __m512i round_codes(__m512i magnitudes, __m512i base, __m512i dither_start, int i) {
  const __m512i word = _mm512_add_epi32(dither_start, _mm512_load_si512(kElementTerms<Moment>.terms + i));
  const __m512i dither = _mm512_srli_epi32(word, 32 - Moment::kShift);
  return _mm512_srai_epi32(_mm512_add_epi32(_mm512_sub_epi32(magnitudes, base), dither), Moment::kShift);
}

// Puts in order the bytes of four vectors of 32-bit numbers that were packed in pairs, and these again.
STRONGHOLD_AVX512_INLINE __m512i in_order(__m512i packed) {
  return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), packed);
}

// The greatest of each vector's numbers, the first's in elements 0 and 1, the second's in 2 and 3.
STRONGHOLD_AVX512_INLINE __m128i greatest_of(__m512i a, __m512i b) {
  const __m256i a8 = _mm256_max_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  const __m256i b8 = _mm256_max_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
  const __m128i a4 = _mm_max_epi32(_mm256_castsi256_si128(a8), _mm256_extracti128_si256(a8, 1));
  const __m128i b4 = _mm_max_epi32(_mm256_castsi256_si128(b8), _mm256_extracti128_si256(b8, 1));
  const __m128i both = _mm_max_epi32(_mm_unpacklo_epi64(a4, b4), _mm_unpackhi_epi64(a4, b4));
  return _mm_max_epi32(both, _mm_shuffle_epi32(both, 0xB1));
}

template <class Weight, class Grad>
STRONGHOLD_AVX512_INLINE void update_block(const Operands<Weight, Grad>& o, const MomentBlocks& moments,
                                           std::uint32_t first, std::uint32_t step, const Coefficients<float>& c) {
  constexpr int kLanes = 16;
  constexpr int kParts = kBlock / kLanes;
  const __m512i m_base = _mm512_set1_epi32(base_of(*moments.exp_avg_exponents));
  const __m512i v_base = _mm512_set1_epi32(base_of(*moments.exp_avg_sq_exponents));
  __m512i m_bits[kParts], v_bits[kParts];  // of the magnitudes
  __mmask16 negative[kParts];
  __m512i m_greatest = _mm512_setzero_si512();
  __m512i v_greatest = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const int i = part * kLanes;
    const __m512 m_old = _mm512_castsi512_ps(decode_first(moments.exp_avg + i, m_base));
    const __m512 v_old = _mm512_castsi512_ps(decode_second(moments.exp_avg_sq + i, v_base));
    const __m512 loaded = load16<Grad>(o.grad + i, o.grad_remainder + i);
    const __m512 g = _mm512_mul_ps(loaded, _mm512_set1_ps(c.grad_scale));
    const __m512 m = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(c.beta1), m_old),
                                   _mm512_mul_ps(_mm512_set1_ps(c.one_minus_beta1), g));
    const __m512 sum = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(c.beta2), v_old),
                                     _mm512_mul_ps(_mm512_set1_ps(c.one_minus_beta2), _mm512_mul_ps(g, g)));
    m_bits[part] = magnitude<FirstMoment>(m);
    v_bits[part] = magnitude<SecondMoment>(sum);
    negative[part] = _mm512_cmp_ps_mask(m, _mm512_setzero_ps(), _CMP_LT_OQ);
    m_greatest = _mm512_max_epi32(m_greatest, m_bits[part]);
    v_greatest = _mm512_max_epi32(v_greatest, v_bits[part]);
    const __m512 root = _mm512_sqrt_ps(_mm512_castsi512_ps(v_bits[part]));
    const __m512 denom = _mm512_add_ps(_mm512_mul_ps(root, _mm512_set1_ps(c.denom_scale)), _mm512_set1_ps(c.eps));
    const __m512 change = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(c.step_size), m), denom);
    const __m512 w = load16<Weight>(o.weight + i, o.remainder + i);
    store16<Weight>(o.weight + i, o.remainder + i, _mm512_sub_ps(_mm512_mul_ps(w, _mm512_set1_ps(c.decay)), change));
  }

  // exponent_of and base_of for both moments at once.
  const __m128i round_up = _mm_set_epi32(0, (1 << SecondMoment::kShift) - 1, 0, (1 << FirstMoment::kShift) - 1);
  const __m128i greatest = greatest_of(m_greatest, v_greatest);
  const __m128i exponents =
      _mm_max_epi32(_mm_srli_epi32(_mm_add_epi32(greatest, round_up), 23), _mm_set1_epi32(16));
  const __m128i bases = _mm_slli_epi32(_mm_sub_epi32(exponents, _mm_set1_epi32(15)), 23);
  *moments.exp_avg_exponents = static_cast<std::uint8_t>(_mm_extract_epi8(exponents, 0));
  *moments.exp_avg_sq_exponents = static_cast<std::uint8_t>(_mm_extract_epi8(exponents, 8));
  const __m512i m_new_base = _mm512_broadcastd_epi32(bases);
  const __m512i v_new_base = _mm512_broadcastd_epi32(_mm_shuffle_epi32(bases, 0xAA));

  const __m512i m_dither = _mm512_set1_epi32(static_cast<int>(Dither<FirstMoment>(first, step).start));
  const __m512i v_dither = _mm512_set1_epi32(static_cast<int>(Dither<SecondMoment>(first, step).start));
  __m512i m_codes[kParts], v_codes[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    m_codes[part] = round_codes<FirstMoment>(m_bits[part], m_new_base, m_dither, part * kLanes);
    v_codes[part] = round_codes<SecondMoment>(v_bits[part], v_new_base, v_dither, part * kLanes);
    v_codes[part] = _mm512_max_epi32(v_codes[part], _mm512_min_epi32(v_bits[part], _mm512_set1_epi32(1)));
  }
  // Packing saturates: at 127 with signs, at 0 and 255 without.
  const __m512i m_pairs[] = {_mm512_packs_epi32(m_codes[0], m_codes[1]), _mm512_packs_epi32(m_codes[2], m_codes[3])};
  const __m512i v_pairs[] = {_mm512_packs_epi32(v_codes[0], v_codes[1]), _mm512_packs_epi32(v_codes[2], v_codes[3])};
  const __m512i m_packed = _mm512_max_epi8(in_order(_mm512_packs_epi16(m_pairs[0], m_pairs[1])), _mm512_setzero_si512());
  const __m512i v_packed = in_order(_mm512_packus_epi16(v_pairs[0], v_pairs[1]));
  const __mmask64 signs = _mm512_kunpackd(_mm512_kunpackw(negative[3], negative[2]),
                                          _mm512_kunpackw(negative[1], negative[0]));
  const __mmask64 signed_codes = _mm512_mask_test_epi8_mask(signs, m_packed, m_packed);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  _mm512_storeu_si512(moments.exp_avg, _mm512_mask_add_epi8(m_packed, signed_codes, m_packed, sign));
  _mm512_storeu_si512(moments.exp_avg_sq, v_packed);
}

// ---- chunks ----

template <class Weight, class Grad>
struct Avx512 {
  static STRONGHOLD_AVX512 void floats(const Task& task, std::int64_t begin, std::int64_t n) {
    const Operands<Weight, Grad> o(task.segment, begin);
    float* const exp_avg = static_cast<float*>(task.segment.exp_avg) + begin;
    float* const exp_avg_sq = static_cast<float*>(task.segment.exp_avg_sq) + begin;
    const Coefficients<double> c = task.wide;
    const __m256 grad_scale = _mm256_set1_ps(c.grad_scale);
    const __m512d beta1 = _mm512_set1_pd(c.beta1);
    const __m512d one_minus_beta1 = _mm512_set1_pd(c.one_minus_beta1);
    const __m512d beta2 = _mm512_set1_pd(c.beta2);
    const __m512d one_minus_beta2 = _mm512_set1_pd(c.one_minus_beta2);
    const std::int64_t whole = n - n % 16;
    for (std::int64_t i = 0; i < whole; i += 16) {
      const Pair grads = Sixteen<Grad>::load(o.grad + i, o.grad_remainder + i);
      const Pair weights = Sixteen<Weight>::load(o.weight + i, o.remainder + i);
      __m256 updated[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const std::int64_t j = i + 8 * half;
        const __m512d g = _mm512_cvtps_pd(_mm256_mul_ps(half == 0 ? grads.low : grads.high, grad_scale));
        const __m512d m = _mm512_add_pd(_mm512_mul_pd(beta1, wide(exp_avg + j)), _mm512_mul_pd(one_minus_beta1, g));
        const __m512d v = _mm512_add_pd(_mm512_mul_pd(beta2, wide(exp_avg_sq + j)),
                                        _mm512_mul_pd(one_minus_beta2, _mm512_mul_pd(g, g)));
        const __m512d denom = _mm512_add_pd(_mm512_mul_pd(_mm512_sqrt_pd(v), _mm512_set1_pd(c.denom_scale)),
                                            _mm512_set1_pd(c.eps));
        const __m512d change = _mm512_div_pd(_mm512_mul_pd(_mm512_set1_pd(c.step_size), m), denom);
        const __m512d w = _mm512_cvtps_pd(half == 0 ? weights.low : weights.high);
        store_narrow(exp_avg + j, m);
        store_narrow(exp_avg_sq + j, v);
        updated[half] = _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_mul_pd(w, _mm512_set1_pd(c.decay)), change));
      }
      Sixteen<Weight>::store(o.weight + i, o.remainder + i, {updated[0], updated[1]});
    }
    if (whole < n) adamw_plain(task, begin + whole, n - whole);
  }

  static STRONGHOLD_AVX512 void blocks(const Task& task, std::int64_t begin, std::int64_t n) {
    const Coefficients<float> c = task.narrow;
    const std::int64_t whole = n - n % kBlock;
    for (std::int64_t i = 0; i < whole; i += kBlock)
      update_block(Operands<Weight, Grad>(task.segment, begin + i), MomentBlocks(task.segment, begin + i),
                   static_cast<std::uint32_t>(begin + i), static_cast<std::uint32_t>(task.segment.step), c);
    if (whole < n) adamw_plain(task, begin + whole, n - whole);
  }
};

}  // namespace

STRONGHOLD_AVX512 void adamw_avx512(const Task& task, std::int64_t begin, std::int64_t n) {
  run<Avx512>(task, begin, n);
}

}  // namespace stronghold

#endif
