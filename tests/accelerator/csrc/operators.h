// Every operator without a kernel of its own here: PyTorch's own CPU kernel, on the device's memory, in stream order.
#pragma once

#include <set>

#include "shapes.h"

namespace soft {

inline std::set<std::string> synchronous_operators;  // those that had to wait for data; guarded by `global`
inline std::set<std::string> wrong_shapes;           // where a meta kernel tells otherwise than the CPU's

inline void check_devices(const Call& call) {
  const bool takes_indices = call.name.find("index") != std::string::npos;
  for (const IValue& value : call.arguments)
    mapped(value, [&](const Tensor& tensor) {
      TORCH_CHECK(is_soft(tensor) || tensor.dim() == 0 || takes_indices, "soft: ", call.name,
                  " wants all tensors on the device, and got one of ", tensor.sizes(), " on ", tensor.device());
      return tensor;
    });
}

// Runs the operator once the stream has come there: what it returns depends on data.
inline void run_now(const Call& call, torch::jit::Stack* stack) {
  std::vector<Span> spans;
  torch::jit::Stack inner;
  for (size_t i = 0; i < call.arguments.size(); i++) {
    const IValue& value = call.arguments[i];
    if (value.isDevice()) {
      inner.emplace_back(Device(at::kCPU));
    } else if (call.is_generator(i)) {
      inner.emplace_back(at::Generator(at::detail::createCPUGenerator(call.next_seed(i))));
    } else {
      inner.push_back(mapped(value, [&](const Tensor& tensor) {
        if (!is_soft(tensor)) return tensor;
        spans.push_back(span_of(tensor, call.writes(i)));
        return view_of(tensor).on_host();
      }));
    }
  }
  Stream& stream = stream_of(current_stream);
  launch(stream, spans, call.name, [] {});
  synchronize(stream);
  raise_error();
  {
    std::lock_guard<std::mutex> lock(global);
    synchronous_operators.insert(call.name);
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    call.op.callBoxed(&inner);
  }
  torch::jit::drop(*stack, call.arguments.size());
  for (size_t i = 0; i < inner.size(); i++) {
    const int written = call.written_by(i);
    if (written < 0) {
      stack->push_back(mapped(inner[i], [](const Tensor& tensor) { return tensor.to(Guard::device()); }));
      continue;
    }
    const Tensor target = call.arguments[written].toTensor(), made = inner[i].toTensor();
    if (target.sizes() != made.sizes()) {
      target.resize_(made.sizes());
      target.copy_(made);
    }
    stack->push_back(call.arguments[written]);
  }
}

// What the worker needs of a call.
struct Kernel {
  c10::OperatorHandle op;
  std::string name;
  std::vector<IValue> arguments;                 // tensors as meta, for their places alone
  std::vector<std::vector<View>> tensors;        // of each argument
  std::vector<std::optional<uint64_t>> seeds;    // of each argument that is a generator
  std::vector<std::optional<View>> results;      // one for each tensor returned; nothing where it is an argument

  void operator()() const {
    torch::jit::Stack stack;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (seeds[i]) {
        stack.emplace_back(at::Generator(at::detail::createCPUGenerator(*seeds[i])));
        continue;
      }
      size_t next = 0;
      stack.push_back(mapped(arguments[i], [&](const Tensor&) { return tensors[i][next++].on_host(); }));
    }
    op.callBoxed(&stack);
    size_t next = 0;
    for (const IValue& result : stack) {
      if (result.isTensor()) {
        place(result.toTensor(), next++);
      } else if (result.isTensorList()) {
        for (const Tensor& tensor : result.toTensorVector()) place(tensor, next++);
      } else {
        next++;
      }
    }
  }

 private:
  void place(const Tensor& made, size_t number) const {
    if (number >= results.size() || !results[number] || !made.defined()) return;
    const View& view = *results[number];
    if (made.sizes() != at::IntArrayRef(view.sizes) || made.scalar_type() != view.dtype) {
      std::lock_guard<std::mutex> lock(global);
      wrong_shapes.insert(c10::str(name, ": told ", at::IntArrayRef(view.sizes), " ", view.dtype, ", made ", made.sizes(),
                                   " ", made.scalar_type()));
      TORCH_CHECK(made.sizes() == at::IntArrayRef(view.sizes), *wrong_shapes.rbegin());
    }
    view.on_host().copy_(made);
  }
};

inline void run_later(const Call& call, const Shapes& shapes, torch::jit::Stack* stack) {
  std::vector<IValue> outputs;
  std::vector<Span> spans;
  Kernel kernel{call.op, call.name, {}, {}, {}, {}};
  for (size_t i = 0; i < call.arguments.size(); i++) {
    const IValue& value = call.arguments[i];
    if (call.writes(i) && value.isTensor() && value.toTensor().defined()) {
      const auto sizes = shapes.arguments[i].toTensor().sizes();
      if (sizes != value.toTensor().sizes()) value.toTensor().resize_(sizes);  // out=
    }
  }
  for (size_t i = 0; i < call.schema.returns().size(); i++) {
    if (const int written = call.written_by(i); written >= 0) {
      outputs.push_back(call.arguments[written]);
      kernel.results.emplace_back();
      continue;
    }
    const IValue& told = shapes.results[i];
    outputs.push_back(mapped(told, [&](const Tensor& meta) {
      auto made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(Guard::device()));
      spans.push_back(span_of(made, true));
      kernel.results.emplace_back(view_of(made));
      return made;
    }));
    if (told.isTensor() && !told.toTensor().defined()) kernel.results.emplace_back();
  }
  for (size_t i = 0; i < call.arguments.size(); i++) {
    const IValue& value = call.arguments[i];
    kernel.tensors.emplace_back(), kernel.seeds.emplace_back();
    if (holds_tensors(value)) {
      mapped(value, [&](const Tensor& tensor) {
        if (is_soft(tensor)) spans.push_back(span_of(tensor, call.writes(i)));
        kernel.tensors.back().push_back(view_of(tensor));
        return tensor;
      });
      kernel.arguments.push_back(shapes.arguments[i]);
    } else if (value.isDevice()) {
      kernel.arguments.emplace_back(Device(at::kCPU));
    } else if (call.is_generator(i)) {
      kernel.seeds.back() = call.next_seed(i);
      kernel.arguments.emplace_back();
    } else {
      kernel.arguments.push_back(value);
    }
  }
  launch(stream_of(current_stream), spans, call.name, [kernel = std::move(kernel)] { kernel(); });
  torch::jit::drop(*stack, call.arguments.size());
  for (IValue& output : outputs) stack->push_back(std::move(output));
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  check_devices(call);
  bool depends_on_data = false;
  for (const auto& result : call.schema.returns()) {
    const auto* alias = result.alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "soft: a view operator without a kernel: ", call.name);
    const bool tensors = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                         result.type()->kind() == c10::TypeKind::ListType;
    depends_on_data = depends_on_data || !tensors;
  }
  if (!depends_on_data)
    if (const Shapes shapes = shapes_of(call); shapes.known) return run_later(call, shapes, stack);
  run_now(call, stack);
}

}  // namespace soft
