#include "disk.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "crc32c.h"
#include "disk_piece.h"
#include "signals.h"

namespace stronghold {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kTogether = 12;  // pages that are summed at once, a multiple of those that go side by side

static_assert(kSumBytes == kCrcPage);

// Counts the forks that led to this process.
std::atomic<int> generation{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

Failure failure_of(const Request& request, Failure::Kind kind, int error = 0) {
  return {kind, request.write ? "write" : "read", request.file->path(), request.offset, request.length, error, 0, 0, 0};
}

}  // namespace

// Guarded by the core's mutex, but for `request`, which stays as it is, and `done`.
struct Transfer::State {
  State(Request asked, std::int64_t count, std::shared_ptr<DiskCore> owner)
      : request(std::move(asked)), pieces(count), core(std::move(owner)) {}
  const Request request;
  const std::int64_t pieces;
  const std::shared_ptr<DiskCore> core;
  std::int64_t started = 0;
  std::int64_t flying = 0;
  std::optional<Failure> failure;
  Clock::time_point begun, ended;
  std::atomic<bool> done{false};
};

// What the disk, its threads and its transfers share. In a child of fork it is never destroyed: its locks are as they
// were, and its threads are not there to be joined.
struct DiskCore {
  using StatePointer = std::shared_ptr<Transfer::State>;

  DiskCore(std::int64_t bytes, std::shared_ptr<System> calls) : piece_bytes(bytes), system(std::move(calls)) {}

  bool forked() const { return born != generation.load(); }
  void serve();
  void carry_out(const Request& request, std::int64_t index, Bounce& bounce, std::int64_t& moved_bytes) const;
  // Both with the mutex held. Keeps the first failure and starts no more of it; sets done if nothing of it is left.
  void drop(const StatePointer& state, const Failure& failure);
  void end(Transfer::State& state);

  const std::int64_t piece_bytes;
  const std::shared_ptr<System> system;
  const int born = generation.load();

  mutable std::mutex mutex;
  std::condition_variable offered;
  std::condition_variable ended;
  std::map<std::pair<int, std::uint64_t>, StatePointer> waiting;  // those with pieces that have not started
  std::uint64_t submitted = 0;
  bool closed = false;
  std::vector<std::thread> threads;
  int thread_count = 0;
  DiskCounters counters;
  int flying = 0;  // pieces of all transfers
  Clock::time_point busy_since;
};

// Throws DiskError where a checksum that is known is another one's. Somebody may set them to 0 meanwhile: whoever means
// to write what is being read does so first, and then nobody can say what should be there.
void compare(const Piece& piece, const std::uint32_t* known) {
  for (std::int64_t from = 0; from < piece.length; from += kTogether * kSumBytes, known += kTogether) {
    const std::int64_t bytes = std::min(kTogether * kSumBytes, piece.length - from);
    const std::size_t count = static_cast<std::size_t>((bytes + kSumBytes - 1) / kSumBytes);
    std::array<std::uint32_t, kTogether> expected{}, found{};
    for (std::size_t page = 0; page < count; ++page) expected[page] = __atomic_load_n(known + page, __ATOMIC_ACQUIRE);
    if (std::all_of(expected.begin(), expected.end(), [](std::uint32_t one) { return one == 0; })) continue;
    checksums(piece.memory + from, bytes, found.data());
    for (std::size_t page = 0; page < count; ++page) {
      if (expected[page] == 0 || found[page] == expected[page]) continue;
      if (__atomic_load_n(known + page, __ATOMIC_ACQUIRE) != expected[page]) continue;
      const std::int64_t at = from + static_cast<std::int64_t>(page) * kSumBytes;
      throw DiskError({Failure::Kind::altered, "read", piece.file.path(), piece.offset + at,
                       std::min(kSumBytes, piece.length - at), 0, expected[page], found[page], 0});
    }
  }
}

void DiskCore::carry_out(const Request& request, std::int64_t index, Bounce& bounce, std::int64_t& moved_bytes) const {
  const std::int64_t begin = index * piece_bytes, length = std::min(piece_bytes, request.length - begin);
  const Piece piece{*request.file, static_cast<char*>(request.memory) + begin, request.offset + begin, length};
  if (!request.write) read_piece(piece, *system, bounce, moved_bytes);
  if (request.sums != nullptr) {
    std::uint32_t* const known = request.sums + begin / kSumBytes;
    if (!request.verify)
      checksums(piece.memory, length, known);
    else
      compare(piece, known);
  }
  if (request.write) write_piece(piece, *system, bounce, moved_bytes);
}

void DiskCore::serve() {
  Bounce bounce;
  while (true) {
    StatePointer state;  // given back without the mutex: a file may be closed with it
    std::int64_t index = 0;
    {
      std::unique_lock<std::mutex> lock(mutex);
      offered.wait(lock, [&] { return closed || !waiting.empty(); });
      if (waiting.empty()) return;
      const auto first = waiting.begin();
      state = first->second;
      index = state->started++;
      if (state->started == state->pieces) waiting.erase(first);
      ++state->flying;
      const Clock::time_point now = Clock::now();
      if (index == 0) state->begun = now;
      if (flying++ == 0) busy_since = now;
    }
    std::optional<Failure> failure;
    std::int64_t moved_bytes = 0;
    try {
      carry_out(state->request, index, bounce, moved_bytes);
    } catch (const DiskError& error) {
      failure = error.failure;
    } catch (const std::bad_alloc&) {
      failure = failure_of(state->request, Failure::Kind::system, ENOMEM);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    state->ended = Clock::now();
    if (--flying == 0) counters.busy_s += std::chrono::duration<double>(state->ended - busy_since).count();
    (state->request.write ? counters.written_bytes : counters.read_bytes) += moved_bytes;
    --state->flying;
    if (failure) drop(state, *failure);
    end(*state);
  }
}

void DiskCore::drop(const StatePointer& state, const Failure& failure) {
  if (state->failure) return;
  state->failure = failure;
  const auto held = [&](const auto& entry) { return entry.second == state; };
  const auto at = std::find_if(waiting.begin(), waiting.end(), held);
  if (at != waiting.end()) waiting.erase(at);
}

void DiskCore::end(Transfer::State& state) {
  if (state.flying > 0 || (state.started < state.pieces && !state.failure)) return;
  state.done.store(true, std::memory_order_release);
  ended.notify_all();
}

bool Transfer::done() const { return state_->done.load(std::memory_order_acquire); }

const Request& Transfer::request() const { return state_->request; }

std::pair<double, double> Transfer::times() const {
  const auto seconds = [](Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); };
  if (state_->core->forked()) return {0, 0};
  const std::lock_guard<std::mutex> lock(state_->core->mutex);
  return {seconds(state_->begun), seconds(state_->ended)};
}

bool Transfer::wait_for(double seconds) const {
  DiskCore& core = *state_->core;
  if (core.forked()) throw DiskError(failure_of(state_->request, Failure::Kind::forked));
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::unique_lock<std::mutex> lock(core.mutex);
  if (!core.ended.wait_until(lock, until, [&] { return done(); })) return false;
  if (state_->failure) throw DiskError(*state_->failure);
  return true;
}

void Transfer::wait() const {
  while (!wait_for(3600)) continue;
}

Disk::Disk(int threads, std::int64_t piece_bytes, std::shared_ptr<System> system) {
  if (threads < 1) throw std::invalid_argument("threads must be 1 or more (got " + std::to_string(threads) + ")");
  if (piece_bytes < 4096 || piece_bytes % 4096 != 0)
    throw std::invalid_argument("piece_bytes must be a multiple of 4096 (got " + std::to_string(piece_bytes) + ")");
  core_ = std::shared_ptr<DiskCore>(
      new DiskCore(piece_bytes, system ? std::move(system) : std::make_shared<System>()), [](DiskCore* core) {
        if (!core->forked()) delete core;
      });
  const SignalsBlocked blocked;
  DiskCore* const core = core_.get();  // outlives its threads: close() joins them
  for (; core->thread_count < threads; ++core->thread_count) {
    try {
      core->threads.emplace_back([core] { core->serve(); });
    } catch (const std::system_error&) {
      if (core->thread_count == 0) throw;
      break;  // those that there are do the work
    }
  }
}

Disk::~Disk() { close(); }

Transfer Disk::submit(const Request& request) {
  if (request.file == nullptr) throw std::invalid_argument("a transfer needs a file");
  const std::int64_t alignment = request.file->alignment();
  const std::string prefix = "'" + request.file->path() + "': ";
  if (request.offset < 0 || request.offset % alignment != 0)
    throw std::invalid_argument(prefix + "offset must be a multiple of " + std::to_string(alignment) + " (got " +
                                std::to_string(request.offset) + ")");
  if (request.length < 0)
    throw std::invalid_argument(prefix + "length must be 0 or more (got " + std::to_string(request.length) + ")");
  if (core_->piece_bytes % alignment != 0)
    throw std::invalid_argument(prefix + "piece_bytes must be a multiple of the file's alignment (got " +
                                std::to_string(core_->piece_bytes) + " and " + std::to_string(alignment) + ")");
  if (request.memory == nullptr && request.length > 0) throw std::invalid_argument(prefix + "memory must not be null");
  if (request.write && request.file->read_only())
    throw std::invalid_argument(prefix + "a file opened read-only cannot be written; open it without read_only");
  if (request.verify && (request.write || (request.sums == nullptr && request.length > 0)))
    throw std::invalid_argument(prefix + "only a read with sums can verify them");
  if (core_->forked()) throw DiskError(failure_of(request, Failure::Kind::forked));

  const std::int64_t count = pieces(request.length);
  auto state = std::make_shared<Transfer::State>(request, count, core_);
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (core_->closed) throw DiskError(failure_of(request, Failure::Kind::dropped));
    if (count == 0)
      state->done.store(true, std::memory_order_release);
    else
      core_->waiting.emplace(std::make_pair(request.priority, core_->submitted++), state);
  }
  for (std::int64_t i = 0; i < std::min<std::int64_t>(count, core_->thread_count); ++i) core_->offered.notify_one();
  return Transfer(std::move(state));
}

std::int64_t Disk::pieces(std::int64_t length) const {
  return length / core_->piece_bytes + (length % core_->piece_bytes != 0 ? 1 : 0);
}

void Disk::close() {
  if (core_->forked()) return;
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    core_->closed = true;
    for (const auto& entry : core_->waiting) {
      Transfer::State& state = *entry.second;
      if (!state.failure) state.failure = failure_of(state.request, Failure::Kind::dropped);
      core_->end(state);
    }
    core_->waiting.clear();
    threads.swap(core_->threads);
  }
  core_->offered.notify_all();
  for (std::thread& thread : threads) thread.join();
}

DiskCounters Disk::counters() const {
  if (core_->forked()) return {};
  const std::lock_guard<std::mutex> lock(core_->mutex);
  DiskCounters now = core_->counters;
  if (core_->flying > 0) now.busy_s += std::chrono::duration<double>(Clock::now() - core_->busy_since).count();
  return now;
}

int Disk::threads() const { return core_->thread_count; }

std::int64_t Disk::piece_bytes() const { return core_->piece_bytes; }

void checksums(const void* memory, std::int64_t length, std::uint32_t* sums) {
  const char* const data = static_cast<const char*>(memory);
  std::array<std::uint32_t, kTogether> found{};
  for (std::int64_t at = 0; at < length; at += kTogether * kSumBytes) {
    const std::int64_t bytes = std::min(kTogether * kSumBytes, length - at);
    crc32c_of_pages(data + at, static_cast<std::size_t>(bytes), found.data());
    for (std::int64_t page = 0; page * kSumBytes < bytes; ++page) {  // each is stored once: no other value is seen
      const std::uint32_t crc = found[static_cast<std::size_t>(page)];
      *sums++ = crc != 0 ? crc : ~std::uint32_t{0};
    }
  }
}

}  // namespace stronghold
