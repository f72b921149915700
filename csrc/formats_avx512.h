// Loads and stores of formats.h's weights and gradients in AVX-512.
#pragma once

#include <immintrin.h>

#include "formats.h"

// GCC 12's own header says of a vector that is masked away whole that it is used uninitialised.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define STRONGHOLD_AVX512_INLINE STRONGHOLD_INLINE STRONGHOLD_AVX512

namespace stronghold {

STRONGHOLD_AVX512_INLINE __m512i every(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }

// Stores n numbers of which some may be NaN.
template <class Format>
STRONGHOLD_AVX512_INLINE void store_with_nans(typename Format::type* data, std::int16_t* remainder,
                                              const float* values, int n) {
  for (int i = 0; i < n; ++i) Format::store(data, remainder, i, values[i]);
}

// ---- sixteen elements in a vector of floats, or in two of doubles: [0, 8) and [8, 16) ----

struct Sixteen {
  __m512d low;
  __m512d high;
};

STRONGHOLD_AVX512_INLINE __m512d load_wide(const float* data) { return _mm512_cvtps_pd(_mm256_loadu_ps(data)); }

STRONGHOLD_AVX512_INLINE Sixteen widened(__m512 values) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(values)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1))};
}

STRONGHOLD_AVX512_INLINE __m256i halves(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}

// For vpermw: the words 16, 0, 17, 1 ...
STRONGHOLD_AVX512_INLINE __m512i together() {
  return _mm512_set_epi16(15, 31, 14, 30, 13, 29, 12, 28, 11, 27, 10, 26, 9, 25, 8, 24, 7, 23, 6, 22, 5, 21, 4, 20, 3,
                          19, 2, 18, 1, 17, 0, 16);
}

// And back: the words 1, 3, 5 ... and then 0, 2, 4 ...
STRONGHOLD_AVX512_INLINE __m512i apart() {
  return _mm512_set_epi16(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0, 31, 29, 27, 25, 23, 21, 19, 17, 15,
                          13, 11, 9, 7, 5, 3, 1);
}

template <class Format>
struct InSixteens;

template <>
struct InSixteens<F32> {
  static STRONGHOLD_AVX512_INLINE __m512 load(const float* data, const std::int16_t*) { return _mm512_loadu_ps(data); }
  static STRONGHOLD_AVX512_INLINE Sixteen load_widened(const float* data, const std::int16_t*) {
    return {load_wide(data), load_wide(data + 8)};
  }
  static STRONGHOLD_AVX512_INLINE void store_numbers(float* data, std::int16_t*, __m256 low, __m256 high) {
    _mm256_storeu_ps(data, low);
    _mm256_storeu_ps(data + 8, high);
  }
};

template <>
struct InSixteens<Bf16> {
  static STRONGHOLD_AVX512_INLINE __m512 load(const std::uint16_t* data, const std::int16_t*) {
    constexpr __mmask32 kUpper = 0xAAAAAAAA;
    const __m512i words = _mm512_castsi256_si512(halves(data));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpper, together(), words));
  }
};

// Between a float's bits and its halves lies one addition: (hi << 16) + lo, where lo has a sign, is
// ((hi << 16) | (lo ^ 0x8000)) - 0x8000, where it has none.
template <>
struct InSixteens<Split> {
  static STRONGHOLD_AVX512_INLINE __m512 load(const std::uint16_t* data, const std::int16_t* remainder) {
    const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(halves(data)), halves(remainder), 1);
    const __m512i flipped = _mm512_xor_si512(_mm512_permutexvar_epi16(together(), words), every(0x8000));
    return _mm512_castsi512_ps(_mm512_sub_epi32(flipped, every(0x8000)));
  }
  static STRONGHOLD_AVX512_INLINE Sixteen load_widened(const std::uint16_t* data, const std::int16_t* remainder) {
    return widened(load(data, remainder));
  }
  static STRONGHOLD_AVX512_INLINE void store_numbers(std::uint16_t* data, std::int16_t* remainder, __m256 low,
                                                     __m256 high) {
    const __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_castps_si256(low)),
                                            _mm256_castps_si256(high), 1);
    const __m512i flipped = _mm512_xor_si512(_mm512_add_epi32(bits, every(0x8000)), every(0x8000));
    const __m512i words = _mm512_permutexvar_epi16(apart(), flipped);
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

}  // namespace stronghold
