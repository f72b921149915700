// Transfers between memory and files, carried out by a pool of threads while the caller goes on.
//
// Threads and pread rather than io_uring: a layer is megabytes, four threads keep a disk busy with these, and
// containers often refuse io_uring (benchmarks/NOTES.md has the numbers).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "disk_file.h"

namespace stronghold {

constexpr std::int64_t kPiece = 4 * 1024 * 1024;
constexpr int kDiskThreads = 4;
constexpr std::int64_t kSumBytes = 4096;

struct Request {
  std::shared_ptr<DiskFile> file;
  bool write = false;
  void* memory = nullptr;  // any address; one at a multiple of the file's memory_alignment() is not copied
  std::int64_t offset = 0;  // a multiple of the file's alignment()
  std::int64_t length = 0;  // any; what is written ends in zeros up to the block's end
  int priority = 0;         // the lower, the sooner
  // One CRC-32C for each kSumBytes from `offset` on, or nullptr: set by writes and by reads, compared, where it is not
  // 0, by a read that verifies. 0 stands for one that is not known; where the CRC itself is 0, ~0 stands for it.
  std::uint32_t* sums = nullptr;
  bool verify = false;
};

// The checksums that a transfer of this memory sets.
void checksums(const void* memory, std::int64_t length, std::uint32_t* sums);

struct DiskCounters {
  std::int64_t read_bytes = 0;     // that the system has moved, padding and repetitions included
  std::int64_t written_bytes = 0;
  double busy_s = 0;               // during which at least one piece was with the system
};

class Disk;
struct DiskCore;

// One request on its way. The memory is the transfer's until it is done. Any number of threads may wait.
class Transfer {
 public:
  // Whether it has ended, well or not: from then on its memory is not touched.
  bool done() const;
  // Waits for at most `seconds` until it is done, and returns whether it is. Throws the DiskError that it failed
  // with, each time, and only once it is done.
  bool wait_for(double seconds) const;
  void wait() const;
  const Request& request() const;
  // When its first piece began and its last one ended, so far, in seconds of the steady clock; 0 where none did.
  std::pair<double, double> times() const;

  struct State;
  explicit Transfer(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

// The pool. A request is cut at every `piece_bytes` from its offset; pieces start in the order of their requests'
// priorities, then of submission, and an urgent request goes before all pieces that have not started. After its first
// error the rest of a transfer is dropped. Nothing orders transfers that touch the same bytes: wait in between.
//
// A thread that copies (memory that lies askew, an end within a block) keeps up to `piece_bytes` of its own for it.
//
// In a child of fork there are no threads: submitting and waiting throw there, and closing does nothing.
class Disk {
 public:
  // Throws std::invalid_argument, or std::system_error where the system gives not one thread.
  explicit Disk(int threads = kDiskThreads, std::int64_t piece_bytes = kPiece,
                std::shared_ptr<System> system = nullptr);
  ~Disk();  // closes
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  // Throws std::invalid_argument for a request that breaks its rules, DiskError once closed.
  Transfer submit(const Request& request);

  // How many pieces a request of this length has.
  std::int64_t pieces(std::int64_t length) const;

  // Drops what has not started and returns when what has is done. A transfer of which a piece was dropped fails. Does
  // nothing the second time.
  void close();

  DiskCounters counters() const;
  int threads() const;
  std::int64_t piece_bytes() const;

 private:
  std::shared_ptr<DiskCore> core_;
};

}  // namespace stronghold
