// A file that is read and written past the page cache, and what is thrown when the disk fails.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "system.h"

namespace stronghold {

struct Failure {
  enum class Kind {
    system,   // a system call failed, with errno `error`
    ended,    // the file ends at byte `end`, before what was to be read does
    altered,  // what was read has checksum `found`, not `expected`
    dropped,  // the disk was closed before the transfer had begun, or whole
    forked,   // the process is a fork of the one that the disk's threads run in
  };
  Kind kind = Kind::system;
  std::string operation;  // open, read, write, reserve, sync
  std::string path;
  std::int64_t offset = 0;  // bytes, of the part of the transfer that failed
  std::int64_t length = 0;
  int error = 0;
  std::uint32_t expected = 0;
  std::uint32_t found = 0;
  std::int64_t end = 0;
};

class DiskError : public std::runtime_error {
 public:
  explicit DiskError(Failure failure);
  const Failure failure;
};

// An open file. Direct where the file system takes O_DIRECT, else through the page cache: `direct()` tells. All of it
// may be called by any number of threads at once. Closed when the last transfer on it has ended.
class DiskFile {
 public:
  struct Options {
    bool read_only = false;
    bool create = false;  // makes it if it is absent; never shortens it
  };

  // Throws DiskError, operation "open". `system` makes the calls; nullptr for the operating system itself.
  DiskFile(std::string path, Options options, std::shared_ptr<System> system = nullptr);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  bool read_only() const { return read_only_; }
  bool direct() const { return direct_; }

  // Transfers begin at multiples of this, and the file grows by it: 4096, or more where the device wants more. The
  // same for a file that is not direct, so that files do not depend on it.
  std::int64_t alignment() const { return alignment_; }
  // Memory at multiples of this is transferred without a copy: a power of two, 1 for a file that is not direct.
  std::int64_t memory_alignment() const { return memory_alignment_; }

  std::int64_t size() const;  // bytes

  // Makes the file at least `bytes` long and takes the space for all of it from the file system. Returns false where
  // the file system cannot do the latter, and only the length was set. Throws DiskError, and the file is as long as
  // it was.
  bool reserve(std::int64_t bytes);

  // Returns when everything written, and the length, would survive a loss of power. Throws DiskError.
  void sync();

 private:
  bool takes_direct(std::int64_t size) const;
  [[noreturn]] void fail(const char* operation, std::int64_t length, int error) const;

  const std::string path_;
  const bool read_only_;
  const std::shared_ptr<System> system_;
  int fd_ = -1;
  bool direct_ = true;
  std::int64_t alignment_ = 4096;
  std::int64_t memory_alignment_ = 4096;
};

}  // namespace stronghold
