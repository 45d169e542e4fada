#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/chunk_manager.h"
#include "optim/adam.h"

namespace castor {

/// What the optimizer keeps of each parameter besides the parameter itself: the fp32 master of
/// 16-bit ones and Adam's moments, in payloads beside the chunk's home. Owned by the session. Calls
/// on different chunks may come from different threads; a chunk's update may not overlap anything
/// else that touches the chunk.
class OptimizerState {
 public:
  /// Adds the payloads of every trainable chunk to `manager`; moments only `with_moments`. Throws
  /// OutOfMemory. All three outlive this. `params` are in ParamId order.
  OptimizerState(ChunkManager& manager, std::span<const at::Tensor> params, Executor& executor,
                 bool with_moments);

  /// The parameter's first values, of any floating-point type: makes the master and, by Adam's own
  /// rounding, the home of them.
  void adopt(ParamId param, const at::Tensor& values);
  /// After the parameters, each of which gave its old memory back: the pages of a payload are not
  /// there before something touches them, so that memory never holds old parameters and moments at
  /// once.
  void zero_moments();

  /// The parameter's update at its step, which counts from 1; its gradient is in its payload.
  /// Throws as AdamCoefficients does.
  [[nodiscard]] AdamSegment segment(ParamId param, const AdamOptions& options, std::int64_t step,
                                    double grad_scale) const;

  /// The parameter's first element in a payload of its chunk; nullptr when there is none.
  [[nodiscard]] std::byte* element(ParamId param, PayloadKind kind) const;
  /// {exp_avg, exp_avg_sq} of a trainable parameter, as views of its payloads.
  [[nodiscard]] std::vector<at::Tensor> moments(ParamId param) const;
  /// The fp32 values of a trainable 16-bit parameter, as a view of its payload; nullopt for fp32
  /// parameters, which are their own master, and for frozen ones.
  [[nodiscard]] std::optional<at::Tensor> master(ParamId param) const;

 private:
  void add_payloads(bool with_moments);
  [[nodiscard]] std::size_t element_bytes(ChunkId chunk, PayloadKind kind) const;
  [[nodiscard]] std::optional<at::Tensor> view(ParamId param, PayloadKind kind) const;
  template <typename T>
  [[nodiscard]] T* data(ParamId param, PayloadKind kind) const {
    return reinterpret_cast<T*>(element(param, kind));
  }

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  std::span<const at::Tensor> params_;
  Executor& executor_;
};

}  // namespace castor
