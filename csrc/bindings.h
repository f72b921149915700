// What the files of bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace stronghold {

using Address = std::uintptr_t;  // 0 for none

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Calls work() without the interpreter lock. Not pybind11's gil_scoped_release: in a daemon thread of a program that
// ends, taking the lock back unwinds the thread, and out of a destructor that would be std::terminate.
template <class Work>
void unlocked(const Work& work) {
  PyThreadState* const thread = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    PyEval_RestoreThread(thread);
    throw;
  }
  PyEval_RestoreThread(thread);
}

// Adds what disk.h, disk_file.h, faults.h and crc32c.h have.
void bind_disk(pybind11::module_& module);

// Adds what tensor_heap.h and best_fit.h have.
void bind_heap(pybind11::module_& module);

}  // namespace stronghold
