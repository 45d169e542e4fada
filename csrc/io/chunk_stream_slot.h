#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "io/chunk_stream.h"

namespace castor {

/// Returns the chunk's bytes on NVMe and in a slot, padding included.
[[nodiscard]] inline std::size_t padded_bytes_of(const StoredChunk& chunk) noexcept {
  std::size_t bytes = 0;
  for (const StoredPayload& payload : chunk) {
    bytes += payload.padded_bytes();
  }
  return bytes;
}

/// Memory for one chunk, and the state of the chunk in it. Guarded by the stream's mutex. While the
/// slot is busy, its transfers and its chunk's payloads belong to the thread that works on them.
struct ChunkStream::Slot {
  std::span<std::byte> memory;
  /// Chunk whose payloads are here, or on their way.
  std::optional<std::size_t> chunk;
  /// Chunk whose payloads come next, once the present ones have left; nobody else may take the
  /// slot.
  std::optional<std::size_t> coming;
  std::vector<std::thread::id> holders;
  bool busy = false;     // a thread works on its transfers without the mutex
  bool wanted = false;   // announced, not used yet
  bool changed = false;  // differs from NVMe, and no write of it is under way
  bool due = false;      // to be written, where changed, as soon as nobody holds it
  std::uint64_t last_use = 0;
  // Failure of the read, for every thread that holds the slot.
  std::exception_ptr failure;
  std::vector<std::span<std::byte>> padded;    // as transferred
  std::vector<std::span<std::byte>> payloads;  // as worked on
  std::vector<IoTransfer> reading;             // empty: nothing to wait for
  std::vector<IoTransfer> writing;

  [[nodiscard]] bool free() const noexcept { return !busy && holders.empty(); }
};

}  // namespace castor
