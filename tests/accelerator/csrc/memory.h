// Memory of its own, that the host cannot touch, and what is pinned of the host's.
//
// A tensor carries an address in a range without any rights: the host that reads it ends with SIGSEGV, while a kernel
// adds a constant and comes to the memory. A freed block is what the next allocation of its size and stream gets.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>

#include <set>

#include "streams.h"

namespace soft {

constexpr auto kSoft = c10::DeviceType::PrivateUse1;
constexpr size_t kSpaceBytes = size_t(1) << 36;
constexpr size_t kGrainBytes = 512;  // as CUDA's allocator rounds
constexpr int kPoison = 0xFF;        // a NaN in every floating type

struct Space {
  uintptr_t shown, real;
  Space() : shown(map(PROT_NONE)), real(map(PROT_READ | PROT_WRITE)) {}
  static uintptr_t map(int rights) {
    void* at = mmap(nullptr, kSpaceBytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "soft: the system refused ", kSpaceBytes, " bytes of address space");
    return reinterpret_cast<uintptr_t>(at);
  }
};
inline const Space& space() {
  static Space one;
  return one;
}

// Returns where a kernel finds what a tensor says to be at `shown`.
inline void* real(const void* shown) {
  const auto at = reinterpret_cast<uintptr_t>(shown);
  const bool here = at >= space().shown && at < space().shown + kSpaceBytes;
  return here ? reinterpret_cast<void*>(at - space().shown + space().real) : const_cast<void*>(shown);
}

struct Block {
  uintptr_t address;
  size_t size;
  int64_t stream;
  std::set<int64_t> users = {};  // other streams that use it: record_stream
};

struct HostBlock {
  size_t length = 0;
  int pinned = 0, watched = 0;  // how often it was said
};
inline std::map<uintptr_t, HostBlock> host_blocks;    // guarded by `global`
inline std::map<uintptr_t, Block*> device_blocks;     // all there ever were
inline std::map<uintptr_t, Block*> live;
inline std::map<std::pair<int64_t, size_t>, std::vector<Block*>> freed;
inline std::vector<std::pair<Block*, std::vector<std::shared_ptr<Recording>>>> in_use;  // freed, and another stream's still
inline size_t taken_space = 0, allocated_bytes = 0, peak_bytes = 0, total_bytes = size_t(8) << 30;

inline const std::pair<const uintptr_t, HostBlock>* host_block_of(uintptr_t address) {
  auto next = host_blocks.upper_bound(address);
  if (next == host_blocks.begin()) return nullptr;
  --next;
  return address < next->first + next->second.length ? &*next : nullptr;
}
inline uintptr_t block_of(uintptr_t address) {
  auto next = device_blocks.upper_bound(address);
  if (next != device_blocks.begin()) {
    --next;
    if (address < next->first + next->second->size) return next->first;
  }
  const auto* host = host_block_of(address);
  return host ? host->first : 0;
}

inline void poison(Block* block, const char* what) {
  void* at = real(reinterpret_cast<void*>(block->address));
  const size_t size = block->size;
  launch(stream_of(block->stream), {{block->address, block->address + size, true}}, what,
         [at, size] { memset(at, kPoison, size); });
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::set<int64_t> users;
  {
    std::lock_guard<std::mutex> lock(global);
    live.erase(block->address);
    allocated_bytes -= block->size;
    std::swap(users, block->users);
  }
  if (users.empty()) {
    poison(block, "freed memory");
    std::lock_guard<std::mutex> lock(global);
    freed[{block->stream, block->size}].push_back(block);
    return;
  }
  std::vector<std::shared_ptr<Recording>> recordings;
  for (int64_t user : users) recordings.push_back(record_in(stream_of(user)));
  std::lock_guard<std::mutex> lock(global);
  in_use.emplace_back(block, std::move(recordings));
}

// Frees what other streams have done with.
inline void sweep() {
  std::vector<Block*> ready;
  {
    std::lock_guard<std::mutex> lock(global);
    for (size_t i = 0; i < in_use.size();) {
      auto& [block, recordings] = in_use[i];
      bool done = true;
      for (auto& recording : recordings) done = done && recording->done();
      if (!done) {
        i++;
        continue;
      }
      // The allocator has seen them: what is in this memory next comes behind them.
      for (auto& recording : recordings) merge(stream_of(block->stream).actor.clock, recording->clock);
      ready.push_back(block);
      in_use.erase(in_use.begin() + i);
    }
  }
  for (Block* block : ready) {
    poison(block, "freed memory");
    std::lock_guard<std::mutex> lock(global);
    freed[{block->stream, block->size}].push_back(block);
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t length) override {
    sweep();
    const c10::Device device(kSoft, 0);
    if (length == 0) return {nullptr, nullptr, [](void*) {}, device};
    const size_t size = (length + kGrainBytes - 1) / kGrainBytes * kGrainBytes;
    Block* block = nullptr;
    bool fresh = false;
    {
      std::lock_guard<std::mutex> lock(global);
      TORCH_CHECK_WITH(OutOfMemoryError, allocated_bytes + size <= total_bytes, "soft out of memory: asked for ", length,
                       " bytes with ", allocated_bytes, " of ", total_bytes, " taken");
      auto& list = freed[{current_stream, size}];
      if (!list.empty()) {
        block = list.back();  // the last first: what was freed too early is overwritten at once
        list.pop_back();
      } else {
        TORCH_CHECK_WITH(OutOfMemoryError, taken_space + size <= kSpaceBytes, "soft out of address space");
        block = new Block{space().shown + taken_space, size, current_stream};
        taken_space += size;
        device_blocks[block->address] = block;
        fresh = true;
      }
      live[block->address] = block;
      allocated_bytes += size;
      peak_bytes = std::max(peak_bytes, allocated_bytes);
    }
    if (fresh) poison(block, "new memory");
    return {reinterpret_cast<void*>(block->address), block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t length) const override {
    void *target = real(to), *source = real(from);
    const auto begin = reinterpret_cast<uintptr_t>(from), target_begin = reinterpret_cast<uintptr_t>(to);
    launch(stream_of(current_stream), {{begin, begin + length, false}, {target_begin, target_begin + length, true}},
           "copy_data", [=] { memcpy(target, source, length); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(global);
    auto found = live.find(reinterpret_cast<uintptr_t>(memory.get()));
    if (found != live.end() && found->second->stream != stream.id()) found->second->users.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> lock(global);
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = allocated_bytes;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(global);
    peak_bytes = allocated_bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {  // not asked for in torch 2.9
    std::lock_guard<std::mutex> lock(global);
    return {total_bytes - allocated_bytes, total_bytes};
  }
};
inline Allocator allocator;

// ---- the host's memory ----

inline bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(global);
  const auto* block = host_block_of(reinterpret_cast<uintptr_t>(memory));
  return block && block->second.pinned > 0;
}
inline void watch(uintptr_t address, size_t length, bool pinned, int by) {
  std::lock_guard<std::mutex> lock(global);
  auto& block = host_blocks[address];
  block.length = std::max(block.length, length);
  (pinned ? block.pinned : block.watched) += by;
  if (block.pinned > 0 || block.watched > 0) return;
  host_blocks.erase(address);
  accesses.erase(address);
}

// Memory that torch pins itself: given back once no copy can use it.
struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    synchronize_all();
    watch(reinterpret_cast<uintptr_t>(memory), 0, true, -1);
    free(memory);
  }
  c10::DataPtr allocate(size_t length) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (length == 0) return {nullptr, nullptr, [](void*) {}, device};
    void* memory = aligned_alloc(64, (length + 63) / 64 * 64);
    watch(reinterpret_cast<uintptr_t>(memory), length, true, 1);
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t length) const override { memcpy(to, from, length); }
};
inline PinnedAllocator pinned_allocator;

}  // namespace soft
