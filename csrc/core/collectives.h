#pragma once

#include <cstddef>
#include <span>

namespace castor {

/// Seam between the ranks that train one model together: GroupCollectives in csrc/dist, threads of
/// one process in tests. Every rank makes the same calls in the same order; each returns when it is
/// done here, and throws Error where another rank is gone. One call at a time.
class Collectives {
 public:
  virtual ~Collectives() = default;

  [[nodiscard]] virtual std::size_t rank() const noexcept = 0;
  [[nodiscard]] virtual std::size_t size() const noexcept = 0;

  /// `all` becomes the `own` of every rank, in rank order. All have the same size; `own` may be
  /// this rank's part of `all`.
  virtual void all_gather(std::span<const std::byte> own, std::span<std::byte> all) = 0;
  /// Of `sent`, cut into size() equal parts, rank r gets the r-th. `received`, as large and apart
  /// from it, becomes what every rank sent to this one, in rank order.
  virtual void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
};

}  // namespace castor
