#pragma once

#include <ATen/core/TensorBase.h>
#include <ATen/core/VariableHooksInterface.h>
#include <torch/version.h>

#include <type_traits>
#include <utility>

/// True if castor is compiled against torch 2.`minor` or newer.
#define CASTOR_TORCH_AT_LEAST(minor) (TORCH_VERSION_MINOR >= (minor))

static_assert(TORCH_VERSION_MAJOR == 2);  // pyproject.toml says which releases; CMake checks

/// Differences between the C++ interfaces of the torch releases that castor is compiled against.
namespace castor::torch_versions {

/// Pointer by which torch holds a node of autograd: std::shared_ptr to 2.12, c10::intrusive_ptr
/// from 2.13 on.
using NodePointer =
    std::remove_cvref_t<decltype(std::declval<const at::impl::VariableHooksInterface&>().grad_fn(
        std::declval<const at::TensorBase&>()))>;

/// Returns an owning pointer to a node that `pointer` owns (from torch 2.13 on) or refers to
/// weakly; empty if the node is gone.
template <typename Pointer>
[[nodiscard]] auto lock(const Pointer& pointer) {
  if constexpr (requires { pointer.lock(); }) {
    return pointer.lock();
  } else {
    return pointer;
  }
}

}  // namespace castor::torch_versions
