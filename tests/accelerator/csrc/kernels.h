// Kernels of the device's own: memory, views, copies, and where PyTorch would decompose what the CPU does whole.
#pragma once

#include <ATen/CPUFunctions.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "operators.h"

namespace soft {

constexpr auto kKeys = c10::DispatchKey::PrivateUse1;

inline Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                                  std::optional<Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(kKeys), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(kKeys),
                                           c10::dtype_or_default(dtype));
}
inline Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
inline Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
inline Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                                  c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// As on CUDA: a copy that is not asked to block, and from or to memory that is pinned, is the stream's; else the host
// waits for it, and its memory is the host's own affair.
inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (source.numel() == 0) return target;
  const bool up = !is_soft(source), down = !is_soft(target), within = !up && !down;
  const bool pinned = within || is_pinned((up ? source : target).const_data_ptr());
  std::vector<Span> spans;
  if (!up || pinned) spans.push_back(span_of(source, false));
  if (!down || pinned) spans.push_back(span_of(target, true));
  View from = shape_of(source), to = shape_of(target);
  from.memory = real(source.const_data_ptr()), to.memory = real(target.mutable_data_ptr());
  Stream& stream = stream_of(current_stream);
  launch(stream, spans, within ? "a copy" : up ? "a copy from the host" : "a copy to the host",
         [from, to] { to.on_host().copy_(from.on_host()); });
  if (!within && !(non_blocking && pinned)) {
    synchronize(stream);
    raise_error();
  }
  return target;
}
inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}
inline at::Scalar local_scalar_dense(const Tensor& self) {
  Stream& stream = stream_of(current_stream);
  launch(stream, {span_of(self, false)}, "item", [] {});
  synchronize(stream);
  raise_error();
  return at::native::_local_scalar_dense_cpu(view_of(self).on_host());
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  allocator.recordStream(self.storage().data_ptr(), stream);
}
// Lets `.data` change the device, as it may between the CPU and CUDA.
inline bool compatible(const Tensor&, const Tensor&) { return true; }

inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, mask_options)};
  auto mask = at::empty_like(input, mask_options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}
inline Tensor native_dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  return gradient.mul(mask).mul_(scale);
}

// They have the arguments of the operators that the CPU has.
inline void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}
inline void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto end = stack->size();
  const auto weight = (*stack)[end - 8].toTensor();
  const bool transposed = (*stack)[end - 4].toBool(), bias = (*stack)[end - 1].toBoolList()[2];
  const int64_t groups = (*stack)[end - 2].toInt();
  IValue bias_sizes;
  if (bias) bias_sizes = std::vector<int64_t>{transposed ? weight.size(1) * groups : weight.size(0)};
  stack->insert(stack->end() - 7, bias_sizes);
  fallback(op, stack);
}

// The CPU counts no integers, as CUDA does: what it counts is then the same in doubles.
inline void histc(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& input = (*stack)[stack->size() - 4];
  const auto tensor = input.toTensor();
  const bool counted = at::isIntegralType(tensor.scalar_type(), false);
  if (counted) input = tensor.to(at::kDouble);
  fallback(op, stack);
  if (counted) stack->back() = stack->back().toTensor().to(tensor.scalar_type());
}

// The CPU's own choice of how to attend; it looks at shapes alone, of torch.compile's fake tensors, too.
inline int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& mask, double p, bool causal, std::optional<double> scale,
                                bool grouped) {
  auto on_host = [](const Tensor& tensor) {
    auto one = view_of(tensor).on_host();
    if (tensor.requires_grad()) one.set_requires_grad(true);
    return one;
  };
  std::optional<Tensor> host_mask;
  if (mask && mask->defined()) host_mask = on_host(*mask);
  c10::impl::ExcludeDispatchKeyGuard unmocked(c10::DispatchKeySet(c10::DispatchKey::Python));
  return at::_fused_sdp_choice(on_host(query), on_host(key), on_host(value), host_mask, p, causal, scale, grouped);
}

}  // namespace soft
