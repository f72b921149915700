// The shapes of an operator's results, from its meta kernel, kept by what they depend on: some are Python, and slow.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <unordered_map>
#include <unordered_set>

#include "views.h"

namespace soft {

// Those whose shapes depend on data, and, once found, those without a meta kernel.
inline std::unordered_set<std::string> without_shapes{"aten::equal", "aten::nonzero", "aten::masked_select",
                                                      "aten::_unique2"};
inline std::unordered_map<std::string, torch::jit::Stack> known_shapes;
inline std::mutex shapes_mutex;

inline Tensor as_meta(const Tensor& tensor) {
  if (!is_soft(tensor) && tensor.dim() == 0) return tensor;  // a number: meta kernels look at it
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Returns what the call's shapes depend on, or nothing where that cannot be told.
inline std::string key_of(const Call& call) {
  std::string key = call.name;
  bool whole = true;
  auto put = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  auto put_tensor = [&](const Tensor& tensor) {
    key += ';';
    if (!tensor.defined()) return;
    whole = whole && (is_soft(tensor) || tensor.dim() > 0);
    put(tensor.scalar_type()), put(tensor.unsafeGetTensorImpl()->is_wrapped_number()), put(tensor.dim());
    for (int64_t size : tensor.sizes()) put(size);
    for (int64_t stride : tensor.strides()) put(stride);
  };
  put(at::typeMetaToScalarType(at::get_default_dtype()));
  for (const IValue& value : call.arguments) {
    key += '|';
    if (value.isTensor()) {
      put_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) put_tensor(tensor);
    } else if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorList();
      for (size_t i = 0; i < list.size(); i++) put_tensor(std::optional<Tensor>(list.get(i)).value_or(Tensor()));
    } else if (value.isInt()) {
      key += 'i', put(value.toInt());
    } else if (value.isDouble()) {
      key += 'd', put(value.toDouble());
    } else if (value.isBool()) {
      key += 'b', put(value.toBool());
    } else if (value.isIntList()) {
      for (int64_t one : value.toIntVector()) key += ',', put(one);
    } else if (value.isBoolList()) {
      for (bool one : value.toBoolList()) key += one ? '1' : '0';
    } else if (value.isString()) {
      key += value.toStringRef();
    } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
      whole = false;
    }
  }
  return whole ? key : "";
}

// What meta kernels say of CUDA and CPU kernels do otherwise: the dtype of a norm's statistics.
inline void correct(const Call& call, torch::jit::Stack& results) {
  static const std::map<std::string, int> weights{
      {"aten::native_layer_norm", 2}, {"aten::native_group_norm", 1}, {"aten::native_batch_norm", 1}};
  const auto found = weights.find(call.name);
  if (found == weights.end()) return;
  const auto input = call.arguments[0].toTensor().scalar_type();
  const IValue& weight = call.arguments[found->second];
  const bool mixed = weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != input;
  for (int i : {1, 2}) results[i] = results[i].toTensor().to(mixed ? at::kFloat : input);
}

struct Shapes {
  bool known = false;                  // else the call must look at data
  std::vector<IValue> arguments;       // as meta tensors, those resized that it resizes
  torch::jit::Stack results;
};

inline Shapes shapes_of(const Call& call) {
  Shapes shapes;
  {
    std::lock_guard<std::mutex> lock(shapes_mutex);
    if (without_shapes.count(call.name)) return shapes;
  }
  for (const IValue& value : call.arguments)
    shapes.arguments.push_back(value.isDevice()      ? IValue(Device(at::kMeta))
                               : value.isGenerator() ? IValue()
                                                     : mapped(value, as_meta));
  const std::string key = key_of(call);
  if (!key.empty()) {
    std::lock_guard<std::mutex> lock(shapes_mutex);
    if (auto found = known_shapes.find(key); found != known_shapes.end()) {
      shapes.results = found->second;
      return shapes.known = true, shapes;
    }
  }
  shapes.results.assign(shapes.arguments.begin(), shapes.arguments.end());
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    call.op.callBoxed(&shapes.results);
  } catch (const c10::NotImplementedError&) {
    std::lock_guard<std::mutex> lock(shapes_mutex);
    without_shapes.insert(call.name);
    return shapes;
  } catch (const c10::Error&) {
    throw;  // what the caller has done wrong
  } catch (const std::exception&) {  // a meta kernel in Python that looks at data
    return shapes;
  }
  correct(call, shapes.results);
  bool resizes = false;
  for (size_t i = 0; i < call.arguments.size(); i++)
    if (call.arguments[i].isTensor() && call.arguments[i].toTensor().defined())
      resizes = resizes || shapes.arguments[i].toTensor().sizes() != call.arguments[i].toTensor().sizes();
  if (!key.empty() && !resizes) {
    std::lock_guard<std::mutex> lock(shapes_mutex);
    known_shapes.emplace(key, shapes.results);
  }
  return shapes.known = true, shapes;
}

}  // namespace soft
