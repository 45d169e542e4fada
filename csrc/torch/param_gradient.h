#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace castor {

/// Parameter as autograd knows it (`leaf`) and as it lies in memory (`local`). Both are one tensor,
/// except for a DTensor: gradients belong to the DTensor, bytes to the tensor that it wraps.
struct ParamHandle {
  at::Tensor leaf;
  at::Tensor local;
};

/// Summary of a step's gradients before the update.
struct GradientSummary {
  double norm = 0.0;   ///< L2 norm of all gradients as they are; not finite if an element is not
  double scale = 1.0;  ///< loss scale that all of them carry
  std::int64_t num_gradients = 0;
  /// Sum of the squares of each parameter's gradient, 0 where it has none; empty: not asked for.
  std::vector<double> squares;
};

/// Gradient of a trainable parameter: a view of its payload, which p.grad becomes.
struct Gradient {
  bool required = false;  ///< requires_grad of the parameter, when it was taken over
  at::Tensor view;
  c10::Storage storage;            ///< storage of `view`, until its user gives that other memory
  std::size_t uses = 0;            ///< castor's own references to `storage`
  std::size_t position = 0;        ///< place of `view` in its group of the gate
  std::uint32_t version = 0;       ///< version of `view` when castor last touched it
  double scale = 0.0;              ///< loss scale that the gradient was made with
  const void* in_graph = nullptr;  ///< p.grad that create_graph=True made with that scale
  bool present = false;            ///< there is a gradient in this step; known after collect()
};

}  // namespace castor
