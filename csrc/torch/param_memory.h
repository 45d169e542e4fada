#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "torch/chunk_storages.h"
#include "torch/optimizer_state.h"
#include "torch/param_gradient.h"
#include "torch/tensor_gate.h"

namespace castor {

/// Keeper of parameters in their chunks. A user may give a parameter other memory at any time
/// (`p.data = values`, `p.set_(values)`), as vector_to_parameters and averages that are swapped in
/// do. take_up() writes the parameter's values into the chunk, where the parameter lies from then
/// on:
///
/// - Tensors that were over the parameter's old memory (a backup of `p.data`) keep the old values,
///   in memory of their own.
/// - Tensors over the memory that the parameter was given go with it into the chunk, if that memory
///   is a storage of just the parameter's size.
///
/// Owned by the session. One thread at a time runs take_up(), the one that runs the model; any
/// thread may call aliased() and rebound().
class ParamMemory {
 public:
  /// Function that brings the parameter's chunk into memory for a reader, and keeps it there until
  /// the object that it returns goes.
  using Visit = std::function<std::shared_ptr<void>(ParamId)>;
  /// Made once all parameters lie in chunks. All arguments outlive this.
  ParamMemory(const ChunkLayout& layout, std::span<const ParamHandle> params,
              ChunkStorages& storages, OptimizerState& state, Visit visit);

  /// Returns whether the tensor has that type and is all of an ordinary storage of torch's, in the
  /// order in which geometry_of() has its elements in the chunk.
  [[nodiscard]] static bool fills_storage(const at::Tensor& tensor, at::ScalarType type);

  /// Starts to hold readers of the parameters back by the gate, and to see writes to them.
  /// `others[i]`: number of tensors besides parameter i that are over its memory already.
  void watch(TensorGate& gate, std::span<const std::size_t> others);

  /// Puts the parameter into its chunk; costs next to nothing where it lies there already. Throws
  /// UsageError where its memory cannot be the chunk's: its shape, type or device is another, or
  /// others share the memory. In that case the parameter stays as it was.
  void take_up(ParamId param) {
    if (!in_place(param)) {
      take_up_values(param);
    }
  }
  void take_up_all();
  /// Calls take_up_all() if a tensor of a chunk was given other memory since the last call.
  void take_up_given();

  /// Returns whether one of the chunk's parameters has other memory.
  [[nodiscard]] bool rebound(ChunkId chunk) const;
  /// Returns whether somebody else refers to the parameter's memory in the chunk.
  [[nodiscard]] bool aliased(ParamId param) const;

 private:
  [[nodiscard]] bool in_place(ParamId param) const noexcept;
  [[nodiscard]] at::ScalarType type(ParamId param) const {
    return to_torch(layout_.param(param).type);
  }
  void take_up_values(ParamId param);
  void check(ParamId param) const;
  void check_memory(ParamId param, const c10::Storage& given) const;
  void leave_to_holders(ParamId param);
  void write(ParamId param, const at::Tensor& values);
  void lay_in_chunk(ParamId param);
  [[nodiscard]] bool adoptable(ParamId param, const at::Tensor& values) const;

  const ChunkLayout& layout_;
  const std::span<const ParamHandle> params_;
  ChunkStorages& storages_;
  OptimizerState& state_;
  const Visit visit_;
  TensorGate* gate_ = nullptr;
  std::vector<ParamGeometry> geometries_;  // per parameter
  std::vector<std::size_t> positions_;     // per parameter: place in the gate's group
  std::vector<std::size_t> uses_;          // per parameter: castor's own references to its storage
  std::uint64_t num_given_ = 0;            // num_given_memory() at the last take_up_given()
};

}  // namespace castor
