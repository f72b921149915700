// Python's view of the disk. Checks of tensors are stronghold/native's. The interpreter lock is released wherever a
// call may wait for the disk.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "crc32c.h"
#include "disk.h"
#include "faults.h"

namespace py = pybind11;

namespace stronghold {
namespace {

// call, nth, times, path_ends, wrong, error, bytes, delay_s
using FaultTuple =
    std::tuple<std::string, std::int64_t, std::int64_t, std::string, std::string, int, std::int64_t, double>;

constexpr std::pair<const char*, Call> kCalls[] = {{"open", Call::open},
                                                   {"read", Call::read},
                                                   {"write", Call::write},
                                                   {"reserve", Call::reserve},
                                                   {"sync", Call::sync}};
constexpr std::pair<const char*, Wrong> kWrongs[] = {{"error", Wrong::error}, {"short", Wrong::partial},
                                                     {"flip", Wrong::flip},   {"eof", Wrong::end},
                                                     {"delay", Wrong::delay}, {"kill", Wrong::kill}};
constexpr std::pair<const char*, Failure::Kind> kFailures[] = {{"system", Failure::Kind::system},
                                                               {"ended", Failure::Kind::ended},
                                                               {"altered", Failure::Kind::altered},
                                                               {"dropped", Failure::Kind::dropped},
                                                               {"forked", Failure::Kind::forked}};

template <class Value, std::size_t n>
Value named(const std::pair<const char*, Value> (&all)[n], const std::string& name) {
  for (const auto& entry : all)
    if (name == entry.first) return entry.second;
  throw std::invalid_argument("unknown name '" + name + "'");
}

template <class Value, std::size_t n>
const char* name_of(const std::pair<const char*, Value> (&all)[n], Value value) {
  for (const auto& entry : all)
    if (value == entry.second) return entry.first;
  return "";
}

py::str decoded(const std::string& path) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<py::ssize_t>(path.size())));
}

std::shared_ptr<FaultySystem> faulty(const std::vector<FaultTuple>& tuples) {
  std::vector<Fault> faults;
  for (const auto& [call, nth, times, path_ends, wrong, error, bytes, delay_s] : tuples)
    faults.push_back({named(kCalls, call), nth, times, path_ends, named(kWrongs, wrong), error, bytes, delay_s});
  return std::make_shared<FaultySystem>(std::move(faults));
}

std::vector<std::tuple<std::string, py::str, std::int64_t, std::int64_t>> calls(const FaultySystem& system) {
  std::vector<std::tuple<std::string, py::str, std::int64_t, std::int64_t>> tuples;
  for (const Called& called : system.calls())
    tuples.emplace_back(name_of(kCalls, called.call), decoded(called.path), called.offset, called.bytes);
  return tuples;
}

std::shared_ptr<DiskFile> open(const std::string& path, bool read_only, bool create,
                               std::shared_ptr<FaultySystem> system) {
  std::shared_ptr<DiskFile> file;
  unlocked([&] { file = std::make_shared<DiskFile>(path, DiskFile::Options{read_only, create}, std::move(system)); });
  return file;
}

bool reserve(DiskFile& file, std::int64_t bytes) {
  bool reserved = false;
  unlocked([&] { reserved = file.reserve(bytes); });
  return reserved;
}

void sync(DiskFile& file) {
  unlocked([&] { file.sync(); });
}

Transfer submit(Disk& disk, std::shared_ptr<DiskFile> file, bool write, Address memory, std::int64_t offset,
                std::int64_t length, int priority, Address sums, bool verify) {
  return disk.submit(
      {std::move(file), write, at<void>(memory), offset, length, priority, at<std::uint32_t>(sums), verify});
}

// Waits in slices: Python's handlers of signals run in its own thread only, between two of them. No limit where
// seconds < 0.
bool wait(const Transfer& transfer, double seconds) {
  constexpr double kSlice = 0.1;
  while (true) {
    const double slice = seconds < 0 ? kSlice : std::min(kSlice, seconds);
    bool done = false;
    unlocked([&] { done = transfer.wait_for(slice); });
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (seconds >= 0 && (seconds -= slice) <= 0) return false;
  }
}

void close(Disk& disk) {
  unlocked([&] { disk.close(); });
}

std::tuple<std::int64_t, std::int64_t, double> counters(const Disk& disk) {
  const DiskCounters now = disk.counters();
  return {now.read_bytes, now.written_bytes, now.busy_s};
}

void checksums_of(Address memory, std::int64_t bytes, Address sums) {
  unlocked([&] { stronghold::checksums(at<const void>(memory), bytes, at<std::uint32_t>(sums)); });
}

std::uint32_t crc32c_of(Address memory, std::int64_t bytes, std::uint32_t crc, const std::string& way) {
  const CrcWay by = way.empty() ? best_crc32c_way() : crc32c_way_named(way);
  std::uint32_t sum = 0;
  unlocked([&] { sum = crc32c(at<const void>(memory), static_cast<std::size_t>(bytes), crc, by); });
  return sum;
}

void crc32c_of_each_page(Address memory, std::int64_t bytes, Address sums, const std::string& way) {
  const CrcWay by = crc32c_way_named(way);
  unlocked([&] {
    crc32c_of_pages(at<const void>(memory), static_cast<std::size_t>(bytes), at<std::uint32_t>(sums), by);
  });
}

}  // namespace

void bind_disk(py::module_& module) {
  // Its args are (message, kind, operation, path, offset, length, errno, expected, found).
  static PyObject* disk_error = nullptr;
  disk_error = PyErr_NewException("stronghold._C.DiskError", PyExc_RuntimeError, nullptr);
  module.add_object("DiskError", py::handle(disk_error).inc_ref());
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const DiskError& error) {
      const Failure& f = error.failure;
      const py::tuple arguments =
          py::make_tuple(decoded(error.what()), name_of(kFailures, f.kind), f.operation, decoded(f.path), f.offset,
                         f.length, f.error, f.expected, f.found);
      PyErr_SetObject(disk_error, arguments.ptr());
    }
  });
  module.attr("PIECE_BYTES") = kPiece;
  module.attr("DISK_THREADS") = kDiskThreads;

  py::class_<FaultySystem, std::shared_ptr<FaultySystem>>(module, "Faults")
      .def(py::init(&faulty), py::arg("faults"))
      .def("calls", &calls);
  py::class_<DiskFile, std::shared_ptr<DiskFile>>(module, "DiskFile")
      .def(py::init(&open), py::arg("path"), py::arg("read_only"), py::arg("create"), py::arg("faults"))
      .def_property_readonly("direct", &DiskFile::direct)
      .def_property_readonly("alignment", &DiskFile::alignment)
      .def_property_readonly("memory_alignment", &DiskFile::memory_alignment)
      .def("size", &DiskFile::size)
      .def("reserve", &reserve, py::arg("bytes"))
      .def("sync", &sync);
  py::class_<Transfer>(module, "Transfer")
      .def("done", &Transfer::done)
      .def("wait", &wait, py::arg("seconds"))
      .def("times", &Transfer::times);
  py::class_<Disk>(module, "Disk")
      .def(py::init([](int threads, std::int64_t piece_bytes, std::shared_ptr<FaultySystem> faults) {
             return std::make_unique<Disk>(threads, piece_bytes, std::move(faults));
           }),
           py::arg("threads"), py::arg("piece_bytes"), py::arg("faults"))
      .def("submit", &submit, py::arg("file"), py::arg("write"), py::arg("memory"), py::arg("offset"),
           py::arg("length"), py::arg("priority"), py::arg("sums"), py::arg("verify"))
      .def("pieces", &Disk::pieces, py::arg("length"))
      .def("counters", &counters)
      .def("threads", &Disk::threads)
      .def("close", &close);
  module.def("crc32c", &crc32c_of, py::arg("memory"), py::arg("bytes"), py::arg("crc"), py::arg("way") = "");
  module.def("crc32c_of_pages", &crc32c_of_each_page, py::arg("memory"), py::arg("bytes"), py::arg("sums"),
             py::arg("way"));
  module.def("checksums", &checksums_of, py::arg("memory"), py::arg("bytes"), py::arg("sums"));
  module.def("crc32c_ways", &crc32c_ways);
}

}  // namespace stronghold
