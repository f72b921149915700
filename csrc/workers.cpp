#include "workers.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "signals.h"

namespace stronghold {
namespace {

// PyTorch lets a thread flush its subnormals (torch.set_flush_denormal). Which thread takes a chunk must not show.
class DefaultEnvironment {
 public:
  DefaultEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultEnvironment() { std::fesetenv(&callers_); }
  DefaultEnvironment(const DefaultEnvironment&) = delete;
  DefaultEnvironment& operator=(const DefaultEnvironment&) = delete;

 private:
  std::fenv_t callers_;
};

// Neighbours lie beside each other in memory, and a thread that goes on where it was finds its addresses translated
// and the next lines on their way: a jump costs a microsecond. But the more runs, the more evenly they are shared out.
constexpr std::int64_t kLongestRun = 16;
constexpr std::int64_t kRunsPerThread = 8;

// One call of for_each. It lives on the caller's stack, so the caller leaves only when no thread is inside.
struct Job {
  Job(const std::function<void(std::int64_t)>& work, std::int64_t count, int threads)
      : work(work), count(count), run(std::clamp<std::int64_t>(count / (kRunsPerThread * threads), 1, kLongestRun)) {}

  void take_part() {
    for (std::int64_t begin; (begin = next.fetch_add(run, std::memory_order_relaxed)) < count;)
      for (std::int64_t i = begin; i < std::min(begin + run, count); ++i) work(i);
  }

  const std::function<void(std::int64_t)>& work;
  const std::int64_t count;
  const std::int64_t run;  // neighbours that a thread takes at a time
  std::atomic<std::int64_t> next{0};
  // Guarded by the pool's mutex:
  int seats = 0;   // threads that may still join
  int inside = 0;  // threads that have joined and not left
  std::condition_variable empty;
};

class Pool {
 public:
  void run(Job& job, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      job.seats = std::min(helpers, threads_);
      if (job.seats > 0) open_.push_back(&job);
    }
    for (int i = 0; i < helpers; ++i) offered_.notify_one();
    job.take_part();
    std::unique_lock<std::mutex> lock(mutex_);
    close(job);
    job.empty.wait(lock, [&] { return job.inside == 0; });
  }

 private:
  void grow(int helpers) {
    if (threads_ >= helpers) return;
    const SignalsBlocked blocked;
    while (threads_ < helpers) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++threads_;
    }
  }

  void serve() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "stronghold-pool");  // as top and profilers show it: 15 characters at most
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      offered_.wait(lock, [&] { return !open_.empty(); });
      Job& job = *open_.front();
      ++job.inside;
      if (--job.seats == 0) close(job);
      lock.unlock();
      job.take_part();
      lock.lock();
      close(job);  // nothing is left to take: whoever came now would only wake the caller later
      if (--job.inside == 0) job.empty.notify_one();
    }
  }

  void close(const Job& job) { open_.erase(std::remove(open_.begin(), open_.end(), &job), open_.end()); }

  std::mutex mutex_;
  std::condition_variable offered_;
  std::vector<Job*> open_;  // jobs with free seats, the oldest first
  int threads_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// What a compiler makes of "#pragma omp parallel", in GNU's OpenMP and in those that stand in for it.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
std::atomic<Parallel> parallel{nullptr};

// The threads of this thread's team, 0 where it has none.
thread_local int team = 0;

// A child of fork has none of the threads, and locks in whatever state they were: it forgets the pool, and OpenMP.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  pool.store(nullptr);
  parallel.store(nullptr);
});

// Never destroyed: at exit its threads are asleep on its members.
Pool& the_pool() {
  Pool* current = pool.load();
  if (current == nullptr) {
    Pool* const mine = new Pool;
    if (pool.compare_exchange_strong(current, mine)) return *mine;
    delete mine;
  }
  return *current;
}

}  // namespace

void for_each(std::int64_t count, int threads, const std::function<void(std::int64_t)>& work) {
  if (threads < 1) throw std::invalid_argument("threads must be 1 or more (got " + std::to_string(threads) + ")");
  const DefaultEnvironment environment;
  Job job(work, count, threads);
  const int helpers = static_cast<int>(std::min<std::int64_t>(threads, count)) - 1;
  const Parallel in_team = team > 1 && threads >= team && threads <= 2 * team ? parallel.load() : nullptr;
  if (helpers < 1)
    job.take_part();
  else if (in_team != nullptr)
    in_team(
        [](void* data) {
          const DefaultEnvironment environment;
          static_cast<Job*>(data)->take_part();
        },
        &job, static_cast<unsigned>(team), 0);
  else
    the_pool().run(job, helpers);
}

bool find_openmp(const char* path) {
  void* const library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return false;
  // In the order in which that library itself looks: an OpenMP that was preloaded comes before the one beside it.
  void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (found == nullptr) found = dlsym(library, "GOMP_parallel");
  parallel.store(reinterpret_cast<Parallel>(found));
  return found != nullptr;
}

Team::Team(int threads) : before_(team) { team = threads; }

Team::~Team() { team = before_; }

}  // namespace stronghold
