#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace castor {

/// One finished transfer. A value, never an exception: short transfers and errors are ordinary
/// outcomes that the caller must look at.
struct IoCompletion {
  std::uint64_t tag = 0;
  std::size_t expected_bytes = 0;
  std::size_t transferred_bytes = 0;
  int error_number = 0;  ///< errno, 0 when the transfer succeeded

  [[nodiscard]] bool complete() const noexcept {
    return error_number == 0 && transferred_bytes == expected_bytes;
  }
};

/// Seam for the NVMe tier: positioned reads and writes on one file, completed in any order.
/// No implementation ships yet; asking for an NVMe tier raises NotImplementedError in Python.
/// Buffers stay alive until their completion is collected. Destruction drains what is in flight.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual void submit_read(std::uint64_t tag, std::uint64_t offset,
                           std::span<std::byte> target) = 0;
  virtual void submit_write(std::uint64_t tag, std::uint64_t offset,
                            std::span<const std::byte> source) = 0;
  /// Blocks until at least `at_least` transfers finished; returns all that have.
  [[nodiscard]] virtual std::vector<IoCompletion> collect(std::size_t at_least) = 0;
};

}  // namespace castor
