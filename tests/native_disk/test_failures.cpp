// What the system fails in is resumed or said, and no memory is touched behind a wait that has thrown.
#include <algorithm>
#include <cerrno>

#include "check.h"
#include "crc32c.h"

namespace {

using stronghold::Call;
using stronghold::Disk;
using stronghold::DiskError;
using stronghold::Failure;
using stronghold::Fault;
using stronghold::FaultySystem;
using stronghold::Wrong;

constexpr std::size_t kLength = 5 * 16384 + 777;

std::shared_ptr<FaultySystem> faulty(std::vector<Fault> faults) {
  return std::make_shared<FaultySystem>(std::move(faults));
}

void round_trip(const std::string& path, std::vector<Fault> faults, std::size_t askew) {
  const auto system = faulty(std::move(faults));
  Disk disk(2, 16384, system);
  const auto file = open_file(path);
  const Memory data(kLength, askew), back(kLength, askew), again(kLength);
  data.number(static_cast<std::uint32_t>(askew) + 5);
  disk.submit(request(file, true, data)).wait();
  disk.submit(request(file, false, back)).wait();
  CHECK(same(data, back));
  Disk plain(2, 16384);
  plain.submit(request(file, false, again)).wait();
  CHECK(same(data, again));
}

const Added shorts("short transfers are resumed from the start of their block", [](const std::string& folder) {
  for (const std::int64_t bytes : {0, 1, 4095, 4096, 5000, 8192, 16383})
    for (const std::size_t askew : {0u, 8u}) {
      std::vector<Fault> faults;
      for (const Call call : {Call::read, Call::write})
        for (const std::int64_t nth : {1, 3, 7}) {
          if (call == Call::read && bytes == 0) continue;  // the file's end
          faults.push_back(fault(call, Wrong::partial, nth, 2));
          faults.back().bytes = bytes;
        }
      round_trip(folder + "/shorts", faults, askew);
    }
});

const Added interrupted("interrupted calls are made again", [](const std::string& folder) {
  round_trip(folder + "/interrupted", {error(Call::read, EINTR, 2, 5), error(Call::write, EINTR, 1, 9)}, 0);
  const auto system = faulty({error(Call::open, EINTR), error(Call::reserve, EINTR), error(Call::sync, EINTR)});
  const auto file = open_file(folder + "/interrupted-file", system);
  CHECK(file->reserve(10000));
  file->sync();
  CHECK(file->size() == 10000);
});

const Added stalled("a device that never gets on is an error, not a hang", [](const std::string& folder) {
  for (const bool write : {false, true}) {
    Fault stall = fault(write ? Call::write : Call::read, Wrong::partial, 1, 1 << 30);
    stall.bytes = 100;
    Disk disk(1, 16384, faulty({stall}));
    const auto file = open_file(folder + "/stalled");
    const Memory memory(16384);
    Disk(1).submit(request(file, true, memory)).wait();
    const Failure failure = failure_of(disk.submit(request(file, write, memory)));
    CHECK(failure.kind == Failure::Kind::system && failure.error == EIO);
  }
});

const Added errors("an error says where, and nothing touches the memory behind it", [](const std::string& folder) {
  for (const int number : {EIO, ENOSPC})
    for (const bool write : {false, true})
      for (int round = 0; round < 10; ++round) {
        const Call call = write ? Call::write : Call::read;
        // The other pieces are under way while the third fails.
        const auto system = faulty({error(call, number, 3), delay(call, 0.002, 1, 100)});
        const auto file = open_file(folder + "/errors");
        const auto memory = std::make_unique<Memory>(64 * 16384);
        {
          Disk plain;
          plain.submit(request(file, true, *memory)).wait();
        }
        Disk disk(4, 16384, system);
        const auto transfer = disk.submit(request(file, write, *memory));
        const Failure failure = failure_of(transfer);
        CHECK(failure.kind == Failure::Kind::system && failure.error == number);
        CHECK(failure.operation == (write ? "write" : "read") && failure.path == file->path());
        CHECK(failure.offset % 16384 == 0 && failure.length == 16384);
        CHECK(failure_of(transfer).offset == failure.offset);  // each time
        CHECK(system->calls().size() < 20);                    // the rest was dropped
      }
});

const Added ended("a file that ends before the data does", [](const std::string& folder) {
  const auto file = open_file(folder + "/ended");
  Disk disk(2, 16384);
  const Memory data(20480), back(20480 + 1);
  disk.submit(request(file, true, data)).wait();
  const Failure failure = failure_of(disk.submit(request(file, false, back)));
  CHECK(failure.kind == Failure::Kind::ended && failure.offset == 20480 && failure.length == 1);
  CHECK(failure.end == 20480);
  Fault end = fault(Call::read, Wrong::end);
  Disk faulty_disk(1, 16384, faulty({end}));
  CHECK(failure_of(faulty_disk.submit(request(file, false, data))).kind == Failure::Kind::ended);
});

const Added altered("a flipped bit is found, on its way in or out", [](const std::string& folder) {
  for (const Call call : {Call::read, Call::write}) {
    Disk disk(2, 16384, faulty({fault(call, Wrong::flip, 2)}));
    const auto file = open_file(folder + "/altered");
    const Memory data(40000), copy(40000), back(40000);
    data.number(3), copy.number(3);
    std::vector<std::uint32_t> sums(10);
    stronghold::Request write = request(file, true, data), read = request(file, false, back);
    write.sums = read.sums = sums.data();
    read.verify = true;
    disk.submit(write).wait();
    CHECK(same(data, copy));
    const Failure failure = failure_of(disk.submit(read));
    CHECK(failure.kind == Failure::Kind::altered && failure.offset % 4096 == 0);
    CHECK(failure.expected == sums[static_cast<std::size_t>(failure.offset / 4096)]);
    CHECK(failure.found != failure.expected);
  }
});

const Added space("space is reserved, or said to be missing", [](const std::string& folder) {
  const auto file = open_file(folder + "/space");
  CHECK(file->reserve(100000) && file->size() == 100000);
  CHECK(file->reserve(50000) && file->size() == 100000);
  bool thrown = false;
  try {
    open_file(folder + "/space", faulty({error(Call::reserve, ENOSPC)}))->reserve(200000);
  } catch (const DiskError& error) {
    thrown = error.failure.error == ENOSPC && error.failure.length == 200000;
  }
  CHECK(thrown && file->size() == 100000);
  CHECK(!open_file(folder + "/space", faulty({error(Call::reserve, EOPNOTSUPP)}))->reserve(200000));
  CHECK(file->size() == 200000);
});

const Added devices("what fails besides transfers", [](const std::string& folder) {
  bool thrown = false;
  try {
    open_file(folder + "/devices", faulty({error(Call::sync, EIO)}))->sync();
  } catch (const DiskError& error) {
    thrown = error.failure.operation == "sync" && error.failure.error == EIO;
  }
  CHECK(thrown);
  for (const std::string& path : {folder + "/absent/file", folder}) {
    thrown = false;
    try {
      open_file(path);
    } catch (const DiskError& error) {
      thrown = error.failure.operation == "open" && error.failure.path == path;
    }
    CHECK(thrown);
  }
});

}  // namespace
