#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "torch/chunk_copies.h"
#include "torch/chunk_storages.h"
#include "torch/param_gradient.h"
#include "torch/rank_states.h"
#include "torch/state_places.h"

namespace castor {

/// The values of what the optimizer keeps of each parameter: of 16-bit ones the fp32 master, or the
/// half of it that the parameter does not hold, and the states of its rule; how they are given,
/// shown and taken along. Owned by the session. Calls on different chunks may come from different
/// threads, none beside an update of the chunk.
///
/// Of several ranks each keeps its part. What gives values (master, read) brings those of all
/// together: every rank calls it, for the same parameter, or answers by RankStates::serve. What
/// takes them is given the same on every rank.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class OptimizerState {
 public:
  /// All outlive this. `params` are in ParamId order. `ranks`: nullptr for a process that is alone.
  OptimizerState(ChunkManager& manager, const ShardMap& shards, StatePlaces& places,
                 std::span<const ParamHandle> params, Executor& executor,
                 std::shared_ptr<const UpdateRule> rule, const ChunkCopies& copies,
                 RankStates* ranks);

  /// The format of parameters in the working precision; fp32 ones beside them have kFp32.
  [[nodiscard]] StateFormat format() const noexcept {
    return rule_ ? rule_->format() : StateFormat::kFp32;
  }
  [[nodiscard]] StateFormat format(ParamId param) const;
  [[nodiscard]] const StatePlaces& places() const noexcept { return places_; }
  /// Names of the rule's states, in the order in which `shown` and `read` return them.
  [[nodiscard]] std::vector<std::string> names(ParamId param) const;

  /// Gives the parameter values, of any floating-point type and device: makes the master and, by
  /// the update's own rounding, the home of them. Overlaps none of the parameter's payloads, or all
  /// of one.
  void adopt(ParamId param, const at::Tensor& values);
  /// Gives the master its exact values and leaves the parameter as it is, which in the formats that
  /// have no other upper half is a part of it. False for a parameter without a master.
  bool set_master(ParamId param, const at::Tensor& values);
  /// Gives the states in memory their first values, zeros. After the parameters have their values
  /// and their old memory has been given back: the pages of a payload are not there before
  /// something touches them.
  void zero();

  /// User code has written the chunk on the device; `home` is as the last update left it, `slot` as
  /// it is now. What changed becomes its own master (docs/design/0012).
  void before_write_back(ChunkId chunk, const std::byte* home, const std::byte* slot);
  /// User code is about to replace the parameter by `values`, of its shape: elements that will
  /// change become their own masters. No effect in kFp32, which sees it by itself.
  void before_overwrite(ParamId param, const at::Tensor& values);

  /// The rule's states of a trainable parameter, as views of its payloads: of the parameter's
  /// shape, or (blocks, width); float32, bfloat16 or, for 8-bit codes, uint8. Empty where
  /// StatePlaces::shown() is false.
  [[nodiscard]] std::vector<at::Tensor> views(ParamId param) const;
  /// The fp32 master as a view of its payload; nullopt where it is kept otherwise, for fp32
  /// parameters, which are their own master, and for frozen ones.
  [[nodiscard]] std::optional<at::Tensor> master_view(ParamId param) const;
  /// The fp32 values of a trainable 16-bit parameter: master_view where there is one, else a copy.
  [[nodiscard]] std::optional<at::Tensor> master(ParamId param) const {
    return master(param, [&] { return on_host(param); });
  }

  /// Of any chunk's parameter, on the host: copies of the rule's states, in the types of the views.
  [[nodiscard]] std::vector<at::Tensor> read(ParamId param) const;
  /// The way back, of the tensors that read gives.
  void write(ParamId param, std::span<const at::Tensor> states);

  // For a save, from any thread, of the moment when it began: read from the copies that were made
  // of a chunk, or where it is, past the gate, which may be closed for an update that waits for
  // this save (ChunkReads holds back whatever would write).
  /// The parameter at its home: a view, or a copy of what lies on NVMe. No device has newer values.
  /// Of several ranks: throws Error where there is but a copy of this one's piece.
  [[nodiscard]] at::Tensor saved_weights(ParamId param) const;
  /// views, or where there are none read.
  [[nodiscard]] std::vector<at::Tensor> saved_states(ParamId param) const;
  /// As master, of the parameter at its home.
  [[nodiscard]] std::optional<at::Tensor> saved_master(ParamId param) const;
  /// Of several ranks what this one keeps: the elements of its piece, flat, in the order of the
  /// parameter's memory; states and masters as copies. Asks no other rank.
  [[nodiscard]] Piece saved_piece(ParamId param) const { return shards_.piece(param); }
  [[nodiscard]] at::Tensor saved_weights_of_piece(ParamId param) const;
  [[nodiscard]] std::vector<at::Tensor> saved_states_of_piece(ParamId param) const;
  [[nodiscard]] std::optional<at::Tensor> saved_master_of_piece(ParamId param) const;

 private:
  [[nodiscard]] std::optional<at::Tensor> master(
      ParamId param, const std::function<at::Tensor()>& weights_on_host) const;
  /// The parameter, or a copy where the host does not address it.
  [[nodiscard]] at::Tensor on_host(ParamId param) const;
  [[nodiscard]] bool has_master(ParamId param) const {
    return places_.has(param, kMasterPayload) || places_.has(param, kRemainderPayload);
  }
  void write_master(const ChunkMemory& memory, ParamId param, std::size_t begin,
                    const at::Tensor& exact) const;
  [[nodiscard]] bool copied(ParamId param) const { return copies_.has(layout_.place(param).chunk); }
  void with_state(ParamId param, PayloadKind kind,
                  const std::function<void(const std::byte*)>& use) const;
  [[nodiscard]] std::span<const StateSpec> specs(ParamId param) const;
  [[nodiscard]] ParamGeometry geometry(ParamId param, const StateSpec& spec) const;

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  const ShardMap& shards_;
  StatePlaces& places_;
  std::span<const ParamHandle> params_;
  Executor& executor_;
  const std::shared_ptr<const UpdateRule> rule_;
  const ChunkCopies& copies_;
  RankStates* const ranks_;
};

}  // namespace castor
