// Failures on demand, for tests: a System that lets chosen calls go wrong, and remembers all of them.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "system.h"

namespace stronghold {

enum class Call { open, read, write, reserve, sync };

// What happens to a call: `error` it fails with errno `error` and does nothing else; `partial` it carries out and
// claims at most `bytes` of what was asked (half of it where negative), what it read behind these being garbage; `flip`
// one bit of byte `bytes` (of the middle one where negative) is read or written the other way round; `end` it reads
// nothing, as at a file's end; `delay` it waits for `delay_s` first; `kill` it carries out as much as `partial` does
// and ends the process with SIGKILL.
enum class Wrong { error, partial, flip, end, delay, kill };

// The nth call, counted from 1, of those of this kind whose path ends in `path_ends`, and `times` - 1 calls behind it.
struct Fault {
  Call call = Call::read;
  std::int64_t nth = 1;
  std::int64_t times = 1;
  std::string path_ends;
  Wrong wrong = Wrong::error;
  int error = 0;
  std::int64_t bytes = -1;
  double delay_s = 0;
};

struct Called {
  Call call;
  std::string path;
  std::int64_t offset;
  std::int64_t bytes;
};

class FaultySystem final : public System {
 public:
  explicit FaultySystem(std::vector<Fault> faults) : faults_(std::move(faults)), seen_(faults_.size(), 0) {}

  int open(const std::string& path, int flags) override;
  ssize_t pread(int fd, const std::string& path, void* memory, std::size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const std::string& path, const void* memory, std::size_t bytes, off_t offset) override;
  int fallocate(int fd, const std::string& path, off_t bytes) override;
  int fdatasync(int fd, const std::string& path) override;

  std::vector<Called> calls() const;  // so far, in the order in which they began

 private:
  // Counts the call. Returns the fault that is due, the first of several, or nullptr; it has waited if that delays,
  // and set errno if that is an error.
  const Fault* due(Call call, const std::string& path, std::int64_t offset, std::int64_t bytes);

  const std::vector<Fault> faults_;
  mutable std::mutex mutex_;
  std::vector<std::int64_t> seen_;
  std::vector<Called> calls_;
};

}  // namespace stronghold
