// CRC-32C by carry-less products of 512 bits, on x86 processors that have them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stronghold {

// What folded_register takes is a multiple of it.
constexpr std::size_t kFold = 256;

// Whether this processor, and this build, has what it takes.
bool has_folding();

// What `bytes` bytes, one or several times kFold, leave in the register that was `crc`.
std::uint32_t folded_register(const unsigned char* data, std::size_t bytes, std::uint32_t crc);

}  // namespace stronghold
