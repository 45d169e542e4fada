#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace castor {

/// A tensor's bytes in memory of the host, through which ranks exchange it. They are the tensor's
/// own, or a page-locked copy of a tensor on a device, ordered with the calling thread's current
/// stream there. Borrows the tensor. Used by one thread.
class OnHost {
 public:
  /// Returns the tensor's values, complete at the return. Throws InvalidArgument where the tensor
  /// is not contiguous.
  [[nodiscard]] static OnHost values_of(const at::Tensor& tensor);
  /// Returns room for the tensor's next values; its present values are not copied.
  [[nodiscard]] static OnHost room_for(const at::Tensor& tensor);

  [[nodiscard]] std::span<std::byte> bytes() const;
  /// Copies the bytes into the tensor, for all work that its stream is given from now on.
  void send() const;

 private:
  explicit OnHost(const at::Tensor& tensor);

  at::Tensor tensor_;
  at::Tensor host_;  // the tensor itself, where the host addresses it
};

}  // namespace castor
