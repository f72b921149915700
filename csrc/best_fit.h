// Which bytes of a row are taken: the arithmetic of a heap, without its memory.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace stronghold {

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// A row of `capacity` bytes. A block goes into the smallest free range that has room for it, the first such one, at
// its begin, or else behind all others; free neighbours are one. For one thread at once.
class BestFit {
 public:
  explicit BestFit(std::int64_t capacity) : capacity_(capacity) {}

  // Returns the begin of a block of `bytes` > 0, or -1 where there is no room. Throws std::bad_alloc, and has changed
  // nothing then.
  std::int64_t take(std::int64_t bytes);

  // Gives back the block that begins there, and returns the free range that it is part of now. Throws
  // std::invalid_argument where none does, and std::bad_alloc: the block is still taken then.
  Range give(std::int64_t begin);

  // The end of the last byte that was ever taken.
  std::int64_t top() const { return top_; }
  std::int64_t taken_bytes() const { return taken_bytes_; }
  std::vector<Range> free_ranges() const;

 private:
  std::int64_t capacity_;
  std::int64_t top_ = 0;
  std::int64_t taken_bytes_ = 0;
  std::map<std::int64_t, std::int64_t> taken_;                   // begin, end
  std::map<std::int64_t, std::int64_t> free_;                    // begin, end
  std::set<std::pair<std::int64_t, std::int64_t>> free_by_size_;  // size, begin
};

}  // namespace stronghold
