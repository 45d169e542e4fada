#pragma once

#include <cstddef>
#include <cstdint>
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

/// How many slots the window gets.
struct WindowSlots {
  std::size_t least = 1;
  std::size_t most = 3;  ///< reading, work and writing at once
};

/// The third tier: chunks' payloads in scratch files, worked on through a window that the host tier
/// pays for. Space is taken for all of them at once, so that a full disk is found here.
class NvmeTier {
 public:
  /// `chunks[i]` are the payloads of stream().use(i, ...). Takes the largest window of `slots` that
  /// `host` has room for. Throws OutOfMemory (of tier nvme or host), and what ScratchSpace does.
  NvmeTier(const NvmeOptions& options, const std::vector<std::vector<PayloadSpec>>& chunks,
           MemoryTier& host, Executor& executor, WindowSlots slots = {});

  /// Host bytes of the window for such chunks, with `num_slots` slots.
  [[nodiscard]] static std::size_t window_bytes(const std::vector<std::vector<PayloadSpec>>& chunks,
                                                std::size_t num_slots);
  /// The most of `slots` whose window is no larger than `room`; the least where none is.
  [[nodiscard]] static std::size_t slots_within(const std::vector<std::vector<PayloadSpec>>& chunks,
                                                WindowSlots slots, std::size_t room);
  /// What such chunks take on NVMe, padding included.
  [[nodiscard]] static std::uint64_t stored_bytes(
      const std::vector<std::vector<PayloadSpec>>& chunks);

  [[nodiscard]] ChunkStream& stream() noexcept { return stream_; }
  [[nodiscard]] const ChunkStream& stream() const noexcept { return stream_; }
  [[nodiscard]] std::uint64_t used_bytes() const { return space_.used_bytes(); }
  [[nodiscard]] std::size_t window_bytes() const noexcept { return window_.bytes(); }
  /// "io_uring, depth 32, ...; 1 file, 2.00 GiB: /nvme/castor.scratch (O_DIRECT); 3 slots".
  [[nodiscard]] std::string description() const;

 private:
  ScratchSpace space_;
  Block window_;
  TransferQueue queue_;
  ChunkStream stream_;
};

}  // namespace castor
