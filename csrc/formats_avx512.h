// Loads and stores of formats.h's weights and gradients in AVX-512, for adamw_avx512.h.
#pragma once

#include <immintrin.h>

#include "formats.h"

// GCC 12's own header says of a vector that is masked away whole that it is used uninitialised.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define STRONGHOLD_AVX512_INLINE STRONGHOLD_INLINE STRONGHOLD_TARGET

namespace stronghold {
namespace {

STRONGHOLD_AVX512_INLINE __m512i every(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }

// Stores n numbers of which some may be NaN.
template <class Format>
STRONGHOLD_AVX512_INLINE void store_with_nans(typename Format::type* data, std::int16_t* remainder,
                                              const float* values, int n) {
  for (int i = 0; i < n; ++i) Format::store(data, remainder, i, values[i]);
}

// ---- sixteen elements ----

STRONGHOLD_AVX512_INLINE __m256i halves(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}

// Permutations of words. vpermw is two operations on Intel's processors, VBMI's vpermb is one.
#if STRONGHOLD_VBMI
constexpr short word(int number) { return static_cast<short>((2 * number + 1) << 8 | 2 * number); }
STRONGHOLD_AVX512_INLINE __m512i permuted(__m512i words, __m512i order) { return _mm512_permutexvar_epi8(order, words); }
STRONGHOLD_AVX512_INLINE __m512i permuted_upwards(__m512i words, __m512i order) {
  return _mm512_maskz_permutexvar_epi8(0xCCCCCCCCCCCCCCCC, order, words);
}
#else
constexpr short word(int number) { return static_cast<short>(number); }
STRONGHOLD_AVX512_INLINE __m512i permuted(__m512i words, __m512i order) { return _mm512_permutexvar_epi16(order, words); }
STRONGHOLD_AVX512_INLINE __m512i permuted_upwards(__m512i words, __m512i order) {
  return _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, order, words);
}
#endif

// The words 0, 1, 2 ... to the upper halves of floats.
STRONGHOLD_AVX512_INLINE __m512i upwards() {
  return _mm512_set_epi16(word(15), 0, word(14), 0, word(13), 0, word(12), 0, word(11), 0, word(10), 0, word(9), 0,
                          word(8), 0, word(7), 0, word(6), 0, word(5), 0, word(4), 0, word(3), 0, word(2), 0, word(1), 0,
                          word(0), 0);
}

// The words 1, 3, 5 ... to the lower half of a vector, 0, 2, 4 ... to the upper.
STRONGHOLD_AVX512_INLINE __m512i apart() {
  return _mm512_set_epi16(word(30), word(28), word(26), word(24), word(22), word(20), word(18), word(16), word(14),
                          word(12), word(10), word(8), word(6), word(4), word(2), word(0), word(31), word(29), word(27),
                          word(25), word(23), word(21), word(19), word(17), word(15), word(13), word(11), word(9),
                          word(7), word(5), word(3), word(1));
}

// Floats of which these are the upper halves, and zeros the lower.
STRONGHOLD_AVX512_INLINE __m512i upper_halves(const void* data) {
  return permuted_upwards(_mm512_castsi256_si512(halves(data)), upwards());
}

template <class Format>
struct InSixteens;

template <>
struct InSixteens<F32> {
  static STRONGHOLD_AVX512_INLINE __m512 load(const float* data, const std::int16_t*) { return _mm512_loadu_ps(data); }
  static STRONGHOLD_AVX512_INLINE void store(float* data, std::int16_t*, __m512 values) {
    _mm512_storeu_ps(data, values);
  }
};

template <>
struct InSixteens<Bf16> {
  static STRONGHOLD_AVX512_INLINE __m512 load(const std::uint16_t* data, const std::int16_t*) {
    return _mm512_castsi512_ps(upper_halves(data));
  }
};

// Between a float's bits and its halves lies one addition: (hi << 16) + lo, where lo has a sign.
template <>
struct InSixteens<Split> {
  static STRONGHOLD_AVX512_INLINE __m512 load(const std::uint16_t* data, const std::int16_t* remainder) {
    return _mm512_castsi512_ps(_mm512_add_epi32(upper_halves(data), _mm512_cvtepi16_epi32(halves(remainder))));
  }
  static STRONGHOLD_AVX512_INLINE void store(std::uint16_t* data, std::int16_t* remainder, __m512 values) {
    if (__builtin_expect(_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) != 0, 0)) {
      float spilled[16];
      _mm512_storeu_ps(spilled, values);
      store_with_nans<Split>(data, remainder, spilled, 16);
      return;
    }
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i flipped = _mm512_xor_si512(_mm512_add_epi32(bits, every(0x8000)), every(0x8000));
    const __m512i words = permuted(flipped, apart());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm512_castsi512_si256(words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainder), _mm512_extracti64x4_epi64(words, 1));
  }
};

// ---- thirty-two elements in two vectors: [0, 16) and [16, 32) ----

struct ThirtyTwo {
  __m512 part[2];
};

// For vpermt2w: the words first, first + 32, first + 1, first + 33 ...
template <int first>
STRONGHOLD_AVX512_INLINE __m512i alternating() {
  constexpr int f = first;
  return _mm512_set_epi16(f + 47, f + 15, f + 46, f + 14, f + 45, f + 13, f + 44, f + 12, f + 43, f + 11, f + 42, f + 10,
                          f + 41, f + 9, f + 40, f + 8, f + 39, f + 7, f + 38, f + 6, f + 37, f + 5, f + 36, f + 4,
                          f + 35, f + 3, f + 34, f + 2, f + 33, f + 1, f + 32, f);
}

// For vpermt2w: the words first, first + 2, first + 4 ...
template <int first>
STRONGHOLD_AVX512_INLINE __m512i every_other() {
  constexpr int f = first;
  return _mm512_set_epi16(f + 62, f + 60, f + 58, f + 56, f + 54, f + 52, f + 50, f + 48, f + 46, f + 44, f + 42, f + 40,
                          f + 38, f + 36, f + 34, f + 32, f + 30, f + 28, f + 26, f + 24, f + 22, f + 20, f + 18, f + 16,
                          f + 14, f + 12, f + 10, f + 8, f + 6, f + 4, f + 2, f);
}

STRONGHOLD_AVX512_INLINE ThirtyTwo interleaved(__m512i lower, __m512i upper) {
  return {{_mm512_castsi512_ps(_mm512_permutex2var_epi16(lower, alternating<0>(), upper)),
           _mm512_castsi512_ps(_mm512_permutex2var_epi16(lower, alternating<16>(), upper))}};
}

template <class Format>
struct InThirtyTwos;

template <>
struct InThirtyTwos<F32> {
  static STRONGHOLD_AVX512_INLINE ThirtyTwo load(const float* data, const std::int16_t*) {
    return {{_mm512_loadu_ps(data), _mm512_loadu_ps(data + 16)}};
  }
  static STRONGHOLD_AVX512_INLINE void store(float* data, std::int16_t*, const ThirtyTwo& values) {
    _mm512_storeu_ps(data, values.part[0]);
    _mm512_storeu_ps(data + 16, values.part[1]);
  }
};

template <>
struct InThirtyTwos<Bf16> {
  static STRONGHOLD_AVX512_INLINE ThirtyTwo load(const std::uint16_t* data, const std::int16_t*) {
    return interleaved(_mm512_setzero_si512(), _mm512_loadu_si512(data));
  }
};

template <>
struct InThirtyTwos<Split> {
  static STRONGHOLD_AVX512_INLINE ThirtyTwo load(const std::uint16_t* data, const std::int16_t* remainder) {
    const __m512i lower = _mm512_loadu_si512(remainder);
    return interleaved(lower, _mm512_add_epi16(_mm512_loadu_si512(data), _mm512_srai_epi16(lower, 15)));
  }
  static STRONGHOLD_AVX512_INLINE void store(std::uint16_t* data, std::int16_t* remainder, const ThirtyTwo& values) {
    if (__builtin_expect(_mm512_cmp_ps_mask(values.part[0], values.part[1], _CMP_UNORD_Q) != 0, 0)) {
      float spilled[32];
      InThirtyTwos<F32>::store(spilled, nullptr, values);
      store_with_nans<Split>(data, remainder, spilled, 32);
      return;
    }
    const __m512i low = _mm512_castps_si512(values.part[0]);
    const __m512i high = _mm512_castps_si512(values.part[1]);
    _mm512_storeu_si512(data, _mm512_permutex2var_epi16(_mm512_add_epi32(low, every(0x8000)), every_other<1>(),
                                                        _mm512_add_epi32(high, every(0x8000))));
    _mm512_storeu_si512(remainder, _mm512_permutex2var_epi16(low, every_other<0>(), high));
  }
};

}  // namespace
}  // namespace stronghold
