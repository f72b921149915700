// One piece of a transfer, carried out by one thread.
#pragma once

#include <cstdint>
#include <memory>

#include "disk_file.h"
#include "system.h"

namespace stronghold {

// A thread's own aligned memory, taken when it is first needed and as large as was needed.
class Bounce {
 public:
  // Throws std::bad_alloc.
  char* get(std::int64_t bytes, std::int64_t alignment);

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
  std::int64_t bytes_ = 0;
  std::int64_t alignment_ = 0;
};

// `length` bytes of `file` from `offset`, a multiple of its alignment, and of memory. A piece that does not end at a
// block's end is written with zeros behind it, up to there; only its own bytes are read.
struct Piece {
  const DiskFile& file;
  char* memory;
  std::int64_t offset;
  std::int64_t length;
};

// Both return when all of it is done, however many calls that takes: a call that does less is followed by another
// from the start of the block that it broke off in, an interrupted one is made again. They add to `moved_bytes`, as
// they go, the bytes that the system has moved. They throw DiskError.
void read_piece(const Piece& piece, System& system, Bounce& bounce, std::int64_t& moved_bytes);
void write_piece(const Piece& piece, System& system, Bounce& bounce, std::int64_t& moved_bytes);

}  // namespace stronghold
