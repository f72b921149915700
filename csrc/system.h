// The system calls that the disk's files and threads make, replaceable so that tests can let them fail.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace stronghold {

// Each makes the call of its name, and returns and sets errno as it does. `path` is the file's, for those who choose
// by it. Any number of threads may call at once.
class System {
 public:
  System() = default;
  virtual ~System() = default;
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  virtual int open(const std::string& path, int flags);
  virtual ssize_t pread(int fd, const std::string& path, void* memory, std::size_t bytes, off_t offset);
  virtual ssize_t pwrite(int fd, const std::string& path, const void* memory, std::size_t bytes, off_t offset);
  virtual int fallocate(int fd, const std::string& path, off_t bytes);
  virtual int fdatasync(int fd, const std::string& path);
};

}  // namespace stronghold
