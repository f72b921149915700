// What PyTorch asks of a device: the current stream, events, random numbers.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace soft {

using at::Tensor;
using c10::Device;

struct Event {
  std::shared_ptr<Recording> last;
};
inline std::shared_ptr<Recording> recording_of(void* event) {
  return event ? static_cast<Event*>(event)->last : nullptr;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device device() { return Device(kSoft, 0); }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  c10::DeviceType type() const override { return kSoft; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return stream(0); }
  c10::Stream getNewStream(Device, int) const override { return stream(new_stream()); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int64_t before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream one) const { return &stream_of(one.id()); }  // not asked for in torch 2.9
  bool queryStream(const c10::Stream& one) const override { return stream_of(one.id()).idle(); }
  void synchronizeStream(const c10::Stream& one) const override {
    synchronize(stream_of(one.id()));
    raise_error();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize_all();
    raise_error();
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& one, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = record_in(stream_of(one.id()));
  }
  void block(void* event, const c10::Stream& one) const override {
    if (auto recording = recording_of(event)) wait_in(stream_of(one.id()), recording);
  }
  bool queryEvent(void* event) const override {
    auto recording = recording_of(event);
    if (!recording) return true;
    if (!recording->done()) return false;
    hear(recording->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto recording = recording_of(event);
    if (!recording) return;
    recording->wait();
    hear(recording->clock);
    raise_error();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(recording_of(end)->time - recording_of(begin)->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& one) const override {
    allocator.recordStream(memory, one);
  }
};

// Numbers are drawn in the worker, from a seed and a count that are taken when the kernel is issued.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, count_ = 0;

  Generator() : c10::GeneratorImpl(Guard::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, count_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t count) override { count_ = count; }
  uint64_t get_offset() const override { return count_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0], count_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({2 * sizeof(uint64_t)}, at::kByte);
    auto* numbers = static_cast<uint64_t*>(state.mutable_data_ptr());
    numbers[0] = seed_, numbers[1] = count_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator;
    other->seed_ = seed_, other->count_ = count_;
    return other;
  }
  uint64_t next() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ull + ++count_ * 0xBF58476D1CE4E5B9ull;  // after SplitMix64
    mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 29);
  }
};
inline at::Generator& default_generator() {
  static auto* generator = new at::Generator(c10::make_intrusive<Generator>());
  return *generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return Guard::device(); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<Generator>());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = allocator.allocate(size);
    if (const size_t kept = std::min(storage.nbytes(), size)) allocator.copy_data(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

}  // namespace soft
