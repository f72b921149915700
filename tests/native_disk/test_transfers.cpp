// What goes through comes back, whatever lies askew and whoever else is at it.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <thread>

#include "check.h"
#include "crc32c.h"

namespace {

using stronghold::Call;
using stronghold::CrcWay;
using stronghold::Disk;
using stronghold::DiskError;
using stronghold::Failure;
using stronghold::Fault;
using stronghold::FaultySystem;
using stronghold::Transfer;
using stronghold::Wrong;

std::uint32_t by_table(const void* data, std::size_t n) { return stronghold::crc32c(data, n, 0, CrcWay::table); }

const Added crc("CRC-32C of known vectors (RFC 3720, B.4)", [](const std::string&) {
  unsigned char bytes[32];
  for (const std::string& way : stronghold::crc32c_ways()) {
    const auto sum = [&](const void* data, std::size_t n, std::uint32_t before) {
      return stronghold::crc32c(data, n, before, stronghold::crc32c_way_named(way));
    };
    CHECK(sum("123456789", 9, 0) == 0xE3069283);
    CHECK(sum("", 0, 0) == 0);
    std::fill(bytes, bytes + 32, 0);
    CHECK(sum(bytes, 32, 0) == 0x8A9136AA);
    std::fill(bytes, bytes + 32, 0xFF);
    CHECK(sum(bytes, 32, 0) == 0x62A8AB43);
    for (int i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(i);
    CHECK(sum(bytes, 32, 0) == 0x46DD794E);
    for (int i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(31 - i);
    CHECK(sum(bytes, 32, 0) == 0x113FDB5C);
  }
});

const Added crc_ways("CRC-32C is the same in all ways, in parts and by pages", [](const std::string&) {
  const Memory memory(70000, 3);
  memory.number(7);
  for (const std::size_t begin : {0u, 1u, 5u})
    for (const std::size_t n : {0u, 1u, 7u, 8u, 9u, 4096u, 12287u, 12288u, 12289u, 40000u, 69990u}) {
      const std::uint32_t whole = by_table(memory.data() + begin, n);
      for (const std::string& name : stronghold::crc32c_ways()) {
        const CrcWay way = stronghold::crc32c_way_named(name);
        CHECK(stronghold::crc32c(memory.data() + begin, n, 0, way) == whole);
        const std::uint32_t first = stronghold::crc32c(memory.data() + begin, n / 3, 0, way);
        CHECK(stronghold::crc32c(memory.data() + begin + n / 3, n - n / 3, first, way) == whole);
        std::vector<std::uint32_t> pages((n + 4095) / 4096);
        stronghold::crc32c_of_pages(memory.data() + begin, n, pages.data(), way);
        for (std::size_t i = 0; i < pages.size(); ++i)
          CHECK(pages[i] == by_table(memory.data() + begin + i * 4096, std::min<std::size_t>(4096, n - i * 4096)));
      }
    }
});

const Added shapes("memory, offset and length of every kind", [](const std::string& folder) {
  for (const bool buffered : {false, true}) {
    std::shared_ptr<FaultySystem> system;
    if (buffered) system = std::make_shared<FaultySystem>(std::vector<Fault>{error(Call::open, EINVAL)});
    Disk disk(3, 8192, system);
    const std::string path = folder + (buffered ? "/shapes-buffered" : "/shapes");
    const auto file = open_file(path, system);
    CHECK(!buffered || !file->direct());
    std::uint32_t seed = 1;
    for (const std::size_t length : {0u, 1u, 4095u, 4096u, 4097u, 8192u, 8193u, 20480u, 30001u})
      for (const std::size_t askew : {0u, 1u, 64u, 512u})
        for (const std::int64_t offset : {0, 4096, 40960}) {
          const Memory data(length, askew), back(length, (askew + 64) % 1024);
          data.number(++seed);
          std::vector<std::uint32_t> sums((length + 4095) / 4096);
          stronghold::Request write = request(file, true, data, offset), read = request(file, false, back, offset);
          write.sums = read.sums = sums.data();
          disk.submit(write).wait();
          for (std::size_t i = 0; i < sums.size(); ++i)
            CHECK(sums[i] == by_table(data.data() + i * 4096, std::min<std::size_t>(4096, length - i * 4096)));
          read.verify = true;
          disk.submit(read).wait();
          CHECK(same(data, back));
          CHECK(length == 0 || file->size() % 4096 == 0);
        }
  }
});

const Added zeros("a last block is filled with zeros", [](const std::string& folder) {
  Disk disk(1);
  const auto file = open_file(folder + "/zeros");
  const Memory ones(8192, 0, 0xFF), data(5000, 0, 0x11), back(8192);
  disk.submit(request(file, true, ones)).wait();
  disk.submit(request(file, true, data)).wait();
  disk.submit(request(file, false, back)).wait();
  for (std::size_t i = 0; i < 8192; ++i) CHECK(back[i] == (i < 5000 ? 0x11 : 0));
});

const Added urgent("urgent transfers overtake those that have not begun", [](const std::string& folder) {
  // One thread, held up in the first write.
  const auto system = std::make_shared<FaultySystem>(std::vector<Fault>{delay(Call::write, 1.0)});
  Disk disk(1, 4096, system);
  const auto file = open_file(folder + "/urgent");
  std::vector<Memory> memory;
  for (int i = 0; i < 4; ++i) memory.emplace_back(3 * 4096);
  std::vector<Transfer> transfers;
  const int priorities[] = {5, 5, 1, 2};
  for (int i = 0; i < 4; ++i) {
    transfers.push_back(disk.submit(request(file, true, memory[i], i * 16384, priorities[i])));
    if (i == 0)  // it must have begun
      while (system->calls().empty()) std::this_thread::yield();
  }
  for (const Transfer& transfer : transfers) transfer.wait();
  std::vector<std::int64_t> offsets;
  for (const auto& call : system->calls()) offsets.push_back(call.offset);
  CHECK((offsets == std::vector<std::int64_t>{0, 32768, 36864, 40960, 49152, 53248, 57344, 4096, 8192, 16384, 20480,
                                              24576}));
});

const Added callers("callers at once, each with transfers of its own", [](const std::string& folder) {
  Disk disk(4, 4096);
  const auto file = open_file(folder + "/callers");
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int caller = 0; caller < 6; ++caller)
    threads.emplace_back([&, caller] {
      for (int round = 0; round < 15; ++round) {
        const Memory data(20000, caller), back(20000);
        data.number(static_cast<std::uint32_t>(100 * caller + round));
        const Transfer write = disk.submit(request(file, true, data, caller * 32768, caller % 2));
        while (!write.wait_for(0.001)) continue;
        const Transfer read = disk.submit(request(file, false, back, caller * 32768, round % 3));
        while (!read.done()) disk.counters();
        right += same(data, back);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 90);
  CHECK(disk.counters().read_bytes == 90 * 20480);
  CHECK(disk.counters().written_bytes == 90 * 20480);
  CHECK(disk.counters().busy_s > 0);
});

const Added closing("closing drops what waits, and ends what is under way", [](const std::string& folder) {
  for (int round = 0; round < 20; ++round) {
    const bool slow = round % 3 > 0;  // so slow that it cannot be over; else it may be
    const auto system =
        std::make_shared<FaultySystem>(std::vector<Fault>{delay(Call::write, slow ? 0.04 : 0, 1, 1000)});
    const auto dropped = [&](const Transfer& transfer) {
      try {
        transfer.wait();
      } catch (const DiskError& error) {
        return error.failure.kind == Failure::Kind::dropped;
      }
      return !slow;
    };
    std::vector<Transfer> transfers;
    {
      std::vector<Memory> memory;
      Disk disk(2, 4096, system);  // goes before the memory
      const auto file = open_file(folder + "/closing");
      for (int i = 0; i < 8; ++i) memory.emplace_back(5 * 4096);
      for (int i = 0; i < 8; ++i) transfers.push_back(disk.submit(request(file, true, memory[i], i * 32768)));
      transfers[0].wait();
      if (round % 2 == 0) {
        bool right = false;
        std::thread waiter([&] { right = dropped(transfers[7]); });
        disk.close();
        waiter.join();
        CHECK(right);
      }
    }
    for (const Transfer& transfer : transfers) CHECK(transfer.done());
    transfers[0].wait();
    CHECK(dropped(transfers[7]));
  }
});

const Added closed("a closed disk takes no transfer", [](const std::string& folder) {
  Disk disk(1);
  disk.close();
  disk.close();
  const Memory memory(4096);
  bool thrown = false;
  try {
    disk.submit(request(open_file(folder + "/closed"), true, memory));
  } catch (const DiskError& error) {
    thrown = error.failure.kind == Failure::Kind::dropped;
  }
  CHECK(thrown);
});

const Added rules("a request that breaks a rule is refused", [](const std::string& folder) {
  Disk disk(1);
  const Memory memory(4096);
  const auto file = open_file(folder + "/rules");
  const auto read_only = std::make_shared<stronghold::DiskFile>(folder + "/rules", stronghold::DiskFile::Options{true, false});
  std::uint32_t sum = 0;
  std::vector<stronghold::Request> wrong(6, request(file, true, memory));
  wrong[0].offset = 512;
  wrong[1].offset = -4096;
  wrong[2].length = -1;
  wrong[3].file = read_only;
  wrong[4].verify = true, wrong[4].sums = &sum;
  wrong[5].memory = nullptr;
  for (const auto& each : wrong) {
    bool thrown = false;
    try {
      disk.submit(each);
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
});

}  // namespace
