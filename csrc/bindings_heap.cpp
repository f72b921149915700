// Python's view of the heap for tensors on the CPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "best_fit.h"
#include "bindings.h"
#include "tensor_heap.h"

namespace py = pybind11;

namespace stronghold {
namespace {

std::pair<std::int64_t, std::int64_t> pair_of(const Range& range) { return {range.begin, range.end}; }

std::vector<std::pair<std::int64_t, std::int64_t>> free_ranges(const BestFit& blocks) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const Range& range : blocks.free_ranges()) ranges.push_back(pair_of(range));
  return ranges;
}

}  // namespace

void bind_heap(py::module_& module) {
  py::class_<BestFit>(module, "BestFit")
      .def(py::init<std::int64_t>(), py::arg("capacity"))
      .def("take", &BestFit::take, py::arg("bytes"))
      .def("give", [](BestFit& blocks, std::int64_t begin) { return pair_of(blocks.give(begin)); }, py::arg("begin"))
      .def("top", &BestFit::top)
      .def("taken_bytes", &BestFit::taken_bytes)
      .def("free_ranges", &free_ranges);
  module.def("tensor_heap", &tensor_heap, py::arg("on"));
  module.def("tensor_heap_keeps", &tensor_heap_keeps, py::arg("large"));
  module.def("trim_tensor_heap", &trim_tensor_heap);
  module.def("tensor_heap_bytes", &tensor_heap_bytes);
}

}  // namespace stronghold
