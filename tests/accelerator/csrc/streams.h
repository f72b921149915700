// Streams: threads that carry out what they were given, in order, some of it late; and the events between them.
#pragma once

#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "clocks.h"

namespace soft {

// How late work is: with the probability, up to so many microseconds.
inline std::atomic<double> late_probability{0};
inline std::atomic<int> late_us{0};
inline std::atomic<uint64_t> late_seed{1};

inline std::mutex error_mutex;
inline std::string first_error;  // of a kernel; told at the next synchronisation, as CUDA does

inline void keep_error(const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (first_error.empty()) first_error = text;
}
inline void raise_error() {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    std::swap(text, first_error);
  }
  TORCH_CHECK(text.empty(), "soft: a kernel failed: ", text);
}

// One recording of an event.
struct Recording {
  Clock clock;
  std::chrono::steady_clock::time_point time;

  void finish() {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    time = std::chrono::steady_clock::now();
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

class Stream {
 public:
  Actor actor;                   // guarded by `global`
  std::atomic<int> slow_us{0};   // each piece of work takes so much longer

  explicit Stream(int64_t id) : actor("stream " + std::to_string(id)), id_(id) {
    std::thread([this] { work(); }).detach();
  }
  // Called with `global` held, so that what is noted in one order is done in that order.
  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    given_.notify_one();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  }

 private:
  void work() {
    at::set_num_threads(1);  // so that sums come in one order, whatever the host's threads were told
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::mt19937_64 random(late_seed * 7919 + id_);
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        given_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
      }
      int us = slow_us;
      if (late_us > 0 && std::uniform_real_distribution<>(0, 1)(random) < late_probability) us += random() % late_us;
      if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      try {
        task();
      } catch (const std::exception& error) {
        keep_error(error.what());
      }
      task = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      if (tasks_.empty()) done_.notify_all();
    }
  }

  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable given_, done_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
};

inline std::mutex streams_mutex;
inline std::vector<Stream*>& streams() {
  static auto* all = new std::vector<Stream*>{new Stream(0)};
  return *all;
}
inline Stream& stream_of(int64_t id) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return *streams().at(id);
}
// As CUDA's, they come from a pool: whoever asks for more has some twice.
constexpr size_t kStreams = 32;
inline int64_t new_stream() {
  static size_t next = 0;
  std::lock_guard<std::mutex> lock(streams_mutex);
  const size_t id = 1 + next++ % kStreams;
  if (id == streams().size()) streams().push_back(new Stream(id));
  return id;
}
inline thread_local int64_t current_stream = 0;

inline std::atomic<uint64_t> launches{0};

// Queues a kernel that touches these bytes.
inline void launch(Stream& stream, const std::vector<Span>& spans, const std::string& what, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(global);
  merge(stream.actor.clock, host_line().clock);
  stream.actor.count();
  note(stream.actor, spans, what);
  stream.push(std::move(task));
  launches++;
}

inline std::shared_ptr<Recording> record_in(Stream& stream) {
  auto recording = std::make_shared<Recording>();
  std::lock_guard<std::mutex> lock(global);
  merge(stream.actor.clock, host_line().clock);
  recording->clock = stream.actor.clock;
  stream.push([recording] { recording->finish(); });
  return recording;
}
inline void wait_in(Stream& stream, const std::shared_ptr<Recording>& recording) {
  std::lock_guard<std::mutex> lock(global);
  merge(stream.actor.clock, host_line().clock);
  merge(stream.actor.clock, recording->clock);
  stream.push([recording] { recording->wait(); });
}
inline void hear(const Clock& clock) {
  std::lock_guard<std::mutex> lock(global);
  merge(host_line().clock, clock);
}
// Lets other threads have Python's lock: a stream's takes it to let go of a tensor that Python knows, too.
class WithoutPython {
 public:
  WithoutPython() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};
inline void synchronize(Stream& stream) {
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(global);
    clock = stream.actor.clock;
  }
  {
    WithoutPython waiting;
    stream.drain();
  }
  hear(clock);
}
inline void synchronize_all() {
  size_t count;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    count = streams().size();
  }
  for (size_t i = 0; i < count; i++) synchronize(stream_of(i));
}

}  // namespace soft
