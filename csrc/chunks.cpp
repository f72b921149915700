#include "chunks.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace stronghold {

std::vector<Chunk> cut(const std::vector<std::int64_t>& lengths) {
  std::vector<Chunk> chunks;
  for (std::size_t owner = 0; owner < lengths.size(); ++owner)
    for (std::int64_t begin = 0; begin < lengths[owner]; begin += kChunk)
      chunks.push_back({owner, begin, std::min(kChunk, lengths[owner] - begin)});
  return chunks;
}

void check_length(const char* what, std::size_t index, std::int64_t n) {
  if (n < 0)
    throw std::invalid_argument(std::string(what) + " " + std::to_string(index) +
                                " must not have a negative length (got " + std::to_string(n) + ")");
}

void Buffers::add(std::size_t owner, const void* data, std::int64_t bytes) {
  if (data == nullptr || bytes == 0) return;
  const char* begin = static_cast<const char*>(data);
  ranges_.push_back({begin, begin + bytes, owner});
}

void Buffers::check_apart() {
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return std::less<const char*>()(a.begin, b.begin); });
  for (std::size_t i = 1; i < ranges_.size(); ++i)
    if (ranges_[i].begin < ranges_[i - 1].end)
      throw std::invalid_argument(std::string("the buffers of a call must not overlap (two of ") + owners_ + " " +
                                  std::to_string(std::min(ranges_[i - 1].owner, ranges_[i].owner)) + " and " +
                                  std::to_string(std::max(ranges_[i - 1].owner, ranges_[i].owner)) +
                                  " do); pass each tensor once");
}

}  // namespace stronghold
