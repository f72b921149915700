#include "disk_piece.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace stronghold {
namespace {

// Calls in a row that may get no further without an error before it is one.
constexpr int kPatience = 16;

std::int64_t down(std::int64_t bytes, std::int64_t block) { return bytes / block * block; }
std::int64_t up(std::int64_t bytes, std::int64_t block) { return down(bytes + block - 1, block); }

[[noreturn]] void fail(const char* operation, const DiskFile& file, std::int64_t offset, std::int64_t length,
                       int error) {
  throw DiskError({Failure::Kind::system, operation, file.path(), offset, length, error, 0, 0, 0});
}

// Calls move(begin, bytes), which returns what a system call does, until the first `needed` of `bytes` bytes are
// moved. ended(n, moved) says whether the file ends behind the first `moved`, seeing that a call has moved n.
template <class Move, class Ended>
void move_all(const char* operation, const DiskFile& file, std::int64_t offset, std::int64_t bytes,
              std::int64_t needed, std::int64_t& moved_bytes, const Move& move, const Ended& ended) {
  std::int64_t moved = 0;
  for (int stalls = 0; moved < needed;) {
    const std::int64_t begin = down(moved, file.alignment());
    const std::int64_t n = move(begin, bytes - begin);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(operation, file, offset + begin, bytes - begin, errno);
    moved_bytes += n;
    stalls = begin + n > moved ? 0 : stalls + 1;
    moved = std::max(moved, begin + n);
    if (stalls == 0) continue;
    if (ended(n, moved)) {
      const std::int64_t end = std::min(file.size(), offset + moved);
      throw DiskError({Failure::Kind::ended, operation, file.path(), offset, needed, 0, 0, 0, end});
    }
    if (stalls == kPatience) fail(operation, file, offset + moved, needed - moved, EIO);
  }
}

void read_all(const DiskFile& file, System& system, char* memory, std::int64_t offset, std::int64_t bytes,
              std::int64_t needed, std::int64_t& moved_bytes) {
  move_all(
      "read", file, offset, bytes, needed, moved_bytes,
      [&](std::int64_t begin, std::int64_t n) {
        return system.pread(file.fd(), file.path(), memory + begin, static_cast<std::size_t>(n), offset + begin);
      },
      [&](std::int64_t n, std::int64_t moved) { return n == 0 || file.size() <= offset + moved; });
}

void write_all(const DiskFile& file, System& system, const char* memory, std::int64_t offset, std::int64_t bytes,
               std::int64_t& moved_bytes) {
  move_all(
      "write", file, offset, bytes, bytes, moved_bytes,
      [&](std::int64_t begin, std::int64_t n) {
        return system.pwrite(file.fd(), file.path(), memory + begin, static_cast<std::size_t>(n), offset + begin);
      },
      [](std::int64_t, std::int64_t) { return false; });
}

// How much of a piece the system can move to or from its memory as it lies: whole blocks, nothing if it lies askew.
std::int64_t straight_bytes(const Piece& piece) {
  const auto address = reinterpret_cast<std::uintptr_t>(piece.memory);
  if (address % static_cast<std::uintptr_t>(piece.file.memory_alignment()) != 0) return 0;
  return down(piece.length, piece.file.alignment());
}

}  // namespace

void Bounce::Free::operator()(void* memory) const { std::free(memory); }

char* Bounce::get(std::int64_t bytes, std::int64_t alignment) {
  if (bytes_ < bytes || alignment_ < alignment) {
    void* memory = nullptr;
    memory_.reset();
    bytes_ = 0;
    if (::posix_memalign(&memory, static_cast<std::size_t>(alignment), static_cast<std::size_t>(bytes)) != 0)
      throw std::bad_alloc();
    memory_.reset(memory);
    bytes_ = bytes;
    alignment_ = alignment;
  }
  return static_cast<char*>(memory_.get());
}

void read_piece(const Piece& piece, System& system, Bounce& bounce, std::int64_t& moved_bytes) {
  const DiskFile& file = piece.file;
  const std::int64_t straight = straight_bytes(piece), rest = piece.length - straight;
  if (straight > 0) read_all(file, system, piece.memory, piece.offset, straight, straight, moved_bytes);
  if (rest == 0) return;
  const std::int64_t bytes = up(rest, file.alignment());
  char* const copy = bounce.get(bytes, std::max(file.alignment(), file.memory_alignment()));
  read_all(file, system, copy, piece.offset + straight, bytes, rest, moved_bytes);
  std::memcpy(piece.memory + straight, copy, static_cast<std::size_t>(rest));
}

void write_piece(const Piece& piece, System& system, Bounce& bounce, std::int64_t& moved_bytes) {
  const DiskFile& file = piece.file;
  const std::int64_t straight = straight_bytes(piece), rest = piece.length - straight;
  if (straight > 0) write_all(file, system, piece.memory, piece.offset, straight, moved_bytes);
  if (rest == 0) return;
  const std::int64_t bytes = up(rest, file.alignment());
  char* const copy = bounce.get(bytes, std::max(file.alignment(), file.memory_alignment()));
  std::memcpy(copy, piece.memory + straight, static_cast<std::size_t>(rest));
  std::memset(copy + rest, 0, static_cast<std::size_t>(bytes - rest));
  write_all(file, system, copy, piece.offset + straight, bytes, moved_bytes);
}

}  // namespace stronghold
