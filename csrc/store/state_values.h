#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/executor.h"
#include "store/chunk_copies.h"
#include "store/rank_states.h"
#include "store/state_store.h"

namespace castor {

/// Values that the optimizer keeps of each parameter, as bytes: the states of its update rule and,
/// for 16-bit parameters, the fp32 master, or the half of it that the parameter does not hold.
/// Owned by OptimizerState, which shows them as tensors. Calls on different chunks may come from
/// different threads, none beside an update of the chunk.
///
/// With several ranks, each keeps its shard. Functions that take values write this rank's elements
/// of them. For chunks on NVMe every call may throw IoError or CorruptionError.
class StateValues {
 public:
  /// All arguments outlive this. `rule`: nullptr: another optimizer updates the parameters.
  /// `ranks`: nullptr for a process that is alone.
  StateValues(ChunkManager& manager, const ShardMap& shards, StateStore& places, Executor& executor,
              std::shared_ptr<const UpdateRule> rule, const ChunkCopies& copies, RankStates* ranks);

  /// Returns the format of parameters in the working precision; fp32 ones beside them have kFp32.
  [[nodiscard]] StateFormat format() const noexcept {
    return rule_ ? rule_->format() : StateFormat::kFp32;
  }
  [[nodiscard]] StateFormat format(ParamId param) const;
  /// Returns the rule's states of a parameter.
  [[nodiscard]] std::span<const StateSpec> specs(ParamId param) const;
  /// Returns the names of the rule's states, in the order of specs().
  [[nodiscard]] std::vector<std::string> names(ParamId param) const;
  [[nodiscard]] bool has_master(ParamId param) const {
    return has_full_master(param) || places_.has(param, kRemainderPayload);
  }
  /// Returns whether the master is kept in one piece, and not as what the parameter lacks of it.
  [[nodiscard]] bool has_full_master(ParamId param) const {
    return places_.has(param, kMasterPayload);
  }
  /// Returns whether a save has a copy of the parameter's chunk.
  [[nodiscard]] bool copied(ParamId param) const { return copies_.has(layout_.place(param).chunk); }
  /// Calls `work` while the host addresses the states of the parameter's chunk, to change them.
  void edit(ParamId param, const StateStore::Work& work) const {
    places_.with_states(layout_.place(param).chunk, StreamAccess::kEdit, work);
  }

  /// Writes masters: `exact` are fp32 values from the parameter's element `begin` on.
  void write_master(const ChunkMemory& memory, ParamId param, std::size_t begin,
                    std::span<const float> exact) const;
  /// Writes a parameter in its host storage, rounded by the update's own rounding.
  void write_rounded(std::byte* host, ParamId param, std::size_t begin,
                     std::span<const float> exact) const;
  /// Writes the rule's states in full, each as its bytes.
  void write(ParamId param, std::span<const std::byte* const> states) const;
  /// Gives the states in memory their first values, zeros. Calls `zero` for payloads on a device.
  void zero(const std::function<void(const Payload&)>& zero) const;
  /// Takes up what user code has written into the chunk on the device: `host` is as the last update
  /// left it, `slot` as it is now. Elements that changed become their own masters
  /// (docs/design/0012).
  void before_write_back(ChunkId chunk, const std::byte* host, const std::byte* slot) const;
  /// Same for a parameter that changes from `before` to `after`, in the order of its memory.
  void forget_changed(ParamId param, const void* before, const void* after) const;
  /// Returns whether the parameter has masters on this rank that such a change concerns.
  [[nodiscard]] bool splits_master(ParamId param) const {
    return places_.has(param, kRemainderPayload) && shards_.piece(param).numel > 0;
  }

  /// Reads a state in full, of all ranks, into memory of its size.
  void read(ParamId param, std::size_t state, void* target) const;
  /// Reads the master in full, of `numel` elements. `weights`: the parameter's values.
  void read_master(ParamId param, std::size_t numel, const void* weights, float* target) const;
  /// Reads this rank's piece of each of the rule's states into the memory that `target` gives for a
  /// state and its bytes.
  void read_pieces(ParamId param,
                   const std::function<void*(std::size_t state, std::size_t bytes)>& target) const;
  /// Reads this rank's piece of the master, which is not empty. `weights`: the parameter's values
  /// there.
  void read_master_piece(ParamId param, const void* weights, float* target) const;

 private:
  void with_full(ParamId param, PayloadKind kind,
                 const std::function<void(const std::byte*)>& use) const;
  void join(float* masters, const void* weights, const void* remainders, std::size_t numel) const;

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  const ShardMap& shards_;
  StateStore& places_;
  Executor& executor_;
  const std::shared_ptr<const UpdateRule> rule_;
  const ChunkCopies& copies_;
  RankStates* const ranks_;
};

}  // namespace castor
