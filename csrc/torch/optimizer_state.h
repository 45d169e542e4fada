#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/chunk_copies.h"
#include "store/rank_states.h"
#include "store/state_store.h"
#include "store/state_values.h"
#include "torch/chunk_storages.h"
#include "torch/param_gradient.h"

namespace castor {

/// The StateValues of the parameters as tensors: how they are given, shown and saved. Owned by the
/// session. Threads as for StateValues.
///
/// With several ranks, each keeps its shard. Functions that return values (master, read) bring all
/// shards together: every rank calls them for the same parameter, or answers by RankStates::serve.
/// Functions that take values are given the same on every rank.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class OptimizerState {
 public:
  /// All arguments outlive this. `params` are in ParamId order. `ranks`: nullptr for a process that
  /// is alone.
  OptimizerState(ChunkManager& manager, const ShardMap& shards, StateStore& places,
                 std::span<const ParamHandle> params, Executor& executor,
                 std::shared_ptr<const UpdateRule> rule, const ChunkCopies& copies,
                 RankStates* ranks);

  [[nodiscard]] const StateValues& values() const noexcept { return values_; }
  [[nodiscard]] const StateStore& places() const noexcept { return places_; }

  /// Gives the parameter values, of any floating-point type and device: writes the master and, with
  /// the update's own rounding, the parameter's host storage. `values` overlap none of the
  /// parameter's payloads, or all of one.
  void adopt(ParamId param, const at::Tensor& values);
  /// Gives the master its exact values and leaves the parameter as it is; in split formats the
  /// parameter remains the master's upper half. Returns false for a parameter without a master.
  bool set_master(ParamId param, const at::Tensor& values);
  /// Gives the states in memory their first values, zeros. Called after the parameters have their
  /// values and their old memory has been given back: the pages of a payload are not there before
  /// something touches them.
  void zero();

  /// Prepares for user code that is about to replace the parameter by `values`, of its shape:
  /// elements that will change become their own masters. No effect in kFp32, which sees the change
  /// by itself. Throws UsageError where operators may not change the parameter.
  void before_overwrite(ParamId param, const at::Tensor& values);

  /// Returns the rule's states of a trainable parameter as views of its payloads. They have the
  /// parameter's shape, or (blocks, width), and are float32, bfloat16 or, for 8-bit codes, uint8.
  /// Empty where StateStore::shown() is false.
  [[nodiscard]] std::vector<at::Tensor> views(ParamId param) const;
  /// Returns the fp32 master as a view of its payload. Returns nullopt where the master is kept
  /// otherwise, for fp32 parameters, which are their own master, and for frozen ones.
  [[nodiscard]] std::optional<at::Tensor> master_view(ParamId param) const;
  /// Returns the fp32 values of a trainable 16-bit parameter: master_view() where there is one,
  /// else a copy.
  [[nodiscard]] std::optional<at::Tensor> master(ParamId param) const {
    return master(param, [&] { return on_host(param); });
  }

  /// Returns copies of the rule's states on the host, in the types of the views, for a parameter of
  /// any chunk.
  [[nodiscard]] std::vector<at::Tensor> read(ParamId param) const;
  /// Writes the rule's states, from tensors as read() returns them. Throws InvalidArgument where
  /// they differ from those in number, shape, strides or type.
  void write(ParamId param, std::span<const at::Tensor> states);

  // For a save, from any thread: the snapshot of the time when the save began. These functions read
  // the copies that were made of a chunk, or the chunk where it is. They go past the gate, which
  // may be closed for an update that waits for this save; ChunkReads holds back whatever would
  // write.
  /// Returns the parameter as it is between steps: a view, or a copy of what lies on NVMe. Requires
  /// that no device slot has newer values. With several ranks, throws Error where only this rank's
  /// piece was copied.
  [[nodiscard]] at::Tensor saved_weights(ParamId param) const;
  /// Returns the rule's states: those of views() or, where there are none, of read().
  [[nodiscard]] std::vector<at::Tensor> saved_states(ParamId param) const;
  /// Returns what master() does, for the parameter of saved_weights().
  [[nodiscard]] std::optional<at::Tensor> saved_master(ParamId param) const;
  /// Returns the piece of the parameter that this rank keeps, of several. The functions below
  /// return the elements of that piece, flat, in the order of the parameter's memory, states and
  /// masters as copies. They ask no other rank.
  [[nodiscard]] Piece saved_piece(ParamId param) const { return shards_.piece(param); }
  [[nodiscard]] at::Tensor saved_weights_of_piece(ParamId param) const;
  [[nodiscard]] std::vector<at::Tensor> saved_states_of_piece(ParamId param) const;
  [[nodiscard]] std::optional<at::Tensor> saved_master_of_piece(ParamId param) const;

 private:
  [[nodiscard]] std::optional<at::Tensor> master(
      ParamId param, const std::function<at::Tensor()>& weights_on_host) const;
  /// Returns the parameter, or a copy where the host does not address it.
  [[nodiscard]] at::Tensor on_host(ParamId param) const;
  [[nodiscard]] ParamGeometry geometry(ParamId param, const StateSpec& spec) const;

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  const ShardMap& shards_;
  StateStore& places_;
  std::span<const ParamHandle> params_;
  const ChunkCopies& copies_;
  const StateValues values_;
};

}  // namespace castor
