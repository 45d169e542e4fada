#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace castor {

/// A parameter as autograd knows it and as it lies in memory. They are one tensor, but for a
/// DTensor: gradients belong to it, bytes to the tensor that it wraps.
struct ParamHandle {
  at::Tensor leaf;
  at::Tensor local;
};

/// What a step's gradients look like before the update.
struct GradientSummary {
  double norm = 0.0;   ///< L2 norm of all gradients as they are; not finite if an element is not
  double scale = 1.0;  ///< the loss scale that all of them carry
  std::int64_t num_gradients = 0;
  /// Per parameter the sum of its gradient's squares, 0 where it has none; empty: not asked for.
  std::vector<double> squares;
};

/// A trainable parameter's gradient: a view of its payload, which p.grad becomes.
struct Gradient {
  bool required = false;  ///< requires_grad of the parameter, when it was taken over
  at::Tensor view;
  c10::Storage storage;            ///< of `view`, until its user gives that other memory
  std::size_t uses = 0;            ///< of `storage`, by castor
  std::size_t position = 0;        ///< of `view`, in its group of the gate
  std::uint32_t version = 0;       ///< of `view` when castor last touched it
  double scale = 0.0;              ///< loss scale it was made with
  const void* in_graph = nullptr;  ///< the p.grad that create_graph=True made with that scale
  bool present = false;            ///< in this step; known after collect_gradients
};

}  // namespace castor
