#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/chunk_manager.h"
#include "core/shard_map.h"
#include "io/chunk_stream.h"
#include "io/nvme_tier.h"
#include "optim/update_rule.h"
#include "store/session_device.h"

namespace castor {

class GradientShards;
class SharedHostStorage;
class StoredWeights;
class WeightShards;

/// Numbers of the payloads that an optimizer keeps of a chunk: what 16-bit parameters lack of their
/// fp32 masters, then the states of its rule.
inline constexpr PayloadKind kMasterPayload = state_payload(0);
inline constexpr PayloadKind kRemainderPayload = state_payload(1);
[[nodiscard]] constexpr PayloadKind rule_payload(std::size_t state) noexcept {
  return state_payload(2 + state);
}
static_assert(2 + kMaxRuleStates <= kMaxStatePayloads);

/// Returns the bytes at which a chunk aligns its parameters for a rule: elements that the rule
/// updates together begin with a parameter (docs/design/0012).
[[nodiscard]] std::size_t param_alignment(const UpdateRule* rule, ScalarType precision);

/// Returns the payloads that an optimizer keeps of a chunk on each of `ranks` ranks, named as
/// messages call them.
[[nodiscard]] std::vector<PayloadSpec> state_payloads(const ChunkSpec& chunk,
                                                      const UpdateRule* rule,
                                                      std::size_t ranks = 1);

/// Current addresses of a chunk's payloads, by PayloadKind; nullptr: it has none of that kind.
using ChunkMemory = std::array<std::byte*, kNumPayloadKinds>;

/// Store of the optimizer states: in payloads beside their chunk's host storage, or all of a
/// chunk's on NVMe. Brings the states into memory that the host addresses. With several ranks each
/// has its own shard of every chunk's states (ShardMap). Owned by the session.
/// Calls on different chunks may come from different threads; whoever uses a chunk's memory makes
/// sure that nobody else does.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class StateStore {
 public:
  /// Adds the payloads of every chunk with states to `manager`, their contents unspecified. If the
  /// chunk is `stored`, chunk i of `stream` has them instead, by state_payloads, and they begin as
  /// zeros. All arguments outlive this.
  ///
  /// - `stream`: nullptr where nothing is stored.
  /// - `weights`: parameters and gradients that are on NVMe, or the full parameters of
  ///   `weight_shards`; nullptr: all are in memory.
  /// - `shared_storage`: host storage of parameters that ranks share; nullptr: there is none.
  /// - `weight_shards`: the shards of parameters; nullptr: parameters are not sharded.
  /// - `gradients`: the sharded gradients; nullptr: there are none.
  ///
  /// Throws OutOfMemory; InvalidArgument for a format that the chunks' type does not have, or a
  /// layout without its param_alignment.
  StateStore(ChunkManager& manager, const ShardMap& shards, std::shared_ptr<const UpdateRule> rule,
             std::vector<bool> stored, ChunkStream* stream, StoredWeights* weights,
             const SharedHostStorage* shared_storage, WeightShards* weight_shards,
             const GradientShards* gradients, const SessionDevice& device);

  /// Returns the kinds of state that the chunk has, in the order of its payloads on NVMe; none
  /// where it is frozen, or another optimizer than the rule updates it.
  [[nodiscard]] const std::vector<PayloadKind>& kinds(ChunkId chunk) const {
    return kinds_[index(chunk)];
  }
  [[nodiscard]] bool has(ParamId param, PayloadKind kind) const;
  /// Returns the name of a kind in checkpoints and reports: "exp_avg".
  [[nodiscard]] std::string_view name_of(PayloadKind kind) const;

  [[nodiscard]] bool on_device(ChunkId chunk) const { return device_.holds(manager_, chunk); }
  /// Returns whether the chunk's states lie on NVMe; then there are no views of them.
  [[nodiscard]] bool stored(ChunkId chunk) const { return stored_[index(chunk)]; }
  /// Returns whether the chunk's parameters are sharded, with one shard on this rank.
  [[nodiscard]] bool sharded(ChunkId chunk) const noexcept;
  /// Returns whether something that the chunk's update needs is on NVMe.
  [[nodiscard]] bool partly_stored(ChunkId chunk) const {
    return stored(chunk) || (manager_.stored(chunk) && !sharded(chunk));
  }
  /// Returns whether there are views of the chunk's states. There are none in these cases:
  /// - The states may move between the host and a device; a torch tensor cannot.
  /// - The states lie on NVMe.
  /// - Other ranks have shards of them.
  [[nodiscard]] bool shown(ChunkId chunk) const {
    return !device_.computes_by_itself() && !stored(chunk) && shards_.ranks() == 1;
  }
  /// Returns the kinds of state that the chunk has on NVMe, with their bytes.
  [[nodiscard]] std::vector<std::pair<PayloadKind, std::size_t>> stored_payloads(
      ChunkId chunk) const;
  [[nodiscard]] const SessionDevice& device() const noexcept { return device_; }

  /// Returns the bytes of the parameter's first `numel` elements.
  [[nodiscard]] std::size_t bytes(ParamId param, PayloadKind kind, std::size_t numel) const;
  /// Returns the address of the first element of a parameter, or of its gradient; nullptr when it
  /// is in no memory.
  [[nodiscard]] std::byte* element(ParamId param, PayloadKind kind) const;
  /// Returns the address of element `number` of a parameter, of its gradient, or of a state whose
  /// element is in this rank's shard. `memory` comes from the functions below.
  [[nodiscard]] std::byte* element(const ChunkMemory& memory, ParamId param, PayloadKind kind,
                                   std::size_t number = 0) const;
  template <typename T>
  [[nodiscard]] T* data(const ChunkMemory& memory, ParamId param, PayloadKind kind,
                        std::size_t number) const {
    return reinterpret_cast<T*>(element(memory, param, kind, number));
  }

  /// Throws UsageError unless operators may change the parameter.
  void check_writable(ParamId param) const;
  /// Begins an update of the chunk, which every rank makes: whoever reads its parameters from now
  /// on waits for end_update. No effect unless sharded().
  void begin_update(ChunkId chunk) const;
  void end_update(ChunkId chunk) const;

  using Work = std::function<void(const ChunkMemory&)>;
  /// Calls `work` while the host addresses the chunk's states, or copies of them.
  void with_states(ChunkId chunk, StreamAccess access, const Work& work) const;
  /// Same as with_states, but `work` gets the chunk's parameters and gradients too, to be updated.
  void with_all(ChunkId chunk, const Work& work) const;
  /// Calls `work` with the address of the parameter's first element in its host storage; `work`
  /// overwrites the full parameter. Where ranks share host storage, all of them overwrite it. No
  /// rank reads it from before the first does so until all have.
  void with_host_storage(ParamId param, const std::function<void(std::byte*)>& work) const;
  /// Reads a parameter that lies in no memory, and calls `work` with the address of its first
  /// element.
  void with_stored_weights(ParamId param, const std::function<void(const std::byte*)>& work) const;
  /// Returns the payload of the chunk's parameters.
  [[nodiscard]] const Payload& weights(ChunkId chunk) const {
    return payload(chunk, PayloadKind::kParam);
  }
  /// Returns the chunk's payload of a kind. Requires that the chunk has one.
  [[nodiscard]] const Payload& payload(ChunkId chunk, PayloadKind kind) const {
    return *manager_.payload(chunk, kind);
  }
  /// Returns the addresses of all payloads of a chunk that are in memory.
  [[nodiscard]] ChunkMemory in_place(ChunkId chunk) const;
  /// Waits until no copy reads the chunk's host storage any more. To be called before the host
  /// writes it.
  void await_host_storage_reads(ChunkId chunk) const;
  /// Returns a copy of bytes that are in the device's memory.
  [[nodiscard]] std::vector<std::byte> bytes_of_device(const std::byte* data,
                                                       std::size_t bytes) const;

  /// Announces the chunks that will be updated next, in this order: starts to read ahead what lies
  /// on NVMe.
  void announce(std::span<const ChunkId> chunks);
  /// Waits until every change is on NVMe.
  void flush();
  /// Returns whether a write to NVMe failed since the last discard_stored(): a state is lost.
  [[nodiscard]] bool torn() const noexcept { return stream_ != nullptr && stream_->torn(); }
  /// Sets all states on NVMe to zeros, because they are about to be loaded, or lost their meaning
  /// in a step that failed. A master of zero becomes its parameter's value in the next update.
  void discard_stored();

 private:
  [[nodiscard]] bool in_shard(ChunkId chunk, PayloadKind kind) const noexcept;
  [[nodiscard]] std::byte* shard(ChunkId chunk, PayloadKind kind) const;
  void with_copies(ChunkId chunk, StreamAccess access, const Work& work) const;
  void share_host_storage(ParamId param) const;
  void write_shards(ParamId param, std::span<const std::byte> values) const;
  [[nodiscard]] ChunkMemory resident(ChunkId chunk) const;
  [[nodiscard]] ChunkMemory with_weights(ChunkId chunk, ChunkMemory memory) const;
  void check_format(ChunkId chunk) const;
  void make_payloads();
  [[nodiscard]] std::size_t payload_bytes(ChunkId chunk, PayloadKind kind) const;

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  const ShardMap& shards_;
  const std::shared_ptr<const UpdateRule> rule_;
  const SessionDevice& device_;
  StoredWeights* const weights_;
  const SharedHostStorage* const shared_storage_;
  WeightShards* const weight_shards_;
  const GradientShards* const gradients_;
  const std::vector<bool> stored_;  // per chunk
  ChunkStream* const stream_;
  std::vector<std::vector<PayloadKind>> kinds_;  // per chunk
};

}  // namespace castor
