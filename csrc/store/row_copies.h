#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/copy_engine.h"
#include "store/session_device.h"

namespace castor {

/// Copies of single rows of some parameters, from host storage to device memory.
///
/// The copies of a parameter are awaited apart from those of the others, so that work on the first
/// parameter runs while the next one's rows come. Whoever owns this keeps the device memory until
/// the copies are awaited, or this is destroyed. Not thread-safe; the engine and the device outlive
/// it.
class RowCopies {
 public:
  /// Number of a row on the host, and of its place on the device.
  struct Row {
    std::int64_t from = 0;
    std::int64_t to = 0;
  };
  /// Memory of a parameter on both sides, and the bytes of one of its rows.
  struct Param {
    const std::byte* host = nullptr;
    std::byte* device = nullptr;
    std::size_t row_bytes = 0;
  };

  RowCopies(CopyEngine& copies, const SessionDevice& compute, std::size_t num_params)
      : copies_(&copies), compute_(&compute), tickets_(num_params) {}
  RowCopies(RowCopies&& other) noexcept = default;
  RowCopies(const RowCopies&) = delete;
  RowCopies& operator=(const RowCopies&) = delete;
  /// Waits for the copies that nobody awaited.
  ~RowCopies() { wait(); }

  /// Begins the copies of rows of a parameter, given by its position, behind the current stream.
  /// Rows that follow each other on both sides are one copy. Returns the bytes.
  std::size_t begin(std::size_t position, const Param& param, std::span<const Row> rows);
  /// Makes the current stream wait for the copies of a parameter. Rethrows the failure of one,
  /// after the others are awaited; they are awaited no more then.
  void await(std::size_t position);
  /// Waits on the host for the copies that nobody awaited, whether they fail or not.
  void wait() noexcept;

 private:
  CopyEngine* copies_;
  const SessionDevice* compute_;
  std::vector<std::vector<CopyTicket>> tickets_;  // per parameter
};

}  // namespace castor
