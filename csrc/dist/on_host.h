#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace castor {

/// A tensor's bytes in memory of the host, through which ranks exchange it: its own, or a
/// page-locked copy of what lies on a device, ordered with the calling thread's current stream
/// there. Borrows the tensor. One thread's.
class OnHost {
 public:
  /// The tensor's values, complete when this returns. Throws InvalidArgument where it is not
  /// contiguous.
  [[nodiscard]] static OnHost values_of(const at::Tensor& tensor);
  /// Bytes of what the tensor is about to become; its values are not brought.
  [[nodiscard]] static OnHost room_for(const at::Tensor& tensor);

  [[nodiscard]] std::span<std::byte> bytes() const;
  /// The bytes become the tensor's values, for what its stream is given from now on.
  void send() const;

 private:
  explicit OnHost(const at::Tensor& tensor);

  at::Tensor tensor_;
  at::Tensor host_;  // the tensor itself, where the host addresses it
};

}  // namespace castor
