#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "core/mutex.h"
#include "torch/optimizer_state.h"
#include "torch/tensor_gate.h"

namespace castor {

/// Views of optimizer states that users have been shown: the same tensors at every call.
/// Thread-safe.
class StateViews {
 public:
  explicit StateViews(std::size_t num_params) : views_(num_params) {}

  /// Returns the views of the parameter's states. The first call makes the views; the gate watches
  /// them from then on, in `group`.
  const std::vector<at::Tensor>& of(ParamId param, const OptimizerState& state, TensorGate& gate,
                                    std::size_t group);
  /// Gives the views that were shown memory of their own, with the current values, and forgets
  /// them: user code holds them, and the chunk's states are about to be others. Requires that no
  /// update of the chunk is under way.
  void release(ParamId param, TensorGate& gate, std::size_t group);
  /// Calls `visit` with the storages of the views that were shown. For a forked child: takes no
  /// mutex, because a thread that did not come along may hold it.
  void for_each_storage(const std::function<void(const c10::Storage&)>& visit) const
      CASTOR_NOT_ANALYZED;
  /// Returns whether `storage` is that of a view of the parameter that was shown.
  [[nodiscard]] bool hold(ParamId param, const void* storage) const;
  /// Returns whether somebody else refers to the memory of the parameter's views that were shown.
  [[nodiscard]] bool aliased(ParamId param) const;

 private:
  mutable Mutex mutex_;  // taken before the gate's
  // Per parameter; empty until of() makes the views.
  std::vector<std::vector<at::Tensor>> views_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
