#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <cstddef>

namespace castor {

/// Calls `use(tensor, writes)` for each tensor among an operator's arguments on the stack, also for
/// those in lists. `writes`: whether the operator's schema says that it writes the tensor.
template <typename Use>
void for_each_tensor(const c10::FunctionSchema& schema, const ::torch::jit::Stack& stack,
                     const Use& use) {
  const auto& arguments = schema.arguments();
  const auto values = ::torch::jit::last(stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = arguments[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    if (values[i].isTensor()) {
      use(values[i].toTensor(), writes);
    } else if (values[i].isList()) {
      for (const c10::IValue& element : values[i].toListRef()) {
        if (element.isTensor()) {
          use(element.toTensor(), writes);
        }
      }
    }
  }
}

}  // namespace castor
