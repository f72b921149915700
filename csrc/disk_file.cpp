#include "disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace stronghold {
namespace {

std::string hexadecimal(std::uint32_t number) {
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(number >> shift) & 0xf];
  return text;
}

std::string describe(const Failure& failure) {
  const std::string range = std::to_string(failure.length) + " bytes at byte " + std::to_string(failure.offset) +
                            " of '" + failure.path + "'";
  const bool whole = failure.operation == "open" || failure.operation == "sync";
  const std::string cannot = "cannot " + failure.operation + " " + (whole ? "'" + failure.path + "'" : range) + ": ";
  switch (failure.kind) {
    case Failure::Kind::ended:
      return cannot + "the file ends at byte " + std::to_string(failure.end) + ", and " +
             std::to_string(failure.offset + failure.length) + " are needed";
    case Failure::Kind::altered:
      return "the data on disk was altered: " + range + " have the checksum " + hexadecimal(failure.found) +
             ", and were written with " + hexadecimal(failure.expected);
    case Failure::Kind::dropped:
      return cannot + "the disk was closed before";
    case Failure::Kind::forked:
      return cannot + "the disk's threads did not come along when the process forked; open a disk in the child";
    case Failure::Kind::system:
      break;
  }
  return cannot + std::system_category().message(failure.error) + " (errno " + std::to_string(failure.error) + ")";
}

struct Alignment {
  std::int64_t file = 0;  // 0 where the kernel does not tell
  std::int64_t memory = 0;
};

Alignment reported_alignment([[maybe_unused]] int fd) {
#if defined(STATX_DIOALIGN)
  struct statx found = {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0)
    return {found.stx_dio_offset_align, found.stx_dio_mem_align};
#endif
  return {};
}

// Whether the file system has, by its own account, too little free space for the file to have `bytes`.
bool lacks(int fd, std::int64_t bytes) {
  struct stat file = {};
  struct statvfs system = {};
  if (::fstat(fd, &file) != 0 || ::fstatvfs(fd, &system) != 0 || system.f_blocks == 0) return false;
  const auto free_bytes = static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize);
  return static_cast<double>(bytes) - 512.0 * static_cast<double>(file.st_blocks) > free_bytes;
}

}  // namespace

DiskError::DiskError(Failure what) : std::runtime_error(describe(what)), failure(std::move(what)) {}

DiskFile::DiskFile(std::string path, Options options, std::shared_ptr<System> system)
    : path_(std::move(path)),
      read_only_(options.read_only),
      system_(system ? std::move(system) : std::make_shared<System>()) {
  const int flags = (read_only_ ? O_RDONLY : O_RDWR) | (options.create && !read_only_ ? O_CREAT : 0) | O_CLOEXEC;
  do fd_ = system_->open(path_, flags | O_DIRECT);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0 && errno == EINVAL) {  // what file systems without direct I/O answer
    direct_ = false;
    do fd_ = system_->open(path_, flags);
    while (fd_ < 0 && errno == EINTR);
  }
  if (fd_ < 0) fail("open", 0, errno);
  struct stat status = {};
  const int error = ::fstat(fd_, &status) != 0 ? errno : S_ISREG(status.st_mode) || S_ISBLK(status.st_mode) ? 0 : EINVAL;
  if (error != 0) {
    ::close(fd_);
    fail("open", 0, error);
  }
  if (direct_) {
    const Alignment reported = reported_alignment(fd_);
    alignment_ = std::max(alignment_, reported.file);
    if (reported.memory > 0) memory_alignment_ = reported.memory;
    direct_ = takes_direct(size());  // a block device's st_size is 0
    if (!direct_) ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) & ~O_DIRECT);
  }
  if (!direct_) {
    alignment_ = 4096;
    memory_alignment_ = 1;
  }
}

DiskFile::~DiskFile() { ::close(fd_); }

// Some file systems take the flag and refuse the transfer. Of an empty file nothing is read, so a block is written
// and taken back.
bool DiskFile::takes_direct(std::int64_t size) const {
  const auto block = static_cast<std::size_t>(alignment_);
  void* memory = nullptr;
  if (::posix_memalign(&memory, std::max(block, static_cast<std::size_t>(memory_alignment_)), block) != 0)
    throw std::bad_alloc();
  const std::unique_ptr<void, decltype(&std::free)> owner(memory, &std::free);
  std::memset(memory, 0, block);
  bool takes = ::pread(fd_, memory, block, 0) >= 0 || errno != EINVAL;
  if (takes && size == 0 && !read_only_) {
    takes = ::pwrite(fd_, memory, block, 0) >= 0 || errno != EINVAL;
    if (::ftruncate(fd_, 0) != 0) return takes;
  }
  return takes;
}

std::int64_t DiskFile::size() const {
  const off_t end = ::lseek(fd_, 0, SEEK_END);  // also of a block device; nothing here uses the file's position
  if (end < 0) fail("open", 0, errno);
  return end;
}

bool DiskFile::reserve(std::int64_t bytes) {
  if (bytes < 0) throw std::invalid_argument("bytes to reserve must not be negative (got " + std::to_string(bytes) + ")");
  const std::int64_t before = size();
  if (bytes == 0) return true;
  // Asked first: a file system takes all that is free before it refuses, from whoever else writes there.
  if (lacks(fd_, bytes)) fail("reserve", bytes, ENOSPC);
  int error = 0;
  do error = system_->fallocate(fd_, path_, bytes) == 0 ? 0 : errno;
  while (error == EINTR);
  if (error == 0) return true;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    if (bytes > before && ::ftruncate(fd_, bytes) != 0) fail("reserve", bytes, errno);
    return false;
  }
  // What was reserved before the space ran out goes back.
  if (::ftruncate(fd_, before) != 0) error = error == 0 ? errno : error;
  fail("reserve", bytes, error);
}

void DiskFile::sync() {
  int error = 0;
  do error = system_->fdatasync(fd_, path_) == 0 ? 0 : errno;
  while (error == EINTR);
  if (error != 0) fail("sync", 0, error);
}

void DiskFile::fail(const char* operation, std::int64_t length, int error) const {
  throw DiskError({Failure::Kind::system, operation, path_, 0, length, error, 0, 0, 0});
}

}  // namespace stronghold
