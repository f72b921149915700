// How tensors are cut into the pieces that threads take, and the checks that every kernel makes of its buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace stronghold {

// Elements that one thread takes at a time. The cuts depend on the lengths alone, never on the thread count: they
// decide the order in which a norm is summed.
constexpr std::int64_t kChunk = 64 * 1024;

struct Chunk {
  std::size_t owner;  // index of the tensor
  std::int64_t begin;
  std::int64_t n;
};

// Cuts tensors of these lengths, in their order.
std::vector<Chunk> cut(const std::vector<std::int64_t>& lengths);

// Runs work(i) for the index of every chunk, on at most `threads` threads. Throws std::invalid_argument for none.
void for_each_chunk(const std::vector<Chunk>& chunks, int threads, const std::function<void(std::int64_t)>& work);

// Throws std::invalid_argument for a negative length of the tensor that is the index-th `what` of its call.
void check_length(const char* what, std::size_t index, std::int64_t n);

// The buffers of one call, gathered to see that none overlaps another: the result would depend on which thread came
// first.
class Buffers {
 public:
  explicit Buffers(const char* owners) : owners_(owners) {}  // what the call's arguments are called, in the plural
  void add(std::size_t owner, const void* data, std::int64_t bytes);
  void check_apart();  // throws std::invalid_argument

 private:
  struct Range {
    const char* begin;
    const char* end;
    std::size_t owner;
  };
  const char* owners_;
  std::vector<Range> ranges_;
};

}  // namespace stronghold
