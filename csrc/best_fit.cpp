#include "best_fit.h"

#include <iterator>
#include <stdexcept>
#include <string>

namespace stronghold {

std::int64_t BestFit::take(std::int64_t bytes) {
  auto fit = free_by_size_.lower_bound({bytes, 0});
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  std::int64_t begin = top_, end = top_ + bytes;
  if (fit != free_by_size_.end()) {
    begin = fit->second;
    end = begin + fit->first;
  } else if (last != free_.end() && last->second == top_) {
    begin = last->first;
    end = begin + bytes;
    fit = free_by_size_.find({last->second - last->first, begin});
  }
  if (end > capacity_) return -1;
  const std::int64_t taken_end = begin + bytes;
  const auto block = taken_.emplace(begin, taken_end).first;
  if (taken_end < end) {
    try {
      free_.emplace(taken_end, end);
      free_by_size_.emplace(end - taken_end, taken_end);
    } catch (...) {
      free_.erase(taken_end);
      taken_.erase(block);
      throw;
    }
  }
  if (fit != free_by_size_.end()) {
    free_.erase(begin);
    free_by_size_.erase(fit);
  }
  if (top_ < taken_end) top_ = taken_end;
  taken_bytes_ += bytes;
  return begin;
}

Range BestFit::give(std::int64_t begin) {
  const auto block = taken_.find(begin);
  if (block == taken_.end()) throw std::invalid_argument("no block begins at " + std::to_string(begin));
  const std::int64_t own_end = block->second;
  const auto behind = free_.lower_bound(begin);
  const bool joins_behind = behind != free_.end() && behind->first == own_end;
  const auto before = behind == free_.begin() ? free_.end() : std::prev(behind);
  const bool joins_before = before != free_.end() && before->second == begin;
  const Range whole = {joins_before ? before->first : begin, joins_behind ? behind->second : own_end};
  const auto sized = free_by_size_.emplace(whole.end - whole.begin, whole.begin).first;
  if (joins_before) {
    free_by_size_.erase({before->second - before->first, before->first});
    before->second = whole.end;
  } else {
    try {
      free_.emplace(whole.begin, whole.end);
    } catch (...) {
      free_by_size_.erase(sized);
      throw;
    }
  }
  if (joins_behind) {
    free_by_size_.erase({behind->second - behind->first, behind->first});
    free_.erase(behind);
  }
  taken_bytes_ -= own_end - begin;
  taken_.erase(block);
  return whole;
}

std::vector<Range> BestFit::free_ranges() const {
  std::vector<Range> ranges;
  for (const auto& [begin, end] : free_) ranges.push_back({begin, end});
  return ranges;
}

}  // namespace stronghold
