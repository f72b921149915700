// The threads that kernels run on: one pool for the whole process, whose idle threads sleep.
//
// Not OpenMP's: the idle threads of libgomp spin for milliseconds, on cores that the forward pass wants, and a child
// forked from a process that has used them hangs in its first parallel region. But where PyTorch has just computed on
// the calling thread, its team spins already, and a thread of the pool would wait for a core: see Team.
#pragma once

#include <cstdint>
#include <functional>

namespace stronghold {

// Calls work(i) once for every i in [0, count), on the calling thread and at most threads - 1 others, in no particular
// order but that a thread mostly takes neighbours, and returns when all are done. `work` must not throw. Any number of
// threads may call this at once; but for a Team they share the pool, which holds as many threads as the largest call so
// far has asked for. Where the system refuses it a thread, those that there are do the work. Throughout, the
// floating-point environment is the default one (round to nearest, subnormals kept), whatever the caller's is: the bits
// do not depend on who computes them. In a child of fork the pool starts anew. Throws std::invalid_argument where
// threads < 1.
void for_each(std::int64_t count, int threads, const std::function<void(std::int64_t)>& work);

// Finds the OpenMP that the library at `path`, which is loaded and stays so, computes with. Returns whether there is
// one.
bool find_openmp(const char* path);

// As long as it lives, calls of for_each on this thread with so many threads, or up to twice as many (a core computes in
// two threads), are for the thread's own team of OpenMP, which has so many; others are for the pool, as all are in a
// child of fork. On a thread that has no team yet libgomp ends the process where the system refuses it a thread.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

 private:
  int before_;
};

}  // namespace stronghold
