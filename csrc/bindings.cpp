// Python's view of the kernels: integers and floats in, integers and floats out. Checks of tensors are
// stronghold/native.py's. The interpreter lock is released while a kernel runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "adamw.h"

namespace py = pybind11;

namespace {

using stronghold::Segment;
using stronghold::Span;

// weight, grad, grad_bf16, exp_avg, exp_avg_sq, low (0 for none), n, lr, beta1, beta2, eps, weight_decay, step,
// grad_scale; buffers are addresses
using SegmentTuple = std::tuple<std::uintptr_t, std::uintptr_t, bool, std::uintptr_t, std::uintptr_t, std::uintptr_t,
                                std::int64_t, double, double, double, double, double, std::int64_t, double>;
// data, bf16, n
using SpanTuple = std::tuple<std::uintptr_t, bool, std::int64_t>;

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void adamw(const std::vector<SegmentTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Segment> segments;
  segments.reserve(tuples.size());
  for (const auto& [weight, grad, grad_bf16, exp_avg, exp_avg_sq, low, n, lr, beta1, beta2, eps, weight_decay, step,
                    grad_scale] : tuples)
    segments.push_back({at<float>(weight), at<const void>(grad), grad_bf16, at<float>(exp_avg),
                        at<float>(exp_avg_sq), at<std::uint16_t>(low), n, lr, beta1, beta2, eps, weight_decay, step,
                        static_cast<float>(grad_scale)});
  stronghold::adamw(segments, threads, stronghold::isa_named(isa));
}

double squared_norm(const std::vector<SpanTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Span> spans;
  spans.reserve(tuples.size());
  for (const auto& [data, bf16, n] : tuples) spans.push_back({at<const void>(data), bf16, n});
  return stronghold::squared_norm(spans, threads, stronghold::isa_named(isa));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Host kernels of stronghold; import stronghold.native instead.";
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("adamw", &adamw, py::arg("segments"), py::arg("threads"), py::arg("isa"), unlocked);
  module.def("squared_norm", &squared_norm, py::arg("spans"), py::arg("threads"), py::arg("isa"), unlocked);
  module.def("available_isas", &stronghold::available_isas);
  module.def("best_isa", &stronghold::best_isa);
}
