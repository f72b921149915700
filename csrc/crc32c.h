// CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and btrfs: it finds every flipped bit and every burst of up to 32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stronghold {

// The CRC-32C of `bytes` bytes; with `crc`, of these behind the bytes that `crc` is the checksum of. Uses the
// processor's instruction where it has one.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);

// The same by tables, on any processor.
std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t crc = 0);

// Whether crc32c uses the processor's instruction.
bool crc32c_in_hardware();

}  // namespace stronghold
