#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/chunk_manager.h"
#include "io/nvme_tier.h"
#include "optim/adam.h"
#include "torch/chunk_storages.h"
#include "torch/device_backend.h"
#include "torch/optimizer_state_options.h"

namespace castor {

class StoredWeights;

/// Bytes at which a chunk aligns its parameters for a format: blocks of quantised moments begin
/// with a parameter (docs/design/0012).
[[nodiscard]] std::size_t param_alignment(StateFormat format, ScalarType precision);

/// Bytes of each payload that the optimizer keeps of a chunk.
[[nodiscard]] std::vector<std::size_t> state_payload_bytes(const ChunkSpec& chunk,
                                                           const OptimizerStateOptions& options);

/// One parameter's Adam step; its gradient is in its payload.
struct ParamUpdate {
  ParamId param{};
  AdamCoefficients coefficients;
  RoundingKey rounding;
};

/// What the optimizer keeps of each parameter besides the parameter itself, in payloads of its
/// chunk: Adam's moments, and of 16-bit parameters the fp32 master, or the half of it that the
/// parameter does not hold. A chunk's payloads lie beside its home, or all on NVMe. Owned by the
/// session. Calls on different chunks may come from different threads; a chunk's update may not
/// overlap anything else that touches the chunk.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class OptimizerState {
 public:
  /// Adds the payloads of every trainable chunk to `manager`, their contents unspecified, or makes
  /// them on NVMe, where they begin as zeros. Throws OutOfMemory; InvalidArgument for a format that
  /// the chunks' type does not have, or a layout without its param_alignment; what NvmeTier does.
  /// All outlive this. `params` are in ParamId order. `weights` has the parameters and gradients
  /// that are on NVMe; nullptr: all are in memory.
  OptimizerState(ChunkManager& manager, std::span<const at::Tensor> params, Executor& executor,
                 const OptimizerStateOptions& options, StoredWeights* weights = nullptr);

  [[nodiscard]] StateFormat format() const noexcept { return format_; }
  /// Whether the chunk's payloads lie in memory of a device that updates them itself: what it is
  /// given to do is behind what it has been given before, by the calling thread.
  [[nodiscard]] bool on_device(ChunkId chunk) const {
    return device_ != nullptr &&
           manager_.payload(chunk, PayloadKind::kParam)->tier() == TierKind::kDevice;
  }
  /// Whether the chunk's payloads lie on NVMe: there are no views of them then.
  [[nodiscard]] bool stored(ChunkId chunk) const { return stored_[index(chunk)]; }
  /// Whether there are views of the chunk's payloads: not where they may be now in memory of the
  /// host and now in that of a device, between which a torch tensor cannot move.
  [[nodiscard]] bool shown(ChunkId chunk) const { return device_ == nullptr && !stored(chunk); }
  /// What the chunk has on NVMe, with bytes.
  [[nodiscard]] std::vector<std::pair<PayloadKind, std::size_t>> stored_payloads(
      ChunkId chunk) const;
  /// nullptr where nothing lies on NVMe.
  [[nodiscard]] const NvmeTier* nvme() const noexcept { return nvme_.get(); }

  /// Gives the parameter values, of any floating-point type and device: makes the master and, by
  /// Adam's own rounding, the home of them. Overlaps none of the parameter's payloads, or all of
  /// one.
  void adopt(ParamId param, const at::Tensor& values);
  /// Gives the master its exact values and leaves the parameter as it is, which in the formats that
  /// have no other upper half is a part of it. False for a parameter without a master.
  bool set_master(ParamId param, const at::Tensor& values);
  /// Gives the moments in memory their first values, zeros. After the parameters have their values
  /// and their old memory has been given back: the pages of a payload are not there before
  /// something touches them.
  void zero_moments();

  /// What the stochastic rounding depends on: `streams[i]` tells parameter i apart from the others.
  void set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams);
  /// The parameter's update at its step, which counts from 1. What it gives does not depend on
  /// when, in which order and with which others it runs. Throws as AdamCoefficients does.
  [[nodiscard]] ParamUpdate update_of(ParamId param, const AdamOptions& options, std::int64_t step,
                                      double grad_scale) const;
  /// Runs updates of one chunk. What lies on NVMe may still be on its way there on return.
  void update(ChunkId chunk, std::span<const ParamUpdate> updates);
  /// Runs the updates of every chunk, one entry each; all is on NVMe on return. `num_begun` counts
  /// the chunks that have been changed, also where it throws.
  void update_all(std::span<const std::vector<ParamUpdate>> updates, std::size_t& num_begun);
  /// These chunks will be updated next, in this order: what lies on NVMe is read ahead.
  void announce(std::span<const ChunkId> chunks);
  /// Returns when every change is on NVMe.
  void flush();
  /// Whether a write to NVMe failed since the last discard_stored(): a state is lost.
  [[nodiscard]] bool torn() const noexcept { return nvme_ && nvme_->stream().torn(); }
  /// What lies on NVMe becomes zeros: all of it is about to be loaded, or lost its meaning in a
  /// step that failed. A master of zero becomes its parameter's value in the next update.
  void discard_stored();

  /// User code has written the chunk on the device; `home` is as the last update left it, `slot` as
  /// it is now. What changed becomes its own master (docs/design/0012).
  void before_write_back(ChunkId chunk, const std::byte* home, const std::byte* slot);
  /// User code is about to replace the parameter by `values`, of its shape: elements that will
  /// change become their own masters. No effect in kFp32, which sees it by itself.
  void before_overwrite(ParamId param, const at::Tensor& values);

  /// The parameter's first element in a payload; nullptr when there is none in memory.
  [[nodiscard]] std::byte* element(ParamId param, PayloadKind kind) const;
  /// {exp_avg, exp_avg_sq} of a trainable parameter, as views of its payloads: float32, bfloat16
  /// or, for 8-bit codes, uint8. Empty where shown() is false.
  [[nodiscard]] std::vector<at::Tensor> moments(ParamId param) const;
  /// float32 of shape (blocks, 2), a view of the payload; nullopt in formats without blocks.
  [[nodiscard]] std::optional<at::Tensor> moment_scales(ParamId param) const;
  /// The fp32 master as a view of its payload; nullopt where it is kept otherwise, for fp32
  /// parameters, which are their own master, and for frozen ones.
  [[nodiscard]] std::optional<at::Tensor> master_view(ParamId param) const;
  /// The fp32 values of a trainable 16-bit parameter: master_view where there is one, else a copy.
  [[nodiscard]] std::optional<at::Tensor> master(ParamId param) const;

  /// Of any chunk's parameter, on the host: copies of {exp_avg, exp_avg_sq}, and of the scales
  /// where the format has them, in the types of the views above.
  [[nodiscard]] std::vector<at::Tensor> read_moments(ParamId param) const;
  /// The way back, of the tensors that read_moments gives.
  void write_moments(ParamId param, std::span<const at::Tensor> moments);

 private:
  /// Where a chunk's payloads lie at the moment, by PayloadKind; nullptr: it has none of that kind.
  using Memory = std::array<std::byte*, kNumPayloadKinds>;

  /// The parameter, or a copy where the host does not address it.
  [[nodiscard]] at::Tensor on_host(ParamId param) const;
  /// Calls `work` with copies of the chunk's payloads; what it made of them goes to the device.
  void with_copies(ChunkId chunk, StreamAccess access,
                   const std::function<void(const Memory&)>& work) const;
  [[nodiscard]] std::vector<std::byte> bytes_of_device(const std::byte* data,
                                                       std::size_t bytes) const;
  void copy_to_device(std::span<const std::byte> bytes, std::byte* target) const;
  void host_writes_home(ChunkId chunk) const;
  [[nodiscard]] Memory in_place(ChunkId chunk) const;
  [[nodiscard]] Memory with_weights(ChunkId chunk, Memory memory) const;
  void update_on_device(std::span<const AdamSegment> segments) const;
  void check_format(ChunkId chunk) const;
  void choose_places(const OptimizerStateOptions& options);
  void make_payloads();
  [[nodiscard]] bool has(ParamId param, PayloadKind kind) const;
  [[nodiscard]] bool has_master(ParamId param) const {
    return has(param, PayloadKind::kMaster) || has(param, PayloadKind::kRemainder);
  }
  [[nodiscard]] std::size_t payload_bytes(ChunkId chunk, PayloadKind kind) const;
  [[nodiscard]] std::size_t payload_bytes(ChunkId chunk, PayloadKind kind, std::size_t numel) const;
  /// Whether something that the chunk's update needs is on NVMe.
  [[nodiscard]] bool stored_in_part(ChunkId chunk) const;
  /// Calls `work` while the states of the chunk are in memory; and ...
  void with_memory(ChunkId chunk, StreamAccess access,
                   const std::function<void(const Memory&)>& work) const;
  /// ... its parameters and gradients too.
  void with_all_memory(ChunkId chunk, const std::function<void(const Memory&)>& work) const;
  /// Calls `work` with the parameter's first element at home, to be overwritten.
  void with_home(ParamId param, const std::function<void(std::byte*)>& work) const;
  [[nodiscard]] Memory resident(ChunkId chunk) const;
  [[nodiscard]] std::byte* element(const Memory& memory, ParamId param, PayloadKind kind) const;
  template <typename T>
  [[nodiscard]] T* data(const Memory& memory, ParamId param, PayloadKind kind) const {
    return reinterpret_cast<T*>(element(memory, param, kind));
  }
  [[nodiscard]] AdamSegment segment(const ParamUpdate& update, const Memory& memory) const;
  void add_segments(std::span<const ParamUpdate> updates, const Memory& memory,
                    std::vector<AdamSegment>& segments) const;
  [[nodiscard]] at::Tensor view(ParamId param, PayloadKind kind, at::ScalarType type) const;
  [[nodiscard]] ParamGeometry scales_geometry(ParamId param) const;
  [[nodiscard]] std::vector<at::Tensor> empty_moments(ParamId param) const;

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  std::span<const at::Tensor> params_;
  Executor& executor_;
  DeviceBackend* const device_;
  StoredWeights* const weights_;
  const StateFormat format_;
  std::vector<std::vector<PayloadKind>> kinds_;  // per chunk
  std::vector<bool> stored_;                     // per chunk
  std::unique_ptr<NvmeTier> nvme_;
  std::uint64_t seed_ = 0;
  std::vector<std::uint64_t> streams_;
};

}  // namespace castor
