#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace castor {

/// Small owned memory for transfers that no tier accounts for: headers, probes, measurements.
/// Contents start as zeros. `alignment` is a power of two. Throws std::bad_alloc.
class AlignedBuffer {
 public:
  AlignedBuffer(std::size_t bytes, std::size_t alignment)
      : data_(new (std::align_val_t{alignment}) std::byte[bytes]{}, Delete{alignment}),
        bytes_(bytes) {}

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {data_.get(), bytes_}; }

 private:
  struct Delete {
    std::size_t alignment;
    void operator()(std::byte* data) const noexcept {
      ::operator delete[](data, std::align_val_t{alignment});
    }
  };

  std::unique_ptr<std::byte[], Delete> data_;
  std::size_t bytes_;
};

}  // namespace castor
