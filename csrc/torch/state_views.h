#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "core/mutex.h"
#include "torch/optimizer_state.h"
#include "torch/tensor_gate.h"

namespace castor {

/// The views of optimizer states that users have been shown: the same tensors at every call.
/// Thread-safe.
class StateViews {
 public:
  explicit StateViews(std::size_t num_params) : views_(num_params) {}

  /// Made at the first call; the gate watches them from then on, in `group`.
  const std::vector<at::Tensor>& of(ParamId param, const OptimizerState& state, TensorGate& gate,
                                    std::size_t group);
  /// Gives the views that were shown memory of their own, with the values of now, and forgets them:
  /// user code holds them, and the chunk's states are about to be others. No update of the chunk is
  /// under way.
  void release(ParamId param, TensorGate& gate, std::size_t group);
  /// Of the views that were shown. For a forked child: it takes no mutex, which a thread that did
  /// not come along may hold.
  void for_each_storage(const std::function<void(const c10::Storage&)>& visit) const
      CASTOR_NOT_ANALYZED;
  /// Whether that is the storage of a view that was shown.
  [[nodiscard]] bool hold(ParamId param, const void* storage) const;
  /// Whether somebody else refers to the memory of views that were shown.
  [[nodiscard]] bool aliased(ParamId param) const;

 private:
  mutable Mutex mutex_;  // before the gate's
  // Per parameter; what has been made stays.
  std::vector<std::vector<at::Tensor>> views_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
