#include "io/nvme_tier.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

using Chunks = std::vector<std::vector<PayloadSpec>>;

std::uint64_t padded(std::size_t bytes) {
  return (bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
}

std::uint64_t bytes_of(const std::vector<PayloadSpec>& chunk) {
  std::uint64_t bytes = 0;
  for (const PayloadSpec& payload : chunk) {
    bytes += padded(payload.bytes);
  }
  return bytes;
}

/// "exp_avg of chunk 0 and 23 more".
std::string chunks_named(const Chunks& chunks) {
  const PayloadSpec* first = nullptr;
  std::size_t count = 0;
  for (const auto& chunk : chunks) {
    first = first == nullptr && !chunk.empty() ? &chunk.front() : first;
    count += chunk.size();
  }
  return first == nullptr ? "nothing" : first->name + " and " + std::to_string(count - 1) + " more";
}

ScratchOptions space_for(const NvmeOptions& options, const Chunks& chunks) {
  const std::uint64_t bytes = NvmeTier::stored_bytes(chunks);
  if (bytes > options.budget_bytes) {
    throw OutOfMemory(TierKind::kNvme, bytes, options.budget_bytes, options.budget_bytes,
                      "what the host has no room for (" + chunks_named(chunks) + ") needs " +
                          format_bytes(bytes) +
                          " there; raise nvme_memory, raise host_memory, or use a smaller "
                          "optim_state_format");
  }
  return {.directories = options.directories, .file_name = options.file_name, .bytes = bytes};
}

Block make_window(const Chunks& chunks, MemoryTier& host, WindowSlots slots) {
  const std::size_t count = NvmeTier::slots_within(chunks, slots, host.ledger().available());
  return host.allocate(NvmeTier::window_bytes(chunks, count),
                       "the window through which " + chunks_named(chunks) +
                           " on NVMe are worked on holds the largest of them " +
                           (count == 1 ? "once" : std::to_string(count) + " times") +
                           "; raise host_memory, or make chunks smaller (chunk_bytes)");
}

std::vector<StoredChunk> store(ScratchSpace& space, const Chunks& chunks) {
  std::vector<StoredChunk> stored(chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    for (const PayloadSpec& payload : chunks[i]) {
      stored[i].emplace_back(space, payload.name, payload.bytes);
    }
  }
  return stored;
}

std::span<std::byte> memory_of(const Block& block) { return {block.data(), block.bytes()}; }

std::unique_ptr<IoEngine> make_engine(const NvmeOptions& options, const ScratchSpace& space,
                                      const Block& window) {
  const std::span<std::byte> buffers[] = {memory_of(window)};
  return make_io_engine(options.engine, space.io_files(), options.depth, buffers);
}

}  // namespace

std::size_t NvmeTier::window_bytes(const Chunks& chunks, std::size_t num_slots) {
  std::uint64_t largest = 0;
  for (const auto& chunk : chunks) {
    largest = std::max(largest, bytes_of(chunk));
  }
  return ChunkStream::memory_bytes(largest, num_slots, kIoAlignment);
}

std::size_t NvmeTier::slots_within(const Chunks& chunks, WindowSlots slots, std::size_t room) {
  std::size_t count = slots.most;
  while (count > slots.least && window_bytes(chunks, count) > room) {
    --count;
  }
  return count;
}

std::uint64_t NvmeTier::stored_bytes(const Chunks& chunks) {
  std::uint64_t bytes = 0;
  for (const auto& chunk : chunks) {
    bytes += bytes_of(chunk);
  }
  return bytes;
}

NvmeTier::NvmeTier(const NvmeOptions& options, const Chunks& chunks, MemoryTier& host,
                   Executor& executor, WindowSlots slots)
    : space_(space_for(options, chunks)),
      window_(make_window(chunks, host, slots)),
      queue_(make_engine(options, space_, window_), space_.transfer_files(), options.block_bytes),
      stream_(store(space_, chunks), queue_, executor, memory_of(window_), space_.alignment(),
              options.verification, slots.most) {}

std::string NvmeTier::description() const {
  return queue_.description() + "; " + space_.description() + "; window of " +
         format_bytes(window_.bytes()) + " in " + std::to_string(stream_.num_slots()) + " slots";
}

}  // namespace castor
