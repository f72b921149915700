// What a kernel needs of a tensor without holding its memory: memory that is freed too early must be seen.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "guard.h"

namespace soft {

using c10::IValue;

inline bool is_soft(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSoft; }

struct View {
  void* memory = nullptr;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool wrapped = false, conjugate = false, negative = false;
  Tensor value;  // a tensor of the host's, as it is now

  Tensor on_host() const {
    if (value.defined()) return value;
    auto tensor = at::from_blob(memory, sizes, strides, at::TensorOptions().dtype(dtype));
    if (wrapped) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (conjugate) tensor._set_conj(true);
    if (negative) tensor._set_neg(true);
    return tensor;
  }
};

inline View shape_of(const Tensor& tensor) {
  View view;
  view.sizes = tensor.sizes().vec(), view.strides = tensor.strides().vec(), view.dtype = tensor.scalar_type();
  view.wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  view.conjugate = tensor.is_conj(), view.negative = tensor.is_neg();
  return view;
}
inline View view_of(const Tensor& tensor) {
  View view = shape_of(tensor);
  if (is_soft(tensor)) {
    view.memory = tensor.numel() ? real(tensor.const_data_ptr()) : nullptr;
    return view;
  }
  view.value = tensor.clone();
  if (view.wrapped) view.value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

inline Span span_of(const Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return {0, 0, write};
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  uintptr_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.element_size(), write};
}

inline bool holds_tensors(const IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

// Returns the value with each of its tensors mapped.
inline IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& map) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? map(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    const auto given = value.toOptionalTensorList();
    for (size_t i = 0; i < given.size(); i++) {
      const std::optional<Tensor> tensor = given.get(i);
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(map(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

// One call of an operator: its arguments, which of them it writes, and which a result is.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> arguments;

  Call(const c10::OperatorHandle& given, const torch::jit::Stack& stack)
      : op(given),
        schema(given.schema()),
        name(c10::toString(given.operator_name())),
        arguments(torch::jit::last(stack, schema.arguments().size()).vec()) {}

  bool writes(size_t argument) const {
    const auto* alias = schema.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }
  // Returns the number of the argument that the result is, or -1 for a new tensor.
  int written_by(size_t result) const {
    const auto* alias = schema.returns()[result].alias_info();
    if (!alias || !alias->isWrite()) return -1;
    for (size_t i = 0; i < arguments.size(); i++)
      if (writes(i) && schema.arguments()[i].alias_info()->beforeSet() == alias->beforeSet()) return int(i);
    return -1;
  }
  bool is_generator(size_t argument) const {
    return arguments[argument].isGenerator() ||
           schema.arguments()[argument].type()->str().find("Generator") != std::string::npos;
  }
  uint64_t next_seed(size_t argument) const {
    auto generator = arguments[argument].isGenerator() ? arguments[argument].toGenerator() : default_generator();
    return generator.get<Generator>()->next();
  }
};

}  // namespace soft
