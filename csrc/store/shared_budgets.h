#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <string>

#include "core/budget.h"
#include "core/ledger.h"
#include "core/mutex.h"
#include "core/nonmodel_memory.h"
#include "core/runtime_group.h"
#include "store/device_backend.h"

namespace castor {

/// Budgets that the sessions of one plugin share: of a device, of the host and of NVMe. Also has
/// the group of runtimes that make room for each other (docs/design/0038). Owned jointly by the
/// plugin and its sessions. Thread-safe.
class SharedBudgets {
 public:
  /// Makes budgets of these bytes. Throws InvalidArgument if a tier has none. `nvme_bytes` count
  /// where there are directories.
  SharedBudgets(std::size_t device_bytes, std::size_t host_bytes, std::size_t nvme_bytes)
      : device_(std::make_shared<Budget>(TierKind::kDevice, device_bytes)),
        host_(std::make_shared<Budget>(TierKind::kHost, host_bytes)),
        nvme_(std::make_shared<Budget>(TierKind::kNvme, nvme_bytes)) {}

  [[nodiscard]] const std::shared_ptr<Budget>& device() const noexcept { return device_; }
  [[nodiscard]] const std::shared_ptr<Budget>& host() const noexcept { return host_; }
  [[nodiscard]] const std::shared_ptr<Budget>& nvme() const noexcept { return nvme_; }
  [[nodiscard]] const std::shared_ptr<RuntimeGroup>& runtimes() const noexcept { return runtimes_; }

  /// Takes device memory that a model's process groups have for their communicators. The budgets
  /// outlive the reservation. Throws OutOfMemory.
  [[nodiscard]] Reservation take_communicators(std::size_t bytes);

  /// Returns the number of models that have joined and are not gone.
  [[nodiscard]] std::size_t num_models() const;

  /// Place of one model among the others, from its boost to its end. The budgets outlive it.
  class Place {
   public:
    Place(SharedBudgets& budgets, const std::string& model);
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    ~Place();
    /// Returns the model's number, from 1 on: the lowest that no other model had.
    [[nodiscard]] std::size_t number() const noexcept { return number_; }
    /// Returns the model's name for errors: "LlamaForCausalLM (model 2 of its plugin)".
    [[nodiscard]] const std::string& owner() const noexcept { return owner_; }

   private:
    SharedBudgets& budgets_;
    const std::size_t number_;
    const std::string owner_;
  };

  /// Returns the one account of torch's tensors on a device that has memory of its own, where
  /// nobody can tell which model a tensor belongs to. It counts from the first follow_torch on.
  [[nodiscard]] const std::shared_ptr<NonModelMemory>& tensors_of_torch() const noexcept {
    return tensors_;
  }
  /// Lets `account`, which charges tensors_of_torch(), follow the device's allocator as long as
  /// these budgets live. Calls after the first have no effect.
  void follow_torch(DeviceBackend& backend, std::shared_ptr<DeviceAccount> account);

 private:
  [[nodiscard]] std::size_t take_number();

  const std::shared_ptr<Budget> device_;
  const std::shared_ptr<Budget> host_;
  const std::shared_ptr<Budget> nvme_;
  const std::shared_ptr<RuntimeGroup> runtimes_ = std::make_shared<RuntimeGroup>();
  const std::shared_ptr<NonModelMemory> tensors_ =
      std::make_shared<NonModelMemory>(std::make_shared<Ledger>(device_, ""));
  Ledger communicators_{device_, ""};
  mutable Mutex mutex_;
  std::set<std::size_t> numbers_ CASTOR_GUARDED_BY(mutex_);  // of num_models()
  std::shared_ptr<DeviceAccount> account_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
