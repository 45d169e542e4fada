#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/nonmodel_memory.h"
#include "store/device_memory.h"

namespace castor::testing {

/// Memory of the heap, charged to an account as torch's tensors are.
class ChargedMemory final : public DeviceMemory {
 public:
  ChargedMemory(std::shared_ptr<NonModelMemory> account, std::size_t bytes)
      : account_(std::move(account)) {
    account_->allocate(bytes);
    values_.resize(bytes);
  }
  ~ChargedMemory() override { account_->free(values_.size()); }
  ChargedMemory(const ChargedMemory&) = delete;
  ChargedMemory& operator=(const ChargedMemory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept override {
    return const_cast<std::byte*>(values_.data());
  }
  [[nodiscard]] std::size_t bytes() const noexcept override { return values_.size(); }

 private:
  const std::shared_ptr<NonModelMemory> account_;
  std::vector<std::byte> values_;
};

[[nodiscard]] inline TakeDeviceMemory charged_to(const std::shared_ptr<NonModelMemory>& account) {
  return [account](std::size_t bytes) { return std::make_shared<ChargedMemory>(account, bytes); };
}

}  // namespace castor::testing
