#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "torch/chunk_storages.h"
#include "torch/optimizer_state.h"
#include "torch/param_gradient.h"
#include "torch/tensor_gate.h"

namespace castor {

/// Keeps parameters in their chunks. A user may give a parameter other memory at any time
/// (`p.data = values`, `p.set_(values)`), as vector_to_parameters and averages that are swapped in
/// do. take_up() writes what it has by then into the chunk, where it lies from then on:
///
/// - Tensors that were over the parameter's old memory (a backup of `p.data`) keep the old values,
///   in memory of their own.
/// - Tensors over the memory that it was given go with it into the chunk, if that is a storage of
///   just the parameter's size.
///
/// Owned by the session. One thread at a time runs take_up(), the one that runs the model;
/// aliased() and rebound() may be called from any.
class ParamMemory {
 public:
  /// Has the parameter's memory in the chunk there, for who reads it, until what it gives goes.
  using Visit = std::function<std::shared_ptr<void>(ParamId)>;
  /// All outlive this. Once all parameters lie in chunks.
  ParamMemory(const ChunkLayout& layout, std::span<const ParamHandle> params,
              ChunkStorages& storages, OptimizerState& state, Visit visit);

  /// Whether the tensor, of that type, is all of an ordinary storage of torch's, in the order in
  /// which geometry_of() has its elements in the chunk.
  [[nodiscard]] static bool fills_storage(const at::Tensor& tensor, at::ScalarType type);

  /// From now on the gate holds readers of the parameters back, and writes to them are seen.
  /// `others[i]`: how many tensors besides the parameter i are over its memory already.
  void watch(TensorGate& gate, std::span<const std::size_t> others);

  /// The parameter lies in its chunk afterwards. Costs next to nothing where it does already.
  /// Throws UsageError where its memory cannot be the chunk's: its shape, type or device is
  /// another, or others share it; the parameter is as it was then.
  void take_up(ParamId param) {
    if (!in_place(param)) {
      take_up_values(param);
    }
  }
  void take_up_all();
  /// Calls take_up_all if a tensor of a chunk was given other memory since the last call.
  void take_up_given();

  /// Whether one of the chunk's parameters has other memory.
  [[nodiscard]] bool rebound(ChunkId chunk) const;
  /// Whether somebody else refers to the parameter's memory in the chunk.
  [[nodiscard]] bool aliased(ParamId param) const;

 private:
  [[nodiscard]] bool in_place(ParamId param) const noexcept;
  [[nodiscard]] std::string named(ParamId param) const;
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
  std::vector<std::size_t> positions_;     // ... in the gate's group
  std::vector<std::size_t> uses_;          // ... of its storage, by castor
  std::uint64_t num_given_ = 0;            // num_given_memory() at the last take_up_given()
};

}  // namespace castor
