#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/chunk_manager.h"
#include "optim/adam.h"
#include "optim/state_format.h"

namespace castor {

struct OptimizerStateOptions {
  /// Other formats than kFp32 are for bf16 parameters.
  StateFormat format = StateFormat::kFp32;
  /// Whether Adam's moments get payloads; false when another optimizer updates the parameters.
  bool moments = true;
};

/// Bytes at which a chunk aligns its parameters for a format: blocks of quantised moments begin
/// with a parameter (docs/design/0012).
[[nodiscard]] std::size_t param_alignment(StateFormat format, ScalarType precision);

/// What the optimizer keeps of each parameter besides the parameter itself, in payloads beside the
/// chunk's home: Adam's moments, and of 16-bit parameters the fp32 master, or the half of it that
/// the parameter does not hold. Owned by the session. Calls on different chunks may come from
/// different threads; a chunk's update may not overlap anything else that touches the chunk.
class OptimizerState {
 public:
  /// Adds the payloads of every trainable chunk to `manager`, their contents unspecified. Throws
  /// OutOfMemory; InvalidArgument for a format that the chunks' type does not have, or a layout
  /// without its param_alignment. All outlive this. `params` are in ParamId order.
  OptimizerState(ChunkManager& manager, std::span<const at::Tensor> params, Executor& executor,
                 const OptimizerStateOptions& options);

  [[nodiscard]] StateFormat format() const noexcept { return format_; }

  /// Gives the parameter values, of any floating-point type: makes the master and, by Adam's own
  /// rounding, the home of them. Overlaps none of the parameter's payloads, or all of one.
  void adopt(ParamId param, const at::Tensor& values);
  /// Gives the master its exact values and leaves the parameter as it is, which in the formats that
  /// have no other upper half is a part of it. False for a parameter without a master.
  bool set_master(ParamId param, const at::Tensor& values);
  /// Zeroes every moment. After the parameters have their values and their old memory has been
  /// given back: the pages of a payload are not there before something touches them.
  void zero_moments();

  /// What the stochastic rounding depends on: `streams[i]` tells parameter i apart from the others.
  void set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams);
  /// The parameter's update at its step, which counts from 1; its gradient is in its payload. What
  /// it gives does not depend on when, in which order and with which others it runs. Throws as
  /// AdamCoefficients does.
  [[nodiscard]] AdamSegment segment(ParamId param, const AdamOptions& options, std::int64_t step,
                                    double grad_scale) const;

  /// User code has written the chunk on the device; `home` is as the last update left it, `slot` as
  /// it is now. What changed becomes its own master (docs/design/0012).
  void before_write_back(ChunkId chunk, const std::byte* home, const std::byte* slot);
  /// User code is about to replace the parameter by `values`, of its shape: elements that will
  /// change become their own masters. No effect in kFp32, which sees it by itself.
  void before_overwrite(ParamId param, const at::Tensor& values);

  /// The parameter's first element in a payload of its chunk; nullptr when there is none.
  [[nodiscard]] std::byte* element(ParamId param, PayloadKind kind) const;
  /// {exp_avg, exp_avg_sq} of a trainable parameter, as views of its payloads: float32, bfloat16
  /// or, for 8-bit codes, uint8.
  [[nodiscard]] std::vector<at::Tensor> moments(ParamId param) const;
  /// float32 of shape (blocks, 2), a view of the payload; nullopt in formats without blocks.
  [[nodiscard]] std::optional<at::Tensor> moment_scales(ParamId param) const;
  /// The fp32 master as a view of its payload; nullopt where it is kept otherwise, for fp32
  /// parameters, which are their own master, and for frozen ones.
  [[nodiscard]] std::optional<at::Tensor> master_view(ParamId param) const;
  /// The fp32 values of a trainable 16-bit parameter: master_view where there is one, else a copy.
  [[nodiscard]] std::optional<at::Tensor> master(ParamId param) const;

 private:
  void add_payloads(ChunkId chunk, bool moments);
  [[nodiscard]] std::size_t payload_bytes(ChunkId chunk, PayloadKind kind, std::size_t numel) const;
  [[nodiscard]] at::Tensor view(ParamId param, PayloadKind kind, at::ScalarType type) const;
  template <typename T>
  [[nodiscard]] T* data(ParamId param, PayloadKind kind) const {
    return reinterpret_cast<T*>(element(param, kind));
  }

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  std::span<const at::Tensor> params_;
  Executor& executor_;
  const StateFormat format_;
  std::uint64_t seed_ = 0;
  std::vector<std::uint64_t> streams_;
};

}  // namespace castor
