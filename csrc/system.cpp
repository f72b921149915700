#include "system.h"

#include <fcntl.h>
#include <unistd.h>

namespace stronghold {

int System::open(const std::string& path, int flags) { return ::open(path.c_str(), flags, 0666); }

ssize_t System::pread(int fd, const std::string&, void* memory, std::size_t bytes, off_t offset) {
  return ::pread(fd, memory, bytes, offset);
}

ssize_t System::pwrite(int fd, const std::string&, const void* memory, std::size_t bytes, off_t offset) {
  return ::pwrite(fd, memory, bytes, offset);
}

int System::fallocate(int fd, const std::string&, off_t bytes) { return ::fallocate(fd, 0, 0, bytes); }

int System::fdatasync(int fd, const std::string&) { return ::fdatasync(fd); }

}  // namespace stronghold
