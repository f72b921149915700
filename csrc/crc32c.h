// CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and btrfs: it finds every flipped bit and every burst of up to 32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stronghold {

constexpr std::uint32_t kCastagnoli = 0x82F63B78;  // its bits in reverse, as the register holds them
constexpr std::size_t kCrcPage = 4096;

// By tables, which any processor can; by the processor's instruction; or by its carry-less products.
enum class CrcWay { table, instruction, folded };

// The ways of this processor, the slowest first.
std::vector<std::string> crc32c_ways();

// The way of that name. Throws std::invalid_argument where it is unknown or this processor lacks it.
CrcWay crc32c_way_named(const std::string& name);

// The last of crc32c_ways().
CrcWay best_crc32c_way();

// The CRC-32C of `bytes` bytes; with `crc`, of these behind the bytes that `crc` is the checksum of.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0, CrcWay way = best_crc32c_way());

// Sets `sums` to the CRC-32C of each kCrcPage bytes of `bytes`, the last of which may have fewer.
void crc32c_of_pages(const void* data, std::size_t bytes, std::uint32_t* sums, CrcWay way = best_crc32c_way());

}  // namespace stronghold
