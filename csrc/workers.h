// The threads that kernels run on: one pool for the whole process, whose idle threads sleep.
//
// Not OpenMP: the idle threads of libgomp spin for milliseconds, on cores that the forward pass wants, and a child
// forked from a process that has used them hangs in its first parallel region.
#pragma once

#include <cstdint>
#include <functional>

namespace stronghold {

// Calls work(i) once for every i in [0, count), on the calling thread and at most threads - 1 others, in no particular
// order but that a thread mostly takes neighbours, and returns when all are done. `work` must not throw. Any number of threads may call this at
// once; they share the pool, which holds as many threads as the largest call so far has asked for. Where the system
// refuses a thread, those that there are do the work. Throughout, the floating-point environment is the default one
// (round to nearest, subnormals kept), whatever the caller's is: the bits do not depend on who computes them.
// In a child of fork the pool starts anew. Throws std::invalid_argument where threads < 1.
void for_each(std::int64_t count, int threads, const std::function<void(std::int64_t)>& work);

}  // namespace stronghold
