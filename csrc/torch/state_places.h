#pragma once

#include <ATen/core/Tensor.h>

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
#include "torch/session_device.h"

namespace castor {

class GradientParts;
class SharedHomes;
class StoredWeights;
class WeightParts;

/// The payloads of a chunk that are an optimizer's: what 16-bit parameters lack of their fp32
/// masters, and the states of its rule, by number.
inline constexpr PayloadKind kMasterPayload = state_payload(0);
inline constexpr PayloadKind kRemainderPayload = state_payload(1);
[[nodiscard]] constexpr PayloadKind rule_payload(std::size_t state) noexcept {
  return state_payload(2 + state);
}
static_assert(2 + kMaxRuleStates <= kMaxStatePayloads);

/// Bytes at which a chunk aligns its parameters for a rule: what it updates together begins with a
/// parameter (docs/design/0012).
[[nodiscard]] std::size_t param_alignment(const UpdateRule* rule, ScalarType precision);

/// What an optimizer keeps of a chunk on each of so many ranks, as messages call it.
[[nodiscard]] std::vector<PayloadSpec> state_payloads(const ChunkSpec& chunk,
                                                      const UpdateRule* rule,
                                                      std::size_t ranks = 1);

/// Where a chunk's payloads lie at the moment, by PayloadKind; nullptr: it has none of that kind.
using ChunkMemory = std::array<std::byte*, kNumPayloadKinds>;

/// Where the bytes of optimizer states are: in payloads beside their chunk's home, or all of a
/// chunk's on NVMe; and how they come into memory that the host addresses. Of several ranks each
/// has its own part of every chunk's (ShardMap). Owned by the session.
/// Calls on different chunks may come from different threads; whoever uses a chunk's memory sees to
/// it that nobody else does.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class StatePlaces {
 public:
  /// Adds the payloads of every chunk with states to `manager`, their contents unspecified, unless
  /// they are `stored`: then chunk i of `stream` has them, by state_payloads, and they begin as
  /// zeros. Throws OutOfMemory; InvalidArgument for a format that the chunks' type does not have,
  /// or a layout without its param_alignment. All outlive this. `stream`: nullptr where nothing is
  /// stored. `weights` has the parameters and gradients that are on NVMe; nullptr: all are in
  /// memory. `homes`: of parameters, that ranks share; nullptr: there are none. `parts`: of
  /// parameters, of which `weights` are the whole; nullptr: they are in one piece. `gradients`:
  /// that are in parts; nullptr: none.
  StatePlaces(ChunkManager& manager, const ShardMap& shards, std::shared_ptr<const UpdateRule> rule,
              std::vector<bool> stored, ChunkStream* stream, StoredWeights* weights,
              const SharedHomes* homes, WeightParts* parts, const GradientParts* gradients,
              const SessionDevice& device);

  /// What the chunk has, in the order of its payloads on NVMe; nothing where it is frozen, or
  /// another optimizer than the rule updates it.
  [[nodiscard]] const std::vector<PayloadKind>& kinds(ChunkId chunk) const {
    return kinds_[index(chunk)];
  }
  [[nodiscard]] bool has(ParamId param, PayloadKind kind) const;
  /// As checkpoints and reports call it: "exp_avg".
  [[nodiscard]] std::string_view name_of(PayloadKind kind) const;

  [[nodiscard]] bool on_device(ChunkId chunk) const { return device_.holds(manager_, chunk); }
  /// Whether the chunk's payloads lie on NVMe: there are no views of them then.
  [[nodiscard]] bool stored(ChunkId chunk) const { return stored_[index(chunk)]; }
  /// Whether this rank has a part of the chunk's parameters, and others the rest.
  [[nodiscard]] bool cut(ChunkId chunk) const noexcept;
  /// Whether something that the chunk's update needs is on NVMe.
  [[nodiscard]] bool stored_in_part(ChunkId chunk) const {
    return stored(chunk) || (manager_.stored(chunk) && !cut(chunk));
  }
  /// Whether there are views of the chunk's payloads: not where they may be now in memory of the
  /// host and now in that of a device, between which a torch tensor cannot move, nor where other
  /// ranks have parts of them.
  [[nodiscard]] bool shown(ChunkId chunk) const {
    return !device_.computes_by_itself() && !stored(chunk) && shards_.ranks() == 1;
  }
  /// What the chunk has on NVMe, with bytes.
  [[nodiscard]] std::vector<std::pair<PayloadKind, std::size_t>> stored_payloads(
      ChunkId chunk) const;
  [[nodiscard]] const SessionDevice& device() const noexcept { return device_; }

  /// Bytes of the parameter's first `numel` elements.
  [[nodiscard]] std::size_t bytes(ParamId param, PayloadKind kind, std::size_t numel) const;
  /// The first element of a parameter, or of its gradient; nullptr when there is none in memory.
  [[nodiscard]] std::byte* element(ParamId param, PayloadKind kind) const;
  /// ... or another one, or a state's that is this rank's, in memory that the others below give.
  [[nodiscard]] std::byte* element(const ChunkMemory& memory, ParamId param, PayloadKind kind,
                                   std::size_t number = 0) const;
  template <typename T>
  [[nodiscard]] T* data(const ChunkMemory& memory, ParamId param, PayloadKind kind,
                        std::size_t number) const {
    return reinterpret_cast<T*>(element(memory, param, kind, number));
  }

  /// Throws UsageError unless operators may change the parameter.
  void check_writable(ParamId param) const;
  /// Around an update of the chunk, which every rank makes: from the first on, whoever reads its
  /// parameters waits for the second. No effect unless cut().
  void begin_update(ChunkId chunk) const;
  void end_update(ChunkId chunk) const;

  using Work = std::function<void(const ChunkMemory&)>;
  /// Calls `work` while the host addresses the chunk's states, or copies of them; and ...
  void with_states(ChunkId chunk, StreamAccess access, const Work& work) const;
  /// ... its parameters and gradients too, to be updated.
  void with_all(ChunkId chunk, const Work& work) const;
  /// Calls `work` with the parameter's first element at home, all of which it overwrites. Where
  /// ranks share homes all overwrite it, and none reads it from before the first does until all
  /// have.
  void with_home(ParamId param, const std::function<void(std::byte*)>& work) const;
  /// Calls `work` with the first element of a parameter that lies in no memory, which is read.
  void with_stored_weights(ParamId param, const std::function<void(const std::byte*)>& work) const;
  /// The chunk's parameters.
  [[nodiscard]] const Payload& weights(ChunkId chunk) const {
    return payload(chunk, PayloadKind::kParam);
  }
  /// Requires that the chunk has one of that kind.
  [[nodiscard]] const Payload& payload(ChunkId chunk, PayloadKind kind) const {
    return *manager_.payload(chunk, kind);
  }
  /// All payloads of a chunk in memory, where they are.
  [[nodiscard]] ChunkMemory in_place(ChunkId chunk) const;
  /// Before the host writes the chunk's home: no copy reads it any more.
  void host_writes_home(ChunkId chunk) const;
  [[nodiscard]] std::vector<std::byte> bytes_of_device(const std::byte* data,
                                                       std::size_t bytes) const;
  void copy_from_device(std::span<const std::byte> bytes, std::byte* target) const;

  /// These chunks will be updated next, in this order: what lies on NVMe is read ahead.
  void announce(std::span<const ChunkId> chunks);
  /// Returns when every change is on NVMe.
  void flush();
  /// Whether a write to NVMe failed since the last discard_stored(): a state is lost.
  [[nodiscard]] bool torn() const noexcept { return stream_ != nullptr && stream_->torn(); }
  /// What lies on NVMe becomes zeros: all of it is about to be loaded, or lost its meaning in a
  /// step that failed. A master of zero becomes its parameter's value in the next update.
  void discard_stored();

 private:
  [[nodiscard]] bool in_part(ChunkId chunk, PayloadKind kind) const noexcept;
  [[nodiscard]] std::byte* part(ChunkId chunk, PayloadKind kind) const;
  void with_copies(ChunkId chunk, StreamAccess access, const Work& work) const;
  void copy_to_device(std::span<const std::byte> bytes, std::byte* target) const;
  void share_home(ParamId param) const;
  void write_parts(ParamId param, std::span<const std::byte> values) const;
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
  const SharedHomes* const homes_;
  WeightParts* const parts_;
  const GradientParts* const gradients_;
  const std::vector<bool> stored_;  // per chunk
  ChunkStream* const stream_;
  std::vector<std::vector<PayloadKind>> kinds_;  // per chunk
};

}  // namespace castor
