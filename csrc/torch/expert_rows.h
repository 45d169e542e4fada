#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/copy_engine.h"
#include "torch/session.h"

namespace castor {

/// Rows of some experts of one layer, in device memory of their own: those that one forward or
/// backward of a step computes with (docs/design/0059).
///
/// The memory is torch's, on the account of the model's activations. It is freed when neither this
/// nor a tensor of take() is there any more. Not thread-safe; shares the session.
class ExpertRows {
 public:
  /// Begins the copies of the experts' rows of each parameter from host storage, one parameter
  /// after the other. `experts` are numbers of rows. Returns nullptr where host storage cannot be
  /// read by the row (Session::begin_rows_of_step). Throws InvalidArgument where a parameter has no
  /// such row, OutOfMemory, and what begin_rows_of_step throws.
  [[nodiscard]] static std::shared_ptr<ExpertRows> fetch(std::shared_ptr<Session> session,
                                                         std::span<const ParamId> params,
                                                         std::span<const std::int64_t> experts);
  /// Same, ahead of their use: also returns nullptr where the device has no free room for them.
  [[nodiscard]] static std::shared_ptr<ExpertRows> fetch_ahead(
      std::shared_ptr<Session> session, std::span<const ParamId> params,
      std::span<const std::int64_t> experts);
  /// Waits for the copies that nobody took.
  ~ExpertRows();
  ExpertRows(const ExpertRows&) = delete;
  ExpertRows& operator=(const ExpertRows&) = delete;

  /// Returns the rows [experts, ...] of a parameter, given by its position. The current stream
  /// waits for their copies. Rethrows a copy's failure.
  [[nodiscard]] at::Tensor take(std::size_t position);
  /// Returns the bytes that were copied.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  struct Param {
    at::Tensor rows;
    std::vector<CopyTicket> tickets;
  };

  explicit ExpertRows(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  void begin(ParamId param, std::span<const std::int64_t> experts);

  const std::shared_ptr<Session> session_;
  std::vector<Param> params_;
  std::size_t bytes_ = 0;
};

}  // namespace castor
