#include "crc32c_folded.h"

#include "crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace stronghold {

#if defined(__x86_64__)
namespace {

#if defined(__clang__)  // which counts the instruction of CRC-32C apart
#define STRONGHOLD_FOLDING __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2,crc32")))
#else
#define STRONGHOLD_FOLDING __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
#endif

// x^power modulo the polynomial, in the upper half of a word whose bit 63 is x^0.
constexpr std::uint64_t power_of_x(unsigned power) {
  std::uint32_t remainder = 0x80000000;
  for (; power > 0; --power) remainder = (remainder >> 1) ^ (remainder & 1 ? kCastagnoli : 0);
  return static_cast<std::uint64_t>(remainder) << 32;
}

// What the two halves of 128 bits are multiplied with to move them so many bits to the front. After Gopal et al., "Fast
// CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): words whose bits are in reverse
// have products that are one bit short, thus the powers less one.
struct Moved {
  long long low, high;
};
constexpr Moved moved_by(unsigned bits) {
  return {static_cast<long long>(power_of_x(bits + 64 - 1)), static_cast<long long>(power_of_x(bits - 1))};
}

constexpr Moved kBlock = moved_by(8 * kFold), kRow = moved_by(512);
constexpr Moved kThree = moved_by(384), kTwo = moved_by(256), kOne = moved_by(128);

STRONGHOLD_FOLDING inline __m512i each(Moved by) {
  return _mm512_set_epi64(by.high, by.low, by.high, by.low, by.high, by.low, by.high, by.low);
}

STRONGHOLD_FOLDING inline __m512i folded(__m512i one, __m512i by, __m512i onto) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(one, by, 0x00), _mm512_clmulepi64_epi128(one, by, 0x11),
                                   onto, kXorOfThree);
}

}  // namespace

bool has_folding() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") &&
         __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

STRONGHOLD_FOLDING std::uint32_t folded_register(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  __m512i rows[4];
  for (int row = 0; row < 4; ++row) rows[row] = _mm512_loadu_si512(data + 64 * row);
  rows[0] = _mm512_xor_si512(rows[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  const __m512i block = each(kBlock), row_by = each(kRow);
  for (std::size_t at = kFold; at < bytes; at += kFold)
    for (int row = 0; row < 4; ++row)
      rows[row] = folded(rows[row], block, _mm512_loadu_si512(data + at + 64 * row));
  for (int row = 1; row < 4; ++row) rows[row] = folded(rows[row - 1], row_by, rows[row]);
  // Its four parts are one after the other; the last one stays where it is.
  const __m512i parts_by =
      _mm512_set_epi64(0, 0, kOne.high, kOne.low, kTwo.high, kTwo.low, kThree.high, kThree.low);
  const __m512i last = _mm512_maskz_mov_epi64(0xC0, rows[3]), moved = folded(rows[3], parts_by, last);
  alignas(64) std::uint64_t words[8];
  _mm512_store_si512(words, moved);
  const std::uint64_t first = _mm_crc32_u64(0, words[0] ^ words[2] ^ words[4] ^ words[6]);
  return static_cast<std::uint32_t>(_mm_crc32_u64(first, words[1] ^ words[3] ^ words[5] ^ words[7]));
}

#else
bool has_folding() { return false; }

std::uint32_t folded_register(const unsigned char*, std::size_t, std::uint32_t crc) { return crc; }
#endif

}  // namespace stronghold
