// How numbers lie in memory: float, bfloat16, the split float and the 8-bit moments. Integer arithmetic on the bits
// throughout, so every instruction set, and any other implementation of the same rules, agrees on each bit.
//
// The split float: a float with bits B is stored as
//   hi = (B + 0x8000) >> 16            a bfloat16: the float rounded to nearest, ties away from zero
//   lo = int16(B & 0xFFFF)             so that B = (hi << 16) + sign_extended(lo)
// Ties go away from zero because 16 bits tell 65,536 floats apart, and to-even would round 65,537 of them to an even
// bfloat16. Every number and both infinities come back bit for bit. A NaN is stored as hi = (B >> 16) | 0x40, lo = 0:
// it stays a quiet NaN of its sign in both halves and loses the low bits of its payload, for which there is no room.
//
// The 8-bit moments: kBlock elements, counted from the start of the tensor, share one exponent byte E, and the code of
// each is a small float in the manner of IEEE 754, with subnormals and without infinities, as in the OCP Microscaling
// formats. (Blockwise optimizer states are Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022.)
//   first moment:  bit 7 is the sign, e = 3 bits of exponent, 4 of mantissa
//   second moment: no sign, e = 4 bits of exponent, 4 of mantissa
// E' = max(E, 20) is the exponent of a block's largest binade, as in a float's bits, and B the least normal number: the
// float with the bits base = (E' - (2^e - 2)) << 23. (20 keeps all arithmetic among normal floats.) A code c stands for
//   min(y - B, y / 2), where y is the float with the bits base + (c << 19)
// which below 2B is a multiple of B / 16, and above it a float with four bits of mantissa. Memory of zeros is a tensor
// of zeros. To encode, with x = the magnitude, no more than the float with the bits 0x7B780000, and x_max the greatest
// of the block:
//   E = max((bits(x_max) + 0x7FFFF) >> 23, 20), code = clamp((bits(x + max(x, B)) + d - base) >> 19, least, most)
// `least` is 1 for a second moment that is not zero (it never becomes zero), else 0. A NaN is encoded as the largest
// magnitude, a first moment's sign is that of m < 0. A value that has a code is encoded as itself, whatever d in
// [0, 1 << 19) is.
//
// d dithers: a code is rounded up with the probability of its remainder, so a moment that changes by far less than
// one code a step still moves. It comes from a Weyl sequence over element i of the tensor and step t, in uint32,
// which is reproducible and more even than random numbers:
//   first moment:  (i * 0x85EBCA6B + t * 0x6A09E667) >> 13
//   second moment: (i * 0xC2B2AE35 + t * 0x9E3779B9) >> 13
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace stronghold {

// Elements of a tensor that share an exponent byte.
constexpr std::int64_t kBlock = 64;

STRONGHOLD_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

STRONGHOLD_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// ---- formats of weights and gradients ----
// `data` holds the elements, `remainder` the low halves of a split float and nothing otherwise.

struct F32 {
  using type = float;
  static STRONGHOLD_INLINE float load(const float* data, const std::int16_t*, std::int64_t i) { return data[i]; }
  static STRONGHOLD_INLINE void store(float* data, std::int16_t*, std::int64_t i, float value) { data[i] = value; }
};

struct Bf16 {
  using type = std::uint16_t;
  static STRONGHOLD_INLINE float load(const std::uint16_t* data, const std::int16_t*, std::int64_t i) {
    return float_of(static_cast<std::uint32_t>(data[i]) << 16);
  }
};

struct Split {
  using type = std::uint16_t;
  static STRONGHOLD_INLINE float load(const std::uint16_t* data, const std::int16_t* remainder, std::int64_t i) {
    const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder[i]));
    return float_of((static_cast<std::uint32_t>(data[i]) << 16) + low);
  }
  static STRONGHOLD_INLINE void store(std::uint16_t* data, std::int16_t* remainder, std::int64_t i, float value) {
    std::uint32_t bits = bits_of(value);
    if (value != value) bits = (bits | 0x00400000u) & 0xFFFF0000u;
    data[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    remainder[i] = static_cast<std::int16_t>(bits);
  }
};

// ---- 8-bit moments ----

// What both moments' codes have in common: a mantissa of four bits.
template <int exponent_bits, int code_bits>
struct SmallFloat {
  static constexpr int kShift = 19;
  static constexpr std::int32_t kMost = (1 << code_bits) - 1;
  static constexpr std::int32_t kBinades = (1 << exponent_bits) - 2;  // between the least normal and the largest
  static constexpr std::int32_t kLeastExponent = 20;
  static constexpr std::int32_t kLargest = 0x7B780000;

  // The bits of the least normal number, for an exponent byte as stored.
  static STRONGHOLD_INLINE std::int32_t base_of(std::int32_t exponent) {
    return ((exponent < kLeastExponent ? kLeastExponent : exponent) - kBinades) << 23;
  }
  // The exponent byte of a block whose greatest magnitude has these bits.
  static STRONGHOLD_INLINE std::uint8_t exponent_of(std::int32_t greatest) {
    const std::int32_t exponent = (greatest + (1 << kShift) - 1) >> 23;
    return static_cast<std::uint8_t>(exponent < kLeastExponent ? kLeastExponent : exponent);
  }
  static STRONGHOLD_INLINE std::int32_t magnitude(float value) {
    const auto bits = static_cast<std::int32_t>(bits_of(value) & 0x7FFFFFFFu);
    return bits < kLargest ? bits : kLargest;
  }
  // Magnitudes are their bits, which have the same order.
  static STRONGHOLD_INLINE std::int32_t decode_magnitude(std::int32_t code, std::int32_t base) {
    const std::int32_t y = base + (code << kShift);
    const auto below = static_cast<std::int32_t>(bits_of(float_at(y) - float_at(base)));
    const std::int32_t above = y - (1 << 23);
    return below < above ? below : above;
  }
  static STRONGHOLD_INLINE std::int32_t encode_magnitude(std::int32_t x, std::int32_t base, std::uint32_t dither) {
    const auto a = static_cast<std::int32_t>(bits_of(float_at(x) + float_at(x > base ? x : base)));
    const std::int32_t code = (a - base + static_cast<std::int32_t>(dither)) >> kShift;
    return code > kMost ? kMost : code;
  }

 private:
  static STRONGHOLD_INLINE float float_at(std::int32_t bits) { return float_of(static_cast<std::uint32_t>(bits)); }
};

struct FirstMoment : SmallFloat<3, 7> {
  static constexpr std::uint32_t kElementFactor = 0x85EBCA6B;
  static constexpr std::uint32_t kStepFactor = 0x6A09E667;

  static STRONGHOLD_INLINE float decode(std::uint8_t code, std::int32_t base) {
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80) << 24;
    return float_of(static_cast<std::uint32_t>(decode_magnitude(code & 0x7F, base)) | sign);
  }
  static STRONGHOLD_INLINE std::uint8_t encode(float m, std::int32_t base, std::uint32_t dither) {
    const std::int32_t code = encode_magnitude(magnitude(m), base, dither);
    return static_cast<std::uint8_t>(code != 0 && m < 0.0f ? code | 0x80 : code);
  }
};

struct SecondMoment : SmallFloat<4, 8> {
  static constexpr std::uint32_t kElementFactor = 0xC2B2AE35;
  static constexpr std::uint32_t kStepFactor = 0x9E3779B9;

  static STRONGHOLD_INLINE float decode(std::uint8_t code, std::int32_t base) {
    return float_of(static_cast<std::uint32_t>(decode_magnitude(code, base)));
  }
  static STRONGHOLD_INLINE std::uint8_t encode(float v, std::int32_t base, std::uint32_t dither) {
    const std::int32_t bits = magnitude(v);
    const std::int32_t code = encode_magnitude(bits, base, dither);
    const std::int32_t least = bits < 1 ? bits : 1;  // a comparison with 0 would be a branch to GCC 12
    return static_cast<std::uint8_t>(code > least ? code : least);
  }
};

// The multiples of a moment's element factor within a block: the dither of a block is one addition to them.
template <class Moment>
struct ElementTerms {
  constexpr ElementTerms() : terms() {
    for (std::uint32_t i = 0; i < kBlock; ++i) terms[i] = i * Moment::kElementFactor;
  }
  alignas(64) std::uint32_t terms[kBlock];
};
template <class Moment>
inline constexpr ElementTerms<Moment> kElementTerms;

// The dither of the block that begins at element `first`.
template <class Moment>
struct Dither {
  STRONGHOLD_INLINE Dither(std::uint32_t first, std::uint32_t step)
      : start(first * Moment::kElementFactor + step * Moment::kStepFactor) {}
  STRONGHOLD_INLINE std::uint32_t operator[](int i) const {
    return (start + kElementTerms<Moment>.terms[i]) >> (32 - Moment::kShift);
  }
  std::uint32_t start;
};

}  // namespace stronghold
