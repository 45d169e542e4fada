#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <string>

#include "core/budget.h"
#include "core/mutex.h"
#include "core/nonmodel_memory.h"
#include "core/runtime_group.h"
#include "torch/device_backend.h"

namespace castor {

/// What the sessions of one plugin may take together of a device, of the host and of NVMe, and who
/// of them makes room for whom (docs/design/0038). Owned by the plugin and its sessions together.
/// Thread-safe.
class SharedBudgets {
 public:
  /// Bytes. Throws InvalidArgument if a tier has none. `nvme_bytes` count where there are
  /// directories.
  SharedBudgets(std::size_t device_bytes, std::size_t host_bytes, std::size_t nvme_bytes)
      : device_(std::make_shared<Budget>(TierKind::kDevice, device_bytes)),
        host_(std::make_shared<Budget>(TierKind::kHost, host_bytes)),
        nvme_(std::make_shared<Budget>(TierKind::kNvme, nvme_bytes)) {}

  [[nodiscard]] const std::shared_ptr<Budget>& device() const noexcept { return device_; }
  [[nodiscard]] const std::shared_ptr<Budget>& host() const noexcept { return host_; }
  [[nodiscard]] const std::shared_ptr<Budget>& nvme() const noexcept { return nvme_; }
  [[nodiscard]] const std::shared_ptr<RuntimeGroup>& runtimes() const noexcept { return runtimes_; }

  /// Models that have joined and are not gone.
  [[nodiscard]] std::size_t num_models() const;

  /// One model's place among the others, from its boost to its end. Outlived by the budgets.
  class Place {
   public:
    Place(SharedBudgets& budgets, const std::string& model);
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    ~Place();
    /// From 1 on; the lowest that no other model has.
    [[nodiscard]] std::size_t number() const noexcept { return number_; }
    /// For errors: "LlamaForCausalLM (model 2 of its plugin)".
    [[nodiscard]] const std::string& owner() const noexcept { return owner_; }

   private:
    SharedBudgets& budgets_;
    const std::size_t number_;
    const std::string owner_;
  };

  /// The one account of what torch takes of a device that has memory of its own, where nobody can
  /// tell whose a tensor is. It counts from the first follow_torch on.
  [[nodiscard]] const std::shared_ptr<NonModelMemory>& tensors_of_torch() const noexcept {
    return tensors_;
  }
  /// What the device's allocator does is told there as long as these budgets are.
  void follow_torch(const std::shared_ptr<DeviceBackend>& backend);

 private:
  [[nodiscard]] std::size_t take_number();

  const std::shared_ptr<Budget> device_;
  const std::shared_ptr<Budget> host_;
  const std::shared_ptr<Budget> nvme_;
  const std::shared_ptr<RuntimeGroup> runtimes_ = std::make_shared<RuntimeGroup>();
  const std::shared_ptr<NonModelMemory> tensors_ =
      std::make_shared<NonModelMemory>(std::make_shared<Ledger>(device_, ""));
  mutable Mutex mutex_;
  std::set<std::size_t> numbers_ CASTOR_GUARDED_BY(mutex_);  // that models have
  std::shared_ptr<DeviceAccount> account_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
