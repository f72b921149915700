#include "chunks.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "workers.h"

namespace stronghold {

std::vector<Chunk> cut(const std::vector<std::int64_t>& lengths) {
  std::vector<Chunk> chunks;
  for (std::size_t owner = 0; owner < lengths.size(); ++owner)
    for (std::int64_t begin = 0; begin < lengths[owner]; begin += kChunk)
      chunks.push_back({owner, begin, std::min(kChunk, lengths[owner] - begin)});
  return chunks;
}

void for_each_chunk(const std::vector<Chunk>& chunks, int threads, const std::function<void(std::int64_t)>& work) {
  std::int64_t elements = 0;
  for (const Chunk& chunk : chunks) elements += chunk.n;
  // Many small tensors are many chunks and little work: to wake a thread takes longer.
  const std::int64_t worth = std::max<std::int64_t>(1, elements / kChunk);
  for_each(static_cast<std::int64_t>(chunks.size()), static_cast<int>(std::min<std::int64_t>(threads, worth)), work);
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
