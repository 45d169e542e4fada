#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/executor.h"
#include "core/memory_tier.h"
#include "io/chunk_stream.h"
#include "io/io_engines.h"
#include "io/scratch_space.h"
#include "io/transfer_queue.h"

namespace castor {

struct NvmeOptions {
  /// As ScratchOptions: one scratch file in each.
  std::vector<std::string> directories;
  std::string file_name = "castor.scratch";
  /// Bytes of all files together that may be taken.
  std::uint64_t budget_bytes = 0;
  IoEngineKind engine = IoEngineKind::kAuto;
  Verification verification = Verification::kOn;
  /// Whether activations that the host has no room for may take what is left of the budget.
  bool holds_activations = false;
  /// Size of a transfer, and how many are in flight: where devices reach their bandwidth
  /// (`castor io-bench` measures others).
  std::size_t block_bytes = std::size_t{1} << 20;
  std::size_t depth = 32;
};

/// A payload to be kept on NVMe. `name` is for messages: "exp_avg of chunk 12".
struct PayloadSpec {
  std::string name;
  std::size_t bytes = 0;
};

/// What lies on NVMe of one kind, to be worked on through a window of its own: kinds differ in how
/// large a slot must be, and in how many there is use for.
struct NvmeContent {
  std::string name;                              ///< for reports: "optimizer states"
  std::vector<std::vector<PayloadSpec>> chunks;  ///< chunks[i]: payloads of ChunkStream::use(i)
  std::size_t num_slots = 0;

  /// On NVMe, padding included.
  [[nodiscard]] std::uint64_t stored_bytes() const;
  /// In host memory, of a window with `slots` slots; 0 where there is no payload.
  [[nodiscard]] std::size_t window_bytes(std::size_t slots) const;
  [[nodiscard]] std::size_t window_bytes() const { return window_bytes(num_slots); }
};

/// The third tier: chunks' payloads of every kind in one set of scratch files, moved by one queue
/// and worked on through windows that the host tier pays for. Space is taken for all of them at
/// once, so that a full disk is found here.
class NvmeTier {
 public:
  /// Throws OutOfMemory (of tier nvme or host), and what ScratchSpace does. `host` and `executor`
  /// outlive this.
  NvmeTier(const NvmeOptions& options, std::span<const NvmeContent> contents, MemoryTier& host,
           Executor& executor);

  /// Of a content, by its place; nullptr where it has no payload.
  [[nodiscard]] ChunkStream* stream(std::size_t content) const noexcept {
    return streams_[content].get();
  }
  [[nodiscard]] std::uint64_t used_bytes() const { return space_.used_bytes(); }
  /// Of all streams together.
  [[nodiscard]] ChunkStream::Counts counts() const;
  /// "io_uring of depth 32, ...; 1 file of 2.00 GiB: /nvme/castor.scratch (O_DIRECT); optimizer
  /// states through a window of 1.00 GiB in 3 slots".
  [[nodiscard]] std::string description() const;

 private:
  ScratchSpace space_;
  // Per content; empty where it has no payload.
  std::vector<Block> windows_;
  TransferQueue queue_;
  std::vector<std::unique_ptr<ChunkStream>> streams_;
  std::vector<std::string> names_;
};

}  // namespace castor
