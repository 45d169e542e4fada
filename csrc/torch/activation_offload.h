#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "store/activation_store.h"
#include "torch/chunk_storages.h"
#include "torch/session.h"

namespace castor {

/// Saves tensors of a model's blocks for backward in an ActivationStore. Views of one storage leave
/// together, as one storage. Thread-safe. The store shares the session, and the tensors that were
/// saved share the store.
class ActivationOffload {
 public:
  using Pass = ActivationStore::Pass;
  /// Record that autograd saves for backward in place of a tensor.
  class Saved {
    friend class ActivationOffload;
    std::shared_ptr<Pass> pass_;
    std::shared_ptr<ActivationStore::Kept> memory_;  // nullptr: the tensor stays where it is
    at::Tensor kept_;
    at::ScalarType type_ = at::kFloat;
    std::size_t offset_ = 0;  // elements
    ParamGeometry geometry_;
    c10::VariableVersion counter_;
    std::uint32_t version_ = 0;
  };

  explicit ActivationOffload(const std::shared_ptr<Session>& session);

  /// Same as ActivationStore::begin.
  [[nodiscard]] std::shared_ptr<Pass> begin() { return store_->begin(); }
  /// Returns what autograd keeps of a tensor that an operator of the pass saves for backward.
  /// Parameters, tensors of another device and small tensors stay as they are, but their versions
  /// are checked as well.
  [[nodiscard]] std::shared_ptr<Saved> save(const std::shared_ptr<Pass>& pass,
                                            const at::Tensor& tensor);
  /// Returns the tensor on the device, for backward. Throws UsageError where the tensor was written
  /// in place since it was saved, and as ActivationStore::restore.
  [[nodiscard]] at::Tensor restore(const Saved& saved);

  [[nodiscard]] ActivationStore::Figures figures() const { return store_->figures(); }

 private:
  const c10::Device device_;
  const std::shared_ptr<ActivationStore> store_;
};

}  // namespace castor
