#include "io/nvme_tier.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

std::uint64_t padded_bytes(const std::vector<PayloadSpec>& chunk) {
  std::uint64_t bytes = 0;
  for (const PayloadSpec& payload : chunk) {
    bytes += (payload.bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
  }
  return bytes;
}

/// "exp_avg of chunk 0 and 23 more".
std::string payloads_named(std::span<const NvmeContent> contents) {
  const PayloadSpec* first = nullptr;
  std::size_t count = 0;
  for (const NvmeContent& content : contents) {
    for (const auto& chunk : content.chunks) {
      first = first == nullptr && !chunk.empty() ? &chunk.front() : first;
      count += chunk.size();
    }
  }
  return first == nullptr ? "nothing" : first->name + " and " + std::to_string(count - 1) + " more";
}

ScratchOptions space_for(const NvmeOptions& options, std::span<const NvmeContent> contents) {
  std::uint64_t bytes = 0;
  for (const NvmeContent& content : contents) {
    bytes += content.stored_bytes();
  }
  if (bytes > options.budget_bytes) {
    throw OutOfMemory(TierKind::kNvme, bytes, options.budget_bytes, options.budget_bytes,
                      "what the host has no room for (" + payloads_named(contents) + ") needs " +
                          format_bytes(bytes) +
                          " there; raise nvme_memory, raise host_memory, or use a smaller "
                          "optim_state_format");
  }
  return {.directories = options.directories,
          .in_memory = options.in_memory,
          .file_name = options.file_name,
          .bytes = bytes};
}

std::vector<Block> make_windows(std::span<const NvmeContent> contents, MemoryTier& host) {
  std::vector<Block> windows(contents.size());
  for (std::size_t i = 0; i < contents.size(); ++i) {
    if (const std::size_t bytes = contents[i].window_bytes()) {
      const std::size_t slots = contents[i].num_slots;
      windows[i] = host.allocate(
          bytes, "the window through which " + payloads_named(contents.subspan(i, 1)) +
                     " on NVMe are worked on holds the largest of them " +
                     (slots == 1 ? "once" : std::to_string(slots) + " times") +
                     "; raise host_memory, or make chunks smaller (chunk_bytes)");
    }
  }
  return windows;
}

std::span<std::byte> memory_of(const Block& block) { return {block.data(), block.bytes()}; }

std::unique_ptr<IoEngine> make_engine(const NvmeOptions& options, const ScratchSpace& space,
                                      std::span<const Block> windows) {
  std::vector<std::span<std::byte>> buffers;
  for (const Block& window : windows) {
    buffers.push_back(memory_of(window));
  }
  auto engine = make_io_engine(options.engine, space.io_files(), options.depth, buffers);
  return options.replace_engine ? options.replace_engine(std::move(engine)) : std::move(engine);
}

std::vector<StoredChunk> store(ScratchSpace& space, const NvmeContent& content) {
  std::vector<StoredChunk> stored(content.chunks.size());
  for (std::size_t i = 0; i < stored.size(); ++i) {
    for (const PayloadSpec& payload : content.chunks[i]) {
      stored[i].emplace_back(space, payload.name, payload.bytes);
    }
  }
  return stored;
}

}  // namespace

std::uint64_t NvmeContent::stored_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& chunk : chunks) {
    bytes += padded_bytes(chunk);
  }
  return bytes;
}

std::size_t NvmeContent::window_bytes(std::size_t slots) const {
  std::uint64_t largest = 0;
  for (const auto& chunk : chunks) {
    largest = std::max(largest, padded_bytes(chunk));
  }
  return largest == 0 ? 0 : ChunkStream::memory_bytes(largest, slots, kIoAlignment);
}

NvmeTier::NvmeTier(const NvmeOptions& options, std::span<const NvmeContent> contents,
                   MemoryTier& host, Executor& executor)
    : space_(space_for(options, contents)),
      windows_(make_windows(contents, host)),
      queue_(make_engine(options, space_, windows_), space_.transfer_files(), options.block_bytes),
      streams_(contents.size()) {
  for (std::size_t i = 0; i < contents.size(); ++i) {
    names_.push_back(contents[i].name);
    if (windows_[i]) {
      streams_[i] = std::make_unique<ChunkStream>(store(space_, contents[i]), queue_, executor,
                                                  memory_of(windows_[i]), space_.alignment(),
                                                  options.verification, contents[i].num_slots);
    }
  }
}

ChunkStream::Counts NvmeTier::counts() const {
  ChunkStream::Counts all;
  for (const auto& stream : streams_) {
    if (stream) {
      const ChunkStream::Counts counts = stream->counts();
      all.read_bytes += counts.read_bytes;
      all.written_bytes += counts.written_bytes;
    }
  }
  return all;
}

std::string NvmeTier::description() const {
  std::string text = queue_.description() + "; " + space_.description();
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i]) {
      text += "; " + names_[i] + " through a window of " + format_bytes(windows_[i].bytes()) +
              " in " + std::to_string(streams_[i]->num_slots()) + " slots";
    }
  }
  return text;
}

}  // namespace castor
