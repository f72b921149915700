#include "crc32c.h"

#include <array>
#include <cstring>

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

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // its bits in reverse, as the register holds them

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: what byte b leaves in the register k bytes after it went through. After Intel's "slicing by 8".
std::array<Table, 8> byte_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
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

// The instruction takes a word a cycle but gives its result three cycles later: three runs of kRun bytes go side by
// side. After Mark Adler's crc32c.c.
constexpr std::size_t kRun = 4096;

// shift[k][b]: what byte k of the register, of value b, becomes while kRun zeros go through. CRC is linear, so a
// register's four bytes are looked up one by one and added.
std::array<Table, 4> shift_tables() {
  static const unsigned char zeros[kRun] = {};
  std::array<Table, 4> shift{};
  for (std::size_t k = 0; k < 4; ++k) {
    for (unsigned bit = 0; bit < 8; ++bit)
      shift[k][1U << bit] = table_register(zeros, kRun, 1U << (8 * k + bit));
    for (std::size_t byte = 1; byte < 256; ++byte)
      shift[k][byte] = shift[k][byte & (byte - 1)] ^ shift[k][byte & (~byte + 1)];
  }
  return shift;
}

STRONGHOLD_CRC_TARGET std::uint32_t hardware_register(const unsigned char* data, std::size_t bytes,
                                                      std::uint32_t crc) {
  static const std::array<Table, 4> shift = shift_tables();
  const auto shifted = [](std::uint32_t c) {
    return shift[0][c & 0xff] ^ shift[1][(c >> 8) & 0xff] ^ shift[2][(c >> 16) & 0xff] ^ shift[3][c >> 24];
  };
  std::uint64_t word[3];
  for (; bytes >= 3 * kRun; bytes -= 3 * kRun, data += 3 * kRun) {
    std::uint32_t second = 0, third = 0;
    for (std::size_t i = 0; i < kRun; i += 8) {
      std::memcpy(&word[0], data + i, 8);
      std::memcpy(&word[1], data + kRun + i, 8);
      std::memcpy(&word[2], data + 2 * kRun + i, 8);
      crc = step(crc, word[0]);
      second = step(second, word[1]);
      third = step(third, word[2]);
    }
    crc = shifted(shifted(crc) ^ second) ^ third;
  }
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::memcpy(&word[0], data, 8);
    crc = step(crc, word[0]);
  }
  for (; bytes > 0; --bytes, ++data) crc = step(crc, *data);
  return crc;
}

#else
bool has_instruction() { return false; }
std::uint32_t hardware_register(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  return table_register(data, bytes, crc);
}
#endif

}  // namespace

bool crc32c_in_hardware() {
  static const bool has = has_instruction();
  return has;
}

std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t crc) {
  return ~table_register(static_cast<const unsigned char*>(data), bytes, ~crc);
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) {
  if (!crc32c_in_hardware()) return crc32c_by_table(data, bytes, crc);
  return ~hardware_register(static_cast<const unsigned char*>(data), bytes, ~crc);
}

}  // namespace stronghold
