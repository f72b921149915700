#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "crc32c_folded.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#if defined(__clang__)  // which counts the instruction apart
#define STRONGHOLD_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define STRONGHOLD_CRC_TARGET __attribute__((target("sse4.2")))
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define STRONGHOLD_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace stronghold {
namespace {

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: what byte b leaves in the register k bytes after it went through. After Intel's "slicing by 8".
std::array<Table, 8> byte_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kCastagnoli : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  return tables;
}

std::uint32_t table_register(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  static const std::array<Table, 8> tables = byte_tables();
  for (; bytes >= 8; bytes -= 8, data += 8)
    crc = tables[7][(crc ^ data[0]) & 0xff] ^ tables[6][((crc >> 8) ^ data[1]) & 0xff] ^
          tables[5][((crc >> 16) ^ data[2]) & 0xff] ^ tables[4][(crc >> 24) ^ data[3]] ^ tables[3][data[4]] ^
          tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
  for (; bytes > 0; --bytes, ++data) crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(STRONGHOLD_CRC_TARGET)

#if defined(__x86_64__)
STRONGHOLD_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
STRONGHOLD_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, unsigned char byte) {
  return _mm_crc32_u8(crc, byte);
}
bool has_instruction() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
}
#else
// In assembly: compilers declare the intrinsics only where the whole file is compiled for them.
STRONGHOLD_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) {
  __asm__("crc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}
STRONGHOLD_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, unsigned char byte) {
  __asm__("crc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(static_cast<std::uint32_t>(byte)));
  return crc;
}
bool has_instruction() { return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; }  // HWCAP_CRC32
#endif

// shift[k][b]: what byte k of the register, of value b, becomes while kCrcPage zeros go through. CRC is linear, so a
// register's four bytes are looked up one by one and added.
std::array<Table, 4> shift_tables() {
  static const unsigned char zeros[kCrcPage] = {};
  std::array<Table, 4> shift{};
  for (std::size_t k = 0; k < 4; ++k) {
    for (unsigned bit = 0; bit < 8; ++bit)
      shift[k][1U << bit] = table_register(zeros, kCrcPage, 1U << (8 * k + bit));
    for (std::size_t byte = 1; byte < 256; ++byte)
      shift[k][byte] = shift[k][byte & (byte - 1)] ^ shift[k][byte & (~byte + 1)];
  }
  return shift;
}

STRONGHOLD_CRC_TARGET std::uint32_t in_turn(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  std::uint64_t word = 0;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::memcpy(&word, data, 8);
    crc = step(crc, word);
  }
  for (; bytes > 0; --bytes, ++data) crc = step(crc, *data);
  return crc;
}

// The instruction takes a word a cycle but gives its result three cycles later: three pages go side by side. After
// Mark Adler's crc32c.c.
STRONGHOLD_CRC_TARGET void three_pages(const unsigned char* data, std::array<std::uint32_t, 3>& registers) {
  std::uint32_t first = registers[0], second = registers[1], third = registers[2];
  std::uint64_t word[3];
  for (std::size_t i = 0; i < kCrcPage; i += 8) {
    std::memcpy(&word[0], data + i, 8);
    std::memcpy(&word[1], data + kCrcPage + i, 8);
    std::memcpy(&word[2], data + 2 * kCrcPage + i, 8);
    first = step(first, word[0]);
    second = step(second, word[1]);
    third = step(third, word[2]);
  }
  registers = {first, second, third};
}

std::uint32_t instruction_register(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  static const std::array<Table, 4> shift = shift_tables();
  const auto shifted = [](std::uint32_t c) {
    return shift[0][c & 0xff] ^ shift[1][(c >> 8) & 0xff] ^ shift[2][(c >> 16) & 0xff] ^ shift[3][c >> 24];
  };
  for (; bytes >= 3 * kCrcPage; bytes -= 3 * kCrcPage, data += 3 * kCrcPage) {
    std::array<std::uint32_t, 3> registers{crc, 0, 0};
    three_pages(data, registers);
    crc = shifted(shifted(registers[0]) ^ registers[1]) ^ registers[2];
  }
  return in_turn(data, bytes, crc);
}

#else
bool has_instruction() { return false; }

void three_pages(const unsigned char*, std::array<std::uint32_t, 3>&) {}

std::uint32_t instruction_register(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  return table_register(data, bytes, crc);
}
#endif

std::uint32_t register_by(CrcWay way, const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  if (way == CrcWay::table) return table_register(data, bytes, crc);
  const std::size_t whole = way == CrcWay::folded ? bytes - bytes % kFold : 0;
  if (whole > 0) crc = folded_register(data, whole, crc);
  return instruction_register(data + whole, bytes - whole, crc);
}

constexpr const char* kNames[] = {"table", "instruction", "folded"};

}  // namespace

std::vector<std::string> crc32c_ways() {
  std::vector<std::string> ways{kNames[0]};
  if (has_instruction()) ways.push_back(kNames[1]);
  if (has_instruction() && has_folding()) ways.push_back(kNames[2]);
  return ways;
}

CrcWay crc32c_way_named(const std::string& name) {
  const std::vector<std::string> ways = crc32c_ways();
  const auto found = std::find(ways.begin(), ways.end(), name);
  if (found == ways.end())
    throw std::invalid_argument("a way must be one of this processor's (got '" + name + "', the best is " +
                                ways.back() + "); pass that");
  return static_cast<CrcWay>(found - ways.begin());
}

CrcWay best_crc32c_way() {
  static const CrcWay best = crc32c_way_named(crc32c_ways().back());
  return best;
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc, CrcWay way) {
  return ~register_by(way, static_cast<const unsigned char*>(data), bytes, ~crc);
}

void crc32c_of_pages(const void* memory, std::size_t bytes, std::uint32_t* sums, CrcWay way) {
  const unsigned char* data = static_cast<const unsigned char*>(memory);
  if (way == CrcWay::instruction)
    for (; bytes >= 3 * kCrcPage; bytes -= 3 * kCrcPage, data += 3 * kCrcPage) {
      std::array<std::uint32_t, 3> registers{~0U, ~0U, ~0U};
      three_pages(data, registers);
      for (const std::uint32_t one : registers) *sums++ = ~one;
    }
  for (std::size_t at = 0; at < bytes; at += kCrcPage)
    *sums++ = crc32c(data + at, std::min(kCrcPage, bytes - at), 0, way);
}

}  // namespace stronghold
