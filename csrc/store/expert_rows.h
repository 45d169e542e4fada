#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "store/expert_model.h"
#include "store/row_copies.h"

namespace castor {

/// Rows of some experts of one layer, in device memory of their own: those that one forward or
/// backward of a step computes with (docs/design/0059).
///
/// The memory is torch's, on the account of the model's activations. It is freed when neither this
/// nor a user of take() has it any more. Not thread-safe.
class ExpertRows {
 public:
  /// Begins the copies of the experts' rows of each parameter from host storage, one parameter
  /// after the other. `experts` are numbers of rows. Returns nullptr where host storage cannot be
  /// read by the row (ExpertModel::begin_rows_of_step). Throws InvalidArgument where the layer has
  /// no such expert, OutOfMemory, and what begin_rows_of_step throws.
  [[nodiscard]] static std::unique_ptr<ExpertRows> fetch(const ExpertParts& parts,
                                                         const ExpertLayer& layer,
                                                         std::span<const std::int64_t> experts);
  /// Same, ahead of their use: also returns nullptr where the device has no free room for them.
  [[nodiscard]] static std::unique_ptr<ExpertRows> fetch_ahead(
      const ExpertParts& parts, const ExpertLayer& layer, std::span<const std::int64_t> experts);
  ExpertRows(const ExpertRows&) = delete;
  ExpertRows& operator=(const ExpertRows&) = delete;

  /// Returns the rows of a parameter, given by its position, in the order of the experts. The
  /// current stream waits for their copies. Throws a copy's failure, at each call.
  [[nodiscard]] const std::shared_ptr<DeviceMemory>& take(std::size_t position);
  /// Returns the bytes that were copied.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  ExpertRows(const ExpertParts& parts, const ExpertLayer& layer,
             std::span<const std::int64_t> experts);

  std::vector<std::shared_ptr<DeviceMemory>> memory_;  // per parameter; outlives the copies
  std::vector<std::exception_ptr> failures_;           // per parameter
  RowCopies copies_;
  std::size_t bytes_ = 0;
};

}  // namespace castor
