#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/ledger.h"
#include "core/nonmodel_memory.h"
#include "store/device_memory.h"
#include "store/session_device.h"

namespace castor {

/// Layer whose parameters have a row for each expert.
struct ExpertLayer {
  std::vector<ParamId> params;
  std::vector<std::size_t> row_bytes;  ///< per parameter
  std::int64_t num_experts = 0;

  /// Returns the bytes of an expert: one row of each parameter.
  [[nodiscard]] std::size_t expert_bytes() const;
  /// Returns the chunks of the parameters, each once.
  [[nodiscard]] std::vector<ChunkId> chunks(const ChunkLayout& layout) const;
};

/// Model whose experts are fetched by the row, as a session knows it.
class ExpertModel {
 public:
  virtual ~ExpertModel() = default;
  /// Same as Session::begin_rows, Session::begin_rows_of_step and Session::take_written.
  [[nodiscard]] virtual bool begin_rows(std::span<const ChunkId> chunks) = 0;
  [[nodiscard]] virtual bool begin_rows_of_step(std::span<const ChunkId> chunks) = 0;
  [[nodiscard]] virtual bool take_written(ChunkId chunk) = 0;
  /// Returns the address of a parameter's first element in host storage.
  [[nodiscard]] virtual const std::byte* on_host(ParamId param) const = 0;
  /// Returns the device bytes of chunks that stay between the passes, of all models.
  [[nodiscard]] virtual std::size_t lasting_bytes() const = 0;
};

/// Parts of a session that bring its experts to the device. All outlive what uses them.
struct ExpertParts {
  ExpertModel& model;
  const ChunkLayout& layout;
  const Ledger& device;
  NonModelMemory& nonmodel;
  CopyEngine& copies;
  const SessionDevice& compute;
  TakeDeviceMemory take;
};

}  // namespace castor
