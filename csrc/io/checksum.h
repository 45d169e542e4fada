#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/executor.h"

namespace castor {

/// Bytes of the pieces in which data is checked. They are small enough to be checked in parallel
/// and to say where the damage is. They are so large that the checksums are nothing beside the data
/// (8 bytes a MiB).
inline constexpr std::size_t kChecksumBlockBytes = std::size_t{1} << 20;

/// Returns xxh3 of 64 bits, seed 0: the value of Python's xxhash.xxh3_64_intdigest.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> data) noexcept;

/// xxh3 of 128 bits, seed 0, of data that comes in pieces: the value of Python's xxhash.xxh3_128.
class StreamChecksum {
 public:
  StreamChecksum();
  ~StreamChecksum();
  StreamChecksum(const StreamChecksum&) = delete;
  StreamChecksum& operator=(const StreamChecksum&) = delete;

  void update(std::span<const std::byte> data) noexcept;
  /// Returns the checksum of all data so far, as 32 hex digits.
  [[nodiscard]] std::string hex() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

/// Returns the checksum of each kChecksumBlockBytes of `data`; the last piece may be shorter.
[[nodiscard]] std::vector<std::uint64_t> block_checksums(Executor& executor,
                                                         std::span<const std::byte> data);

/// The first piece whose checksum differs.
struct ChecksumMismatch {
  std::size_t offset = 0;  ///< in the data
  std::size_t bytes = 0;
  std::uint64_t expected = 0;
  std::uint64_t found = 0;
};

/// Compares the checksums of `data` with `expected`, and returns nullopt when all are equal. Throws
/// InvalidArgument when `expected` is of data of another size.
[[nodiscard]] std::optional<ChecksumMismatch> find_mismatch(
    Executor& executor, std::span<const std::byte> data, std::span<const std::uint64_t> expected);

}  // namespace castor
