// Python's view of the kernels: integers and floats in, integers and floats out. Checks of tensors are
// stronghold/native's. The interpreter lock is released while a kernel runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "adamw.h"
#include "bindings.h"
#include "gradients.h"
#include "isa.h"
#include "muon.h"
#include "stream.h"
#include "workers.h"

namespace py = pybind11;

namespace {

using stronghold::Addition;
using stronghold::Address;
using stronghold::Momentum;
using stronghold::Move;
using stronghold::Segment;
using stronghold::Span;
using stronghold::at;
using stronghold::isa_named;
using stronghold::unlocked;

// weight, its remainder, grad, its remainder, grad_bf16, exp_avg, its exponents, exp_avg_sq, its exponents, n, lr,
// beta1, beta2, eps, weight_decay, step, grad_scale, first
using SegmentTuple = std::tuple<Address, Address, Address, Address, bool, Address, Address, Address, Address,
                                std::int64_t, double, double, double, double, double, std::int64_t, double,
                                std::int64_t>;
// data, bf16, n
using SpanTuple = std::tuple<Address, bool, std::int64_t>;
// target, its remainder, source, n
using AdditionTuple = std::tuple<Address, Address, Address, std::int64_t>;

void adamw(const std::vector<SegmentTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Segment> segments;
  segments.reserve(tuples.size());
  for (const auto& [weight, remainder, grad, grad_remainder, grad_bf16, exp_avg, exp_avg_exponents, exp_avg_sq,
                    exp_avg_sq_exponents, n, lr, beta1, beta2, eps, weight_decay, step, grad_scale, first] : tuples)
    segments.push_back({at<void>(weight), at<std::int16_t>(remainder), at<const void>(grad),
                        at<const std::int16_t>(grad_remainder), grad_bf16, at<void>(exp_avg),
                        at<std::uint8_t>(exp_avg_exponents), at<void>(exp_avg_sq),
                        at<std::uint8_t>(exp_avg_sq_exponents), n, lr, beta1, beta2, eps, weight_decay, step,
                        grad_scale, first});
  unlocked([&] { stronghold::adamw(segments, threads, isa_named(isa)); });
}

std::vector<double> squared_norms(const std::vector<SpanTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Span> spans;
  spans.reserve(tuples.size());
  for (const auto& [data, bf16, n] : tuples) spans.push_back({at<const void>(data), bf16, n});
  std::vector<double> norms;
  unlocked([&] { norms = stronghold::squared_norms(spans, threads, isa_named(isa)); });
  return norms;
}

std::vector<double> accumulate(const std::vector<AdditionTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Addition> additions;
  additions.reserve(tuples.size());
  for (const auto& [target, remainder, source, n] : tuples)
    additions.push_back({at<void>(target), at<std::int16_t>(remainder), at<const void>(source), n});
  std::vector<double> norms;
  unlocked([&] { norms = stronghold::accumulate(additions, threads, isa_named(isa)); });
  return norms;
}

// direction, grad, its remainder, grad_bf16, momentum_buffer, n, momentum, nesterov, grad_scale
using MomentumTuple =
    std::tuple<Address, Address, Address, bool, Address, std::int64_t, double, bool, double>;
// direction, weight, its remainder, n, lr, decay
using MoveTuple = std::tuple<Address, Address, Address, std::int64_t, double, double>;

void muon_momentum(const std::vector<MomentumTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Momentum> matrices;
  matrices.reserve(tuples.size());
  for (const auto& [direction, grad, grad_remainder, grad_bf16, buffer, n, momentum, nesterov, grad_scale] : tuples)
    matrices.push_back({at<std::uint16_t>(direction), at<const void>(grad), at<const std::int16_t>(grad_remainder),
                        grad_bf16, at<float>(buffer), n, momentum, nesterov, grad_scale});
  unlocked([&] { stronghold::muon_momentum(matrices, threads, isa_named(isa)); });
}

void muon_move(const std::vector<MoveTuple>& tuples, int threads, const std::string& isa) {
  std::vector<Move> matrices;
  matrices.reserve(tuples.size());
  for (const auto& [direction, weight, remainder, n, lr, decay] : tuples)
    matrices.push_back(
        {at<const std::uint16_t>(direction), at<void>(weight), at<std::int16_t>(remainder), n, lr, decay});
  unlocked([&] { stronghold::muon_move(matrices, threads, isa_named(isa)); });
}

void stream(Address weight, Address grad, Address exp_avg, Address exp_avg_sq, std::int64_t n, int threads,
            const std::string& isa) {
  unlocked([&] {
    stronghold::stream(at<float>(weight), at<const float>(grad), at<float>(exp_avg), at<float>(exp_avg_sq), n, threads,
                       isa_named(isa));
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Host kernels of stronghold; import stronghold.native instead.";
  module.def("find_openmp", [](const std::string& path) { return stronghold::find_openmp(path.c_str()); });
  module.def("in_team", [](int threads, const py::function& task) {
    const stronghold::Team team(threads);
    task();
  });
  module.def("adamw", &adamw, py::arg("segments"), py::arg("threads"), py::arg("isa"));
  module.def("squared_norms", &squared_norms, py::arg("spans"), py::arg("threads"), py::arg("isa"));
  module.def("accumulate", &accumulate, py::arg("additions"), py::arg("threads"), py::arg("isa"));
  module.def("muon_momentum", &muon_momentum, py::arg("matrices"), py::arg("threads"), py::arg("isa"));
  module.def("muon_move", &muon_move, py::arg("matrices"), py::arg("threads"), py::arg("isa"));
  module.def("stream", &stream, py::arg("weight"), py::arg("grad"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("n"), py::arg("threads"), py::arg("isa"));
  module.def("available_isas", &stronghold::available_isas);
  module.def("best_isa", &stronghold::best_isa);
  stronghold::bind_disk(module);
  stronghold::bind_heap(module);
}
