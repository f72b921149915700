// Vector clocks over streams and host threads, and the race check: who touched which bytes, and what is ordered.
//
// An actor is a stream or a line of host threads. Every operator, copy and host update counts its actor's clock up. What
// an actor has heard of, by an event, a wait or a hand-over, is merged into its clock. Two accesses of the same bytes,
// one of them a write, are a race unless the later one's actor had heard of the earlier: no delay needs to hit it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace soft {

using Clock = std::vector<uint64_t>;

inline std::mutex global;  // guards clocks, accesses, blocks and the order in which work is queued

inline void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

inline uint64_t at(const Clock& clock, size_t actor) { return actor < clock.size() ? clock[actor] : 0; }

struct Actor {
  int id;
  std::string name;
  Clock clock;

  explicit Actor(std::string given) : id(next()++), name(std::move(given)) {}
  void count() {
    if (clock.size() <= size_t(id)) clock.resize(id + 1);
    clock[id]++;
  }
  static int& next() {
    static int value = 0;
    return value;
  }
};

// All threads of the host are one line, which autograd's thread and its caller take turns in, but for those that have
// entered a line of their own. The line of a thread that has ended is given to another: clocks stay short.
inline Actor& common_line() {
  static auto* line = new Actor("the host");
  return *line;
}
inline std::vector<Actor*> unused_lines;
struct OwnLine {
  Actor* actor = nullptr;
  ~OwnLine() {
    if (!actor) return;
    std::lock_guard<std::mutex> lock(global);
    unused_lines.push_back(actor);
  }
};
inline thread_local OwnLine own_line;
inline Actor& host_line() { return own_line.actor ? *own_line.actor : common_line(); }

// Called with `global` held.
inline void enter_line(const std::string& name) {
  if (own_line.actor) return;
  if (unused_lines.empty()) {
    own_line.actor = new Actor(name);
  } else {
    own_line.actor = unused_lines.back();
    own_line.actor->name = name;
    unused_lines.pop_back();
  }
}

struct Span {
  uintptr_t begin, end;
  bool write;
};

struct Access {
  uintptr_t begin, end;
  int actor;
  uint64_t count;
  bool write;
  std::string what;
};

inline bool checking = false;
inline std::vector<std::string> races;
constexpr size_t kMostRaces = 200;
inline std::map<uintptr_t, std::vector<Access>> accesses;  // by the block they lie in

// Returns the beginning of the block of memory that holds the address, 0 where nobody watches it.
uintptr_t block_of(uintptr_t address);

// Called with `global` held, behind actor.count().
inline void note(const Actor& actor, const std::vector<Span>& spans, const std::string& what) {
  if (!checking) return;
  for (const Span& span : spans) {
    const uintptr_t block = span.begin == span.end ? 0 : block_of(span.begin);
    if (!block) continue;
    auto& list = accesses[block];
    std::vector<Access> kept;
    for (Access& one : list) {
      const bool overlap = one.begin < span.end && span.begin < one.end;
      const bool ordered = one.count <= at(actor.clock, one.actor);
      if (overlap && (one.write || span.write) && !ordered && races.size() < kMostRaces)
        races.push_back(what + " in " + actor.name + (span.write ? " writes" : " reads") + " what " + one.what +
                        (one.write ? " writes" : " reads") + ", and nothing orders them");
      const bool covered = one.begin >= span.begin && one.end <= span.end;
      if (covered && ordered && span.write) continue;                               // whoever waits for this, waits for that
      if (covered && !span.write && !one.write && one.actor == actor.id) continue;  // its later read stands for both
      kept.push_back(std::move(one));
    }
    kept.push_back({span.begin, span.end, actor.id, at(actor.clock, actor.id), span.write, what + " in " + actor.name});
    list.swap(kept);
  }
}

// Notes what the calling thread itself reads and writes of the host's memory.
inline void note_host(const std::vector<Span>& spans, const std::string& what) {
  std::lock_guard<std::mutex> lock(global);
  host_line().count();
  note(host_line(), spans, what);
}

// A transfer between memory and a file, which others carry out: it begins behind what the calling thread has done.
// Returns what is behind its end. A few actors take turns, so that clocks stay short.
inline Clock note_transfer(const std::vector<Span>& spans, const std::string& what) {
  constexpr size_t kTransfers = 64;
  static auto* actors = new std::vector<Actor*>;
  static size_t next = 0;
  std::lock_guard<std::mutex> lock(global);
  if (actors->size() < kTransfers) actors->push_back(new Actor("a transfer"));
  Actor& actor = *(*actors)[next++ % kTransfers];
  merge(actor.clock, host_line().clock);
  actor.count();
  note(actor, spans, what);
  return actor.clock;
}

}  // namespace soft
