// Runs the tests in a folder for scratch files; or, by name, a misuse that the sanitizers have to see.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <thread>

#include "check.h"

namespace {

using stronghold::Call;
using stronghold::Disk;

// The memory goes while a read into it is under way: for AddressSanitizer.
void free_too_early(const std::string& folder) {
  const auto system =
      std::make_shared<stronghold::FaultySystem>(std::vector<stronghold::Fault>{delay(Call::read, 0.3)});
  Disk disk(1, 4096, system);
  const auto file = open_file(folder + "/misuse");
  const Memory data(4096);
  disk.submit(request(file, true, data)).wait();
  auto memory = std::make_unique<Memory>(4096);
  const auto transfer = disk.submit(request(file, false, *memory));
  memory.reset();
  transfer.wait();
}

// The memory is written to while a read into it is under way: for ThreadSanitizer.
void touch_too_early(const std::string& folder) {
  Disk disk(1, 4096);
  const auto file = open_file(folder + "/misuse");
  const Memory data(1000), memory(1000);
  disk.submit(request(file, true, data)).wait();
  const auto transfer = disk.submit(request(file, false, memory));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it is over; but nothing says so
  memory[0] = 1;
  transfer.wait();
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const std::string folder = arguments[1], misuse = count > 2 ? arguments[2] : "";
  if (misuse == "address,undefined") {
    free_too_early(folder);
    return 0;
  }
  if (misuse == "thread") {
    touch_too_early(folder);
    return 0;
  }
  int failed = 0;
  for (const Test& test : tests()) {
    try {
      test.run(folder);
      std::printf("passed %s\n", test.name);
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", test.name, error.what());
      ++failed;
    }
  }
  return failed == 0 ? 0 : 1;
}
