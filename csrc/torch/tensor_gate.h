#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "store/gate_groups.h"

namespace castor {

/// Gate that holds torch's operators back from tensors whose memory something else still uses: an
/// update that has yet to run, or a copy that is under way. Its groups are GateGroups, which says
/// when they open and close, and who may read or visit one. The gate costs nothing while no group
/// is held back.
///
/// While a group is held back, the first operator that takes one of its tensors, or an alias made
/// meanwhile by `.data`, passes the group. Such operators read weights, gradients or moments
/// between two steps: an exponential average, a norm, a state_dict, zero_grad, another module.
///
/// The gate uses a dispatch key that torch keeps for out-of-tree use (DeferredInit): a tensor that
/// is held back carries the key, whose kernel for every operator is the wait. `.data` waits too;
/// torch begins to pickle a parameter with it. Other reads without an operator (data_ptr(), a
/// storage) cannot be held back: meanwhile torch throws where it is asked for the address.
///
/// Owned by the session. Thread-safe.
class TensorGate final : public OperatorGate {
 public:
  using Guard = GateGroups::Guard;
  using Settle = GateGroups::Settle;
  using Reader = GateGroups::Reader;
  using Use = OperatorUse;
  using Visit = GateGroups::Visit;

  /// Makes a gate with open groups. `visit` may be empty where no group is guarded.
  static std::shared_ptr<TensorGate> create(std::size_t num_groups, Settle settle, Reader reader,
                                            Visit visit = {});

  /// Same as GateGroups::guard. To be called before tensors are watched.
  void guard(std::size_t group, Guard guard) { groups_->guard(group, guard); }
  /// Adds `tensor` to the group. Its storage belongs to no other group. Returns its position there.
  std::size_t watch(std::size_t group, at::Tensor tensor);
  /// Puts `tensor` in place of the one at that position, which may lie over other memory by now.
  void replace(std::size_t group, std::size_t position, at::Tensor tensor);
  /// Holds back, as those that are watched, a tensor that was made over the group's memory by other
  /// means than torch's.
  void follow(std::size_t group, const at::Tensor& tensor);
  /// Same as GateGroups::unwatch.
  void unwatch(std::size_t group, const at::Tensor& tensor) {
    groups_->unwatch(group, tensor.unsafeGetTensorImpl());
  }
  void close(std::size_t group) override { groups_->close(group); }
  void open(std::size_t group) override { groups_->open(group); }
  /// Same as GateGroups::share.
  void share(std::size_t group) { groups_->share(group); }
  void pass(std::size_t group) override { groups_->pass(group); }
  void pass_all() override { groups_->pass_all(); }

 private:
  explicit TensorGate(std::shared_ptr<GateGroups> groups) : groups_(std::move(groups)) {}

  // Shared for the time that an operator passes.
  const std::shared_ptr<GateGroups> groups_;
};

/// Returns whether operators on the tensor pass a gate: its memory is held back, or guarded.
[[nodiscard]] bool is_gated(const at::Tensor& tensor) noexcept;
/// Returns the tensor, for a caller that reads its memory without an operator; a copy where
/// is_gated().
[[nodiscard]] at::Tensor readable(const at::Tensor& tensor);

}  // namespace castor
