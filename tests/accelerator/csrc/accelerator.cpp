// A device in software that PyTorch takes for an accelerator (PrivateUse1), for tests: see README.md beside this folder.
#include "kernels.h"

namespace soft {
REGISTER_ALLOCATOR(kSoft, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
static const bool registered = [] { return at::RegisterPrivateUse1HooksInterface(new Hooks), true; }();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // These have a CPU kernel and a decomposition, which would go before the fallback, and differs in the last bit.
  for (const char* name : {"_stack", "_stack.out", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims",
                           "any.dims_out", "linalg__powsum", "mish_backward", "native_channel_shuffle",
                           "native_group_norm", "native_layer_norm", "silu_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_has_compatible_shallow_copy_type", compatible); }
// torch 2.9 has no fallback there: an operator that knows no derivatives would find no kernel.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", compatible); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}
}  // namespace soft

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &soft::choose_attention)
}

// ---- controls, for ctypes ----

static const char* lines(const auto& texts) {
  static thread_local std::string all;
  all.clear();
  for (const auto& text : texts) all += text + "\n";
  return all.c_str();
}

extern "C" {
void soft_late(double probability, int longest_us, uint64_t seed) {
  soft::late_probability = probability, soft::late_us = longest_us, soft::late_seed = seed;
}
void soft_slow(int64_t stream, int us) { soft::stream_of(stream).slow_us = us; }
void soft_sleep(int milliseconds) {
  soft::launch(soft::stream_of(soft::current_stream), {}, "sleep",
               [milliseconds] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}
void soft_name(int64_t stream, const char* name) {
  std::lock_guard<std::mutex> lock(soft::global);
  soft::stream_of(stream).actor.name = std::string("stream ") + name;
}
void soft_check(bool on) {
  std::lock_guard<std::mutex> lock(soft::global);
  soft::checking = on, soft::races.clear(), soft::accesses.clear();
}
const char* soft_races() {
  std::lock_guard<std::mutex> lock(soft::global);
  return lines(soft::races);
}
const char* soft_synchronous_operators() {
  std::lock_guard<std::mutex> lock(soft::global);
  return lines(soft::synchronous_operators);
}
const char* soft_wrong_shapes() {
  std::lock_guard<std::mutex> lock(soft::global);
  return lines(soft::wrong_shapes);
}
uint64_t soft_launches() { return soft::launches; }
void soft_limit(uint64_t total_bytes) {
  std::lock_guard<std::mutex> lock(soft::global);
  soft::total_bytes = total_bytes;
}
uint64_t soft_total() {
  std::lock_guard<std::mutex> lock(soft::global);
  return soft::total_bytes;
}
void soft_watch(uintptr_t address, uint64_t length, bool pinned) { soft::watch(address, length, pinned, 1); }
void soft_unwatch(uintptr_t address, bool pinned) { soft::watch(address, 0, pinned, -1); }
void soft_host_access(uintptr_t begin, uint64_t length, bool write, const char* what) {
  soft::note_host({{begin, begin + length, write}}, what);
}
// A line of its own for the calling thread.
void soft_enter(const char* name) {
  std::lock_guard<std::mutex> lock(soft::global);
  soft::enter_line(name);
}
// What the calling thread has done so far, for another to hear of; freed by the one that hears of it last.
void* soft_tell() {
  std::lock_guard<std::mutex> lock(soft::global);
  return new soft::Clock(soft::host_line().clock);
}
// Between memory and a file, whose bytes have addresses, too.
void* soft_transfer(uintptr_t memory, uintptr_t file, uint64_t length, bool to_file, const char* what) {
  return new soft::Clock(
      soft::note_transfer({{memory, memory + length, !to_file}, {file, file + length, to_file}}, what));
}
void soft_hear(const void* told) { soft::hear(*static_cast<const soft::Clock*>(told)); }
void soft_forget(const void* told) { delete static_cast<const soft::Clock*>(told); }
uint64_t soft_random(int what, uint64_t value) {
  auto* generator = soft::default_generator().get<soft::Generator>();
  switch (what) {
    case 0: return generator->seed_;
    case 1: return generator->count_;
    case 2: return generator->seed_ = value, generator->count_ = 0;
    default: return generator->count_ = value;
  }
}
}
