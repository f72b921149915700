// What the tests of the disk share. A check that fails throws, whatever NDEBUG says; main ends the program with 1.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "disk.h"
#include "faults.h"

#define CHECK(condition) \
  if (!(condition)) throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #condition)

struct Test {
  const char* name;
  std::function<void(const std::string& folder)> run;
};

// Each file of tests adds its own.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Added {
  Added(const char* name, std::function<void(const std::string&)> run) { tests().push_back({name, std::move(run)}); }
};

// Memory that begins `askew` bytes behind a page, with bytes of `fill`; a sanitizer watches both its ends.
class Memory {
 public:
  explicit Memory(std::size_t bytes, std::size_t askew = 0, unsigned char fill = 0xEE)
      : bytes_(bytes), askew_(askew) {
    void* memory = nullptr;
    if (::posix_memalign(&memory, 4096, bytes + askew + 1) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<unsigned char*>(memory));
    for (std::size_t i = 0; i < bytes + askew + 1; ++i) memory_.get()[i] = fill;
  }
  unsigned char* data() const { return memory_.get() + askew_; }
  std::size_t size() const { return bytes_; }
  unsigned char& operator[](std::size_t i) const { return data()[i]; }
  // Bytes that differ from one place to the next, and from one seed to another.
  void number(std::uint32_t seed) const {
    std::uint32_t x = seed * 2654435761u + 1;
    for (std::size_t i = 0; i < bytes_; ++i) {
      x = x * 1664525u + 1013904223u;
      data()[i] = static_cast<unsigned char>(x >> 24);
    }
  }

 private:
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };
  std::unique_ptr<unsigned char, Free> memory_;
  std::size_t bytes_, askew_;
};

inline bool same(const Memory& a, const Memory& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) return false;
  return true;
}

inline stronghold::Request request(std::shared_ptr<stronghold::DiskFile> file, bool write, const Memory& memory,
                                   std::int64_t offset = 0, int priority = 0) {
  return {std::move(file), write, memory.data(), offset, static_cast<std::int64_t>(memory.size()), priority, nullptr,
          false};
}

inline std::shared_ptr<stronghold::DiskFile> open_file(const std::string& path,
                                                       std::shared_ptr<stronghold::System> system = nullptr) {
  return std::make_shared<stronghold::DiskFile>(path, stronghold::DiskFile::Options{false, true}, std::move(system));
}

inline stronghold::Fault fault(stronghold::Call call, stronghold::Wrong wrong, std::int64_t nth = 1,
                               std::int64_t times = 1) {
  stronghold::Fault made;
  made.call = call;
  made.wrong = wrong;
  made.nth = nth;
  made.times = times;
  return made;
}

inline stronghold::Fault error(stronghold::Call call, int number, std::int64_t nth = 1, std::int64_t times = 1) {
  stronghold::Fault made = fault(call, stronghold::Wrong::error, nth, times);
  made.error = number;
  return made;
}

inline stronghold::Fault delay(stronghold::Call call, double seconds, std::int64_t nth = 1, std::int64_t times = 1) {
  stronghold::Fault made = fault(call, stronghold::Wrong::delay, nth, times);
  made.delay_s = seconds;
  return made;
}

// The failure that a transfer ends with. Throws where it does not fail.
inline stronghold::Failure failure_of(const stronghold::Transfer& transfer) {
  try {
    transfer.wait();
  } catch (const stronghold::DiskError& error) {
    if (!transfer.done()) throw std::runtime_error("wait threw before the transfer was done");
    return error.failure;
  }
  throw std::runtime_error("the transfer did not fail");
}
