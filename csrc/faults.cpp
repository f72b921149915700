#include "faults.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

namespace stronghold {
namespace {

constexpr std::int64_t kBlock = 4096;  // what a direct transfer that is cut short still has to be a multiple of
constexpr unsigned char kGarbage = 0xA5;

bool ends_in(const std::string& path, const std::string& end) {
  return path.size() >= end.size() && path.compare(path.size() - end.size(), end.size(), end) == 0;
}

std::size_t claimed(const Fault& fault, std::size_t bytes) {
  return std::min(bytes, fault.bytes < 0 ? bytes / 2 : static_cast<std::size_t>(fault.bytes));
}

std::size_t flipped(const Fault& fault, std::size_t bytes) {
  return fault.bytes < 0 ? bytes / 2 : std::min(static_cast<std::size_t>(fault.bytes), bytes - 1);
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  while (true) ::pause();
}

}  // namespace

const Fault* FaultySystem::due(Call call, const std::string& path, std::int64_t offset, std::int64_t bytes) {
  const Fault* found = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back({call, path, offset, bytes});
    for (std::size_t i = 0; i < faults_.size(); ++i) {
      const Fault& fault = faults_[i];
      if (fault.call != call || !ends_in(path, fault.path_ends)) continue;
      const std::int64_t number = ++seen_[i];
      if (found == nullptr && number >= fault.nth && number - fault.nth < fault.times) found = &fault;
    }
  }
  if (found != nullptr && found->wrong == Wrong::delay)
    std::this_thread::sleep_for(std::chrono::duration<double>(found->delay_s));
  if (found != nullptr && found->wrong == Wrong::error) errno = found->error;
  return found;
}

int FaultySystem::open(const std::string& path, int flags) {
  const Fault* fault = due(Call::open, path, 0, 0);
  return fault != nullptr && fault->wrong == Wrong::error ? -1 : System::open(path, flags);
}

ssize_t FaultySystem::pread(int fd, const std::string& path, void* memory, std::size_t bytes, off_t offset) {
  const Fault* fault = due(Call::read, path, offset, static_cast<std::int64_t>(bytes));
  if (fault != nullptr && fault->wrong == Wrong::error) return -1;
  if (fault != nullptr && fault->wrong == Wrong::end) return 0;
  ssize_t n = System::pread(fd, path, memory, bytes, offset);
  if (fault == nullptr || n <= 0) return n;
  auto* const data = static_cast<unsigned char*>(memory);
  if (fault->wrong == Wrong::kill) die();
  if (fault->wrong == Wrong::flip) data[flipped(*fault, static_cast<std::size_t>(n))] ^= 0x10;
  if (fault->wrong == Wrong::partial) {
    const auto kept = static_cast<ssize_t>(claimed(*fault, bytes));
    if (kept < n) std::memset(data + kept, kGarbage, static_cast<std::size_t>(n - kept));
    n = std::min(n, kept);
  }
  return n;
}

ssize_t FaultySystem::pwrite(int fd, const std::string& path, const void* memory, std::size_t bytes, off_t offset) {
  const Fault* fault = due(Call::write, path, offset, static_cast<std::int64_t>(bytes));
  if (fault == nullptr || fault->wrong == Wrong::delay) return System::pwrite(fd, path, memory, bytes, offset);
  if (fault->wrong == Wrong::error) return -1;
  if (fault->wrong == Wrong::end) return 0;
  if (fault->wrong == Wrong::flip) {
    void* copy = nullptr;
    errno = ::posix_memalign(&copy, kBlock, bytes);
    if (errno != 0) return -1;
    const std::unique_ptr<void, decltype(&std::free)> owner(copy, &std::free);
    std::memcpy(copy, memory, bytes);
    static_cast<unsigned char*>(copy)[flipped(*fault, bytes)] ^= 0x10;
    return System::pwrite(fd, path, copy, bytes, offset);
  }
  // What it claims of a block that it broke off in is not written: whoever goes on in the middle of it loses that.
  const std::size_t part = claimed(*fault, bytes), whole = part / kBlock * kBlock;
  const ssize_t n = whole == 0 ? 0 : System::pwrite(fd, path, memory, whole, offset);
  if (fault->wrong == Wrong::kill) die();
  return n == static_cast<ssize_t>(whole) ? static_cast<ssize_t>(part) : n;
}

int FaultySystem::fallocate(int fd, const std::string& path, off_t bytes) {
  const Fault* fault = due(Call::reserve, path, 0, bytes);
  return fault != nullptr && fault->wrong == Wrong::error ? -1 : System::fallocate(fd, path, bytes);
}

int FaultySystem::fdatasync(int fd, const std::string& path) {
  const Fault* fault = due(Call::sync, path, 0, 0);
  if (fault != nullptr && fault->wrong == Wrong::kill) die();
  return fault != nullptr && fault->wrong == Wrong::error ? -1 : System::fdatasync(fd, path);
}

std::vector<Called> FaultySystem::calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

}  // namespace stronghold
