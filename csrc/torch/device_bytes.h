#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace castor {

/// Returns a tensor over bytes of a device that are not castor's to give away: the tensor borrows
/// them. In a header, since castor._cuda is linked without the sources of csrc/torch.
[[nodiscard]] inline at::Tensor bytes_at(const std::byte* data, std::size_t bytes,
                                         c10::Device device) {
  return at::for_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace castor
