#include "tensor_heap.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "best_fit.h"
#include "imports.h"

namespace stronghold {
namespace {

constexpr char kLibrary[] = "libc10.so";
constexpr std::int64_t kLeast = 1 << 16;
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kGrowth = 1 << 25;
constexpr std::int64_t kLarge = 1 << 25;  // what glibc has from the system, and gives back, one by one

std::int64_t rounded_up(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

struct Heap {
  Heap(char* memory, std::int64_t bytes) : base(memory), capacity(bytes), blocks(bytes) {}

  char* const base;
  const std::int64_t capacity;
  std::atomic<bool> on{false};
  std::atomic<bool> keeps{false};  // large blocks that are free, too
  std::mutex lock;
  // Of all below:
  BestFit blocks;
  std::int64_t usable = 0;  // the rest of the addresses is reserved, and counts nowhere

  bool has(const void* memory) const { return memory >= base && memory < base + capacity; }

  void* take(std::int64_t bytes) {
    // A line more than a whole number of them: blocks of one size, as a layer's are, would all begin at addresses that
    // a cache keeps in the same places.
    const std::int64_t whole = rounded_up(bytes, kLine) + kLine;
    const std::lock_guard<std::mutex> locked(lock);
    std::int64_t begin = -1;
    try {
      begin = blocks.take(whole);
      if (begin >= 0 && begin + whole > usable && !grow(begin + whole)) {
        blocks.give(begin);
        begin = -1;
      }
    } catch (const std::bad_alloc&) {  // the C library is asked, and has none either
      return nullptr;
    }
    return begin < 0 ? nullptr : base + begin;
  }

  void give(void* memory) noexcept {
    const std::lock_guard<std::mutex> locked(lock);
    try {
      const std::int64_t before = blocks.taken_bytes();
      const Range whole = blocks.give(static_cast<char*>(memory) - base);
      if (!on || (!keeps && before - blocks.taken_bytes() >= kLarge)) return_to_system(whole);
    } catch (const std::bad_alloc&) {  // it stays taken
    }
  }

  void return_to_system(const Range& range) const {
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    const std::int64_t begin = rounded_up(range.begin, page), end = range.end / page * page;
    if (begin < end)  // where the system refuses, as for memory that is locked, the pages stay
      madvise(base + begin, static_cast<std::size_t>(end - begin), MADV_DONTNEED);
  }

  void trim() {
    const std::lock_guard<std::mutex> locked(lock);
    for (const Range& range : blocks.free_ranges()) return_to_system(range);
  }

  bool grow(std::int64_t to) {
    const std::int64_t next = std::min(capacity, rounded_up(to, kGrowth));
    if (mprotect(base + usable, static_cast<std::size_t>(next - usable), PROT_READ | PROT_WRITE) != 0) return false;
    usable = next;
    return true;
  }
};

Heap* heap = nullptr;  // for as long as the process, whose last tensors are freed behind everything else
int (*libc_posix_memalign)(void**, std::size_t, std::size_t) = nullptr;
void (*libc_free)(void*) = nullptr;

int allocate(void** memory, std::size_t alignment, std::size_t bytes) {
  const bool fits = bytes >= kLeast && bytes <= static_cast<std::size_t>(heap->capacity / 2);  // else it is refused
  if (heap->on.load(std::memory_order_relaxed) && fits && alignment <= kLine)
    if (void* const block = heap->take(static_cast<std::int64_t>(bytes))) {
      *memory = block;
      return 0;
    }
  return libc_posix_memalign(memory, alignment, bytes);
}

void release(void* memory) {
  if (heap->has(memory))
    heap->give(memory);
  else
    libc_free(memory);
}

// Returns twice as many addresses as there is memory, or null where they are limited.
Heap* reserved() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return nullptr;
  const std::int64_t memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const std::int64_t bytes = rounded_up(2 * memory, kGrowth);
  void* const base = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return base == MAP_FAILED ? nullptr : new Heap(static_cast<char*>(base), bytes);
}

// Whether what is called by `imports`, and there is some, is glibc's `function`, and not that of an allocator in its
// place.
bool are(const std::vector<Import>& imports, void* function) {
  const auto is_called = [](const Import& one) { return one.is_called(); };
  const auto is_other = [&](const Import& one) { return one.is_called() && one.now() != function; };
  return function != nullptr && std::any_of(imports.begin(), imports.end(), is_called) &&
         std::none_of(imports.begin(), imports.end(), is_other);
}

bool installed() {
  void* const libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  if (libc == nullptr) return false;
  void* const makes = dlsym(libc, "posix_memalign");
  void* const frees = dlsym(libc, "free");
  const std::vector<Import> making = imports_of(kLibrary, "posix_memalign"), freeing = imports_of(kLibrary, "free");
  if (!are(making, makes) || !are(freeing, frees)) return false;
  Heap* const made = reserved();
  if (made == nullptr) return false;
  heap = made;
  libc_posix_memalign = reinterpret_cast<int (*)(void**, std::size_t, std::size_t)>(makes);
  libc_free = reinterpret_cast<void (*)(void*)>(frees);
  pthread_atfork([] { heap->lock.lock(); }, [] { heap->lock.unlock(); }, [] { heap->lock.unlock(); });
  for (const Import& one : freeing)  // first what can free both kinds
    if (!one.replace(reinterpret_cast<void*>(&release))) return false;
  for (const Import& one : making)
    if (!one.replace(reinterpret_cast<void*>(&allocate))) return false;
  return true;
}

}  // namespace

bool tensor_heap(bool on) {
  static const bool there = installed();
  if (!there) return !on;
  heap->on = on;
  if (!on) heap->trim();
  return true;
}

void tensor_heap_keeps(bool large) {
  if (heap != nullptr) heap->keeps = large;
}

void trim_tensor_heap() {
  if (heap != nullptr) heap->trim();
}

std::pair<std::int64_t, std::int64_t> tensor_heap_bytes() {
  if (heap == nullptr) return {0, 0};
  const std::lock_guard<std::mutex> locked(heap->lock);
  return {heap->blocks.top(), heap->blocks.taken_bytes()};
}

}  // namespace stronghold
