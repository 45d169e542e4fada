#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
  /// Directories with one scratch file each, as in ScratchOptions.
  std::vector<std::string> directories;
  /// Whether the tier is in pageable memory instead, where less host memory may be page-locked than
  /// payloads take (ScratchOptions).
  bool in_memory = false;
  std::string file_name = "castor.scratch";
  /// Bytes of all files together that may be used.
  std::uint64_t budget_bytes = 0;
  IoEngineKind engine = IoEngineKind::kAuto;
  /// Function that returns the engine to use in place of the one of that kind, which it is given;
  /// empty: that one.
  std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)> replace_engine;
  Verification verification = Verification::kOn;
  /// Whether activations that the host has no room for may take the rest of the budget.
  bool holds_activations = false;
  /// Bytes of a transfer. With these sizes devices reach their bandwidth (`castor io-bench`
  /// measures others); `depth` is the number of transfers in flight.
  std::size_t block_bytes = std::size_t{1} << 20;
  std::size_t depth = 32;
};

/// A payload to be kept on NVMe. `name` is for messages: "exp_avg of chunk 12".
struct PayloadSpec {
  std::string name;
  std::size_t bytes = 0;
};

/// Chunks of one kind on NVMe, which are worked on through a window of their own. Kinds differ in
/// how large a window buffer must be, and in how many are of use.
struct NvmeContent {
  std::string name;                              ///< for reports: "optimizer states"
  std::vector<std::vector<PayloadSpec>> chunks;  ///< chunks[i]: payloads of ChunkStream::use(i)
  std::size_t num_slots = 0;

  /// Returns the bytes on NVMe, padding included.
  [[nodiscard]] std::uint64_t stored_bytes() const;
  /// Returns the bytes of host memory for a window with `slots` window buffers; 0 where there is no
  /// payload.
  [[nodiscard]] std::size_t window_bytes(std::size_t slots) const;
  [[nodiscard]] std::size_t window_bytes() const { return window_bytes(num_slots); }
};

/// The third tier: chunks' payloads of every kind in one set of scratch files. One queue moves
/// them, and windows that the host tier pays for serve the work on them. The constructor takes
/// space for all of them, so that a full disk is found there.
class NvmeTier {
 public:
  /// Takes the space on NVMe and the windows. Throws OutOfMemory (of tier nvme or host), and what
  /// ScratchSpace throws. `host` and `executor` outlive this.
  NvmeTier(const NvmeOptions& options, std::span<const NvmeContent> contents, MemoryTier& host,
           Executor& executor);

  /// Returns the stream of a content, by its index; nullptr where the content has no payload.
  [[nodiscard]] ChunkStream* stream(std::size_t content) const noexcept {
    return streams_[content].get();
  }
  [[nodiscard]] std::uint64_t used_bytes() const { return space_.used_bytes(); }
  /// Returns the counts of all streams together.
  [[nodiscard]] ChunkStream::Counts counts() const;
  /// Returns text like "io_uring of depth 32, ...; 1 file of 2.00 GiB: /nvme/castor.scratch
  /// (O_DIRECT); optimizer states through a window of 1.00 GiB in 3 slots".
  [[nodiscard]] std::string description() const;

 private:
  ScratchSpace space_;
  // Per content; empty where the content has no payload.
  std::vector<Block> windows_;
  TransferQueue queue_;
  std::vector<std::unique_ptr<ChunkStream>> streams_;
  std::vector<std::string> names_;
};

}  // namespace castor
