// Loads and stores of formats.h's weights and gradients in AVX-512.
#pragma once

#include <immintrin.h>

#include "formats.h"

// GCC 12's own header says of a vector that is masked away whole that it is used uninitialised.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define STRONGHOLD_AVX512_INLINE STRONGHOLD_INLINE STRONGHOLD_AVX512

namespace stronghold {

STRONGHOLD_AVX512_INLINE __m512i every(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }

// Stores n numbers of which some are NaN.
STRONGHOLD_AVX512_INLINE void store_with_nans(std::uint16_t* data, std::int16_t* remainder, const float* values,
                                              int n) {
  for (int i = 0; i < n; ++i) Split::store(data, remainder, i, values[i]);
}

// ---- sixteen elements in two vectors, as conversion to double wants them: [0, 8) and [8, 16) ----

struct Sixteen {
  __m256 low;
  __m256 high;
};

// The floats with these upper and lower halves of their bits.
STRONGHOLD_AVX512_INLINE Sixteen interleaved(__m256i lower, __m256i upper) {
  // Unpacking works within 128 bits: the second and third quarters change places first.
  lower = _mm256_permute4x64_epi64(lower, 0xD8);
  upper = _mm256_permute4x64_epi64(upper, 0xD8);
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(lower, upper)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower, upper))};
}

STRONGHOLD_AVX512_INLINE __m256i halves(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}

template <class Format>
struct InSixteens;

template <>
struct InSixteens<F32> {
  static STRONGHOLD_AVX512_INLINE Sixteen load(const float* data, const std::int16_t*) {
    return {_mm256_loadu_ps(data), _mm256_loadu_ps(data + 8)};
  }
  static STRONGHOLD_AVX512_INLINE void store(float* data, std::int16_t*, Sixteen values) {
    _mm256_storeu_ps(data, values.low);
    _mm256_storeu_ps(data + 8, values.high);
  }
};

template <>
struct InSixteens<Bf16> {
  static STRONGHOLD_AVX512_INLINE Sixteen load(const std::uint16_t* data, const std::int16_t*) {
    return interleaved(_mm256_setzero_si256(), halves(data));
  }
};

template <>
struct InSixteens<Split> {
  static STRONGHOLD_AVX512_INLINE Sixteen load(const std::uint16_t* data, const std::int16_t* remainder) {
    const __m256i lower = halves(remainder);
    // A negative remainder borrows one from the upper half.
    return interleaved(lower, _mm256_add_epi16(halves(data), _mm256_srai_epi16(lower, 15)));
  }
  static STRONGHOLD_AVX512_INLINE void store(std::uint16_t* data, std::int16_t* remainder, Sixteen values) {
    if (__builtin_expect(_mm256_cmp_ps_mask(values.low, values.high, _CMP_UNORD_Q) != 0, 0)) {
      float spilled[16];
      InSixteens<F32>::store(spilled, nullptr, values);
      store_with_nans(data, remainder, spilled, 16);
      return;
    }
    const __m256i even = _mm256_set_epi16(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m256i odd = _mm256_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m256i half = _mm256_set1_epi32(0x8000);
    const __m256i low = _mm256_castps_si256(values.low);
    const __m256i high = _mm256_castps_si256(values.high);
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(data),
        _mm256_permutex2var_epi16(_mm256_add_epi32(low, half), odd, _mm256_add_epi32(high, half)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainder), _mm256_permutex2var_epi16(low, even, high));
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
      store_with_nans(data, remainder, spilled, 32);
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
